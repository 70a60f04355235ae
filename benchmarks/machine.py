"""What a figure means depends on the machine that it was measured on."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path
from typing import Any

import psutil

__all__ = ["facts", "pss_mib"]


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
    }


def pss_mib(pid: int) -> float:
    """The memory of a process in MiB, shared pages divided among those who share them."""
    return float(psutil.Process(pid).memory_full_info().pss) / 2**20


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
