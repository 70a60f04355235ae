"""Control of a tier's supervisor from another process: start, stop, wipe."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from farcall_common.errors import ErrorRecord, Unavailable, error_from_record
from farcall_common.files import make_directory
from farcall_local.postgres_files import forget_database
from farcall_local.process import log_tail

_POLL_S = 0.02

#: Process objects of running supervisors: a process object that is deleted while its process runs emits a warning.
_left_running: list[subprocess.Popen[bytes]] = []


def launch(
    directory: Path, *, users: Sequence[str] = ("me",), until_eof: bool = False, port: int | None = None
) -> subprocess.Popen[bytes]:
    """Start a supervisor and wait until its tier is ready.

    It runs in its own session: Ctrl-C at the terminal goes to the caller only, which then stops the tier in order. With
    ``until_eof`` it stops when the ``stdin`` of the returned process is closed, at the latest when the caller ends.
    ``port`` is the API's; None for its last one, or a free one.

    :raises FarcallError: if the tier does not start, with the reason.
    """
    make_directory(directory, mode=0o700)
    log_path = directory / "logs" / "supervisor.log"
    log_path.parent.mkdir(exist_ok=True)
    flags = [word for name in users for word in ("--user", name)] + (["--until-eof"] if until_eof else [])
    flags += ["--port", str(port)] if port else []
    with log_path.open("ab") as log:
        supervisor = subprocess.Popen(
            [sys.executable, "-m", "farcall_local.supervisor", str(directory), *flags],
            stdin=subprocess.PIPE if until_eof else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            cwd="/",
            start_new_session=True,
        )
    assert supervisor.stdout is not None
    with supervisor.stdout as announcements:
        line = announcements.readline()
    answer: dict[str, Any] = json.loads(line) if line else {"ready": False}
    if answer["ready"]:
        if not until_eof:
            _left_running.append(supervisor)
        return supervisor
    if supervisor.stdin:
        supervisor.stdin.close()
    supervisor.wait()
    if "error" in answer:
        raise error_from_record(ErrorRecord.from_json(answer["error"]))
    raise Unavailable(f"the supervisor died while starting; the end of its log:\n{log_tail(log_path)}")


def is_up(directory: Path) -> bool:
    """Whether a supervisor holds this directory's lock now, whatever its state file contains."""
    try:
        with (directory / "lock").open("r") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def stop(directory: Path, *, within_s: float = 30.0) -> bool:
    """Stop the tier and wait for its end; kill it after ``within_s`` seconds. False if none ran.

    :raises Unavailable: if it runs even after that.
    """
    if not is_up(directory):
        return False
    supervisor_pid = int((directory / "lock").read_text())
    for signal_number in (signal.SIGTERM, signal.SIGKILL):  # after SIGKILL, the kernel ends its children
        with contextlib.suppress(ProcessLookupError):
            os.kill(supervisor_pid, signal_number)
        if _wait_until_down(directory, within_s=within_s):
            _reap(supervisor_pid)
            return True
    raise Unavailable(f"the supervisor, process {supervisor_pid}, does not end")


def _reap(supervisor_pid: int) -> None:
    """Reap a supervisor that this process started: it releases its lock while it ends."""
    for each in [each for each in _left_running if each.pid == supervisor_pid]:
        each.wait()
        _left_running.remove(each)


def _wait_until_down(directory: Path, *, within_s: float) -> bool:
    """Wait for the lock, not for the process: in many containers no init reaps orphans, so they remain as zombies."""
    deadline = time.monotonic() + within_s
    while is_up(directory):
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True


def wipe(directory: Path) -> None:
    """Remove a stopped tier with all its data."""
    forget_database(directory)
    shutil.rmtree(directory, ignore_errors=True)
