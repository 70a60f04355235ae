"""Simulated manager: accepts tasks, and calculates when its workers would have ended them. No I/O.

Workers take tasks in their order, and all tasks have the same length, so they end in the order of their start: a worker
is free when the task ``slots`` places before has ended.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Final

from farcall_common.payload.native import dump_native
from farcall_common.wire import TaskState
from farcall_endpoint.contracts.agent_manager import Finished, Progress, TaskOrder

_NONE: Final = dump_native(None)
_NEVER: Final = float("inf")


class SimulatedManager:
    """One manager with ``slots`` workers; each task takes ``task_s``. Instants are epoch seconds."""

    def __init__(self, *, slots: int, task_s: float) -> None:
        self._slots = slots
        self._task_s = task_s
        self._pending: collections.deque[tuple[float, str]] = collections.deque()  # end and id of each task
        self._free_at = collections.deque([0.0] * slots, maxlen=slots)  # for each worker, the earliest first
        self._cancelled: list[Finished] = []

    def run(self, orders: Sequence[TaskOrder], *, now: float) -> None:
        """Accept tasks."""
        free_at, pending, task_s = self._free_at, self._pending, self._task_s
        for order in orders:
            end_at = max(now, free_at[0]) + task_s
            free_at.append(end_at)  # drops the first one
            pending.append((end_at, order.task_id))

    def cancel(self, task_ids: Sequence[str]) -> None:
        """Stop tasks. Their workers stay busy."""
        wanted = set(task_ids)
        self._cancelled += [Finished(task_id, TaskState.CANCELLED) for _, task_id in self._pending if task_id in wanted]
        self._pending = collections.deque(task for task in self._pending if task[1] not in wanted)

    def next_end(self, *, now: float) -> float:
        """When the next report is due; infinite if none is."""
        return now if self._cancelled else self._pending[0][0] if self._pending else _NEVER

    def progress(self, *, now: float) -> tuple[Progress, list[bytes]]:
        """The tasks that have ended since the last report, with the bodies of their results."""
        pending, task_s = self._pending, self._task_s
        finished, self._cancelled = self._cancelled, []
        bodies: list[bytes] = []
        while pending and pending[0][0] <= now:
            end_at, task_id = pending.popleft()
            finished.append(Finished(task_id, TaskState.SUCCESS, len(bodies), None, end_at - task_s, end_at))
            bodies.append(_NONE)
        idle = max(0, self._slots - len(pending))
        return Progress(finished=tuple(finished), workers=self._slots, idle_workers=idle), bodies
