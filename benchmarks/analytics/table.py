"""Tables of the analytics benchmark."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Final

from benchmarks.report import GOAL_COLUMNS, Report, goal_row, heading, page, table

_SHAPED_ERROR: Final = 0.10
_UNSHAPED_ERROR: Final = 0.16
_LEAST_GAIN: Final = 4.0
_MOST_DUCKDB: Final = 2.0
_STRAGGLERS: Final = 1.3
_OVERLAP: Final = -0.23
_ELASTIC: Final = -0.59
_LINEAR: Final = 0.98
_PARALLEL: Final = 3.0
_DIRECT: Final = 4.7
_DIRECT_DOLLARS: Final = 0.55


def as_tables(report: Report) -> str:
    """The goals, the sorts on shaped storages and on this machine, the paper's sizes, and the sort beside peers."""
    shaped, seconds = report["shaped"], report["peers"]["seconds"]
    points, unshaped = shaped["points"], report["unshaped"]["points"]
    return page(
        heading(report, f"{shaped['workers']} workers on shaped storages, 2 without shape and beside peers"),
        table(GOAL_COLUMNS, _goals(report)),
        _setting(shaped["shapes"]),
        table(
            ("sort", "measured s", "predicted s", "difference", "dollars", "predicted", "difference"),
            map(_point, points),
        ),
        "Sorts on the file system in the memory of this machine, by two workers:",
        table(("sort", "measured s", "predicted s", "difference"), map(_unshaped, unshaped)),
        "Rounds of a hybrid exchange, by the part of the data for which there is memory:",
        table(
            ("memory", "s"), ((f"{each['part']:.1%}", f"{_median(each['seconds']):.2f}") for each in _rounds(report))
        ),
        "CloudSorts of the Locus paper by the model, 3,000 workers and 5 TB of memory; the cheapest plan of today:",
        table(
            ("size", "printed s", "model s", "printed $", "model $", "today", "s", "$ for a TB"),
            map(_paper, report["paper"]["sorts"]),
        ),
        "More workers, by the model (section 6 of the paper):",
        table(("sort", "method", "workers", "s", "refused"), map(_wider, report["paper"]["wider"])),
        f"A sort of {report['peers']['records']:,} records of 100 bytes, from Parquet to Parquet:",
        table(("by", "s: median (min to max)", "to DuckDB"), _peers(seconds)),
    )


def errors(points: Sequence[Mapping[str, Any]]) -> list[float]:
    """By how much each prediction differs, as a part of what was measured."""
    return [abs(each["predicted_s"] - _measured(each)) / _measured(each) for each in points]


