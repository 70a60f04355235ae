"""Control of an endpoint's agent from another process: start, state, stop."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Literal

import psutil

from farcall_common.environments import TYPES, UV, Environment
from farcall_common.errors import (
    ConfigurationError,
    EndpointInUse,
    FarcallError,
    ForwarderWaking,
    Unavailable,
    did_you_mean,
)
from farcall_common.exit_codes import INTERNAL
from farcall_endpoint.contracts.agent_manager import PrewarmRequest
from farcall_endpoint.host.logs import tail
from farcall_endpoint.services.directory import AgentProcess, EndpointDirectory

STOP_MARGIN_S = 15.0
"""Seconds for an orderly shutdown, in addition to the grace of running tasks."""

_WAKING_S = 120.0
_START_POLL_S = 0.2
_IN_FORCE = "The request stays in force; --count 0 ends it."
_PREWARM_POLL_S = 0.2

_LOG_LINES = 5
_LOG_BYTES = 4096
_MAX_CONSOLE_BYTES = 2**20

LocalState = Literal["Initialized", "Running", "Blocked", "Stopped", "Disconnected"]


@dataclasses.dataclass(frozen=True)
class State:
    """State of an endpoint, as read from its directory. ``note`` explains it. An endpoint that is Blocked is connected,
    and can start no task: no block can be had, or its spool has no room."""

    state: LocalState
    endpoint_id: str | None
    agent: AgentProcess | None
    numbers: dict[str, Any]
    note: str


class StartFailed(FarcallError):
    """The daemon ended before it was connected; ``exit_code`` is its own."""

    code = "START_FAILED"
    exit_code: int = INTERNAL


class PrewarmFailed(Unavailable):
    """Workers of an environment cannot be warmed."""

    code = "PREWARM_FAILED"


def read_state(directory: EndpointDirectory) -> State:
    """Read the files, and check the process that they name."""
    endpoint_id, agent = directory.read_endpoint_id(), directory.read_agent()
    if agent is None:
        return State("Initialized" if endpoint_id is None else "Stopped", endpoint_id, None, {}, "")
    if not agent.is_here():
        note = f"may run on {agent.hostname} as process {agent.pid}: check there"
        return State("Disconnected", endpoint_id, agent, {}, note)
    if agent.find() is None:
        return State("Disconnected", endpoint_id, None, {}, f"process {agent.pid} died; see {directory.log_file}")
    numbers = directory.read_status()
    if not numbers.get("connected"):
        return State("Disconnected", endpoint_id, agent, numbers, str(numbers.get("connection_problem", "is starting")))
    if blocked := numbers.get("blocked"):
        return State("Blocked", endpoint_id, agent, numbers, str(blocked))
    return State("Running", endpoint_id, agent, numbers, str(numbers.get("problem", "")))


def agent_command(directory: EndpointDirectory, *, home: Path, options: Sequence[str] = ()) -> list[str]:
    """The command line of an endpoint's agent."""
    return [sys.executable, "-P", "-m", "farcall_endpoint.agent", directory.name, "--home", str(home), *options]


def start_detached(
    directory: EndpointDirectory, *, home: Path, debug: bool, timeout_s: float, echo: Callable[[str], None]
) -> int:
    """Start an agent that outlives this process, and wait until it is connected; its process id.

    A forwarder that must be woken gets two more minutes, and ``echo`` receives the reason. When the wait is
    interrupted, the agent is stopped.

    :param timeout_s: for the connection, from when the agent has started up; see :func:`wait_for_start`.
    :raises StartFailed: if it ended; with its error.
    :raises Unavailable: if it is not connected in time; it goes on.
    """
    readable, writable = os.pipe()
    options = ["--ready-fd", str(writable), *(["--debug"] if debug else [])]
    with _console(directory) as console, os.fdopen(readable, "rb") as ready:
        offset = console.tell()
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
            has_reported = wait_for_start(
                ready, process.pid, is_up=lambda: _is_agent(directory, process.pid), timeout_s=timeout_s
            )
            if not has_reported and ForwarderWaking.code in _connection_problem(directory):
                echo(_connection_problem(directory))
                timeout_s += _WAKING_S
                has_reported = bool(select.select([ready], [], [], _WAKING_S)[0])
            line = ready.readline() if has_reported else b""
        except KeyboardInterrupt:  # no caller would know of it
            _terminate(process)
            raise
    if line and json.loads(line).get("connected"):
        return process.pid
    if not has_reported:
        name = directory.name
        raise Unavailable(
            f"The endpoint is not connected after {timeout_s:g} s: {_connection_problem(directory)}",
            hint=f"Its process {process.pid} runs on and keeps trying: `farcall-endpoint status {name}` shows it, "
            f"`farcall-endpoint stop {name}` ends it, and --timeout waits longer. Its log is {directory.log_file}.",
        )
    code = process.wait()
    failed = StartFailed(str(json.loads(line)["error"]) if line else _last_output(directory, offset))
    failed.exit_code = code or INTERNAL
    raise failed


