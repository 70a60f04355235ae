"""Communication of tasks: patterns, shuffles and steering on each medium, as in the funcX paper (2022, section 7.3)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from benchmarks.data import patterns, shuffle, steering
from benchmarks.data.media import DIRECTORY, MEDIA, MEMORY, READ_S, SHAPED, VALKEY, WRITE_S, open_media
from benchmarks.data.plot import draw as draw
from benchmarks.report import GOAL_COLUMNS, Figure, Report, goal_row, heading, page, spread, table
from farcall_endpoint import Engine

Samples = dict[str, float]

_WORKERS: Final = 4
_STORES: Final = (DIRECTORY, VALKEY, MEMORY)
_SHUFFLE: Final = (SHAPED, VALKEY, MEMORY)
_PAPER_MS: Final = dict(zip(steering.STAGES, (7.15, 0.70, 18.04, 0.11), strict=True))
_STEERING_GOALS_MS: Final = {VALKEY: (2, 0.5, 2, 0.11), MEMORY: (0.5, 0.1, 0.5, 0.1)}
_SHUFFLE_GOAL: Final = 3


def measure(*, quick: bool, full: bool) -> Samples:  # noqa: ARG001 - all of it in every round
    """One round."""
    samples: Samples = {}
    with open_media() as media, Engine(max_workers=_WORKERS) as engine:
        engine.wait_ready()
        samples |= dict(patterns.measure(engine, media, times=1 if quick else 5))
        stores = {name: media[name] for name in _STORES}
        samples |= dict(steering.measure(engine, stores, tasks=16 if quick else steering.TASKS))
        chosen = {name: media[name] for name in _SHUFFLE}
        if quick:
            del chosen[SHAPED]
        size = shuffle.QUICK_BYTES if quick else shuffle.BYTES
        samples |= dict(shuffle.measure(engine, chosen, total_bytes=size))
    return samples


def as_table(report: Report) -> str:
    """Goals, and medians of the rounds by pattern, application and stage."""
    rounds: Sequence[Samples] = report["rounds"]
    return page(
        heading(
            report,
            f"{_WORKERS} workers; medians of the rounds (min to max)",
            f"the file system of the paper is a directory in which a write takes {1000 * WRITE_S:.1f} ms and a read "
            f"{1000 * READ_S:.0f} ms at least",
        ),
        table(GOAL_COLUMNS, [goal_row(each.name, each.shown(), each.goal, each.reached) for each in _goals(rounds)]),
        "**From the first write to the last read; ms**",
        table(["pattern, size", *MEDIA], _pattern_rows(rounds)),
        f"**{shuffle.BYTES // 10**6} MB, {shuffle.TASKS} mappers and {shuffle.TASKS} reducers; seconds of the whole "
        "run, and of all writes and all reads together**",
        table(
            ["application", *_SHUFFLE],
            [
                [f"{application}, {title}", *(_cell(rounds, f"{application}/{name}/{key}") for name in _SHUFFLE)]
                for application in shuffle.APPLICATIONS
                for key, title in (("whole_s", "whole"), ("write_s", "writes"), ("read_s", "reads"))
            ],
        ),
        f"**Steering: {steering.TASKS:,} tasks of 1 MB in and out; ms**",
        table(
            ["stage", *_STORES, "Redis in the paper"],
            [
                [stage, *(_cell(rounds, f"{stage}/{name}") for name in _STORES), f"{_PAPER_MS[stage]:g}"]
                for stage in steering.STAGES
            ],
        ),
    )


def _pattern_rows(rounds: Sequence[Samples]) -> Iterable[Sequence[str]]:
    for pattern in patterns.PATTERNS:
        for size in patterns.SIZES:
            cells = [_cell(rounds, f"{pattern}/{size}/{name}") for name in MEDIA]
            if set(cells) != {"-"}:
                yield [f"{pattern}, {size}", *cells]


def _goals(rounds: Sequence[Samples]) -> Iterable[Figure]:
    for application in shuffle.APPLICATIONS:
        slow = _median(rounds, [f"{application}/{SHAPED}/{key}" for key in ("write_s", "read_s")])
        for name in (VALKEY, MEMORY):
            quick = _median(rounds, [f"{application}/{name}/{key}" for key in ("write_s", "read_s")])
            if slow is not None and quick:
                ratio = slow / quick
                title = f"{application}, shuffle: file system of the paper to {name}"
                yield Figure(title, ratio, "x", f"≥ {_SHUFFLE_GOAL}", ratio >= _SHUFFLE_GOAL)
    for name, limits in _STEERING_GOALS_MS.items():
        for stage, limit in zip(steering.STAGES, limits, strict=True):
            value = _median(rounds, [f"{stage}/{name}"])
            if value is not None:
                yield Figure(f"steering, {stage}, {name}, p50", value, "ms", f"≤ {limit:g}", value <= limit)


def _median(rounds: Sequence[Samples], keys: Sequence[str]) -> float | None:
    """The median of the sums of some figures."""
    found = [sum(each[key] for key in keys) for each in rounds if all(key in each for key in keys)]
    return spread(found)["median"] if found else None


def _cell(rounds: Sequence[Samples], key: str) -> str:
    values = [each[key] for each in rounds if key in each]
    if not values:
        return "-"
    found = spread(values)
    return f"{found['median']:,.3g} ({found['min']:,.3g} to {found['max']:,.3g})"
