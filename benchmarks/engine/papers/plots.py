"""Pictures of the experiments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import StrMethodFormatter

from benchmarks.engine.papers.table import efficiency, length, rate

Run = Mapping[str, Any]


def draw(report: Mapping[str, Any], path: Path) -> None:
    """A picture for each experiment in the report, next to ``path`` and with its name as prefix."""
    for name, draw_one in _PICTURES.items():
        if name in report:
            figure = draw_one(report[name])
            figure.savefig(path.with_name(f"{path.stem}_{name}.png"), dpi=110)


def _batching(runs: Sequence[Run]) -> Figure:
    figure, (axes,) = _panels(1)
    bars = axes.barh([run["name"] for run in runs], [run["elapsed_s"] for run in runs])
    axes.bar_label(bars, labels=[f"{run['elapsed_s']:.2f} s, {rate(run):,.0f}/s" for run in runs], padding=4)
    axes.invert_yaxis()
    axes.margins(x=0.5)
    axes.set_title(f"{runs[0]['tasks']:,} no-ops, 4 workers: seconds")
    axes.grid(axis="x", alpha=0.3)
    return figure


def _strong_scaling(runs: Sequence[Run]) -> Figure:
    figure, (axes,) = _panels(1)
    _lines(axes, runs, "workers", lambda run: run["elapsed_s"], lambda _: True)
    for task_s in sorted({run["task_s"] for run in runs} - {0.0}):
        ideal = [run for run in runs if run["task_s"] == task_s]
        axes.plot([str(run["workers"]) for run in ideal], [run["ideal_s"] for run in ideal], ":", color="grey")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.set_title("the same work on more workers: seconds (dotted: ideal)")
    axes.set_xlabel("workers")
    return figure


def _failure(runs: Sequence[Run]) -> Figure:
    figure, panels = _panels(len(runs))
    for axes, run in zip(panels, runs, strict=True):
        submitted_s, took_s = zip(*run["tasks"], strict=True)
        axes.plot(submitted_s, [1000 * took for took in took_s], ".", markersize=4)
        axes.axvspan(run["dies_at_s"], run["back_at_s"], color="tab:red", alpha=0.12, label="one of two managers")
        axes.set_title(f"one of two managers dies, {run['name']}")
        axes.set_xlabel("submitted at, s")
        axes.set_ylabel("latency, ms")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    return figure


def _panels(count: int) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(6.5 * count, 3.8), layout="constrained")
    return figure, list(figure.subplots(1, count, squeeze=False)[0])


def _rates(
    runs: Sequence[Run], *, key: str, label: str, noops: str, others: str, value: Callable[[Run], float | None]
) -> Figure:
    """The rates of no-ops in one panel, a value of longer tasks in the other."""
    figure, panels = _panels(2)
    _lines(panels[0], runs, key, rate, lambda run: not run["ideal_s"])
    _lines(panels[1], runs, key, value, lambda run: run["ideal_s"])
    for axes, title in zip(panels, (noops, others), strict=True):
        axes.set_ylim(bottom=0)
        axes.set_title(title)
        axes.set_xlabel(label)
    return figure


def _lines(
    axes: Axes, runs: Sequence[Run], key: str, value: Callable[[Run], float | None], wanted: Callable[[Run], object]
) -> None:
    """A line for each task length, over the values of the key at equal distances."""
    chosen = [run for run in runs if wanted(run)]
    axes.margins(y=0.15)
    for task_s in sorted({run["task_s"] for run in chosen}):
        line = [run for run in chosen if run["task_s"] == task_s]
        axes.plot(
            [str(run[key]) for run in line], [value(run) or 0.0 for run in line], marker="o", label=length(task_s)
        )
    axes.legend()
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    axes.grid(alpha=0.3)


_PICTURES: dict[str, Callable[[Sequence[Run]], Figure]] = {
    "batching": _batching,
    "prefetching": partial(
        _rates,
        key="prefetch",
        label="prefetch capacity: tasks ready per worker",
        noops="no-ops per second",
        others="share of the workers' time in tasks",
        value=efficiency,
    ),
    "strong_scaling": _strong_scaling,
    "weak_scaling": partial(
        _rates,
        key="workers",
        label="workers",
        noops="no-ops per second, 1,000 per worker",
        others="the same work per worker: seconds",
        value=lambda run: run["elapsed_s"],
    ),
    "failure": _failure,
}
