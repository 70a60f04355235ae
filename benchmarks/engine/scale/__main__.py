"""Scale benchmark: ``python -m benchmarks.engine.scale`` measures one agent with one to 1,024 simulated managers.

Each number of managers is measured in several rounds, in turn with the others; the largest one once more, with many
tasks.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, StrMethodFormatter

from benchmarks.engine.scale.agent import SLOTS, TASK_S, WINDOW
from benchmarks.engine.scale.table import as_tables, points
from benchmarks.report import new_report, parse_options, save

_REPOSITORY: Final = Path(__file__).parents[3]
_MANAGERS: Final = (1, 4, 16, 64, 256, 1024)
_TIMEOUT_S: Final = 300


def run(managers: int, tasks: int) -> dict[str, Any]:
    """The figures of one point, measured in a new process.

    :raises subprocess.SubprocessError: if it fails, or takes too long.
    """
    command = [sys.executable, "-m", "benchmarks.engine.scale.agent", str(managers), str(tasks)]
    done = subprocess.run(command, cwd=_REPOSITORY, stdout=subprocess.PIPE, text=True, timeout=_TIMEOUT_S, check=True)
    figures: dict[str, Any] = json.loads(done.stdout)
    print(
        f"{managers:,} managers: {figures['per_s']:,.0f} tasks/s, {figures['agent_us']:.1f} us each, other "
        f"processes used {figures['others']:.0%}",
        file=sys.stderr,
    )
    return figures


def main() -> None:
    """Measure, write, print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--managers", type=int, nargs="+", default=list(_MANAGERS))
    parser.add_argument("--tasks", type=int, default=400_000, help="per round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--all-tasks", type=int, default=1_300_000, help="once, with the most managers; 0 to skip it")
    options = parse_options(parser, "engine_scale.json")
    report = new_report(slots=SLOTS, task_s=TASK_S, window=WINDOW, tasks=options.tasks, rounds=[], all=None)
    for _ in range(options.rounds):
        report["rounds"] += [run(managers, options.tasks) for managers in options.managers]
    if options.all_tasks:
        report["all"] = run(max(options.managers), options.all_tasks)
    draw(report, options.output.with_suffix(".png"))
    save(report, options.output, as_tables)


def draw(report: Mapping[str, Any], path: Path) -> None:
    """A picture: CPU time of a task, tasks per second, and memory, by the number of managers."""
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
    cost.set_title("agent's CPU time per task, us")
    cost.legend()
    rate.plot(managers, [p.per_s for p in swept], marker="o")
    rate.axhline(20_000, linestyle="--", color="grey", label="goal")
    rate.set_title("no-ops per second")
    rate.legend()
    memory.plot(managers, [p.peak_mib for p in swept], marker="o")
    memory.set_title("agent's peak memory, MiB")
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


if __name__ == "__main__":
    main()
