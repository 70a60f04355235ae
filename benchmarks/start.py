"""What starting costs: the import of the SDK and the help of its command, with those of peers beside them.

    python -m benchmarks.start [--output FILE]

Processor time of a process of its own, from its start, less that of an interpreter that does nothing; all in turns, so
that a slow minute of the machine is everybody's. Byte code is cached, as it is in what was installed.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from benchmarks.machine import circumstances, facts

Report = dict[str, Any]

ROUNDS: Final = 9
_ROOT: Final = Path(__file__).parents[1]
_OURS: Final = Path(sys.executable)
_PEERS: Final = _ROOT / "benchmarks" / "engine" / ".venv-peers"
_GLOBUS: Final = _ROOT / ".venv-globus" / "bin" / "python"
#: What starts, by which interpreter, and its wish in ms.
_STARTS: Final[Mapping[str, tuple[Path, str, int | None]]] = {
    "`import farcall`": (_OURS, "import farcall", 150),
    "`farcall --help`": (_OURS, "from farcall.cli import main; main(['--help'])", 400),
    "`import globus_compute_sdk`": (_GLOBUS, "import globus_compute_sdk", None),
    "`import parsl`": (_PEERS / "parsl" / "bin" / "python", "import parsl", None),
    "`import ray`": (_PEERS / "ray" / "bin" / "python", "import ray", None),
    "`import dask.distributed`": (_PEERS / "dask" / "bin" / "python", "import dask.distributed", None),
}


def main() -> None:
    """Measure, write, print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, default=_ROOT / "benchmarks" / "results" / "start.json")
    options = parser.parse_args()
    report: Report = {
        "measured_at": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "machine": facts(),
        "starts_ms": measured(),
    }
    options.output.write_text(json.dumps(report, indent=1) + "\n")
    print(as_table(report))


def measured() -> dict[str, dict[str, float]]:
    """Milliseconds of processor time of each start whose interpreter is there."""
    present = {name: (python, code) for name, (python, code, _) in _STARTS.items() if python.exists()}
    spent: dict[str, list[float]] = {name: [] for name in present}
    for python, code in present.values():
        _spent_ms(python, code)  # leaves the byte code behind
    for _ in range(ROUNDS):
        for name, (python, code) in present.items():
            spent[name].append(_spent_ms(python, code) - _spent_ms(python, "pass"))
    return {
        name: {"median": statistics.median(values), "min": min(values), "max": max(values)}
        for name, values in spent.items()
    }


def _spent_ms(python: Path, code: str) -> float:
    """Of a whole process and its children, user and system."""
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryDirectory() as directory:
        command = [str(python), "-c", code]
        subprocess.run(command, cwd=directory, env=environ, stdout=subprocess.DEVNULL, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime) * 1e3


def as_table(report: Report) -> str:
    """Markdown."""
    machine, starts = report["machine"], report["starts_ms"]
    ours = next(iter(starts.values()))["median"]
    where = (
        f"Measured at {report['measured_at']} on {machine['cores']} cores of {machine['cpu']}, Python "
        f"{machine['python']}, {circumstances(machine)}; {ROUNDS} rounds."
    )
    lines = [
        where,
        "",
        "| start | ms of processor time: median (min to max) | beside `import farcall` | wish | reached |",
        "|---|--:|--:|--:|---|",
    ]
    for name, spread in starts.items():
        wish = _STARTS[name][2]
        reached = "" if wish is None else "yes" if spread["median"] <= wish else "**no**"
        shown = f"{spread['median']:.0f} ({spread['min']:.0f} to {spread['max']:.0f})"
        wished = "" if wish is None else f"<= {wish}"
        lines.append(f"| {name} | {shown} | {spread['median'] / ours:.1f} x | {wished} | {reached} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
