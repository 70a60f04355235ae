"""Benchmark reports: results as JSON with their time and machine, and Markdown tables with goals."""

from __future__ import annotations

import argparse
import dataclasses
import datetime as dt
import json
import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.machine import conditions, facts

Report = dict[str, Any]

RESULTS: Final = Path(__file__).parent / "results"
GOAL_COLUMNS: Final = ("figure", "measured", "goal", "reached")


@dataclasses.dataclass(frozen=True)
class Figure:
    """One measured value, its goal, and whether it was reached (None: no goal)."""

    name: str
    value: float
    unit: str
    goal: str = ""
    reached: bool | None = None

    def shown(self) -> str:
        """The value with its unit."""
        is_whole = self.value >= 100 or float(self.value).is_integer()
        return f"{self.value:,.{0 if is_whole else 2}f} {self.unit}".strip()


def parse_options(parser: argparse.ArgumentParser, results: str) -> argparse.Namespace:
    """The options of a benchmark, among them ``--output``, the file for its results."""
    parser.add_argument("--output", type=Path, default=RESULTS / results)
    return parser.parse_args()


def new_report(**fields: Any) -> Report:
    """A report of this moment and this machine."""
    return {"measured_at": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"), "machine": facts(), **fields}


def save(report: Report, path: Path, as_markdown: Callable[[Report], str]) -> None:
    """Write a report as JSON, and print it as Markdown."""
    path.write_text(json.dumps(report, indent=1) + "\n")
    print(as_markdown(report))


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


# -- Markdown ----------------------------------------------------------------------------------------------------------


def heading(report: Report, *details: str) -> str:
    """A sentence with the time, the machine and details of the measurement."""
    machine = report["machine"]
    where = (
        f"Measured at {report['measured_at']} on {machine['cores']} cores of {machine['cpu']}, "
        f"{machine['memory_gib']} GiB, Linux {machine['kernel']}, Python {machine['python']} "
        f"(byte code {'cached' if machine['byte_code_cached'] else 'not cached'}), {conditions(machine)}"
    )
    return "; ".join((where, *details)) + "."


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: bool = True) -> str:
    """A table; ``numbers`` aligns all columns but the first to the right."""
    rule = ["---", *["--:" if numbers else "---"] * (len(columns) - 1)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (columns, rule, *rows))


def goal_row(name: str, measured: str, goal: str = "", reached: bool | None = None) -> Sequence[str]:
    """A row of a table with :data:`GOAL_COLUMNS`."""
    return name, measured, goal, {None: "", True: "yes", False: "**no**"}[reached]


def figure_table(report: Report) -> str:
    """The figures of a report as a table."""
    figures = [Figure(**figure) for figure in report["figures"]]
    return page(
        heading(report),
        table(GOAL_COLUMNS, [goal_row(each.name, each.shown(), each.goal, each.reached) for each in figures]),
    )


def page(*parts: str) -> str:
    """Paragraphs and tables, with an empty line between them; empty ones are left out."""
    return "\n\n".join(filter(None, parts)) + "\n"


def with_section(text: str, name: str, section: str) -> str:
    """A page with the section between its two comments replaced.

    :raises ValueError: if the page does not have the section.
    """
    place = re.compile(rf"(?<=<!-- {name} -->\n).*?(?=<!-- end of {name} -->)", re.DOTALL)
    if not place.search(text):
        raise ValueError(f"the page has no section {name!r}")
    return place.sub(lambda _: section, text)
