"""Configurations of Globus Compute: what our reader says about them, and what ``--from-globus`` makes of them."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Final

import psutil
import pytest
from typer.testing import CliRunner

from farcall_common.errors import ConfigurationError
from farcall_endpoint.agent.shell.nodes import make_network, own_addresses
from farcall_endpoint.app.cli import app
from farcall_endpoint.config.from_globus import read_globus
from farcall_endpoint.config.providers import LocalProviderConfig, SlurmProviderConfig
from farcall_endpoint.config.reader import parse_config, read_config
from farcall_endpoint.config.schema import Config, InterfaceConfig
from farcall_endpoint.config.template import write_config


def slurm(interface: str, *engine: str, top: str = "", provider: str = "", launcher: str = "type: SrunLauncher") -> str:
    """A configuration for Slurm with further lines of its sections."""
    return "".join(
        f"{line}\n"
        for line in (
            *([top] if top else ()),
            "engine:",
            "  type: GlobusComputeEngine",
            *(f"  {line}" for line in engine),
            f"  address: {{type: address_by_interface, ifname: {interface}}}",
            "  provider:",
            "    type: SlurmProvider",
            f"    launcher: {{{launcher}}}",
            "    account: my-group",
            "    worker_init: |",
            "      module load python",
            f"    scheduler_options: '#SBATCH --mail-type=NONE'{provider}",
            "    init_blocks: 0",
            "    walltime: 00:20:00",
        )
    )


MPI: Final = slurm("ib0", "mpi_launcher: srun", launcher="type: SimpleLauncher", provider="\n    nodes_per_block: 4")
SITES: Final = {
    "anvil": slurm("ib0", "max_workers_per_node: 3", top="amqp_port: 443"),
    "bebop": slurm("ib0", "worker_debug: false"),
    "bridges-2": slurm("ens3f0", "worker_debug: false", provider="\n    nodes_per_block: 2"),
    "delta": slurm("eth6.560", "max_workers_per_node: 3", top="amqp_port: 443"),
    "expanse": slurm("ib0", "worker_debug: false", provider="\n    partition: normal"),
    "expanse-mpi": MPI.replace("GlobusComputeEngine", "GlobusMPIEngine"),
    "faster": slurm(
        "eno8303",
        "strategy: {type: SimpleStrategy, max_idletime: 75}",
        "worker_debug: false",
        top="amqp_port: 443",
        provider="\n    mem_per_node: 64\n    cmd_timeout: 90",
    ),
    "frontera": slurm("ib0", "worker_debug: false", provider="\n    nodes_per_block: 2\n    cmd_timeout: 90"),
    "kubernetes": """\
heartbeat_period: 20
heartbeat_threshold: 150
engine:
  type: GlobusComputeEngine
  encrypted: false
  address: {type: address_by_route}
  provider:
    type: KubernetesProvider
    image: lab/tasks:3
    secret: registry
    namespace: science
    worker_init: python -V
    init_mem: 512Mi
    max_mem: 2048Mi
    init_cpu: 1
    max_cpu: 2
    max_blocks: 3
""",
    "midway": slurm("bond0", "label: Midway", provider="\n    nodes_per_block: 2"),
    "midway-apptainer": slurm(
        "bond0",
        "label: Midway",
        "container_type: apptainer",
        "container_uri: docker://lab/tasks",
        "container_cmd_options: -H /home/$USER",
    ),
    "ospool": """\
engine:
  type: GlobusComputeEngine
  encrypted: False
  worker_logdir_root: /tmp/l
  working_dir: /tmp/w
  provider:
    type: CondorProvider
    max_blocks: 1
    scheduler_options: >
      +ProjectName = "lab"
      +SingularityImage = "/images/tasks.sif"
""",
    "perlmutter": slurm(
        "hsn0", "worker_debug: false", launcher="type: SrunLauncher, overrides: -c 64", provider="\n    cmd_timeout: 90"
    ),
    "polaris": """\
engine:
  type: GlobusComputeEngine
  max_workers_per_node: 4
  address:
    type: address_by_interface
    ifname: hsn0
  provider:
    type: PBSProProvider
    launcher:
      type: MpiExecLauncher
      bind_cmd: --cpu-bind
      overrides: --ppn 1
    account: lab
    queue: debug
    cpus_per_node: 32
    select_options: ngpus=4
    scheduler_options: "#PBS -l filesystems=home"
    walltime: 01:00:00
    max_blocks: 2
""",
    "stampede3": slurm("ibp10s0", "max_workers_per_node: 3", provider="\n    cmd_timeout: 90"),
    "ai-cluster": slurm(
        "ens2f1", "label: ai", "worker_debug: false", launcher="type: SrunLauncher, overrides: 'hostname; srun -n2'"
    ),
    "worker-pinning": """\
engine:
  type: GlobusComputeEngine
  available_accelerators: 4
  max_workers_per_node: 4
  provider: {type: LocalProvider, init_blocks: 1, min_blocks: 0, max_blocks: 1}
