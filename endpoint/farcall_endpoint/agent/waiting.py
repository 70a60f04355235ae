"""Tasks that wait for a manager."""

from __future__ import annotations

import collections
from collections.abc import Iterator, Sequence

from farcall_endpoint.agent.tasks import Stage, Task

__all__ = ["Waiting"]


class Waiting:
    """A queue, oldest first. What ended while it waited is passed over, and taken out when it comes to the front."""

    def __init__(self) -> None:
        self._tasks: collections.deque[Task] = collections.deque()

    def __bool__(self) -> bool:
        """Whether any task waits."""
        while self._tasks and self._tasks[0].stage is not Stage.QUEUED:
            self._tasks.popleft()
        return bool(self._tasks)

    def __iter__(self) -> Iterator[Task]:
        return (task for task in self._tasks if task.stage is Stage.QUEUED)

    def add(self, task: Task) -> None:
        """Put a task behind the others."""
        self._tasks.append(task)

    def put_back(self, tasks: Sequence[Task]) -> None:
        """Put tasks before the others, in their order."""
        self._tasks.extendleft(reversed(tasks))

    def take(self, placed: Sequence[tuple[Task, str]]) -> Iterator[tuple[Task, str]]:
        """Take out tasks that are ``placed``, in the order of the queue, each with its manager, one by one. Others that
        they overtake keep their places."""
        passed = []
        for task, manager_id in placed:
            while (head := self._tasks.popleft()) is not task:
                if head.stage is Stage.QUEUED:
                    passed.append(head)
            yield task, manager_id
        self.put_back(passed)

    def clear(self) -> list[Task]:
        """Take out all that wait."""
        waiting = list(self)
        self._tasks.clear()
        return waiting
