"""Report limiter: when the numbers of an endpoint may be sent, and recorded, again. No I/O, no clock."""

from __future__ import annotations

from typing import Final

#: Shortest period between two reports, the period of those of an endpoint whose numbers change all the time, and how
#: many may come before that one applies.
LEAST_S: Final = 1.0
SUSTAINED_S: Final = 5.0
BURST: Final = 10


class ReportLimiter:
    """A token bucket, as a generic cell rate algorithm (ITU-T I.371): ``burst`` reports, ``least_s`` seconds apart, and
    one more for each ``sustained_s``. Instants are monotonic seconds."""

    __slots__ = ("_burst_s", "_full_at", "_least_s", "_sustained_s", "next_at")

    def __init__(self, *, least_s: float = LEAST_S, sustained_s: float = SUSTAINED_S, burst: int = BURST) -> None:
        self._least_s = least_s
        self._sustained_s = sustained_s
        self._burst_s = (burst - 1) * sustained_s
        self._full_at = float("-inf")
        #: The instant from which the next report is permitted.
        self.next_at = float("-inf")

    def used(self, *, now: float) -> None:
        """A report was made."""
        self._full_at = max(self._full_at, now) + self._sustained_s
        self.next_at = max(now + self._least_s, self._full_at - self._burst_s)
