"""Processes on a manager's node: the memory and output of its workers, and the orphans of dead ones."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from farcall_endpoint import process_reaper
from farcall_endpoint.process_reaper import (
    adopt_orphans,
    ancestry,
    own_children,
    read_process,
    read_processes,
    tree,
)

_logger = logging.getLogger(__name__)

_PERIOD_S: Final = 0.2
"""Shortest time between two readings of processes. Killed processes take a moment to die, and are reaped then."""
_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")
_START_S: Final = 2 / _TICKS_PER_S
"""The start of a process is known to a tick."""
_LAST_S: Final = 1.0
_WAIT_S: Final = 0.01
"""At the end of this process, which nothing else waits for."""


@dataclasses.dataclass(frozen=True)
class MeasuredTask:
    """A running task with a memory limit. ``held_bytes``: the memory of its worker's process tree when it began,
    by process id; it is lowered as they shrink, so that memory which is freed and allocated again counts.
    ``namespaced``: these ids are those of the worker's process namespace. ``worker``: the worker's process, if it is
    known and is another one than the manager's child; its namespace may be any number of levels below then."""

    limit_bytes: int
    held_bytes: dict[int, int]
    namespaced: bool = False
    worker: int | None = None


def memory_of_tasks(tasks: Mapping[int, MeasuredTask]) -> dict[int, int]:
    """The bytes that tasks use, by the pid of their workers: resident memory of the worker and its descendants, beyond
    ``held_bytes``.

    Forked processes share their memory until they write to it, so a sum of resident memory may count a page many times.
    Only where that sum is above the limit, proportional sizes (``Pss``) are read, which takes the kernel longer.
    """
    processes = read_processes()
    roots = {task.worker or child: child for child, task in tasks.items()}
    trees: dict[int, list[int]] = {child: [] for child in tasks}
    for pid in processes:
        for ancestor in ancestry(pid, processes):
            if ancestor in roots:
                trees[roots[ancestor]].append(pid)
    used: dict[int, int] = {}
    for worker, task in tasks.items():
        namespaced = task.namespaced and task.worker is None
        names = _names_of(task.worker or worker, trees[worker], namespaced=namespaced)
        resident = {pid: processes[pid].resident_bytes for pid in names}
        for pid, size_bytes in resident.items():
            if size_bytes < task.held_bytes.get(names[pid], 0):
                task.held_bytes[names[pid]] = size_bytes
        held_bytes = sum(task.held_bytes.get(name, 0) for name in names.values())
        used[worker] = sum(resident.values()) - held_bytes
        if used[worker] > task.limit_bytes:
            pss_bytes = sum(_proportional_bytes(pid, default=size_bytes) for pid, size_bytes in resident.items())
            used[worker] = min(used[worker], max(0, pss_bytes - held_bytes))
    return used


def output_bytes(descriptors: Iterable[int]) -> int:
    """Bytes in the larger of the capture files."""
    return max(os.fstat(descriptor).st_size for descriptor in descriptors)


def own_bytes(pid: int) -> int | None:
    """What a process takes: its proportional set size, or its resident memory; None if it has ended."""
    process = read_process(pid)
    return None if process is None else _proportional_bytes(pid, default=process.resident_bytes)


