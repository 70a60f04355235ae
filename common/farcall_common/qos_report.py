"""Report of latency targets: how an endpoint holds them, by function and submitter. What the endpoint wrote is checked
and limited."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Final

import msgspec

from farcall_common.progress import clean_text
from farcall_common.qos import QoS

QOS: Final = "qos"
"""In the report of an endpoint: the latency targets, as :class:`QosReport` in JSON."""
WINDOWS: Final = ("1m", "10m")
"""The windows of time that a report has numbers of."""
REFUSE: Final = "refuse"
"""Admission: tasks whose target cannot be met are refused. Else a submit is answered with a warning."""
_PROBLEM: Final = "ask the owner of the endpoint"
_MAX_FUNCTIONS: Final = 100
_MAX_POINTS_BYTES: Final = 96 * 1024
"""Limit for the JSON of all weights and histograms together."""
_MAX_POINTS: Final = 60
_MAX_INFEASIBLE: Final = 50
_MAX_TEXT: Final = 400
_MAX_SKEW_S: Final = 366 * 86400.0
"""A clock may be off, but not so far that the time makes no sense."""

_Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
_Number = Annotated[float, msgspec.Meta(ge=0, le=1e12)]
_ID: Final = "[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"
_FunctionId = Annotated[str, msgspec.Meta(pattern=rf"\A{_ID}\Z")]
_Submitter = Annotated[str, msgspec.Meta(pattern=rf"\A({_ID})?\Z")]
_Points = Annotated[tuple[tuple[_Number, _Number], ...], msgspec.Meta(max_length=_MAX_POINTS)]


class WindowNumbers(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """Numbers of the tasks that ended within a window of time. Durations are milliseconds, None if there are none.

    :param tasks: how many have ended; ``violations`` of them took longer than the target, ``cold_starts`` of them
        waited for their worker to start.
    :param queue_p50_ms, queue_p95_ms: of the time from the arrival at the endpoint to the start of the function.
    :param run_p50_ms, run_p95_ms: of the time that the function ran.
    :param p50_ms, p75_ms, p90_ms, p99_ms: of both together: the latency.
    """

    tasks: _Count = 0
    violations: _Count = 0
    cold_starts: _Count = 0
    queue_p50_ms: _Number | None = None
    queue_p95_ms: _Number | None = None
    run_p50_ms: _Number | None = None
    run_p95_ms: _Number | None = None
    p50_ms: _Number | None = None
    p75_ms: _Number | None = None
    p90_ms: _Number | None = None
    p99_ms: _Number | None = None

    @property
    def violated(self) -> float:
        """The part of the tasks that took longer than the target: 0 to 1."""
        return min(1.0, self.violations / self.tasks) if self.tasks else 0.0


class Infeasible(msgspec.Struct, frozen=True, gc=False):
    """Why a target cannot be met, and what would help."""

    reason: str
    fix: str = ""

    def __str__(self) -> str:
        return " ".join(f"{text.rstrip('.')}." for text in (self.reason, self.fix) if text)


class FunctionQos(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """How an endpoint holds the target of a function's calls, for one submitter.

    :param submitter: id of the identity; empty: the owner of the endpoint.
    :param target_ms: the latency that calls are to hold, None if they have no target, or it is not known yet.
    :param max_slowdown: the target as a multiple of the baseline, if it was given so.
    :param percentile: so many of 100 calls are to hold it.
    :param weight: of the processors, now; None if none was set.
    :param weights: the last ones, each with its time in epoch seconds, the oldest first.
    :param windows: numbers by window (see :data:`WINDOWS`).
    :param histogram: latencies of ten minutes: upper bounds in milliseconds, each with its number of tasks.
    :param infeasible: why the target cannot be met, None if it can.
    """

    function_id: _FunctionId
    function: str = ""
    submitter: _Submitter = ""
    target_ms: _Number | None = None
    max_slowdown: _Number | None = None
    percentile: Annotated[float, msgspec.Meta(ge=0, le=100)] = 95.0
    weight: _Number | None = None
    weights: _Points = ()
    windows: dict[str, WindowNumbers] = {}
    histogram: _Points = ()
    infeasible: Infeasible | None = None

    def window(self, name: str) -> WindowNumbers:
        """The numbers of a window; zeros if the endpoint has reported none."""
        return self.windows.get(name, WindowNumbers())


class QosReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How an endpoint holds latency targets, as it last reported.

    :param policy: of the weights; ``actuator`` sets them.
    :param problem: why they cannot be set; empty if they can.
    :param admission: ``refuse``: tasks whose target cannot be met are refused; ``warn``: their submitter is warned.
    :param functions: those that ran in the last ten minutes.
    :param reported_at: when the report came, in epoch seconds.
    """

    policy: str = ""
    actuator: str = ""
    problem: str = ""
    admission: str = "warn"
    functions: tuple[FunctionQos, ...] = ()
    reported_at: float = 0.0

    def is_like(self, other: QosReport | None) -> bool:
        """Whether another report says the same, whenever it came."""
        return other is not None and msgspec.structs.replace(self, reported_at=other.reported_at) == other

    def of(self, submitters: Iterable[str]) -> QosReport:
        """The same without the functions of others, and what a problem says of them."""
        known = frozenset(submitters)
        functions = tuple(f for f in self.functions if f.submitter in known)
        return msgspec.structs.replace(self, functions=functions, problem=_PROBLEM if self.problem else "")


