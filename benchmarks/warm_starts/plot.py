"""Picture of the benchmark of starts."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from benchmarks.report import Report
from benchmarks.warm_starts.forks import quantile
from benchmarks.warm_starts.functions import WORKLOADS
from benchmarks.warm_starts.technologies import present
from benchmarks.warm_starts.workloads import ARMS

_OURS, _THEIRS = "tab:blue", "0.6"


def draw(report: Report, path: Path) -> None:
    """Medians as bars on logarithmic axes, with a line to the 90th percentile; forks are blue."""
    figure = Figure(figsize=(11, 9), layout="constrained")
    technologies, functions = figure.subplots(2, 1)
    rows = present(report["technologies"])
    for place, row in enumerate(rows):
        median, tail = (quantile(row["ms"], share) for share in (0.5, 0.9))
        technologies.barh(place, median, color=_OURS if row["technology"].startswith("fork") else _THEIRS)
        technologies.plot([median, tail], [place, place], color="black", linewidth=1)
        technologies.text(max(median, tail) * 1.05, place, f"{median:.1f} ms", va="center")
    technologies.set_yticks(range(len(rows)), [row["technology"] for row in rows])
    technologies.set_title("from the request to a worker that is ready, ms")
    width = 0.8 / len(ARMS)
    colours = ("0.45", "0.6", "0.75", "tab:blue", "tab:cyan", "tab:green")
    for number, (arm, colour) in enumerate(zip(ARMS, colours, strict=True)):
        found = [(place, row["arms"][arm]) for place, row in enumerate(report["functions"]) if arm in row["arms"]]
        places = [place + (number - 2.5) * width for place, _ in found]
        functions.bar(places, [quantile(values, 0.5) for _, values in found], width, color=colour, label=arm)
    functions.set_xticks(
        range(len(report["functions"])), [WORKLOADS[row["function"]].title for row in report["functions"]]
    )
    functions.set_title("FunctionBench, from the request to the result, ms")
    functions.legend(ncols=len(ARMS), loc="upper right", fontsize="small")
    technologies.set_xscale("log")
    functions.set_yscale("log")
    technologies.margins(x=0.15)
    functions.margins(y=0.2)
    for axes, axis in ((technologies, "x"), (functions, "y")):
        axes.grid(axis=axis, alpha=0.3)
    figure.suptitle(f"{report['machine']['cores']} cores, {report['measured_at']}")
    figure.savefig(path, dpi=110)
