"""Parts of the launcher of environments that start nothing."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
from pathlib import Path

import pytest

from farcall_endpoint.config.settings import EnvironmentSettings
from farcall_endpoint.environments.container import SOCKET, Container, ContainerStart, StartLog
from farcall_endpoint.environments.launcher import first_variables, key_of_template, mounts_of
from farcall_endpoint.environments.prepare.technologies import technologies
from farcall_endpoint.environments.runners.base import Mount
from farcall_endpoint.host.isolation.environment import for_image
from farcall_endpoint.manager.shell.environment_workers import renumbered
from farcall_endpoint.worker.boot import SECRET, Boot, Descriptors, connect, listen


def test_binds() -> None:
    assert mounts_of(["/data", "/sw:/opt/sw", "/ro:/ro:ro"]) == (
        Mount("/data", "/data", writable=True),
        Mount("/sw", "/opt/sw", writable=True),
        Mount("/ro", "/ro", writable=False),
    )


def test_no_variables_of_the_node_in_an_image() -> None:
    given = {"PATH": "/x", "LD_PRELOAD": "x", "PYTHONHOME": "/x", "CONDA_PREFIX": "/x", "HOME": "/x", "A": "1"}
    assert for_image(given | {"OMP_NUM_THREADS": "2", "SLURM_JOB_ID": "3"}) == {
        "A": "1",
        "OMP_NUM_THREADS": "2",
        "SLURM_JOB_ID": "3",
    }


def test_no_secrets_in_command_lines() -> None:
    assert first_variables({"HOME": "/x", "MY_TOKEN": "secret"}) == {"HOME": "/x"}


def test_technologies_that_are_not_allowed_or_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    found = technologies(EnvironmentSettings(types=("venv", "podman")))
    assert found["venv"] == ""
    assert found["podman"] == "podman is not installed"
    assert found["docker"] == "the endpoint's configuration allows venv, podman"


@pytest.mark.parametrize(
    ("accelerators", "numbers"), [((), None), (("3",), "0"), (("2,5",), "0,1"), (("GPU-8f2e",), None)]
)
def test_accelerators_have_other_numbers_where_a_container_has_no_others(
    accelerators: tuple[str, ...], numbers: str | None
) -> None:
    found = renumbered(accelerators)
    assert found.get("CUDA_VISIBLE_DEVICES") == found.get("FARCALL_WORKER_ACCELERATORS") == numbers


def test_workers_with_different_accelerators_are_forks_of_different_templates() -> None:
    """A fork is in the container of its template."""

    def start(accelerators: tuple[str, ...], **variables: str) -> ContainerStart:
        boot, descriptors = Boot({**renumbered(accelerators), **variables}, "/"), Descriptors(0, 0, 1, 2)
        return ContainerStart(boot, descriptors, int, (), {}, group="ada", accelerators=accelerators)

    starts = [start(("1",)), start(("2",)), start(("1",), OMP_SCHEDULE="static"), start(())]
    assert len({key_of_template("e", each) for each in starts}) == 4
    assert key_of_template("e", start(("1",), COLOR="red")) == key_of_template("e", starts[0])


def test_process_without_the_secret_does_not_become_the_worker(tmp_path: Path) -> None:
    """A daemon starts the container: any process could be the worker."""
    path = str(tmp_path / SOCKET)
    (tmp_path / SECRET).write_bytes(b"s" * 32)
    with contextlib.closing(listen(path)) as listener, subprocess.Popen(["true"]) as process:
        container = Container(
            process,
            name="c",
            directory=tmp_path,
            listener=listener,
            secret=b"s" * 32,
            log=StartLog(None),
            has_stop=False,
            is_remote=True,
        )
        others = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(20)]
        with contextlib.closing(connect(path)) as program, contextlib.ExitStack() as stack:
            known = [listener.accept()[0] for _ in range(1)]
            assert container.accept(known[0], 1) is None
            for other, sent in zip(others, [b"", b"s" * 31, b"s" * 33, b"x" * 32], strict=False):
                stack.enter_context(other).connect(path)
                other.send(sent)
                connection, _ = listener.accept()
                container.accept(connection, 2)
                assert container.proved(connection.fileno()) is None
                container.drop(connection.fileno())
            proved = container.proved(known[0].fileno())
            assert proved == (known[0], 1)
            container.connected(*proved)
            assert not (tmp_path / SECRET).exists()
            dropped = []
            for other in others[4:]:
                stack.enter_context(other)
                ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                theirs.close()
                dropped.append(container.accept(ours, 3) is not None)
            assert not any(dropped), "as many as may wait"
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            theirs.close()
            oldest = container.unproved()[0]
            assert container.accept(ours, 3) == oldest
            program.close()
            container.close()


def test_a_start_log_is_bounded(tmp_path: Path) -> None:
    log = StartLog(tmp_path / "start.log")
    try:
        for number in range(40):
            os.write(log.writer, b"x" * 10_000 + f"\nline {number}\n".encode())
            if not log.read():
                break
        assert number < 39, "a runner that prints on and on is cut off"
        assert log.last_lines().endswith(f"line {number}")
        assert (tmp_path / "start.log").stat().st_size < 300_000
    finally:
        log.close()


def test_a_start_log_has_no_control_characters(tmp_path: Path) -> None:
    log = StartLog(tmp_path / "start.log")
    os.write(log.writer, "\x1b]0;stolen\x07\x9b2J\u202e words\n".encode())
    log.started()
    assert not log.read()
    log.close()
    assert (tmp_path / "start.log").read_text() == "\\x1b]0;stolen\\x07\\x9b2J\\u202e words\n"


def test_a_log_that_cannot_be_written_stops_nothing(tmp_path: Path) -> None:
    log = StartLog(tmp_path / "missing" / "start.log")
    os.write(log.writer, b"words\n")
    assert log.read()
    assert log.last_lines() == "words"
    log.started()
    assert not log.read()
    log.close()
