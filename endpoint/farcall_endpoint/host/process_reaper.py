"""Process reaper: kills processes with all their descendants. Stands alone: imports little, and nothing of Farcall.

A process that a task has started leaves its parent, its group and its session easily; it never leaves its *reaper*: the
nearest ancestor that adopts orphans (``prctl``, ``PR_SET_CHILD_SUBREAPER``). Each worker is one, so everything that its
tasks started descends from it while it lives. Its manager is one too: orphans of a dead worker become children of the
manager, which knows all its other children.

As a program (``python -I -S process_reaper.py``) it ends workers for its manager, whose loop must not wait, and
it outlives the manager by a moment, to kill what a kill -9 of the manager leaves running. It reads lines from standard
input: ``+N`` adds process N with all its descendants, ``!N`` ends them, ``-N`` removes N. ``+N guard`` adds a guard: a
process that, on SIGTERM, kills its descendants at once (:mod:`farcall_endpoint.host.isolation.supervisor`).
When the manager is gone, for whatever reason, the kernel closes the pipe; then all processes still on the list are
killed. ``=PATH`` is a directory of cgroups, which is removed then.

With ``--with-parent PID BYTES COMMAND ...`` it becomes that command, which the kernel kills when process PID has ended.
The kernel gives it no more private memory than so many bytes (``RLIMIT_DATA``).

With a command as its arguments (``python -I -S process_reaper.py COMMAND ...``) it runs that command and ends as it
does, and then kills what is left of its descendants, also those that became daemons.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

_STATE, _PPID, _THREADS, _START, _RSS = 0, 1, 17, 19, 21
"""Places in ``/proc/PID/stat``, counted behind the name of the program."""
_SET_CHILD_SUBREAPER = 36
"""PR_SET_CHILD_SUBREAPER."""
_SET_PDEATHSIG = 1
"""PR_SET_PDEATHSIG."""
_WITH_PARENT = "--with-parent"
_GUARD_LIMIT_S = 2.0
"""Time for a guard to end. After that, it is killed like any other process."""
_SLICE_S = 0.05
"""Time for one tree, before orders are read and the next tree has its turn."""
_KILL_TREES_S = 0.25
"""Longest time to stop the processes of a tree before all that were found are killed."""
_STOP_S = 0.5
"""Processes that are found later are killed, not stopped: others may have continued those that were stopped."""
_QUIET_PASSES = 3
"""Passes that find nothing new before a tree counts as stopped, if processes were born meanwhile."""
_READ_BYTES = 64 * 1024
"""The kernel writes whole numbers only."""
_MOST_EXAMINED = 8
"""Processes among which the first one of a namespace is looked for."""
_ZOMBIE_PERIOD_S = 60.0
_GROUP_LIMIT_S = 10.0
_GROUP_PERIOD_S = 0.02
"""No event says when the last process has left a cgroup of version 1."""
_LISTS_CHILDREN = os.path.exists("/proc/thread-self/children")  # noqa: PTH110
"""Whether the kernel lists children (``CONFIG_PROC_CHILDREN``). Reading all processes takes long on a large node."""


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
    # The first thread may have ended while others run.
    is_zombie = fields[_STATE] == b"Z" and int(fields[_THREADS]) <= 1
    return Process(int(fields[_PPID]), int(fields[_START]), resident_bytes, is_zombie)


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


def _by_parent(processes: Mapping[int, Process]) -> dict[int, list[int]]:
    children: dict[int, list[int]] = {}
    for pid, process in processes.items():
        children.setdefault(process.parent, []).append(pid)
    return children


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


def kill_trees(roots: Collection[int], *, limit_s: float = _KILL_TREES_S) -> None:
    """Kill processes, their process groups, and all their descendants, in whatever group or session those are.

    :param limit_s: longest time to search. The process that adopts orphans must kill what was not found by then.
    """
    if not roots:
        return
    ending = Ending(roots)
    if not ending.advance(limit_s):
        ending.kill()


class Ending:
    """The end of processes with all their descendants, in steps.

    Everything is stopped before anything is killed: a stopped process cannot fork meanwhile, and none loses its parent,
    and with it its place in the tree. A process may fork and exit again and again to run away from that. Its zombies
    are neither examined twice nor searched for children, and the newest children of a process are stopped first, so
    each pass is shorter than a fork is likely to take.

    Where a process is the first of a process namespace, it is killed before, and the kernel ends the whole namespace.
    """

    def __init__(self, roots: Collection[int]) -> None:
        self._roots = tuple(roots)
        self._zombies: dict[int, set[int]] = {}  # those seen among the children of each process
        self._starts: dict[int, int] = {}  # of the descendants that were alive when they were found
        self._listed: set[int] = set()  # those that the last pass has found
        self._steps = self._run()

    def advance(self, limit_s: float) -> bool:
        """Continue for a time; whether all processes are killed now."""
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            if next(self._steps, True):
                return True
        return False

    def kill(self) -> None:
        """Kill all that were found so far."""
        unlisted = filter(self._is_same, self._starts.keys() - self._listed)
        _signal((*self._listed, *unlisted, *self._roots), signal.SIGKILL)
        for root in self._roots:
            kill_group(root)

    def _run(self) -> Iterator[bool]:
        """Stop the processes, a few in each step, and kill them in the last one."""
        kill_first_processes(self._roots)
        busy, quiet, kill_at = 0, 0, time.monotonic() + _STOP_S
        while quiet < max(1, min(busy, _QUIET_PASSES)):
            found = False
            number = signal.SIGSTOP if time.monotonic() < kill_at else signal.SIGKILL
            _signal(self._roots, signal.SIGSTOP)
            snapshot = None if _LISTS_CHILDREN else _by_parent(read_processes())
            unread, visited = list(self._roots), set(self._roots)
            self._listed = visited
            while unread:
                parent = unread.pop()
                alive, is_news = self._signal_children(parent, number, snapshot)
                found = found or is_news
                unread += alive - visited
                visited |= alive
                yield False
                if not unread:  # lists lack processes now and then, while others end
                    unread = [pid for pid in self._starts.keys() - visited if self._is_same(pid)]
                    self._starts = {pid: self._starts[pid] for pid in (*visited, *unread) if pid in self._starts}
                    visited.update(unread)
            busy, quiet = busy + found, 0 if found else quiet + 1
        self.kill()

    def _signal_children(
        self, parent: int, number: signal.Signals, snapshot: Mapping[int, list[int]] | None
    ) -> tuple[set[int], bool]:
        """Signal the children of a process, the newest first. Those that are alive, and whether any is new."""
        listed = _children_lists(parent) if snapshot is None else [snapshot.get(parent, [])]
        former, alive = self._zombies.get(parent, set()), set[int]()
        is_news = False
        for pids in listed:
            _signal((pid for pid in reversed(pids) if pid not in former), number)
            alive.update(pids)
        zombies = alive & former
        alive -= former
        for pid in alive - self._starts.keys():
            is_news = True
            process = read_process(pid)
            if process is None or process.is_zombie:
                zombies.add(pid)
            else:
                self._starts[pid] = process.start
        self._zombies[parent] = zombies
        return alive - zombies, is_news

    def _is_same(self, pid: int) -> bool:
        process = read_process(pid)
        return process is not None and process.start == self._starts[pid] and not process.is_zombie


def kill_first_processes(roots: Iterable[int]) -> None:
    """Kill the first process of each process namespace that begins at or right below these: the kernel kills all
    others in the namespace then, however fast they fork."""
    depth = len(ids_of(os.getpid()))
    unread = list(roots)
    for _ in range(len(unread) + _MOST_EXAMINED):
        if not unread:
            return
        pid = unread.pop(0)
        ids = ids_of(pid)
        if len(ids) > depth and ids[-1] == 1:
            _signal([pid], signal.SIGKILL)
        elif _LISTS_CHILDREN:
            unread += sorted(_listed_children(pid))


def ids_of(pid: int) -> list[int]:
    """The ids of a process, in this process namespace and in those below it; none if it has ended."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status", "rb") as file:  # noqa: PTH123
        for line in file:
            if line.startswith(b"NSpid:"):
                return list(map(int, line.split()[1:]))
    return []


