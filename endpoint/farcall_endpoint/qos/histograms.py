"""Histograms of durations: small, with a relative error, and two of them can be added up.

The buckets grow by a factor, as in DDSketch (Masson, Rim, Lee: VLDB 2019): a quantile is off by 5 % at most, for
durations from 10 µs to 11 days. A histogram takes about 1 KB, whatever was counted.
"""

from __future__ import annotations

import array
import collections
import math
import operator
from typing import Final

_ERROR: Final = 0.05
_LOG_FACTOR: Final = math.log((1 + _ERROR) / (1 - _ERROR))
_LEAST_S: Final = 1e-5
_MOST_S: Final = 1e6
_FIRST: Final = math.ceil(math.log(_LEAST_S) / _LOG_FACTOR)
_BUCKETS: Final = math.ceil(math.log(_MOST_S) / _LOG_FACTOR) - _FIRST + 1
_MIDDLE: Final = 2 / (1 + math.exp(_LOG_FACTOR))
"""Middle of a bucket as a fraction of its upper bound. Durations in the bucket differ from it by at most the error."""
_EMPTY: Final = bytes(4 * _BUCKETS)
_MOST_COUNT: Final = 2**32 - 1


class Histogram:
    """Counts of durations.

    :ivar count: number of all durations.
    """

    __slots__ = ("_buckets", "count")

    def __init__(self) -> None:
        self._buckets = array.array("I", _EMPTY)
        self.count = 0

    def add(self, duration_s: float, count: int = 1) -> None:
        """Count a duration. What is negative, as after a step of a clock, counts as the shortest one."""
        bucket = _bucket(duration_s)
        self._buckets[bucket] = min(self._buckets[bucket] + count, _MOST_COUNT)
        self.count += count

    def merge(self, other: Histogram) -> None:
        """Count what another one has counted."""
        try:
            self._buckets = array.array("I", map(operator.add, self._buckets, other._buckets))
        except OverflowError:
            both = map(operator.add, self._buckets, other._buckets)
            self._buckets = array.array("I", [min(each, _MOST_COUNT) for each in both])
        self.count += other.count

    def quantile(self, part: float) -> float | None:
        """The duration, in seconds, that this part of all does not exceed; None if nothing was counted.

        :param part: 0 to 1.
        """
        if not self.count:
            return None
        rank = max(1, math.ceil(part * self.count))
        found = 0
        for number, count in enumerate(self._buckets):
            if count:
                found = number
                rank -= count
                if rank <= 0:
                    break
        return math.exp((found + _FIRST) * _LOG_FACTOR) * _MIDDLE

    def buckets(self, *, most: int) -> list[tuple[float, int]]:
        """Return the upper bound in seconds and the count of each non-empty bucket. Neighbouring buckets are joined
        until there are at most ``most``."""
        found = [(number, count) for number, count in enumerate(self._buckets) if count]
        width = 1
        while len(found) > most:
            width *= 2
            joined: dict[int, int] = {}
            for number, count in found:
                last = number // width * width + width - 1
                joined[last] = joined.get(last, 0) + count
            found = list(joined.items())
        return [(math.exp((number + _FIRST) * _LOG_FACTOR), count) for number, count in found]


def _bucket(duration_s: float) -> int:
    if not duration_s > _LEAST_S:  # also what is not a number
        return 0
    return math.ceil(math.log(min(duration_s, _MOST_S)) / _LOG_FACTOR) - _FIRST


class WindowedHistogram:
    """The durations of a window of time, which moves on in steps.

    :param window_s: how long a duration counts; up to a step longer.
    :param steps: parts of the window.
    """

    __slots__ = ("_parts", "_step_s", "_steps")

    def __init__(self, window_s: float, steps: int = 5) -> None:
        self._step_s = window_s / steps
        self._steps = steps
        self._parts: collections.deque[tuple[int, Histogram]] = collections.deque()  # with the number of its step

    def add(self, duration_s: float, now: float, count: int = 1) -> None:
        """Count a duration. ``now`` is in seconds of a clock that does not step."""
        step = int(now / self._step_s)
        if not self._parts or self._parts[-1][0] != step:
            self._parts.append((step, Histogram()))
            self._forget(step)
        self._parts[-1][1].add(duration_s, count)

    def count(self, now: float) -> int:
        """How many count now."""
        self._forget(int(now / self._step_s))
        return sum(part.count for _, part in self._parts)

    def histogram(self, now: float, last_s: float = math.inf) -> Histogram:
        """All that counts now, and not longer than for the last seconds, up to a step more."""
        self._forget(int(now / self._step_s))
        found = Histogram()
        first = (now - last_s) / self._step_s - 1
        for step, part in self._parts:
            if step >= first:
                found.merge(part)
        return found

    def _forget(self, step: int) -> None:
        while self._parts and self._parts[0][0] < step - self._steps:
            self._parts.popleft()
