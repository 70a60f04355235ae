"""Values that a process remembers for a time."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Recent(Generic[K, V]):
    """Values by key that are younger than ``good_s`` seconds of ``clock``; of ``most`` keys, those that were set last.
    May be used from several threads."""

    def __init__(self, clock: Callable[[], float], *, good_s: float, most: int = 4096) -> None:
        self._clock = clock
        self._good_s = good_s
        self._most = most
        self._known: OrderedDict[K, tuple[V, float]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: K) -> V | None:
        """The value, if it is young enough; also none after the clock was set back."""
        known = self._young(key)
        return None if known is None else known[0]

    def get_or_read(self, key: K, read: Callable[[K], V]) -> V:
        """The value; if there is none, ``read`` gives it."""
        known = self._young(key)
        return self.set(key, read(key)) if known is None else known[0]

    def set(self, key: K, value: V) -> V:
        """Remember a value, and return it."""
        with self._lock:
            self._known[key] = (value, self._clock())
            self._known.move_to_end(key)
            while len(self._known) > self._most:
                self._known.popitem(last=False)
        return value

    def _young(self, key: K) -> tuple[V, float] | None:
        with self._lock:
            known = self._known.get(key)
        return known if known is not None and 0 <= self._clock() - known[1] < self._good_s else None
