"""Arrivals of calls: Poisson processes and bursts, with a given number of calls. Pure."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

MOST_AT_ONCE: Final = 6
ZIPF_EXPONENT: Final = 2.0

Instants = Callable[[int, float, random.Random], list[float]]
"""Makes so many instants in so many seconds."""


class Arrival(NamedTuple):
    """A call. ``factor``: its work, as a multiple of the function's ordinary one."""

    at_s: float
    function: str
    factor: float = 1.0


def poisson(count: int, duration_s: float, rng: random.Random) -> list[float]:
    """A Poisson process whose number of arrivals is known: uniform instants. So each run has the same load."""
    return sorted(rng.uniform(0.0, duration_s) for _ in range(count))


def bursts(count: int, duration_s: float, rng: random.Random) -> list[float]:
    """Bursts at uniform instants, whose sizes have Zipf's distribution: k calls at once with probability ~ 1/k^2."""
    sizes = range(1, MOST_AT_ONCE + 1)
    instants: list[float] = []
    while len(instants) < count:
        [size] = rng.choices(sizes, [k**-ZIPF_EXPONENT for k in sizes])
        instants += [rng.uniform(0.0, duration_s)] * min(size, count - len(instants))
    return sorted(instants)


def arrivals(
    function: str,
    rate_per_s: float,
    segments_s: Sequence[float],
    rng: random.Random,
    *,
    instants: Instants,
    spread: float,
) -> list[Arrival]:
    """The calls of a function in segments of time, one after the other; each has the number that the rate says.

    :param segments_s: such as the warm-up and what is counted.
    :param spread: the work of a call is between ``1 - spread`` and ``1 + spread``.
    """
    found: list[Arrival] = []
    begin_s = 0.0
    for segment_s in segments_s:
        found += [
            Arrival(begin_s + at_s, function, rng.uniform(1 - spread, 1 + spread))
            for at_s in instants(round(rate_per_s * segment_s), segment_s, rng)
        ]
        begin_s += segment_s
    return found
