"""Process reaper: kills processes with all their descendants. Stands alone: imports little, and nothing of Farcall.

A process that a task has started leaves its parent, its group and its session easily; it never leaves its *reaper*: the
nearest ancestor that adopts orphans (``prctl``, ``PR_SET_CHILD_SUBREAPER``). Each worker is one, so everything that its
tasks started descends from it while it lives. Its manager is one too: orphans of a dead worker become children of the
manager, which knows all its other children.

As a program (``python -I -S process_reaper.py``) it outlives its manager by a moment, and kills what a kill -9 of the
manager leaves running. It reads lines from standard input: ``+N`` adds process N with all its descendants, ``-N``
removes it. When the manager is gone, for whatever reason, the kernel closes the pipe; then all processes still on the
list are killed. ``=PATH`` is a directory of cgroups, which is removed then.

With ``--with-parent PID COMMAND ...`` it becomes that command, which the kernel kills when process PID has ended.

With a command as its arguments (``python -I -S process_reaper.py COMMAND ...``) it runs that command and ends as it
does, and then kills what is left of its descendants, also those that became daemons.
"""

from __future__ import annotations

import contextlib
import functools
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

_STATE, _PPID, _START, _RSS = 0, 1, 19, 21
"""Places in ``/proc/PID/stat``, counted behind the name of the program."""
_SET_CHILD_SUBREAPER = 36
"""PR_SET_CHILD_SUBREAPER."""
_SET_PDEATHSIG = 1
"""PR_SET_PDEATHSIG."""
_WITH_PARENT = "--with-parent"
_ZOMBIE_PERIOD_S = 60.0
_GROUP_LIMIT_S = 10.0
_GROUP_PERIOD_S = 0.02
"""No event says when the last process has left a cgroup of version 1."""
_LISTS_CHILDREN = os.path.exists("/proc/thread-self/children")  # noqa: PTH110
"""Not every kernel does (``CONFIG_PROC_CHILDREN``). To read all processes takes long on a large node."""


class Process(NamedTuple):
    """The fields of ``/proc/PID/stat`` that are used. ``start`` distinguishes processes that reuse a pid."""

    parent: int
    start: int
    resident_bytes: int
    is_zombie: bool


def read_process(pid: int) -> Process | None:
    """A process, or None if it does not exist."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:  # noqa: PTH123 - pathlib would take longer to load than all this
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    resident_bytes = int(fields[_RSS]) * resource.getpagesize()
    return Process(int(fields[_PPID]), int(fields[_START]), resident_bytes, fields[_STATE] == b"Z")


def read_processes() -> dict[int, Process]:
    """All current processes, by pid."""
    found = ((int(name), read_process(int(name))) for name in os.listdir("/proc") if name.isdigit())  # noqa: PTH208
    return {pid: process for pid, process in found if process is not None}


def ancestry(pid: int, processes: Mapping[int, Process]) -> Iterator[int]:
    """A process, its parent, and so on. A "parent" younger than its child is another process that reuses the pid."""
    process = processes.get(pid)
    while process is not None:
        yield pid
        pid, parent = process.parent, processes.get(process.parent)
        process = parent if parent is not None and parent.start <= process.start else None


def children_of(pid: int, processes: Mapping[int, Process]) -> set[int]:
    """The children of a process, zombies included."""
    return {child for child, process in processes.items() if process.parent == pid}


def own_children() -> set[int]:
    """The children of this process, zombies included.

    The kernel's list lacks none: only this process takes one off it, by reaping it.
    """
    pid = os.getpid()
    return _listed_children(pid) if _LISTS_CHILDREN else children_of(pid, read_processes())


def children(pid: int) -> set[int]:
    """The children of a process, zombies included; fewer than there are while some of them end."""
    return _listed_children(pid) if _LISTS_CHILDREN else children_of(pid, read_processes())


def descendants(roots: Collection[int], processes: Mapping[int, Process]) -> set[int]:
    """All descendants of any of these, without the roots."""
    lines = ((pid, ancestry(pid, processes)) for pid in processes if pid not in roots)
    return {pid for pid, line in lines if any(ancestor in roots for ancestor in line)}


def adopt_orphans() -> None:
    """Become the parent of all descendants whose own parents end; this survives ``exec``, and no child inherits it.

    :raises OSError: if the system does not support it.
    """
    if _prctl()(_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError("orphans cannot be adopted")


@functools.cache
def _prctl() -> Callable[..., int]:
    try:
        import ctypes  # needed only here, and not every Python has it
    except ImportError as error:
        raise OSError("orphans cannot be adopted without ctypes") from error
    function: Callable[..., int] = ctypes.CDLL(None).prctl
    return function


def kill_trees(roots: Collection[int]) -> None:
    """Kill processes, their process groups, and all their descendants, in whatever group or session those are.

    Everything is stopped before anything is killed: a stopped process cannot fork meanwhile, and none loses its parent,
    and with it its place in the tree.
    """
    if not roots:
        return
    _signal(roots, signal.SIGSTOP)
    found = set(roots)
    while new := _current_descendants(found):
        _signal(new, signal.SIGSTOP)
        found |= new
    _signal(found, signal.SIGKILL)
    for root in roots:
        kill_group(root)


def tree(pid: int) -> set[int]:
    """All current descendants of a process."""
    return _current_descendants({pid})


def _current_descendants(roots: Collection[int]) -> set[int]:
    """All current descendants of any of these, without the roots."""
    if not _LISTS_CHILDREN:
        return descendants(roots, read_processes())
    found: set[int] = set()
    unread = set(roots)
    while unread:
        children = _listed_children(unread.pop()) - found
        unread |= children
        found |= children
    return found.difference(roots)


def _listed_children(pid: int) -> set[int]:
    """The children of a process, zombies included, as the kernel lists them for each of its threads. It may leave some
    out while others end, but not if all of them are stopped."""
    found: set[int] = set()
    with contextlib.suppress(OSError):  # it has ended
        for thread in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/children", "rb") as file:  # noqa: PTH123
                found.update(map(int, file.read().split()))
    return found


def kill_group(group: int) -> None:
    """Kill the members of a process group, which may outlive its leader."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


