"""Tables of the engine benchmark: medians with their spread, and goals. No I/O."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.report import GOAL_COLUMNS, Report, goal_row, heading, page, table

_MOST_BY_OTHERS = 0.15

Round = Mapping[str, Any]

_FIGURES: Sequence[tuple[str, Callable[[Round], float]]] = (
    ("no-ops/s", lambda r: r["noops"]["per_s"]),
    ("100,000 no-ops/s", lambda r: r["many_noops"]["per_s"]),
    ("CPU us/no-op", lambda r: r["noops"]["cpu_us"]),
    ("hello p50 ms", lambda r: r["hello"]["p50_ms"]),
    ("hello p99 ms", lambda r: r["hello"]["p99_ms"]),
    ("1 ms sleeps/s", lambda r: r["sleeps"]["per_s"]),
    ("1 MB p50 ms", lambda r: r["echo_1mb"]["p50_ms"]),
    ("10 MB p50 ms", lambda r: r["echo_10mb"]["p50_ms"]),
    ("first result s", lambda r: r["start_to_first_result_s"]),
    ("MiB/worker", lambda r: r["memory_per_worker_mib"]),
)

_GOALS: Sequence[tuple[str, float]] = (  # a minimum for rates, a maximum for the others
    ("no-ops/s", 40_000),
    ("100,000 no-ops/s", 40_000),
    ("hello p50 ms", 0.4),
    ("hello p99 ms", 1.0),
    ("1 ms sleeps/s", 3300),
    ("1 MB p50 ms", 4.0),
    ("10 MB p50 ms", 60.0),
    ("first result s", 0.5),
)

_RATIOS: Sequence[tuple[str, float]] = (("Parsl tuned", 12), ("Ray actors", 4), ("ProcessPoolExecutor", 2))


def undisturbed(rounds: Sequence[Round]) -> Sequence[Round]:
    """The rounds in which other processes used little of the machine; all rounds if there are none."""
    return [r for r in rounds if r["noops"]["others"] <= _MOST_BY_OTHERS] or rounds


def as_tables(report: Report) -> str:
    """Markdown: the machine, a row for each system, and our figures with their goals."""
    rows = []
    for name, rounds in report["rounds"].items():
        if rounds:
            kept = undisturbed(rounds)
            cells = [_cell(_values(kept, value)) for _, value in _FIGURES]
            rows.append([name, f"{len(kept)} of {len(rounds)}", *cells])
    return page(
        heading(report, "4 workers", f"{report['tasks']:,} no-ops", "median (min to max)"),
        table(["system", "rounds", *(name for name, _ in _FIGURES)], rows),
        goals(report["rounds"]),
    )


def goals(rounds: Mapping[str, Sequence[Round]]) -> str:
    """Our figures with their goals, and their ratios to those of peers."""
    if not rounds.get("farcall"):
        return ""
    figures, rows = dict(_FIGURES), []
    for name, goal in _GOALS:
        if not _values(rounds["farcall"], figures[name]):
            continue
        measured = _median(rounds["farcall"], figures[name])
        at_least = name.endswith("/s")
        reached = measured >= goal if at_least else measured <= goal
        rows.append(goal_row(name, _number(measured), f"{'>=' if at_least else '<='} {goal:,g}", reached))
    ours = _median(rounds["farcall"], figures["no-ops/s"])
    for peer, least in _RATIOS:
        if rounds.get(peer):
            ratio = ours / _median(rounds[peer], figures["no-ops/s"])
            rows.append(goal_row(f"no-ops/s, relative to {peer}", f"{ratio:.1f} x", f">= {least:g} x", ratio >= least))
    return table(GOAL_COLUMNS, rows)


def _median(rounds: Sequence[Round], value: Callable[[Round], float]) -> float:
    return statistics.median(_values(undisturbed(rounds), value))


def _values(rounds: Sequence[Round], value: Callable[[Round], float]) -> list[float]:
    """A figure of all rounds that have it."""
    values = []
    for each in rounds:
        with contextlib.suppress(KeyError):
            values.append(value(each))
    return values


def _cell(values: Sequence[float]) -> str:
    if not values:
        return "-"
    return f"{_number(statistics.median(values))} ({_number(min(values))} to {_number(max(values))})"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
