"""``config.yaml``: its keys, and the messages of mistakes."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farcall_common.errors import ConfigurationError
from farcall_common.worker_share import WorkerShare
from farcall_endpoint import Engine
from farcall_endpoint.agent.shell.launch import check_storages
from farcall_endpoint.config.files import FilesConfig, StorageConfig
from farcall_endpoint.config.from_globus import read_globus
from farcall_endpoint.config.providers import (
    BatchProviderConfig,
    KubernetesProviderConfig,
    LocalProviderConfig,
    MpiExecLauncherConfig,
    PBSProProviderConfig,
    SlurmProviderConfig,
    SrunLauncherConfig,
)
from farcall_endpoint.config.reader import parse_config, read_config
from farcall_endpoint.config.schema import Config, EngineConfig, LimitsConfig
from farcall_endpoint.config.template import write_config

SLURM = """\
engine:
  provider:
    type: SlurmProvider
"""


def parse(text: str) -> Config:
    return parse_config(text, source="config.yaml")


def slurm(*lines: str) -> str:
    return SLURM + "".join(f"    {line}\n" for line in lines)


def complaint(text: str) -> str:
    with pytest.raises(ConfigurationError) as caught:
        parse(text)
    return str(caught.value)


# -- what is read ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "# only a comment\n", "---\n", "engine: {}\n"])
def test_empty_file_has_all_defaults(text: str) -> None:
    config = parse(text)
    assert config == Config()
    assert config.engine.slots == len(os.sched_getaffinity(0))
    assert config.engine.provider == LocalProviderConfig()


def test_slurm_configuration_is_read() -> None:
    config = parse("""\
display_name: Ein Cluster
engine:
  max_workers_per_node: 32
  cores_per_worker: 2
  mem_per_worker: 3.5
  available_accelerators: 4
  cpu_affinity: block
  limits: {walltime: 00:20:00, memory: 3}
  provider:
    type: SlurmProvider
    partition: gpu
    account: "0123"
    mem_per_node: 128
    exclusive: no
    walltime: 10:00:00
    nodes_per_block: 2
    min_blocks: 2
    max_blocks: 5
    parallelism: 0.5
    worker_init: |
      module load python
      source ~/env/bin/activate
    launcher:
      type: SrunLauncher
      overrides: --cpu-bind=none
""")
    engine = config.engine
    provider = engine.provider
    assert isinstance(provider, SlurmProviderConfig)
    assert provider.account == "0123"
    assert provider.exclusive is False
    assert provider.walltime_s == 36_000, "YAML 1.1 would make a number of an unquoted 10:00:00"
    assert provider.first_blocks == 2
    assert provider.launcher == SrunLauncherConfig(overrides="--cpu-bind=none")
    assert provider.worker_init.splitlines()[0] == "module load python"
    assert engine.accelerators == ("0", "1", "2", "3")
    assert engine.mem_per_worker_bytes == int(3.5 * 1024**3)
    assert engine.limits.memory_bytes == 3 * 1024**3
    assert engine.limits.walltime_s == 1200


def test_configuration_defaults_depend_on_the_provider() -> None:
    assert LocalProviderConfig().first_blocks == 1
    assert SlurmProviderConfig().first_blocks == 1
    assert SlurmProviderConfig(init_blocks=0).first_blocks == 0
    assert SlurmProviderConfig(min_blocks=3, max_blocks=4).first_blocks == 3
    assert LocalProviderConfig().walltime_s is None
    assert KubernetesProviderConfig(image="x").nodes_per_block == 1
    assert EngineConfig(available_accelerators=("GPU-1", "GPU-2")).accelerators == ("GPU-1", "GPU-2")
    assert LimitsConfig().walltime_s is LimitsConfig().memory_bytes is None
    assert EngineConfig().mem_per_worker_bytes is None


def test_anchors_and_merges_may_be_used() -> None:
    config = parse("""\
engine:
  provider: &p
    type: SlurmProvider
    max_blocks: 7
    launcher: {type: SimpleLauncher}
