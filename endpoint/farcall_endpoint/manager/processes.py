"""Processes by descent, as ``/proc`` tells it: what a worker has started, also in sessions of its own."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Final, NamedTuple

__all__ = ["ProcessTable", "kill_tree"]

_PROC: Final = Path("/proc")
_PPID, _RSS = 1, 21
"""Places of the parent and of the resident pages in ``/proc/PID/stat``, counted behind the name of the program."""


class _Process(NamedTuple):
    parent: int
    resident_bytes: int


class ProcessTable:
    """All processes at one moment."""

    def __init__(self, processes: Mapping[int, _Process]) -> None:
        self._processes = processes

    @classmethod
    def read(cls) -> ProcessTable:
        """The processes of now."""
        processes = {}
        page_bytes = resource.getpagesize()
        for entry in _PROC.iterdir():
            if not entry.name.isdigit():
                continue
            try:
                fields = (entry / "stat").read_bytes().rpartition(b")")[2].split()
            except OSError:
                continue  # it has ended meanwhile
            processes[int(entry.name)] = _Process(int(fields[_PPID]), int(fields[_RSS]) * page_bytes)
        return cls(processes)

    def memory_of_trees(self, roots: Iterable[int]) -> dict[int, int]:
        """Resident bytes of processes with all that descend from them."""
        totals = dict.fromkeys(roots, 0)
        for pid, process in self._processes.items():
            for ancestor in self._line(pid):
                if ancestor in totals:
                    totals[ancestor] += process.resident_bytes
        return totals

    def descendants(self, roots: Collection[int]) -> set[int]:
        """All that descend from any of these processes, without those themselves."""
        return {
            pid
            for pid in self._processes
            if pid not in roots and any(ancestor in roots for ancestor in self._line(pid))
        }

    def _line(self, pid: int) -> Iterable[int]:
        """A process, its parent, and so on."""
        while pid in self._processes:
            yield pid
            pid = self._processes[pid].parent


def kill_tree(root: int) -> None:
    """End a process, its process group, and all that descends from it, wherever it went.

    What is found is stopped first, so that nothing can be started behind our back while we look. A process whose parent
    has ended is found only if it stayed in the group.
    """
    found: set[int] = set()
    while new := ProcessTable.read().descendants({root, *found}) - found:
        _signal(new, signal.SIGSTOP)
        found |= new
    _signal(found, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(root, signal.SIGKILL)


def _signal(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)
