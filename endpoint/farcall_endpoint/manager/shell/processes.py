"""Processes on a manager's node: the memory and output of its workers, and the orphans of dead ones."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

from farcall_endpoint.host import process_reaper
from farcall_endpoint.host.memory_files import Mounts, open_files, used_bytes
from farcall_endpoint.host.process_reaper import adopt_orphans, own_children, read_process, tree
from farcall_endpoint.manager.core.limits import TaskUse

_logger = logging.getLogger(__name__)

_Key = TypeVar("_Key")

_PERIOD_S: Final = 0.2
"""Shortest time between two readings of processes. Killed processes take a moment to die, and are reaped then."""
_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")
_START_S: Final = 2 / _TICKS_PER_S
"""The start of a process is known to a tick."""
_IDLE_PERIOD_S: Final = 2.0
"""Seconds between two checks of an idle worker."""
_IDLE_SHARE: Final = 0.1
"""Processors that the idle workers of a submitter use at most, in all, and besides for each of them: libraries have
threads of their own."""
_IDLE_SHARE_OF_EACH: Final = 0.01
IDLE_LIMIT_S: Final = 5 * _IDLE_PERIOD_S
"""Seconds for which idle workers may exceed this use."""
_END_S: Final = 0.02
"""Maximum processor time of a worker after the end of a task, for its cleanup."""
_LAST_S: Final = 1.0
_WAIT_S: Final = 0.01
"""At the end of this process, which nothing else waits for."""
_MEASURE_PERIOD_S: Final = 0.1
"""Shortest time between two measurements of a task."""
_SLICE_S: Final = 0.005
"""Longest time to measure before other events have their turn."""
_PAUSE_FACTOR: Final = 20
"""The pause after a turn of measuring, as a multiple of the time that the turn took."""
_MOST_READ: Final = 100
"""The proportional sizes of more processes take too long for a measurement that is not done in steps."""
_FILES_IN_STEP: Final = 100
_LINES_IN_STEP: Final = 1000
_FIELDS: Final = re.compile(rb"^(PPid|NSpid|VmRSS):\s*(.*)$", re.MULTILINE)
_MAPPING: Final = re.compile(rb"[0-9a-f]+-[0-9a-f]+ \S+ [0-9a-f]+ ([0-9a-f]+):([0-9a-f]+) ([0-9]+)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeasuredTask:
    """A running task with a limit on its memory, its processes, or both.

    :param root: the process below which all others of its worker are.
    :param worker: the worker's process, if that is another one and is known. Its process namespace may be any number of
        levels below this process's.
    :param namespaced: whether the worker is in the namespace one level below, if its process is not known.
    :param memory_bytes, processes: the limits; None and 0: there is none.
    :param held_bytes: the memory of the worker's process tree when the task began, by process id in the worker's
        namespace. It is lowered as they shrink, so that memory which is freed and allocated again counts.
    :param held_file_bytes: the same of files in memory, by name (:func:`~farcall_endpoint.host.memory_files.held`).
    :param apart: returns processes below the root that are left out, with what descends from them.
    :param period_s: shortest time between two measurements.
    """

    root: int
    worker: int | None = None
    namespaced: bool = False
    memory_bytes: int | None = None
    processes: int = 0
    held_bytes: dict[int, int] = dataclasses.field(default_factory=dict)
    held_file_bytes: dict[str, int] = dataclasses.field(default_factory=dict)
    apart: Callable[[], Collection[int]] = tuple
    period_s: float = _MEASURE_PERIOD_S


def measure(task: MeasuredTask) -> Generator[None, None, TaskUse]:
    """Measure a task, one process in each step.

    Forked processes share their memory until they write to it, so a sum of resident memory may count a page many times.
    Files that are mapped are in the resident memory as well. Only where the sum is above the limit, the kernel's
    proportional sizes (``Pss``) are read, which takes it longer.
    """
    count = 0
    names = _Names(task)
    files = _Files(task)
    found: dict[int, tuple[int, int]] = {}  # name and resident bytes, by process
    for pid, threads in process_reaper.walk(task.root, without=task.apart()):
        count += threads
        if task.processes and count > task.processes:
            return TaskUse(processes=count)
        if task.memory_bytes is not None:
            status = _status(pid)
            name = names.of(pid, status)
            if name is not None:
                found[pid] = name, status.resident_bytes
                yield from files.add(pid)
        yield
    if task.memory_bytes is None:
        return TaskUse(processes=count)
    for name, size_bytes in found.values():
        if size_bytes < task.held_bytes.get(name, 0):
            task.held_bytes[name] = size_bytes
    held_bytes = sum(task.held_bytes.get(name, 0) for name, _ in found.values())
    resident_bytes = sum(size_bytes for _, size_bytes in found.values()) - held_bytes
    file_bytes = files.grown_bytes()
    if resident_bytes + file_bytes > task.memory_bytes:
        pss_bytes = 0
        for pid, (_, size_bytes) in found.items():
            pss_bytes += _proportional_bytes(pid, default=size_bytes)
            yield
        resident_bytes = min(resident_bytes, max(0, pss_bytes - held_bytes))
        if file_bytes and resident_bytes + file_bytes > task.memory_bytes:
            mapped: dict[str, int] = {}
            for pid in found:
                yield from _add_mapped(pid, mapped)
            file_bytes = files.grown_bytes(mapped)
    return TaskUse(resident_bytes, file_bytes, count)


class _Files:
    """Files in memory that the processes of a task hold open, or that are in mounts of its worker alone."""

    def __init__(self, task: MeasuredTask) -> None:
        self._task = task
        self._mounts: dict[str, Mounts] = {}  # by mount namespace
        self._shared: set[int] | None = None
        self._private: set[int] = set()  # devices that only the worker has
        self._bytes: dict[str, int] = {}

    def add(self, pid: int) -> Iterator[None]:
        """Measure those of a process, some in each step."""
        namespace = _mount_namespace(pid)
        mounts = self._mounts.get(namespace)
        if mounts is None:
            mounts = self._mounts[namespace] = Mounts.of(pid)
            if namespace != _mount_namespace("self"):
                self._add_private(pid, mounts)
        for number, file in enumerate(open_files(pid, mounts)):
            if file is not None and file[1] not in self._private:
                self._bytes[file[0]] = file[2]
            if number % _FILES_IN_STEP == 0:
                yield

    def grown_bytes(self, mapped: Mapping[str, int] | None = None) -> int:
        """Their bytes beyond what was held when the task began.

        :param mapped: bytes of files that are in the resident memory, too.
        """
        held = self._task.held_file_bytes
        for name in held:
            held[name] = min(held[name], self._bytes.get(name, 0))
        grown = {name: size_bytes - held.get(name, 0) for name, size_bytes in self._bytes.items()}
        twice = sum(min(size_bytes, mapped.get(name, 0)) for name, size_bytes in grown.items()) if mapped else 0
        return sum(grown.values()) - twice

    def _add_private(self, pid: int, mounts: Mounts) -> None:
        if self._shared is None:  # with this process, or with other forks of the worker's template
            outer = *Mounts.of("self").in_memory, *Mounts.of(_status(self._task.root).parent).in_memory
            self._shared = {mount.device for mount in outer}
        for mount in mounts.in_memory:
            if mount.device not in self._shared:
                self._private.add(mount.device)
                self._bytes[str(mount.device)] = used_bytes(pid, mount)


def _mount_namespace(pid: int | str) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/mnt")  # noqa: PTH115
    except OSError:
        return ""


def _add_mapped(pid: int, mapped: dict[str, int]) -> Iterator[None]:
    """Add the proportional sizes of the files that a process has mapped, by their names and by their devices, in steps.
    Changed pages of a private mapping are copies, and not the file's."""
    names: tuple[str, ...] = ()
    pss_kib = 0
    with contextlib.suppress(OSError), open(f"/proc/{pid}/smaps", "rb") as file:  # noqa: PTH123
        for number, line in enumerate(file):
            if line.startswith(b"Pss:"):
                pss_kib = int(line.split()[1])
            elif line.startswith(b"Anonymous:"):
                for name in names:
                    mapped[name] = mapped.get(name, 0) + max(0, pss_kib - int(line.split()[1])) * 1024
            elif (mapping := _MAPPING.match(line)) is not None:
                major, minor, inode = mapping.groups()
                device = os.makedev(int(major, 16), int(minor, 16))
                names = () if inode == b"0" else (str(device), f"{device}:{int(inode)}")
            if number % _LINES_IN_STEP == 0:
                yield