def _goals(report: Report) -> list[Sequence[str]]:
    points, unshaped = report["shaped"]["points"], report["unshaped"]["points"]
    seconds, direct = report["peers"]["seconds"], report["direct"]
    own = report["experiments"]
    gains = {key: _gain(points, *key) for key in sorted({(each["size"], each["parts"]) for each in points})}
    best = max(gains, key=gains.__getitem__)
    grown = {parts: gain for (size, parts), gain in gains.items() if size == best[0]}
    regrets = [_regret(points, *key) for key in gains] + [
        _regret_of([each for each in points if each["size"] == size]) for size in sorted({size for size, _ in gains})
    ]
    fastest = min(statistics.median(times) for name, times in seconds.items() if name.startswith("farcall"))
    dollars = [abs(each["predicted_dollars"] / _median(each["dollars"]) - 1) for each in points]
    inside = sum(each["low_s"] <= _measured(each) <= each["high_s"] for each in points)
    straggler = _median(own["stragglers"]["one"]) / _median(own["stragglers"]["none"])
    alone = _median(own["stragglers"]["one, no copies"]) / _median(own["stragglers"]["none"])
    overlap = _median(own["overlap"]["at the same time"]) / _median(own["overlap"]["apart"]) - 1
    rounds = _median(own["pipelined"]["at the same time"]) / _median(own["pipelined"]["one after the other"]) - 1
    few, many = own["parallel"].values()
    ratio = min(direct["times_as_fast"].values())
    cost = _median(direct["dollars"]["direct"]) / min(
        _median(each) for name, each in direct["dollars"].items() if name != "direct"
    )
    elastic = {each["query"]: _elastic(each) for each in own["elastic"]}
    linear = _r_squared([(1 / each["part"], _median(each["seconds"])) for each in own["rounds"]])
    return [
        _most(f"model: mean difference of {len(points)} sorts, shaped", statistics.mean(errors(points)), _SHAPED_ERROR),
        _most(f"the same, {len(unshaped)} sorts without shape", statistics.mean(errors(unshaped)), _UNSHAPED_ERROR),
        (
            "shaped, of the seconds behind the start of the workers",
            f"{statistics.mean(_without_start(points, report['shaped']['calibrated']['start_s'])):.1%}",
            "",
            "",
        ),
        _most("shaped, dollars", statistics.mean(dollars), _SHAPED_ERROR),
        ("sorts within the interval of 90 %", f"{inside} of {len(points)}", "", ""),
        goal_row(
            "regret of the chosen method, and of method and tasks: median (most)",
            f"{statistics.median(regrets):.1%} ({max(regrets):.1%})",
            "≤ 5 % (each ≤ 10 %)",
            statistics.median(regrets) <= 0.05 and max(regrets) <= 0.1,
        ),
        goal_row(
            f"slow to the method that the model chooses, {best[0] / 1e6:.0f} MB by tasks: {', '.join(map(str, grown))}",
            ", ".join(f"{each:.1f} x" for each in grown.values()),
            f"≥ {_LEAST_GAIN:.0f} x, growing",
            gains[best] >= _LEAST_GAIN and sorted(grown.values()) == list(grown.values()),
        ),
        goal_row(
            f"direct exchange, {direct['parts']} partitions: times as fast as the faster one through the object store",
            f"{ratio:.1f} x",
            f"≥ {_DIRECT} x",
            ratio >= _DIRECT,
        ),
        _most("the same, dollars to the cheaper one", cost, _DIRECT_DOLLARS),
        goal_row("hybrid: seconds by 1/r, R²", f"{linear:.3f}", f"≥ {_LINEAR}", linear >= _LINEAR),
        goal_row(
            "sort to DuckDB",
            f"{fastest / _median(seconds['DuckDB']):.2f} x",
            f"≤ {_MOST_DUCKDB:.0f} x",
            fastest <= _MOST_DUCKDB * _median(seconds["DuckDB"]),
        ),
        goal_row(
            "seconds of workers, elastic stages to a pool: " + ", ".join(f"Q{number}" for number in elastic),
            ", ".join(f"{each:+.0%}" for each in elastic.values()),
            f"{_ELASTIC:.0%} for the better one",
            min(elastic.values()) <= _ELASTIC,
        ),
        ("rounds of a hybrid exchange at the same time, to one after the other", f"{rounds:+.0%}", "", ""),
        goal_row("reading and writing while computing", f"{overlap:+.0%}", f"{_OVERLAP:.0%}", overlap <= _OVERLAP),
        goal_row(
            f"one worker with an eighth of the bandwidth (without copies: {alone:.2f} x)",
            f"{straggler:.2f} x",
            f"≤ {_STRAGGLERS} x",
            straggler <= _STRAGGLERS,
        ),
        goal_row(
            "four times the workers, small sort",
            f"{_median(few) / _median(many):.2f} x",
            f"≥ {_PARALLEL:.0f} x",
            _median(few) / _median(many) >= _PARALLEL,
        ),
    ]


def _without_start(points: Sequence[Mapping[str, Any]], start_s: float) -> list[float]:
    """The same differences, as parts of the seconds behind the start of the workers."""
    return [
        error * _measured(each) / (_measured(each) - start_s)
        for each, error in zip(points, errors(points), strict=True)
    ]


def _most(name: str, value: float, goal: float) -> Sequence[str]:
    return goal_row(name, f"{value:.1%}", f"≤ {goal:.0%}", value <= goal)


def _elastic(query: Mapping[str, Any]) -> float:
    """How many more seconds of workers stages take that start their own, than a pool as wide as the widest one."""
    parts = []
    for run in query["runs"]:
        own = run["busy_s"] + run["starts"] * query["start_s"]
        pool = run["widest"] * (run["seconds"] + query["start_s"])
        parts.append(own / pool - 1)
    return _median(parts)


