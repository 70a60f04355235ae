"""A sort whose rows go through the memory of the node, beside the same sort through an object store with limits."""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Any, Final

from benchmarks.analytics.shaped import WORKERS, Bench, Point, prepare
from farcall_analytics.model import Method
from farcall_endpoint import Engine

SIZE: Final = 100e6
PARTS: Final = 100
GOAL: Final = 4.7
"""How many times as fast it is to be."""


def measure(
    repetitions: int,
    *,
    size: float = SIZE,
    parts: int = PARTS,
    others: tuple[Method, ...] = (Method.COMBINED, Method.SLOW),
) -> dict[str, Any]:
    """Seconds of sorts of so many bytes with so many tasks on each side, by method, and how many times as fast as each
    other method the direct exchange is, by medians."""
    seconds: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as directory, Engine(max_workers=WORKERS) as engine:
        bench = Bench(Path(directory), engine)
        prepare(engine)
        for method in (Method.DIRECT, *others):
            own = {"fast_storage": ""} if method is Method.DIRECT else {}
            point = Point(size, parts, method)
            seconds[method] = sorted(bench.run(point, **own) for _ in range(repetitions))
            print(f"{point}: {statistics.median(seconds[method]):.2f} s", flush=True)
    direct_s = statistics.median(seconds[Method.DIRECT])
    ratios = {method: statistics.median(seconds[method]) / direct_s for method in others}
    return {"size": size, "parts": parts, "workers": WORKERS, "seconds": seconds, "times_as_fast": ratios}
