"""Picture of the analytics benchmark: predictions beside measurements, and rounds through little memory."""

from __future__ import annotations

import statistics
from pathlib import Path

from matplotlib.figure import Figure

from benchmarks.report import Report


def draw(report: Report, path: Path) -> None:
    """Two panels: measured and predicted seconds of all sorts, and seconds by the inverse of the memory."""
    figure = Figure(figsize=(10, 4.5), layout="constrained")
    points, rounds = figure.subplots(1, 2)
    groups: dict[str, list[tuple[float, float]]] = {
        method: [] for method in dict.fromkeys(each["method"] for each in report["shaped"]["points"])
    }
    for each in report["shaped"]["points"]:
        groups[each["method"]].append((statistics.median(each["measured_s"]), each["predicted_s"]))
    groups["without shape"] = [
        (statistics.median(each["measured_s"]), each["predicted_s"]) for each in report["unshaped"]["points"]
    ]
    for name, pairs in groups.items():
        points.scatter(*zip(*pairs, strict=True), label=name, s=18)
    every = [value for pairs in groups.values() for pair in pairs for value in pair]
    limits = [min(every), max(every)]
    points.plot(limits, limits, color="gray", linewidth=0.8)
    points.set(xscale="log", yscale="log", xlabel="measured, s", ylabel="predicted, s", title="sorts")
    points.legend(fontsize="small")
    found = [(1 / each["part"], statistics.median(each["seconds"])) for each in report["experiments"]["rounds"]]
    rounds.plot(*zip(*found, strict=True), marker="o")
    rounds.set(xlabel="data to memory", ylabel="s", title="hybrid exchange", ylim=(0, None))
    figure.suptitle(f"{report['machine']['cores']} cores, {report['measured_at']}")
    figure.savefig(path, dpi=110)
