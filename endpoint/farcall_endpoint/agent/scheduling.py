"""Which manager gets which task: a seam. A policy is a pure class; it sees loads and tasks, and gives back pairs."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, Protocol

from farcall_endpoint.agent.tasks import Task

_MOST_OVERTAKEN: Final = 1000
"""So that a long queue is not read to its end in every turn."""


@dataclasses.dataclass(frozen=True, slots=True)
class Lifetime:
    """When a manager's block is over, in epoch seconds.

    :param drain_s: so much of it is kept free of tasks whose length nobody knows.
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
    ``lifetime``: None if there is no end to it, or nobody knows."""

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


POLICIES: Final[Mapping[str, Callable[[], SchedulingPolicy]]] = {
    "random": lambda: RandomPolicy(random.Random()),  # noqa: S311 - nothing secret
    "round-robin": RoundRobinPolicy,
}