def _r_squared(points: Sequence[tuple[float, float]]) -> float:
    return float(statistics.correlation(*zip(*points, strict=True))) ** 2


def _rounds(report: Report) -> Sequence[Mapping[str, Any]]:
    found: Sequence[Mapping[str, Any]] = report["experiments"]["rounds"]
    return found


def _median(values: Sequence[float]) -> float:
    return statistics.median(values)


def _of(points: Sequence[Mapping[str, Any]], size: float, parts: int) -> list[Mapping[str, Any]]:
    return [each for each in points if (each["size"], each["parts"]) == (size, parts)]


def _chosen(points: Sequence[Mapping[str, Any]]) -> float:
    """What was measured of the method that the model predicts to be the fastest."""
    return _measured(min(points, key=lambda each: each["predicted_s"]))


def _gain(points: Sequence[Mapping[str, Any]], size: float, parts: int) -> float:
    own = _of(points, size, parts)
    return _measured(next(each for each in own if each["method"] == "slow")) / _chosen(own)


def _regret(points: Sequence[Mapping[str, Any]], size: float, parts: int) -> float:
    return _regret_of(_of(points, size, parts))


def _regret_of(points: Sequence[Mapping[str, Any]]) -> float:
    return _chosen(points) / min(map(_measured, points)) - 1


def _measured(point: Mapping[str, Any]) -> float:
    times: list[float] = point["measured_s"]
    return statistics.median(times)


def _name(size: float, parts: int) -> str:
    return f"{size / 1e6:.0f} MB, {parts} tasks"


def _setting(shapes: Mapping[str, Mapping[str, float]]) -> str:
    def limits(shape: Mapping[str, float]) -> str:
        return ", ".join(f"{name} {value:g}" for name, value in shape.items() if value not in (0.0, 1.0, float("inf")))

    return f"Limits of the object store: {limits(shapes['slow'])}; of the memory: {limits(shapes['fast'])}."


def _point(point: Mapping[str, Any]) -> Sequence[str]:
    dollars, expected = _median(point["dollars"]), point["predicted_dollars"]
    return (
        f"{_name(point['size'], point['parts'])}, {point['method']}",
        *_pair(point),
        f"{dollars:.5f}",
        f"{expected:.5f}",
        f"{expected / dollars - 1:+.0%}",
    )


def _unshaped(point: Mapping[str, Any]) -> Sequence[str]:
    return (_name(point["size"], point["parts"]), *_pair(point))


def _pair(point: Mapping[str, Any]) -> Sequence[str]:
    measured, predicted = _measured(point), point["predicted_s"]
    return f"{measured:.2f}", f"{predicted:.2f}", f"{predicted / measured - 1:+.0%}"


def _paper(row: Mapping[str, Any]) -> Sequence[str]:
    return (
        f"{row['size'] / 1e12:.0f} TB",
        f"{row['printed_s']:,.0f}",
        f"{row['then_s']:,.0f} ({row['then']})",
        f"{row['printed_dollars']:g}",
        f"{row['then_dollars']:,.1f}",
        row["now"],
        f"{row['now_s']:,.0f}",
        f"{row['now_dollars_per_tb']:.2f}",
    )


def _wider(row: Mapping[str, Any]) -> Sequence[str]:
    few, many = row["workers"]
    before_s, after_s = row["seconds"]
    return (
        f"{row['size'] / 1e9:.0f} GB",
        row["method"],
        f"{few} to {many}",
        f"{before_s:.1f} to {after_s:.1f}",
        row["refused"] or "no",
    )


def _peers(seconds: Mapping[str, Sequence[float]]) -> list[Sequence[str]]:
    duckdb = statistics.median(seconds["DuckDB"])
    return [
        (
            name,
            f"{statistics.median(times):.2f} ({min(times):.2f} to {max(times):.2f})",
            f"{statistics.median(times) / duckdb:.2f} x",
        )
        for name, times in seconds.items()
    ]
