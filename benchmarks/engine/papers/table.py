"""Tables of the experiments. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from benchmarks.engine.papers.failure import phases
from benchmarks.report import Report, heading, page, table

Run = Mapping[str, Any]


def rate(run: Run) -> float:
    """Tasks per second."""
    return float(run["tasks"] / run["elapsed_s"])


def efficiency(run: Run) -> float | None:
    """The share of the workers' time in tasks; None for no-ops."""
    return float(run["ideal_s"] / run["elapsed_s"]) if run["ideal_s"] else None


def length(task_s: float) -> str:
    """The length of tasks, in words."""
    return f"{task_s * 1000:g} ms" if task_s else "no-op"


def as_tables(report: Report) -> str:
    """Markdown: the machine, and a table for each experiment in the report."""
    return page(heading(report), *(make(report[name]) for name, make in _TABLES.items() if name in report))


def _batching(runs: Sequence[Run]) -> str:
    slowest_s = max(run["elapsed_s"] for run in runs)
    rows = [
        [run["name"], f"{run['elapsed_s']:.2f}", f"{rate(run):,.0f}", f"{slowest_s / run['elapsed_s']:.1f}"]
        for run in runs
    ]
    title = f"{runs[0]['tasks']:,} no-ops, 4 workers"
    return _titled(title, ["", "seconds", "tasks/s", "speed-up over the slowest"], rows)


def _grid(title: str, name: str, key: str, runs: Sequence[Run]) -> str:
    """A row for each value of the key, a column for each task length: tasks per second, and efficiency."""
    lengths = sorted({run["task_s"] for run in runs})
    rows = []
    for value in sorted({run[key] for run in runs}):
        row = {run["task_s"]: run for run in runs if run[key] == value}
        rows.append([str(value), *(_cell(row[task_s]) for task_s in lengths)])
    return _titled(title, [name, *(f"{length(task_s)}, tasks/s" for task_s in lengths)], rows)


def _cell(run: Run) -> str:
    share = efficiency(run)
    return f"{rate(run):,.0f}" if share is None else f"{rate(run):,.1f} ({share:.0%})"


def _failure(runs: Sequence[Run]) -> str:
    first = runs[0]
    title = (
        f"{length(first['task_s'])} tasks at {first['load']:.0%} of the capacity of {first['workers']} workers on two "
        f"managers; one manager dies at {first['dies_at_s']:g} s"
    )
    rows = []
    for run in runs:
        figures = phases(run)
        latencies = [f"{figures[name] * 1000:,.0f}" for name in ("before_s", "outage_s", "worst_s")]
        rows.append([run["name"], f"{run['back_at_s']:.1f}", *latencies, f"{figures['recovered_at_s']:.1f}"])
    columns = [
        "manager",
        "working at, s",
        "latency before, ms",
        "during the outage, ms",
        "worst, ms",
        "recovered at, s",
    ]
    return _titled(title, columns, rows)


def _titled(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return f"**{title}**\n\n{table(columns, rows)}"


_TABLES: Mapping[str, Callable[[Sequence[Run]], str]] = {
    "batching": _batching,
    "prefetching": partial(_grid, "Prefetching, 4 workers", "prefetch capacity", "prefetch"),
    "strong_scaling": partial(_grid, "Strong scaling: the same work", "workers", "workers"),
    "weak_scaling": partial(_grid, "Weak scaling: the same work per worker", "workers", "workers"),
    "failure": _failure,
}
