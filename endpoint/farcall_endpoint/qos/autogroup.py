"""CPU shares by autogroups: the kernel's groups of sessions, each with a nice value. They need no privilege.

A nice value of a session can be raised and lowered again by its user (``/proc/PID/autogroup``), other than that of a
process. All users of a machine without ``CAP_SYS_ADMIN`` may together make one change in 100 ms.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from farcall_endpoint.config.settings import DEFAULT_WEIGHT
from farcall_endpoint.host.cgroups import Hierarchy
from farcall_endpoint.host.process_reaper import read_process, tree
from farcall_endpoint.qos.cgroup_shares import describe_error
from farcall_endpoint.qos.weights import check_weight, nice_values

PERIOD_S: Final = 0.1
"""Between two changes, on the whole machine."""

_TRIAL_S: Final = 2.0
_TRIAL_PERIOD_S: Final = 0.02
_LINE: Final = re.compile(r"(/autogroup-\d+) nice (-?\d+)\s*")
_SWITCH: Final = Path("/proc/sys/kernel/sched_autogroup_enabled")
_ONLY_IN_ROOT: Final = "release_agent"
_NOT_IN_ROOT: Final = "cgroup.events"


class NiceQueue:
    """Changes of nice values that wait for their turn: one in each period. Pure."""

    def __init__(self, *, period_s: float = PERIOD_S) -> None:
        self._period_s = period_s
        self._next_at = float("-inf")
        self._changes: dict[str, tuple[int, int]] = {}  # now and wanted

    def replace(self, current: Mapping[str, int], wanted: Mapping[str, int]) -> None:
        """Want these values from now on, and no others."""
        self._changes = {
            name: (current[name], nice) for name, nice in wanted.items() if name in current and current[name] != nice
        }

    def due(self, now: float) -> tuple[str, int] | None:
        """The change to make now: the largest one. None if there is none, or it is too early."""
        if not self._changes or now < self._next_at:
            return None
        name = max(self._changes, key=lambda each: (abs(self._changes[each][0] - self._changes[each][1]), each))
        return name, self._changes[name][1]

    def done(self, name: str, now: float) -> None:
        """A change was made."""
        self._changes.pop(name, None)
        self._next_at = now + self._period_s

    def refused(self, now: float) -> None:
        """Another process of the machine has made a change in this period: the change waits."""
        self._next_at = now + self._period_s

    def drop(self, name: str) -> None:
        """Drop a change that can never be made."""
        self._changes.pop(name, None)

    def delay(self, now: float) -> float | None:
        """The seconds to the next change; None if there is none."""
        return max(self._next_at - now, 0.0) if self._changes else None


@dataclasses.dataclass
class _Member:
    function: str | None
    """None: the process has left its function, and will get nice 0 again."""
    start: int
    """Start time of the process, which identifies it: the kernel reuses pids."""


class _Session(NamedTuple):
    pids: list[int]
    """Processes of the session: one of them may be closed to this user, as the supervisor of a worker is."""
    nice: int


class AutogroupShares:
    """The actuator that sets nice values of sessions. Not for several threads.

    The kernel's table has a factor of about 1.25 for each step of nice. The largest weight gets nice 0, and the others
    what is nearest to their ratio to it, down to nice 19, which is a ratio of 68. The weight of a function is divided
    by the number of its processes that compute, as each has a group of its own: so functions have the shares that
    cgroups would give them. Each worker must be in a session of its own; the share of one that is not stays
    as it is, and ``problem`` names the reason.

    One change is made in 100 ms: the largest first, the newest weights only. So the changes of many workers take a
    while, and :meth:`tick` continues with them.

    :param clock: monotonic, in seconds.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic, proc: Path = Path("/proc")) -> None:
        self.name = "autogroup"
        self.problem = ""
        self._clock = clock
        self._proc = proc
        self._queue = NiceQueue()
        self._weights: dict[str, float] = {}
        self._running: Mapping[str, int] | None = None
        self._members: dict[int, _Member] = {}
        self._sessions: dict[str, _Session] = {}
        self._has_joined = False

    def join(self, pid: int, function: str) -> None:
        """Count a process and its descendants to a function, from the next :meth:`tick` on."""
        process = read_process(pid)
        if process is None or process.is_zombie:
            self._members.pop(pid, None)
        else:
            self._members[pid] = _Member(function, process.start)
            self._has_joined = True

    def set_weights(self, weights: Mapping[str, float], running: Mapping[str, int] | None = None) -> None:
        """Replace the weights of these functions, look which sessions there are, and make the first change if it is
        time."""
        self._weights |= {function: check_weight(weight) for function, weight in weights.items()}
        self._running = running
        self._plan()
        self.tick()

    def tick(self) -> float | None:
        """Make the change that is due."""
        if self._has_joined:
            self._plan()
        while (change := self._queue.due(now := self._clock())) is not None:
            name, nice = change
            try:
                self._write(self._sessions[name].pids, nice)
            except BlockingIOError:
                self._queue.refused(now)
            except (ProcessLookupError, FileNotFoundError):  # it has ended
                self._queue.drop(name)
            except OSError as error:
                self._queue.drop(name)
                self.problem = self.problem or f"process {self._sessions[name].pids[0]}: {describe_error(error)}"
            else:
                self._queue.done(name, now)
        return self._queue.delay(now)

    def _write(self, pids: Sequence[int], nice: int) -> None:
        """Set the nice value of a session by the first of its processes that permits it.

        :raises OSError: as :func:`write_nice`, of the last process.
        """
        for pid in pids[:-1]:
            with contextlib.suppress(PermissionError, ProcessLookupError, FileNotFoundError):
                write_nice(pid, nice, proc=self._proc)
                return
        write_nice(pids[-1], nice, proc=self._proc)

    def forget(self, function: str) -> None:
        """The processes of a function get nice 0 again, at the next ticks."""
        self._weights.pop(function, None)
        for member in self._members.values():
            if member.function == function:
                member.function = None
        self._has_joined = True

    def close(self) -> None:
        """Forget everything. Processes that still run keep their last value: there is no time to change it."""
        self._weights.clear()
        self._members.clear()
        self._queue.replace({}, {})

    def _plan(self) -> None:
        """Find the sessions of the workers, by the names of their groups, and put what is wanted into the queue."""
        self.problem, self._has_joined = "", False
        found = read_autogroup("self", proc=self._proc)
        own = found[0] if found else ""
        sessions: dict[str, _Session] = {}
        functions: dict[str, str | None] = {}
        shared: set[str] = set()
        counts: dict[str, int] = {}
        self._drop_ended()
        for pid, member in self._members.items():
            if member.function is not None:
                counts[member.function] = counts.get(member.function, 0) + 1
            for each in (pid, *tree(pid)):
                found = read_autogroup(each, proc=self._proc)
                if found is None or found[0] == own:
                    if each == pid and member.function is not None:
                        self.problem = self.problem or f"process {pid} is not in a session of its own"
                    continue
                name, nice = found
                sessions.setdefault(name, _Session([], nice)).pids.append(each)
                function = functions.setdefault(name, member.function)
                if function is None:
                    functions[name] = member.function
                elif member.function not in (None, function):
                    shared.add(name)
                    self.problem = (
                        self.problem
                        or f"processes of the functions {function} and {member.function} are in one session"
                    )
        if self._running is not None:
            counts = {function: max(1, self._running.get(function, 0)) for function in counts}
        weights = {function: self._weights.get(function, DEFAULT_WEIGHT) / count for function, count in counts.items()}
        nices = nice_values(weights)
        wanted = {
            name: 0 if function is None else nices[function]
            for name, function in functions.items()
            if name not in shared
        }
        self._queue.replace({name: session.nice for name, session in sessions.items()}, wanted)
        self._sessions = sessions

    def _drop_ended(self) -> None:
        for pid, member in list(self._members.items()):
            process = read_process(pid)
            if process is None or process.is_zombie or process.start != member.start:
                del self._members[pid]


