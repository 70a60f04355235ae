"""Five calls through the cloud: as one graph, and one by one, each with the result of the one before."""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Final

import farcall
from benchmarks.end_to_end import deployment
from benchmarks.graphs.functions import increment
from benchmarks.graphs.measuring import TIMEOUT_S, Counts, Figures, Results, expect, timed_us

CALLS: Final = 5


def measure(results: Results, counts: Counts) -> None:
    """Both, in turn, on the local tier."""
    results.add("cloud", lambda: _calls(counts))


def _calls(counts: Counts) -> Figures:
    took: dict[str, list[float]] = {"graph": [], "one by one": []}
    whole = farcall.chain(*[increment] * CALLS)
    with (
        tempfile.TemporaryDirectory() as directory,
        deployment(Path(directory)) as (_, endpoint, client),
        farcall.Executor(endpoint.endpoint_id, client=client) as executor,
    ):

        def as_graph() -> int:
            result: int = executor.submit(whole, 0).result(TIMEOUT_S)
            return result

        def one_by_one() -> int:
            value = 0
            for _ in range(CALLS):
                value = executor.submit(increment, value).result(TIMEOUT_S)
            return value

        for _ in range(5):
            for name, run in (("graph", as_graph), ("one by one", one_by_one)):
                took[name] += timed_us(run, max(2, counts.applications // 10), check=expect(CALLS))
    return {f"cloud/{name}/ms": statistics.median(values) / 1000 for name, values in took.items()}