def wait_for_start(ready: BinaryIO, pid: int, *, is_up: Callable[[], bool], timeout_s: float) -> bool:
    """Wait until an agent reports, or has ended; whether it has.

    A busy machine may take minutes to load an agent. So the time runs from when the agent is up; until then, the wait
    goes on as long as the process uses the CPU.

    :param ready: readable when the agent reports or has ended.
    :param is_up: whether the agent has started up.
    """
    was_up, used_s = False, 0.0
    ends_at = time.monotonic() + timeout_s
    while not select.select([ready], [], [], max(0.0, min(_START_POLL_S, ends_at - time.monotonic())))[0]:
        if not was_up and is_up():
            was_up, ends_at = True, time.monotonic() + timeout_s
        if time.monotonic() < ends_at:
            continue
        before_s, used_s = used_s, _cpu_time_s(pid)
        if was_up or used_s <= before_s:
            return False
        ends_at = time.monotonic() + timeout_s
    return True


def _cpu_time_s(pid: int) -> float:
    with contextlib.suppress(psutil.Error):
        times = psutil.Process(pid).cpu_times()
        return float(times.user + times.system)
    return 0.0


def _is_agent(directory: EndpointDirectory, pid: int) -> bool:
    """Whether this process is the agent of the endpoint by now."""
    agent = directory.read_agent()
    return agent is not None and agent.pid == pid


def _terminate(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(STOP_MARGIN_S)
    process.kill()
    process.wait()


def _connection_problem(directory: EndpointDirectory) -> str:
    """Why the agent has no connection, by its status."""
    return str(directory.read_status().get("connection_problem") or "no status from the agent")


def find_environment(directory: EndpointDirectory, given: str) -> Environment:
    """An environment that the agent knows by this name, label or key, or ``TYPE:LOCATION``, which for packages is
    ``uv:REQUIREMENT ...``.

    :raises ConfigurationError: if it is none; lists those that are known.
    """
    known = [Environment.of(each) for each in directory.read_status().get("known_environments", ())]
    known += [each.environment for each in directory.read_prewarms()]
    for environment in known:
        if given in (environment.name, environment.label, environment.key):
            return environment
    kind, colon, location = given.partition(":")
    if colon and kind in TYPES:
        try:
            place = {"requirements": tuple(location.split())} if kind == UV else {"location": location}
            return Environment.of({"type": kind, **place})
        except ValueError as error:
            raise ConfigurationError(f"{given}: {error}.") from error
    labels = list(dict.fromkeys(each.label for each in known))
    listed = f"Known are {', '.join(labels)}." if labels else "No task has named one yet."
    hint = did_you_mean(given, labels)
    if not hint and colon and (meant := did_you_mean(kind, TYPES)):
        hint = f"{kind!r} is not a type of environment. {meant}"
    hint = hint or f"{listed} TYPE:LOCATION names any other; TYPE is one of {', '.join(TYPES)}."
    raise ConfigurationError(f"The endpoint {directory.name} knows no environment {given!r}.", hint=hint)


def prewarm(
    directory: EndpointDirectory, request: PrewarmRequest, *, timeout_s: float, echo: Callable[[str], None]
) -> str:
    """Have workers of an environment warmed, and wait until they are; a sentence about the outcome. The request stays
    until another one for the same environment, also when the agent is restarted.

    :raises PrewarmFailed: if they cannot be warm, or are not within the time.
    """
    key = request.environment.key
    others = [each for each in directory.read_prewarms() if each.environment.key != key]
    directory.write_prewarms([*others, *([request] if request.count else [])])
    if (agent := directory.read_agent()) is None or not agent.is_here() or agent.find() is None:
        return "The endpoint is not running here: it does so when it starts."
    if not request.count:
        return "Workers are kept warm as tasks need them, from now on."
    deadline = time.monotonic() + timeout_s
    last = "the agent has not read the request yet"
    while time.monotonic() < deadline:
        rows = directory.read_status().get("prewarm", ())
        row = next((row for row in rows if row["requested_at"] == request.requested_at and row["key"] == key), None)
        if row is not None:
            if row["placed"] and row["warm"] >= min(row["placed"], request.count):
                is_less = row["placed"] < request.count
                return f"{row['warm']} warm" + (f": the nodes have no slots for {request.count}" if is_less else "")
            if row["failed"]:
                raise PrewarmFailed(f"{request.environment.label}: {row['why']}", hint=_IN_FORCE)
            now = f"{row['warm']} of {row['placed']} warm, {row['starting']} starting"
            now += f" ({row['why']})" if row["why"] else ""
            if now != last:
                echo(now)
            last = now
        time.sleep(_PREWARM_POLL_S)
    raise PrewarmFailed(f"{request.environment.label} was not warm within {timeout_s:g} s: {last}", hint=_IN_FORCE)


def stop_agent(directory: EndpointDirectory, *, grace_s: float) -> bool:
    """Stop the running agent in an orderly way; whether one was running.

    :raises EndpointInUse: if it runs on another machine.
    :raises ConfigurationError: if it belongs to another user.
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
            return False  # its holder died; an orderly release clears the file
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
    """The file for output that bypasses the logs; appended to, and truncated when it is large."""
    directory.log_dir.mkdir(mode=0o700, exist_ok=True)
    console = directory.console_file.open("ab")
    if console.tell() > _MAX_CONSOLE_BYTES:
        console.truncate(0)
        console.seek(0)
    return console


def _last_output(directory: EndpointDirectory, offset: int) -> str:
    """The output of the process, or the end of its log."""
    printed = directory.console_file.read_bytes()[offset:].decode(errors="replace")
    lines = (printed or tail(directory.log_file, _LOG_BYTES)).splitlines()[-_LOG_LINES:]
    return "The endpoint died while starting. Its last output:\n" + "\n".join(lines)
