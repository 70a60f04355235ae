"""Supervisor of a local tier: the process that starts the parts in order, restarts those that die, and stops all of
them.

``python -m farcall_local.supervisor DIRECTORY`` writes one JSON line to standard output when the tier is ready, or when
it failed to start. With ``--until-eof`` it stops when its standard input ends, that is, when its parent has ended. No
part survives it, even if it is killed: see :mod:`farcall_local.process`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import fcntl
import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from farcall_common.errors import ConfigurationError, FarcallError, Unavailable
from farcall_local.engines import Blobs, Postgres, Valkey
from farcall_local.process import Child, bound_log, free_port, listen
from farcall_local.services import Api, Forwarder, Part, base_environment, migrate, service_environment
from farcall_local.state import ProcessState, TierSecrets, TierState

_START_WITHIN_S = 150.0  # the end of a part is noticed at once; a start on a loaded machine takes long
_START_ATTEMPTS = 3
#: Delay in seconds before the n-th restart in a row of a part that does not stay up.
_BACKOFF_S = (0.0, 0.2, 0.5, 1.0, 2.0, 5.0)
_SETTLED_AFTER_S = 10.0
_MAINTAIN_FILES_EVERY_S = 2.0
#: Maximum size of each log in bytes; the previous part is kept as ``NAME.log.1``.
_MAX_LOG_BYTES_VARIABLE = "FARCALL_LOCAL_MAX_LOG_BYTES"
_MAX_LOG_BYTES = 32 * 1024 * 1024


class Supervisor:
    """Runs the parts of one tier, all of them from the event loop's thread."""

    def __init__(
        self, directory: Path, secrets: TierSecrets, *, api_port: int | None = None, max_log_bytes: int
    ) -> None:
        self._directory = directory
        self._api_port = api_port
        self._listeners = contextlib.ExitStack()
        self._max_log_bytes = max_log_bytes
        self._logs = directory / "logs"
        self._secrets = secrets
        self._environment: Mapping[str, str] = base_environment()
        self._children: dict[str, Child] = {}
        self._parts: dict[str, Part] = {}
        self._is_state_written = True
        self._state = TierState(phase="starting", supervisor_pid=os.getpid(), token=next(iter(secrets.tokens.values())))
        self._state = dataclasses.replace(self._state, tokens=secrets.tokens)

    async def run(self) -> None:
        """Start the tier, report that it is ready, and keep it up until cancelled; then stop all parts.

        :raises Unavailable: if a part does not start.
        """
        began = time.monotonic()
        try:
            async with asyncio.TaskGroup() as background:
                background.create_task(self._maintain_files())
                await self._start_in_order(background)
                self._publish(phase="ready", started_in_s=round(time.monotonic() - began, 3))
                _announce({"ready": True})
        except BaseExceptionGroup as group:
            ours, others = group.split(FarcallError)
            if ours is None or others is not None:
                raise
            first = _first_leaf(ours)
            self._publish(error=str(first))
            raise first from None
        finally:
            await self._stop_in_order()
            self._listeners.close()
            self._publish(phase="failed" if self._state.error else "stopped")

    async def _start_in_order(self, background: asyncio.TaskGroup) -> None:
        at, secrets = self._directory, self._secrets
        # First, so that a taken port fails before anything else is started.
        api = Api.listening(at, self._api_port)
        self._listeners.enter_context(api.listener)
        blobs = Blobs(at, self._listeners.enter_context(listen()), secrets.blob_key)
        async with asyncio.TaskGroup() as concurrent:
            concurrent.create_task(self._bring_up([blobs], background))  # the slowest one; nothing needs it yet
            await self._bring_up(
                [
                    Postgres(at, free_port(), secrets.database_password, migrate),
                    Valkey(at, secrets.queue_password),
                ],
                background,
            )
            postgres, valkey = self._parts["postgres"], self._parts["valkey"]
            assert isinstance(postgres, Postgres)
            assert isinstance(valkey, Valkey)
            stores = service_environment(secrets, postgres=postgres, valkey=valkey, blobs=blobs)
            self._environment = {**self._environment, **stores}
            self._publish(database_url=postgres.url, queue_url=valkey.url, blobs_url=blobs.url)
            if not postgres.has_schema():
                await asyncio.to_thread(migrate, postgres.url)
                postgres.note_schema()
            await self._bring_up([api, Forwarder(at)], background)
            self._publish(api_url=api.url)

    async def _bring_up(self, parts: Sequence[Part], background: asyncio.TaskGroup) -> None:
        """Start some parts concurrently, and keep them up."""
        async with asyncio.TaskGroup() as starting:
            for part in parts:
                starting.create_task(self._start_first(part))
        for part in parts:
            background.create_task(self._restart_when_ended(part.name))

    async def _start_first(self, part: Part) -> None:
        """Start a part whose address is not published yet, if needed several times: its port may be taken."""
        for attempt in range(1, _START_ATTEMPTS + 1):
            try:
                await self._start(part)
                return
            except Unavailable:
                if attempt == _START_ATTEMPTS:
                    raise
                if isinstance(part, Postgres):  # no other part can lose its port to another program
                    part = part.on_free_port()

    async def _start(self, part: Part) -> None:
        await asyncio.to_thread(part.prepare)
        child = await Child.start(part.program(environment=self._environment, logs=self._logs))
        self._children[part.name], self._parts[part.name] = child, part
        self._note(part.name, pid=child.pid)
        try:
            await child.wait_ready(part.is_ready, within_s=_START_WITHIN_S)
        except Unavailable:
            await child.stop()
            raise

    async def _restart_when_ended(self, name: str) -> None:
        """Restart a part each time that it ends, with a growing delay."""
        deaths = 0
        while True:
            since = time.monotonic()
            status = await self._children[name].wait()
            deaths = 1 if time.monotonic() - since > _SETTLED_AFTER_S else deaths + 1
            before = self._state.processes[name]
            self._note(name, pid=None, restarts=before.restarts + 1, last_status=status)
            _log(f"{name} ended with status {status}; start {before.restarts + 1} follows")
            await asyncio.sleep(_BACKOFF_S[min(deaths, len(_BACKOFF_S)) - 1])
            try:
                await self._start(self._parts[name])
            except (Unavailable, OSError) as failure:  # for example a full disk
                _log(str(failure))

    async def _maintain_files(self) -> None:
        """Rotate the logs, and write the state if that failed because of a full disk."""
        while True:
            for path in self._logs.glob("*.log"):
                await asyncio.to_thread(bound_log, path, max_bytes=self._max_log_bytes)
            if not self._is_state_written:
                self._write_state()
            await asyncio.sleep(_MAINTAIN_FILES_EVERY_S)

    async def _stop_in_order(self) -> None:
        """Stop the services first, then the stores that they write to."""
        self._publish(phase="stopping")
        stores = {"postgres", "valkey", "blobs"}
        for names in (self._children.keys() - stores, self._children.keys() & stores):
            await asyncio.gather(*(self._children[name].stop() for name in names))
            for name in names:
                if name in self._state.processes:
                    self._note(name, pid=None)

    def _note(self, name: str, **changes: int | None) -> None:
        before = self._state.processes.get(name, ProcessState())
        changed = dataclasses.replace(before, **changes)  # type: ignore[arg-type]
        self._publish(processes={**self._state.processes, name: changed})

    def _publish(self, **changes: object) -> None:
        self._state = dataclasses.replace(self._state, **changes)  # type: ignore[arg-type]
        self._write_state()

    def _write_state(self) -> None:
        """Write the state. A running tier tolerates a failure and tries again later.

        :raises OSError: while the tier starts.
        """
        try:
            self._state.write(self._directory)
        except OSError as error:
            if self._state.phase == "starting":
                raise
            if self._is_state_written:
                _log(f"cannot write the state of the tier: {error}")
            self._is_state_written = False
        else:
            self._is_state_written = True


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the supervisor; returns 0 if it was stopped, 1 if the tier could not start."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--until-eof", action="store_true")
    parser.add_argument("--user", action="append", default=[])
    parser.add_argument("--port", type=int)
    options = parser.parse_args(arguments)
    directory: Path = options.directory
    (directory / "logs").mkdir(parents=True, exist_ok=True)
    try:
        with _only_one(directory):
            secrets = TierSecrets.load_or_create(directory, users=options.user or ["me"])
            supervisor = Supervisor(directory, secrets, api_port=options.port, max_log_bytes=_max_log_bytes())
            asyncio.run(_run_until_stopped(supervisor, until_eof=options.until_eof))
    except FarcallError as failure:
        _announce({"ready": False, "error": failure.record.to_json()})
        _log(str(failure))
        return 1
    return 0


