"""Pacing of submits and polls, and outage timing. No I/O and no clock: the caller passes events and times."""

from __future__ import annotations

from collections import deque
from typing import Final


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


_FIRST_DELAY_S: Final = 0.02
_FIRST_ERROR_DELAY_S: Final = 0.1
_GROWTH: Final = 1.5
_LONGEST_DELAY_S: Final = 2.0
#: A poll that took longer says nothing of the API: the machine slept meanwhile.
_LONGEST_POLL_S: Final = 60.0
#: A sample is taken behind an open stream after so long, then after twice as long, up to the longest.
_FIRST_SAMPLE_S: Final = 2.0
_LONGEST_SAMPLE_S: Final = 15.0
#: After so many samples in a row with ends that should have been pushed, the stream is not trusted for a while.
_MISSES: Final = 2
_DISTRUST_S: Final = 60.0


class Pace:
    """The rhythm of polling. Every ``now`` is monotonic seconds.

    Without a stream the delay starts small after each submit and grows while nothing ends, and is never less than twice
    what polling itself takes: a slow API is not asked more for being slow. Behind an open stream, samples suffice; if
    they show that the stream leaves ends out (it may lead to a forwarder that does not hold the endpoint), polling
    goes on as if there were none.
    """

    def __init__(self, *, now: float) -> None:
        self._polled_at = now
        self._took_s = 0.0
        self._delay_s = _FIRST_DELAY_S
        self._sample_every_s = _FIRST_SAMPLE_S
        self._misses = 0
        self._distrusted_until = now
        self._hurrying = False

    def hurry(self) -> None:
        """Ends may have passed unseen: poll soon, whether there is a stream or not."""
        self._hurrying = True
        self._delay_s = _FIRST_DELAY_S

    def samples(self, *, stream_is_open: bool, now: float) -> bool:
        """Whether the next poll is a sample behind a stream that is trusted."""
        return stream_is_open and not self._hurrying and now >= self._distrusted_until

    def due_at(self, *, stream_is_open: bool, now: float) -> float:
        """When to poll next."""
        if self._hurrying:
            return self._polled_at + max(_FIRST_DELAY_S, self._took_s)
        if self.samples(stream_is_open=stream_is_open, now=now):
            return self._polled_at + self._sample_every_s
        return self._polled_at + max(self._delay_s, 2 * self._took_s)

    def begun(self) -> None:
        """A poll begins; from now on :meth:`hurry` is about the next one."""
        self._hurrying = False

    def polled(self, *, ended: int, took_s: float, now: float) -> None:
        """A full poll found this many ends."""
        self._note(took_s, now)
        self._delay_s = _FIRST_DELAY_S if ended else min(self._delay_s * _GROWTH, _LONGEST_DELAY_S)

    def sampled(self, *, ended: int, took_s: float, now: float) -> None:
        """A sample found this many ends that the stream had not brought."""
        self._note(took_s, now)
        if not ended:
            self._misses = 0
            self._sample_every_s = min(2 * self._sample_every_s, _LONGEST_SAMPLE_S)
            return
        self._misses += 1
        self._sample_every_s = _FIRST_SAMPLE_S
        if self._misses >= _MISSES:
            self._misses = 0
            self._distrusted_until = now + _DISTRUST_S
            self._delay_s = _FIRST_DELAY_S

    def failed(self, *, took_s: float, now: float) -> None:
        """The API did not answer."""
        self._note(took_s, now)
        self._delay_s = min(max(2 * self._delay_s, _FIRST_ERROR_DELAY_S), _LONGEST_DELAY_S)

    def _note(self, took_s: float, now: float) -> None:
        self._polled_at = now
        self._took_s = took_s if took_s <= _LONGEST_POLL_S else 0.0


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
