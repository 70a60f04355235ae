"""OpenTelemetry spans of calls, their parents, and their absence without OpenTelemetry."""

from __future__ import annotations

import subprocess
import sys
from typing import Final

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from farcall import Executor, TaskFailed
from farcall._batch import PreparedTask, encode_submit
from farcall._client import connection_of
from farcall._future import record_of
from farcall._tracing import Hop, hops, traceparent
from farcall.testing import FakeCloud
from farcall_common.task_options import TaskOptions
from tests.support.spans import spans
from tests.waiting import WAIT_S

__all__ = ["spans"]

CLIENT: Final = {"client_submitted_at": 100.0, "client_accepted_at": 100.2, "client_received_at": 110.0}
CLOUD: Final = {"submitted_at": 100.1, "enqueued_at": 100.3, "leased_at": 100.4, "accepted_at": 100.5}
END: Final = {"returned_at": 109.0, "recorded_at": 109.5}
WORKER: Final = {"started_at": 101.0, "ended_at": 108.0}


def named(spans: InMemorySpanExporter, name: str) -> ReadableSpan:
    [found] = [span for span in spans.get_finished_spans() if span.name == name]
    return found


def ids(span: ReadableSpan) -> tuple[int, int]:
    context = span.get_span_context()
    assert context is not None
    return context.trace_id, context.span_id


def divide(a: float, b: float) -> float:
    return a / b


def test_child_spans_are_in_order() -> None:
    found = hops(CLIENT | CLOUD | WORKER | END)
    assert [(hop.name, hop.start_at, hop.end_at) for hop in found] == [
        ("submit", 100.0, 100.2),
        ("service", 100.1, 100.3),
        ("queue", 100.3, 100.4),
        ("endpoint", 100.4, 109.0),
        ("record", 109.0, 109.5),
    ]
    assert found[3].inside == (Hop("delivery", 100.4, 100.5), Hop("execution", 101.0, 108.0))


@pytest.mark.parametrize("wrong_s", [-3600.0, 3600.0])
def test_a_span_of_another_clock_is_shifted_into_its_parent(wrong_s: float) -> None:
    cloud = {name: at + wrong_s for name, at in (CLOUD | END).items()}
    worker = {name: at - 2 * wrong_s for name, at in WORKER.items()}
    found = {hop.name: hop for hop in hops(CLIENT | cloud | worker)}
    endpoint = found["endpoint"]
    execution = endpoint.inside[1]
    assert CLIENT["client_submitted_at"] <= found["service"].start_at + 1e-6
    assert found["record"].end_at <= CLIENT["client_received_at"] + 1e-6
    assert endpoint.start_at - 1e-6 <= execution.start_at <= execution.end_at <= endpoint.end_at + 1e-6
    assert execution.end_at - execution.start_at == pytest.approx(7.0)
    assert abs(endpoint.shift_s) == pytest.approx(3600, abs=1)
    assert endpoint.shift_s * wrong_s < 0


def test_only_known_times_have_a_span() -> None:
    assert hops({}) == []
    assert [hop.name for hop in hops({"client_submitted_at": 1.0, "client_accepted_at": 2.0})] == ["submit"]
    never_ran = CLIENT | {"submitted_at": 100.1, "enqueued_at": 100.3}
    assert [hop.name for hop in hops(never_ran)] == ["submit", "service"]


def test_a_clock_that_was_set_back_gives_no_span_a_negative_length() -> None:
    found = hops(
        {"client_submitted_at": 5.0, "client_accepted_at": 4.0, **WORKER, "leased_at": 9.0, "returned_at": 8.0}
    )
    assert all(hop.start_at <= hop.end_at for hop in found)