def read_autogroup(pid: int | str, *, proc: Path = Path("/proc")) -> tuple[str, int] | None:
    """The name of a process's group, and its nice value; None if it has none, or has ended."""
    try:
        found = _LINE.fullmatch((proc / str(pid) / "autogroup").read_text(encoding="ascii"))
    except OSError:
        return None
    return None if found is None else (found[1], int(found[2]))


def write_nice(pid: int, nice: int, *, proc: Path = Path("/proc")) -> None:
    """Set the nice value of a process's group.

    :raises BlockingIOError: if another change was made on the machine within 100 ms.
    :raises OSError: if the process has ended, or belongs to another user.
    """
    path = proc / str(pid) / "autogroup"
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(descriptor, str(nice).encode())
    except OSError as error:
        error.filename = str(path)
        raise
    finally:
        os.close(descriptor)


def unsupported_reason(
    pid: int,
    hierarchy: Hierarchy | None,
    *,
    clock: Callable[[], float] = time.monotonic,
    wait: Callable[[float], object] = time.sleep,
) -> str:
    """Try it: set and read the nice value of a process. The reason why that does not work.

    :param pid: of a process in a session of its own, which ends afterwards.
    :param hierarchy: of the controller ``cpu``, with the group of this process; None if none is visible: then it is not
        known whether nice values have an effect.
    """
    nice, deadline = 5, clock() + _TRIAL_S
    try:
        if _SWITCH.read_text(encoding="ascii").strip() != "1":
            return f"{_SWITCH}: autogroups are switched off"
        while True:
            try:
                write_nice(pid, nice)
                break
            except BlockingIOError as error:
                if clock() > deadline:
                    return describe_error(error)
            wait(_TRIAL_PERIOD_S)
    except OSError as error:
        return describe_error(error)
    found = read_autogroup(pid)
    if found is None or found[1] != nice:
        return f"/proc/{pid}/autogroup: a nice value that is written does not stay"
    if hierarchy is not None and not _is_root(hierarchy):
        return f"{hierarchy.path}: autogroups have no effect in a cgroup below the uppermost one"
    return ""


def _is_root(hierarchy: Hierarchy) -> bool:
    """Whether a group is the uppermost one of the machine, and not just of a container."""
    if hierarchy.controllers:
        return (hierarchy.path / _ONLY_IN_ROOT).exists()
    with contextlib.suppress(OSError):
        return not (hierarchy.path / _NOT_IN_ROOT).exists()
    return False
