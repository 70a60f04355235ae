"""Scheduling: the managers and their loads, the queue of tasks, and the policies that place tasks on managers.

A policy is a pure class: it reads loads and tasks, and returns pairs of task and manager.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Final, Protocol

from farcall_common.fairness import FairQueue
from farcall_endpoint.agent.tasks import Stage, Task

_MOST_OVERTAKEN: Final = 1000
"""So that a long queue is not read to its end in every turn."""


@dataclasses.dataclass(frozen=True, slots=True)
class Lifetime:
    """When a manager's block is over, in epoch seconds.

    :param drain_s: so much of it is kept free of tasks of unknown length.
    :param limit_s: what any task may run at most, whatever its own limit; None is no limit.
    """

    ends_at: float
    drain_s: float = 0.0
    limit_s: float | None = None

    def fits(self, walltime_s: float | None, *, now: float) -> bool:
        """Whether a task with such a limit can end before the block does."""
        known = [limit for limit in (walltime_s, self.limit_s) if limit is not None]
        left_s = self.ends_at - now
        return left_s >= min(known) if known else left_s > self.drain_s


@dataclasses.dataclass(slots=True, eq=False)
class ManagerLoad:
    """A manager as a policy sees it. ``free``: slots without a task; below 0 by as many tasks as wait behind others.
    ``lifetime``: None if there is no limit, or it is unknown."""

    manager_id: str
    slots: int
    free: int
    lifetime: Lifetime | None = None

    def room(self, depth: int) -> int:
        """What it takes, if so many tasks may wait behind each running one."""
        return self.free + self.slots * depth

    def lasts(self, walltime_s: float | None, *, now: float) -> bool:
        """Whether a task with such a limit can end here."""
        return self.lifetime is None or self.lifetime.fits(walltime_s, now=now)


_Choice = Callable[[Sequence[ManagerLoad]], ManagerLoad]


class SchedulingPolicy(Protocol):
    """Places tasks on managers."""

    def place(
        self, tasks: Iterable[Task], managers: Sequence[ManagerLoad], *, depth: int, now: float
    ) -> list[tuple[Task, str]]:
        """Pairs of task and manager id, in the order of ``tasks``. Loads are counted down in place. A task overtakes
        another only if that one could not end in any manager's time.

        :param depth: tasks that may wait behind each running one. As many as a single worker would be given, a manager
            with that many free slots is given in a row: they share a message, and all of them start at once.
        """


class RandomPolicy:
    """Each task goes to a manager drawn at random among those with a free slot, else among those with room."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def place(
        self, tasks: Iterable[Task], managers: Sequence[ManagerLoad], *, depth: int, now: float
    ) -> list[tuple[Task, str]]:
        """As :meth:`SchedulingPolicy.place`."""
        return _place(tasks, managers, depth, now, self._rng.choice)


class RoundRobinPolicy:
    """Managers with a free slot take turns, then those with room."""

    def __init__(self) -> None:
        self._turn = 0

    def place(
        self, tasks: Iterable[Task], managers: Sequence[ManagerLoad], *, depth: int, now: float
    ) -> list[tuple[Task, str]]:
        """As :meth:`SchedulingPolicy.place`."""
        return _place(tasks, managers, depth, now, self._next)

    def _next(self, candidates: Sequence[ManagerLoad]) -> ManagerLoad:
        self._turn += 1
        return candidates[self._turn % len(candidates)]


def _place(
    tasks: Iterable[Task], managers: Sequence[ManagerLoad], depth: int, now: float, choose: _Choice
) -> list[tuple[Task, str]]:
    placed: list[tuple[Task, str]] = []
    candidates = [manager for manager in managers if manager.free > 0]
    behind = 0  # tasks that may wait behind each running one: none while a slot is free
    hopeless: set[float | None] = set()  # limits for which no candidate has the time
    manager: ManagerLoad | None = None
    run = overtaken = 0
    for task in tasks:
        if not candidates and not behind:
            behind = depth
            candidates = [manager for manager in managers if manager.room(depth) > 0]
            hopeless.clear()
        # One that may not run twice never waits behind another: should the manager die, it would be lost without ever
        # having been started.
        if not candidates or overtaken > _MOST_OVERTAKEN or (behind and not task.spec.options.idempotent):
            break
        walltime_s = task.spec.options.walltime_s
        if manager is None or not run or not manager.lasts(walltime_s, now=now):
            manager = None if walltime_s in hopeless else _choose(candidates, walltime_s, now, choose)
            if manager is None:
                hopeless.add(walltime_s)
                overtaken += 1
                continue
            run = 1 if behind else min(1 + depth, manager.free)
        run -= 1
        manager.free -= 1
        placed.append((task, manager.manager_id))
        if manager.room(behind) <= 0:
            candidates.remove(manager)
    return placed


def _choose(
    candidates: Sequence[ManagerLoad], walltime_s: float | None, now: float, choose: _Choice
) -> ManagerLoad | None:
    """A manager that has the time; most have, so one is tried before all are looked at."""
    manager = candidates[0] if len(candidates) == 1 else choose(candidates)
    if manager.lasts(walltime_s, now=now):
        return manager
    lasting = [manager for manager in candidates if manager.lasts(walltime_s, now=now)]
    return choose(lasting) if lasting else None


POLICIES: Final[Mapping[str, Callable[[random.Random], SchedulingPolicy]]] = {
    "random": RandomPolicy,
    "round-robin": lambda _: RoundRobinPolicy(),
}


@dataclasses.dataclass(slots=True)
class ManagerEntry:
    """A manager. ``load`` counts the workers that are there, ``slots`` those that there should be; ``outstanding`` are
    its tasks in the order in which it got them."""

    slots: int
    load: ManagerLoad
    outstanding: dict[str, Task] = dataclasses.field(default_factory=dict)
    workers: int = 0
    idle_workers: int = 0


