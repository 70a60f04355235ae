"""Steering: a program that makes tasks, whose data go through a medium (funcX 2022, section 7.3, with Colmena)."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator, Mapping
from typing import Final

from benchmarks.data import functions
from benchmarks.data.media import Medium
from farcall_endpoint import Engine

TASKS: Final = 1000
SIZE: Final = 1_000_000
STAGES: Final = ("input write", "input read", "result write", "result read")
_AHEAD: Final = 8
"""Tasks under way."""
_TIMEOUT_S: Final = 60


def measure(engine: Engine, media: Mapping[str, Medium], *, tasks: int = TASKS) -> Iterator[tuple[str, float]]:
    """By ``stage/medium``: the median in milliseconds."""
    for name, medium in media.items():
        took: dict[str, list[float]] = {stage: [] for stage in STAGES}
        for _ in range(0, tasks, _AHEAD):
            keys = []
            for _ in range(_AHEAD):
                data = os.urandom(16) + bytes(SIZE - 16)
                began = time.monotonic()
                keys.append(medium.put(data))
                took["input write"].append(time.monotonic() - began)
            futures = [engine.submit(functions.simulate, medium, key, SIZE) for key in keys]
            for future, key in zip(futures, keys, strict=True):
                read_s, write_s, result = future.result(timeout=_TIMEOUT_S)
                began = time.monotonic()
                bytes(memoryview(medium.get(result))[:: functions.PAGE])
                took["result read"].append(time.monotonic() - began)
                took["input read"].append(read_s)
                took["result write"].append(write_s)
                medium.evict(key)
                medium.evict(result)
        for stage, values in took.items():
            yield f"{stage}/{name}", 1000 * statistics.median(values)
