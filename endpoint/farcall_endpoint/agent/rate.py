"""How many per second, lately. No I/O, no clock."""

from __future__ import annotations

import collections
from typing import Final

_WINDOW_S: Final = 10.0


class Rate:
    """From a count that only grows, looked at every now and then. Instants are monotonic seconds."""

    def __init__(self) -> None:
        self._seen: collections.deque[tuple[float, int]] = collections.deque()

    def per_s(self, count: int, *, now: float) -> float:
        """How fast the count has grown over the last ten seconds, as far as it was looked at."""
        self._seen.append((now, count))
        while len(self._seen) > 2 and self._seen[1][0] <= now - _WINDOW_S:
            self._seen.popleft()
        since, former = self._seen[0]
        return (count - former) / (now - since) if now > since else 0.0
