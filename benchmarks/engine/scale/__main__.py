"""``python -m benchmarks.engine.scale``: from one manager to 1,024 on one agent; figures and a plot into ``results/``.

Each point is measured in some rounds, in turn with the others; the largest one once more with all its tasks.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

from benchmarks.engine.scale.agent import SLOTS, TASK_S, WINDOW
from benchmarks.engine.scale.plot import draw
from benchmarks.engine.scale.table import as_table
from benchmarks.machine import facts

_HERE: Final = Path(__file__).parent
_RESULTS: Final = _HERE.parents[1] / "results"
_MANAGERS: Final = (1, 4, 16, 64, 256, 1024)
_LIMIT_S: Final = 300


def run(managers: int, tasks: int) -> dict[str, Any]:
    """One point, measured in a process of its own.

    :raises subprocess.SubprocessError: if it fails, or takes too long.
    """
    command = [sys.executable, "-m", "benchmarks.engine.scale.agent", str(managers), str(tasks)]
    ended = subprocess.run(
        command, cwd=_HERE.parents[2], stdout=subprocess.PIPE, text=True, timeout=_LIMIT_S, check=True
    )
    figures: dict[str, Any] = json.loads(ended.stdout)
    print(
        f"{managers:,} managers: {figures['per_s']:,.0f} tasks/s, {figures['agent_us']:.1f} us each, others took "
        f"{figures['others']:.0%}",
        file=sys.stderr,
    )
    return figures


def main() -> None:
    """Measure, write, print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--managers", type=int, nargs="+", default=list(_MANAGERS))
    parser.add_argument("--tasks", type=int, default=400_000, help="for each point in each round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--all-tasks", type=int, default=1_300_000, help="once, with the most managers; 0 for not at all"
    )
    parser.add_argument("--output", type=Path, default=_RESULTS / "engine_scale.json")
    options = parser.parse_args()
    report: dict[str, Any] = {
        "measured_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": facts(),
        "slots": SLOTS,
        "task_s": TASK_S,
        "window": WINDOW,
        "tasks": options.tasks,
        "rounds": [],
        "all": None,
    }
    for _ in range(options.rounds):
        report["rounds"] += [run(managers, options.tasks) for managers in options.managers]
    if options.all_tasks:
        report["all"] = run(max(options.managers), options.all_tasks)
    options.output.write_text(json.dumps(report, indent=1) + "\n")
    draw(report, options.output.with_suffix(".png"))
    print(as_table(report))


if __name__ == "__main__":
    main()
