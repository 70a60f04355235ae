"""Latencies of functions as the status has them: numbers, limits, and counts at high rates."""

from __future__ import annotations

import tracemalloc
from typing import Any

import pytest

from farcall_common.qos_report import read_report
from farcall_common.wire import TaskState
from farcall_endpoint.contracts.agent_manager import Finished, OrderTarget, Progress
from farcall_endpoint.qos.latencies import ClassState, Ended, Latencies
from tests.unit.test_endpoint_agent_core import FUNCTION, connected, send, spec


def ended(
    latencies: Latencies, function: str = "f", *, total_s: float = 1.0, run_s: float = 0.1, now: float = 5.0
) -> None:
    latencies.ended(Ended(function, "h", "", 10, total_s, run_s), now)


def test_wait_run_and_total_are_shown_by_function() -> None:
    latencies = Latencies()
    latencies.name("h1", "resize")
    for number in range(100):
        latencies.ended(Ended("f1", "h1", "", 10, 0.25 if number < 90 else 2.5, 0.1), 5.0)
    ended(latencies, "function-2")
    first, second = latencies.describe(6.0)
    assert (first["function"], first["tasks"]) == ("resize", 100)
    assert (second["function"], second["tasks"]) == ("function", 1)
    shown = {name: value for name, value in first.items() if name.endswith("_ms")}
    expected = {
        "wait_p50_ms": 150,
        "wait_p95_ms": 2400,
        "run_p50_ms": 100,
        "run_p95_ms": 100,
        "total_p50_ms": 250,
        "total_p95_ms": 2500,
    }
    assert shown == pytest.approx(expected, rel=0.055)


def test_what_has_not_run_for_ten_minutes_is_not_shown() -> None:
    latencies = Latencies()
    ended(latencies, now=0.0)
    assert latencies.describe(599.0)
    assert latencies.describe(800.0) == []


def test_at_a_high_rate_some_tasks_stand_for_others_wherever_they_are_in_a_second() -> None:
    latencies = Latencies()
    for number in range(50_000):
        now = number / 5000
        ended(latencies, total_s=0.01 if now % 1 < 0.1 else 1.0, run_s=0.01, now=now)
        if number % 2500 == 0:
            ended(latencies, "rare", now=now)
    busy, rare = latencies.describe(10.0)
    assert busy["tasks"] == pytest.approx(50_000, rel=0.02)
    assert (rare["function"], rare["tasks"]) == ("rare", 20)
    assert busy["total_p50_ms"] == pytest.approx(1000, rel=0.055)
    assert busy["total_p95_ms"] == pytest.approx(1000, rel=0.055)


def test_a_worker_cannot_say_that_its_function_ran_longer_than_the_task_was_here() -> None:
    latencies = Latencies()
    for run_s in (1e12, float("inf"), float("nan"), -5.0):
        ended(latencies, total_s=2.0, run_s=run_s)
    ended(latencies, total_s=-3.0)
    [row] = latencies.describe(5.0)
    assert row["tasks"] == 4
    assert row["total_p95_ms"] == row["run_p95_ms"] == pytest.approx(2000, rel=0.055)


def test_names_are_cleaned_and_limited() -> None:
    latencies = Latencies()
    latencies.name("h", "a\x1b[2J\n\u202eb" + "x" * 1000)
    ended(latencies)
    [row] = latencies.describe(5.0)
    assert row["function"].isprintable()
    assert len(row["function"]) <= 200
    for number in range(2001):
        latencies.name(f"h{number}", "name")
    latencies.ended(Ended("first-function", "h0", "", 10, 1.0, 1.0), 5.0)
    assert latencies.describe(5.0)[1]["function"] == "first-fu"


def test_ten_thousand_functions_with_all_durations_take_less_than_10_mb() -> None:
    latencies = Latencies()
    target = OrderTarget("class", 1e-9, 95.0)
    tracemalloc.start()
    try:
        for number in range(10_000):
            for step in range(11):
                task = Ended(f"f{number}", "h", "", 10, 10.0 ** (step % 11 - 5), 0.0, 0.5, target)
                latencies.ended(task, 60.0 * step)
        taken_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert taken_bytes < 10e6
    assert len(latencies.describe(600.0)) == 20
    assert len(latencies.report({}, 600.0)) == 10


def test_targets_starts_and_weights_are_reported_by_submitter() -> None:
    latencies = Latencies()
    latencies.name("h", "resize")
    target = OrderTarget("class", 0.2, 95.0)
    for number in range(10):
        latencies.ended(Ended("f", "h", "ann", 10, 0.5 if number < 3 else 0.1, 0.1, 0.3 * (number == 0), target), 5.0)
        latencies.ended(Ended("f", "h", "ann", 10**6, 0.1, 0.1, 0.0, target), 5.0)
    latencies.ended(Ended("f", "h", "bob", 10, 0.5, 0.1), 5.0)
    for now in range(0, 1000, 5):
        latencies.weighed({"class": ClassState(100.0 + now)}, float(now))
    state = ClassState(250.0, "it is slow", "a looser target")
    first, second = latencies.report({"class": state}, 300.0)
    assert (first["submitter"], second["submitter"], "target_ms" in second) == ("ann", "bob", False)
    assert (first["function"], first["target_ms"], first["weight"]) == ("resize", 200.0, 250.0)
    assert first["infeasible"] == {"reason": "it is slow", "fix": "a looser target"}
    assert [first["weights"][0], len(first["weights"])] == [[400, 500.0], 60]
    window = first["windows"]["10m"]
    assert (window["tasks"], window["violations"], window["cold_starts"]) == (20, 3, 1)
    assert (window["p50_ms"], window["p99_ms"]) == pytest.approx((100, 500), rel=0.055)
    assert first["windows"]["1m"]["tasks"] == 0
    assert sum(count for _, count in first["histogram"]) == 20
    ids = {"function_id": "0" * 8 + "-0000-0000-0000-" + "0" * 12, "submitter": ""}
    rows = [{**row, **ids} for row in (first, second)]
    read = read_report({"functions": rows}, now=400.0)
    assert read is not None
    assert [each.function for each in read.functions] == ["resize", "resize"], "the cloud can read it"
    assert first["histogram"][0][0] >= 100 * 0.95


def test_the_fastest_tenth_of_the_runs_is_known_after_some_of_them() -> None:
    latencies = Latencies()
    for number in range(19):
        ended(latencies, total_s=9.0, run_s=0.1 + 0.1 * number)
    assert latencies.fastest_s("f", "", 5.0) is None
    ended(latencies, total_s=9.0, run_s=0.1)
    assert latencies.fastest_s("f", "", 5.0) == pytest.approx(0.1, rel=0.055)


def test_an_agent_counts_tasks_that_have_run_from_their_arrival() -> None:
    core = connected()
    send(core, spec("a"), spec("b"), spec("c"))
    error: dict[str, Any] = {"code": "TASK_FAILED", "message": "", "fault": "us"}
    ran = Finished("a", TaskState.SUCCESS, 0, None, 7.0, 9.0)
    raised = Finished("b", TaskState.FAILED, None, error, 9.0, 10.0)
    core.progress("m", Progress(workers=2, finished=(ran, raised)), [b"r"])
    core.progress("m", Progress(workers=2, finished=(Finished("c", TaskState.CANCELLED),)))
    core.decide(now=10.0)
    [row] = core.core.functions(10.0)
    assert (row["function"], row["tasks"]) == (FUNCTION.name, 2)
    assert row["run_p95_ms"] == pytest.approx(2000, rel=0.055)
    assert row["total_p50_ms"] == pytest.approx(10_000, rel=0.055)
