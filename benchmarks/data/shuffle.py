"""WordCount and Sort: the shuffle of the funcX paper (2022, section 7.3) at a hundredth of its size."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from benchmarks.data import functions
from benchmarks.data.media import Medium
from farcall_endpoint import Engine, Graph

BYTES: Final = 300_000_000
TASKS: Final = 30
"""Mappers, and reducers."""
QUICK_BYTES: Final = 9_000_000
APPLICATIONS: Final[Mapping[str, tuple[Callable[..., Any], Callable[..., Any]]]] = {
    "WordCount": (functions.map_words, functions.count_words),
    "Sort": (functions.map_records, functions.sort_records),
}
_TIMEOUT_S: Final = 600


def measure(engine: Engine, media: Mapping[str, Medium], *, total_bytes: int = BYTES) -> Iterator[tuple[str, float]]:
    """By ``application/medium/what``: seconds of the whole run, and of all writes and all reads of its tasks
    together."""
    for application, (mapper, reducer) in APPLICATIONS.items():
        counted: set[int] = set()
        for name, medium in media.items():
            began = time.monotonic()
            graph = Graph(spread=True)
            size = total_bytes // TASKS
            mapped = [graph.call(mapper, medium, number, size, TASKS) for number in range(TASKS)]
            reduced = [graph.call(reducer, medium, number, mapped) for number in range(TASKS)]
            written, read = engine.submit(graph, (mapped, reduced)).result(timeout=_TIMEOUT_S)
            whole_s = time.monotonic() - began
            counted.add(sum(count for _, count in read))
            for _, keys in written:
                for key in keys:
                    medium.evict(key)
            yield f"{application}/{name}/whole_s", whole_s
            yield f"{application}/{name}/write_s", sum(times[1] for times, _ in written)
            yield f"{application}/{name}/read_s", sum(times[1] for times, _ in read)
        assert len(counted) == 1, counted  # each medium has carried the same
