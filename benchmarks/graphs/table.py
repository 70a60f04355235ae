"""Tables of the graph benchmark: medians of rounds with their spread, and goals. No I/O."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Final

from benchmarks.graphs.measuring import FAN_OUT, NODES, SIZES, STAGES, WIDTH
from benchmarks.report import GOAL_COLUMNS, Figure, Report, goal_row, heading, page, table

OURS: Final = "farcall"
CLOUD: Final = "farcall, cloud"
MANAGERS: Final = "farcall, two managers"
EDGE_ARMS: Final[Sequence[tuple[str, str, str]]] = (
    (OURS, "in place", "between two workers, written in place"),
    (OURS, "returned", "between two workers, returned"),
    (OURS, "one worker", "inside of one worker, returned"),
    ("Ray", "Ray tasks", "Ray tasks"),
)
"""System, arm and title."""
AGAIN_ARMS: Final[Sequence[tuple[str, str, str]]] = (
    (OURS, "spread", "between two workers"),
    (OURS, "as placed", "as the manager places them"),
    ("Ray", "Ray Compiled Graph", "Ray Compiled Graph"),
    ("Ray", "Ray tasks", "Ray tasks"),
    ("Dask", "Dask", "Dask"),
)
_EDGE_GOALS_US: Final = {"in place": (50, 60, 60, 400), "returned": (50, 80, 200, 2_500)}
_TITLES: Final = {
    "fan_out/edges_per_s": f"edges per second, fan-out of {FAN_OUT:,} and fan-in",
    "nested/calls_per_s": f"nested calls per second, {FAN_OUT:,} of one function",
    "managers/back_us": "value of 1 KB between two managers of one machine, by the agent, p50, us",
    "managers/fork_ms": "call that begins in a fork at another manager, p50, ms",
    "layers/node_us": f"{NODES:,} nodes in layers of {WIDTH}: us per node",
    "layers/manager_cpu_us": "CPU of the manager per node, us",
    "layers/worker_cpu_us": "CPU of the workers per node, us",
    "layers/client_cpu_us": "CPU of client and agent per node, us",
    "layers/scheduler_cpu_us": "CPU of Dask's client and scheduler per node, us",
    "alexa/run_us": "Alexa skill, 5 functions, us",
    "words/run_us": "word count, map and reduce, us",
    "cloud/graph/ms": "five calls through the cloud, one graph, ms",
    "cloud/one by one/ms": "five calls through the cloud, one by one, ms",
}

Rounds = Mapping[str, Sequence[Mapping[str, Any]]]


def values(rounds: Rounds, system: str, key: str) -> list[float]:
    """A figure in all rounds of a system that have it."""
    return [each["figures"][key] for each in rounds.get(system, ()) if key in each["figures"]]


def median(rounds: Rounds, system: str, key: str) -> float | None:
    """The median of rounds; None without any."""
    found = values(rounds, system, key)
    return statistics.median(found) if found else None


def as_tables(report: Report) -> str:
    """Markdown: goals, edges by size, repeated graphs, and the experiments side by side."""
    rounds: Rounds = report["rounds"]
    return page(
        heading(report, "two workers", "median of the rounds (min to max)"),
        table(GOAL_COLUMNS, [goal_row(each.name, each.shown(), each.goal, each.reached) for each in goals(rounds)]),
        "**One edge, from the return of a function to the beginning of the next, whose worker sleeps; us, p50 (min to"
        " max of the rounds) / first call**",
        table(
            ["edge", *SIZES],
            [[title, *(_edge(rounds, system, arm, size) for size in SIZES)] for system, arm, title in EDGE_ARMS],
        ),
        f"**A chain of {STAGES} again and again, 1 KB; us**",
        table(
            ["chain", "edge, p50", "edge, p90", f"run, divided by {STAGES + 1}"],
            [
                [
                    title,
                    *(_cell(rounds, system, f"again/{arm}/{unit}") for unit in ("edge_us", "edge_p90_us", "run_us")),
                ]
                for system, arm, title in AGAIN_ARMS
            ],
        ),
        _side_by_side(rounds),
        *_missing(rounds),
    )


def goals(rounds: Rounds) -> list[Figure]:
    """Our figures with their goals, and ratios to peers."""
    figures: list[Figure] = []

    def add(name: str, value: float | None, unit: str, limit: float, *, at_least: bool) -> None:
        if value is not None:
            reached = value >= limit if at_least else value <= limit
            figures.append(Figure(name, value, unit, f"{'≥' if at_least else '≤'} {limit:,g}", reached))

    def ratio(name: str, part: float | None, whole: float | None, least: float) -> None:
        add(name, part / whole if part and whole else None, "x", least, at_least=True)

    for arm, limits in _EDGE_GOALS_US.items():
        for size, limit in zip(SIZES, limits, strict=True):
            value = median(rounds, OURS, f"edge/{arm}/{size}/p50_us")
            add(f"edge between two workers, {arm}, {size}, p50", value, "us", limit, at_least=False)
    again = median(rounds, OURS, "again/spread/edge_us")
    add("the same graph again, an edge between two workers, 1 KB, p50", again, "us", 35, at_least=False)
    ratio("Ray Compiled Graph beside it", median(rounds, "Ray", "again/Ray Compiled Graph/edge_us"), again, 1)
    rate = median(rounds, OURS, "fan_out/edges_per_s")
    add(_TITLES["fan_out/edges_per_s"], rate, "1/s", 20_000, at_least=True)
    for name, key, least in (("Alexa skill", "alexa/run_us", 5.0), ("word count", "words/run_us", 3.7)):
        ratio(f"{name}, Flask to graph", median(rounds, "Flask", key), median(rounds, OURS, key), least)
    one_by_one, whole = (median(rounds, CLOUD, f"cloud/{name}/ms") for name in ("one by one", "graph"))
    ratio("five calls through the cloud, one by one to graph", one_by_one, whole, 4)
    for key, unit, limit in (("managers/back_us", "us", 400), ("managers/fork_ms", "ms", 15)):
        add(_TITLES[key], median(rounds, MANAGERS, key), unit, limit, at_least=False)
    add(_TITLES["layers/node_us"], median(rounds, OURS, "layers/node_us"), "us", 20, at_least=False)
    return figures


def _edge(rounds: Rounds, system: str, arm: str, size: str) -> str:
    first = median(rounds, system, f"edge/{arm}/{size}/first_us")
    return "-" if first is None else f"{_cell(rounds, system, f'edge/{arm}/{size}/p50_us')} / {_number(first)}"


def _side_by_side(rounds: Rounds) -> str:
    systems = list(rounds)
    rows = [[title, *(_cell(rounds, system, key) for system in systems)] for key, title in _TITLES.items()]
    return table(["experiment", *systems], rows)


def _missing(rounds: Rounds) -> list[str]:
    """Which experiments have no figures, and why."""
    reasons = {
        f"{system}, {name}": reason
        for system, several in rounds.items()
        for each in several
        for name, reason in each["missing"].items()
    }
    return [f"Not measured: {name} ({reason})." for name, reason in reasons.items()]


def _cell(rounds: Rounds, system: str, key: str) -> str:
    found = values(rounds, system, key)
    if not found:
        return "-"
    return f"{_number(statistics.median(found))} ({_number(min(found))} to {_number(max(found))})"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
