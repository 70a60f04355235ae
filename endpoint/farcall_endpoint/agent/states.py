"""Which states of tasks the cloud is told of: those that last. Of a task that is over sooner it hears the end alone."""

from __future__ import annotations

import collections
from typing import Final

from farcall_common.wire import TaskState, TaskTransition
from farcall_endpoint.agent.tasks import Stage, Task

REPORT_AFTER_S: Final = 0.5
"""A state that lasts for so long is worth a message."""


class States:
    """Keeps an eye on tasks that have not ended. Instants are epoch seconds.

    :param are_told: whether anybody wants to know.
    """

    def __init__(self, *, are_told: bool) -> None:
        self._are_told = are_told
        self._watched: collections.deque[tuple[float, Task]] = collections.deque()

    def watch(self, task: Task, at: float) -> None:
        """Look at a task again when its state of now, entered ``at``, has lasted."""
        if self._are_told:
            task.watched = True
            self._watched.append((at + REPORT_AFTER_S, task))

    def enter(self, task: Task, state: TaskState, at: float) -> None:
        """A task changes its state."""
        task.state, task.at = state, at
        if not task.watched and task.reported is not state:
            self.watch(task, at)

    def next_deadline(self) -> float | None:
        """When :meth:`due` may have something next."""
        return self._watched[0][0] if self._watched else None

    def due(self, *, now: float, connected: bool) -> list[TaskTransition]:
        """What is to be told now. Without a session nothing is, and the next one's greeting says it all."""
        transitions = []
        while self._watched and self._watched[0][0] <= now:
            task = self._watched.popleft()[1]
            task.watched = False
            if task.stage is Stage.ENDED or task.reported is task.state:
                continue
            if now < task.at + REPORT_AFTER_S:
                self.watch(task, task.at)
            elif connected:
                task.reported = task.state
                transitions.append(
                    TaskTransition(task_id=task.task_id, attempt=task.attempt, state=task.state, at=task.at)
                )
        return transitions
