"""``python -m benchmarks.engine.driver CONTESTANT TASKS``: all workloads on one contestant; JSON on standard output.

Runs with the contestant's own interpreter, so it needs nothing but that and psutil.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import psutil

from benchmarks.engine import functions
from benchmarks.engine.contestants import CONTESTANTS, Contestant

WORKERS = 4
SEQUENTIAL = 2000
NAPS = 10_000
MANY = 100_000
MANY_PER_S = 4_000
"""So many at once only for those that are done with them within half a minute."""
_WARM_UP = 200
_DAEMONS = ("/ray/", "ray::", "parsl: HTEX", "process_worker_pool")


def main(name: str, tasks: int) -> None:
    """Measure, print, stop."""
    start = CONTESTANTS[name][1]
    began = time.perf_counter()
    contestant = start(WORKERS)
    contestant.gather([contestant.submit(functions.noop)])
    figures: dict[str, Any] = {"start_to_first_result_s": time.perf_counter() - began}
    contestant.gather([contestant.submit(functions.noop) for _ in range(_WARM_UP)])
    figures["memory_per_worker_mib"] = _memory_mib() / WORKERS
    figures["noops"] = _many(contestant, functions.noop, tasks)
    if figures["noops"]["per_s"] > MANY_PER_S:
        figures["many_noops"] = _many(contestant, functions.noop, MANY)
    figures["naps"] = _many(contestant, functions.nap, NAPS)
    figures["hello"] = _latencies(contestant, functions.hello, {"name": "world"}, count=SEQUENTIAL)
    figures["echo_1mb"] = _latencies(contestant, functions.echo, os.urandom(10**6), count=40)
    figures["echo_10mb"] = _latencies(contestant, functions.echo, os.urandom(10**7), count=15)
    contestant.stop()
    print(json.dumps(figures), flush=True)


def _many(contestant: Contestant, function: Callable[[], Any], count: int) -> dict[str, float]:
    """Tasks per second, microseconds of CPU for each in the whole process tree, and what others took of the machine."""
    own, everybody, began = _tree_cpu_s(), _machine_cpu_s(), time.perf_counter()
    contestant.gather([contestant.submit(function) for _ in range(count)])
    elapsed_s = time.perf_counter() - began
    own_s, everybody_s = _tree_cpu_s() - own, _machine_cpu_s() - everybody
    return {
        "per_s": count / elapsed_s,
        "cpu_us": own_s / count * 1e6,
        "others": max(0.0, everybody_s - own_s) / (elapsed_s * len(os.sched_getaffinity(0))),
    }


def _latencies(contestant: Contestant, function: Callable[..., Any], value: Any, *, count: int) -> dict[str, float]:
    latencies_ms = []
    for _ in range(count):
        began = time.perf_counter()
        contestant.gather([contestant.submit(function, value)])
        latencies_ms.append((time.perf_counter() - began) * 1000)
    latencies_ms.sort()
    return {"p50_ms": statistics.median(latencies_ms), "p99_ms": latencies_ms[int(count * 0.99) - 1]}


def _tree() -> list[psutil.Process]:
    """This process and all that it started; Ray's and Parsl's daemons leave the tree, and are known by their names."""
    here = psutil.Process()
    family = {process.pid: process for process in [here, *here.children(recursive=True)]}
    for process in psutil.process_iter(["cmdline"]):
        if any(mark in " ".join(process.info["cmdline"] or ()) for mark in _DAEMONS):
            family.setdefault(process.pid, process)
    return list(family.values())


def _tree_cpu_s() -> float:
    total = 0.0
    for process in _tree():
        try:
            times = process.cpu_times()
        except psutil.Error:
            continue
        total += times.user + times.system
    return total


def _machine_cpu_s() -> float:
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - times.iowait)


def _memory_mib() -> float:
    """Of all processes but this one, shared pages divided among those who share them."""
    total = 0
    for process in _tree():
        if process.pid != os.getpid():
            try:
                total += process.memory_full_info().pss
            except psutil.Error:
                continue
    return total / 2**20


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
