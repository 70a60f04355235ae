"""Starting and stopping the supervisor of a tier from another process."""

from __future__ import annotations

import fcntl
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from farcall_common.errors import ErrorRecord, Unavailable, error_from_record
from farcall_local.postgres_files import forget_database
from farcall_local.process import log_tail
from farcall_local.state import TierState

__all__ = ["is_up", "launch", "stop", "wipe"]

#: A process object that is dropped while its process runs complains about it; these are meant to run on.
_left_running: list[subprocess.Popen[bytes]] = []


def launch(directory: Path, *, users: Sequence[str] = ("me",), until_eof: bool = False) -> subprocess.Popen[bytes]:
    """Start a supervisor and wait until its tier is ready.

    It runs in a session of its own: a Ctrl-C at the terminal is for the caller, who then stops the tier in order. With
    ``until_eof`` it stops when the ``stdin`` of the returned process is closed, at the latest by the caller's death.

    :raises FarcallError: what kept the tier from starting.
    """
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    log_path = directory / "logs" / "supervisor.log"
    log_path.parent.mkdir(exist_ok=True)
    flags = [word for name in users for word in ("--user", name)] + (["--until-eof"] if until_eof else [])
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
    """Whether a supervisor holds this directory now, whatever its state file says."""
    try:
        with (directory / "lock").open("r") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def stop(directory: Path, *, within_s: float = 30.0) -> bool:
    """Stop the tier and wait for its end, at most ``within_s`` seconds before it is killed. False if none ran."""
    state = TierState.read(directory)
    if state is None or not is_up(directory):
        return False
    try:
        supervisor = psutil.Process(state.supervisor_pid)
        supervisor.terminate()
        try:
            supervisor.wait(timeout=within_s)
        except psutil.TimeoutExpired:
            supervisor.kill()  # and the kernel ends its children
            supervisor.wait(timeout=within_s)
    except psutil.NoSuchProcess:
        pass
    return True


def wipe(directory: Path) -> None:
    """Remove a stopped tier with all its data."""
    forget_database(directory)
    shutil.rmtree(directory, ignore_errors=True)