""")
    assert config.engine.provider.max_blocks == 7
    merged = parse("engine:\n  limits: {<<: {memory: 2}, walltime: '00:00:10'}\n")
    assert merged.engine.limits == LimitsConfig(memory=2.0, walltime="00:00:10")


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "place", "words"),
    [
        # names
        (
            "heartbeat_perod: 3",
            "1:1",
            "unknown field `heartbeat_perod` in the file. (Did you mean `heartbeat_period`?)",
        ),
        (
            "engine:\n  max_worker_per_node: 3",
            "2:3",
            "unknown field `max_worker_per_node` in engine. (Did you mean `max_workers_per_node`?)",
        ),
        ("engine:\n  max_blocks: 3", "2:3", "It belongs under engine.provider."),
        ("engine:\n  environments:\n    type: [uv]", "3:5", "Did you mean `types`?"),
        ("engine:\n  walltime: 3", "2:3", "It belongs under engine.limits or under engine.provider."),
        ("provider: {}", "1:1", "It belongs under engine."),
        ("engine:\n  display_name: x", "2:3", "It belongs at the top."),
        ("engine:\n  job_status_kwargs: {}", "2:3", "Write its max_idletime under engine"),
        ("engine:\n  qwertz: 1", "2:3", "The fields here are type, max_workers_per_node, "),
        (
            slurm("queue: x"),
            "4:5",
            "Only PBSProProvider and TorqueProvider and LSFProvider and GridEngineProvider know it.",
        ),
        (slurm("launcher:", "  type: SrunLauncher", "  bind_cmd: x"), "6:7", "Only MpiExecLauncher knows it."),
        # kinds
        (
            "engine:\n  type: GlobusComputeEngine",
            "2:9",
            "engine.type must be FarcallEngine, not 'GlobusComputeEngine'. (Write FarcallEngine",
        ),
        ("engine: {provider: {type: SlurmProvder}}", "1:27", "Did you mean SlurmProvider?"),
        (
            "engine: {provider: {max_blocks: 2}}",
            "1:20",
            "engine.provider lacks `type`. (Write type: and LocalProvider, ",
        ),
        ("engine: {provider: SlurmProvider}", "1:20", "engine.provider must be a section with a type: LocalProvider, "),
        ("engine: {provider: {type: KubernetesProvider}}", "1:20", "lacks `image`. (Write image: and text.)"),
        (slurm("launcher: {type: SrunLauncer}"), "4:22", "engine.provider.launcher.type must be SimpleLauncher, "),
        # values
        (
            "engine: {max_workers_per_node: 0}",
            "1:32",
            "engine.max_workers_per_node must be a whole number from 1 to 4,096, not 0",
        ),
        ("engine: {prefetch: many}", "1:20", "must be a whole number from 0 to 4,096, not 'many'"),
        ("engine: {prefetch: 1.5}", "1:20", "must be a whole number from 0 to 4,096, not 1.5"),
        ("engine: {cpu_affinity: blok}", "1:24", "not 'blok'. (Did you mean block?)"),
        (
            "engine: {available_accelerators: [a, 1]}",
            "1:38",
            'available_accelerators[1] must be text, not 1. (Put quotes around it: "1")',
        ),
        ("engine: {available_accelerators: [a, a]}", "1:34", "an accelerator is listed twice"),
        (
            "engine: {worker_port_range: [5000]}",
            "1:29",
            "must be a list of 2, each a whole number from 1,024 to 65,535",
        ),
        ("engine: {worker_port_range: [80, 5000]}", "1:30", "engine.worker_port_range[0] must be"),
        ("debug: perhaps", "1:8", "debug must be true or false, not 'perhaps'"),
        ("heartbeat_period:", "1:18", "not nothing. (Give it a value, or remove the line.)"),
        ("display_name: 17", "1:15", 'must be text, not 17. (Put quotes around it: "17")'),
        ("heartbeat_period: .nan", "1:19", "must be a number from 0.1 to 300"),
        (slurm("walltime: 30"), "4:15", "must be like 01:30:00 (hours:minutes:seconds), not 30."),
        (slurm("walltime: 1-00:00:00"), "4:15", "must be like 01:30:00"),
        (slurm("walltime: 00:61:00"), "4:15", "must be like 01:30:00"),
        (
            slurm("account: 0123"),
            "4:14",
            'engine.provider.account must be text, not 0123. (Put quotes around it: "0123")',
        ),
        (slurm("parallelism: 2"), "4:18", "must be a number above 0 and up to 1, not 2"),
        (slurm("parallelism: 0"), "4:18", "must be a number above 0 and up to 1, not 0"),
        (
            "engine: {provider: {type: CondorProvider, environment: {A: 1}}}",
            "1:60",
            "environment.A must be text, not 1",
        ),
        # what does not go together
        (slurm("min_blocks: 5"), "4:17", "min_blocks (5) is more than max_blocks (1). (Raise max_blocks"),
        (
            slurm("max_blocks: 3", "init_blocks: 4"),
            "5:18",
            "init_blocks (4) is not between min_blocks (0) and max_blocks (3)",
        ),
        (
            slurm("max_blocks: 3", "min_blocks: 2", "init_blocks: 1"),
            "6:18",
            "init_blocks (1) is not between min_blocks (2)",
        ),
        (
            slurm("nodes_per_block: 2"),
            "4:22",
            "SingleNodeLauncher uses the first of a block's 2 nodes only. (Choose a launcher",
        ),
        (slurm("walltime: 00:00:00"), "4:15", "ends immediately"),
        ("engine: {provider: {type: LSFProvider, request_by_nodes: false}}", "1:58", "no field gives their number"),
        (
            "engine: {provider: {type: KubernetesProvider, image: x, init_cpu: 9}}",
            "1:67",
            "init_cpu (9) is more than max_cpu (2)",
        ),
        ("engine: {heartbeat_period: 60, heartbeat_threshold: 30}", "1:53", "every pause would count as a loss"),
        ("engine: {limits: {walltime: 00:00:00}}", "1:29", "no task can run in 00:00:00"),
        (slurm("walltime: 00:10:00") + "  drain_period: 600", "5:17", "not less than the lifetime of a block (600 s)"),
        (
            slurm("walltime: 00:10:00") + "  limits: {walltime: 01:00:00}",
            "5:11",
            "limits.walltime (01:00:00) is longer than",
        ),
        ("engine: {worker_port_range: [6000, 5000]}", "1:29", "the first port is above the last. (Swap them.)"),
        # YAML itself
        ('display_name: "\\ud800"', "1:15", "a lone surrogate"),
        ("engine: {provider", "1:18", "not YAML: "),
        ("a: b: c", "1:5", "mapping values are not allowed here"),
        ("engine:\n\tprefetch: 1", "2:1", "a tab, which YAML does not allow here. (Indent with spaces.)"),
        (
            "engine:\n  prefetch: 1\n  scheduling: random\n  prefetch: 2",
            "4:3",
            "duplicate field prefetch; the first is in line 2",
        ),
        ("1: 2", "1:1", "the name of a field must be text"),
        ("[1]: 2", "1:1", "the name of a field must be text"),
        ("- a list", "1:1", "the file must be a section with fields, not a list of 1"),
        ("just text", "1:1", "the file must be a section with fields, not 'just text'"),
        ("a: !!python/object:os.system x", "1:4", "could not determine a constructor"),
        ("a: 1\n---\nb: 2", "2:1", "expected a single document"),
    ],
)
def test_an_error_names_its_place_and_the_fix(text: str, place: str, words: str) -> None:
    said = complaint(text)
    assert said.startswith(f"[CONFIGURATION] config.yaml:{place}: "), said
    assert words in said


def test_all_mistakes_are_reported_in_the_order_of_the_file() -> None:
    text = slurm("queue: x", "walltime: 30") + "  prefetch: many\n  address: 5\n  address2: 5\ndisplay_name: 17\n"
    assert complaint(text).splitlines() == [
        "[CONFIGURATION] config.yaml has 6 mistakes:",
        *(line for line in complaint(text).splitlines() if line.startswith("config.yaml:")),
    ]
    places = re.findall(r"^config.yaml:(\d+):", complaint(text), flags=re.MULTILINE)
    assert places == ["4", "5", "6", "7", "8", "9"]
    said = complaint("engine: {a: 1, a: 2}\n1: 2\n")
    assert "config.yaml has 2 mistakes" in said, "also of those that YAML allows"
    assert "unknown field `<<`" not in complaint("engine:\n  limits: {<<: {memory: 2}, wall: 1}\n")


@pytest.mark.parametrize("is_globus", [False, True])
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[" * 5000, "nested too deeply"),
        ("- " * 5000, "nested too deeply"),
        ("{a: " * 5000, "nested too deeply"),
        (f"display_name: {'a' * 3_000_000}", "more than 256 KiB"),
        (f"heartbeat_interval: {'1' * 5000}", "too large"),
        ("heartbeat_interval: 1e999", "too large"),
        ("{#" * 100_000, "not YAML"),
        ("{% %}" * 50_000, "statements of a template"),
        (f"display_name: {{{{{' ' * 200_000}", "not YAML"),
    ],
    ids=["lists", "block-lists", "objects", "text", "int", "float", "comments", "statements", "placeholder"],
)
def test_size_and_depth_are_limited(tmp_path: Path, text: str, words: str, is_globus: bool) -> None:
    (file := tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ConfigurationError) as caught:
        read_globus(file) if is_globus else read_config(file)
    assert words in str(caught.value) or not is_globus
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("name", ["max_idletime_s", "block_failure_period_s", "cores_per_worker"])
def test_an_engine_refuses_numbers_that_are_none(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        Engine(**cast("Any", {name: float("nan")}))


def test_invalid_files_are_refused_with_our_message(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    with pytest.raises(ConfigurationError, match=r"cannot be read: No such file"):
        read_config(path)
    path.write_bytes(b"display_name: \xff\n")
    with pytest.raises(ConfigurationError, match=r"is not UTF-8 text: .* at byte 14"):
        read_config(path)
    path.write_bytes(b"display_name: \x00\n")
    with pytest.raises(ConfigurationError, match="is not YAML"):
        read_config(path)
    said = complaint("engine: &loop {provider: *loop}")
    assert "engine.provider" in said


def outcome(text: str) -> str:
    """The messages; nothing if the file is good."""
    try:
        parse(text)
    except ConfigurationError as error:
        return str(error)
    return ""


@given(st.text(max_size=200))
def test_arbitrary_text_raises_only_configuration_errors(text: str) -> None:
    said = outcome(text)
    assert not said or said.startswith("[CONFIGURATION] config.yaml")


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["type", "engine", "a"]), inner),
    max_leaves=6,
)


@given(st.fixed_dictionaries({}, optional=dict.fromkeys(Config.__struct_fields__, _VALUES)))
def test_arbitrary_values_raise_only_configuration_errors(data: dict[str, Any]) -> None:
    said = outcome(json.dumps(data))
    assert not said or re.match(r"\[CONFIGURATION\] config.yaml(:1:| has \d+ mistakes:\nconfig.yaml:1:)", said)


# -- what is written ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config",
    [
        Config(),
        Config(display_name="Ein Rechner", engine=EngineConfig(max_workers_per_node=3)),
        Config(display_name='08: #1 "x"\n\ty ü', debug=True, log_format="json", heartbeat_period=0.5),
        Config(display_name="1e5"),
        Config(display_name="10:00:00"),
        Config(
            engine=EngineConfig(
                available_accelerators=("a", "b"),
                working_dir="/scratch/me",
                limits=LimitsConfig(walltime="00:10:00"),
                provider=PBSProProviderConfig(
                    walltime="10:00:00",
                    nodes_per_block=4,
                    worker_init="module load x\necho 'a: b'\n",
                    launcher=MpiExecLauncherConfig(overrides="--depth=64"),
                ),
            )
        ),
    ],
)
def test_written_configuration_round_trips(tmp_path: Path, config: Config) -> None:
    path = tmp_path / "config.yaml"
    write_config(path, config)
    assert read_config(path) == config


def test_new_file_has_comments_and_valid_suggestions(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    write_config(path, Config(display_name="Mine"))
    text = path.read_text()
    assert "display_name: Mine" in text
    uncommented = parse(re.sub(r"^  #(?! \S)", "  ", text, flags=re.MULTILINE))
    assert uncommented.engine.max_workers_per_node == Config().engine.slots
    assert uncommented.engine.limits == LimitsConfig(walltime="01:00:00", memory=4.0)
    assert uncommented.engine.accelerators == ("0", "1")


def test_every_batch_provider_ends_its_blocks() -> None:
    for kind in BatchProviderConfig.__subclasses__():
        assert kind().walltime_s == 1800


def test_worker_share_is_what_a_task_has() -> None:
    provider = SlurmProviderConfig(account="phys-7", cores_per_node=64, gpus_per_node=4)
    engine = EngineConfig(cores_per_worker=8, available_accelerators=("0,1", "2,3"), provider=provider)
    assert engine.worker_share == WorkerShare(cores=8, gpus=2, node_cores=64, node_gpus=4, account="phys-7")
    assert EngineConfig().worker_share == WorkerShare(node_cores=len(os.sched_getaffinity(0)))


def test_signed_functions_take_data_as_arguments() -> None:
    assert not parse("engine: {}").data_only
    assert parse("allowed_functions: []").data_only
    assert parse("allowed_signers: signers").data_only
    listed = "allowed_signers: signers\nengine:\n  allowed_serializers: "
    assert parse(listed + "['*Code', JSONData]").allowed_signers == "signers"
    for names in ("['*Code', '*Data']", "[DillCode, PickleDataBase64]", "[DillCode, AllDataStrategies]"):
        with pytest.raises(ConfigurationError, match="arguments run code"):
            parse(listed + names)


def test_files_are_copied_unless_the_owner_or_the_provider_forbids_it() -> None:
    pods = KubernetesProviderConfig(image="i")
    shared = KubernetesProviderConfig(image="i", persistent_volumes=(("claim", "/data"),))
    assert Config().files_refusal == ""
    assert "files.enabled" in Config(files=FilesConfig(enabled=False)).files_refusal
    assert "persistent_volumes" in Config(engine=EngineConfig(provider=pods)).files_refusal
    assert Config(engine=EngineConfig(provider=shared)).files_refusal == ""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("files: {node_cache: 10, node_dir: scratch}", "'scratch' is not an absolute path"),
        ("files: {node_dir: /scratch}", "nodes keep no copies"),
        ("files: {node_cache: -1}", "files.node_cache"),
        ("files: {storages: [{url: lab}]}", "files.storages[0]: 'lab' is not the beginning of a URL"),
        ("files: {storages: [{url: 's3:///raw'}]}", "is not the beginning of a URL"),
        ("files: {storages: [{url: 's3://lab/*'}]}", "has *, ? or #"),
        ("files: {storages: [{url: 'https://lab.org/raw?version=1'}]}", "has *, ? or #"),
        ("files: {storages: [{url: 'https://Lab.org'}]}", "(Write lab.org.)"),
        ("files: {storages: [{url: 'https://lab', write: true}]}", "https:// has no options, and cannot be written"),
        ("files: {storages: [{url: 's3://lab', option: {}}]}", "Did you mean `options`?"),
        ("files: {storages: [{url: 'file://data'}]}", "has no absolute path. (Write file:///path.)"),
        ("files: {storages: [{url: 'file:///data/../etc'}]}", "has no absolute path"),
        ("files: {storages: [{url: 'file:///data', write: true}]}", "other endpoints cannot write it"),
        ("files: {cache: 0}", "files.cache"),
    ],
)
def test_mistakes_in_files_are_named(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(text)
    with pytest.raises(ConfigurationError) as caught:
        read_config(file)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"endpoin": "x"}, "endpoin"),
        ({"region": "$FARCALL_TEST_NOT_SET"}, "variable FARCALL_TEST_NOT_SET is not set"),
        ({"region": "${FARCALL_TEST_NOT_SET}"}, "variable FARCALL_TEST_NOT_SET is not set"),
    ],
)
def test_an_endpoint_with_impossible_options_of_a_storage_does_not_start(options: dict[str, str], message: str) -> None:
    config = Config(files=FilesConfig(storages=(StorageConfig(url="s3://lab/raw", options=options),)))
    with pytest.raises(ConfigurationError, match=message):
        check_storages(config)
    check_storages(Config())
