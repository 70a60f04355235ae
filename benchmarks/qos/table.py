"""Tables of the benchmark of latency targets: figures with their goals, and all policies side by side. No I/O."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from benchmarks.qos.experiments import (
    EXPERIMENTS,
    NONE,
    ORACLE,
    PI,
    RESERVED,
    THRESHOLD_DELTAS,
    Experiment,
    threshold_name,
)
from benchmarks.qos.figures import (
    QUANTILES,
    Interval,
    Repetition,
    Run,
    bootstrap,
    is_calm,
    mean_violations,
    paired,
    undisturbed,
    violation_part,
)
from benchmarks.report import GOAL_COLUMNS, Report, goal_row, heading, page, table

_MOST_VIOLATIONS: Final = -0.8
_MOST_FROM_ORACLE: Final = 0.05
_LEAST_AGAINST_THRESHOLD: Final = 3.0
_MOST_P99: Final = 0.05
_LEAST_BATCH: Final = 0.9
_LEAST_DENSITY: Final = 0.25
_MOST_CONTROLLER_PERCENT: Final = 1.0
_MOST_REACTION_S: Final = 3.0

Rows = list[Sequence[str]]


def as_tables(report: Report) -> str:
    """Markdown: goals, then the policies of each experiment."""
    kept = {
        experiment: undisturbed(repetitions)
        for experiment in EXPERIMENTS
        if (repetitions := report["experiments"].get(experiment.name))
    }
    counts = ", ".join(
        f"{experiment.name}: {sum(map(is_calm, repetitions))} of {len(repetitions)}"
        for experiment in EXPERIMENTS
        if (repetitions := report["experiments"].get(experiment.name))
    )
    return page(
        heading(report, f"{report['measured_s']:g} s a run", f"repetitions without disturbance: {counts}"),
        table(GOAL_COLUMNS, goals(kept, report)),
        "Differences are paired, with the median and its 95 % interval;"
        " other figures are medians of the repetitions. *By others*: the part of the CPUs that other processes used;"
        " *generator behind*: how late calls are made, p99.",
        table(
            [
                "experiment, function",
                "policy",
                "violations",
                "difference to none",
                *(f"p{each} ms" for each in QUANTILES),
            ],
            [row for experiment, repetitions in kept.items() for row in _latency_rows(experiment, repetitions)],
        ),
        table(
            [
                "experiment",
                "policy",
                "batch calls",
                "manager, % of a core",
                "utilisation",
                "by others",
                "generator behind, ms",
            ],
            [row for experiment, repetitions in kept.items() for row in _load_rows(experiment, repetitions)],
        ),
        _oracles(report["oracles"]),
    )


def goals(kept: Mapping[Experiment, Sequence[Repetition]], report: Report) -> Rows:
    """Figures of the policy ``pi`` with their goals."""
    rows: Rows = []
    for experiment, repetitions in kept.items():
        for each in experiment.classes:
            rows += _class_goals(f"{experiment.name}, {each.name}", each.name, repetitions)
        rows.append(_against_threshold(experiment.name, repetitions))
        if experiment.has_batch:
            rows += _batch_goals(experiment.name, repetitions)
    rows += _controller_goals(report["controller"])
    if report["reaction"]:
        rows += _reaction_goals(report["reaction"])
    return rows


def _class_goals(title: str, name: str, repetitions: Sequence[Repetition]) -> Rows:
    ours, theirs, best = (_violations(repetitions, policy, name) for policy in (PI, NONE, ORACLE))
    from_oracle = paired(repetitions, PI, ORACLE, lambda run: violation_part(run, name))
    p99 = paired(repetitions, PI, NONE, lambda run: run["classes"][name]["p99_ms"], is_relative=True)
    change = _ratio(ours, theirs) - 1
    is_near = from_oracle.median <= _MOST_FROM_ORACLE
    return [
        goal_row(
            f"{title}: violations, against none",
            f"{_percent(theirs)} → {_percent(ours)}: {_signed(change)}; oracle {_percent(best)}",
            f"≤ {_signed(_MOST_VIOLATIONS)}, or oracle + 5 points",
            change <= _MOST_VIOLATIONS or is_near,
        ),
        goal_row(f"{title}: violations, distance to the oracle", _points(from_oracle), "≤ 5 points", is_near),
        goal_row(
            f"{title}: p99, against none",
            _relative(p99),
            f"≤ {_signed(_MOST_P99)} (upper bound)",
            p99.upper <= _MOST_P99,
        ),
    ]


def _against_threshold(title: str, repetitions: Sequence[Repetition]) -> Sequence[str]:
    """The best threshold is the one with fewest violations, as a mean of the functions."""
    means = {
        policy: statistics.fmean(mean_violations(each[policy]) for each in repetitions)
        for policy in (PI, *map(threshold_name, THRESHOLD_DELTAS))
    }
    best = min(list(means)[1:], key=means.__getitem__)
    ratio = _ratio(means[best], means[PI])
    return goal_row(
        f"{title}: violations of the best threshold to ours",
        f"{_percent(means[best])} ({best.removeprefix('threshold, ')}) / {_percent(means[PI])} = {_times(ratio)}",
        f"≥ {_LEAST_AGAINST_THRESHOLD:g} x",
        ratio >= _LEAST_AGAINST_THRESHOLD,
    )


def _batch_goals(title: str, repetitions: Sequence[Repetition]) -> Rows:
    against_none = paired(repetitions, PI, NONE, _batch_calls, is_relative=True)
    density = paired(repetitions, PI, RESERVED, _batch_calls, is_relative=True)
    ours, theirs = (
        statistics.fmean(mean_violations(each[policy]) for each in repetitions) for policy in (PI, RESERVED)
    )
    return [
        goal_row(
            f"{title}: batch work, against none",
            _relative(against_none),
            f"≥ {_signed(_LEAST_BATCH - 1)}",
            against_none.median >= _LEAST_BATCH - 1,
        ),
        goal_row(
            f"{title}: batch work, against reserved cores",
            f"{_relative(density)}; violations {_percent(ours)}, reserved {_percent(theirs)}",
            f"≥ {_signed(_LEAST_DENSITY)}, no more violations",
            density.median >= _LEAST_DENSITY and ours <= theirs,
        ),
    ]


def _controller_goals(rounds: Sequence[Mapping[str, Any]]) -> Rows:
    if not rounds:
        return []
    cost = bootstrap([each[PI]["manager_percent"] - each[NONE]["manager_percent"] for each in rounds])
    rates = {policy: statistics.median(each[policy]["noops_per_s"] for each in rounds) for policy in (NONE, PI)}
    paced = statistics.median(each[PI]["paced_per_s"] for each in rounds)
    return [
        goal_row(
            f"controller at {paced:,.0f} calls/s, % of a core",
            f"{cost.median:.2f}{_bounds(cost, lambda each: f'{each:.2f}')}",
            f"< {_MOST_CONTROLLER_PERCENT:g}",
            cost.median < _MOST_CONTROLLER_PERCENT,
        ),
        goal_row("no-ops/s with a target, none → pi", f"{rates[NONE]:,.0f} → {rates[PI]:,.0f}"),
    ]


def _reaction_goals(reaction: Mapping[str, Any]) -> Rows:
    ours, theirs = (statistics.median(reaction[policy]["reactions_s"]) for policy in (PI, NONE))
    return [
        goal_row(
            "reaction to a doubled rate, s",
            f"{ours:.1f} (at most {max(reaction[PI]['reactions_s']):.1f}); none {theirs:.1f}",
            f"≤ {_MOST_REACTION_S:g}",
            ours <= _MOST_REACTION_S,
        )
    ]


def _latency_rows(experiment: Experiment, repetitions: Sequence[Repetition]) -> Rows:
    return [
        _latency_row(f"{experiment.name}, {each.name}", each.name, policy, repetitions)
        for each in experiment.classes
        for policy in repetitions[0]
    ]


def _latency_row(title: str, name: str, policy: str, repetitions: Sequence[Repetition]) -> Sequence[str]:
    difference = paired(repetitions, policy, NONE, lambda run: violation_part(run, name))
    found = [each[policy]["classes"][name] for each in repetitions]
    quantiles = [f"{statistics.median(each[f'p{percent}_ms'] for each in found):,.0f}" for percent in QUANTILES]
    shown = "" if policy == NONE else _points(difference)
    return [title, policy, _percent(_violations(repetitions, policy, name)), shown, *quantiles]


def _load_rows(experiment: Experiment, repetitions: Sequence[Repetition]) -> Rows:
    rows: Rows = []
    for policy in repetitions[0]:
        batch, manager, used, others, behind_ms = (
            statistics.median(run[policy][key] for run in repetitions)
            for key in ("batch_calls", "manager_percent", "utilisation", "others", "generator_p99_ms")
        )
        rows.append(
            [
                f"{experiment.name}: {experiment.title}",
                policy,
                f"{batch:,.1f}" if experiment.has_batch else "-",
                f"{manager:.2f}",
                _percent(used),
                _percent(others),
                f"{behind_ms:.1f}",
            ]
        )
    return rows


def _oracles(found: Mapping[str, Mapping[str, float]]) -> str:
    texts = [
        f"experiment {load}: " + ", ".join(f"{name} {weight:g}" for name, weight in weights.items())
        for load, weights in found.items()
    ]
    return f"Weights of the oracle: {'; '.join(texts)}." if texts else ""


def _violations(repetitions: Sequence[Repetition], policy: str, name: str) -> float:
    """The part of all calls of a function that violate its target."""
    found = [each[policy]["classes"][name] for each in repetitions]
    calls = sum(each["calls"] for each in found)
    return sum(each["violations"] for each in found) / calls if calls else 0.0


def _batch_calls(run: Run) -> float:
    return float(run["batch_calls"])


def _ratio(value: float, other: float) -> float:
    if other:
        return value / other
    return math.inf if value else 1.0


def _percent(part: float) -> str:
    return f"{100 * part:.1f} %"


def _signed(part: float) -> str:
    return "-" if math.isinf(part) else f"{100 * part:+.0f} %"


def _times(ratio: float) -> str:
    return "all" if math.isinf(ratio) else f"{ratio:.1f} x"


def _points(interval: Interval) -> str:
    return f"{100 * interval.median:+.1f} points{_bounds(interval, lambda each: f'{100 * each:+.1f}')}"


def _relative(interval: Interval) -> str:
    return f"{_signed(interval.median)}{_bounds(interval, _signed)}"


def _bounds(interval: Interval, shown: Callable[[float], str]) -> str:
    if interval.low is None or interval.high is None:
        return ""
    return f" ({shown(interval.low)} to {shown(interval.high)})"