def _max_log_bytes() -> int:
    """:raises ConfigurationError: if the variable is not a number of bytes."""
    text = os.environ.get(_MAX_LOG_BYTES_VARIABLE, str(_MAX_LOG_BYTES))
    if not text.isdecimal() or int(text) == 0:
        raise ConfigurationError(f"{_MAX_LOG_BYTES_VARIABLE} is {text!r}, expected a number of bytes above 0")
    return int(text)


async def _run_until_stopped(supervisor: Supervisor, *, until_eof: bool) -> None:
    running = asyncio.ensure_future(supervisor.run())
    loop = asyncio.get_running_loop()
    stopping = False

    def stop() -> None:
        nonlocal stopping
        if not stopping:  # a second signal must not interrupt the shutdown that the first one started
            stopping = True
            running.cancel()

    def on_input() -> None:
        if not os.read(sys.stdin.fileno(), 4096):
            loop.remove_reader(sys.stdin.fileno())
            stop()

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(number, stop)
    if until_eof:
        loop.add_reader(sys.stdin.fileno(), on_input)
    with contextlib.suppress(asyncio.CancelledError):
        await running


@contextlib.contextmanager
def _only_one(directory: Path) -> Iterator[None]:
    """Hold the directory's lock. The kernel releases it when the process ends, however it ends."""
    with (directory / "lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigurationError(
                f"a local tier is already running in {directory}", hint="`farcall local status` shows it."
            ) from None
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        yield


def _announce(message: Mapping[str, object]) -> None:
    """Report to the parent process, then close the pipe: the parent reads only one line."""
    os.write(1, json.dumps(message).encode() + b"\n")
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.close(null)


def _first_leaf(group: BaseExceptionGroup[FarcallError]) -> FarcallError:
    first = group.exceptions[0]
    return _first_leaf(first) if isinstance(first, BaseExceptionGroup) else first


def _log(text: str) -> None:
    with contextlib.suppress(OSError):  # the disk is full
        print(f"{time.strftime('%Y-%m-%dT%H:%M:%S')} {text}", file=sys.stderr, flush=True)  # noqa: T201 - it is the log


if __name__ == "__main__":
    sys.exit(main())
