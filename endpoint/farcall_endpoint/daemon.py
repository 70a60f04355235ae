"""Starting, watching and ending an endpoint's agent from another process."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import select
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Literal

import psutil

from farcall_common.errors import ConfigurationError, EndpointInUse, FarcallError, ForwarderWaking, Unavailable
from farcall_common.exit_codes import INTERNAL
from farcall_endpoint.directory import AgentProcess, EndpointDirectory
from farcall_endpoint.logs import tail

STOP_MARGIN_S = 15.0
"""Seconds for an orderly end, beside what running tasks get."""

_WAKING_S = 120.0

_LOG_LINES = 5
_LOG_BYTES = 4096
_MAX_CONSOLE_BYTES = 2**20

LocalState = Literal["Initialized", "Running", "Stopped", "Disconnected"]


@dataclasses.dataclass(frozen=True)
class State:
    """How an endpoint is, as seen from its directory. ``note`` explains what the word does not say."""

    state: LocalState
    endpoint_id: str | None
    agent: AgentProcess | None
    numbers: dict[str, Any]
    note: str


class StartFailed(FarcallError):
    """The daemon ended before it was connected; ``exit_code`` is its own."""

    code = "START_FAILED"
    exit_code: int = INTERNAL


def read_state(directory: EndpointDirectory) -> State:
    """Look at the files and at the process that they name."""
    endpoint_id, agent = directory.read_endpoint_id(), directory.read_agent()
    if agent is None:
        return State("Initialized" if endpoint_id is None else "Stopped", endpoint_id, None, {}, "")
    if not agent.is_here():
        note = f"runs on {agent.hostname} as process {agent.pid}, if at all: ask there"
        return State("Disconnected", endpoint_id, agent, {}, note)
    if agent.find() is None:
        return State("Disconnected", endpoint_id, None, {}, f"process {agent.pid} died; see {directory.log_file}")
    numbers = directory.read_status()
    if not numbers.get("connected"):
        return State("Disconnected", endpoint_id, agent, numbers, str(numbers.get("trouble", "is starting")))
    return State("Running", endpoint_id, agent, numbers, str(numbers.get("problem", "")))


def agent_command(directory: EndpointDirectory, *, home: Path, options: Sequence[str] = ()) -> list[str]:
    """What runs an endpoint's agent."""
    return [sys.executable, "-P", "-m", "farcall_endpoint.agent", directory.name, "--home", str(home), *options]


def start_detached(
    directory: EndpointDirectory, *, home: Path, debug: bool, timeout_s: float, tell: Callable[[str], None]
) -> int:
    """Start an agent that outlives this process, and wait until it is connected; its process id.

    A forwarder that has to be woken gets two minutes more, and ``tell`` is told why it takes so long.

    :raises StartFailed: with its own words if it ended.
    :raises Unavailable: if it was not connected in time; it was ended then, as when the waiting is interrupted.
    """
    readable, writable = os.pipe()
    options = ["--ready-fd", str(writable), *(["--debug"] if debug else [])]
    with _console(directory) as console, os.fdopen(readable, "rb") as ready:
        said_before = console.tell()
        process = subprocess.Popen(
            agent_command(directory, home=home, options=options),
            stdin=subprocess.DEVNULL,
            stdout=console,
            stderr=console,
            pass_fds=(writable,),
            start_new_session=True,
            cwd=directory.path,
        )
        os.close(writable)
        try:
            waiting, _, _ = select.select([ready], [], [], timeout_s)
            if not waiting and ForwarderWaking.code in _trouble(directory):
                tell(_trouble(directory))
                timeout_s += _WAKING_S
                waiting, _, _ = select.select([ready], [], [], _WAKING_S)
            line = ready.readline() if waiting else b""
        except KeyboardInterrupt:  # nobody waits for it any more, and nobody would know of it
            _end(process)
            raise
    if line and json.loads(line).get("connected"):
        return process.pid
    if not waiting:
        trouble = _trouble(directory)
        _end(process)
        raise Unavailable(
            f"The endpoint was not connected within {timeout_s:g} s: {trouble}",
            hint=f"It was ended; {directory.log_file} has the details.",
        )
    code = process.wait()
    failed = StartFailed(str(json.loads(line)["error"]) if line else _last_words(directory, said_before))
    failed.exit_code = code or INTERNAL
    raise failed


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(STOP_MARGIN_S)
    process.kill()
    process.wait()


def _trouble(directory: EndpointDirectory) -> str:
    """Why the agent has no connection, in its own words."""
    return str(directory.read_status().get("trouble") or "it said nothing")


def stop_agent(directory: EndpointDirectory, *, grace_s: float) -> bool:
    """End the running agent in an orderly way; whether there was one.

    :raises EndpointInUse: if it runs on another machine.
    :raises ConfigurationError: if it belongs to somebody else.
    """
    agent = directory.read_agent()
    if agent is None:
        return False
    if not agent.is_here():
        raise EndpointInUse(
            f"The endpoint {directory.name} is run by process {agent.pid} on {agent.hostname}.", hint="Stop it there."
        )
    process = agent.find()
    if process is None:
        with directory.lock():
            return False  # whoever held it before died; letting go in an orderly way clears its name
    try:
        process.terminate()
        try:
            process.wait(grace_s + STOP_MARGIN_S)
        except psutil.TimeoutExpired:
            process.kill()
            process.wait(STOP_MARGIN_S)
    except psutil.NoSuchProcess:
        pass
    except psutil.AccessDenied as error:
        raise ConfigurationError(f"Process {agent.pid} belongs to another user.") from error
    return True


def _console(directory: EndpointDirectory) -> BinaryIO:
    """For what is printed past the logs; appended to, and begun anew when it has grown."""
    directory.log_dir.mkdir(mode=0o700, exist_ok=True)
    console = directory.console_file.open("ab")
    if console.tell() > _MAX_CONSOLE_BYTES:
        console.truncate(0)
        console.seek(0)
    return console


def _last_words(directory: EndpointDirectory, said_before: int) -> str:
    """What the process printed, or the end of its log."""
    printed = directory.console_file.read_bytes()[said_before:].decode(errors="replace")
    lines = (printed or tail(directory.log_file, _LOG_BYTES)).splitlines()[-_LOG_LINES:]
    return "The endpoint died while it started. Its last words:\n" + "\n".join(lines)
