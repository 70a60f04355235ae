"""A pace for requests: some at once, then one after the other. No I/O and no clock: it is told what time it is."""

from __future__ import annotations

from collections import deque


class Burst:
    """Allows ``limit`` requests within ``window_s`` seconds; beyond that, one each ``window_s / limit`` seconds.

    Without a limit it allows everything.

    :raises ValueError: unless both are positive.
    """

    def __init__(self, limit: int | None, window_s: float) -> None:
        if limit is not None and limit < 1:
            raise ValueError("api_burst_limit must be at least 1, or None")
        if window_s <= 0:
            raise ValueError("api_burst_window_s must be positive")
        self.limit = limit
        self.window_s = window_s
        self._sent: deque[float] = deque(maxlen=limit or 0)

    def take(self, *, now: float) -> float:
        """Plan the next request and return how long to wait before it, in seconds. ``now`` is monotonic seconds."""
        if self.limit is None:
            return 0.0
        at = now
        if len(self._sent) == self.limit and self._sent[0] > now - self.window_s:
            at = max(now, self._sent[-1] + self.window_s / self.limit)
        self._sent.append(at)
        return at - now