class ZombieReaper:
    """Reaps adopted children of a worker. Call :meth:`reap` now and then; it is cheap.

    A worker that adopts orphans must reap them. It cannot distinguish them from a task's own children, whose exit codes
    belong to the code that started them. But that code waits for them soon: a zombie that is a minute old is an orphan.
    """

    def __init__(self) -> None:
        self._next_at = 0.0
        self._zombies: set[int] = set()

    def reap(self, *, now: float) -> None:
        """Reap children that were zombies a minute ago and still are. ``now`` is in seconds of any clock."""
        if now < self._next_at:
            return
        self._next_at = now + _ZOMBIE_PERIOD_S
        zombies = _zombie_children()
        for pid in zombies & self._zombies:
            with contextlib.suppress(ChildProcessError):  # reaped by the task after all
                os.waitpid(pid, os.WNOHANG)
        self._zombies = zombies - self._zombies


def _zombie_children() -> set[int]:
    try:
        if os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return set()
    except ChildProcessError:  # no children
        return set()
    return {pid for pid in own_children() if (process := read_process(pid)) is not None and process.is_zombie}


def _start_of(pid: int) -> int | None:
    process = read_process(pid)
    return None if process is None else process.start


def kill_at_end(
    lines: Iterable[str],
    *,
    start_of: Callable[[int], int | None] = _start_of,
    kill: Callable[[Collection[int]], object] = kill_trees,
) -> None:
    """Keep a list of processes by the manager's lines; at the end of the lines, kill those still on it, and remove the
    cgroups that the lines name."""
    starts: dict[int, int | None] = {}
    groups: list[str] = []
    for line in lines:
        if line.startswith("="):
            groups.append(line[1:].rstrip("\n"))
            continue
        pid = int(line[1:])
        if line.startswith("+"):
            starts[pid] = start_of(pid)
        else:
            starts.pop(pid, None)
    # A process that has ended may have left members of its group. Another process that reuses its pid is spared.
    kill([pid for pid, start in starts.items() if start_of(pid) in (start, None)])
    for group in groups:
        _remove_group(group)


def _remove_group(path: str) -> None:
    """Remove a cgroup and those in it, when the processes that were killed have left them."""
    deadline = time.monotonic() + _GROUP_LIMIT_S
    while os.path.isdir(path) and time.monotonic() < deadline:  # noqa: PTH112
        for inner in (*(each.path for each in os.scandir(path) if each.is_dir()), path):
            with contextlib.suppress(OSError):
                os.rmdir(inner)  # noqa: PTH106
        if os.path.isdir(path):  # noqa: PTH112
            time.sleep(_GROUP_PERIOD_S)


def supervise(command: list[str]) -> int:
    """Run a command, and kill all its descendants at its end; its exit code, as a shell reports it."""
    adopt_orphans()
    try:
        main = os.posix_spawnp(command[0], command, os.environ)
    except OSError as error:
        sys.stderr.write(f"{command[0]}: {error.strerror}\n")
        return 127
    while True:
        pid, status = os.wait()
        if pid == main:
            break
    while left := own_children():
        kill_trees(left)
        for child in left:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def replace_with(parent: int, command: list[str]) -> None:
    """Become a command that is killed when its parent has ended: to be exact, the thread that has started it.

    :raises OSError: if that cannot be, or there is no such program.
    """
    if _prctl()(_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError("the end of the parent cannot be noticed")
    if os.getppid() == parent:  # it can have ended before
        os.execv(command[0], command)  # noqa: S606


def _signal(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN if len(sys.argv) == 1 else signal.SIG_DFL)
    if sys.argv[1:2] == [_WITH_PARENT]:
        replace_with(int(sys.argv[2]), sys.argv[3:])
        sys.exit(1)
    if len(sys.argv) > 1:
        sys.exit(supervise(sys.argv[1:]))
    kill_at_end(sys.stdin)
