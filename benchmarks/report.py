"""Puts measured figures into ``benchmarks/README.md``: ``python -m benchmarks.report FILE``."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

__all__ = ["as_markdown", "main"]

_README = Path(__file__).with_name("README.md")
_PLACE = re.compile(r"(?<=<!-- figures -->\n).*?(?=<!-- end of figures -->)", re.DOTALL)


def as_markdown(report: dict[str, Any]) -> str:
    """The figures of a report as a table, with the machine above it."""
    machine = report["machine"]
    cached = "cached" if machine["byte_code_cached"] else "not cached"
    where = (
        f"Measured at {report['measured_at']} on {machine['cores']} cores of {machine['cpu']}, "
        f"{machine['memory_gib']} GiB, Linux {machine['kernel']}, Python {machine['python']} (byte code {cached}), "
        f"load before {machine['load_1min_before']}."
    )
    lines = [where, "", "| figure | measured | wish | reached |", "|---|--:|--:|---|"]
    for figure in report["figures"]:
        value, unit = figure["value"], figure["unit"]
        shown = f"{value:,.0f}" if value >= 100 or float(value).is_integer() else f"{value:.2f}"
        reached = {None: "", True: "yes", False: "**no**"}[figure["reached"]]
        lines.append(f"| {figure['name']} | {shown} {unit} | {figure['wish']} | {reached} |".replace("  ", " "))
    return "\n".join(lines) + "\n"


def main(path: str) -> None:
    """Replace the table in the README by that of a report."""
    report = json.loads(Path(path).read_text())
    _README.write_text(_PLACE.sub(lambda _: as_markdown(report), _README.read_text()))


if __name__ == "__main__":
    main(sys.argv[1])
