"""Facts about the machine of a measurement: processor, memory, interpreter, load and speed."""

from __future__ import annotations

import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import psutil

_STEPS: Final = 300_000
#: Objects of a list that fits into no cache, some 40 MB.
_SCATTERED: Final = 1_000_000


def facts() -> dict[str, Any]:
    """The machine, its load, and the interpreter."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "byte_code_cached": not sys.dont_write_bytecode,
        "load_1min_before": round(os.getloadavg()[0], 2),
        "python_step_ns": round(_python_step_ns(), 1),
        "memory_access_ns": round(_memory_access_ns()),
    }


def conditions(machine: Mapping[str, Any]) -> str:
    """The load and the speed of a machine, which differ between measurements on it."""
    load = f"load before {machine['load_1min_before']}"
    step_ns = machine.get("python_step_ns")  # older results lack it
    if step_ns is None:
        return load
    return (
        f"{load}, {step_ns:.0f} ns per step of a Python loop, {machine['memory_access_ns']} ns per random memory access"
    )


def pss_mib(pid: int) -> float:
    """The proportional set size of a process in MiB: shared pages are divided among their users."""
    return float(psutil.Process(pid).memory_full_info().pss) / 2**20


def _python_step_ns() -> float:
    """CPU time of a step of a loop that adds; the median of nine, because the speed of a shared core varies."""
    rounds = []
    for _ in range(9):
        total, before = 0, time.process_time()
        for number in range(_STEPS):
            total += number
        rounds.append((time.process_time() - before) / _STEPS * 1e9)
    return statistics.median(rounds)


def _memory_access_ns() -> float:
    """CPU time of a step of a loop that follows references to random places in memory; the median of five.

    Other tenants of the host multiply this time, and that of everything with much data, long before the other one.
    """
    following = list(range(_SCATTERED))
    random.Random(0).shuffle(following)
    rounds = []
    for _ in range(5):
        place, before = 0, time.process_time()
        for _ in range(_STEPS):
            place = following[place]
        rounds.append((time.process_time() - before) / _STEPS * 1e9)
    return statistics.median(rounds)


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
