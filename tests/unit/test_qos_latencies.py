"""Latencies of functions as the status has them: numbers, limits, and counts at high rates."""

from __future__ import annotations

import pytest

from farcall_common.wire import TaskState
from farcall_endpoint.protocol import Finished, Progress
from farcall_endpoint.qos.latencies import Latencies
from tests.unit.test_endpoint_agent_core import FUNCTION, connected, send, spec


def test_queue_run_and_total_are_shown_by_function() -> None:
    latencies = Latencies()
    latencies.name("h1", "resize")
    for number in range(100):
        latencies.add("f1", "h1", total_s=0.25 if number < 90 else 2.5, run_s=0.1, now=5.0)
    latencies.add("function-2", "h2", total_s=1.0, run_s=1.0, now=5.0)
    first, second = latencies.describe(6.0)
    assert (first["function"], first["tasks"]) == ("resize", 100)
    assert (second["function"], second["tasks"]) == ("function", 1)
    shown = {name: value for name, value in first.items() if name.endswith("_ms")}
    expected = {
        "queue_p50_ms": 150,
        "queue_p95_ms": 2400,
        "run_p50_ms": 100,
        "run_p95_ms": 100,
        "total_p50_ms": 250,
        "total_p95_ms": 2500,
    }
    assert shown == pytest.approx(expected, rel=0.08)


def test_what_has_not_run_for_ten_minutes_is_not_shown() -> None:
    latencies = Latencies()
    latencies.add("f", "h", total_s=1.0, run_s=1.0, now=0.0)
    assert latencies.describe(599.0)
    assert latencies.describe(800.0) == []


def test_at_a_high_rate_some_tasks_count_for_the_others() -> None:
    latencies = Latencies()
    added = 0
    for number in range(10_000):
        now = number / 5000
        function_id = f"f{number % 2}"
        if latencies.is_sampled(function_id, now):
            added += 1
            latencies.add(function_id, "h", total_s=0.01, run_s=0.01, now=now)
    assert added == 1000
    assert latencies.is_sampled("f0", 3.0)
    latencies.add("f0", "h", total_s=0.01, run_s=0.01, now=3.0)
    tasks = {row["function"]: row["tasks"] for row in latencies.describe(3.0)}
    assert tasks["f0"] == 5001
    assert 2500 <= tasks["f1"] <= 5000


def test_ten_thousand_functions_take_little_memory() -> None:
    latencies = Latencies()
    for number in range(10_000):
        for step in range(5):
            latencies.add(f"f{number}", "h", total_s=0.01 * number, run_s=0.01, now=number + 100.0 * step)
    assert len(latencies) == 200
    assert len(latencies.describe(10_400.0)) == 20


def test_names_are_limited() -> None:
    latencies = Latencies()
    for number in range(10_001):
        latencies.name(f"h{number}", "name")
    latencies.add("first-function", "h0", total_s=1.0, run_s=1.0, now=0.0)
    assert [row["function"] for row in latencies.describe(0.0)] == ["first-fu"]


def test_an_agent_counts_tasks_that_have_run_from_their_arrival() -> None:
    core = connected()
    send(core, spec("a"), spec("b"), spec("c"))
    ran = Finished("a", TaskState.SUCCESS, 0, None, 7.0, 9.0)
    raised = Finished("b", TaskState.FAILED, None, {"code": "TASK_FAILED", "message": "", "fault": "us"}, 9.0, 10.0)
    core.progress("m", Progress(workers=2, finished=(ran, raised)), [b"r"])
    core.progress("m", Progress(workers=2, finished=(Finished("c", TaskState.CANCELLED),)))
    core.decide(now=10.0)
    [row] = core.core.functions(10.0)
    assert (row["function"], row["tasks"]) == (FUNCTION.name, 2)
    assert row["run_p95_ms"] == pytest.approx(2000, rel=0.08)
    assert row["total_p50_ms"] == pytest.approx(10_000, rel=0.08)