class Measuring:
    """Measures running tasks again and again, in turns that take a twentieth of the loop's time at most: with thousands
    of processes a measurement takes many turns."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._gauges: dict[Any, _Gauge] = {}
        #: When to call :meth:`turn`, in seconds of the clock.
        self.due_at = 0.0

    def turn(self, tasks: Mapping[_Key, tuple[object, Callable[[], MeasuredTask]]]) -> dict[_Key, TaskUse]:
        """Measure for a moment; what those tasks use that exceed a limit.

        :param tasks: what is different for each attempt, and the task, by worker or another key.
        """
        began_at = self._clock()
        before, self._gauges = self._gauges, {}
        for worker_id, (attempt, task) in tasks.items():
            gauge = before.get(worker_id)
            self._gauges[worker_id] = (
                gauge if gauge is not None and gauge.attempt == attempt else _Gauge(attempt, task())
            )
        due = {number: gauge for number, gauge in self._gauges.items() if gauge.due_at <= began_at}
        found: dict[_Key, TaskUse] = {}
        for worker_id, gauge in due.items():
            use = gauge.advance(self._clock, slice_s=_SLICE_S / len(due))
            if use is not None:
                found[worker_id] = use
        now = self._clock()
        next_at = min((gauge.due_at for gauge in self._gauges.values()), default=now + _MEASURE_PERIOD_S)
        self.due_at = max(next_at, now + _PAUSE_FACTOR * (now - began_at))
        return found


class _Gauge:
    """Measures one attempt."""

    def __init__(self, attempt: object, task: MeasuredTask) -> None:
        self.attempt = attempt
        self.due_at = 0.0
        self._task = task
        self._steps: Generator[None, None, TaskUse] | None = None
        self._excess = False

    def advance(self, clock: Callable[[], float], *, slice_s: float) -> TaskUse | None:
        deadline = clock() + slice_s
        if self._steps is None:
            self._steps = measure(self._task)
        try:
            next(self._steps)
            while clock() < deadline:
                next(self._steps)
        except StopIteration as ended:
            self._steps, self.due_at = None, clock() + self._task.period_s
            use: TaskUse = ended.value
            return use if self._exceeds(use) else None
        return None

    def _exceeds(self, use: TaskUse) -> bool:
        """Whether a use exceeds the task's limits. An excess through files in memory counts only in two successive
        measurements: a worker holds a result in such a file until it is sent."""
        task = self._task
        if task.processes and use.processes > task.processes:
            return True
        if task.memory_bytes is None or use.resident_bytes + use.file_bytes <= task.memory_bytes:
            self._excess = False
            return False
        before, self._excess = self._excess, True
        return before or use.resident_bytes > task.memory_bytes


def output_bytes(descriptors: Iterable[int]) -> int:
    """Return the size of the largest capture file."""
    return max(os.fstat(descriptor).st_size for descriptor in descriptors)


def tree_bytes(root: int, *, without: Collection[int] = ()) -> int | None:
    """Measure a process and its descendants: their proportional set sizes, as far as they can be read, or their
    resident memory, and the files in memory that they alone have; None if the process has ended.

    :param without: processes that are left out, with what descends from them.
    """
    if read_process(root) is None:
        return None
    many = sum(1 for _ in process_reaper.walk(root, without=without)) > _MOST_READ
    steps = measure(MeasuredTask(root=root, memory_bytes=sys.maxsize if many else 0, apart=lambda: without))
    while True:
        try:
            next(steps)
        except StopIteration as ended:
            use: TaskUse = ended.value
            return use.resident_bytes + use.file_bytes


def processor_s(pid: int) -> float:
    """Processor time of a process, in seconds; 0 if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def _proportional_bytes(pid: int, *, default: int) -> int:
    """The proportional set size of a process: a page that n processes share counts 1/n. Falls back to the default."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8", errors="replace")
    except OSError:  # it has ended, belongs to another user, or the kernel is too old
        return default
    return next((int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("Pss:")), default)


class _Status(NamedTuple):
    """Fields of ``/proc/PID/status``. ``ids``: in this process namespace and nested ones; empty if it ended."""

    parent: int = 0
    ids: tuple[int, ...] = ()
    resident_bytes: int = 0


def _status(pid: int) -> _Status:
    try:
        with open(f"/proc/{pid}/status", "rb") as file:  # noqa: PTH123
            text = file.read()
    except OSError:
        return _Status()
    fields = dict(_FIELDS.findall(text))
    if b"VmRSS" not in fields:
        fields |= _memory_of_threads(pid)
    return _Status(
        int(fields.get(b"PPid", b"0")),
        tuple(map(int, fields.get(b"NSpid", b"").split())),
        int(fields.get(b"VmRSS", b"0").split()[0]) * 1024,
    )


def _memory_of_threads(pid: int) -> dict[bytes, bytes]:
    """The memory of a process whose first thread has ended while others run: one of them shows it."""
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208
            with contextlib.suppress(OSError):
                found = dict(_FIELDS.findall(Path(f"/proc/{pid}/task/{thread}/status").read_bytes()))
                if b"VmRSS" in found:
                    return {b"VmRSS": found[b"VmRSS"]}
    return {}


class _Names:
    """The ids that the processes of a worker have for itself: a fork of a template, which may be in a namespace below
    this process's and below the template's, or a worker below a bubblewrap."""

    def __init__(self, task: MeasuredTask) -> None:
        self._worker = task.root if task.worker is None else task.worker
        self._root = task.root
        self._here, self._depth = len(_status(os.getpid()).ids), len(_status(self._worker).ids)
        self._namespaced = task.namespaced and task.worker is None and self._depth == self._here

    def of(self, pid: int, status: _Status) -> int | None:
        """The id of a process; None if it is above the worker: a supervisor, or processes of bubblewrap."""
        if self._namespaced:  # the first process in a namespace is bubblewrap's own
            return status.ids[self._here] if len(status.ids) > self._here and status.ids[self._here] != 1 else None
        if len(status.ids) < self._depth or (pid == self._root != self._worker):
            return None
        name = status.ids[self._depth - 1] if self._depth else pid
        return None if name == 1 and self._depth > self._here and pid != self._worker else name


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
    """Processes and threads that tasks have left running in a worker of another submitter than the owner.

    :param root: the worker, or the process above it that the manager has started.
    :param submitter: for which it was started; empty: for all.
    """

    def __init__(self, root: int, submitter: str = "") -> None:
        self.submitter = submitter
        #: Processors that the worker has used while it was idle, as a moving average.
        self.idle_share = 0.0
        self._root = root
        self._own: dict[int, int] = {}  # starts, by process id: ids are used again
        self._idle: tuple[float, float] | None = (
            None  # since when the worker is idle, and its processor time until then
        )
        self._idle_s = self._computed_s = 0.0  # of earlier times, until they are long enough for the average
        #: When to look for them, in monotonic seconds.
        self.due_at = math.inf

    def keep_present(self) -> None:
        """The worker has run no task of another submitter: the processes that it has now are its own."""
        found = ((pid, read_process(pid)) for pid in tree(self._root))
        self._own = {pid: process.start for pid, process in found if process is not None}

    def task_ended(self, *, now: float, is_idle: bool) -> None:
        """A task has ended: what it started may take a moment to end.

        :param is_idle: whether no other one waits behind it.
        """
        self._idle = (now, self._used_s() + _END_S) if is_idle else None
        self.due_at = min(self.due_at, now + _PERIOD_S)

    def task_begins(self, *, now: float) -> None:
        """A task is sent to the worker."""
        if self._idle is not None:
            self._measure_idle(*self._idle, now=now)
            self._idle = None

    def exist(self, *, now: float, busy_since: float) -> bool:
        """Whether there are any.

        :param busy_since: when the task that runs now began: later processes may be its own. Infinite if none runs.
        """
        is_idle = math.isinf(busy_since)
        self.due_at = now + _IDLE_PERIOD_S if is_idle else math.inf
        if is_idle and self._idle is not None:
            self._measure_idle(*self._idle, now=now)
        self._idle = (now, self._used_s()) if is_idle else None
        began_s = busy_since + time.clock_gettime(time.CLOCK_BOOTTIME) - now - _START_S
        for pid in tree(self._root):
            process = read_process(pid)
            if process is None or process.is_zombie or process.start == self._own.get(pid):
                continue
            if process.start / _TICKS_PER_S < began_s:
                return True
        return False

    def _used_s(self) -> float:
        return sum(map(processor_s, {self._root, *self._own}))

    def _measure_idle(self, since: float, used_s: float, *, now: float) -> None:
        """Add what an idle worker has computed since a time. Times between tasks may be short: they add up."""
        self._idle_s += now - since
        self._computed_s += self._used_s() - used_s
        if self._idle_s >= _IDLE_PERIOD_S / 2:
            self.idle_share = (self.idle_share + max(0.0, self._computed_s) / self._idle_s) / 2
            self._idle_s = self._computed_s = 0.0


class ShareLimit:
    """Detection of processor use without a task, by submitter: by a thread of an ended task, by a task that has forged
    its end, or by a process of a package. Many small uses count together.

    :param limit_s: seconds for which such use may last.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._since: dict[str, float] = {}

    def excess(self, shares: Mapping[str, Mapping[_Key, float]], *, now: float) -> list[_Key]:
        """All that compute, of submitters whose shares have been too large for long.

        :param shares: processors in use, by submitter.
        """
        too_large = {
            submitter
            for submitter, each in shares.items()
            if sum(each.values()) > _IDLE_SHARE + _IDLE_SHARE_OF_EACH * len(each)
        }
        self._since = {submitter: self._since.get(submitter, now) for submitter in too_large}
        found: list[_Key] = []
        for submitter, since in list(self._since.items()):
            if now >= since + self._limit_s:
                found += [key for key, share in shares[submitter].items() if share > _IDLE_SHARE_OF_EACH]
        return found


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
