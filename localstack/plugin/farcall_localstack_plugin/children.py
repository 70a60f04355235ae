"""Child processes: each has a log file, and all are stopped when LocalStack stops.

They stay in LocalStack's process group, so the driver can end the children of a killed LocalStack.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil

_LOG_TAIL_BYTES = 4000
_STOP_TIMEOUT_S = 3.0
_RESTART_INTERVAL_S = 0.2
_POLL_S = 0.05

_children: list[Child] = []
_lock = threading.Lock()
_ended = threading.Event()


class ChildDied(Exception):
    """A process has ended unexpectedly; the message has the last lines of its log."""


class Child:
    """One running process. ``spawn`` starts it and each replacement."""

    def __init__(
        self, name: str, spawn: Callable[[], subprocess.Popen[bytes]], log: Path, stop_signal: signal.Signals
    ) -> None:
        self.name = name
        self.log = log
        self._spawn = spawn
        self._process = spawn()
        self._stop_signal = stop_signal
        self._stopping = threading.Event()
        self._released = threading.Event()
        self._released.set()
        self._restart_lock = threading.Lock()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def wait(self) -> int:
        """Block until the process has ended; returns its exit status."""
        return self._process.wait()

    def keep(self) -> None:
        """Restart the process after each end without :meth:`stop`, as AWS restarts a server."""
        threading.Thread(target=self._keep, name=f"keep-{self.name}", daemon=True).start()

    def _keep(self) -> None:
        while True:
            self._process.wait()
            self._stopping.wait(_RESTART_INTERVAL_S)
            self._released.wait()
            with self._restart_lock:
                if self._stopping.is_set() or _ended.is_set():
                    return
                self._process = self._spawn()

    def hold(self) -> None:
        """End the process; :meth:`release` starts it again."""
        self._released.clear()
        self._process.send_signal(self._stop_signal)
        self._process.wait()

    @property
    def is_held(self) -> bool:
        """Whether :meth:`hold` has ended the process."""
        return not self._released.is_set()

    def release(self) -> None:
        """Let :meth:`keep` start the process again."""
        self._released.set()

    def require_alive(self) -> None:
        """:raises ChildDied: if the process has ended."""
        if not self.alive:
            raise ChildDied(f"{self.name} ended with status {self._process.returncode}: {self.log_tail()}")

    def log_tail(self) -> str:
        return self.log.read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace").strip()

    def stop(self, *, within_s: float = _STOP_TIMEOUT_S) -> None:
        """Terminate the process, and kill it after a time limit."""
        with self._restart_lock:
            self._stopping.set()
        self._released.set()
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(self._stop_signal)
        try:
            self._process.wait(within_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        with _lock, contextlib.suppress(ValueError):
            _children.remove(self)


def start(
    name: str,
    command: Sequence[str | Path],
    *,
    log: Path,
    environment: Mapping[str, str],
    cwd: Path | None = None,
    user: str | None = None,
    stop_signal: signal.Signals = signal.SIGTERM,
) -> Child:
    """Start ``command`` as ``user`` (ours if not given), with its output appended to ``log``.

    :raises ChildDied: if LocalStack is stopping.
    """

    def spawn() -> subprocess.Popen[bytes]:
        with log.open("ab") as output:
            return subprocess.Popen(
                [str(part) for part in command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=dict(environment),
                cwd=cwd,
                user=user,
                group=pwd.getpwnam(user).pw_gid if user else None,
                extra_groups=[] if user else None,
            )

    with _lock:  # stop_all must see every child
        if _ended.is_set():
            raise ChildDied(f"{name} is not started: LocalStack is stopping")
        child = Child(name, spawn, log, stop_signal)
        _children.append(child)
    return child


def stop_all() -> None:
    """Stop all children and prevent new ones. The newest is stopped first, because it may depend on older ones."""
    with _lock:
        _ended.set()
        children = list(reversed(_children))
    for child in children:
        child.stop()


def end_group(directory: Path, *, within_s: float) -> None:
    """Remove a directory and end this process with its process group, including short-lived programs of threads.

    Such a program may write to the directory until it ends, and another may start until the directory is removed.
    """
    deadline = time.monotonic() + within_s
    while (others := _others_of_the_group()) or directory.exists():
        for pid in others:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(directory, ignore_errors=True)
        if time.monotonic() > deadline:
            break
        time.sleep(_POLL_S)
    os.killpg(os.getpgrp(), signal.SIGKILL)


def _others_of_the_group() -> list[int]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
            ours = os.getpgid(process.pid) == os.getpgrp() and process.pid != os.getpid()
            if ours and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
    return found


def stopping() -> bool:
    """Whether :func:`stop_all` has been called."""
    return _ended.is_set()


def unprivileged_user() -> str | None:
    """The user for PostgreSQL, which refuses root; None if we are not root."""
    return "nobody" if os.geteuid() == 0 else None
