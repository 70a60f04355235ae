"""A run of the analytics benchmark on a real engine, with little work."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.analytics import __main__ as analytics
from benchmarks.analytics import plot
from benchmarks.analytics.table import as_tables, errors


@pytest.mark.slow
def test_all_experiments_are_measured_with_little_work(tmp_path: Path) -> None:
    report = analytics.measure(quick=True)
    assert [each["method"] for each in report["shaped"]["points"]] == [
        "slow",
        "combined",
        "two-level",
        "fast",
        "hybrid",
    ]
    assert all(each["predicted_s"] > 0 and each["dollars"][0] > 0 for each in report["shaped"]["points"])
    text = as_tables(report)
    assert "| 30 MB, 8 tasks, hybrid |" in text
    assert "| DuckDB |" in text
    plot.draw(report, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 10_000


def test_errors_are_parts_of_what_was_measured() -> None:
    assert errors([{"measured_s": [1.0, 2.0, 9.0], "predicted_s": 1.0}]) == [0.5]
