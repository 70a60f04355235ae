"""Runs of the analytics benchmark on a real engine, with little work and few workers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.analytics import direct, experiments, paper, peers, plot, shaped
from benchmarks.analytics.shaper import Shape
from benchmarks.analytics.table import as_tables, errors
from benchmarks.report import RESULTS
from farcall_analytics.model import Method


@pytest.mark.slow
def test_experiments_are_measured_with_little_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, count in ((shaped, 2), (experiments, 3), (direct, 2)):
        monkeypatch.setattr(module, "WORKERS", count)
    monkeypatch.setattr(experiments, "_PIPELINED", shaped.Point(60e6, 12, Method.HYBRID))
    monkeypatch.setattr(experiments, "_STRAGGLERS", shaped.Point(60e6, 8, Method.COMBINED))
    monkeypatch.setattr(experiments, "ROUND_PARTS", (1 / 20, 1 / 10))
    monkeypatch.setattr(peers, "PARTITIONS", (4,))
    monkeypatch.setattr(experiments, "_QUERIED", Shape(latency_s=0.001))
    monkeypatch.setattr(experiments, "_NETWORK", 1_000.0)
    report = json.loads((RESULTS / "analytics.json").read_text())
    report["shaped"] = shaped.measure([shaped.Point(1e6, 5, method) for method in (Method.HYBRID, Method.SLOW)])
    assert [each["method"] for each in report["shaped"]["points"]] == ["hybrid", "slow"]
    assert all(each["predicted_s"] > 0 and each["dollars"][0] > 0 for each in report["shaped"]["points"])
    report["direct"] = direct.measure(1, size=1e6, parts=4, others=(Method.COMBINED,))
    assert report["direct"]["times_as_fast"]["combined"] > 0
    report["experiments"] = experiments.measure(scale=0.02)
    report["paper"] = {"sorts": paper.predictions(), "wider": paper.wider()}
    report["peers"] = peers.measure(records=10_000, repetitions=1, peers=peers.INSTALLED)
    text = as_tables(report)
    assert "| 1 MB, 5 tasks, hybrid |" in text
    assert "| DuckDB |" in text
    plot.draw(report, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 10_000


def test_errors_are_parts_of_what_was_measured() -> None:
    assert errors([{"measured_s": [1.0, 2.0, 9.0], "predicted_s": 1.0}]) == [0.5]
