"""Arithmetic of the benchmark: quantiles, histograms, paired differences, the time of a reaction. Pure."""

from __future__ import annotations

import collections
import math
import random
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

QUANTILES: Final = (50, 75, 90, 99)
BUCKETS_PER_DOUBLING: Final = 4
_RESAMPLES: Final = 2000
_LEAST_SAMPLES: Final = 3
_STEP_S: Final = 0.1
_WINDOW_S: Final = 1.0
_MOST_BY_OTHERS: Final = 0.15

Run = Mapping[str, Any]
Repetition = Mapping[str, Run]
"""By policy."""


class Interval(NamedTuple):
    """A median, and the interval that has the true one with a probability of 95 %; None: too few repetitions."""

    median: float
    low: float | None
    high: float | None

    @property
    def upper(self) -> float:
        """Its upper bound; without one, the median."""
        return self.median if self.high is None else self.high


def quantile(values: Sequence[float], percent: float) -> float:
    """The least of these values that so many of 100 are not above."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]


def class_figures(latencies_ms: Sequence[float], target_ms: float) -> dict[str, Any]:
    """What is stored of the calls of a function in one run. ``histogram``: see :func:`bucket`."""
    counts = collections.Counter(bucket(each / target_ms) for each in latencies_ms)
    return {
        "calls": len(latencies_ms),
        "violations": sum(each > target_ms for each in latencies_ms),
        **{f"p{percent}_ms": round(quantile(latencies_ms, percent), 1) for percent in QUANTILES},
        "histogram": {str(place): counts[place] for place in sorted(counts)},
    }


def bucket(multiple: float) -> int:
    """The place of a multiple of the target in a histogram, four for each doubling; what is below 0 holds it."""
    return math.floor(BUCKETS_PER_DOUBLING * math.log2(max(multiple, 1e-3)))


def violation_part(run: Run, name: str) -> float:
    """The part of the calls of a function that violate its target."""
    found = run["classes"][name]
    return float(found["violations"] / found["calls"]) if found["calls"] else 0.0


def mean_violations(run: Run) -> float:
    """The mean of the functions: one with many calls counts as much as one with few."""
    return statistics.fmean(violation_part(run, name) for name in run["classes"])


def paired(
    repetitions: Sequence[Repetition],
    policy: str,
    other: str,
    value: Callable[[Run], float],
    *,
    is_relative: bool = False,
) -> Interval:
    """The difference of a policy to another one, with the same arrivals.

    :param is_relative: as a part of the other's.
    """
    differences = []
    for each in repetitions:
        ours, theirs = value(each[policy]), value(each[other])
        if not is_relative:
            differences.append(ours - theirs)
        elif theirs:
            differences.append(ours / theirs - 1)
    return bootstrap(differences)


def bootstrap(values: Sequence[float]) -> Interval:
    """The median of these values with its 95 % interval, by resampling (Efron's percentile method).

    :raises statistics.StatisticsError: without a value.
    """
    median = statistics.median(values)
    if len(values) < _LEAST_SAMPLES:
        return Interval(median, None, None)
    rng = random.Random(0)
    medians = sorted(statistics.median(rng.choices(values, k=len(values))) for _ in range(_RESAMPLES))
    return Interval(median, quantile(medians, 2.5), quantile(medians, 97.5))


def reaction_s(calls: Iterable[tuple[float, float]], *, begin_s: float, end_s: float, target_ms: float) -> float:
    """Seconds from the end of a burst until the target is met again: until 95 of 100 calls that arrive in the next
    second meet it. If that is never so, all the seconds that were observed.

    :param calls: instant of arrival, and latency in milliseconds.
    :param begin_s, end_s: the end of the burst, and that of the observation.
    """
    found = list(calls)
    for step in range(max(0, round((end_s - begin_s - _WINDOW_S) / _STEP_S)) + 1):
        at_s = begin_s + step * _STEP_S
        window = [latency_ms for arrived_s, latency_ms in found if at_s <= arrived_s < at_s + _WINDOW_S]
        if window and quantile(window, 95) <= target_ms:
            return step * _STEP_S
    return end_s - begin_s


def calls_between(intervals: Iterable[tuple[float, float]], begin: float, end: float) -> float:
    """Calls in a period; of one that is in it in part, so much."""
    return sum(max(0.0, min(ended, end) - max(began, begin)) / (ended - began) for began, ended in intervals)


def is_calm(repetition: Repetition) -> bool:
    """Whether other processes used little of the machine."""
    return all(run["others"] <= _MOST_BY_OTHERS for run in repetition.values())


def undisturbed(repetitions: Sequence[Repetition]) -> Sequence[Repetition]:
    """The calm repetitions; all of them if there are none."""
    return [each for each in repetitions if is_calm(each)] or repetitions
