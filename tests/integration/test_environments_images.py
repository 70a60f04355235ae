"""Workers in images of Podman and Apptainer, as an ordinary user."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from farcall_common.environments import Environment
from farcall_endpoint.config.settings import EnvironmentSettings
from tests.support.container_user import ContainerUser, apptainer_user, podman_user
from tests.support.docker_daemon import docker_daemon
from tests.support.environments import running_node
from tests.support.image_archive import write_archive
from tests.support.images import DEBIAN, image


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("archive") / "small.tar"
    config = {"Env": ["PATH=/usr/bin:/bin", "OF_IMAGE=yes"], "Entrypoint": ["/usr/bin/false"]}
    write_archive(path, image(DEBIAN), tag="lab/small:1", config=config)
    return path


@pytest.fixture(params=["podman", "apptainer"])
def user(request: pytest.FixtureRequest) -> Iterator[tuple[str, ContainerUser]]:
    with (podman_user if request.param == "podman" else apptainer_user)() as user:
        yield request.param, user


def test_fresh_workers_and_forks(user: tuple[str, ContainerUser], archive: Path) -> None:
    type_, of = user
    shutil.copy(archive, of.directory / "small.tar")
    location, variable = f"docker-archive:{of.directory}/small.tar", "yes" if type_ == "podman" else None
    if type_ == "apptainer":  # which would convert an archive for half a minute
        location = str(of.images / DEBIAN)
    directory = of.directory_of("node")
    command = [of.python, "-P", "-m", "tests.support.environment_trial", type_, location, str(directory)]
    done = of.run(command, of.variables_of_project())
    assert done.returncode == 0, done.stdout
    [answers, deaths] = json.loads(done.stdout.splitlines()[-1])
    assert answers == [["/usr/bin/python3", f"{directory}/work", variable]] * 2
    assert deaths == ["killed by SIGKILL"] * 2
    assert of.processes() == {}


def seen() -> tuple[str, str | None]:
    import os
    import pathlib

    return str(pathlib.Path.cwd()), os.environ.get("OF_IMAGE")


def test_docker(archive: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its containers are children of a daemon: the worker is none of this process's descendants."""
    with docker_daemon() as daemon:
        for name, value in daemon.environment.items():
            monkeypatch.setenv(name, value)
        subprocess.run(["docker", "load", "--quiet", "--input", str(archive)], check=True)
        with running_node(tmp_path, EnvironmentSettings(fork=False)) as node:
            worker = node.ready(Environment(type="docker", location="lab/small:1"))
            assert node.run(worker, seen) == (f"{tmp_path}/work", "yes")
            assert node.kill(worker).startswith("killed by")
            node.kill(node.launch(Environment(type="docker", location="lab/small:1")))
        left = subprocess.run(["docker", "ps", "--all", "--quiet"], capture_output=True, text=True, check=True)
        assert left.stdout == ""
