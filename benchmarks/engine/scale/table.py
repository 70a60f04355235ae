"""The rounds of a sweep into a table: medians for each number of managers, and figures beside their goals. No I/O."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Final

_MOST_BY_OTHERS: Final = 0.15
_TASKS_PER_S: Final = 20_000
_MEMORY_MIB: Final = 2048
_SPREAD: Final = 0.2

_COLUMNS: Final = (
    "managers",
    "workers",
    "rounds",
    "tasks/s",
    "agent, us/task (at most)",
    "process, us/task",
    "idle, % of a core",
    "all there, s",
    "peak MiB",
)

Round = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Point:
    """The rounds with so many managers: medians of those in which others took little of the machine. CPU for each task
    is the least of all rounds, because others can only add to it (caches, shared cores).

    ``agent_us``: of the agent's thread. ``process_us``: of all threads of its process, the submitter's and the sockets'
    among them. ``idle_share``: of a core, with nothing to do but to hear that the managers live.
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
    """One for each number of managers, in their order. A round with noisy neighbours counts only if all had them."""
    by_managers: dict[int, list[Round]] = {}
    for each in rounds:
        by_managers.setdefault(each["managers"], []).append(each)
    return [_point(managers, by_managers[managers]) for managers in sorted(by_managers)]


def as_table(report: Mapping[str, Any]) -> str:
    """Markdown: the machine, a row for each number of managers, and the goals."""
    machine, slots = report["machine"], report["slots"]
    where = (
        f"Measured at {report['measured_at']} on {machine['cores']} cores of {machine['cpu']}, Linux "
        f"{machine['kernel']}, Python {machine['python']}, which the agent, the submitter and the simulated managers "
        f"share; {report['tasks']:,} no-ops a round, at most {report['window']:,} of them open; medians."
    )
    rows = [
        _row(
            f"{p.managers:,}",
            f"{p.managers * slots:,}",
            f"{p.kept} of {p.rounds}",
            f"{p.per_s:,.0f}",
            f"{p.agent_us:.1f} ({p.agent_us_most:.1f})",
            f"{p.process_us:.1f}",
            f"{p.idle_share * 100:.1f}",
            f"{p.ready_s:.1f}",
            f"{p.peak_mib:,.0f}",
        )
        for p in points(report["rounds"])
    ]
    return "\n".join([where, "", _row(*_COLUMNS), "|" + "--:|" * len(_COLUMNS), *rows, "", *goals(report)]) + "\n"


def goals(report: Mapping[str, Any]) -> list[str]:
    """Markdown: what was wanted, and the ceilings that follow from what was measured."""
    swept, whole = points(report["rounds"]), report["all"]
    lines = ["| goal | wanted | measured | reached |", "|---|--:|--:|---|"]
    if whole is not None:
        name = f"{whole['tasks']:,} no-ops on {whole['workers']:,} workers"
        per_s, peak_mib = whole["per_s"], whole["peak_mib"]
        lines.append(_goal(f"{name}, tasks/s", f">= {_TASKS_PER_S:,}", f"{per_s:,.0f}", per_s >= _TASKS_PER_S))
        lines.append(_goal(f"{name}, agent's MiB", f"<= {_MEMORY_MIB:,}", f"{peak_mib:,.0f}", peak_mib <= _MEMORY_MIB))
    if len(swept) > 1:
        first, *others = swept
        off = max((p.agent_us / first.agent_us - 1 for p in others), key=abs)
        name = f"agent's CPU for a task, {first.managers:,} to {others[-1].managers:,} managers, furthest off"
        lines.append(_goal(name, f"+-{_SPREAD:.0%}", f"{off:+.0%}", abs(off) <= _SPREAD))
    if whole is not None:
        lines += ["", _ceilings(whole)]
    return lines


def _ceilings(whole: Round) -> str:
    return (
        f"At {whole['per_s']:,.0f} tasks/s all {whole['workers']:,} workers are busy with tasks of "
        f"{whole['workers'] / whole['per_s']:.1f} s or longer. The agent's thread, at {whole['agent_us']:.1f} us a "
        f"task, would be full at {1e6 / whole['agent_us']:,.0f} tasks/s."
    )


def _goal(name: str, wanted: str, measured: str, reached: bool) -> str:
    return _row(name, wanted, measured, "yes" if reached else "**no**")


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


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
