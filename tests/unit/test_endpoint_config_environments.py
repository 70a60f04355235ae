"""``config.yaml``: containers, Python prefixes and packages for tasks."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farcall_common.environments import TYPES, UV, Environment
from farcall_common.errors import ConfigurationError
from farcall_endpoint.config.environments import ContainerType, EnvironmentsConfig, Technology
from farcall_endpoint.config.reader import check_binds, parse_config, read_config
from farcall_endpoint.config.schema import Config, EngineConfig
from farcall_endpoint.config.settings import EnvironmentSettings
from farcall_endpoint.config.template import write_config

HERE = Path("/home/me/.farcall/endpoints/here")


def parse(text: str) -> Config:
    return parse_config(text, source="config.yaml")


def test_the_technologies_are_those_of_environments() -> None:
    assert set(get_args(Technology)) == set(TYPES)
    assert set(get_args(ContainerType)) == set(TYPES) - {UV}


def test_defaults_are_those_of_the_settings() -> None:
    settings = EngineConfig().environment_settings(HERE)
    assert settings == EnvironmentSettings(cache_dir=str(HERE / "environments"), cache_bytes=20 * 2**30)
    assert EngineConfig().default_environment is None


def test_globus_fields_name_the_environment_of_the_endpoint() -> None:
    engine = parse("""\
display_name: Containers
engine:
  max_workers_per_node: 2
  container_type: apptainer
  container_uri: docker://python:3.12-slim
  container_cmd_options: --cleanenv --bind "/a b:/c"
  provider:
    type: SlurmProvider
""").engine
    settings = engine.environment_settings(HERE)
    assert settings.default == Environment(type="apptainer", location="docker://python:3.12-slim")
    assert settings.options == ("--cleanenv", "--bind", "/a b:/c")
    for text in ("engine: {container_type: null, container_uri: null}", "engine: {container_cmd_options: null}"):
        assert parse(text).engine.default_environment is None


def test_all_settings_reach_the_managers() -> None:
    settings = parse("""\
engine:
  max_tasks_per_worker: 1
  environments:
    types: [venv, uv]
    locations: ["/sw/*"]
    binds: [/data, "/scratch/me:/scratch", "/sw:/opt/sw:ro"]
    network: false
    cache_dir: /local/cache
    cache_size: 1.5
    idle_time: 60
    memory: 4
    eviction: lru
    extra_workers: 3
    start_limit: 30
    fork: false
    source_builds: true
    index_url: https://mirror.example.org/simple
