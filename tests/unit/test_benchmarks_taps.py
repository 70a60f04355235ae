"""Tables of the TaPS benchmark, and the message for a Python without TaPS."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.taps.__main__ import check_python
from benchmarks.taps.table import as_tables
from tests.unit.benchmark_machine import MACHINE


def round_of(first_result_s: float, makespan_s: float) -> dict[str, Any]:
    applications = {"cholesky": {"first_s": 9.0, "makespan_s": makespan_s, "tasks": 200}}
    return {"first_result_s": first_result_s, "applications": applications}


def test_tables_have_medians_rates_and_failures() -> None:
    kill = {"raised": "Lost", "tasks": [["noop", "Lost"], ["noop", "Skipped"]], "after": "Broken"}
    report = {
        "measured_at": "now",
        "machine": MACHINE,
        "versions": {"taps": "1"},
        "rounds": {
            "farcall": [round_of(1, 2), round_of(2, 4), round_of(3, 8)],
            "ray": [round_of(5, 1), round_of(5, 1)],
            "dask": [{"first_result_s": 1, "applications": {}}],
        },
        "failures": {"farcall": {"failure": {**kill, "after": None}, "killed": kill}, "ray": {"killed": "it ended"}},
    }
    shown = as_tables(report).splitlines()
    assert "median of 1 to 3 rounds" in shown[0]
    assert "| application | tasks | farcall | ray | dask |" in shown
    once = "5.000 (5.000 to 5.000) | 1.000 (1.000 to 1.000)"
    assert f"| first result of a program | 1 | 2.000 (1.000 to 3.000) | {once} |" in shown
    assert "| cholesky | 200 | 4.000 (2.000 to 8.000) | 1.000 (1.000 to 1.000) | - |" in shown
    assert "| cholesky | 50 | 200 | - |" in shown
    assert "| farcall | Lost / Skipped; yes | Lost / Skipped; no: Broken |" in shown
    assert "| ray | - | it ended |" in shown


@pytest.mark.parametrize("python", [Path(sys.executable), Path("/nowhere/python")])
def test_a_python_without_taps_is_refused_with_what_to_do(python: Path) -> None:
    with pytest.raises(SystemExit, match="Install it there"):
        check_python(python)
