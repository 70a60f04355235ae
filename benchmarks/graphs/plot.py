"""Picture of the graph benchmark."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks.graphs.measuring import SIZES
from benchmarks.graphs.table import AGAIN_ARMS, EDGE_ARMS, OURS, Rounds, median, values
from benchmarks.report import Report

_OURS, _THEIRS = "tab:blue", "0.6"


def draw(report: Report, path: Path) -> None:
    """Edges by size as lines; repeated chains, fan-outs, nodes and applications as bars, with the spread of rounds as
    lines. Ours is blue."""
    rounds: Rounds = report["rounds"]
    figure = Figure(figsize=(12, 8), layout="constrained")
    (edges, again, fan_out), (layers, alexa, words) = figure.subplots(2, 3)
    for system, arm, title in EDGE_ARMS:
        found = [(size, median(rounds, system, f"edge/{arm}/{name}/p50_us")) for name, size in SIZES.items()]
        points = [(size, value) for size, value in found if value is not None]
        if points:
            edges.plot(*zip(*points, strict=True), marker="o", label=title)
    edges.set_xscale("log")
    edges.set_yscale("log")
    edges.set_xlabel("bytes")
    edges.set_title("one edge, p50, us")
    edges.grid(alpha=0.3)
    if edges.lines:
        edges.legend(fontsize="small")
        edges.margins(y=0.3)
    _bars(
        again, rounds, "a chain again, 1 KB: us an edge", [(s, f"again/{arm}/edge_us", t) for s, arm, t in AGAIN_ARMS]
    )
    peers = [OURS, "Ray", "Dask"]
    _bars(fan_out, rounds, "fan-out of 1,000: edges/s", [(each, "fan_out/edges_per_s", each) for each in peers])
    _bars(layers, rounds, "10,000 nodes: us a node", [(each, "layers/node_us", each) for each in (OURS, "Dask")])
    for axes in (again, fan_out, layers):
        axes.set_xscale("log")
        axes.set_xlim(left=1)
    for axes, name, title in ((alexa, "alexa", "Alexa skill, us"), (words, "words", "word count, us")):
        _bars(axes, rounds, title, [(each, f"{name}/run_us", each) for each in (OURS, "Flask")])
    figure.suptitle(f"2 workers on {report['machine']['cores']} cores, {report['measured_at']}")
    figure.savefig(path, dpi=110)


def _bars(axes: Any, rounds: Rounds, title: str, rows: Sequence[tuple[str, str, str]]) -> None:
    shown = [(system, label, found) for system, key, label in reversed(rows) if (found := values(rounds, system, key))]
    for place, (system, _, found) in enumerate(shown):
        axes.barh(place, statistics.median(found), color=_OURS if system == OURS else _THEIRS)
        axes.plot([min(found), max(found)], [place, place], color="black", linewidth=1)
    axes.set_yticks(range(len(shown)), [label for _, label, _ in shown])
    axes.set_title(title)
    axes.grid(axis="x", alpha=0.3)
