"""Tables of the analytics benchmark."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Final

from benchmarks.report import GOAL_COLUMNS, Report, goal_row, heading, page, table

_MODEL_ERROR: Final = 0.10
_LEAST_GAIN: Final = 4.0
_MOST_DUCKDB: Final = 2.0


def as_tables(report: Report) -> str:
    """The goals, the sorts on shaped storages, and the sort beside peers."""
    points, seconds = report["shaped"]["points"], report["peers"]["seconds"]
    return page(
        heading(report, f"{report['shaped']['workers']} workers on shaped storages, 2 beside peers"),
        table(GOAL_COLUMNS, _goals(points, seconds)),
        _setting(report["shaped"]["shapes"]),
        table(("sort", "measured s", "predicted s", "difference"), map(_point, points)),
        f"A sort of {report['peers']['records']:,} records of 100 bytes, from Parquet to Parquet:",
        table(("by", "s: median (min to max)", "to DuckDB"), _peers(seconds)),
    )


def errors(points: Sequence[Mapping[str, Any]]) -> list[float]:
    """By how much each prediction differs, as a part of what was measured."""
    return [abs(each["predicted_s"] - _measured(each)) / _measured(each) for each in points]


def _goals(points: Sequence[Mapping[str, Any]], seconds: Mapping[str, Sequence[float]]) -> list[Sequence[str]]:
    mean = statistics.mean(errors(points))
    gains = {key: _gain(points, *key) for key in sorted({(each["size"], each["parts"]) for each in points})}
    best = max(gains, key=gains.__getitem__)
    regrets = [_regret(points, *key) for key in gains]
    own = min(statistics.median(times) for name, times in seconds.items() if name.startswith("farcall"))
    ratio = own / statistics.median(seconds["DuckDB"])
    return [
        goal_row(
            f"model: mean difference of {len(points)} sorts",
            f"{mean:.1%}",
            f"≤ {_MODEL_ERROR:.0%}",
            mean <= _MODEL_ERROR,
        ),
        goal_row(
            "regret of the method that the model chooses: median (most)",
            f"{statistics.median(regrets):.1%} ({max(regrets):.1%})",
            "≤ 5 % (each ≤ 10 %)",
            statistics.median(regrets) <= 0.05 and max(regrets) <= 0.1,
        ),
        goal_row(
            f"slow to the method that the model chooses, {_name(*best)}",
            f"{gains[best]:.1f} x",
            f"≥ {_LEAST_GAIN:.0f} x",
            gains[best] >= _LEAST_GAIN,
        ),
        goal_row("sort to DuckDB", f"{ratio:.2f} x", f"≤ {_MOST_DUCKDB:.0f} x", ratio <= _MOST_DUCKDB),
    ]


def _of(points: Sequence[Mapping[str, Any]], size: float, parts: int) -> list[Mapping[str, Any]]:
    return [each for each in points if (each["size"], each["parts"]) == (size, parts)]


def _chosen(points: Sequence[Mapping[str, Any]]) -> float:
    """What was measured of the method that the model predicts to be the fastest."""
    return _measured(min(points, key=lambda each: each["predicted_s"]))


def _gain(points: Sequence[Mapping[str, Any]], size: float, parts: int) -> float:
    own = _of(points, size, parts)
    return _measured(next(each for each in own if each["method"] == "slow")) / _chosen(own)


def _regret(points: Sequence[Mapping[str, Any]], size: float, parts: int) -> float:
    own = _of(points, size, parts)
    return _chosen(own) / min(map(_measured, own)) - 1


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
    measured, predicted = _measured(point), point["predicted_s"]
    return (
        f"{_name(point['size'], point['parts'])}, {point['method']}",
        f"{measured:.2f}",
        f"{predicted:.2f}",
        f"{predicted / measured - 1:+.0%}",
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