def test_a_call_is_a_span_below_the_current_one(spans: InMemorySpanExporter) -> None:
    with (
        FakeCloud() as cloud,
        cloud.client() as client,
        trace.get_tracer("test").start_as_current_span("mine") as mine,
        Executor(cloud.endpoint_id, client) as far,
    ):
        future = far.submit(divide, 6, 3)
        assert future.result(WAIT_S) == 2.0
    call = named(spans, "call divide")
    assert call.parent is not None
    assert call.parent.span_id == mine.get_span_context().span_id
    assert call.attributes is not None
    assert call.attributes["farcall.task_id"] == future.task_id
    assert call.attributes["farcall.state"] == "success"
    assert call.status.status_code is trace.StatusCode.UNSET
    sent = record_of(future).traceparent
    assert sent is not None
    assert sent.startswith(f"00-{ids(call)[0]:032x}-{ids(call)[1]:016x}-")


def test_a_chunk_of_map_is_a_span_of_the_function(spans: InMemorySpanExporter) -> None:
    with FakeCloud() as cloud, cloud.client() as client, Executor(cloud.endpoint_id, client) as far:
        assert list(far.map(divide, range(4), [1] * 4, chunksize=4)) == [0, 1, 2, 3]
        assert [each["function_name"] for each in client.get_functions()] == ["divide"]
    call = named(spans, "call divide")
    assert call.attributes is not None
    assert call.attributes["farcall.function"] == "divide"


def test_a_call_that_fails_is_a_span_with_an_error(spans: InMemorySpanExporter) -> None:
    with (
        FakeCloud() as cloud,
        cloud.client() as client,
        Executor(cloud.endpoint_id, client) as far,
        pytest.raises(TaskFailed),
    ):
        far.submit(divide, 1, 0).result(WAIT_S)
    call = named(spans, "call divide")
    assert call.status.status_code is trace.StatusCode.ERROR
    assert call.attributes is not None
    assert (call.attributes["farcall.state"], call.attributes["error.type"]) == ("failed", "TASK_FAILED")


def test_a_cancelled_call_is_a_span_with_that_state(spans: InMemorySpanExporter) -> None:
    with FakeCloud(workers=0) as cloud, cloud.client() as client, Executor(cloud.endpoint_id, client) as far:
        assert far.submit(divide, 1, 1).cancel()
    call = named(spans, "call divide")
    assert call.attributes is not None
    assert call.attributes["farcall.state"] == "cancelled"
    assert call.status.status_code is trace.StatusCode.UNSET


def test_batch_carries_the_current_span(spans: InMemorySpanExporter) -> None:
    with FakeCloud(workers=0) as cloud, cloud.client() as client:
        batch = client.create_batch()
        function_id = client.register_function(divide)
        batch.add(function_id, (1, 2))
        with trace.get_tracer("test").start_as_current_span("mine"):
            mine = traceparent()
            batch.add(function_id, (3, 4))
    prepared = batch.prepared(connection_of(client).blobs, lambda payload, *_: payload, endpoint_id="e", parallel=1)
    assert [task.traceparent for task in prepared] == [None, mine]
    assert mine is not None


def test_a_submit_without_spans_has_no_traceparents() -> None:
    plain = PreparedTask("t", "f", b'"x"')
    body, _ = encode_submit([plain], task_group_id="g", options=TaskOptions())
    assert b"traceparent" not in body
    traced = PreparedTask("u", "f", b'"x"', "00-1-2-01")
    body, _ = encode_submit([plain, traced], task_group_id="g", options=TaskOptions())
    assert b'"traceparents":{"f":[null,"00-1-2-01"]}' in body


PROGRAM: Final = """
import sys
sys.modules["opentelemetry"] = None  # as if it were not installed
from farcall import Executor
from farcall.testing import FakeCloud
with FakeCloud() as cloud, cloud.client() as client, Executor(cloud.endpoint_id, client) as far:
    assert far.submit(pow, 2, 3).result() == 8
assert not [name for name in sys.modules if name.startswith("opentelemetry.")]
"""


def test_calls_need_no_opentelemetry() -> None:
    subprocess.run([sys.executable, "-W", "error", "-c", PROGRAM], check=True, timeout=WAIT_S)


def test_opentelemetry_is_not_imported_by_default() -> None:
    program = PROGRAM.replace('sys.modules["opentelemetry"] = None', "")
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True, timeout=WAIT_S)