def _proportional_bytes(pid: int, *, default: int) -> int:
    """The proportional set size of a process: a page that n processes share counts 1/n. Falls back to the default."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8", errors="replace")
    except OSError:  # it has ended, belongs to another user, or the kernel is too old
        return default
    return next((int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("Pss:")), default)


def _names_of(worker: int, pids: Collection[int], *, namespaced: bool) -> dict[int, int]:
    """The ids that the processes of a worker have for itself: a fork of a template, which may be in a namespace below
    this process's and below the template's, or a worker below a bubblewrap."""
    here, depth = len(_ids_of(os.getpid())), len(_ids_of(worker))
    if depth > here:
        return {pid: ids[depth - 1] for pid in pids if len(ids := _ids_of(pid)) >= depth}
    return _names_in_namespace(pids, here) if namespaced else {pid: pid for pid in pids}


def _names_in_namespace(pids: Iterable[int], depth: int) -> dict[int, int]:
    """The ids that processes have in the process namespace one below this process's; without bubblewrap's own, which
    are outside of it and the first in it."""
    found = {pid: ids[depth] for pid in pids if len(ids := _ids_of(pid)) > depth}
    return {pid: name for pid, name in found.items() if name != 1}


def _ids_of(pid: int) -> list[int]:
    """The ids of a process in this namespace and those below it; none if it has ended."""
    try:
        text = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return next((list(map(int, line.split()[1:])) for line in text.splitlines() if line.startswith("NSpid:")), [])


class ReaperProcess:
    """The process that ends workers, so that this one's loop need not wait. One that was killed, or that takes no
    orders, is replaced.

    :param directories: of cgroups, which it removes when this process is gone.
    """

    def __init__(self, directories: Sequence[Path] = ()) -> None:
        self._directories = directories
        self._added: dict[int, str] = {}  # orders, by worker
        self._ended: set[int] = set()
        self._process = self._start()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def add(self, pid: int, *, is_guard: bool = False) -> None:
        """A worker has started."""
        self._added[pid] = f"+{pid} guard" if is_guard else f"+{pid}"
        self._order(self._added[pid])

    def end(self, pid: int) -> None:
        """End a worker with all that descends from it."""
        self._ended.add(pid)
        self._order(f"!{pid}")

    def remove(self, pid: int) -> None:
        """A worker has ended, and was reaped."""
        self._added.pop(pid, None)
        self._ended.discard(pid)
        self._order(f"-{pid}")

    def close(self) -> None:
        """End it; there are no workers any more."""
        self._process.communicate()

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-I", "-S", str(Path(process_reaper.__file__))]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, bufsize=0, start_new_session=True)
        assert process.stdin is not None
        os.set_blocking(process.stdin.fileno(), False)
        for directory in self._directories:
            process.stdin.write(b"=%s\n" % bytes(directory))
        return process

    def _order(self, line: str) -> None:
        stdin = self._process.stdin
        assert stdin is not None
        try:
            if stdin.write(f"{line}\n".encode()) is not None:
                return
        except BrokenPipeError:
            pass
        self._process.kill()
        self._process.wait()
        stdin.close()
        self._process = self._start()
        for each in (*self._added.values(), *(f"!{pid}" for pid in self._ended)):
            self._order(each)


class Leftovers:
    """Processes that tasks of a worker have left behind, which is of another submitter, or has run tasks of one.

    :param root: the worker, or the process above it that the manager has started.
    """

    def __init__(self, root: int) -> None:
        self._root = root
        self._own: set[int] = set()
        #: When to look for them, in monotonic seconds.
        self.due_at = math.inf

    def keep_present(self) -> None:
        """The worker has run no task of another submitter: the processes that it has now are its own."""
        self._own = tree(self._root)

    def task_ended(self, *, now: float) -> None:
        """A task has ended: what it started may take a moment to end."""
        self.due_at = min(self.due_at, now + _PERIOD_S)

    def exist(self, *, now: float, busy_since: float) -> bool:
        """Whether there are any.

        :param busy_since: when the task that runs now began: later processes may be its own. Infinite if none runs.
        """
        self.due_at = math.inf
        began_s = busy_since + time.clock_gettime(time.CLOCK_BOOTTIME) - now - _START_S
        for pid in tree(self._root) - self._own:
            process = read_process(pid)
            if process is not None and not process.is_zombie and process.start / _TICKS_PER_S < began_s:
                return True
        return False


class Orphans:
    """Adopts the orphans of dead workers, kills and reaps them. One per process.

    A program that became a manager (``exec`` of a shell) may have earlier children, whose orphans would look like those
    of workers: such a manager adopts none.
    """

    def __init__(self) -> None:
        #: When to call :meth:`kill`, in monotonic seconds; None if there may be no orphans.
        self.due_at: float | None = None
        self._checked_at = 0.0
        self._adopts = False
        if own_children():
            _logger.warning("this process has children from before its start; orphans of workers are not adopted")
            return
        try:
            adopt_orphans()
        except OSError as error:
            _logger.warning("orphans of workers cannot be killed: %s", error)
        else:
            self._adopts = True

    def expect(self, *, now: float) -> None:
        """A worker has died."""
        self.due_at = max(now, self._checked_at + _PERIOD_S)

    def kill(self, *, known: Collection[int], now: float) -> None:
        """Kill and reap all children that are not ``known``, once: their children are orphans the next time."""
        self._checked_at = now
        orphans = self._find(known)
        for pid in sorted(orphans, reverse=True):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, os.WNOHANG)
        self.due_at = now + _PERIOD_S if orphans else None

    def kill_all(self, *, known: Collection[int]) -> None:
        """Kill and reap all children that are not ``known``, until there are none, for a moment at most."""
        deadline = time.monotonic() + _LAST_S
        while True:
            self.kill(known=known, now=time.monotonic())
            if self.due_at is None or time.monotonic() > deadline:
                return
            time.sleep(_WAIT_S)

    def _find(self, known: Collection[int]) -> set[int]:
        return own_children().difference(known) if self._adopts else set()
