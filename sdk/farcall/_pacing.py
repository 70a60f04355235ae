"""Rate limits, poll schedules and outage timers. No I/O and no clock: the caller passes events and times."""

from __future__ import annotations

from collections import deque
from typing import Final

_FIRST_DELAY_S: Final = 0.02
_FIRST_ERROR_DELAY_S: Final = 0.1
_GROWTH: Final = 1.5
_LONGEST_DELAY_S: Final = 2.0
#: A longer poll is no measure of the API: the machine slept meanwhile.
_LONGEST_POLL_S: Final = 60.0
#: Interval of samples while a stream is open: doubled after each sample, up to the longest.
_FIRST_SAMPLE_S: Final = 2.0
_LONGEST_SAMPLE_S: Final = 15.0
#: After this many consecutive samples with results that the stream had not pushed, it is ignored for a while.
_MISSES: Final = 2
_DISTRUST_S: Final = 60.0
#: One step is an attempt and a pause. In a longer one the machine slept: a closed laptop, a stopped process.
_LONGEST_STEP_S: Final = 60.0


class BurstLimit:
    """Allows ``limit`` requests within ``window_s`` seconds; beyond that, one each ``window_s / limit`` seconds.

    Without a limit it allows everything.

    :raises ValueError: unless both are positive.
    """

    def __init__(self, limit: int | None, window_s: float) -> None:
        if limit is not None and limit < 1:
            raise ValueError("api_burst_limit must be at least 1, or None")
        if not window_s > 0:  # NaN, too
            raise ValueError("api_burst_window_s must be positive")
        self.limit = limit
        self.window_s = window_s
        self._sent: deque[float] = deque(maxlen=limit or 0)

    def next_delay_s(self, *, now: float) -> float:
        """Count a request, and return how long to wait before it, in seconds. ``now`` is monotonic seconds."""
        if self.limit is None:
            return 0.0
        at = now
        if len(self._sent) == self.limit and self._sent[0] > now - self.window_s:
            at = max(now, self._sent[-1] + self.window_s / self.limit)
        self._sent.append(at)
        return at - now


class PollSchedule:
    """Times of polls. Every ``now`` is monotonic seconds.

    Without a stream the delay starts small after each submit, grows while no task ends, and is at least twice the
    duration of a poll, so that a slow API is not polled more often. With an open stream, samples are enough; if they
    show that the stream leaves results out (its forwarder may not hold the endpoint), polling continues as without a
    stream.
    """

    def __init__(self, *, now: float) -> None:
        self._polled_at = now
        self._took_s = 0.0
        self._delay_s = _FIRST_DELAY_S
        self._sample_every_s = _FIRST_SAMPLE_S
        self._misses = 0
        self._distrusted_until = now
        self._is_urgent = False

    def poll_soon(self) -> None:
        """Results may have been missed: poll soon, also while a stream is open."""
        self._is_urgent = True
        self._delay_s = _FIRST_DELAY_S

    def next_is_sample(self, *, stream_is_open: bool, now: float) -> bool:
        """Whether the next poll is a sample, because there is a stream that is trusted."""
        return stream_is_open and not self._is_urgent and now >= self._distrusted_until

    def due_at(self, *, stream_is_open: bool, now: float) -> float:
        """When to poll next."""
        if self._is_urgent:
            return self._polled_at + max(_FIRST_DELAY_S, self._took_s)
        if self.next_is_sample(stream_is_open=stream_is_open, now=now):
            return self._polled_at + self._sample_every_s
        return self._polled_at + max(self._delay_s, 2 * self._took_s)

    def poll_started(self) -> None:
        """A poll starts; :meth:`poll_soon` is about the next one from now on."""
        self._is_urgent = False

    def polled(self, *, ended: int, took_s: float, now: float) -> None:
        """A full poll found this many results."""
        self._record(took_s, now)
        self._delay_s = _FIRST_DELAY_S if ended else min(self._delay_s * _GROWTH, _LONGEST_DELAY_S)

    def sampled(self, *, ended: int, took_s: float, now: float) -> None:
        """A sample found this many results that the stream had not pushed."""
        self._record(took_s, now)
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
        self._record(took_s, now)
        self._delay_s = min(max(2 * self._delay_s, _FIRST_ERROR_DELAY_S), _LONGEST_DELAY_S)

    def _record(self, took_s: float, now: float) -> None:
        self._polled_at = now
        self._took_s = took_s if took_s <= _LONGEST_POLL_S else 0.0


#: Seconds for which refusals by a gateway or a proxy, and answers that cannot be read, are retried. A deployment of API
#: Gateway refuses requests for some seconds.
FOREIGN_RETRY_S: Final = 30.0


class OutageTimer:
    """Seconds since the last answer while requests fail. Every ``now`` is monotonic seconds.

    A period in which this process did not run counts for a minute at most: after a night in a closed laptop the API
    was not out of reach for a night, and gets another request.
    """

    def __init__(self, *, now: float) -> None:
        self._seen_at = now
        self._outage_s = 0.0

    def reset(self, *, now: float) -> None:
        """There was an answer, or no request."""
        self._seen_at, self._outage_s = now, 0.0

    def failed(self, *, now: float) -> float:
        """A request failed. Returns the length of the outage so far, in seconds."""
        self._outage_s += min(now - self._seen_at, _LONGEST_STEP_S)
        self._seen_at = now
        return self._outage_s
