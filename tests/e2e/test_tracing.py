"""Tracing: one trace from the caller to the function on the endpoint, and back."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanContext, StatusCode

import farcall
from farcall_common.errors import TaskFailed
from farcall_local.endpoint import LocalEndpoint
from tests.support.spans import spans
from tests.waiting import WAIT_S

__all__ = ["spans"]

#: Times travel as floating-point seconds.
_SLACK_NS: Final = 2_000


def traced(path: str, end: str = "") -> str:
    """Makes a span in the worker and exports it to a file; where the environment says it is."""
    import os

    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SimpleSpanProcessor

    with open(path, "a") as file:  # noqa: PTH123 - it travels without this module's imports
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(
            SimpleSpanProcessor(ConsoleSpanExporter(out=file, formatter=lambda s: s.to_json(None) + "\n"))
        )
        with provider.get_tracer("mine").start_as_current_span("inside"):
            if end:
                raise ValueError(end)
    return os.environ["TRACEPARENT"]


def untraced() -> tuple[bool, bool]:
    """Whether anything of an earlier task's trace is left in the worker."""
    import os

    from opentelemetry import trace

    return "TRACEPARENT" in os.environ, trace.get_current_span().get_span_context().is_valid


def nap(seconds: float) -> None:
    time.sleep(seconds)


def by_name(spans: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    found = spans.get_finished_spans()
    assert len({span.name for span in found}) == len(found)
    return {span.name: span for span in found}


def context_of(span: ReadableSpan) -> SpanContext:
    context = span.get_span_context()
    assert context is not None
    return context


def interval(span: ReadableSpan) -> tuple[int, int]:
    assert span.start_time is not None
    assert span.end_time is not None
    return span.start_time, span.end_time


def inside(path: Path) -> Sequence[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_one_trace_from_the_client_to_the_worker_and_back(
    client: farcall.Client, endpoint: LocalEndpoint, spans: InMemorySpanExporter, tmp_path: Path
) -> None:
    path = tmp_path / "spans.jsonl"
    with (
        trace.get_tracer("test").start_as_current_span("experiment") as experiment,
        farcall.Executor(endpoint.endpoint_id, client=client) as far,
    ):
        in_worker = far.submit(traced, str(path)).result(WAIT_S)
    found = by_name(spans)
    call = found["call traced"]
    assert {context_of(span).trace_id for span in found.values()} == {experiment.get_span_context().trace_id}

    parents = {name: span.parent and span.parent.span_id for name, span in found.items()}
    assert parents == {
        "experiment": None,
        "call traced": context_of(found["experiment"]).span_id,
        **dict.fromkeys(("submit", "service", "queue", "endpoint", "record"), context_of(call).span_id),
        **dict.fromkeys(("delivery", "execution"), context_of(found["endpoint"]).span_id),
    }

    # What the function made hangs below the call, and lies within its execution.
    [mine] = inside(path)
    trace_id, span_id = f"{context_of(call).trace_id:032x}", f"{context_of(call).span_id:016x}"
    assert mine["context"]["trace_id"] == f"0x{trace_id}"
    assert mine["parent_id"] == f"0x{span_id}"
    assert in_worker.startswith(f"00-{trace_id}-{span_id}-")

    # All of it on one machine, and so by one clock.
    stations = [interval(found[name]) for name in ("service", "queue", "endpoint", "record")]
    moments = [moment for station in stations for moment in station]
    assert moments == sorted(moments)
    for inner, outer in (("execution", "endpoint"), ("endpoint", "call traced"), ("call traced", "experiment")):
        (start, end), (first, last) = interval(found[inner]), interval(found[outer])
        assert first - _SLACK_NS <= start <= end <= last + _SLACK_NS, (inner, outer)


def test_a_failed_task(
    client: farcall.Client, endpoint: LocalEndpoint, spans: InMemorySpanExporter, tmp_path: Path
) -> None:
    path = tmp_path / "spans.jsonl"
    with farcall.Executor(endpoint.endpoint_id, client=client) as far, pytest.raises(TaskFailed, match="no good"):
        far.submit(traced, str(path), "no good").result(WAIT_S)
    found = by_name(spans)
    assert found["call traced"].status.status_code is StatusCode.ERROR
    assert "execution" in found
    [mine] = inside(path)
    assert mine["status"]["status_code"] == "ERROR"
    assert mine["parent_id"] == f"0x{context_of(found['call traced']).span_id:016x}"


def test_a_cancelled_task(client: farcall.Client, endpoint: LocalEndpoint, spans: InMemorySpanExporter) -> None:
    with farcall.Executor(endpoint.endpoint_id, client=client) as far:
        future = far.submit(nap, 300)
        assert future.cancel()
    call = by_name(spans)["call nap"]
    assert call.attributes is not None
    assert call.attributes["farcall.state"] == "cancelled"


def test_a_worker_keeps_no_trace_context_between_tasks(
    client: farcall.Client, endpoint: LocalEndpoint, spans: InMemorySpanExporter, tmp_path: Path
) -> None:
    function_id = client.register_function(untraced)
    with farcall.Executor(endpoint.endpoint_id, client=client) as far:
        list(far.map(traced, [str(tmp_path / "spans.jsonl")] * 20))
    # By the client's own methods nothing is traced but what is below a span, and there is none here.
    task_ids = [client.run(endpoint_id=endpoint.endpoint_id, function_id=function_id) for _ in range(5)]
    assert [client.get_result(task_id, wait_s=WAIT_S) for task_id in task_ids] == [(False, False)] * 5


def test_a_shell_command_has_the_span_in_its_environment(
    client: farcall.Client, endpoint: LocalEndpoint, spans: InMemorySpanExporter
) -> None:
    with farcall.Executor(endpoint.endpoint_id, client=client) as far:
        traceparent = far.submit(farcall.ShellFunction("echo $TRACEPARENT")).result(WAIT_S).stdout.strip()
    [call] = [span for span in spans.get_finished_spans() if span.name.startswith("call ")]
    assert traceparent.startswith(f"00-{context_of(call).trace_id:032x}-{context_of(call).span_id:016x}-")