class InfeasibleTarget(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """A target that an endpoint cannot meet, as submits read it."""

    function_id: str
    submitter: str = ""
    target_ms: float | None = None
    max_slowdown: float | None = None
    percentile: float = 95.0
    reason: str = ""
    fix: str = ""

    def rules_out(self, qos: QoS) -> bool:
        """Whether a target cannot be met either: it is not looser. A multiple of the baseline and milliseconds are not
        compared."""
        if qos.percentile < self.percentile:
            return False
        if qos.target_ms is not None and self.target_ms is not None:
            return qos.target_ms <= self.target_ms
        return qos.max_slowdown is not None and self.max_slowdown is not None and qos.max_slowdown <= self.max_slowdown

    def __str__(self) -> str:
        return str(Infeasible(self.reason, self.fix))


def read_report(value: Any, *, now: float) -> QosReport | None:
    """The report that an endpoint wrote, without what is malformed; None if it is none.

    Functions beyond some number are left out, and weights and histograms of those for which there is no room.

    :param now: epoch seconds.
    """
    if not isinstance(value, Mapping):
        return None
    functions = []
    room = _MAX_POINTS_BYTES
    rows = value.get("functions")
    for row in rows[:_MAX_FUNCTIONS] if isinstance(rows, list | tuple) else ():
        if (found := _function(row, now=now)) is None:
            continue
        room -= len(msgspec.json.encode((found.weights, found.histogram)))
        functions.append(found if room >= 0 else msgspec.structs.replace(found, weights=(), histogram=()))
    return QosReport(
        policy=_text(value.get("policy")),
        actuator=_text(value.get("actuator")),
        problem=_text(value.get("problem")),
        admission=REFUSE if value.get("admission") == REFUSE else "warn",
        functions=tuple(functions),
        reported_at=now,
    )


def infeasible_targets(report: QosReport) -> tuple[InfeasibleTarget, ...]:
    """The targets of a report that cannot be met, some at most."""
    found = [
        InfeasibleTarget(
            function_id=each.function_id,
            submitter=each.submitter,
            target_ms=each.target_ms,
            max_slowdown=each.max_slowdown,
            percentile=each.percentile,
            reason=each.infeasible.reason,
            fix=each.infeasible.fix,
        )
        for each in report.functions
        if each.infeasible is not None
    ]
    return tuple(found[:_MAX_INFEASIBLE])


def infeasible_of(
    targets: Sequence[InfeasibleTarget], function_id: str, submitters: Iterable[str], qos: QoS | None
) -> InfeasibleTarget | None:
    """The target of a function that cannot be met and rules out this one; None if there is none.

    :param submitters: ids of the submitter, as rows have them.
    """
    if qos is None or not qos.has_target:
        return None
    known = frozenset(submitters)
    alike = (each for each in targets if each.function_id == function_id and each.submitter in known)
    return next((each for each in alike if each.rules_out(qos)), None)


def target_text(target_ms: float | None, max_slowdown: float | None, percentile: float) -> str:
    """A target in words; empty if there is none."""
    if max_slowdown is not None:
        return f"{max_slowdown:g} times the baseline for {percentile:g} % of the calls"
    return "" if target_ms is None else f"{target_ms:g} ms for {percentile:g} % of the calls"


def _function(row: Any, *, now: float) -> FunctionQos | None:
    try:
        found = msgspec.convert(row, FunctionQos)
    except (msgspec.ValidationError, RecursionError):
        return None
    infeasible = found.infeasible
    if infeasible is not None:
        infeasible = Infeasible(_text(infeasible.reason), _text(infeasible.fix))
    return msgspec.structs.replace(
        found,
        function=_text(found.function),
        weights=tuple((round(at, 1), round(weight, 3)) for at, weight in found.weights if abs(at - now) < _MAX_SKEW_S),
        histogram=tuple((round(upper_ms, 3), count) for upper_ms, count in found.histogram),
        windows={name: found.windows[name] for name in WINDOWS if name in found.windows},
        infeasible=infeasible,
    )


def _text(value: Any) -> str:
    return clean_text(value, most=_MAX_TEXT) if isinstance(value, str) else ""
