"""One operating-system process: how it is started, watched, and stopped, so that none outlives its supervisor."""

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

__all__ = ["Account", "Child", "Program", "bound_log", "free_port", "listen", "log_tail"]

_PR_SET_PDEATHSIG = 1
_PROBE_EVERY_S = 0.02
_LOOPBACK = "127.0.0.1"
_BACKLOG = 2048
_MAX_PORT = 65_535
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


@dataclasses.dataclass(frozen=True)
class Account:
    """The user that a program runs as when its supervisor is root."""

    uid: int
    gid: int

    @classmethod
    def nobody(cls) -> Account:
        """The account that owns nothing."""
        entry = pwd.getpwnam("nobody")
        return cls(entry.pw_uid, entry.pw_gid)


@dataclasses.dataclass(frozen=True)
class Program:
    """How to run one process.

    ``stop_signal`` asks it to end; it has ``stop_within_s`` seconds before it is killed. ``orphan_signal`` is what the
    kernel sends it when the supervisor dies without having stopped it: SIGKILL, unless ending at once would hurt.
    ``listener`` is a socket that it inherits, under the same number.
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
        """Start the program; its output goes to the end of its log.

        Call it from the thread that lives as long as the supervisor: the kernel ties a child's orphan signal to the
        *thread* that forked it.
        """
        account, supervisor_pid, orphan_signal = program.account, os.getpid(), program.orphan_signal

        def tie_to_supervisor() -> None:  # runs in the child between fork and exec, after the change of user
            if _LIBC is None:
                return
            _LIBC.prctl(_PR_SET_PDEATHSIG, int(orphan_signal), 0, 0, 0)
            if os.getppid() != supervisor_pid:  # it died before the line above
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
        """Wait until the process has ended; its exit status, negative for a signal."""
        return await self._process.wait()

    async def wait_ready(self, probe: Callable[[], Awaitable[bool]], *, within_s: float) -> None:
        """Wait until ``probe`` says yes.

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
        """Ask the process to end, kill it when it does not, and reap it."""
        if self._process.returncode is None:
            self._process.send_signal(self.program.stop_signal)
            try:
                async with asyncio.timeout(self.program.stop_within_s):
                    await self._process.wait()
            except TimeoutError:
                self._process.kill()
        await self._process.wait()

    def _failed(self, what: str) -> Unavailable:
        tail = log_tail(self.program.log_path)
        return Unavailable(
            f"{self.program.name} {what}; the end of its log:\n{tail}", hint=f"The whole log: {self.program.log_path}"
        )


def bound_log(path: Path, *, max_bytes: int) -> None:
    """Empty a log that is larger than ``max_bytes``; what was in it is kept as ``NAME.log.1``, not what was there.

    Programs write to the end of the file that they have open, so they go on at its new end. A few lines that are
    written meanwhile may be lost. Where the disk has no room for the copy, there is none.
    """
    earlier = path.with_name(f"{path.name}.1")
    try:
        if path.stat().st_size <= max_bytes:
            return
        earlier.unlink(missing_ok=True)  # its room first
        shutil.copyfile(path, earlier)
    except FileNotFoundError:
        return
    except OSError:
        with contextlib.suppress(OSError):
            earlier.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        os.truncate(path, 0)


def log_tail(path: Path, *, lines: int = 20) -> str:
    """The last lines of a log, or a word that says there is none."""
    try:
        text = path.read_text(errors="replace")
    except FileNotFoundError:
        return "(no log)"
    return "\n".join(text.splitlines()[-lines:]) or "(the log is empty)"


def listen(port: int = 0) -> socket.socket:
    """A socket that listens on a loopback port (0: a free one), for a program to inherit.

    Who made it keeps it open: while the program is down, nobody else can take the port and pretend to be the program.

    :raises ConfigurationError: if the port cannot be had.
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
    """A loopback TCP port that nobody listens on now. Another process may take it first: be ready to ask again."""
    with socket.socket() as probe:
        probe.bind((_LOOPBACK, 0))
        return int(probe.getsockname()[1])
