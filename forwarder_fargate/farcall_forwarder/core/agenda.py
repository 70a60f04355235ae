"""When to look at what: of thousands of connections, a tick looks at those that may have something due."""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from typing import Generic, TypeVar

__all__ = ["Agenda"]

_Key = TypeVar("_Key", bound=Hashable)


class Agenda(Generic[_Key]):
    """Keys, each with the monotonic second at which it is to be looked at.

    What is due may move on before that (something was sent meanwhile): whoever looks enters the key again.
    """

    def __init__(self) -> None:
        self._at: dict[_Key, float] = {}
        #: With a number, so that keys need no order. An entry that a sooner one has replaced stays until its time.
        self._heap: list[tuple[float, int, _Key]] = []
        self._entered = 0

    def enter(self, key: _Key, *, at: float) -> None:
        """Look at a key at this second, or sooner if that was said before."""
        if at < self._at.get(key, float("inf")):
            self._at[key] = at
            self._entered += 1
            heapq.heappush(self._heap, (at, self._entered, key))

    def due(self, now: float) -> list[_Key]:
        """Strike off the keys whose time has come; the earliest first."""
        keys = []
        while self._heap and self._heap[0][0] <= now:
            at, _, key = heapq.heappop(self._heap)
            if self._at.get(key) == at:
                del self._at[key]
                keys.append(key)
        return keys
