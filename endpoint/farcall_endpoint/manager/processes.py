"""The processes of a node as its manager sees them: what its workers use, and what a dead one has left behind."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Final

from farcall_endpoint.process_reaper import adopt_orphans, ancestry, children_of, kill_trees, read_processes

_logger = logging.getLogger(__name__)

_PERIOD_S: Final = 0.2
"""At most so often all processes are looked at. What was killed is dead a little later, and to be collected then."""


@dataclasses.dataclass(frozen=True)
class MeasuredTask:
    """A running task whose memory is limited. ``held_bytes``: what the processes of its worker's tree held as it began,
    by process id; they are lowered as those shrink, so that memory which is freed and taken again counts."""

    limit_bytes: int
    held_bytes: dict[int, int]


def memory_of_tasks(tasks: Mapping[int, MeasuredTask]) -> dict[int, int]:
    """The bytes that tasks use, by the pid of the worker that runs each: resident memory of the worker and of all that
    descends from it, beyond what was held before.

    Forked processes share their memory until they write to it, so a sum of resident memory may count a page many times.
    Only where that sum is above the limit the pages are shared out (``Pss``), which takes the kernel longer.
    """
    processes = read_processes()
    trees: dict[int, list[int]] = {worker: [] for worker in tasks}
    for pid in processes:
        for ancestor in ancestry(pid, processes):
            if ancestor in trees:
                trees[ancestor].append(pid)
    used: dict[int, int] = {}
    for worker, task in tasks.items():
        resident = {pid: processes[pid].resident_bytes for pid in trees[worker]}
        for pid, size_bytes in resident.items():
            if size_bytes < task.held_bytes.get(pid, 0):
                task.held_bytes[pid] = size_bytes
        held_bytes = sum(task.held_bytes.get(pid, 0) for pid in resident)
        used[worker] = sum(resident.values()) - held_bytes
        if used[worker] > task.limit_bytes:
            shared_out = sum(_proportional_bytes(pid, default=size_bytes) for pid, size_bytes in resident.items())
            used[worker] = min(used[worker], max(0, shared_out - held_bytes))
    return used


def output_bytes(descriptors: Iterable[int]) -> int:
    """Bytes in the larger of the capture files."""
    return max(os.fstat(descriptor).st_size for descriptor in descriptors)


def _proportional_bytes(pid: int, *, default: int) -> int:
    """What a process holds, where a page that n processes share counts for an n-th; the default if nothing says."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8", errors="replace")
    except OSError:  # it has ended, belongs to another user, or the kernel is too old
        return default
    return next((int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("Pss:")), default)


class Orphans:
    """Adopts what workers leave behind when they die, ends it, and collects it. One per process.

    A program that became a manager (``exec`` of a shell) may have children of that earlier life, and their orphans
    would look like those of workers: such a manager adopts none.
    """

    def __init__(self) -> None:
        #: When to call :meth:`end`, in monotonic seconds; None if there is no reason to.
        self.due_at: float | None = None
        self._looked_at = 0.0
        self._adopts = False
        if children_of(os.getpid(), read_processes()):
            _logger.warning("this process has children from before its start; what workers leave behind is not adopted")
            return
        try:
            adopt_orphans()
        except OSError as error:
            _logger.warning("what workers leave behind cannot be ended: %s", error)
        else:
            self._adopts = True

    def expect(self, *, now: float) -> None:
        """A worker has died."""
        self.due_at = max(now, self._looked_at + _PERIOD_S)

    def end(self, *, known: Collection[int], now: float) -> None:
        """End and collect all children that are not ``known``."""
        self._looked_at = now
        strangers = self._strangers(known)
        kill_trees(strangers)
        for pid in strangers:
            os.waitpid(pid, os.WNOHANG)
        self.due_at = now + _PERIOD_S if strangers else None

    def _strangers(self, known: Collection[int]) -> set[int]:
        return children_of(os.getpid(), read_processes()).difference(known) if self._adopts else set()
