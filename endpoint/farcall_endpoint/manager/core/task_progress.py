"""Progress of the tasks that run on a manager, as their functions report it. Pure: no I/O, no clock."""

from __future__ import annotations

import math
from typing import Final

from farcall_common.progress import Progress
from farcall_endpoint.contracts.agent_manager import ReportedProgress

PERIOD_S: Final = 1.0
"""Shortest time between two reports of one task."""


class ProgressOfTasks:
    """The last progress of each running task that has said something. Instants are monotonic seconds.

    ``last``: by the task's id. ``due_at``: when :meth:`due` has something.
    """

    def __init__(self) -> None:
        self.due_at = math.inf
        self.last: dict[str, Progress] = {}
        self._next_at: dict[str, float] = {}
        self._changed: set[str] = set()

    def note(self, task_id: str, progress: Progress, *, now: float) -> None:
        """Record the progress that a running task reported."""
        self.last[task_id] = progress
        if task_id not in self._changed:
            self._changed.add(task_id)
            self.due_at = min(self.due_at, self._next_at.get(task_id, now))

    def due(self, now: float) -> tuple[ReportedProgress, ...]:
        """Return the progress to report now, for each task at most once in :data:`PERIOD_S` seconds."""
        found = [task_id for task_id in self._changed if self._next_at.get(task_id, now) <= now]
        self._changed.difference_update(found)
        self._next_at.update((task_id, now + PERIOD_S) for task_id in found)
        self.due_at = min((self._next_at[task_id] for task_id in self._changed), default=math.inf)
        return tuple([ReportedProgress(task_id, **vars(self.last[task_id])) for task_id in found])

    def ended(self, task_id: str) -> Progress | None:
        """Forget a task that does not run any more; return its last progress, None if it reported none."""
        self._next_at.pop(task_id, None)
        self._changed.discard(task_id)
        if not self._changed:
            self.due_at = math.inf
        return self.last.pop(task_id, None)
