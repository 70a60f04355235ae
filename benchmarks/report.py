"""Puts measured figures into ``benchmarks/README.md``: ``python -m benchmarks.report`` after any of the benchmarks.

Each section of the README that shows figures stands between two comments, and is made of one file of ``results/``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from benchmarks import api, memoization, sdk, serialization, start
from benchmarks.engine import table as engine
from benchmarks.engine.papers import table as papers
from benchmarks.engine.scale import table as scale
from benchmarks.machine import circumstances

_HERE: Final = Path(__file__).parent

Report = dict[str, Any]


def as_markdown(report: Report) -> str:
    """The figures of the whole system as a table, with the machine above it."""
    machine = report["machine"]
    cached = "cached" if machine["byte_code_cached"] else "not cached"
    where = (
        f"Measured at {report['measured_at']} on {machine['cores']} cores of {machine['cpu']}, "
        f"{machine['memory_gib']} GiB, Linux {machine['kernel']}, Python {machine['python']} (byte code {cached}), "
        f"{circumstances(machine)}."
    )
    lines = [where, "", "| figure | measured | wish | reached |", "|---|--:|--:|---|"]
    for figure in report["figures"]:
        value, unit = figure["value"], figure["unit"]
        shown = f"{value:,.0f}" if value >= 100 or float(value).is_integer() else f"{value:.2f}"
        reached = {None: "", True: "yes", False: "**no**"}[figure["reached"]]
        lines.append(f"| {figure['name']} | {shown} {unit} | {figure['wish']} | {reached} |".replace("  ", " "))
    return "\n".join(lines) + "\n"


#: The name of a section, the file that it is made of, and how.
SECTIONS: Final[Mapping[str, tuple[str, Callable[[Any], str]]]] = {
    "figures": ("end_to_end.json", as_markdown),
    "engine": ("engine.json", engine.as_table),
    "scale": ("engine_scale.json", scale.as_table),
    "papers": ("engine_papers.json", papers.as_tables),
    "api": ("api.json", api.as_table),
    "memoization": ("memoization.json", memoization.as_table),
    "memoization-full": ("memoization_full.json", memoization.as_table),
    "serialization": ("serialization.json", serialization.as_tables),
    "sdk": ("sdk.json", sdk.as_tables),
    "start": ("start.json", start.as_table),
    "forwarder": ("forwarder.json", as_markdown),
}


def filled(text: str, name: str, section: str) -> str:
    """A page with one of its sections replaced.

    :raises ValueError: if the page has no such section.
    """
    place = re.compile(rf"(?<=<!-- {name} -->\n).*?(?=<!-- end of {name} -->)", re.DOTALL)
    if not place.search(text):
        raise ValueError(f"the page has no section {name!r}")
    return place.sub(lambda _: section, text)


def main() -> None:
    """Make all sections whose files are there anew."""
    page = _HERE / "README.md"
    text = page.read_text()
    for name, (file, make) in SECTIONS.items():
        results = _HERE / "results" / file
        if results.exists():
            text = filled(text, name, make(json.loads(results.read_text())))
    page.write_text(text)


if __name__ == "__main__":
    main()
