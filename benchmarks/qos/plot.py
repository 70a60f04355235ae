"""Picture of the benchmark of latency targets."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from matplotlib.figure import Figure

from benchmarks.qos.experiments import EXPERIMENTS, NONE, ORACLE, PI, THRESHOLD_DELTAS, threshold_name
from benchmarks.qos.figures import BUCKETS_PER_DOUBLING, Repetition, mean_violations, undisturbed
from benchmarks.report import Report

_COLUMNS: Final = 3
_COLOURS: Final = {NONE: "0.5", "threshold": "tab:orange", ORACLE: "tab:green", PI: "tab:blue"}


def draw(report: Report, path: Path) -> None:
    """The density of latencies as multiples of the target, for each experiment and function; then weights over time."""
    shown = [
        (each, name.name, undisturbed(repetitions))
        for each in EXPERIMENTS
        if (repetitions := report["experiments"].get(each.name))
        for name in each.classes
    ]
    panels = len(shown) + 1
    rows = -(-panels // _COLUMNS)
    figure = Figure(figsize=(4.5 * _COLUMNS, 3.2 * rows), layout="constrained")
    places = list(figure.subplots(rows, _COLUMNS, squeeze=False).flat)
    for axes, (experiment, name, repetitions) in zip(places, shown, strict=False):
        _densities(axes, repetitions, name)
        axes.set_title(f"{experiment.name}: {experiment.title} - {name}", fontsize="small")
    if shown:
        places[0].legend(fontsize="small")
    _weights(places[len(shown)], report)
    for axes in places[panels:]:
        axes.set_axis_off()
    figure.suptitle(f"{report['machine']['cores']} cores, {report['measured_at']}; p(latency / target)")
    figure.savefig(path, dpi=110)


def _densities(axes: Any, repetitions: Sequence[Repetition], name: str) -> None:
    thresholds = [threshold_name(delta) for delta in THRESHOLD_DELTAS]
    best = min(thresholds, key=lambda policy: sum(mean_violations(each[policy]) for each in repetitions))
    for policy, colour in zip((NONE, best, ORACLE, PI), _COLOURS.values(), strict=True):
        counts: collections.Counter[int] = collections.Counter()
        for each in repetitions:
            counts.update({int(at): count for at, count in each[policy]["classes"][name]["histogram"].items()})
        total = sum(counts.values()) or 1
        first, last = min(counts, default=0), max(counts, default=0)
        steps = range(first - 1, last + 2)
        centres = [2 ** ((at + 0.5) / BUCKETS_PER_DOUBLING) for at in steps]
        label = "best threshold" if policy == best else policy
        axes.plot(centres, [counts[at] / total for at in steps], color=colour, label=label)
    axes.axvline(1.0, color="black", linewidth=1, linestyle="--")
    axes.set_xscale("log", base=2)
    axes.grid(alpha=0.3)


def _weights(axes: Any, report: Report) -> None:
    """Of the first repetition, with the policy ``pi``."""
    axes.set_title("weights over time (pi), s", fontsize="small")
    styles = itertools.cycle(("-", "--", ":", "-."))
    for experiment in EXPERIMENTS:
        if repetitions := report["experiments"].get(experiment.name):
            style = next(styles)
            for name, points in repetitions[0][PI]["weights"].items():
                axes.plot(*zip(*points, strict=True), style, label=f"{experiment.name}: {name}", linewidth=1)
    if axes.lines:
        axes.set_yscale("log", base=2)
        axes.legend(fontsize="x-small")
    axes.grid(alpha=0.3)
