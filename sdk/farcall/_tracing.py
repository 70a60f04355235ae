"""OpenTelemetry spans: one for each call, and below it one for each part of the task's path.

The child spans are made here when the result arrives, from the timestamps that come with it: no part of the cloud tier
and no endpoint needs an exporter. Clocks of machines differ: a span that lies outside its parent is moved by the
smallest shift that brings it inside, and has that shift as an attribute. OpenTelemetry is not imported, installed or
not, until the program itself has imported it.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Final

from farcall._future import ComputeFuture, TaskRecord
from farcall._version import __version__
from farcall_common.errors import FarcallError
from farcall_common.payload.strategy import message_of

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span

_LOADED: Final = "opentelemetry.trace"
_CLOUD: Final = (
    ("service", "submitted_at", "enqueued_at"),
    ("queue", "enqueued_at", "leased_at"),
    ("endpoint", "leased_at", "returned_at"),
    ("record", "returned_at", "recorded_at"),
)


@dataclasses.dataclass(frozen=True)
class Hop:
    """A part of a task's path. Times are epoch seconds; ``shift_s`` was added to both, to correct a clock."""

    name: str
    start_at: float
    end_at: float
    shift_s: float = 0.0
    inside: tuple[Hop, ...] = ()


def traceparent(context: Context | None = None) -> str | None:
    """The span of a context, else the current one, in W3C format; None if there is none."""
    if _LOADED not in sys.modules:
        return None
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier, context)
    return carrier.get("traceparent")


def trace_call(future: ComputeFuture[Any], record: TaskRecord, function_name: str) -> None:
    """Start a span for this call, below the current one, that ends with its future."""
    if _LOADED not in sys.modules:
        return
    from opentelemetry import trace

    span = trace.get_tracer("farcall", __version__).start_span(
        f"call {function_name}",
        kind=trace.SpanKind.CLIENT,
        attributes={
            "farcall.task_id": future.task_id,
            "farcall.task_group_id": future.task_group_id,
            "farcall.endpoint_id": future.endpoint_id,
            "farcall.function": function_name,
        },
    )
    record.traceparent = traceparent(trace.set_span_in_context(span))
    if span.is_recording():
        future.add_done_callback(functools.partial(_end, span, future))


def hops(timings: Mapping[str, float]) -> list[Hop]:
    """The parts of a task's path, as far as their times are known (see :attr:`ComputeFuture.timings`)."""
    found = [Hop("submit", *times)] if (times := _times(timings, "client_submitted_at", "client_accepted_at")) else []
    cloud = [(name, *times) for name, start, end in _CLOUD if (times := _times(timings, start, end))]
    if not cloud:
        return found
    seen = _times(timings, "client_submitted_at", "client_received_at")
    shift_s = _shift(cloud[0][1], cloud[-1][2], seen) if seen else 0.0
    for name, start_at, end_at in cloud:
        inside = tuple(_at_endpoint(timings, shift_s)) if name == "endpoint" else ()
        found.append(Hop(name, start_at + shift_s, end_at + shift_s, shift_s, inside))
    return found


def _at_endpoint(timings: Mapping[str, float], shift_s: float) -> Iterator[Hop]:
    """Within the endpoint's part: delivery, until the task was on its disk, and execution."""
    leased_at, returned_at = timings["leased_at"] + shift_s, timings["returned_at"] + shift_s
    accepted_at = min(timings.get("accepted_at", timings["leased_at"]) + shift_s, returned_at)
    if "accepted_at" in timings:
        yield Hop("delivery", leased_at, accepted_at, shift_s)
    if times := _times(timings, "started_at", "ended_at"):
        started_at, ended_at = times
        # A short task may end before its receipt arrives.
        own_s = _shift(started_at, ended_at, (leased_at, returned_at))
        yield Hop("execution", started_at + own_s, ended_at + own_s, own_s)


def _times(timings: Mapping[str, float], start: str, end: str) -> tuple[float, float] | None:
    """Both moments, the later one not before the earlier; None unless both are known."""
    if start not in timings or end not in timings:
        return None
    return timings[start], max(timings[start], timings[end])


def _shift(start_at: float, end_at: float, within: tuple[float, float]) -> float:
    """The smallest shift that moves an interval inside another; one that is longer starts with it."""
    earliest, latest = within[0] - start_at, within[1] - end_at
    return max(earliest, min(0.0, latest))


def _end(span: Span, call: ComputeFuture[Any], done: Future[Any]) -> None:
    """The future is done: record the child spans, and end the span of the call."""
    from opentelemetry import trace

    _record(hops(call.timings), trace.set_span_in_context(span))
    span.set_attribute("farcall.attempt", call.attempt)
    if done.cancelled():
        span.set_attribute("farcall.state", "cancelled")
    elif (error := done.exception()) is None:
        span.set_attribute("farcall.state", "success")
    else:
        code = error.record.code if isinstance(error, FarcallError) else type(error).__name__
        span.set_attribute("farcall.state", "failed")
        span.set_attribute("error.type", code)
        span.set_status(trace.StatusCode.ERROR, message_of(error))
    span.end(time.time_ns())


def _record(parts: list[Hop] | tuple[Hop, ...], context: Context) -> None:
    from opentelemetry import trace

    tracer = trace.get_tracer("farcall", __version__)
    for hop in parts:
        moved = {"farcall.clock_shift_s": hop.shift_s} if hop.shift_s else {}
        span = tracer.start_span(hop.name, context, attributes=moved, start_time=_ns(hop.start_at))
        _record(hop.inside, trace.set_span_in_context(span, context))
        span.end(_ns(hop.end_at))


def _ns(at: float) -> int:
    return round(at * 1e9)
