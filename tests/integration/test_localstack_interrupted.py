"""Errors of the offline tier's command line: they have a code and a hint, and leave no processes or files."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from farcall_common.errors import ConfigurationError
from farcall_common.exit_codes import UNHEALTHY
from farcall_localstack import Tier
from farcall_localstack.environment import ensure_environment, locked
from farcall_localstack.server import end_group, group_members, is_localstack
from farcall_localstack.synth import ensure_assembly
from tests.waiting import WAIT_S, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

_LITTLE_BYTES = 1_000_000  # enough for logs, too little for a bundle


def _start(*arguments: str, directory: Path, limit: Callable[[], None] | None = None) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "farcall_localstack", *arguments, "--directory", str(directory)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C at a terminal reaches only its own session, without LocalStack
        preexec_fn=limit,
    )


def _run(*arguments: str, directory: Path, limit: Callable[[], None] | None = None) -> tuple[int, str]:
    """Exit status, and the output on stdout and stderr."""
    with _start(*arguments, directory=directory, limit=limit) as running:
        said, complained = running.communicate(timeout=3 * WAIT_S)
    return running.returncode, said + complained


def _localstacks(directory: Path) -> list[int]:
    """The running LocalStacks of a tier; each leads its own process group."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            ours = process.environ().get("FARCALL_LOCALSTACK_DIRECTORY") == str(directory.resolve())
            if ours and is_localstack(process.pid):
                found.append(process.pid)
    return found


def _programs(group: int) -> set[str]:
    names = set()
    for pid in group_members(group):
        with contextlib.suppress(psutil.Error):
            names.add(psutil.Process(pid).name())
    return names


@pytest.fixture(scope="module", autouse=True)
def _made() -> None:
    """Create files that all `up` commands share, so that the tests do not measure their creation."""
    ensure_environment()
    ensure_assembly()


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    """The directory of a tier, which is stopped afterwards."""
    path = tmp_path / "tier"
    yield path
    for group in _localstacks(path):
        end_group(group)


@pytest.mark.parametrize(
    ("number", "ended_with", "program"),
    [
        (signal.SIGINT, 130, "postgres"),
        (signal.SIGTERM, 143, "postgres"),
        (signal.SIGKILL, -signal.SIGKILL, "postgres"),
        (signal.SIGKILL, -signal.SIGKILL, "initdb"),
        (signal.SIGKILL, -signal.SIGKILL, "python"),  # LocalStack itself, just after its start
    ],
    ids=["SIGINT", "SIGTERM", "SIGKILL", "SIGKILL-initdb", "SIGKILL-python"],
)
def test_an_interrupted_up_leaves_no_processes_or_files(
    directory: Path, number: signal.Signals, ended_with: int, program: str
) -> None:
    running = _start("up", directory=directory)
    try:
        wait_until(lambda: any(program in _programs(group) for group in _localstacks(directory)), f"{program} runs")
        (group,) = _localstacks(directory)
        database = Path(psutil.Process(group).environ()["FARCALL_LOCALSTACK_DATABASE_DIRECTORY"])
        assert database.exists()
        running.send_signal(number)
        running.communicate(timeout=WAIT_S)
    finally:
        running.kill()
    assert running.returncode == ended_with
    wait_until(lambda: not group_members(group), "no process is left")
    assert not database.exists()
    status, said = _run("status", directory=directory)
    assert status == 78
    assert "[CONFIGURATION] no tier runs with" in said


def test_up_replaces_a_killed_tier(directory: Path) -> None:
    status, said = _run("up", "--json", directory=directory)
    assert status == 0
    first = Tier.load(directory)
    assert json.loads(said.splitlines()[0]) == first.variables() | {"directory": str(directory)}
    assert first.localstack_pid is not None
    status, said = _run("up", directory=directory)
    assert status == 73
    assert re.search(r"\[CONFLICT\] a tier already runs with .* \(`down` ends it", said)

    os.kill(first.localstack_pid, signal.SIGKILL)
    wait_until(lambda: not psutil.pid_exists(first.localstack_pid or 0))
    assert group_members(first.localstack_pid)  # data stores and forwarder still run
    status, said = _run("status", directory=directory)
    assert status == UNHEALTHY
    assert "Unhealthy: [UNAVAILABLE]" in said
    assert _run("up", directory=directory)[0] == 0
    assert group_members(first.localstack_pid) == set()
    second = Tier.load(directory)
    second.require_healthy()
    assert second.localstack_pid != first.localstack_pid

    assert _run("down", directory=directory)[0] == 0
    assert group_members(second.localstack_pid or 0) == set()


def test_a_second_concurrent_up_is_refused(directory: Path) -> None:
    with locked(directory / "up"):
        status, said = _run("up", directory=directory)
    assert status == 73
    assert "[CONFLICT] another `up` is running" in said


def test_a_reused_process_id_is_not_killed(directory: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True
    ) as bystander:
        directory.mkdir()
        Tier(
            name="farcall",
            profile="lab",
            target="localstack",
            stacks=(),
            api_url="http://127.0.0.1:1",
            token="t",
            tokens={},
            endpoint_url="http://127.0.0.1:1",
            directory=directory,
            localstack_pid=bystander.pid,
            database_directory=None,
        ).save()
        assert _run("down", directory=directory) == (0, "")
        assert bystander.poll() is None
        bystander.communicate(b"\n")
    assert not (directory / "state.json").exists()


def test_a_state_file_of_another_version_is_an_error(directory: Path) -> None:
    directory.mkdir()
    (directory / "state.json").write_text(json.dumps({"localstack_pid": 1}))
    for command in ("up", "down", "status"):
        status, said = _run(command, directory=directory)
        assert status == 78
        assert "[CONFIGURATION]" in said
        assert "is from another version" in said


def test_a_full_disk_is_an_error_and_leaves_no_files(directory: Path) -> None:
    """A file size limit of the process and its children: it needs no privilege, and fails like a quota."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (_LITTLE_BYTES, _LITTLE_BYTES))

    status, said = _run("up", directory=directory, limit=limit)
    error = r"^\w+: \[(CONFIGURATION|LOCALSTACK_DEPLOYMENT_FAILED)\] .*\(.+\)\Z"  # after the lines of progress
    assert re.search(error, said.strip(), re.DOTALL | re.MULTILINE), said
    assert status == (78 if "[CONFIGURATION]" in said else 70)
    assert not _localstacks(directory)
    assert not (directory / "state.json").exists()


def test_a_directory_that_cannot_be_created_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    status, said = _run("up", directory=tmp_path / "file" / "below")
    assert status == 78
    assert "[CONFIGURATION]" in said
    assert "--directory" in said


def test_an_assembly_with_a_missing_bundle_is_synthesised_again(tmp_path: Path) -> None:
    made = tmp_path / ensure_assembly().name
    shutil.copytree(ensure_assembly(), made, copy_function=os.link)
    bundle = next(path for path in made.glob("asset.*") if (path / "farcall_lambdas").is_dir())
    bundle.rename(tmp_path / "lost")
    bundle.with_name(f"{bundle.name}.zip").unlink(missing_ok=True)  # could replace it
    assert ensure_assembly(directory=tmp_path) == made
    assert (bundle / "farcall_lambdas" / "__init__.py").exists()


def test_an_environment_that_cannot_be_created_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python2.7"))
    with pytest.raises(ConfigurationError, match=r"(?s)uv venv.* failed.*Python 3\.11") as caught:
        ensure_environment(tmp_path / "environment")
    assert caught.value.hint
