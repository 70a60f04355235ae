"""Which manager gets which task: a seam. A policy is a pure class; it sees loads and tasks, and gives back pairs."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, Protocol

from farcall_endpoint.agent.tasks import Task

__all__ = ["POLICIES", "ManagerLoad", "RandomPolicy", "RoundRobinPolicy", "SchedulingPolicy", "TimeLeft"]

_MOST_OVERTAKEN: Final = 1000
"""So that a long queue is not read to its end in every turn."""


@dataclasses.dataclass(frozen=True, slots=True)
class TimeLeft:
    """How long a manager's block still lives, in seconds.

    :param drain_s: so much of it is kept free of tasks whose length nobody knows.
    :param limit_s: what any task may run at most, whatever its own limit; None is no limit.
    """

    left_s: float
    drain_s: float = 0.0
    limit_s: float | None = None

    def fits(self, walltime_s: float | None) -> bool:
        """Whether a task with such a limit can end before the block does."""
        known = [limit for limit in (walltime_s, self.limit_s) if limit is not None]
        return self.left_s >= min(known) if known else self.left_s > self.drain_s


@dataclasses.dataclass(slots=True)
class ManagerLoad:
    """A manager as a policy sees it. ``free``: slots without a task. ``room``: what it takes, prefetch included.
    ``time``: what is left of its block's; None if there is no end to it, or nobody knows."""

    manager_id: str
    free: int
    room: int
    time: TimeLeft | None = None

    def takes(self, task: Task) -> bool:
        """Whether the task may go here now. One that may not run twice never waits behind another: should the manager
        die, it would be lost without ever having been started."""
        return self.free > 0 or (self.room > 0 and task.spec.idempotent)

    def take(self) -> None:
        """Count a task."""
        self.free -= 1
        self.room -= 1


class SchedulingPolicy(Protocol):
    """Places tasks on managers."""

    def place(self, tasks: Iterable[Task], managers: Sequence[ManagerLoad]) -> list[tuple[Task, str]]:
        """Pairs of task and manager id, in the order of ``tasks``. Loads are counted down in place. A task overtakes
        another only if that one could not end in any manager's time."""


class RandomPolicy:
    """Each task goes to a manager drawn at random among those with a free slot, else among those with room."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def place(self, tasks: Iterable[Task], managers: Sequence[ManagerLoad]) -> list[tuple[Task, str]]:
        """As :meth:`SchedulingPolicy.place`."""
        return _place(tasks, managers, self._rng.choice)


class RoundRobinPolicy:
    """Managers with a free slot take turns, then those with room."""

    def __init__(self) -> None:
        self._turn = 0

    def place(self, tasks: Iterable[Task], managers: Sequence[ManagerLoad]) -> list[tuple[Task, str]]:
        """As :meth:`SchedulingPolicy.place`."""
        return _place(tasks, managers, self._next)

    def _next(self, candidates: Sequence[ManagerLoad]) -> ManagerLoad:
        self._turn += 1
        return candidates[self._turn % len(candidates)]


def _place(
    tasks: Iterable[Task], managers: Sequence[ManagerLoad], choose: Callable[[Sequence[ManagerLoad]], ManagerLoad]
) -> list[tuple[Task, str]]:
    placed: list[tuple[Task, str]] = []
    free = [manager for manager in managers if manager.free > 0]
    roomy = [manager for manager in managers if manager.room > 0]
    timed = any(manager.time is not None for manager in managers)
    overtaken = 0
    for task in tasks:
        candidates: Sequence[ManagerLoad] = free or roomy
        if not candidates or overtaken > _MOST_OVERTAKEN:
            break
        if timed:
            candidates = _lasting(task, free) or _lasting(task, roomy)
            if not candidates:
                overtaken += 1
                continue
        manager = candidates[0] if len(candidates) == 1 else choose(candidates)
        if not manager.takes(task):
            break  # no overtaking: the order of submission is kept
        manager.take()
        placed.append((task, manager.manager_id))
        if manager.free == 0:
            free.remove(manager)
        if manager.room <= 0:
            roomy.remove(manager)
    return placed


def _lasting(task: Task, managers: Sequence[ManagerLoad]) -> Sequence[ManagerLoad]:
    return [manager for manager in managers if manager.time is None or manager.time.fits(task.spec.walltime_s)]


POLICIES: Final[Mapping[str, Callable[[], SchedulingPolicy]]] = {
    "random": lambda: RandomPolicy(random.Random()),  # noqa: S311 - nothing secret
    "round-robin": RoundRobinPolicy,
}
