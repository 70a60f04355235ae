"""Calls between two managers of one machine: the value of one on its way back, and one that begins in a fork."""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from benchmarks.graphs import functions
from benchmarks.graphs.measuring import SIZES, Counts, Figures, Results, quantile
from farcall_common.environments import Environment
from tests.support.endpoint import running_endpoint
from tests.waiting import wait_until

_PAUSES_S: Final = (0.020, 0.022, 0.115)
"""Of the caller, of the call, and until the next one. A call leaves after 5 ms, and runs longer than its caller is
busy: a caller that waits before gets another worker at home. A manager that had fewer calls to give than it was asked
for offers the next after 100 ms."""
_ENGINE: Final = {"provider": {"type": "LocalProvider", "init_blocks": 2, "min_blocks": 2, "max_blocks": 2}}


def measure(results: Results, counts: Counts) -> None:
    """Both, on an endpoint with two managers of one worker each."""
    results.add("value between managers", lambda: _back(counts.large_edges))
    results.add("fork at another manager", lambda: _forked(counts.large_edges))


def _back(count: int) -> Figures:
    took = [back_us for _, _, back_us in _calls(count, _ENGINE)]
    return {"managers/back_us": statistics.median(took), "managers/back_p90_us": quantile(took, 0.9)}


def _forked(count: int) -> Figures:
    """Workers end after one call, so each call is made in a new fork."""
    environment = Environment(type="venv", location=sys.prefix)
    calls = _calls(count, {**_ENGINE, "max_tasks_per_worker": 1}, environment=environment)
    assert len({process for process, _, _ in calls}) == len(calls)
    return {"managers/fork_ms": statistics.median(there_us for _, there_us, _ in calls) / 1000}


def _calls(count: int, engine: Mapping[str, object], **options: Any) -> list[tuple[int, float, float]]:
    """Process and times of the calls that the other manager ran, without the first."""
    with (
        tempfile.TemporaryDirectory() as directory,
        running_endpoint(Path(directory) / "home", workers=1, engine=engine) as endpoint,
    ):
        wait_until(lambda: len(endpoint.workers()) == 2)
        cloud = endpoint.cloud
        ended = cloud.end(cloud.submit(functions.drive_elsewhere, count + 1, SIZES["1 KB"], _PAUSES_S, **options))
    if ended.error:
        raise RuntimeError(ended.error["message"])
    calls: Any = ended.value
    away = [(process, there_us, back_us) for is_away, process, there_us, back_us in calls[1:] if is_away]
    if not away:
        raise ValueError("none of the calls left its manager")
    return away
