"""When an upload that failed is tried again."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Final

from farcall_common.backoff import Backoff
from farcall_endpoint.agent.tasks import Task

_TRIES: Final = 5
_FIRST_WAIT_S: Final = 0.5
_LONGEST_WAIT_S: Final = 4.0


class UploadRetries:
    """Tasks whose results wait for their next try. Instants are epoch seconds."""

    def __init__(self) -> None:
        self._due: list[tuple[float, int, Task]] = []

    def add(self, task: Task, *, now: float) -> bool:
        """Try the result of a task again, after twice as long each time. False when it was tried often enough."""
        assert task.end is not None
        if task.end.upload_backoff is None:
            task.end.upload_backoff = Backoff(first_s=_FIRST_WAIT_S, most_s=_LONGEST_WAIT_S)
        backoff = task.end.upload_backoff
        if backoff.failures + 1 >= _TRIES:
            return False
        heapq.heappush(self._due, (now + backoff.next_s(), task.seq, task))
        return True

    def next_deadline(self) -> float | None:
        """When :meth:`due` may have something next."""
        return self._due[0][0] if self._due else None

    def due(self, *, now: float) -> Iterator[Task]:
        """Those whose time has come."""
        while self._due and self._due[0][0] <= now:
            yield heapq.heappop(self._due)[2]
