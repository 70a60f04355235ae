"""Serialisers beside one another: functions and data, written and read, with the memory that it takes.

    python -m benchmarks.serialization [--rounds 3] [--output FILE]

Globus Compute's own package runs in its own environment (``make test-unit`` makes it). Rounds of all contestants in
turn, each in a fresh process; medians.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import statistics
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.machine import circumstances, facts
from benchmarks.serialization_cases import CONTESTANTS, DATA, FUNCTIONS

Report = dict[str, Any]
#: What is measured of each case, and how its column is called.
_MEASURES: Final = {"write_us": "write", "read_us": "read"}
_ROOT: Final = Path(__file__).parents[1]
_GLOBUS: Final = _ROOT / ".venv-globus" / "bin" / "python"
_ANCHOR: Final = "Globus Compute"
_WITHIN_S: Final = 300
_AS_QUICK: Final = 0.9
"""What differs by less than a tenth is the same: the figures move by that much."""


def main() -> None:
    """Measure, write, print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "serialization.json")
    options = parser.parse_args()
    report: Report = {
        "measured_at": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "machine": facts(),
        "numpy": np.__version__,
        "rounds": options.rounds,
    }
    names = [name for name, (where, _, _) in CONTESTANTS.items() if where != "globus" or _GLOBUS.exists()]
    rounds = [{name: _run(name) for name in names} for _ in range(options.rounds)]
    report["contestants"] = {name: _summary([each[name] for each in rounds]) for name in names}
    options.output.write_text(json.dumps(report, indent=1) + "\n")
    print(as_tables(report))


def _run(name: str) -> Any:
    with tempfile.TemporaryDirectory() as directory:
        paths, python = [str(_ROOT)], sys.executable
        if CONTESTANTS[name][0] == "globus":  # which has no arrays to send: it borrows ours
            python = str(_GLOBUS)
            packages = Path(np.__file__).parents[1]
            for each in ("numpy", "numpy.libs"):
                (Path(directory) / each).symlink_to(packages / each)
            paths.append(directory)
        command = [python, "-m", "benchmarks.serialization_cases", name]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, timeout=_WITHIN_S, check=True)
    return json.loads(done.stdout)


def _summary(rounds: list[Any]) -> Report:
    """For each kind, case and measure: the median of the rounds, and the lowest and the highest."""
    summary: Report = {}
    for kind, cases in rounds[0].items():
        summary[kind] = {}
        for case, first in cases.items():
            found = [each[kind][case] for each in rounds if each[kind][case] is not None]
            if first is not None and len(found) == len(rounds):
                summary[kind][case] = {measure: _spread([each[measure] for each in found]) for measure in first}
    return summary


def _spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


# -- tables ------------------------------------------------------------------------------------------------------------


def as_tables(report: Report) -> str:
    """Markdown."""
    machine = report["machine"]
    where = (
        f"Measured at {report['measured_at']} on {machine['cores']} cores of {machine['cpu']}, Python "
        f"{machine['python']}, numpy {report['numpy']}, {circumstances(machine)}; medians of "
        f"{report['rounds']} rounds of medians (lowest to highest), in microseconds."
    )
    contestants = report["contestants"]
    names = [name for name in contestants if CONTESTANTS[name][0] != "order"]
    order = [name for name in contestants if CONTESTANTS[name][0] == "order"]
    parts = [where, ""]
    for kind, cases in (("functions", FUNCTIONS), ("data", DATA)):
        parts += [*_table(contestants, names, kind, list(cases)), ""]
    parts += ["**Memory, as times the size of the value, and what is sent**", ""]
    parts += [*_memory(contestants, names), ""]
    parts += ["**Globus Compute's time as times ours**", ""]
    parts += [*_ratios(contestants), ""]
    parts += ["**The strategies that the facade tries, in its order: writing and reading together**", ""]
    parts += _order(contestants, order)
    return "\n".join(parts) + "\n"


def _table(contestants: Report, names: list[str], kind: str, cases: list[str]) -> list[str]:
    shown = [name for name in names if contestants[name][kind]]
    lines = [f"| {kind}: write + read, us | " + " | ".join(shown) + " |", "|---|" + "--:|" * len(shown)]
    for case in cases:
        row = []
        for name in shown:
            figures = contestants[name][kind].get(case)
            row.append(" + ".join(_cell(figures[measure]) for measure in _MEASURES) if figures else "-")
        lines.append(f"| {case} | " + " | ".join(row) + " |")
    return lines


def _cell(spread: dict[str, float]) -> str:
    digits = 1 if spread["median"] < 100 else 0
    return f"{spread['median']:,.{digits}f} ({spread['min']:,.{digits}f} to {spread['max']:,.{digits}f})"


def _memory(contestants: Report, names: list[str]) -> list[str]:
    cases = [case for case in DATA if "MB" in case]
    lines = ["| to write + to read, sent | " + " | ".join(names) + " |", "|---|" + "--:|" * len(names)]
    sizes = {case: int(case.split(", ")[1].removesuffix(" MB")) * 1_000_000 for case in cases}
    for case in cases:
        row = []
        for name in names:
            figures = contestants[name]["data"].get(case)
            if figures is None:
                row.append("-")
                continue
            write, read = (figures[measure]["median"] for measure in ("write_copies", "read_copies"))
            row.append(f"{write:.2f} + {read:.2f}, {figures['size']['median'] / sizes[case]:.2f}")
        lines.append(f"| {case} | " + " | ".join(row) + " |")
    return lines


def _ratios(contestants: Report) -> list[str]:
    lines = ["| | write | read | both |", "|---|--:|--:|--:|"]
    for kind, cases in (("functions", FUNCTIONS), ("data", DATA)):
        for case in cases:
            ours, theirs = (contestants.get(name, {}).get(kind, {}).get(case) for name in ("farcall", _ANCHOR))
            if not (ours and theirs):
                continue
            times = [(theirs[measure]["median"], ours[measure]["median"]) for measure in _MEASURES]
            both = (sum(each[0] for each in times), sum(each[1] for each in times))
            lines.append(f"| {case} | " + " | ".join(_times(*each) for each in [*times, both]) + " |")
    return lines


def _times(theirs: float, ours: float) -> str:
    return f"{theirs / ours:,.2g}" if theirs < 100 * ours else f"{theirs / ours:,.0f}"


def _order(contestants: Report, names: list[str]) -> list[str]:
    lines = ["| | " + " | ".join(names) + " | in order |", "|---|" + "--:|" * len(names) + "---|"]
    for kind, cases in (("functions", FUNCTIONS), ("data", DATA)):
        for case in cases:
            found = [contestants[name][kind].get(case) for name in names]
            both = [sum(figures[measure]["median"] for measure in _MEASURES) if figures else None for figures in found]
            there = [value for value in both if value is not None]
            verdict = "yes" if all(_AS_QUICK * before <= after for before, after in pairwise(there)) else "**no**"
            row = " | ".join("-" if value is None else f"{value:,.1f}" for value in both)
            lines.append(f"| {case} | {row} | {verdict} |")
    return lines


if __name__ == "__main__":
    main()