class Managers:
    """All managers of an agent."""

    def __init__(self) -> None:
        self._members: dict[str, ManagerEntry] = {}
        self._problems: dict[str, str] = {}
        #: Sums over all managers.
        self.slots = self.workers = self.idle_workers = self.outstanding = 0

    def __len__(self) -> int:
        return len(self._members)

    @property
    def loads(self) -> Sequence[ManagerLoad]:
        """The input of a policy, which counts them down; :meth:`assign` does not."""
        return [member.load for member in self._members.values()]

    @property
    def busy(self) -> Collection[str]:
        """The ids of managers that have tasks."""
        return [manager_id for manager_id, member in self._members.items() if member.outstanding]

    @property
    def problem(self) -> str:
        """The problem of one of them; empty if none has one."""
        return next(iter(self._problems.values()), "")

    def add(self, manager_id: str, *, slots: int, lifetime: Lifetime | None) -> None:
        """A manager has registered; its workers are not ready yet."""
        self._members[manager_id] = ManagerEntry(slots, ManagerLoad(manager_id, 0, 0, lifetime))
        self.slots += slots

    def remove(self, manager_id: str) -> ManagerEntry | None:
        """A manager is lost; its last entry."""
        self.note(manager_id, workers=0, idle_workers=0, problem="")
        member = self._members.pop(manager_id, None)
        if member is not None:
            self.slots -= member.slots
            self.outstanding -= len(member.outstanding)
        return member

    def note(self, manager_id: str, *, workers: int, idle_workers: int, problem: str) -> None:
        """The numbers that a manager reports. It gets tasks for present workers only."""
        member = self._members.get(manager_id)
        if member is None:
            return
        load = member.load
        load.free += workers - load.slots
        load.slots = workers
        self.workers += workers - member.workers
        self.idle_workers += idle_workers - member.idle_workers
        member.workers, member.idle_workers = workers, idle_workers
        if problem:
            self._problems[manager_id] = problem
        else:
            self._problems.pop(manager_id, None)

    def assign(self, manager_id: str, task: Task) -> None:
        """A manager gets a task for which its load was counted down."""
        self._members[manager_id].outstanding[task.task_id] = task
        self.outstanding += 1

    def release(self, manager_id: str, task_id: str) -> Task | None:
        """A manager does not have a task any more; None if it did not have it."""
        member = self._members.get(manager_id)
        task = member.outstanding.pop(task_id, None) if member is not None else None
        if member is not None and task is not None:
            member.load.free += 1
            self.outstanding -= 1
        return task


class TaskQueue:
    """A queue, fair between submitters and oldest first for each of them. Tasks that finished while they waited are
    skipped, and removed at the front.

    :param weights: by submitter, as :class:`FairQueue` takes them.
    """

    def __init__(self, weights: Mapping[str, int] | None = None) -> None:
        self._tasks: FairQueue[Task] = FairQueue(weights)

    def __bool__(self) -> bool:
        """Whether any task waits."""
        for task in self._following([]):
            self._tasks.undo(*task)
            return True
        return False

    def add(self, task: Task) -> None:
        """Put a task behind the others of its submitter."""
        self._tasks.add(task.spec.submitter, task)

    def put_back(self, tasks: Sequence[Task]) -> None:
        """Put tasks before the others, in their order."""
        for task in reversed(tasks):
            self._tasks.put_back(task.spec.submitter, task)

    def done(self, task: Task) -> None:
        """A manager does not have a task any more that it got from here."""
        self._tasks.done(task.spec.submitter)

    def place(
        self, policy: SchedulingPolicy, managers: Sequence[ManagerLoad], *, depth: int, now: float
    ) -> list[tuple[Task, str]]:
        """Take out tasks for which the policy has managers, each with its manager, in the order in which they leave.
        Others that they overtake keep their places."""
        seen: list[tuple[str, Task, int]] = []
        placed = policy.place((task for _, task, _ in self._following(seen)), managers, depth=depth, now=now)
        if len(placed) < len(seen):
            leaving = {task for task, _ in placed}
            for found in reversed(seen):
                if found[1] not in leaving:
                    self._tasks.undo(*found)
        return [*placed, *self._squeeze_in(managers, now=now)]

    def _squeeze_in(self, managers: Sequence[ManagerLoad], *, now: float) -> Iterator[tuple[Task, str]]:
        """Where more tasks wait at managers than should, since short ones were expected: a manager takes turns too, so
        that a submitter that has nothing there need not wait until all of those have run."""
        full = [manager for manager in managers if manager.free < 0]
        while full and (found := self._tasks.take(new_submitters_only=True)) is not None:
            task = found[1]
            lasting = [manager for manager in full if manager.lasts(task.spec.options.walltime_s, now=now)]
            if task.stage is not Stage.QUEUED:
                self._tasks.done(found[0])
            elif not lasting or not task.spec.options.idempotent:
                self._tasks.undo(*found)
                return
            else:
                manager = max(lasting, key=lambda each: each.free)
                manager.free -= 1
                yield task, manager.manager_id

    def clear(self) -> list[Task]:
        """Take out all that wait."""
        return [task for task in self._tasks.clear() if task.stage is Stage.QUEUED]

    def _following(self, seen: list[tuple[str, Task, int]]) -> Iterator[tuple[str, Task, int]]:
        """Take tasks one after the other, and note them down."""
        while (found := self._tasks.take()) is not None:
            if found[1].stage is Stage.QUEUED:
                seen.append(found)
                yield found
            else:
                self._tasks.done(found[0])