""").engine.environment_settings(HERE)
    assert settings == EnvironmentSettings(
        types=("venv", "uv"),
        locations=("/sw/*",),
        binds=("/data", "/scratch/me:/scratch", "/sw:/opt/sw:ro"),
        network=False,
        cache_dir="/local/cache",
        cache_bytes=3 * 2**29,
        idle_s=60.0,
        memory_bytes=4 * 2**30,
        eviction="lru",
        extra_workers=3,
        start_limit_s=30.0,
        fork=False,
        tasks_per_worker=1,
        source_builds=True,
        index_url="https://mirror.example.org/simple",
    )


@pytest.mark.parametrize("policy", ["warming-aware", "random", "round-robin", "bin-packing", "my_lab.policies:Nearest"])
def test_a_policy_is_one_of_ours_or_a_class(policy: str) -> None:
    assert parse(f"engine: {{scheduling: '{policy}'}}").engine.scheduling == policy


@pytest.mark.parametrize(
    ("text", "place", "words"),
    [
        ("engine: {container_uri: /x.sif}", "1:25", "container_uri without container_type. (Write container_type"),
        ("engine: {container_cmd_options: --nv}", "1:33", "container_cmd_options without container_type"),
        ("engine: {container_type: docker}", "1:26", "container_type without container_uri. (Write container_uri"),
        ("engine: {container_type: none}", "1:26", "not 'none'. (Leave it out: tasks run in the endpoint's own Python"),
        ("engine: {container_type: custom}", "1:26", "not 'custom'. (Name the technology, and write its options"),
        ("engine: {container_type: uv}", "1:26", "not 'uv'. (Leave it out: a task names its packages"),
        ("engine: {container_type: aptainer}", "1:26", "Did you mean apptainer?"),
        (
            "engine: {container_type: docker, container_uri: x, environments: {types: [podman]}}",
            "1:26",
            "environments.types does not allow docker. (Add docker to environments.types",
        ),
        (
            "engine: {container_type: venv, container_uri: /x, container_cmd_options: --nv}",
            "1:74",
            "venv has no command. (Remove container_cmd_options.)",
        ),
        (
            'engine: {container_type: docker, container_uri: x, container_cmd_options: "\'"}',
            "1:75",
            "not as in a shell: No closing quotation",
        ),
        ("engine: {container_type: venv, container_uri: envs/a}", "1:47", "takes the absolute path of the directory"),
        ("engine: {container_type: docker, container_uri: --rm}", "1:49", "begins with a dash"),
        (
            "engine: {container_type: apptainer, container_uri: python.sif}",
            "1:52",
            "takes a URI (docker://NAME) or an absolute path of the endpoint's nodes, not 'python.sif'",
        ),
        (
            "engine: {container_type: docker, container_uri: x, provider: {type: KubernetesProvider, image: y}}",
            "1:26",
            "tasks run in the pod's image. (Write the image as provider.image.)",
        ),
        ("engine: {scheduling: roundrobin}", "1:22", "'roundrobin' is not a policy. (Did you mean 'round-robin'?)"),
        ("engine: {scheduling: 'my-lab:X'}", "1:22", "is not a policy. (Write warming-aware, random, "),
        ("engine: {max_tasks_per_worker: 0}", "1:32", "must be a whole number from 1 to 1,000,000, not 0"),
        ("engine: {environments: {types: [docker, docker]}}", "1:32", "a technology is listed twice"),
        ("engine: {environments: {types: [rkt]}}", "1:33", "engine.environments.types[0] must be apptainer, "),
        ("engine: {environments: {binds: [data]}}", "1:33", "'data' is not an absolute path"),
        ("engine: {environments: {binds: [/a/../b]}}", "1:33", "'/a/../b' is not an absolute path"),
        ("engine: {environments: {binds: ['/a:b']}}", "1:33", "'b' is not an absolute path"),
        ("engine: {environments: {binds: ['/a:ro']}}", "1:33", "'ro' is not an absolute path"),
        ("engine: {environments: {binds: ['/a:']}}", "1:33", "'/a:' is not a bind. (Write /SOURCE, "),
        ("engine: {environments: {binds: ['/a:/b:rw']}}", "1:33", "'/a:/b:rw' is not a bind"),
        ("engine: {environments: {binds: ['/a:/b:ro:z']}}", "1:33", "is not a bind"),
        ("engine: {environments: {binds: [/]}}", "1:33", "would replace the container's root"),
        ("engine: {environments: {binds: [/a, '/b:/a/']}}", "1:37", "two binds have the target /a"),
        ("engine: {environments: {binds: [/a, '/b:/usr/']}}", "1:37", "would hide /usr of the container"),
        (
            "engine: {environments: {binds: ['/b:/usr/./lib']}}",
            "1:33",
            "(Write another target, such as /b:/mnt/usr/lib.)",
        ),
        ("engine: {environments: {binds: [/proc/self]}}", "1:33", "would hide /proc/self of the container"),
        ("engine: {environments: {index_url: pypi}}", "1:36", "'pypi' is not an index. (Write https://HOST/simple"),
        ("engine: {environments: {index_url: 'https://['}}", "1:36", "is not an index"),
        ("engine: {environments: {index_url: 'https://me:x@host/simple'}}", "1:36", "would be visible to other users"),
        ("engine: {environments: {cache_size: 0}}", "1:37", "must be a number above 0"),
        ("engine: {environments: {eviction: fifo}}", "1:35", "must be greedy-dual or lru, not 'fifo'"),
        ("engine: {idle_time: 3}", "1:10", "It belongs under engine.environments."),
    ],
)
def test_an_error_names_its_place_and_the_fix(text: str, place: str, words: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse(text)
    said = str(caught.value)
    assert said.startswith(f"[CONFIGURATION] config.yaml:{place}: "), said
    assert words in said


def test_directories_of_binds_must_exist_where_this_machine_is_the_node(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    binds = f"  environments:\n    binds:\n      - {tmp_path}:/data\n      - {tmp_path}/none:/more:ro\n"
    file.write_text(f"engine:\n{binds}")
    with pytest.raises(ConfigurationError) as caught:
        check_binds(read_config(file), file)
    assert f"{file}:5:9: engine.environments.binds: {tmp_path}/none does not exist on this machine" in str(caught.value)
    file.write_text(f"engine:\n{binds}      - {tmp_path}/neither:/last\n")
    with pytest.raises(ConfigurationError) as caught:
        check_binds(read_config(file), file)
    assert [f"{file}:{line}:9: " in str(caught.value) for line in (4, 5, 6)] == [False, True, True]
    file.write_text(f"engine:\n  provider: {{type: SlurmProvider}}\n{binds}")
    check_binds(read_config(file), file)
    file.write_text(f"engine: {{environments: {{binds: [{tmp_path}, '/dev/null:/etc/resolv.conf']}}}}")
    check_binds(read_config(file), file)


@given(st.text(max_size=40), st.text(max_size=40), st.text(max_size=40))
def test_arbitrary_values_raise_only_configuration_errors(bind: str, index: str, options: str) -> None:
    engine = {
        "container_type": "docker",
        "container_uri": "x",
        "container_cmd_options": options,
        "environments": {"binds": [bind], "index_url": index},
    }
    with contextlib.suppress(ConfigurationError):
        parse(json.dumps({"engine": engine}))


def test_written_configuration_round_trips(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    config = Config(
        engine=EngineConfig(
            container_type="charliecloud",
            container_uri="/images/root",
            max_tasks_per_worker=1,
            environments=EnvironmentsConfig(types=("charliecloud", "uv"), binds=("/data:/data:ro",), cache_size=2.0),
        )
    )
    write_config(path, config)
    assert read_config(path) == config