def tree(pid: int) -> set[int]:
    """All current descendants of a process."""
    return _current_descendants({pid})


def walk(root: int, *, without: Collection[int] = ()) -> Iterator[tuple[int, int]]:
    """A process and its current descendants, zombies included, each with its number of threads. It reads as it is
    iterated over, so that a tree of thousands of processes can be read in parts.

    :param without: processes that are left out, with what descends from them.
    """
    snapshot = None if _LISTS_CHILDREN else _by_parent(read_processes())
    unread, seen = [root], {root, *without}
    while unread:
        pid = unread.pop()
        try:
            threads = os.listdir(f"/proc/{pid}/task")  # noqa: PTH208
        except OSError:  # it has ended
            continue
        yield pid, len(threads)
        listed = _lists_of_threads(pid, threads) if snapshot is None else [snapshot.get(pid, [])]
        found = {child for children in listed for child in children} - seen
        seen |= found
        unread += found


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
    return {child for children in _children_lists(pid) for child in children}


def _children_lists(pid: int) -> Iterator[list[int]]:
    """The same in parts, as they are read; those that a thread has got last come last."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")  # noqa: PTH208
    except OSError:  # it has ended
        return
    yield from _lists_of_threads(pid, threads)


def _lists_of_threads(pid: int, threads: Iterable[str]) -> Iterator[list[int]]:
    for thread in threads:
        with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/children", "rb", 0) as file:  # noqa: PTH123
            while part := file.read(_READ_BYTES):
                yield list(map(int, part.split()))


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


class Orders:
    """The manager's orders, and the workers that it has.

    :param start_of: returns when a process started; None if there is none.
    :param end: ends processes; as :class:`Ending`.
    """

    def __init__(
        self,
        *,
        start_of: Callable[[int], int | None] = _start_of,
        end: Callable[[Collection[int]], Ending] = Ending,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._start_of = start_of
        self._end = end
        self._clock = clock
        self._starts: dict[int, int | None] = {}
        self._guards: set[int] = set()
        self._groups: list[str] = []
        self._endings: dict[int, Ending] = {}
        self._waiting: dict[int, float] = {}  # guards that were asked to end, and when this process ends them itself

    def take(self, line: str) -> None:
        """Perform an order, or remember it."""
        if line.startswith("="):
            self._groups.append(line[1:])
            return
        name, _, kind = line[1:].partition(" ")
        pid = int(name)
        if line.startswith("+"):
            self._starts[pid] = self._start_of(pid)
            if kind:
                self._guards.add(pid)
        elif line.startswith("-"):
            for each in (self._starts, self._endings, self._waiting):
                each.pop(pid, None)
            self._guards.discard(pid)
        elif pid in self._starts and self._start_of(pid) == self._starts[pid]:
            self._begin(pid)

    def _begin(self, pid: int) -> None:
        if pid in self._guards:
            _signal([pid], signal.SIGTERM)
            self._waiting[pid] = self._clock() + _GUARD_LIMIT_S
        else:
            self._endings[pid] = self._end([pid])

    def advance(self) -> float | None:
        """Continue to end workers, each for a moment; seconds until there is more to do, None: for an order."""
        now = self._clock()
        for pid in [pid for pid, at in self._waiting.items() if at <= now]:
            del self._waiting[pid]
            self._guards.discard(pid)
            if self._start_of(pid) == self._starts[pid]:
                self._begin(pid)
        for pid, ending in list(self._endings.items()):
            if ending.advance(_SLICE_S):
                del self._endings[pid]
        if self._endings:
            return 0.0
        return max(0.0, min(self._waiting.values()) - now) if self._waiting else None

    def close(self) -> None:
        """The manager is gone: kill all workers, and remove the cgroups."""
        # A process that has ended may have left members of its group. Another process that reuses its pid is spared.
        left = [pid for pid, start in self._starts.items() if self._start_of(pid) in (start, None)]
        guards = [pid for pid in left if pid in self._guards]
        _signal(guards, signal.SIGTERM)
        deadline = self._clock() + _GUARD_LIMIT_S
        while any(self._start_of(pid) for pid in guards) and self._clock() < deadline:
            time.sleep(_GROUP_PERIOD_S)
        self._end(left).advance(math.inf)
        for group in self._groups:
            _remove_group(group)


def serve(descriptor: int) -> None:
    """Perform orders until the manager closes the pipe."""
    with contextlib.suppress(OSError):  # only root may; it must be faster than those that it ends
        os.setpriority(os.PRIO_PROCESS, 0, -20)
    orders, rest = Orders(), b""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    wait_s: float | None = None
    while True:
        if poll.poll(None if wait_s is None else math.ceil(wait_s * 1000)):
            data = os.read(descriptor, _READ_BYTES)
            if not data:
                break
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                orders.take(os.fsdecode(line))
        wait_s = orders.advance()
    orders.close()


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


def replace_with(parent: int, memory_bytes: int, command: list[str]) -> None:
    """Become a command that is killed when its parent has ended: to be exact, the thread that has started it.

    :param memory_bytes: most private memory of the command.
    :raises OSError: if that cannot be, or there is no such program.
    """
    if _prctl()(_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError("the end of the parent cannot be noticed")
    most = resource.getrlimit(resource.RLIMIT_DATA)[1]
    limit = memory_bytes if most == resource.RLIM_INFINITY else min(memory_bytes, most)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
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
        replace_with(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
        sys.exit(1)
    if len(sys.argv) > 1:
        sys.exit(supervise(sys.argv[1:]))
    serve(sys.stdin.fileno())
