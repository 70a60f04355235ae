"""Policies: which CPU weight each function with a target gets, from the latencies of its tasks. No I/O, no clock.

Weights are relative: what one function gets, the others lose. Functions without a target have
:data:`~farcall_endpoint.qos.weights.DEFAULT_WEIGHT`, and no policy changes that.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping
from typing import Final, Protocol

from farcall_endpoint.config.settings import DEFAULT_WEIGHT


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """Latency target of a function.

    :param latency_s: limit for the seconds from the arrival of a task at the endpoint to its end.
    :param percentile: percentage of the tasks that should meet the limit.
    :param min_weight, max_weight: bounds of the function's weight.
    :param expected_s: duration of a task on an idle system; None: not known.
    :param group: payer of the function; policies compare the targets within a group.
    :param weight, delta: settings of the endpoint's owner for :class:`Static` and :class:`Threshold`.
    :raises ValueError: for a value out of range.
    """

    latency_s: float
    percentile: float = 95.0
    min_weight: float = DEFAULT_WEIGHT
    max_weight: float = 2000.0
    expected_s: float | None = None
    weight: float | None = None
    delta: int | None = None
    group: str = ""

    def __post_init__(self) -> None:
        if not 0 < self.latency_s < math.inf:
            raise ValueError(f"latency_s: expected a positive number of seconds, got {self.latency_s!r}")
        if not 0 < self.percentile < 100:
            raise ValueError(f"percentile: expected a number between 0 and 100, got {self.percentile!r}")
        if not 0 < self.min_weight <= self.max_weight < math.inf:
            raise ValueError(f"min_weight, max_weight: got {self.min_weight!r} and {self.max_weight!r}")
        if self.expected_s is not None and not 0 < self.expected_s < math.inf:
            raise ValueError(f"expected_s: expected a positive number of seconds, got {self.expected_s!r}")


class Policy(Protocol):
    """Decides the weights of functions with a target."""

    def on_task_ended(self, function: str, target: Target, latency_s: float) -> None:
        """A task of a function with a target has ended."""

    def weights(
        self,
        targets: Mapping[str, Target],
        latencies: Mapping[str, float | None],
        *,
        pressure: float,
        interval_s: float,
        others: int,
    ) -> Mapping[str, float]:
        """The weights from now on, by function. What was known of functions without a target now is forgotten.

        :param targets: by function.
        :param latencies: by function, the latency at the percentile of its target, in seconds: of the tasks that ended
            lately, and of those that have not ended, whose age counts as soon as it is above the target. None if it is
            not known.
        :param pressure: the part of the time in which some process waited for a CPU (``/proc/pressure/cpu``), 0 to 1.
        :param interval_s: since the last call.
        :param others: groups of functions without a target that have tasks now, each with
            :data:`~farcall_endpoint.qos.weights.DEFAULT_WEIGHT`.
        """


class Static:
    """Weights that never change: those that the targets name, or the default ones."""

    def on_task_ended(self, function: str, target: Target, latency_s: float) -> None:
        """See :class:`Policy`."""

    def weights(
        self,
        targets: Mapping[str, Target],
        latencies: Mapping[str, float | None],  # noqa: ARG002 - as all policies have it
        *,
        pressure: float,  # noqa: ARG002
        interval_s: float,  # noqa: ARG002
        others: int,  # noqa: ARG002
    ) -> Mapping[str, float]:
        """See :class:`Policy`."""
        return {name: DEFAULT_WEIGHT if each.weight is None else each.weight for name, each in targets.items()}


class ShortFirst:
    """All functions have their largest weights: no more tasks run than there are processors, so that they rarely share
    one. It is the order that counts (:meth:`~farcall_endpoint.qos.controller.Controller.urgency`).

    :param batch_share: see :class:`ProportionalIntegral`.
    """

    def __init__(self, *, batch_share: float = 0.05) -> None:
        self._batch_share = batch_share

    def on_task_ended(self, function: str, target: Target, latency_s: float) -> None:
        """See :class:`Policy`."""

    def weights(
        self,
        targets: Mapping[str, Target],
        latencies: Mapping[str, float | None],  # noqa: ARG002
        *,
        pressure: float,  # noqa: ARG002
        interval_s: float,  # noqa: ARG002
        others: int,
    ) -> Mapping[str, float]:
        """See :class:`Policy`."""
        most = {name: each.max_weight for name, each in targets.items()}
        return _within_share(most, targets, others, batch_share=self._batch_share)


class Threshold:
    """The policy of the QoS paper (section 3.2): each task that ends moves the shares of its function by a step.

    Shares begin at 512, as the paper has them, which is the default weight here. The paper has no bounds; these are
    those of ``cpu.shares``. A function of which it is not known how long it takes keeps its shares.

    :param ratio: of the latency of a task that is too slow, to what it takes on an idle system.
    :param delta: the step, in shares, of functions whose target names none.
    """

    _FIRST: Final = 512
    _LEAST: Final = 2
    _MOST: Final = 262_144

    def __init__(self, *, ratio: float = 2.0, delta: int = 20) -> None:
        self._ratio = ratio
        self._delta = delta
        self.shares: dict[str, int] = {}

    def on_task_ended(self, function: str, target: Target, latency_s: float) -> None:
        """See :class:`Policy`."""
        if target.expected_s is None or not math.isfinite(latency_s):
            return
        delta = self._delta if target.delta is None else target.delta
        step = delta if latency_s / target.expected_s > self._ratio else -delta
        moved = self.shares.get(function, self._FIRST) + step
        self.shares[function] = min(max(moved, self._LEAST), self._MOST)

    def weights(
        self,
        targets: Mapping[str, Target],
        latencies: Mapping[str, float | None],  # noqa: ARG002
        *,
        pressure: float,  # noqa: ARG002
        interval_s: float,  # noqa: ARG002
        others: int,  # noqa: ARG002
    ) -> Mapping[str, float]:
        """See :class:`Policy`."""
        for gone in self.shares.keys() - targets.keys():
            del self.shares[gone]
        return {name: DEFAULT_WEIGHT * self.shares.get(name, self._FIRST) / self._FIRST for name in targets}


@dataclasses.dataclass(frozen=True, slots=True)
class Gains:
    """How fast :class:`ProportionalIntegral` moves. Errors and weights are logarithms to the base of 2.

    :param proportional: weight for each error.
    :param integral: weight for each error and second.
    :param dead_band: an error that is smaller counts as none.
    :param most_error: one that is larger counts as this.
    :param most_step: change of a weight in one call.
    :param least_pressure: below it, CPUs are not the reason, and no weight rises.
    """

    proportional: float = 1.0
    integral: float = 1.0
    dead_band: float = 0.1
    most_error: float = 2.0
    most_step: float = 1.0
    least_pressure: float = 0.05


class ProportionalIntegral:
    """Holds the latency of each function at a part below its target, by the logarithm of its weight.

    The weight of a function is to that of another one of its group with a longer target at least in the inverse ratio
    of the squares of their targets: what is to end soon takes little from others, so that fewer tasks are late than if
    all were equally late. While there is no batch work only ratios count, so all weights go down together as far as
    they can.

    The integral stays within the bounds of the weight, so that a weight leaves its bound as soon as the error changes
    its sign (no wind-up). What is not a number changes nothing.

    :param margin: the latency that is held, as a part of the target.
    :param batch_share: the part of the CPUs that functions without a target keep together, as far as the least weights
        of the others permit it.
    """

    def __init__(self, *, gains: Gains | None = None, margin: float = 0.7, batch_share: float = 0.05) -> None:
        self._gains = gains or Gains()
        self._margin = margin
        self._batch_share = batch_share
        self._integrals: dict[str, float] = {}
        self._logs: dict[str, float] = {}

    def on_task_ended(self, function: str, target: Target, latency_s: float) -> None:
        """See :class:`Policy`: the latencies of the window are enough."""

    def weights(
        self,
        targets: Mapping[str, Target],
        latencies: Mapping[str, float | None],
        *,
        pressure: float,
        interval_s: float,
        others: int,
    ) -> Mapping[str, float]:
        """See :class:`Policy`."""
        is_sound = 0.0 <= pressure <= 1.0 and 0.0 < interval_s < math.inf
        for function, target in targets.items():
            latency_s, first = latencies.get(function), _first(target)
            if is_sound and latency_s is not None and 0.0 < latency_s < math.inf:
                self._move(function, target, first, latency_s, pressure, interval_s)
            self._logs.setdefault(function, first)
            self._integrals.setdefault(function, 0.0)
        for gone in self._logs.keys() - targets.keys():
            del self._logs[gone], self._integrals[gone]
        if not others:
            self._lower(targets)
        return _within_share(self._in_ratio(targets), targets, others, batch_share=self._batch_share)

    def _lower(self, targets: Mapping[str, Target]) -> None:
        """Let all weights go down by the same factor, until one of them is at its least."""
        excess = min((self._logs[name] - math.log2(each.min_weight) for name, each in targets.items()), default=0.0)
        for name in self._logs:
            self._logs[name] -= excess
            self._integrals[name] -= excess

    def _in_ratio(self, targets: Mapping[str, Target]) -> dict[str, float]:
        """The weights, in the ratios that targets demand at least."""
        logs: dict[str, float] = {}
        least: dict[str, float] = {}  # by group, the logarithm of a weight with the square of its target
        by_target = sorted(targets, key=lambda name: (targets[name].group, -targets[name].latency_s))
        for (group, latency_s), names in itertools.groupby(
            by_target, lambda name: (targets[name].group, targets[name].latency_s)
        ):
            square, before = 2 * math.log2(latency_s), least.get(group, -math.inf)
            alike = {name: max(self._logs[name], before - square) for name in names}
            least[group] = max(before, max(alike.values()) + square)
            logs |= alike
        excess = max((logs[name] - math.log2(target.max_weight) for name, target in targets.items()), default=0.0)
        return {
            name: min(max(2.0 ** (logs[name] - max(excess, 0.0)), target.min_weight), target.max_weight)
            for name, target in targets.items()
        }

    def _move(
        self, function: str, target: Target, first: float, latency_s: float, pressure: float, interval_s: float
    ) -> None:
        gains = self._gains
        least, most = math.log2(target.min_weight), math.log2(target.max_weight)
        former = self._logs.get(function, first)
        error = math.log2(latency_s) - math.log2(self._margin * target.latency_s)
        error = 0.0 if abs(error) < gains.dead_band else min(max(error, -gains.most_error), gains.most_error)
        may_rise = pressure >= gains.least_pressure
        integral = self._integrals.get(function, 0.0)
        if may_rise or error < 0:
            integral = min(max(integral + gains.integral * error * interval_s, least - first), most - first)
        log = first + integral + gains.proportional * error
        log = min(max(log, former - gains.most_step), former + gains.most_step if may_rise else former)
        self._integrals[function] = integral
        self._logs[function] = min(max(log, least), most)


def _within_share(
    weights: Mapping[str, float], targets: Mapping[str, Target], others: int, *, batch_share: float
) -> Mapping[str, float]:
    """The weights, without so much of what is above the least ones that functions without a target lose their share."""
    most = DEFAULT_WEIGHT * others * (1 - batch_share) / batch_share
    least = {function: min(targets[function].min_weight, weight) for function, weight in weights.items()}
    excess = sum(weights.values()) - most
    if others <= 0 or excess <= 0:
        return weights
    above = sum(weights.values()) - sum(least.values())
    kept = max(0.0, 1.0 - excess / above) if above > 0 else 1.0
    return {function: least[function] + (weight - least[function]) * kept for function, weight in weights.items()}


def _first(target: Target) -> float:
    """The logarithm of the weight that a function begins with."""
    return math.log2(min(max(DEFAULT_WEIGHT, target.min_weight), target.max_weight))
