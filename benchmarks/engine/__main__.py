"""Engine benchmark: ``python -m benchmarks.engine`` runs rounds of all systems in turn, and writes table and picture.

Each peer has its own environment. A round in which other processes used more than 15 % of the machine is dropped,
unless no other is left.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from matplotlib.figure import Figure

from benchmarks.engine.environments import interpreter, run_driver
from benchmarks.engine.systems import SYSTEMS
from benchmarks.engine.table import Round, as_tables, undisturbed
from benchmarks.report import new_report, parse_options, save

_PANELS: Final[Sequence[tuple[str, Callable[[Round], float]]]] = (
    ("no-ops per second", lambda r: r["noops"]["per_s"]),
    ("CPU per no-op, us", lambda r: r["noops"]["cpu_us"]),
    ("one call and its result, p50, ms", lambda r: r["hello"]["p50_ms"]),
    ("round trip of 1 MB, p50, ms", lambda r: r["echo_1mb"]["p50_ms"]),
)
_OURS, _THEIRS = "tab:blue", "0.6"


def main() -> None:
    """Measure, write, print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="*", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tasks", type=int, default=10_000, help="concurrent no-ops")
    options = parse_options(parser, "engine.json")
    report = new_report(tasks=options.tasks, rounds={name: [] for name in options.only})
    for _ in range(options.rounds):
        for name in options.only:
            figures = _run(name, options.tasks)
            if figures is not None:
                report["rounds"][name].append(figures)
    draw(report, options.output.with_suffix(".png"))
    save(report, options.output, as_tables)


def _run(name: str, tasks: int) -> dict[str, Any] | None:
    """One round of one system; None, and a line on standard error, if it failed."""
    try:
        figures = run_driver(interpreter(SYSTEMS[name][0]), name, "--tasks", str(tasks))
    except (subprocess.SubprocessError, ValueError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return None
    print(f"{name}: {figures['noops']['per_s']:,.0f} no-ops/s", file=sys.stderr)
    return figures


def draw(report: Mapping[str, Any], path: Path) -> None:
    """A picture: the median of each system as a bar, the spread of its rounds as a line."""
    names = [name for name, rounds in reversed(report["rounds"].items()) if rounds]
    figure = Figure(figsize=(11, 7), layout="constrained")
    for axes, (title, value) in zip(figure.subplots(2, 2).flat, _PANELS, strict=True):
        for place, name in enumerate(names):
            values = [value(each) for each in undisturbed(report["rounds"][name])]
            axes.barh(place, statistics.median(values), color=_OURS if name == "farcall" else _THEIRS)
            axes.plot([min(values), max(values)], [place, place], color="black", linewidth=1)
        axes.set_yticks(range(len(names)), names)
        axes.set_xscale("log")
        axes.set_title(title)
        axes.grid(axis="x", alpha=0.3)
    figure.suptitle(f"4 workers on {report['machine']['cores']} cores, {report['measured_at']}")
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
