"""Tables of the benchmark of starts. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.report import GOAL_COLUMNS, Figure, Report, goal_row, heading, page, table
from benchmarks.warm_starts.forks import growth, quantile
from benchmarks.warm_starts.functions import WORKLOADS
from benchmarks.warm_starts.node import Sample
from benchmarks.warm_starts.workloads import ARMS


def as_tables(report: Report) -> str:
    """Markdown: forks with their goals, starts by technology, and FunctionBench."""
    return page(
        heading(report, f"as {report['user']}"),
        "**Forks with NumPy and pandas, from the request to the function's first line**",
        _goals([Figure(**figure) for figure in report["figures"]]),
        "**Start by technology, from the request to a worker that is ready**",
        table(("technology", "p50", "p90", "n"), map(_technology, report["technologies"])),
        "**FunctionBench, cold, from the request to the result; milliseconds, p50 (p90)**",
        _functions(report["functions"]),
        _goals([figure for row in report["functions"] for figure in ratios(row)]),
    )


def _goals(figures: Sequence[Figure]) -> str:
    return table(GOAL_COLUMNS, [goal_row(each.name, each.shown(), each.goal, each.reached) for each in figures])


def _technology(row: dict[str, Any]) -> Sequence[str]:
    if row["missing"] or not row["ms"]:
        return f"{row['technology']}: not here ({row['missing']})", "-", "-", "0"
    median, tail = (f"{quantile(row['ms'], share):.1f} ms" for share in (0.5, 0.9))
    return row["technology"], median, tail, str(len(row["ms"]))


def _functions(rows: Sequence[dict[str, Any]]) -> str:
    titles = ("fresh runc", "fresh bubblewrap", "fresh process", "fork after the request", "fork in advance", "warm")
    lines = []
    for row in rows:
        workload = WORKLOADS[row["function"]]
        cells = [_cell(row["arms"].get(arm, ())) for arm in ARMS]
        count = len(row["arms"]["fork"])
        lines.append([f"{workload.title}, {workload.size} (n={count})", *cells])
    return table(("function", *titles), lines)


def _cell(values: Sequence[float]) -> str:
    return f"{quantile(values, 0.5):.1f} ({quantile(values, 0.9):.1f})" if values else "not here"


def ratios(row: dict[str, Any]) -> list[Figure]:
    """How many times as long as a fork begun after the request a fresh container takes, by medians."""
    workload, arms = WORKLOADS[row["function"]], row["arms"]
    fork = quantile(arms["fork"], 0.5)
    return [
        Figure(
            f"{workload.title}: fresh {arm} to fork",
            value := quantile(arms[arm], 0.5) / fork,
            "x",
            f"≥ {least:g}",
            value >= least,
        )
        for arm, least in (("runc", workload.least_runc), ("bubblewrap", workload.least_bubblewrap))
        if arm in arms
    ]


def sustained_tables(report: Report) -> str:
    """Markdown: what is there after parts of a long run of one-shot workers, and what has grown."""
    parts: list[str] = []
    cores = report["machine"]["cores"]
    for name, samples in report["one_shots"].items():
        found = [Sample(**sample) for sample in samples]
        parts += [
            f"**{name}**",
            table(
                (
                    "tasks",
                    "per s and core",
                    "descriptors",
                    "manager",
                    "template, spare",
                    "processes",
                    "mounts",
                    "files",
                ),
                [_sample(each, before, cores) for each, before in zip(found, [None, *found], strict=False)],
            ),
            _goals(growth(found)),
        ]
    return page(heading(report), *parts)


def _sample(sample: Sample, before: Sample | None, cores: int) -> Sequence[str]:
    speed = "" if before is None else (sample.done - before.done) / (sample.seconds - before.seconds) / cores
    return (
        f"{sample.done:,}",
        f"{speed:.0f}" if isinstance(speed, float) else "",
        str(sample.descriptors),
        *(f"{size / 2**20:.1f} MiB" for size in (sample.manager_bytes, sample.template_bytes)),
        *map(str, (sample.processes, sample.mounts, sample.files)),
    )