""",
}
assert len(SITES) == 17


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "globus.yaml"


def moved(file: Path, text: str) -> tuple[Config, list[str]]:
    file.write_text(text)
    config, notes = read_globus(file)
    return config, [str(note) for note in notes]


@pytest.mark.parametrize("name", SITES)
def test_the_configuration_of_a_site_is_moved_and_every_loss_is_named(file: Path, name: str) -> None:
    text = SITES[name]
    config, notes = moved(file, text)
    write_config(file, config)
    assert read_config(file) == config
    shown = "\n".join(notes)
    for field in ("amqp_port", "encrypted", "label", "mpi_launcher", "strategy", "worker_debug", "worker_logdir_root"):
        assert (f"{field}: " in shown) == (f"{field}: " in text), "what the file has is named, and nothing else"
    for line, row in enumerate(text.splitlines(), 1):
        if "type: Globus" in row:
            assert f"line {line}: engine.type: left out: there is one engine" in shown
    if "ifname" in text:
        assert isinstance(config.engine.address, InterfaceConfig)
        assert f"ifname: {config.engine.address.interface}" in text


@pytest.mark.parametrize("name", SITES)
def test_all_mistakes_of_a_file_are_reported_at_once(name: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse_config(SITES[name], source="c")
    said = str(caught.value)
    assert "FarcallEngine" in said or "FARCALL_MPI_LAUNCHER" in said
    for field in ("amqp_port", "encrypted", "ifname", "label", "mpi_launcher", "worker_debug", "worker_logdir_root"):
        assert (f"unknown field `{field}`" in said) == (f"{field}: " in SITES[name])
    assert said.count("\n") == 0 or f"c has {said.count(chr(10))} mistakes:" in said


def test_values_are_kept_under_their_names_here(file: Path) -> None:
    config, _ = moved(file, SITES["faster"])
    provider = config.engine.provider
    assert config.engine.max_idletime == 75
    assert config.engine.address == InterfaceConfig(interface="eno8303")
    assert isinstance(provider, SlurmProviderConfig)
    assert (provider.mem_per_node, provider.cmd_timeout, provider.walltime_s) == (64, 90, 1200)
    config, notes = moved(file, "engine: {prefetch_capacity: 3, run_in_sandbox: true, max_workers: 5}")
    assert (config.engine.prefetch, config.engine.sandbox, config.engine.max_workers_per_node) == (3, True, 5)
    assert "line 1: engine.prefetch_capacity: written as prefetch" in notes
    config, notes = moved(file, "allowed_functions: [c1f3a3b0-9a3e-4a53-8a5e-0f5b6a0e2d11]")
    assert config.allowed_functions == ("c1f3a3b0-9a3e-4a53-8a5e-0f5b6a0e2d11",)
    assert notes[0].startswith("line 1: allowed_functions: kept; replace its ids")
    config, _ = moved(file, "engine:\n  job_status_kwargs: {max_idletime: 5, strategy_period: 2}")
    assert config.engine.max_idletime == 5


def test_the_launcher_of_an_mpi_engine_is_set_on_the_nodes(file: Path) -> None:
    config, _ = moved(file, SITES["expanse-mpi"])
    assert isinstance(config.engine.provider, SlurmProviderConfig)
    assert config.engine.provider.worker_init == "module load python\nexport FARCALL_MPI_LAUNCHER=srun"
    config, notes = moved(file, "engine: {type: GlobusMPIEngine, mpi_launcher: aprun}")
    assert config.engine.provider == LocalProviderConfig()
    assert notes[1].endswith("one engine; run export FARCALL_MPI_LAUNCHER=aprun before farcall-endpoint start")
    _, notes = moved(file, "engine: {type: GlobusMPIEngine, provider: {type: SlurmProvider}}")
    assert notes[0].endswith("one engine; worker_init has export FARCALL_MPI_LAUNCHER=mpiexec")


def test_a_template_is_filled_with_its_defaults(file: Path) -> None:
    text = (
        "{# for all #}\n{amqp_port: 5671, display_name: '{{ name }}', heartbeat_period: {{ period|default(45) }}, "
        "endpoint_setup: {{ setup|default() }}}\n"
    )
    config, notes = moved(file, text)
    assert (config.display_name, config.heartbeat_period) == ("name", 45)
    assert "line 2: {{ name }}: it has no value here: replace name in the new file" in notes
    assert not [note for note in notes if ": endpoint_setup: " in note], "it was empty"
    file.write_text("engine:\n{% if gpu %}\n  available_accelerators: 1\n{% endif %}\n")
    with pytest.raises(ConfigurationError, match=r"statements of a template.*\(line 2, 4\)"):
        read_globus(file)


def test_what_cannot_be_left_out_is_refused_at_its_line(file: Path) -> None:
    file.write_text(slurm("ib0", "max_workers_per_node: many", "cpu_affinity: list:0"))
    with pytest.raises(ConfigurationError) as caught:
        read_globus(file)
    assert f"{file}:3:25: engine.max_workers_per_node must be a whole number" in str(caught.value)
    assert f"{file}:4:17: engine.cpu_affinity must be" in str(caught.value)


def test_configure_writes_the_file_and_lists_the_losses(tmp_path: Path, file: Path) -> None:
    file.write_text(SITES["anvil"])
    home = tmp_path / "home"

    def configure(*options: str) -> tuple[int, str]:
        done = CliRunner().invoke(app, ["-c", str(home), "configure", "anvil", "--from-globus", str(file), *options])
        return done.exit_code, done.output

    assert "Leave out --template and --set" in configure("--template", "laptop")[1]
    code, said = configure()
    assert code == 0
    assert "line 1: amqp_port: left out: the agent has one outbound connection, to the forwarder\n" in said
    config = read_config(home / "endpoints" / "anvil" / "config.yaml")
    assert (config.display_name, config.engine.max_workers_per_node) == ("anvil", 3)
    assert configure()[0] != 0, "the endpoint is there"


def test_the_address_of_an_interface_is_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    provider = SlurmProviderConfig()
    network = make_network(provider, address=InterfaceConfig(interface="lo"), ports=None)
    assert network is not None
    assert network.addresses == ["127.0.0.1"]
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"ib0": [], "lo": []})
    for name, said in (("ib0", "has no IPv4 address"), ("hsn0", "does not exist")):
        with pytest.raises(ConfigurationError, match=f"interface '{name}' {said} on {socket.gethostname()}"):
            own_addresses(InterfaceConfig(interface=name))
