"""Latencies of functions on an endpoint: its report of latency targets as values, and as a table."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal

from farcall_common.errors import ProtocolError
from farcall_common.plain_text import plain

if TYPE_CHECKING:
    from farcall_common.qos_report import Infeasible, QosReport

Window = Literal["1m", "10m"]

#: Headings of the table.
COLUMNS: Final = (
    "function",
    "tasks",
    "violations",
    "P50",
    "P75",
    "P90",
    "P99",
    "queue P50",
    "queue P95",
    "cold starts",
    "target",
    "weight",
)


@dataclasses.dataclass(frozen=True)
class FunctionLatency:
    """How an endpoint holds the target of a function's calls, for one submitter, within a window of time. Durations are
    milliseconds, None if no task has ended.

    :param function: its name.
    :param submitter: id of the identity; empty: the owner of the endpoint.
    :param target_ms: the latency that calls are to hold, None if they have no target, or it is not known yet.
    :param max_slowdown: the target as a multiple of the baseline, if it was given so.
    :param percentile: so many of 100 calls are to hold it.
    :param weight: of the processors, now; None if none was set.
    :param tasks: how many have ended; ``violations`` of them took longer than the target, ``cold_starts`` of them
        waited for their worker to start.
    :param queue_p50_ms, queue_p95_ms: of the time from the arrival at the endpoint to the start of the function.
    :param run_p50_ms, run_p95_ms: of the time that the function ran.
    :param p50_ms, p75_ms, p90_ms, p99_ms: of both together: the latency.
    :param weights: the last ones, each with its time in epoch seconds, the oldest first.
    :param histogram: latencies of ten minutes: upper bounds in milliseconds, each with its number of tasks.
    :param infeasible: why the target cannot be met, None if it can.
    """

    function_id: str
    function: str
    submitter: str = ""
    target_ms: float | None = None
    max_slowdown: float | None = None
    percentile: float = 95.0
    weight: float | None = None
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
    weights: Sequence[tuple[float, float]] = dataclasses.field(default=(), repr=False)
    histogram: Sequence[tuple[float, float]] = dataclasses.field(default=(), repr=False)
    infeasible: Infeasible | None = None

    @property
    def violated(self) -> float:
        """The part of the tasks that took longer than the target: 0 to 1."""
        return min(1.0, self.violations / self.tasks) if self.tasks else 0.0

    @property
    def has_target(self) -> bool:
        """Whether calls have a target."""
        return self.target_ms is not None or self.max_slowdown is not None


@dataclasses.dataclass(frozen=True)
class LatencyReport:
    """How an endpoint holds latency targets, as it last reported. ``str()`` of it is a table.

    :param window: of the numbers of :attr:`functions`.
    :param policy: of the weights; ``actuator`` sets them.
    :param problem: why they cannot be set; empty if they can.
    :param admission: ``refuse``: tasks whose target cannot be met are refused; ``warn``: their submitter is warned.
    :param functions: those that ran in the last ten minutes; on an endpoint of others, only yours.
    :param reported_at: when the report came, in epoch seconds; None: it never did.
    """

    endpoint_id: str
    window: Window = "10m"
    policy: str = ""
    actuator: str = ""
    problem: str = ""
    admission: str = "warn"
    functions: Sequence[FunctionLatency] = ()
    reported_at: float | None = None

    def __str__(self) -> str:
        table = [COLUMNS, *(row_of(each) for each in self.functions)]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in table]
        return plain("\n".join([*lines, *infeasible_lines(self)]))


@dataclasses.dataclass(frozen=True)
class Baseline:
    """What calls of a function take on an idle endpoint.

    :param run_ms: how long the function ran, median; ``run_p95_ms``: of 95 % of the runs at most.
    :param total_ms: from the submit to the result in this program, median.
    :param runs: how many calls were made.
    """

    endpoint_id: str
    run_ms: float
    run_p95_ms: float
    total_ms: float
    runs: int


def row_of(latency: FunctionLatency) -> tuple[str, ...]:
    """The cells of a function in the table."""
    quantiles = (latency.p50_ms, latency.p75_ms, latency.p90_ms, latency.p99_ms)
    queued = (latency.queue_p50_ms, latency.queue_p95_ms)
    violations = f"{latency.violations} ({latency.violated:.1%})" if latency.has_target and latency.tasks else ""
    return (
        plain(latency.function) or latency.function_id,
        str(latency.tasks),
        violations,
        *map(milliseconds, (*quantiles, *queued)),
        str(latency.cold_starts),
        _target(latency),
        "" if latency.weight is None else f"{latency.weight:.4g}",
    )


def infeasible_lines(report: LatencyReport) -> list[str]:
    """What cannot be held, a line for each function, and the problem of the endpoint."""
    problem = [f"Weights are not set: {report.problem.rstrip('.')}."] if report.problem else []
    return problem + [
        plain(f"{each.function or each.function_id}: the target cannot be met: {each.infeasible}")
        for each in report.functions
        if each.infeasible is not None
    ]


def milliseconds(value: float | None) -> str:
    """A duration for people; empty for None."""
    if value is None:
        return ""
    return f"{value:.3g} ms" if value < 1000 else f"{value / 1000:.3g} s"


def _target(latency: FunctionLatency) -> str:
    if not latency.has_target:
        return ""
    parts = [milliseconds(latency.target_ms)]
    parts += [f"({latency.max_slowdown:g}x)"] if latency.max_slowdown is not None else []
    return f"{' '.join(filter(None, parts))} P{latency.percentile:g}"


def read_latencies(answer: Mapping[str, Any], *, endpoint_id: str, window: Window) -> LatencyReport:
    """The report in an answer of the API.

    :raises ProtocolError: if it cannot be read.
    """
    found = _read(answer)
    functions = []
    for each in found.functions:
        numbers = each.window(window)
        functions.append(
            FunctionLatency(
                function_id=each.function_id,
                function=each.function,
                submitter=each.submitter,
                target_ms=each.target_ms,
                max_slowdown=each.max_slowdown,
                percentile=each.percentile,
                weight=each.weight,
                weights=each.weights,
                histogram=each.histogram,
                infeasible=each.infeasible,
                **{name: getattr(numbers, name) for name in numbers.__struct_fields__},
            )
        )
    return LatencyReport(
        endpoint_id=endpoint_id,
        window=window,
        policy=found.policy,
        actuator=found.actuator,
        problem=found.problem,
        admission=found.admission,
        functions=functions,
        reported_at=found.reported_at or None,
    )


def _read(answer: Mapping[str, Any]) -> QosReport:
    import msgspec

    from farcall_common.qos_report import QosReport

    try:
        return msgspec.convert({**answer, "reported_at": answer.get("reported_at") or 0.0}, QosReport)
    except (msgspec.ValidationError, TypeError) as error:
        raise ProtocolError(f"the API answered with a report that cannot be read: {error}") from error
