"""Tables of the TaPS benchmark: medians of rounds with their spread, and what failures look like. No I/O."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.report import Report, heading, page, spread, table
from benchmarks.taps.workloads import WORKERS


def as_tables(report: Report) -> str:
    """Markdown: makespans, tasks per second, failures."""
    rounds: Mapping[str, Sequence[Mapping[str, Any]]] = report["rounds"]
    names = list(rounds)
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    counts = {title: found["tasks"] for name in names for title, found in rounds[name][0]["applications"].items()}
    return page(
        heading(report, versions, f"{WORKERS} workers", f"median of {_rounds(rounds)} rounds (min to max)"),
        "**Makespan, s**",
        table(
            ["application", "tasks", *names],
            [
                ["first result of a program", "1", *(_cell(_first(rounds[name])) for name in names)],
                *(
                    [title, f"{count:,}", *(_cell(_makespans(rounds[name], title)) for name in names)]
                    for title, count in counts.items()
                ),
            ],
        ),
        "**Tasks per second**",
        table(
            ["application", *names],
            [
                [title, *(_rate(count, _makespans(rounds[name], title)) for name in names)]
                for title, count in counts.items()
            ],
        ),
        "**Failures: the error of the task / of the one that needs its result; whether later tasks run**",
        _failures(report["failures"]),
    )


def _rounds(rounds: Mapping[str, Sequence[Any]]) -> str:
    counts = sorted({len(found) for found in rounds.values()}) or [0]
    return " to ".join(str(count) for count in dict.fromkeys([counts[0], counts[-1]]))


def _first(rounds: Sequence[Mapping[str, Any]]) -> list[float]:
    return [each["first_result_s"] for each in rounds]


def _makespans(rounds: Sequence[Mapping[str, Any]], title: str) -> list[float]:
    """Of an application, in the rounds that have it."""
    return [each["applications"][title]["makespan_s"] for each in rounds if title in each["applications"]]


def _cell(values: Sequence[float]) -> str:
    return "-" if not values else "{median:.3f} ({min:.3f} to {max:.3f})".format_map(spread(values))


def _rate(count: int, makespans: Sequence[float]) -> str:
    return "-" if not makespans else f"{count / statistics.median(makespans):,.0f}"


def _failures(seen: Mapping[str, Mapping[str, Any]]) -> str:
    kinds = list(dict.fromkeys(kind for found in seen.values() for kind in found))
    return table(
        ["executor", *kinds],
        [[name, *(_failure(found.get(kind, "-")) for kind in kinds)] for name, found in seen.items()],
        numbers=False,
    )


def _failure(found: Mapping[str, Any] | str) -> str:
    if isinstance(found, str):  # why there is none
        return found
    errors = " / ".join(dict.fromkeys(error for _, error in found["tasks"])) or "none"
    return f"{errors}; {'yes' if found['after'] is None else 'no: ' + found['after']}"
