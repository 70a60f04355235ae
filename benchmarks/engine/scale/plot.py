"""The sweep as a picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, StrMethodFormatter

from benchmarks.engine.scale.table import points


def draw(report: Mapping[str, Any], path: Path) -> None:
    """Cost of a task, tasks per second, and memory, over the number of managers."""
    swept, slots = points(report["rounds"]), report["slots"]
    managers = [p.managers for p in swept]
    figure = Figure(figsize=(12, 3.6), layout="constrained")
    cost, rate, memory = figure.subplots(1, 3)
    for axes in (cost, rate, memory):
        axes.margins(y=0.2)
    cost.errorbar(
        managers,
        [p.agent_us for p in swept],
        yerr=[[0.0] * len(swept), [p.agent_us_most - p.agent_us for p in swept]],
        marker="o",
        capsize=3,
    )
    cost.axhspan(0.8 * swept[0].agent_us, 1.2 * swept[0].agent_us, alpha=0.15, label="20 % around the first")
    cost.set_title("agent's CPU for a task, us")
    cost.legend()
    rate.plot(managers, [p.per_s for p in swept], marker="o")
    rate.axhline(20_000, linestyle="--", color="grey", label="goal")
    rate.set_title("no-ops a second")
    rate.legend()
    memory.plot(managers, [p.peak_mib for p in swept], marker="o")
    memory.set_title("agent's peak of memory, MiB")
    for axes in (cost, rate, memory):
        _by_managers(axes, managers, slots)
    figure.savefig(path, dpi=110)


def _by_managers(axes: Axes, managers: list[int], slots: int) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(managers)
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.set_xlabel(f"managers, with {slots} workers each")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
