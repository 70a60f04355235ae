"""Start-up benchmark: CPU time of the import of the SDK and of its command's help, compared with peers.

    python -m benchmarks.start [--output FILE]

Each figure is the CPU time of a new process, less that of an interpreter that does nothing. The programs take turns, so
that slow minutes of the machine affect all of them. Byte code is cached, as in an installed package.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from benchmarks.engine.environments import interpreter_path
from benchmarks.report import Report, goal_row, heading, new_report, page, parse_options, save, spread, table

ROUNDS: Final = 9
_OURS: Final = Path(sys.executable)
_GLOBUS: Final = Path(__file__).parents[1] / ".venv-globus" / "bin" / "python"
#: The interpreter and the code of each start, and its goal in ms.
_STARTS: Final[Mapping[str, tuple[Path, str, int | None]]] = {
    "`import farcall`": (_OURS, "import farcall", 150),
    "`farcall --help`": (_OURS, "from farcall.cli import main; main(['--help'])", 400),
    "`import globus_compute_sdk`": (_GLOBUS, "import globus_compute_sdk", None),
    "`import parsl`": (interpreter_path("parsl"), "import parsl", None),
    "`import ray`": (interpreter_path("ray"), "import ray", None),
    "`import dask.distributed`": (interpreter_path("dask"), "import dask.distributed", None),
}


def main() -> None:
    """Measure, write, print."""
    options = parse_options(argparse.ArgumentParser(), "start.json")
    save(new_report(starts_ms=measure()), options.output, as_table)


def measure() -> dict[str, dict[str, float]]:
    """Milliseconds of CPU time of each start whose interpreter is installed."""
    present = {name: (python, code) for name, (python, code, _) in _STARTS.items() if python.exists()}
    spent: dict[str, list[float]] = {name: [] for name in present}
    for python, code in present.values():
        _spent_ms(python, code)  # writes the byte code
    for _ in range(ROUNDS):
        for name, (python, code) in present.items():
            spent[name].append(_spent_ms(python, code) - _spent_ms(python, "pass"))
    return {name: spread(values) for name, values in spent.items()}


def _spent_ms(python: Path, code: str) -> float:
    """User and system time of a process and its children."""
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryDirectory() as directory:
        command = [str(python), "-c", code]
        subprocess.run(command, cwd=directory, env=environ, stdout=subprocess.DEVNULL, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime) * 1e3


def as_table(report: Report) -> str:
    """The times as Markdown."""
    starts = report["starts_ms"]
    ours_ms = next(iter(starts.values()))["median"]
    rows = []
    for name, times in starts.items():
        goal_ms = _STARTS[name][2]
        goal = () if goal_ms is None else (f"<= {goal_ms}", times["median"] <= goal_ms)
        _, measured, *reached = goal_row(
            name, f"{times['median']:.0f} ({times['min']:.0f} to {times['max']:.0f})", *goal
        )
        rows.append([name, measured, f"{times['median'] / ours_ms:.1f} x", *reached])
    columns = ["start", "ms of CPU time: median (min to max)", "relative to `import farcall`", "goal", "reached"]
    return page(heading(report, f"{ROUNDS} rounds"), table(columns, rows))


if __name__ == "__main__":
    main()
