"""What an agent finds out before it starts: technologies of environments that it offers, its default one, and whether
others may read its files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from farcall_common.environments import TYPES
from farcall_common.errors import ConfigurationError
from farcall_endpoint.agent.shell.launch import (
    capabilities,
    check_default_environment,
    offered_containers,
    readable_files,
)
from farcall_endpoint.agent.shell.memory_root import MemoryRoot
from farcall_endpoint.config.environments import EnvironmentsConfig
from farcall_endpoint.config.files import FilesConfig
from farcall_endpoint.config.providers import SlurmProviderConfig
from farcall_endpoint.config.schema import Config, EngineConfig
from farcall_endpoint.services.directory import EndpointDirectory


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Install programs that fail, and no others."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))

    def install(*names: str) -> None:
        for name in names:
            (folder / name).write_text("#!/bin/sh\necho no namespaces here >&2\nexit 1\n")
            (folder / name).chmod(0o755)

    return install


def test_what_is_installed_is_offered(programs: Callable[..., None]) -> None:
    assert offered_containers(EngineConfig()) == ("conda", "uv", "venv")
    programs("bwrap", "ch-run", "podman-hpc")
    assert offered_containers(EngineConfig()) == ("bubblewrap", "charliecloud", "conda", "podman-hpc", "uv", "venv")
    chosen = EngineConfig(environments=EnvironmentsConfig(types=("venv", "bubblewrap", "docker")))
    assert offered_containers(chosen) == ("bubblewrap", "venv")
    assert offered_containers(EngineConfig(environments=EnvironmentsConfig(types=()))) == ()
    assert capabilities(containers=("venv",)).containers == ("venv",)


def test_what_nodes_have_is_not_known_here(programs: Callable[..., None]) -> None:
    del programs
    slurm = SlurmProviderConfig()
    assert offered_containers(EngineConfig(provider=slurm)) == TYPES
    chosen = EngineConfig(provider=slurm, environments=EnvironmentsConfig(types=("docker",)))
    assert offered_containers(chosen) == ("docker",)
    check_default_environment(EngineConfig(provider=slurm, container_type="venv", container_uri="/nowhere"))


def test_a_default_environment_that_cannot_work_ends_the_start(programs: Callable[..., None], tmp_path: Path) -> None:
    engine = EngineConfig(container_type="charliecloud", container_uri=str(tmp_path))
    with pytest.raises(ConfigurationError, match=r"container_type: charliecloud does not work .*ch-run is not inst"):
        check_default_environment(engine)
    programs("ch-run")
    with pytest.raises(ConfigurationError, match=r"charliecloud does not work on this machine: .*no namespaces here"):
        check_default_environment(engine)
    with pytest.raises(ConfigurationError, match=r"container_uri: /nowhere/x does not exist on this machine"):
        check_default_environment(EngineConfig(container_type="venv", container_uri="/nowhere/x"))
    check_default_environment(EngineConfig(container_type="venv", container_uri=str(tmp_path)))
    check_default_environment(EngineConfig())


@pytest.mark.parametrize(
    ("files", "is_served"),
    [(FilesConfig(), True), (FilesConfig(serve=False), False), (FilesConfig(enabled=False), False)],
)
def test_files_are_served_unless_that_is_switched_off(files: FilesConfig, is_served: bool, tmp_path: Path) -> None:
    memory = MemoryRoot(is_wanted=False)
    served = readable_files(Config(files=files), EndpointDirectory(tmp_path), memory)
    assert (served is not None) == is_served


def test_tasks_have_files_where_others_are_not_served() -> None:
    assert Config(files=FilesConfig(serve=False)).files_refusal == ""
