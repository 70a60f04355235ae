"""The process that prepares environments: what it does when its manager is gone."""

from __future__ import annotations

import errno
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from farcall_common.environments import Environment
from farcall_endpoint.config.settings import EnvironmentSettings
from farcall_endpoint.environments.prepare import preparation_process
from farcall_endpoint.environments.prepare.commands import CommandError
from farcall_endpoint.environments.prepare.image_preparation import (
    Preparation,
    PreparationError,
    failure,
    working_runner,
)
from farcall_endpoint.environments.prepare.preparation import (
    Ended,
    Failed,
    Order,
    PreparationReport,
    PreparationSettings,
    Prepared,
    Progressed,
    Started,
)
from farcall_endpoint.environments.runners import base as runners
from farcall_endpoint.environments.runners.base import Start
from farcall_endpoint.environments.runners.registry import RUNNERS
from farcall_endpoint.host.isolation import bubblewrap


def run(directory: Path, orders: Sequence[Order]) -> None:
    """Give orders, and end their input, as the end of a manager does."""
    (directory / "run").mkdir()
    settings = PreparationSettings(
        environments=EnvironmentSettings(), cache=str(directory / "cache"), run_dir=str(directory / "run")
    )
    command = [sys.executable, "-P", "-m", preparation_process.__name__, msgspec.json.encode(settings).decode()]
    lines = b"".join(msgspec.json.encode(order) + b"\n" for order in orders)
    done = subprocess.run(command, input=lines, capture_output=True, check=True)
    assert done.stderr == b""


def test_containers_of_a_manager_that_is_gone_are_ended(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("left", "ended", "forgotten")]
    started = [Started(path.name, ("touch", str(path))) for path in files]
    run(tmp_path, [*started, Ended("ended"), Ended("forgotten", stops=False)])
    assert [path.exists() for path in files] == [True, True, False]
    assert not (tmp_path / "run").exists()


_PYTHON_THAT_LOOKS_AROUND = """#!/bin/sh
for file in /proc/[0-9]*/environ; do tr '\\0' '\\n' < "$file"; done
exit 3
"""


@pytest.mark.parametrize("confined", [True, False])
def test_a_python_that_a_submitter_has_named_sees_no_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, confined: bool
) -> None:
    if reason := bubblewrap.missing():
        pytest.skip(reason)
    monkeypatch.setenv("INDEX_PASSWORD", "hunter2")
    monkeypatch.setenv("COLOR", "blue")
    python = tmp_path / "venv" / "bin" / "python3"
    python.parent.mkdir(parents=True)
    python.write_text(_PYTHON_THAT_LOOKS_AROUND if confined else _PYTHON_THAT_LOOKS_AROUND.replace("[0-9]*", "$PPID"))
    python.chmod(0o755)
    settings = PreparationSettings(
        environments=EnvironmentSettings(),
        cache=str(tmp_path / "cache"),
        confined=confined,
        isolated=True,
        readable=("/usr", "/bin", "/lib", "/lib64", str(tmp_path)),
        passed=("COLOR",),
    )
    reports: list[PreparationReport] = []
    prepared = Preparation(settings, report=reports.append)
    prepared.prepare(Environment(type="venv", location=str(tmp_path / "venv")), trusted=False)
    failed = reports[-1]
    assert isinstance(failed, Failed)
    assert "COLOR=blue" in failed.record.message
    assert "hunter2" not in failed.record.message


def test_a_runner_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    for name in ("bubblewrap", "charliecloud", "shifter", "podman", "docker", "apptainer"):
        with pytest.raises(PreparationError, match="is not installed") as raised:
            working_runner(name, EnvironmentSettings(), RUNNERS)
        assert raised.value.record.code == "CONTAINER_UNSUPPORTED"


