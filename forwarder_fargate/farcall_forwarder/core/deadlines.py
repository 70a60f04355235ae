"""Priority queue of deadlines: of thousands of connections, a tick checks only those that may be due."""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from typing import Generic, TypeVar

_Key = TypeVar("_Key", bound=Hashable)


class DeadlineQueue(Generic[_Key]):
    """Keys, each with the monotonic second at which it is checked.

    The real deadline may be later than that (a message was sent meanwhile): the caller then enters the key again.
    """

    def __init__(self) -> None:
        self._at: dict[_Key, float] = {}
        #: The number makes keys without an order sortable. An entry that was replaced stays until its time.
        self._heap: list[tuple[float, int, _Key]] = []
        self._entered = 0

    def enter(self, key: _Key, *, at: float) -> None:
        """Check a key at this second, or earlier if an earlier second was entered before."""
        if at < self._at.get(key, float("inf")):
            self._at[key] = at
            self._entered += 1
            heapq.heappush(self._heap, (at, self._entered, key))

    def due(self, now: float) -> list[_Key]:
        """Remove and return the keys whose time has come, earliest first."""
        keys = []
        while self._heap and self._heap[0][0] <= now:
            at, _, key = heapq.heappop(self._heap)
            if self._at.get(key) == at:
                del self._at[key]
                keys.append(key)
        return keys
