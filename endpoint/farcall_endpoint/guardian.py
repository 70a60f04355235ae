"""Ends processes with all that descend from them. Stands alone: imports nothing of ours, and little else.

A process that a task has started leaves its parent, its group and its session easily; it never leaves its *reaper*: the
nearest ancestor that asked to adopt orphans (``prctl``, ``PR_SET_CHILD_SUBREAPER``). Each worker is one, so what its
tasks started descends from it for as long as it lives. Its manager is one too, so what a worker leaves behind when it
dies becomes the manager's child, and is known by that: the manager has no others that it does not know.

As a program (``python -I -S guardian.py``) it outlives its manager by a moment, to end what a kill -9 of the manager
leaves behind. It reads lines from standard input: ``+N`` guards process N with all that descends from it, ``-N`` lets
it go. When the manager is gone, however that came about, the kernel closes the pipe; then everything that is still
guarded is killed.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

_STATE, _PPID, _START, _RSS = 0, 1, 19, 21
"""Places in ``/proc/PID/stat``, counted behind the name of the program."""
_ADOPT_ORPHANS = 36
"""PR_SET_CHILD_SUBREAPER."""


class Process(NamedTuple):
    """What ``/proc`` says of one. ``start`` tells it apart from another that has its number later."""

    parent: int
    start: int
    resident_bytes: int
    is_zombie: bool


def read_process(pid: int) -> Process | None:
    """A process; None if there is none of that number."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:  # noqa: PTH123 - pathlib would take longer to load than all this
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    resident_bytes = int(fields[_RSS]) * resource.getpagesize()
    return Process(int(fields[_PPID]), int(fields[_START]), resident_bytes, fields[_STATE] == b"Z")


def read_processes() -> dict[int, Process]:
    """All processes of now, by their numbers."""
    found = ((int(name), read_process(int(name))) for name in os.listdir("/proc") if name.isdigit())  # noqa: PTH208
    return {pid: process for pid, process in found if process is not None}


def line_of(pid: int, processes: Mapping[int, Process]) -> Iterator[int]:
    """A process, its parent, and so on. One that is younger than its child is another process by that number."""
    process = processes.get(pid)
    while process is not None:
        yield pid
        pid, parent = process.parent, processes.get(process.parent)
        process = parent if parent is not None and parent.start <= process.start else None


def children_of(pid: int, processes: Mapping[int, Process]) -> set[int]:
    """The children of a process, dead ones that were not collected included."""
    return {child for child, process in processes.items() if process.parent == pid}


def descendants(roots: Collection[int], processes: Mapping[int, Process]) -> set[int]:
    """All that descend from any of these, without those themselves."""
    lines = ((pid, line_of(pid, processes)) for pid in processes if pid not in roots)
    return {pid for pid, line in lines if any(ancestor in roots for ancestor in line)}


def adopt_orphans() -> None:
    """Become the parent of all descendants whose own parents end; this survives ``exec``, and no child inherits it.

    :raises OSError: if the system cannot do that.
    """
    try:
        import ctypes  # only who adopts needs it, and not every Python has it
    except ImportError as error:
        raise OSError("orphans cannot be adopted without ctypes") from error
    if ctypes.CDLL(None, use_errno=True).prctl(_ADOPT_ORPHANS, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "orphans cannot be adopted")


def end(roots: Collection[int]) -> None:
    """End processes, their process groups, and all that descends from them, wherever it went.

    Everything is stopped before anything is killed, so that nothing is started behind our back while we look: a process
    that has been sent a signal can fork no more. And nothing loses its parent, and with it its place in the tree.
    """
    if not roots:
        return
    _signal(roots, signal.SIGSTOP)
    found = set(roots)
    while new := descendants(found, read_processes()):
        _signal(new, signal.SIGSTOP)
        found |= new
    _signal(found, signal.SIGKILL)
    for root in roots:
        end_group(root)


def end_group(group: int) -> None:
    """End the members of a process group, which may outlive its leader."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def guard(lines: Iterable[str]) -> None:
    """Follow the manager's lines to their end, then end what is left."""
    starts: dict[int, int | None] = {}
    for line in lines:
        pid = int(line[1:])
        if line.startswith("+"):
            starts[pid] = _start_of(pid)
        else:
            starts.pop(pid, None)
    # One that has ended may have left members of its group; another that has its number now is none of our business.
    end([pid for pid, start in starts.items() if _start_of(pid) in (start, None)])


def _start_of(pid: int) -> int | None:
    process = read_process(pid)
    return None if process is None else process.start


def _signal(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    guard(sys.stdin)
