"""The table as a picture: each contestant's median, the spread of its rounds as a line."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import matplotlib as mpl

from benchmarks.engine.table import Round, calm

_PANELS: Final[Sequence[tuple[str, Callable[[Round], float]]]] = (
    ("no-ops per second", lambda r: r["noops"]["per_s"]),
    ("CPU per no-op, us", lambda r: r["noops"]["cpu_us"]),
    ("one call and its result, p50, ms", lambda r: r["hello"]["p50_ms"]),
    ("1 MB there and back, p50, ms", lambda r: r["echo_1mb"]["p50_ms"]),
)
_OURS, _THEIRS = "tab:blue", "0.6"


def draw(report: Mapping[str, Any], file: Path) -> None:
    """Write a PNG."""
    mpl.use("Agg")
    from matplotlib import pyplot

    names = [name for name, rounds in report["rounds"].items() if rounds]
    figure, axes = pyplot.subplots(2, 2, figsize=(11, 7), layout="constrained")
    for panel, (title, value) in zip(axes.flat, _PANELS, strict=True):
        for place, name in enumerate(reversed(names)):
            values = [value(each) for each in calm(report["rounds"][name])]
            panel.barh(place, statistics.median(values), color=_OURS if name == "farcall" else _THEIRS)
            panel.plot([min(values), max(values)], [place, place], color="black", linewidth=1)
        panel.set_yticks(range(len(names)), list(reversed(names)))
        panel.set_xscale("log")
        panel.set_title(title)
        panel.grid(axis="x", alpha=0.3)
    figure.suptitle(f"4 workers on {report['machine']['cores']} cores, {report['measured_at']}")
    figure.savefig(file, dpi=110)
    pyplot.close(figure)
