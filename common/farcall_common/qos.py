"""Quality of service: the latency that calls of a function are to hold, as their submitter writes it."""

from __future__ import annotations

import numbers
from typing import Final

import msgspec

_MAX_TARGET_MS: Final = 86_400_000.0
_MAX_SLOWDOWN: Final = 1000.0
_DEFAULT_PERCENTILE: Final = 95.0
_LEAST_PERCENTILE: Final = 50.0
_MOST_PERCENTILE: Final = 99.9


class QoS(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, repr_omit_defaults=True, gc=False):
    """A latency target: calls that have one are a latency class, all others are batch work.

    The latency of a call is the time from its arrival at the endpoint to the end of its function. Give either
    ``target_ms`` or ``max_slowdown``; ``QoS()`` takes away the target that a function was registered with.

    ::

        client.register_function(resize, qos=QoS(target_ms=200, percentile=95))
        executor.options(qos=QoS(max_slowdown=3)).submit(train, data)

    :param target_ms: the latency that is to be held, in milliseconds: up to a day.
    :param max_slowdown: the same as a multiple of what a call takes on an idle endpoint (its baseline): more than 1.
    :param percentile: so many of 100 calls are to hold it: 50 to 99.9.
    :param is_baseline: measure the baseline of the function; see ``client.qos.baseline``.
    :raises ValueError: for values that make no sense.
    """

    target_ms: float | None = None
    max_slowdown: float | None = None
    percentile: float = _DEFAULT_PERCENTILE
    is_baseline: bool = False

    def __post_init__(self) -> None:
        for name in ("target_ms", "max_slowdown", "percentile"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, numbers.Real)):
                raise TypeError(f"{name}: Expected a number, got {value!r}")
        if self.target_ms is not None and not 0 < self.target_ms <= _MAX_TARGET_MS:
            raise ValueError(f"target_ms: Expected more than 0 and at most a day, got {self.target_ms:g}")
        if self.max_slowdown is not None and not 1 < self.max_slowdown <= _MAX_SLOWDOWN:
            raise ValueError(
                f"max_slowdown: Expected more than 1, at most {_MAX_SLOWDOWN:g}, got {self.max_slowdown:g}"
            )
        if not _LEAST_PERCENTILE <= self.percentile <= _MOST_PERCENTILE:
            raise ValueError(f"percentile: Expected 50 to {_MOST_PERCENTILE:g}, got {self.percentile:g}")
        if self.target_ms is not None and self.max_slowdown is not None:
            raise ValueError("target_ms and max_slowdown: a call has one target")
        if self.percentile != _DEFAULT_PERCENTILE and not self.has_target:
            raise ValueError("percentile: write target_ms or max_slowdown, too")

    @property
    def has_target(self) -> bool:
        """Whether there is a target."""
        return self.target_ms is not None or self.max_slowdown is not None

    def to_json(self) -> dict[str, float]:
        """The target as a value of JSON: the fields that are given, and the percentile."""
        values = {"target_ms": self.target_ms, "max_slowdown": self.max_slowdown, "percentile": self.percentile}
        return {name: value for name, value in values.items() if value is not None}
