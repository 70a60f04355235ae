"""Forks: from the request to a function's first line, their memory, and one-shot workers."""

from __future__ import annotations

import contextlib
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.report import Figure
from benchmarks.warm_starts.images import make_image
from benchmarks.warm_starts.node import Sample, Times
from benchmarks.warm_starts.places import MeasuredNode, OwnPlace, Place, UserPlace, running_node, type_with_forks
from tests.support.container_user import ordinary_user

_MIB: Final = 2**20
_AT_ONCE: Final = 8
_WORKERS: Final = 16
_PACKAGES: Final = ("numpy", "pandas")
_FORKS: Final[dict[str, Any]] = {"preload": _PACKAGES, "fork": True}
_LEAST_FOR_P99: Final = 200
_GROWTH_BYTES: Final = 2**20


def measure(directory: Path, count: int) -> list[Figure]:
    """The figures of forks with NumPy and pandas in a container. One at a time they take turns, of root and of an
    ordinary user; and so do those at once."""
    place, image = OwnPlace(directory), make_image(_PACKAGES)
    with contextlib.ExitStack() as stack:
        user: Place = UserPlace(stack.enter_context(ordinary_user()))

        def node(where: Place, name: str, **options: Any) -> MeasuredNode:
            return stack.enter_context(running_node(where, name, type_with_forks(where), image, **options))

        fresh = node(place, "fresh", preload=_PACKAGES)
        after, in_advance, eight = (node(place, f"fork-{n}", **_FORKS, spares=n) for n in (0, 1, _AT_ONCE))
        user_after, user_in_advance = (node(user, f"fork-{n}", **_FORKS, spares=n) for n in (0, 1))
        single: dict[str, tuple[MeasuredNode, tuple[float, float]]] = {
            "fork begun after the request": (after, (7, 15)),
            "fork in advance": (in_advance, (1, 4)),
            "ordinary user, fork begun after the request": (user_after, (8, 17)),
            "ordinary user, fork in advance": (user_in_advance, (8, 17)),
        }
        at_once: dict[str, tuple[MeasuredNode, tuple[float, float]]] = {
            "fork begun after the request": (after, (7, 15)),
            "fork in advance": (eight, (1, 4)),
        }
        values: dict[str, list[float]] = {name: [] for name in single}
        fresh_values: list[float] = []
        for each in (fresh, *(each for each, _ in (*single.values(), *at_once.values()))):
            each.starts("first_line")  # the first one reads files
        for number in range(count):
            if number % 20 == 0:
                fresh_values += first_lines(fresh.starts("first_line"))
            for name, (each, _) in single.items():
                values[name] += first_lines(each.starts("first_line"))
        rounds: dict[str, list[list[float]]] = {name: [] for name in at_once}
        for _ in range(-(-count // _AT_ONCE)):
            for name, (each, _) in at_once.items():
                rounds[name].append(first_lines(each.starts("first_line", _AT_ONCE)))
        figures = quantiles("fresh container", fresh_values)
        for name, (_, goals) in single.items():
            figures += quantiles(name, values[name], *goals)
        for name, (_, goals) in at_once.items():
            title = f"{name}, {_AT_ONCE} at once"
            figures += quantiles(title, [value for each in rounds[name] for value in each], *goals)
            interval = statistics.median(max(each) / _AT_ONCE for each in rounds[name])
            figures.append(Figure(f"{title}: the last one's time divided by {_AT_ONCE}, p50", interval, "ms"))
        figures += memory(after)
        figures.append(rate("one-shot tasks, NumPy and pandas in a container", in_advance, "use_pandas", count * 2, 80))
    with running_node(place, "standard-library", "", fork=True, spares=1) as own:
        figures.append(rate("one-shot tasks, standard library, no container", own, "nothing", count * 5, 200))
    return figures


def first_lines(times: Sequence[Times]) -> list[float]:
    """Milliseconds from the request to the first line of :func:`~benchmarks.warm_starts.functions.first_line`."""
    return [1000 * (each.result - each.requested_at) for each in times]


def quantiles(label: str, values: Sequence[float], median_ms: float = 0, tail_ms: float = 0) -> list[Figure]:
    """Median, and the 99th percentile of enough values, else the 90th, which has no goal."""
    share, goal = (0.99, tail_ms) if len(values) >= _LEAST_FOR_P99 else (0.9, 0.0)
    return [
        Figure(
            f"{label}, p{100 * each:.0f} (n={len(values)})",
            value := quantile(values, each),
            "ms",
            f"≤ {limit:g}" if limit else "",
            value <= limit if limit else None,
        )
        for each, limit in ((0.5, median_ms), (share, goal))
    ]


def quantile(values: Sequence[float], share: float) -> float:
    """The value that this share of all does not exceed."""
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


def memory(node: MeasuredNode) -> list[Figure]:
    """Proportional memory of each of sixteen workers, by what it is."""
    use = node.memory("use_pandas", _WORKERS)
    total = sum(use) / _WORKERS / _MIB
    title = f"memory (PSS) of each of {_WORKERS} workers with pandas"
    parts = ("heap", "files in memory", "its share of the template and the container")
    return [
        Figure(title, total, "MiB", "≤ 8", total <= 8),
        *(Figure(f"of it {part}", size / _WORKERS / _MIB, "MiB") for part, size in zip(parts, use, strict=True)),
    ]


def rate(title: str, node: MeasuredNode, function: str, count: int, least: float) -> Figure:
    """One-shot tasks per second and core."""
    *_, last = node.one_shots(function, count)
    per_core = last.done / last.seconds / len(os.sched_getaffinity(0))
    return Figure(f"{title}, per second and core (n={count})", per_core, "/s", f"≥ {least:g}", per_core >= least)


# -- sustained ---------------------------------------------------------------------------------------------------------


def sustained(directory: Path, count: int) -> dict[str, list[dict[str, float]]]:
    """What two nodes have before, between and after one-shot workers: so many of the standard library, and a tenth of
    them with NumPy and pandas in a container."""
    place = OwnPlace(directory)
    with running_node(place, "own", "", fork=True, spares=1) as node:
        own = node.one_shots("nothing", count, 10)
    with running_node(place, "container", type_with_forks(place), make_image(_PACKAGES), spares=1, **_FORKS) as node:
        container = node.one_shots("use_pandas", max(10, count // 10), 10)
    return {
        name: [sample._asdict() for sample in samples]
        for name, samples in (
            ("standard library, no container", own),
            ("NumPy and pandas in a container", container),
        )
    }


def growth(samples: Sequence[Sample]) -> list[Figure]:
    """What has grown from the first part's end to the last one's, and whether that is nothing."""
    first, last = samples[min(1, len(samples) - 1)], samples[-1]
    counts = [("descriptors", "descriptors"), ("processes", "processes"), ("mounts", "mounts"), ("files", "files")]
    sizes = [("manager's memory", "manager_bytes"), ("memory of template and spare child", "template_bytes")]
    return [
        *(
            Figure(f"growth: {title}", more := getattr(last, name) - getattr(first, name), "", "0", more <= 0)
            for title, name in counts
        ),
        *(
            Figure(
                f"growth: {title}",
                (more := getattr(last, name) - getattr(first, name)) / _MIB,
                "MiB",
                f"≤ {_GROWTH_BYTES / _MIB:g}",
                more <= _GROWTH_BYTES,
            )
            for title, name in sizes
        ),
    ]
