"""Checks of numbers that users give: JSON has neither NaN nor infinity, and NaN passes most comparisons."""

from __future__ import annotations

import math
from collections.abc import Mapping


def is_finite(value: object) -> bool:
    """Whether a value of JSON has finite numbers only. msgspec writes null in place of others."""
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, Mapping):
        return all(map(is_finite, value.values()))
    return all(map(is_finite, value)) if isinstance(value, list | tuple) else True


def check_seconds(**durations: float | None) -> None:
    """Check durations in seconds, which may be infinite.

    :raises ValueError: for one that is negative or NaN; the message names it.
    """
    for name, value in durations.items():
        if value is not None and not value >= 0:
            raise ValueError(f"{name}: Expected 0 seconds or more, got {value}")
