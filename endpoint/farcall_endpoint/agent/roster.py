"""The managers as an agent knows them: what each has, and sums that are kept as things happen, so that a turn costs no
more with a thousand of them. No I/O."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

from farcall_endpoint.agent.scheduling import Lifetime, ManagerLoad
from farcall_endpoint.agent.tasks import Task


@dataclasses.dataclass(slots=True)
class Member:
    """A manager. ``load`` counts the workers that are there, ``slots`` those that there should be; ``outstanding`` are
    its tasks in the order in which it got them."""

    slots: int
    load: ManagerLoad
    outstanding: dict[str, Task] = dataclasses.field(default_factory=dict)
    workers: int = 0
    idle_workers: int = 0


class Roster:
    """All managers of an agent."""

    def __init__(self) -> None:
        self._members: dict[str, Member] = {}
        self._problems: dict[str, str] = {}
        #: Sums over all managers.
        self.slots = self.workers = self.idle_workers = self.outstanding = 0

    def __len__(self) -> int:
        return len(self._members)

    @property
    def loads(self) -> Sequence[ManagerLoad]:
        """What a policy sees; it counts them down, and :meth:`assign` does not."""
        return [member.load for member in self._members.values()]

    @property
    def busy(self) -> Collection[str]:
        """The ids of managers that have tasks."""
        return [manager_id for manager_id, member in self._members.items() if member.outstanding]

    @property
    def problem(self) -> str:
        """What one of them complains of; empty if none does."""
        return next(iter(self._problems.values()), "")

    def add(self, manager_id: str, *, slots: int, lifetime: Lifetime | None) -> None:
        """A manager is there; its workers are not yet."""
        self._members[manager_id] = Member(slots, ManagerLoad(manager_id, 0, 0, lifetime))
        self.slots += slots

    def remove(self, manager_id: str) -> Member | None:
        """A manager is gone; it as it was."""
        self.note(manager_id, workers=0, idle_workers=0, problem="")
        member = self._members.pop(manager_id, None)
        if member is not None:
            self.slots -= member.slots
            self.outstanding -= len(member.outstanding)
        return member

    def note(self, manager_id: str, *, workers: int, idle_workers: int, problem: str) -> None:
        """How a manager is, in its own words. It gets tasks for workers that are there."""
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
        """A manager has done with a task; None if it did not have it."""
        member = self._members.get(manager_id)
        task = member.outstanding.pop(task_id, None) if member is not None else None
        if member is not None and task is not None:
            member.load.free += 1
            self.outstanding -= 1
        return task
