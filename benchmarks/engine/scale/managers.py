"""What a simulated manager does, without the workers: takes orders, and knows when its tasks would have ended. No I/O.

Its workers take the tasks in their order, and each task takes equally long, so tasks end in the order of their start:
a worker is free when the task ``slots`` places before has ended.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Final

from farcall_common.payload.native import dump_native
from farcall_common.wire import TaskState
from farcall_endpoint.protocol import Finished, Progress, TaskOrder

_NONE: Final = dump_native(None)
_NEVER: Final = float("inf")


class SimulatedManager:
    """One manager. Instants are epoch seconds.

    :param slots: its workers.
    :param task_s: seconds that each task takes.
    """

    def __init__(self, *, slots: int, task_s: float) -> None:
        self._slots = slots
        self._task_s = task_s
        self._ends: collections.deque[tuple[float, str]] = collections.deque()  # when, and which task
        self._free_at = collections.deque([0.0] * slots, maxlen=slots)  # of each worker, the next one first
        self._cancelled: list[Finished] = []

    def run(self, orders: Sequence[TaskOrder], *, now: float) -> None:
        """Take tasks."""
        free_at, ends, task_s = self._free_at, self._ends, self._task_s
        for order in orders:
            end_at = max(now, free_at[0]) + task_s
            free_at.append(end_at)  # the first one falls out
            ends.append((end_at, order.task_id))

    def cancel(self, task_ids: Sequence[str]) -> None:
        """Stop tasks. Their workers stay as busy as they were."""
        wanted = set(task_ids)
        self._cancelled += [Finished(task_id, TaskState.CANCELLED) for _, task_id in self._ends if task_id in wanted]
        self._ends = collections.deque(end for end in self._ends if end[1] not in wanted)

    def next_end(self, *, now: float) -> float:
        """When there is something to report; never is infinitely far."""
        return now if self._cancelled else self._ends[0][0] if self._ends else _NEVER

    def progress(self, *, now: float) -> tuple[Progress, list[bytes]]:
        """What has ended since the last time, with the bodies of the results."""
        ends, task_s = self._ends, self._task_s
        finished, self._cancelled = self._cancelled, []
        bodies: list[bytes] = []
        while ends and ends[0][0] <= now:
            end_at, task_id = ends.popleft()
            finished.append(Finished(task_id, TaskState.SUCCESS, len(bodies), None, end_at - task_s, end_at))
            bodies.append(_NONE)
        idle = max(0, self._slots - len(ends))
        return Progress(finished=tuple(finished), workers=self._slots, idle_workers=idle), bodies
