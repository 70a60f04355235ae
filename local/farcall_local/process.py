"""Supervised processes: start, readiness, stop and logs. None outlives its supervisor."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import dataclasses
import os
import pwd
import shutil
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

from farcall_common.errors import ConfigurationError, Unavailable

_PR_SET_PDEATHSIG = 1
_PROBE_EVERY_S = 0.02
_LOOPBACK = "127.0.0.1"
_BACKLOG = 2048
_MAX_PORT = 65_535
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


@dataclasses.dataclass(frozen=True)
class Account:
    """The user that a program runs as if its supervisor is root."""

    uid: int
    gid: int

    @classmethod
    def nobody(cls) -> Account:
        """The unprivileged account ``nobody``."""
        entry = pwd.getpwnam("nobody")
        return cls(entry.pw_uid, entry.pw_gid)


@dataclasses.dataclass(frozen=True)
class Program:
    """Description of one process.

    ``stop_signal`` ends it; after ``stop_within_s`` seconds it is killed. The kernel sends ``orphan_signal`` if the
    supervisor dies without stopping it: SIGKILL, unless the program needs an orderly end. ``listener`` is a socket that
    it inherits with the same file descriptor.
    """

    name: str
    argv: Sequence[str]
    environment: Mapping[str, str]
    log_path: Path
    cwd: Path = Path("/")
    account: Account | None = None
    listener: socket.socket | None = None
    stop_signal: signal.Signals = signal.SIGTERM
    stop_within_s: float = 5.0
    orphan_signal: signal.Signals = signal.SIGKILL


class Child:
    """A running :class:`Program`."""

    def __init__(self, program: Program, process: asyncio.subprocess.Process) -> None:
        self.program = program
        self._process = process

    @classmethod
    async def start(cls, program: Program) -> Child:
        """Start the program; its output is appended to its log.

        Call it from a thread that lives as long as the supervisor: the kernel sends the orphan signal when the *thread*
        that forked the child ends.
        """
        account, supervisor_pid, orphan_signal = program.account, os.getpid(), program.orphan_signal

        def tie_to_supervisor() -> None:  # runs in the child between fork and exec, after the change of user
            if _LIBC is None:
                return
            _LIBC.prctl(_PR_SET_PDEATHSIG, int(orphan_signal), 0, 0, 0)
            if os.getppid() != supervisor_pid:  # the supervisor died before the line above
                os.kill(os.getpid(), signal.SIGKILL)

        with program.log_path.open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *program.argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=dict(program.environment),
                cwd=program.cwd,
                user=account.uid if account else None,
                group=account.gid if account else None,
                extra_groups=[] if account else None,
                pass_fds=[program.listener.fileno()] if program.listener else (),
                preexec_fn=tie_to_supervisor,
            )
        return cls(program, process)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def wait(self) -> int:
        """Wait until the process has ended; returns its exit status, negative for a signal."""
        return await self._process.wait()

    async def wait_ready(self, probe: Callable[[], Awaitable[bool]], *, within_s: float) -> None:
        """Wait until ``probe`` returns true.

        :raises Unavailable: if the process ends first or ``within_s`` seconds pass; with the end of its log.
        """
        deadline = time.monotonic() + within_s
        while not await probe():
            if self._process.returncode is not None:
                raise self._failed(f"ended with status {self._process.returncode} while starting")
            if time.monotonic() > deadline:
                raise self._failed(f"was not ready within {within_s:g} s")
            await asyncio.sleep(_PROBE_EVERY_S)

    async def stop(self) -> None:
        """Signal the process to end, kill it after a time limit, and reap it."""
        if self._process.returncode is None:
            self._process.send_signal(self.program.stop_signal)
            try:
                async with asyncio.timeout(self.program.stop_within_s):
                    await self._process.wait()
            except TimeoutError:
                self._process.kill()
        await self._process.wait()

    def _failed(self, reason: str) -> Unavailable:
        tail = log_tail(self.program.log_path)
        return Unavailable(
            f"{self.program.name} {reason}; the end of its log:\n{tail}", hint=f"The whole log: {self.program.log_path}"
        )


def bound_log(path: Path, *, max_bytes: int) -> None:
    """Rotate a log that is larger than ``max_bytes``: copy it to ``NAME.log.1``, replacing the last copy, and truncate
    it.

    Programs append to the file that they have open, so they continue at its new end. A few lines written during the
    rotation may be lost. If the disk has no space for the copy, there is none.
    """
    earlier = path.with_name(f"{path.name}.1")
    try:
        if path.stat().st_size <= max_bytes:
            return
        earlier.unlink(missing_ok=True)  # free its space first
        shutil.copyfile(path, earlier)
    except FileNotFoundError:
        return
    except OSError:
        with contextlib.suppress(OSError):
            earlier.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        os.truncate(path, 0)


def log_tail(path: Path, *, lines: int = 20) -> str:
    """The last lines of a log, or a note that it is missing or empty."""
    try:
        text = path.read_text(errors="replace")
    except FileNotFoundError:
        return "(no log)"
    return "\n".join(text.splitlines()[-lines:]) or "(the log is empty)"


def listen(port: int = 0) -> socket.socket:
    """A socket that listens on a loopback port (0: a free one), for a program to inherit.

    The caller keeps it open, so no other program can take the port while the program is down.

    :raises ConfigurationError: if the port is not available.
    """
    if not 0 <= port <= _MAX_PORT:
        raise ConfigurationError(f"Port {port} does not exist.", hint=f"Choose a port from 1 to {_MAX_PORT}.")
    try:
        return socket.create_server((_LOOPBACK, port), backlog=_BACKLOG)
    except OSError as error:
        raise ConfigurationError(
            f"Port {port} cannot be used: {os.strerror(error.errno or 0)}.",
            hint=f"End the program that uses it (`ss -tlnp 'sport = :{port}'` shows it), or choose another port.",
        ) from error


def free_port() -> int:
    """A free loopback TCP port. Another process may take it first, so callers must be ready to retry."""
    with socket.socket() as probe:
        probe.bind((_LOOPBACK, 0))
        return int(probe.getsockname()[1])