class ConvertingRunner:
    """Makes an image whose programs are not there until ``has_python`` is true."""

    type = "apptainer"
    worker_target = "/run/farcall/worker"
    has_python = False

    def missing(self) -> str:
        return ""

    def prepare(self, environment: Environment, *, cache: Path) -> runners.ImagePreparation:
        return runners.ImagePreparation(str(cache / "image"), (("mkdir", str(cache / "image")),), "converts")

    def command(self, start: Start) -> list[str]:
        return [sys.executable, *start.command[1:]] if self.has_python else ["sh", "-c", "exit 127"]

    def stop(self, start: Start) -> None:
        return None


def test_an_image_without_python_is_converted_again_by_the_next_try(tmp_path: Path) -> None:
    runner, reports = ConvertingRunner(), list[PreparationReport]()
    settings = PreparationSettings(environments=EnvironmentSettings(), cache=str(tmp_path / "cache"))
    preparing = Preparation(settings, report=reports.append, runners={"apptainer": runner})
    environment = Environment(type="apptainer", location="docker://x")
    preparing.prepare(environment, trusted=True)
    assert isinstance(reports[-1], Failed)
    assert reports[-1].record.code == "ENVIRONMENT_WITHOUT_PYTHON"
    assert not (tmp_path / "cache" / "image").exists()
    runner.has_python = True
    preparing.prepare(environment, trusted=True)
    assert isinstance(reports[-1], Prepared)
    assert [each.text for each in reports if isinstance(each, Progressed)].count("converts") == 2
    preparing.release(environment.key)


@pytest.mark.parametrize(
    ("words", "retryable"),
    [
        (b"FATAL: While making image: write /cache/x: no space left on device", True),
        (b"Error: initializing source: pinging container registry: dial tcp: connection refused", True),
        (b"Error: initializing source: manifest unknown", False),
        (b"No solution found when resolving dependencies", False),
    ],
)
def test_failures_in_the_runners_own_words(words: bytes, retryable: bool) -> None:
    image = Environment(type="podman", location="python:3.12", name="sci")
    record = failure(image, CommandError(words, 1))
    assert (record.code, record.retryable) == ("ENVIRONMENT_FAILED", retryable)
    assert words.decode() in record.message
    assert "sci" in record.message
    assert (f"`logs/environment-{image.key}.log`" in record.hint) == retryable, "else it is a mistake of the task"
    packages = Environment(type="uv", requirements=("numpy",))
    assert failure(packages, CommandError(words, 1)).code == "REQUIREMENTS_FAILED"


class FullDisk(ConvertingRunner):
    """Copies a file to a disk without room."""

    def prepare(self, environment: Environment, *, cache: Path) -> runners.ImagePreparation:
        raise OSError(errno.ENOSPC, "No space left on device", "/site-packages/x.so", None, "/cache/x.so")


def test_a_full_disk_is_reported_in_words_with_one_path(tmp_path: Path) -> None:
    reports = list[PreparationReport]()
    settings = PreparationSettings(environments=EnvironmentSettings(), cache=str(tmp_path / "cache"))
    environment = Environment(type="apptainer", location="docker://x", name="sci")
    Preparation(settings, report=reports.append, runners={"apptainer": FullDisk()}).prepare(environment, trusted=True)
    [failed] = [each for each in reports if isinstance(each, Failed)]
    assert failed.record.message.endswith("on a node of the endpoint: No space left on device: /cache/x.so")
    assert failed.record.retryable


def test_addresses_in_errors_have_no_secrets() -> None:
    words = (
        b"error: Failed to fetch: `https://dl.example.org/t0ken/group/simple/numpy/`\n"
        b"  cause: error sending request for url (http://user:t0ken@example.org:8080/numpy?key=t0ken)\n"
        b"  cause: https://example.org is away\n"
    )
    message = failure(Environment(type="uv", requirements=("numpy",)), CommandError(words, 1)).message
    assert "t0ken" not in message
    assert "`https://dl.example.org/.../numpy`" in message
    assert "(http://example.org:8080/numpy)" in message
    assert "https://example.org/ is away" in message


def test_a_command_that_took_too_long_is_worth_another_try() -> None:
    record = failure(Environment(type="venv", location="/x"), CommandError(b"", None))
    assert record.retryable
    assert "it took too long" in record.message
