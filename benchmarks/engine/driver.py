"""Benchmark driver: runs workloads on one system and prints the figures as JSON.

    python -m benchmarks.engine.driver SYSTEM [--tasks 10000 | --bursts]

Runs with the interpreter of the system's environment, so it needs only the system and psutil.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any, Final

import psutil

from benchmarks.engine import functions
from benchmarks.engine.systems import SYSTEMS, System

WORKERS: Final = 4
BURST_WORKERS: Final = 2
#: Rounds of each burst size.
BURST_ROUNDS: Final = {1: 300, 10: 100, 100: 40, 1000: 12}
_SEQUENTIAL: Final = 2000
_SLEEPS: Final = 10_000
_MANY: Final = 100_000
#: Systems that are slower than this skip the many no-ops, which would take longer than half a minute.
_MANY_PER_S: Final = 4_000
_WARM_UP: Final = 200
_DAEMONS: Final = ("/ray/", "ray::", "parsl: HTEX", "process_worker_pool")


def workloads(name: str, tasks: int) -> dict[str, Any]:
    """The figures of all workloads."""
    started_at = time.perf_counter()
    system = SYSTEMS[name][1](WORKERS)
    system.gather([system.submit(functions.noop)])
    figures: dict[str, Any] = {"start_to_first_result_s": time.perf_counter() - started_at}
    _warm_up(system)
    figures["memory_per_worker_mib"] = _memory_mib() / WORKERS
    figures["noops"] = _throughput(system, functions.noop, tasks)
    if figures["noops"]["per_s"] > _MANY_PER_S:
        figures["many_noops"] = _throughput(system, functions.noop, _MANY)
    figures["sleeps"] = _throughput(system, functions.sleep_1ms, _SLEEPS)
    figures["hello"] = _latencies(system, functions.hello, {"name": "world"}, count=_SEQUENTIAL)
    figures["echo_1mb"] = _latencies(system, functions.echo, os.urandom(10**6), count=40)
    figures["echo_10mb"] = _latencies(system, functions.echo, os.urandom(10**7), count=15)
    system.stop()
    return figures


def bursts(name: str) -> dict[str, Any]:
    """The figures of bursts of each size."""
    system = SYSTEMS[name][1](BURST_WORKERS)
    _warm_up(system)
    figures = {str(size): burst(system, size) for size in BURST_ROUNDS}
    system.stop()
    return figures


def burst(system: System, size: int) -> dict[str, float]:
    """Milliseconds from the first submit to the last result of ``size`` no-ops, and tasks per second."""
    took_ms = []
    for _ in range(BURST_ROUNDS[size]):
        began = time.perf_counter()
        system.gather([system.submit(functions.noop) for _ in range(size)])
        took_ms.append((time.perf_counter() - began) * 1000)
    cuts = statistics.quantiles(took_ms, n=100)
    return {"p50_ms": cuts[49], "p99_ms": cuts[98], "per_s": 1000 * size / cuts[49]}


def _warm_up(system: System) -> None:
    system.gather([system.submit(functions.noop) for _ in range(_WARM_UP)])


def _throughput(system: System, function: Callable[[], Any], count: int) -> dict[str, float]:
    """Tasks per second, CPU microseconds per task in the process tree, and the CPU share of other processes."""
    own, machine, began = _tree_cpu_s(), _machine_cpu_s(), time.perf_counter()
    system.gather([system.submit(function) for _ in range(count)])
    elapsed_s = time.perf_counter() - began
    own_s, machine_s = _tree_cpu_s() - own, _machine_cpu_s() - machine
    return {
        "per_s": count / elapsed_s,
        "cpu_us": own_s / count * 1e6,
        "others": max(0.0, machine_s - own_s) / (elapsed_s * len(os.sched_getaffinity(0))),
    }


def _latencies(system: System, function: Callable[..., Any], value: Any, *, count: int) -> dict[str, float]:
    latencies_ms = []
    for _ in range(count):
        began = time.perf_counter()
        system.gather([system.submit(function, value)])
        latencies_ms.append((time.perf_counter() - began) * 1000)
    latencies_ms.sort()
    return {"p50_ms": statistics.median(latencies_ms), "p99_ms": latencies_ms[int(count * 0.99) - 1]}


def _tree() -> list[psutil.Process]:
    """This process and its descendants; daemons of Ray and Parsl leave the tree and are found by name."""
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
    """Proportional set size of all processes but this one."""
    total = 0
    for process in _tree():
        if process.pid != os.getpid():
            try:
                total += process.memory_full_info().pss
            except psutil.Error:
                continue
    return total / 2**20


def main() -> None:
    """Measure, print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("system", choices=SYSTEMS)
    parser.add_argument("--tasks", type=int, default=10_000)
    parser.add_argument("--bursts", action="store_true", help="measure bursts of calls instead of the workloads")
    options = parser.parse_args()
    print(json.dumps(bursts(options.system) if options.bursts else workloads(options.system, options.tasks)))


if __name__ == "__main__":
    main()
