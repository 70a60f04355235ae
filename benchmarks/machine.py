"""What a figure means depends on the machine that it was measured on."""

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
#: Of a list whose objects, some 40 MB, no cache holds.
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
        "memory_look_ns": round(_memory_look_ns()),
    }


def circumstances(machine: Mapping[str, Any]) -> str:
    """What figures of one machine that were measured at different times differ by: its load, and how fast it was."""
    load = f"load before {machine['load_1min_before']}"
    step_ns = machine.get("python_step_ns")  # not in older results
    if step_ns is None:
        return load
    far_ns = machine["memory_look_ns"]
    return f"{load}, {step_ns:.0f} ns for a step of a Python loop, {far_ns} ns for one to an object far away"


def pss_mib(pid: int) -> float:
    """The memory of a process in MiB, shared pages divided among those who share them."""
    return float(psutil.Process(pid).memory_full_info().pss) / 2**20


def _python_step_ns() -> float:
    """Processor time of a step of a loop that adds, the median of nine: a shared core is not always equally fast."""
    rounds = []
    for _ in range(9):
        total, before = 0, time.process_time()
        for number in range(_STEPS):
            total += number
        rounds.append((time.process_time() - before) / _STEPS * 1e9)
    return statistics.median(rounds)


def _memory_look_ns() -> float:
    """Processor time of a step of a loop that goes where the object before says, all over memory; the median of five.

    Neighbours on the same host slow this down by a factor, and with it whatever has much data, long before the other.
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
