"""Weights of functions, and the kernel's numbers for them. Pure.

A weight is a number in which 100 is the ordinary one. Each backend gets it in its own unit, directly: the units of the
two versions of cgroups are never converted into each other.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Mapping
from typing import Final

from farcall_endpoint.config.settings import DEFAULT_WEIGHT

LEAST_WEIGHT: Final = 1.0
_MAX: Final = 10_000.0
_DEFAULT_SHARES: Final = 1024
_MAX_SHARES: Final = 262_144
_NICE_WEIGHTS: Final = (1024, 820, 655, 526, 423, 335, 272, 215, 172, 137, 110, 87, 70, 56, 45, 36, 29, 23, 18, 15)
"""Weights of nice 0 to 19: ``sched_prio_to_weight`` (kernel/sched/core.c), a factor of about 1.25 a step."""

_BOUNDS: Final = tuple(-math.log(above * below) / 2 for above, below in itertools.pairwise(_NICE_WEIGHTS))
"""Between two levels of nice: the middle of their weights as a ratio, as a negative logarithm, so that they ascend."""


def check_weight(weight: float) -> float:
    """The weight, between 1 and 10,000.

    :raises ValueError: if it is not a positive finite number.
    """
    if not math.isfinite(weight) or weight <= 0:
        raise ValueError(f"a weight must be a positive number, not {weight!r}")
    return min(max(float(weight), LEAST_WEIGHT), _MAX)


def cpu_weight(weight: float) -> int:
    """``cpu.weight`` of version 2: the weight itself. 1 to 10,000; 100 is the kernel's default."""
    return round(min(max(weight, LEAST_WEIGHT), _MAX))


def cpu_shares(weight: float) -> int:
    """``cpu.shares`` of version 1: 1024 for a weight of 100, which is the kernel's default."""
    return min(max(round(_DEFAULT_SHARES * weight / DEFAULT_WEIGHT), 2), _MAX_SHARES)


def nice_values(weights: Mapping[str, float]) -> dict[str, int]:
    """The nice values whose weights have the ratios of these as nearly as possible. The largest weight has 0.

    They are between 0 and 19, as lower ones need a privilege. So ratios above 68 (1024 to 15) become 68.
    """
    largest = max(weights.values(), default=DEFAULT_WEIGHT)
    unit = math.log(_NICE_WEIGHTS[0])
    return {
        name: bisect.bisect_left(_BOUNDS, math.log(largest) - math.log(weight) - unit)
        for name, weight in weights.items()
    }
