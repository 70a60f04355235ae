"""Communication of tasks by pattern, medium and size, as in figure 5 of the funcX paper (2022, section 7.3)."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from typing import Final

from benchmarks.data import functions
from benchmarks.data.media import Medium
from farcall_endpoint import Engine, Graph

SIZES: Final = {"1 KB": 1_000, "64 KB": 64_000, "1 MB": 1_000_000, "10 MB": 10_000_000}
PATTERNS: Final = {"point to point": (1, 1), "broadcast": (1, 4), "all to all": (4, 4)}
"""Senders and receivers."""
_MOST_ALL_BYTES: Final = 64_000_000
_TIMEOUT_S: Final = 120


def measure(engine: Engine, media: Mapping[str, Medium], *, times: int) -> Iterator[tuple[str, float]]:
    """By ``pattern/size/medium``: milliseconds from the first write to the last read, the median of so many times. The
    media take turns."""
    for pattern, (senders, receivers) in PATTERNS.items():
        for title, size in SIZES.items():
            if senders * receivers * size > _MOST_ALL_BYTES and senders > 1:
                continue
            found: dict[str, list[float]] = {name: [] for name in media}
            for number in range(times + 1):
                for name, medium in media.items():
                    took_s = _run(engine, medium, size, senders, receivers)
                    if number:  # the first one starts workers and connections
                        found[name].append(1000 * took_s)
            for name, values in found.items():
                yield f"{pattern}/{title}/{name}", statistics.median(values)


def _run(engine: Engine, medium: Medium, size: int, senders: int, receivers: int) -> float:
    graph = Graph(spread=True)
    copies = receivers if senders > 1 else 1
    sent = [graph.call(functions.send, medium, size, copies) for _ in range(senders)]
    read = [graph.call(functions.receive, medium, size, number, sent) for number in range(receivers)]
    times, keys = engine.submit(graph, (read, sent)).result(timeout=_TIMEOUT_S)
    for _, each in keys:
        for key in each:
            medium.evict(key)
    took_s: float = max(end for _, end in times) - min(began for began, _ in times)
    return took_s
