"""Policies: which weight of processor time each function gets, from how long its tasks take. No I/O, no clock.

100 is the weight of a function without a target. Weights are relative: what one function gets, the others lose.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Mapping
from typing import Final, Protocol

from farcall_endpoint.qos.weights import ORDINARY

_MOST: Final = 2000.0


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """What a function is to hold.

    :param latency_s: that ``part`` of its tasks are not to exceed, from the arrival to the end.
    :param least, most: bounds of its weight.
    """

    latency_s: float
    part: float = 0.95
    least: float = ORDINARY
    most: float = _MOST


@dataclasses.dataclass(frozen=True, slots=True)
class Seen:
    """A function in the last while.

    :param latency_s: that the part of its target did not exceed; None if no task has ended.
    :param oldest_s: since its oldest task came that has not ended.
    """

    latency_s: float | None = None
    oldest_s: float = 0.0


class Policy(Protocol):
    """Decides weights. Functions without a target keep :data:`ORDINARY`."""

    def ended(self, function: str, latency_s: float) -> None:
        """A task of a function with a target has ended."""

    def weights(self, seen: Mapping[str, Seen], *, pressure: float, interval_s: float) -> Mapping[str, float]:
        """The weights of all functions with a target from now on.

        :param seen: these functions.
        :param pressure: the part of the time in which some process waited for a processor (``/proc/pressure/cpu``).
        :param interval_s: since the last call.
        """


class Static:
    """Weights that never change: those of an oracle, or of none.

    :param given: by function; the others have :data:`ORDINARY`.
    """

    def __init__(self, given: Mapping[str, float] | None = None) -> None:
        self._given = dict(given or {})

    def ended(self, function: str, latency_s: float) -> None:
        """See :class:`Policy`."""

    def weights(self, seen: Mapping[str, Seen], *, pressure: float, interval_s: float) -> Mapping[str, float]:  # noqa: ARG002
        """See :class:`Policy`."""
        return {function: self._given.get(function, ORDINARY) for function in seen}


class Threshold:
    """The policy of the QoS paper (section 3.2): each task that ends moves the shares of its function by a step.

    Shares begin at 512, as Docker counts them; 512 is the weight :data:`ORDINARY` here. The paper has no bounds; ours
    are those of the kernel.

    :param expected_s: by function, how long a task takes on an idle system.
    :param ratio: of a task that is too slow, to that.
    :param deltas: the step of each function, in shares.
    """

    _FIRST: Final = 512
    _LEAST: Final = 2
    _MOST: Final = 262_144

    def __init__(self, expected_s: Mapping[str, float], *, ratio: float = 2.0, deltas: Mapping[str, int]) -> None:
        self._expected_s = dict(expected_s)
        self._ratio = ratio
        self._deltas = dict(deltas)
        self.shares: dict[str, int] = {}

    def ended(self, function: str, latency_s: float) -> None:
        """See :class:`Policy`."""
        expected_s = self._expected_s.get(function)
        if expected_s is None or not math.isfinite(latency_s):
            return
        delta = self._deltas.get(function, 0)
        step = delta if latency_s / expected_s > self._ratio else -delta
        moved = self.shares.get(function, self._FIRST) + step
        self.shares[function] = min(max(moved, self._LEAST), self._MOST)

    def weights(self, seen: Mapping[str, Seen], *, pressure: float, interval_s: float) -> Mapping[str, float]:  # noqa: ARG002
        """See :class:`Policy`."""
        return {function: ORDINARY * self.shares.get(function, self._FIRST) / self._FIRST for function in seen}


@dataclasses.dataclass(frozen=True, slots=True)
class Gains:
    """How fast :class:`ProportionalIntegral` moves. Errors and weights are logarithms to the base of 2.

    :param proportional: weight for each error.
    :param integral: weight for each error and second.
    :param dead_band: an error that is smaller changes nothing.
    :param most_step: change of a weight in one call.
    :param least_pressure: below it, processors are not the reason, and weights only go back.
    """

    proportional: float = 1.0
    integral: float = 1.0
    dead_band: float = 0.1
    most_step: float = 1.0
    least_pressure: float = 0.05


class ProportionalIntegral:
    """Holds the latency of each function at a part below its target, by the logarithm of its weight.

    In the incremental form: a weight at its bound does not remember errors, so that it leaves the bound at once (no
    wind-up). A task that is late already counts before it has ended (feed-forward). What is not a number changes
    nothing.

    :param targets: by function.
    :param margin: the latency that is held, as a part of the target.
    :param rest: the part of the processors that is left to functions without a target, whatever the others need.
    """

    def __init__(
        self,
        targets: Mapping[str, Target],
        *,
        gains: Gains | None = None,
        margin: float = 0.7,
        rest: float = 0.05,
    ) -> None:
        self._targets = dict(targets)
        self._gains = gains or Gains()
        self._margin = margin
        self._most_together = ORDINARY * (1 - rest) / rest
        self._logs: dict[str, float] = {}
        self._errors: dict[str, float] = collections.defaultdict(float)

    def ended(self, function: str, latency_s: float) -> None:
        """See :class:`Policy`: the window of latencies is enough."""

    def weights(self, seen: Mapping[str, Seen], *, pressure: float, interval_s: float) -> Mapping[str, float]:
        """See :class:`Policy`."""
        found: dict[str, float] = {}
        for function, each in seen.items():
            target = self._targets.get(function)
            if target is None:
                found[function] = ORDINARY
                continue
            first = math.log2(min(max(ORDINARY, target.least), target.most))
            log = self._logs.get(function, first)
            log += self._step(function, self._error(target, each), pressure, interval_s)
            log = min(max(log, math.log2(target.least)), math.log2(target.most))
            self._logs[function] = log
            found[function] = 2.0**log
        for gone in self._logs.keys() - seen.keys():
            del self._logs[gone]
            self._errors.pop(gone, None)
        excess = max(1.0, sum(found.values()) / self._most_together)
        return {function: weight / excess for function, weight in found.items()}

    def _error(self, target: Target, seen: Seen) -> float | None:
        """How far a function is above what is held; None if that is not known."""
        latency_s = seen.latency_s
        if seen.oldest_s > target.latency_s:
            latency_s = max(latency_s or 0.0, seen.oldest_s)
        if latency_s is None or not 0.0 < latency_s < math.inf:
            return None
        return math.log2(latency_s) - math.log2(self._margin * target.latency_s)

    def _step(self, function: str, error: float | None, pressure: float, interval_s: float) -> float:
        gains = self._gains
        if error is None or not 0.0 <= pressure <= 1.0 or not 0.0 < interval_s < math.inf:
            return 0.0
        former, self._errors[function] = self._errors[function], error
        if abs(error) < gains.dead_band or (error > 0 and pressure < gains.least_pressure):
            return 0.0
        step = gains.proportional * (error - former) + gains.integral * error * interval_s
        return min(max(step, -gains.most_step), gains.most_step)
