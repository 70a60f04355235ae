"""Arithmetic of the papers' experiments."""

from __future__ import annotations

import math
from typing import Any

from benchmarks.engine.papers.failure import phases
from benchmarks.engine.papers.table import as_tables, efficiency, rate
from tests.unit.benchmark_machine import MACHINE


def run_of(task_s: float, *, tasks: int = 100, elapsed_s: float = 2.0, workers: int = 4) -> dict[str, Any]:
    ideal_s = tasks / workers * task_s
    return {"task_s": task_s, "tasks": tasks, "elapsed_s": elapsed_s, "ideal_s": ideal_s, "workers": workers}


def outage_of(tasks: list[tuple[float, float]]) -> dict[str, Any]:
    figures = {"dies_at_s": 2.0, "back_at_s": 4.0, "task_s": 0.1, "load": 0.8, "workers": 8}
    return {"name": "replaced after 4 s", "tasks": tasks, **figures}


def test_rate_and_efficiency() -> None:
    assert rate(run_of(0.01)) == 50.0
    assert efficiency(run_of(0.01, elapsed_s=0.5)) == 0.5
    assert efficiency(run_of(0.0)) is None


def test_phases_of_an_outage() -> None:
    steady = [(0.1 * step, 0.1) for step in range(16)]
    hit = [(1.95, 0.3)]  # was running when the manager died, and ran again
    during = [(2.1, 0.2), (3.0, 0.9), (3.9, 1.3)]
    after = [(5.0, 0.5), (6.0, 0.149), (7.0, 0.1)]
    figures = phases(outage_of([*steady, *hit, *during, *after]))
    assert figures == {"before_s": 0.1, "outage_s": 0.9, "worst_s": 1.3, "recovered_at_s": 5.5}


def test_failed_task_has_infinite_latency() -> None:
    figures = phases(outage_of([(0.0, 0.1), (2.5, math.inf)]))
    assert figures["worst_s"] == math.inf


def test_tables_cover_the_measured_experiments() -> None:
    report = {
        "measured_at": "now",
        "machine": MACHINE,
        "batching": [
            {"name": "with", "tasks": 100, "elapsed_s": 1.0},
            {"name": "without", "tasks": 100, "elapsed_s": 8.0},
        ],
        "strong_scaling": [run_of(length_s, workers=workers) for workers in (1, 2) for length_s in (0.0, 0.01)],
        "failure": [outage_of([(0.0, 0.1), (2.5, 1.25), (6.0, 0.1)])],
    }
    tables = as_tables(report)
    assert "| with | 1.00 | 100 | 8.0 |" in tables
    assert "| without | 8.00 | 12 | 1.0 |" in tables
    assert "| workers | no-op, tasks/s | 10 ms, tasks/s |" in tables
    assert "| 2 | 50 | 50.0 (25%) |" in tables
    assert "| replaced after 4 s | 4.0 | 100 | 1,250 | 1,250 | 3.8 |" in tables
    assert "Weak scaling" not in tables
