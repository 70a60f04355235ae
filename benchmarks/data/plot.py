"""Picture of the communication benchmark, as figure 5 of the funcX paper (2022)."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from benchmarks.data.media import MEDIA
from benchmarks.data.patterns import PATTERNS, SIZES
from benchmarks.report import Report


def draw(report: Report, path: Path) -> None:
    """A panel for each pattern: milliseconds by size, a line for each medium, with the spread of the rounds."""
    rounds: Sequence[Mapping[str, float]] = report["rounds"]
    figure = Figure(figsize=(12, 4.5), layout="constrained")
    panels = figure.subplots(1, len(PATTERNS), sharey=True)
    for axes, pattern in zip(panels, PATTERNS, strict=True):
        for medium in MEDIA:
            points = []
            for title, size in SIZES.items():
                key = f"{pattern}/{title}/{medium}"
                if found := [each[key] for each in rounds if key in each]:
                    points.append((size, statistics.median(found), min(found), max(found)))
            if points:
                sizes, medians, least, most = zip(*points, strict=True)
                [line] = axes.plot(sizes, medians, marker="o", label=medium)
                axes.fill_between(sizes, least, most, color=line.get_color(), alpha=0.2)
        senders, receivers = PATTERNS[pattern]
        axes.set_title(f"{pattern}: {senders} to {receivers}")
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel("bytes")
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("first write to last read, ms")
    panels[0].legend(fontsize="small")
    figure.suptitle(f"{report['machine']['cores']} cores, {report['measured_at']}")
    figure.savefig(path, dpi=110)
