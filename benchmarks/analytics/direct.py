"""A sort whose rows go through the memory of the node, beside the same sort through an object store with limits."""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Any, Final

from benchmarks.analytics.shaped import EVEN, WORKERS, Bench, Point
from farcall_analytics.model import Method

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
    other method the direct exchange is, by medians; and dollars."""
    seconds: dict[str, list[float]] = {}
    dollars: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as directory:
        bench = Bench(Path(directory))
        for method in (Method.DIRECT, *others):
            point = Point(size, parts, method)
            runs = [bench.run(point, slow=EVEN) for _ in range(repetitions)]
            seconds[method] = sorted(each.stages_s for each in runs)
            dollars[method] = sorted(each.dollars for each in runs)
            print(f"{point}: {statistics.median(seconds[method]):.2f} s", flush=True)
    direct_s = statistics.median(seconds[Method.DIRECT])
    ratios = {method: statistics.median(seconds[method]) / direct_s for method in others}
    return {
        "size": size,
        "parts": parts,
        "workers": WORKERS,
        "seconds": seconds,
        "dollars": dollars,
        "times_as_fast": ratios,
    }
