"""Serialization benchmark: time, size and memory to write and read functions and data, compared with peers.

    python -m benchmarks.serialization [--rounds 3] [--output FILE]

Globus Compute's own package runs in its own environment (``make test-unit`` creates it). Rounds of all systems in turn,
each in a new process; medians.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.report import Report, heading, new_report, page, parse_options, save, spread, table
from benchmarks.serialization_cases import DATA, FUNCTIONS, SYSTEMS

#: The measures of each case, and their columns.
_MEASURES: Final = {"write_us": "write", "read_us": "read"}
_ROOT: Final = Path(__file__).parents[1]
_GLOBUS: Final = _ROOT / ".venv-globus" / "bin" / "python"
_REFERENCE: Final = "Globus Compute"
_TIMEOUT_S: Final = 300
_AS_FAST: Final = 0.9
"""Times that differ by less than a tenth count as equal: the figures vary by that much."""


def main() -> None:
    """Measure, write, print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    options = parse_options(parser, "serialization.json")
    report = new_report(numpy=np.__version__, rounds=options.rounds)
    names = [name for name, (where, _, _) in SYSTEMS.items() if where != "globus" or _GLOBUS.exists()]
    rounds = [{name: _run(name) for name in names} for _ in range(options.rounds)]
    report["systems"] = {name: _summary([each[name] for each in rounds]) for name in names}
    save(report, options.output, as_tables)


def _run(name: str) -> Any:
    with tempfile.TemporaryDirectory() as directory:
        paths, python = [str(_ROOT)], sys.executable
        if SYSTEMS[name][0] == "globus":  # its environment has no numpy: it uses ours
            python = str(_GLOBUS)
            packages = Path(np.__file__).parents[1]
            for each in ("numpy", "numpy.libs"):
                (Path(directory) / each).symlink_to(packages / each)
            paths.append(directory)
        command = [python, "-m", "benchmarks.serialization_cases", name]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, timeout=_TIMEOUT_S, check=True)
    return json.loads(done.stdout)


def _summary(rounds: list[Any]) -> Report:
    """The spread of the rounds, for each kind, case and measure."""
    summary: Report = {}
    for kind, cases in rounds[0].items():
        summary[kind] = {}
        for case, first in cases.items():
            found = [each[kind][case] for each in rounds if each[kind][case] is not None]
            if first is not None and len(found) == len(rounds):
                summary[kind][case] = {measure: spread([each[measure] for each in found]) for measure in first}
    return summary


# -- tables ------------------------------------------------------------------------------------------------------------


def as_tables(report: Report) -> str:
    """Markdown."""
    systems = report["systems"]
    names = [name for name in systems if SYSTEMS[name][0] != "order"]
    order = [name for name in systems if SYSTEMS[name][0] == "order"]
    details = f"medians of {report['rounds']} rounds of medians (min to max), in microseconds"
    return page(
        heading(report, f"numpy {report['numpy']}", details),
        *(_times(systems, names, kind, list(cases)) for kind, cases in (("functions", FUNCTIONS), ("data", DATA))),
        "**Memory and size, as multiples of the size of the value**",
        _memory(systems, names),
        "**Globus Compute's time divided by ours**",
        _ratios(systems),
        "**The strategies of the facade in their order: time to write and read, us**",
        _order(systems, order),
    )


def _times(systems: Report, names: list[str], kind: str, cases: list[str]) -> str:
    def cell(figures: Report) -> str:
        return " + ".join(_cell(figures[measure]) for measure in _MEASURES)

    shown = [name for name in names if systems[name][kind]]
    rows = [[case, *(_or_dash(systems[name][kind].get(case), cell) for name in shown)] for case in cases]
    return table([f"{kind}: write + read, us", *shown], rows)


def _or_dash(figures: Report | None, cell: Callable[[Report], str]) -> str:
    return "-" if figures is None else cell(figures)


def _cell(times: dict[str, float]) -> str:
    digits = 1 if times["median"] < 100 else 0
    return f"{times['median']:,.{digits}f} ({times['min']:,.{digits}f} to {times['max']:,.{digits}f})"


def _memory(systems: Report, names: list[str]) -> str:
    rows = []
    for case in (case for case in DATA if "MB" in case):
        size_bytes = int(case.split(", ")[1].removesuffix(" MB")) * 1_000_000

        def cell(figures: Report, size_bytes: int = size_bytes) -> str:
            write, read = (figures[measure]["median"] for measure in ("write_copies", "read_copies"))
            return f"{write:.2f} + {read:.2f}, {figures['size']['median'] / size_bytes:.2f}"

        rows.append([case, *(_or_dash(systems[name]["data"].get(case), cell) for name in names)])
    return table(["memory to write + to read, size", *names], rows)


def _cases() -> Iterator[tuple[str, str]]:
    yield from (("functions", case) for case in FUNCTIONS)
    yield from (("data", case) for case in DATA)


def _ratios(systems: Report) -> str:
    rows = []
    for kind, case in _cases():
        ours, theirs = (systems.get(name, {}).get(kind, {}).get(case) for name in ("farcall", _REFERENCE))
        if ours and theirs:
            times = [(theirs[measure]["median"], ours[measure]["median"]) for measure in _MEASURES]
            both = (sum(each[0] for each in times), sum(each[1] for each in times))
            rows.append([case, *(_ratio(*each) for each in [*times, both])])
    return table(["", *_MEASURES.values(), "both"], rows)


def _ratio(theirs: float, ours: float) -> str:
    return f"{theirs / ours:,.2g}" if theirs < 100 * ours else f"{theirs / ours:,.0f}"


def _order(systems: Report, names: list[str]) -> str:
    rows = []
    for kind, case in _cases():
        found = [systems[name][kind].get(case) for name in names]
        both = [sum(figures[measure]["median"] for measure in _MEASURES) if figures else None for figures in found]
        present = [value for value in both if value is not None]
        in_order = all(_AS_FAST * before <= after for before, after in pairwise(present))
        cells = ("-" if value is None else f"{value:,.1f}" for value in both)
        rows.append([case, *cells, "yes" if in_order else "**no**"])
    return table(["", *names, "in order"], rows)


if __name__ == "__main__":
    main()
