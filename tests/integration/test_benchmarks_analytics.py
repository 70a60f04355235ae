"""Runs of the analytics benchmark on a real engine, with little work."""

from __future__ import annotations

from benchmarks.analytics import direct, peers, shaped
from benchmarks.analytics.table import as_tables, errors
from benchmarks.report import new_report
from farcall_analytics.model import Method


def test_sorts_through_each_method_are_sorts_and_have_predictions() -> None:
    points = [shaped.Point(1e6, 5, method) for method in (Method.COMBINED, Method.HYBRID, Method.SLOW)]
    found = shaped.measure(points)
    assert [each["method"] for each in found["points"]] == ["combined", "hybrid", "slow"]
    assert all(each["predicted_s"] > 0 for each in found["points"])
    text = as_tables(new_report(shaped=found, peers=peers.measure(records=10_000, repetitions=1)))
    assert "| 1 MB, 5 tasks, hybrid |" in text
    assert "| DuckDB |" in text


def test_a_sort_through_memory_is_compared_with_other_methods() -> None:
    found = direct.measure(1, size=1e6, parts=4, others=(Method.COMBINED,))
    assert {method: len(seconds) for method, seconds in found["seconds"].items()} == {"direct": 1, "combined": 1}
    assert found["times_as_fast"]["combined"] > 0


def test_errors_are_parts_of_what_was_measured() -> None:
    assert errors([{"measured_s": [1.0, 2.0, 9.0], "predicted_s": 1.0}]) == [0.5]
