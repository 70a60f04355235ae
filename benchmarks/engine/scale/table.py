"""Tables of the scale benchmark: medians for each number of managers, and goals. No I/O."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Final

from benchmarks.report import GOAL_COLUMNS, Report, goal_row, heading, page, table

_MOST_BY_OTHERS: Final = 0.15
_TASKS_PER_S: Final = 20_000
_MEMORY_MIB: Final = 2048
_SPREAD: Final = 0.2

_COLUMNS: Final = (
    "managers",
    "workers",
    "rounds",
    "tasks/s",
    "agent, us/task (max)",
    "process, us/task",
    "idle, % of a core",
    "all connected, s",
    "peak MiB",
)

Round = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Point:
    """One number of managers: medians of the rounds in which other processes used little of the machine. CPU time per
    task is the lowest of all rounds, because other processes can only add to it (caches, shared cores).

    ``agent_us``: of the agent's thread. ``process_us``: of all threads of its process, with submitter and sockets.
    ``idle_share``: share of a core for the managers' heartbeats alone.
    """

    managers: int
    rounds: int
    kept: int
    per_s: float
    agent_us: float
    agent_us_most: float
    process_us: float
    idle_share: float
    ready_s: float
    peak_mib: float


def points(rounds: Sequence[Round]) -> list[Point]:
    """The points in ascending order. A round disturbed by other processes counts only if all were disturbed."""
    by_managers: dict[int, list[Round]] = {}
    for each in rounds:
        by_managers.setdefault(each["managers"], []).append(each)
    return [_point(managers, by_managers[managers]) for managers in sorted(by_managers)]


def as_tables(report: Report) -> str:
    """Markdown: the machine, a row for each number of managers, the goals and the ceilings."""
    rows = [
        [
            f"{p.managers:,}",
            f"{p.managers * report['slots']:,}",
            f"{p.kept} of {p.rounds}",
            f"{p.per_s:,.0f}",
            f"{p.agent_us:.1f} ({p.agent_us_most:.1f})",
            f"{p.process_us:.1f}",
            f"{p.idle_share * 100:.1f}",
            f"{p.ready_s:.1f}",
            f"{p.peak_mib:,.0f}",
        ]
        for p in points(report["rounds"])
    ]
    return page(
        heading(
            report,
            "agent, submitter and simulated managers share the cores",
            f"{report['tasks']:,} no-ops a round, at most {report['window']:,} of them unfinished",
            "medians",
        ),
        table(_COLUMNS, rows),
        table(GOAL_COLUMNS, goals(report)),
        _ceilings(report["all"]),
    )


def goals(report: Report) -> list[Sequence[str]]:
    """The rows of the goals."""
    swept, whole, rows = points(report["rounds"]), report["all"], []
    if whole is not None:
        name = f"{whole['tasks']:,} no-ops on {whole['workers']:,} workers"
        per_s, peak_mib = whole["per_s"], whole["peak_mib"]
        rows.append(goal_row(f"{name}, tasks/s", f"{per_s:,.0f}", f">= {_TASKS_PER_S:,}", per_s >= _TASKS_PER_S))
        rows.append(
            goal_row(f"{name}, agent's MiB", f"{peak_mib:,.0f}", f"<= {_MEMORY_MIB:,}", peak_mib <= _MEMORY_MIB)
        )
    if len(swept) > 1:
        first, *others = swept
        off = max((p.agent_us / first.agent_us - 1 for p in others), key=abs)
        name = f"agent's CPU time per task, {first.managers:,} to {others[-1].managers:,} managers, largest deviation"
        rows.append(goal_row(name, f"{off:+.0%}", f"+-{_SPREAD:.0%}", abs(off) <= _SPREAD))
    return rows


def _ceilings(whole: Round | None) -> str:
    if whole is None:
        return ""
    return (
        f"At {whole['per_s']:,.0f} tasks/s all {whole['workers']:,} workers are busy with tasks of "
        f"{whole['workers'] / whole['per_s']:.1f} s or longer. The agent's thread, at {whole['agent_us']:.1f} us a "
        f"task, would be full at {1e6 / whole['agent_us']:,.0f} tasks/s."
    )


def _point(managers: int, rounds: Sequence[Round]) -> Point:
    kept = [r for r in rounds if r["others"] <= _MOST_BY_OTHERS] or rounds
    return Point(
        managers,
        len(rounds),
        len(kept),
        _median(kept, "per_s"),
        min(r["agent_us"] for r in rounds),
        max(r["agent_us"] for r in rounds),
        min(r["process_us"] for r in rounds),
        _median(kept, "idle_share"),
        _median(kept, "ready_s"),
        _median(kept, "peak_mib"),
    )


def _median(rounds: Sequence[Round], name: str) -> float:
    return float(statistics.median(r[name] for r in rounds))
