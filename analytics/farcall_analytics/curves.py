"""Measured quantities as functions of another one, and distributions of slow-downs. No I/O."""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Final

_MOST_FACTORS: Final = 100
_PRECISION: Final = 1e-6


@dataclasses.dataclass(frozen=True)
class Curve:
    """A quantity at some points: between them along a line of logarithms, beyond them as at the last one.

    :param points: pairs of positive numbers, the first ones rising.
    :raises ValueError: for points that make no sense.
    """

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        places = [place for place, _ in self.points]
        numbers = itertools.chain.from_iterable(self.points)
        if not self.points or sorted(set(places)) != places or not all(each > 0 for each in numbers):
            raise ValueError(f"points: expected pairs of positive numbers, the first ones rising, got {self.points!r}")

    def at(self, place: float) -> float:
        """The quantity at a place."""
        index = bisect.bisect_left(self.points, (place,))
        if index == 0:
            return self.points[0][1]
        if index == len(self.points):
            return self.points[-1][1]
        (before, low), (after, high) = self.points[index - 1 : index + 1]
        part = (math.log(place) - math.log(before)) / (math.log(after) - math.log(before))
        return math.exp(math.log(low) + part * (math.log(high) - math.log(low)))

    def scaled(self, factor: float) -> Curve:
        """This curve, each value times a factor."""
        return Curve(tuple((place, value * factor) for place, value in self.points))


def constant(value: float) -> Curve:
    """A quantity that is the same everywhere."""
    return Curve(((1.0, value),))


@dataclasses.dataclass(frozen=True)
class Slowdowns:
    """How much longer than on average tasks take: equally probable factors, whose mean is 1.

    :param factors: positive numbers.
    """

    factors: tuple[float, ...] = (1.0,)

    @classmethod
    def of(cls, durations: Sequence[float]) -> Slowdowns:
        """The factors of measured durations, at most a hundred of them: means of as many of them, in order."""
        ordered = sorted(durations)
        step = max(1, math.ceil(len(ordered) / _MOST_FACTORS))
        means = [sum(group) / len(group) for group in (ordered[at : at + step] for at in range(0, len(ordered), step))]
        mean = sum(means) / len(means)
        return cls(tuple(each / mean for each in means))

    def worst(self, tasks: int, *, quantile: float) -> float:
        """The factor that the slowest of so many tasks does not exceed in this part of all cases."""
        ordered = sorted(self.factors)
        return ordered[_place(quantile ** (1 / max(tasks, 1)), len(ordered))]

    def mean_worst(self, tasks: int) -> float:
        """The mean factor of the slowest of so many tasks."""
        ordered, count = sorted(self.factors), len(self.factors)
        parts = [(number / count) ** max(tasks, 1) for number in range(count + 1)]
        return sum(each * (parts[number + 1] - parts[number]) for number, each in enumerate(ordered))

    def of_workers(self, count: int) -> list[float]:
        """The factors of so many workers, spread as those of all. The last one is the slowest that there is on
        average."""
        ordered = sorted(self.factors)
        found = [ordered[int((number + 0.5) / count * len(ordered))] for number in range(count)]
        return [*found[:-1], max(found[-1], self.mean_worst(count))]

    def with_copies(self, after: float) -> Slowdowns:
        """The factors where a task that takes longer than this part of the others is started once more, and the first
        of both counts."""
        return _with_copies(self, after)


def last_end(tasks: int, durations: Sequence[float]) -> float:
    """When the last of so many tasks has ended, if each worker, which takes so long for one, takes the next one when it
    has ended one."""
    low, high = 0.0, math.ceil(tasks / len(durations)) * max(durations)  # between which the last one begins
    precision = _PRECISION * max(durations)
    while high - low > precision:
        middle = (low + high) / 2
        if sum(math.floor(middle / each) + 1 for each in durations) >= tasks:
            high = middle
        else:
            low = middle
    begun = [math.floor(low / each) + 1 for each in durations]
    ends = [count * each for count, each in zip(begun, durations, strict=True)]
    free = sorted((end, each) for end, each in zip(ends, durations, strict=True) if end <= high + precision)
    left = max(0, tasks - sum(begun))
    return max(*ends, *(end + each for end, each in free[:left]), 0.0)


NONE: Final = Slowdowns()
"""All tasks take as long as on average."""


@functools.cache
def _with_copies(slowdowns: Slowdowns, after: float) -> Slowdowns:
    ordered = sorted(slowdowns.factors)
    limit = ordered[_place(after, len(ordered))]
    found = sorted(each if each <= limit else min(each, limit + copy) for each in ordered for copy in ordered)
    step = len(ordered)  # as many factors as before
    return Slowdowns(tuple(sum(found[at : at + step]) / step for at in range(0, len(found), step)))


def _place(part: float, count: int) -> int:
    return min(count - 1, max(0, math.ceil(part * count) - 1))
