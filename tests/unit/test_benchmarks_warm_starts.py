"""Arithmetic and tables of the benchmark of starts."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from benchmarks.report import Figure
from benchmarks.warm_starts.forks import growth, quantiles
from benchmarks.warm_starts.functions import FUNCTIONS, WORKLOADS, packed
from benchmarks.warm_starts.node import Sample
from benchmarks.warm_starts.table import as_tables, ratios, sustained_tables
from benchmarks.warm_starts.workloads import ARMS
from tests.unit.benchmark_machine import MACHINE

REPORT = {"measured_at": "now", "machine": MACHINE, "user": "root"}


def test_a_99th_percentile_needs_200_values() -> None:
    median, tail = quantiles("fork", [1.0] * 198 + [3.0, 9.0], 2, 4)
    assert (median.name, median.value, median.reached) == ("fork, p50 (n=200)", 1.0, True)
    assert (tail.name, tail.value, tail.goal, tail.reached) == ("fork, p99 (n=200)", 3.0, "≤ 4", True)
    _, tail = quantiles("fork", [1.0] * 198 + [9.0], 2, 4)
    assert (tail.name, tail.goal, tail.reached) == ("fork, p90 (n=199)", "", None)


@pytest.mark.parametrize("name", WORKLOADS)
def test_functions_of_functionbench_give_the_same_result_each_time(name: str) -> None:
    packed(name)
    if importlib.util.find_spec(WORKLOADS[name].packages[0]) is not None:
        assert FUNCTIONS[name]() == FUNCTIONS[name]() != 0


def row_of(fork_ms: float, **changes: list[float]) -> dict[str, Any]:
    return {"function": "pyaes", "arms": {arm: [80.0] for arm in ARMS} | {"fork": [fork_ms]} | changes}


def test_a_fork_is_compared_with_fresh_containers() -> None:
    assert [(each.value, each.reached) for each in ratios(row_of(10.0))] == [(8.0, True), (8.0, True)]
    assert [(each.value, each.reached) for each in ratios(row_of(16.0))] == [(5.0, False), (5.0, True)]
    row = row_of(10.0)
    del row["arms"]["runc"]
    assert [each.name for each in ratios(row)] == ["pyaes: fresh bubblewrap to fork"]


def test_what_is_not_here_is_a_row_with_its_reason() -> None:
    technologies = [
        {"technology": "Docker", "ms": [], "missing": "docker.io is not installed"},
        {"technology": "venv", "ms": [40.0, 60.0], "missing": ""},
    ]
    row = row_of(10.0)
    del row["arms"]["runc"]
    text = as_tables({**REPORT, "figures": [], "technologies": technologies, "functions": [row]})
    assert "| Docker: not here (docker.io is not installed) | - | - | 0 |" in text
    assert "| venv | 60.0 ms | 60.0 ms | 2 |" in text
    assert "| pyaes, 100 bytes, 5 times (n=1) | not here | 80.0 (80.0) |" in text


def sample(done: int, **changes: int) -> Sample:
    same = {"descriptors": 10, "manager_bytes": 2**25, "template_bytes": 2**26, "processes": 3, "mounts": 9, "files": 7}
    return Sample(done, done / 100, **{**same, **changes})


def test_a_long_run_of_one_shots_may_not_grow() -> None:
    grown = [sample(0, descriptors=8), sample(10), sample(20, descriptors=11, manager_bytes=2**25 + 2**21)]
    figures = growth(grown)
    assert [each.name for each in figures if not each.reached] == ["growth: descriptors", "growth: manager's memory"]
    assert figures[0] == Figure("growth: descriptors", 1, "", "0", reached=False)
    samples = [each._asdict() for each in (sample(0), sample(10), sample(20))]
    text = sustained_tables({**REPORT, "one_shots": {"standard library": samples}})
    assert "| 20 | 50 | 10 | 32.0 MiB | 64.0 MiB | 3 | 9 | 7 |" in text
    assert "**no**" not in text
