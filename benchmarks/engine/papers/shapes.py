"""Experiments without failures. Times are seconds from the first ``submit`` to the last result."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from benchmarks.engine import functions
from farcall_endpoint import Engine

_WORKERS: Final = 4
_ROUNDS: Final = 3
_DEPTHS: Final = (0, 1, 4, 16, 64, 256)
_SCALES: Final = (1, 2, 4, 8, 16)
_WARM_UP_ROUNDS: Final = 4

Run = dict[str, Any]


def batching(*, tasks: int = 10_000) -> list[Run]:
    """No-ops with and without batching and prefetching. With neither, a worker waits for each next task."""
    variants: Sequence[tuple[str, dict[str, Any]]] = (
        ("batching and prefetching", {}),
        ("no batching", {"batching": False}),
        ("no prefetching", {"prefetch": 0}),
        ("neither", {"batching": False, "prefetch": 0}),
    )
    runs = []
    for name, options in variants:
        with Engine(_WORKERS, **options) as engine:
            elapsed_s = _median_s(engine, 0.0, tasks)
        runs.append({"name": name, "tasks": tasks, "elapsed_s": elapsed_s})
    return runs


def prefetching() -> list[Run]:
    """Tasks of several lengths with several prefetch capacities."""
    lengths = {0.0: 4000, 0.001: 2000, 0.01: 240, 0.1: 40}
    runs = []
    for depth in _DEPTHS:
        with Engine(_WORKERS, prefetch=depth) as engine:
            for task_s, tasks in lengths.items():
                runs.append(_run(engine, _WORKERS, task_s, tasks) | {"prefetch": depth})
    return runs


def strong_scaling() -> list[Run]:
    """The same work on increasing numbers of workers."""
    lengths = {0.0: 10_000, 0.01: 400, 0.1: 64}
    return _scaling(lambda task_s, _: lengths[task_s], lengths)


def weak_scaling() -> list[Run]:
    """The same work per worker, on increasing numbers of workers."""
    lengths = {0.0: 1000, 0.01: 80, 0.1: 10}
    return _scaling(lambda task_s, workers: lengths[task_s] * workers, lengths)


def _scaling(tasks: Callable[[float, int], int], lengths: Sequence[float] | dict[float, int]) -> list[Run]:
    runs = []
    for workers in _SCALES:
        with Engine(workers) as engine:
            runs += [_run(engine, workers, task_s, tasks(task_s, workers)) for task_s in lengths]
    return runs


def _run(engine: Engine, workers: int, task_s: float, tasks: int) -> Run:
    return {
        "workers": workers,
        "task_s": task_s,
        "tasks": tasks,
        "elapsed_s": _median_s(engine, task_s, tasks),
        "ideal_s": -(-tasks // workers) * task_s,
    }


def _median_s(engine: Engine, task_s: float, tasks: int) -> float:
    """The median of several rounds for no-ops; one round for longer tasks, which vary little."""
    engine.wait_ready()
    _elapsed_s(engine, task_s, _WARM_UP_ROUNDS * engine.stats().workers)  # the engine learns how long such tasks take
    return statistics.median(_elapsed_s(engine, task_s, tasks) for _ in range(_ROUNDS if not task_s else 1))


def _elapsed_s(engine: Engine, task_s: float, tasks: int) -> float:
    began = time.perf_counter()
    if task_s:
        futures = [engine.submit(time.sleep, task_s) for _ in range(tasks)]
    else:
        futures = [engine.submit(functions.noop) for _ in range(tasks)]
    for future in futures:
        future.result()
    return time.perf_counter() - began
