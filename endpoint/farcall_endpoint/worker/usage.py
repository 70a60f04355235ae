"""Memory usage of a task: the memory of its worker and child processes, less what they held when it began.

Memory of earlier tasks (a module's cache, free memory that the allocator keeps, a running process) does not count. The
manager measures while the task runs (:mod:`farcall_endpoint.manager.shell.processes`); the kernel keeps the peak of the
worker's own process, which is read at the end, so that no peak between two measurements is missed.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
from typing import Final

from farcall_endpoint.host.memory_files import Mounts, held
from farcall_endpoint.host.process_reaper import read_process, tree

_KIB: Final = 1024
_TRIM_BYTES: Final = 64 * 2**20
"""A worker that has grown by so much since its memory was last trimmed trims it again."""


class Usage:
    """One per worker. Only called for tasks whose memory is limited."""

    def __init__(self) -> None:
        self._trimmed_bytes = 0  # the first task may trim: to read it here would take time in each worker
        self._began_bytes = 0
        self._peak_before_bytes = 0
        self._mounts: Mounts | None = None

    def begin(self) -> tuple[dict[int, int], dict[str, int]]:
        """A task begins: the resident bytes of the worker and of each process that earlier tasks left below it, and the
        bytes of files in memory (:func:`~farcall_endpoint.host.memory_files.held`)."""
        resident_bytes, _ = _resident_and_peak()
        if resident_bytes > self._trimmed_bytes + _TRIM_BYTES:
            # What is free, but not given back, would be the next task's without being counted.
            gc.collect()
            _trim()
            self._trimmed_bytes, _ = _resident_and_peak()
        with contextlib.suppress(OSError), open("/proc/self/clear_refs", "wb", buffering=0) as file:  # noqa: PTH123
            file.write(b"5")  # forgets the peak; not every kernel offers it
        self._began_bytes, self._peak_before_bytes = _resident_and_peak()
        resident = {os.getpid(): self._began_bytes, **_processes_below()}
        if self._mounts is None:
            self._mounts = Mounts.of("self")
        return resident, held(resident, self._mounts)

    def peak_bytes(self) -> int:
        """Return the peak memory of the worker's own process since :meth:`begin`, beyond its memory at that time."""
        resident_bytes, peak_bytes = _resident_and_peak()
        highest = peak_bytes if peak_bytes > self._peak_before_bytes else resident_bytes
        return max(0, highest - self._began_bytes)


def _resident_and_peak() -> tuple[int, int]:
    """Bytes of this process: now, and at most."""
    found = {"VmRSS": 0, "VmHWM": 0}
    with open("/proc/self/status", encoding="utf-8", errors="replace") as file:  # noqa: PTH123 - quicker than pathlib
        for line in file:
            name, _, value = line.partition(":")
            if name in found:
                found[name] = int(value.split()[0]) * _KIB
    return found["VmRSS"], found["VmHWM"]


def _processes_below() -> dict[int, int]:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return {}  # there are none, as nearly always
    found = ((pid, read_process(pid)) for pid in tree(os.getpid()))
    return {pid: process.resident_bytes for pid, process in found if process is not None}


def _trim() -> None:
    with contextlib.suppress(AttributeError):  # musl gives free memory back by itself
        ctypes.CDLL(None).malloc_trim(0)
