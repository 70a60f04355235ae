"""Failure experiment (figure 7): a steady stream of 100 ms tasks on two managers, one of which dies after two seconds.

The engine replaces it at once. In the paper it is back after four seconds: to repeat that, the new manager is stopped
at its start, and continued at that time.
"""

from __future__ import annotations

import concurrent.futures
import functools
import math
import os
import queue
import signal
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

import psutil

from farcall_endpoint import Engine
from farcall_endpoint.config.providers import LocalProviderConfig

DIES_AT_S: Final = 2.0
REPLACED_AT_S: Final = 4.0
_MANAGERS: Final = 2
_WORKERS: Final = 4
_TASK_S: Final = 0.1
_LOAD: Final = 0.8
"""Share of the workers' capacity. At full load the backlog of the failure would never shrink."""
_STEP_S: Final = 0.002
_TIMEOUT_S: Final = 20.0
_NORMAL: Final = 1.5

Run = dict[str, Any]


def failure(*, lasts_s: float, replaced_at_s: float | None = None) -> Run:
    """Submit tasks for this time; returns when each was submitted, and how long it took, in seconds.

    :param replaced_at_s: when the new manager starts to work; None for as soon as possible.
    """
    nodes = LocalProviderConfig(init_blocks=_MANAGERS, min_blocks=_MANAGERS, max_blocks=_MANAGERS)
    with (
        Engine(_WORKERS, provider=nodes) as engine,
        concurrent.futures.ThreadPoolExecutor(1) as background,
    ):
        engine.wait_ready(workers=_MANAGERS * _WORKERS)
        for warm in [engine.submit(time.sleep, _TASK_S) for _ in range(_MANAGERS * _WORKERS)]:
            warm.result()
        began = time.perf_counter()
        outage = background.submit(_kill_one, engine, began, replaced_at_s)
        tasks = _stream(engine, began, lasts_s)
        back_at_s = outage.result()
    return {
        "name": "replaced at once" if replaced_at_s is None else f"replaced after {replaced_at_s:g} s",
        "workers": _MANAGERS * _WORKERS,
        "task_s": _TASK_S,
        "load": _LOAD,
        "dies_at_s": DIES_AT_S,
        "back_at_s": back_at_s,
        "tasks": tasks,
    }


def phases(run: Mapping[str, Any]) -> dict[str, float]:
    """Latencies in seconds before the failure, during the outage, and at worst; and the time of recovery: after it no
    task took one and a half times as long as before."""
    tasks = [(at_s, took_s) for at_s, took_s in run["tasks"]]
    before = [took_s for at_s, took_s in tasks if at_s < run["dies_at_s"] - 2 * run["task_s"]]
    outage = [took_s for at_s, took_s in tasks if run["dies_at_s"] <= at_s < run["back_at_s"]]
    normal_s = statistics.median(before)
    slow = [at_s + took_s for at_s, took_s in tasks if took_s > _NORMAL * normal_s]
    return {
        "before_s": normal_s,
        "outage_s": statistics.median(outage),
        "worst_s": max(took_s for _, took_s in tasks),
        "recovered_at_s": max(slow, default=0.0),
    }


def _stream(engine: Engine, began: float, lasts_s: float) -> list[tuple[float, float]]:
    period_s = _TASK_S / (_LOAD * _MANAGERS * _WORKERS)
    ended: queue.SimpleQueue[tuple[int, float]] = queue.SimpleQueue()
    submitted: list[float] = []
    for number in range(round(lasts_s / period_s)):
        time.sleep(max(0.0, began + number * period_s - time.perf_counter()))
        submitted.append(time.perf_counter())
        future = engine.submit(time.sleep, _TASK_S)
        future.add_done_callback(functools.partial(_record_end, ended, number))
    ended_at = dict(ended.get(timeout=_TIMEOUT_S) for _ in submitted)
    return [(at - began, ended_at[number] - at) for number, at in enumerate(submitted)]


def _record_end(
    ended: queue.SimpleQueue[tuple[int, float]], number: int, future: concurrent.futures.Future[None]
) -> None:
    """Record when a task ended; a failed one counts as infinitely late."""
    ended.put((number, time.perf_counter() if future.exception() is None else math.inf))


def _kill_one(engine: Engine, began: float, replaced_at_s: float | None) -> float:
    """Kill a manager; returns when the new one worked, in seconds."""
    known = _managers()
    time.sleep(max(0.0, began + DIES_AT_S - time.perf_counter()))
    os.kill(known[0], signal.SIGKILL)
    new = _new_manager(known)
    if replaced_at_s is not None:
        os.kill(new, signal.SIGSTOP)
        time.sleep(max(0.0, began + replaced_at_s - time.perf_counter()))
        os.kill(new, signal.SIGCONT)
    engine.wait_ready(workers=_MANAGERS * _WORKERS)
    return time.perf_counter() - began


def _new_manager(known: Sequence[int]) -> int:
    deadline = time.monotonic() + _TIMEOUT_S
    while time.monotonic() < deadline:
        for pid in _managers():
            if pid not in known:
                return pid
        time.sleep(_STEP_S)
    raise TimeoutError(f"no new manager within {_TIMEOUT_S:g} s")


def _managers() -> list[int]:
    """The process ids of this engine's managers."""
    found = []
    for child in psutil.Process().children():
        try:
            if "farcall_endpoint.manager" in child.cmdline():
                found.append(child.pid)
        except psutil.Error:
            continue
    return found
