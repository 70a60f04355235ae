"""Commands of preparations: each with a time limit and a log, and killed with all its descendants."""

from __future__ import annotations

import contextlib
import os
import selectors
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from farcall_common.plain_text import PlainStream
from farcall_endpoint.environments.prepare import probe
from farcall_endpoint.host import process_reaper

_MOST_OUTPUT_BYTES: Final = 64 * 1024
_MOST_LOG_BYTES: Final = 2**20


class CommandError(Exception):
    """A command failed. ``output`` is the end of what it printed, ``code`` its exit code, None if it took too long."""

    def __init__(self, output: bytes, code: int | None) -> None:
        super().__init__(probe.last_lines(output) or ("it took too long" if code is None else f"exit code {code}"))
        self.output = output
        self.code = code


class Commands:
    """Runs commands, each with its descendants as a group, in any thread. :meth:`close` kills them all."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[int] = set()
        self._closed = False

    def run(
        self,
        command: Sequence[str],
        *,
        limit_s: float,
        log: Path | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> bytes:
        """Run a command; the end of what it printed, on both streams.

        :param variables: its environment variables; None: those of this process.
        :raises CommandError: if it fails, or takes longer than the limit.
        """
        with self._lock:
            if self._closed:
                raise CommandError(b"the manager ends", None)
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(process_reaper.__file__), *command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=variables,
                start_new_session=True,
            )
            self._running.add(process.pid)
        with process, _opened(log) as write:
            try:
                write(f"$ {' '.join(command)}\n".encode())
                output, in_time = _read(process, deadline=time.monotonic() + limit_s, write=write)
            finally:
                process_reaper.kill_trees({process.pid})
                code = process.wait()
                with self._lock:
                    self._running.discard(process.pid)
        if code or not in_time:
            raise CommandError(output, code if in_time else None)
        return output

    @property
    def is_closed(self) -> bool:
        """Whether no command can be run any more."""
        return self._closed

    def close(self) -> None:
        """Kill all that run, with their descendants, and run no others."""
        with self._lock:
            self._closed = True
            process_reaper.kill_trees(set(self._running))


def _read(process: subprocess.Popen[bytes], *, deadline: float, write: Callable[[bytes], object]) -> tuple[bytes, bool]:
    """The end of a process's output, and whether it ended in time."""
    output = b""
    assert process.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while (left_s := deadline - time.monotonic()) > 0:
            if not selector.select(left_s):
                continue
            data = os.read(process.stdout.fileno(), _MOST_OUTPUT_BYTES)
            write(data)
            if not data:
                return output, True
            output = (output + data)[-_MOST_OUTPUT_BYTES:]
    return output, False


@contextlib.contextmanager
def _opened(log: Path | None) -> Iterator[Callable[[bytes], object]]:
    """A function that adds output to a log file, which stays below its limit; empty bytes end the output. A log that
    cannot be written is left out."""
    try:
        file = None if log is None else open(log, "ab", buffering=0, opener=_private)  # noqa: SIM115 - closed below
    except OSError:
        file = None
    if file is None:
        yield lambda _: None
        return

    plain = PlainStream()

    def write(data: bytes) -> None:
        with contextlib.suppress(OSError):  # the disk is full: that is no reason to stop
            if file.tell() < _MOST_LOG_BYTES:
                file.write(plain.write(data))

    with file:
        yield write


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
