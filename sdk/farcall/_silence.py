"""How long there has been no answer. No I/O and no clock: it is told what happened, and when."""

from __future__ import annotations

from typing import Final

#: Between two looks passes an attempt and a pause. What is longer was spent asleep: a closed laptop, a stopped process.
_LONGEST_STEP_S: Final = 60.0


class Silence:
    """Seconds in which nobody answered although somebody asked. Every ``now`` is monotonic seconds.

    Time in which this process did not run counts for a minute at most: after a night in a closed laptop the other side
    was not away for a night, and has to be asked once more.
    """

    def __init__(self, *, now: float) -> None:
        self._seen_at = now
        self._lasted_s = 0.0

    def end(self, *, now: float) -> None:
        """There was an answer, or nobody asked."""
        self._seen_at, self._lasted_s = now, 0.0

    def lasts(self, *, now: float) -> float:
        """There was none again: for how many seconds so far."""
        self._lasted_s += min(now - self._seen_at, _LONGEST_STEP_S)
        self._seen_at = now
        return self._lasted_s
