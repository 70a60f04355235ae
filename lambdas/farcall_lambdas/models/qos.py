"""Shapes of latency targets, and of how an endpoint holds them."""

from __future__ import annotations

from typing import Self

from pydantic import ConfigDict, Field, model_validator

from farcall_common.qos import QoS
from farcall_lambdas.models.fields import Maybe, Shape


class QosShape(Shape):
    """The latency that calls are to hold, from their arrival at the endpoint to their end: ``target_ms`` milliseconds,
    or ``max_slowdown`` times what a call takes on an idle endpoint; so many of 100 calls as ``percentile`` says.
    ``is_baseline``: measure what a call takes. An unknown field is refused: the calls would have no target."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    target_ms: float | None = None
    max_slowdown: float | None = None
    percentile: float = 95.0
    is_baseline: bool = False

    @model_validator(mode="after")
    def _check(self) -> Self:
        self.qos()
        return self

    def qos(self) -> QoS:
        """The same for tasks.

        :raises ValueError: for values that make no sense.
        """
        return QoS(
            target_ms=self.target_ms,
            max_slowdown=self.max_slowdown,
            percentile=self.percentile,
            is_baseline=self.is_baseline,
        )

    @classmethod
    def of(cls, qos: QoS | None) -> Self | None:
        """The shape of a target; None without one."""
        if qos is None or not qos.has_target:
            return None
        return cls(target_ms=qos.target_ms, max_slowdown=qos.max_slowdown, percentile=qos.percentile)


class InfeasibleShape(Shape):
    """Why an endpoint cannot hold a target, and what would help (empty if it does not know)."""

    reason: str
    fix: str = ""


class QosWindow(Shape):
    """Numbers of the tasks that ended within a window of time: how many, how many of them took longer than the target,
    how many waited for their worker to start, and quantiles in milliseconds of the time until they started, the time
    that they ran, and both together."""

    tasks: int = 0
    violations: int = 0
    cold_starts: int = 0
    queue_p50_ms: float | None = None
    queue_p95_ms: float | None = None
    run_p50_ms: float | None = None
    run_p95_ms: float | None = None
    p50_ms: float | None = None
    p75_ms: float | None = None
    p90_ms: float | None = None
    p99_ms: float | None = None


class FunctionQosEntry(Shape):
    """How the calls of a function hold their target, for one submitter (empty: the owner of the endpoint). ``weights``
    are the last ones, each with its time in epoch seconds; ``histogram`` has upper bounds of latencies in milliseconds,
    each with a number of tasks. ``infeasible`` is left out if the target can be met."""

    function_id: str
    function: str = ""
    submitter: str = ""
    target_ms: float | None = None
    max_slowdown: Maybe[float] = None
    percentile: float = 95.0
    weight: float | None = None
    weights: list[tuple[float, float]] = Field(default_factory=list)
    windows: dict[str, QosWindow] = Field(default_factory=dict)
    histogram: list[tuple[float, float]] = Field(default_factory=list)
    infeasible: Maybe[InfeasibleShape] = None


class EndpointQos(Shape):
    """How an endpoint holds latency targets, as it reported at ``reported_at`` (epoch seconds; null: it never did).
    ``admission`` is "refuse" or "warn": what happens with tasks whose target it cannot meet. The endpoint's owner gets
    the functions of all submitters, others their own."""

    endpoint_id: str
    policy: str = ""
    actuator: str = ""
    problem: str = ""
    admission: str = "warn"
    functions: list[FunctionQosEntry] = Field(default_factory=list)
    reported_at: float | None = None
