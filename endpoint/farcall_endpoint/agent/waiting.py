"""Tasks that wait for a manager."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from farcall_common.fairness import FairQueue
from farcall_endpoint.agent.scheduling import ManagerLoad, SchedulingPolicy
from farcall_endpoint.agent.tasks import Stage, Task


class Waiting:
    """A queue, fair between submitters and oldest first for each of them. What ended while it waited is passed over,
    and taken out when it comes to the front.

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
        """A manager has done with a task that it got from here."""
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
        while full and (found := self._tasks.take(newcomers_only=True)) is not None:
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
