"""The experiments as tables. No I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from benchmarks.engine.papers.failure import phases

_NOTHING: Final = "no-op"

Run = Mapping[str, Any]


def rate(run: Run) -> float:
    """Tasks per second."""
    return float(run["tasks"] / run["elapsed_s"])


def efficiency(run: Run) -> float | None:
    """The share of the workers' time that was spent in tasks; None for tasks that take none."""
    return float(run["ideal_s"] / run["elapsed_s"]) if run["ideal_s"] else None


def length(task_s: float) -> str:
    """How long tasks are, in words."""
    return f"{task_s * 1000:g} ms" if task_s else _NOTHING


def as_tables(report: Mapping[str, Any]) -> str:
    """Markdown: the machine, and a table for each experiment that was made."""
    machine = report["machine"]
    where = (
        f"Measured at {report['measured_at']} on {machine['cores']} cores of {machine['cpu']}, Linux "
        f"{machine['kernel']}, Python {machine['python']}."
    )
    parts = [where]
    if "batching" in report:
        parts.append(_batching(report["batching"]))
    if "prefetching" in report:
        parts.append(_grid("Prefetching, 4 workers", "most kept ready", "prefetch", report["prefetching"]))
    if "strong_scaling" in report:
        parts.append(_grid("Strong scaling: the same work", "workers", "workers", report["strong_scaling"]))
    if "weak_scaling" in report:
        parts.append(_grid("Weak scaling: the same work for each worker", "workers", "workers", report["weak_scaling"]))
    if "failure" in report:
        parts.append(_failure(report["failure"]))
    return "\n\n".join(parts) + "\n"


def _batching(runs: Sequence[Run]) -> str:
    slowest_s = max(run["elapsed_s"] for run in runs)
    lines = _head(f"{runs[0]['tasks']:,} no-ops, 4 workers", ["", "seconds", "tasks/s", "times the slowest"])
    lines += [
        _row([run["name"], f"{run['elapsed_s']:.2f}", f"{rate(run):,.0f}", f"{slowest_s / run['elapsed_s']:.1f}"])
        for run in runs
    ]
    return "\n".join(lines)


def _grid(title: str, name: str, key: str, runs: Sequence[Run]) -> str:
    """A row for each value of the key, a column for each length of task: tasks per second, and efficiency."""
    lengths = sorted({run["task_s"] for run in runs})
    lines = _head(title, [name, *[f"{length(task_s)}, tasks/s" for task_s in lengths]])
    for value in sorted({run[key] for run in runs}):
        row = {run["task_s"]: run for run in runs if run[key] == value}
        lines.append(_row([str(value), *[_cell(row[task_s]) for task_s in lengths]]))
    return "\n".join(lines)


def _cell(run: Run) -> str:
    share = efficiency(run)
    return f"{rate(run):,.0f}" if share is None else f"{rate(run):,.1f} ({share:.0%})"


def _failure(runs: Sequence[Run]) -> str:
    first = runs[0]
    title = (
        f"{length(first['task_s'])} tasks at {first['load']:.0%} of what {first['workers']} workers on two managers "
        f"can do; one manager dies at {first['dies_at_s']:g} s"
    )
    columns = ["the manager is", "there again at, s", "latency before, ms", "while away, ms", "worst, ms", "well at, s"]
    lines = _head(title, columns)
    for run in runs:
        figures = phases(run)
        latencies = [f"{figures[name] * 1000:,.0f}" for name in ("before_s", "away_s", "worst_s")]
        lines.append(_row([run["name"], f"{run['back_at_s']:.1f}", *latencies, f"{figures['well_at_s']:.1f}"]))
    return "\n".join(lines)


def _head(title: str, columns: Sequence[str]) -> list[str]:
    return [f"**{title}**", "", _row(columns), "|---|" + "--:|" * (len(columns) - 1)]


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
