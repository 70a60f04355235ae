"""Rounds into a table: medians with their spread, ours beside the goals and the peers. No I/O."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_MOST_BY_OTHERS = 0.15

Round = Mapping[str, Any]

_FIGURES: Sequence[tuple[str, Callable[[Round], float]]] = (
    ("no-ops/s", lambda r: r["noops"]["per_s"]),
    ("100,000 no-ops/s", lambda r: r["many_noops"]["per_s"]),
    ("CPU us/no-op", lambda r: r["noops"]["cpu_us"]),
    ("hello p50 ms", lambda r: r["hello"]["p50_ms"]),
    ("hello p99 ms", lambda r: r["hello"]["p99_ms"]),
    ("1 ms naps/s", lambda r: r["naps"]["per_s"]),
    ("1 MB p50 ms", lambda r: r["echo_1mb"]["p50_ms"]),
    ("10 MB p50 ms", lambda r: r["echo_10mb"]["p50_ms"]),
    ("first result s", lambda r: r["start_to_first_result_s"]),
    ("MiB/worker", lambda r: r["memory_per_worker_mib"]),
)

_GOALS: Sequence[tuple[str, float]] = (  # a figure, and what it should reach: at least for rates, at most for the rest
    ("no-ops/s", 40_000),
    ("100,000 no-ops/s", 40_000),
    ("hello p50 ms", 0.4),
    ("hello p99 ms", 1.0),
    ("1 ms naps/s", 3300),
    ("1 MB p50 ms", 4.0),
    ("10 MB p50 ms", 60.0),
    ("first result s", 0.5),
)

_RATIOS: Sequence[tuple[str, float]] = (("Parsl tuned", 12), ("Ray actors", 4), ("ProcessPoolExecutor", 2))


def calm(rounds: Sequence[Round]) -> Sequence[Round]:
    """The rounds in which nobody else took much of the machine; all of them if there is none."""
    return [r for r in rounds if r["noops"]["others"] <= _MOST_BY_OTHERS] or rounds


def as_table(report: Mapping[str, Any]) -> str:
    """Markdown: the machine, a row for each contestant, and our figures beside their goals."""
    machine = report["machine"]
    where = (
        f"Measured at {report['measured_at']} on {machine['cores']} cores of {machine['cpu']}, Linux "
        f"{machine['kernel']}, Python {machine['python']}; 4 workers, {report['tasks']:,} no-ops; median (min to max)."
    )
    lines = [
        where,
        "",
        "| contestant | rounds | " + " | ".join(name for name, _ in _FIGURES) + " |",
        "|---|--:|" + "--:|" * len(_FIGURES),
    ]
    for name, rounds in report["rounds"].items():
        if rounds:
            kept = calm(rounds)
            cells = [_cell(_values(kept, value)) for _, value in _FIGURES]
            lines.append(f"| {name} | {len(kept)} of {len(rounds)} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", *goals(report["rounds"])]) + "\n"


def goals(rounds: Mapping[str, Sequence[Round]]) -> list[str]:
    """Ours next to what it should be."""
    if not rounds.get("farcall"):
        return []
    figures = dict(_FIGURES)
    lines = ["| goal | wanted | measured | reached |", "|---|--:|--:|---|"]
    for name, wanted in _GOALS:
        if not _values(rounds["farcall"], figures[name]):
            continue
        measured = _median(rounds["farcall"], figures[name])
        at_least = name.endswith("/s")
        reached = measured >= wanted if at_least else measured <= wanted
        sign = ">=" if at_least else "<="
        lines.append(f"| {name} | {sign} {wanted:,g} | {_number(measured)} | {'yes' if reached else '**no**'} |")
    ours = _median(rounds["farcall"], figures["no-ops/s"])
    for peer, wanted in _RATIOS:
        if rounds.get(peer):
            ratio = ours / _median(rounds[peer], figures["no-ops/s"])
            verdict = "yes" if ratio >= wanted else "**no**"
            lines.append(f"| no-ops/s, times {peer} | >= {wanted:g} x | {ratio:.1f} x | {verdict} |")
    return lines


def _median(rounds: Sequence[Round], value: Callable[[Round], float]) -> float:
    return statistics.median(_values(calm(rounds), value))


def _values(rounds: Sequence[Round], value: Callable[[Round], float]) -> list[float]:
    """A figure of each round that has it."""
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
