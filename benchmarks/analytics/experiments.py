"""Experiments on storages with limits: rounds through little memory, a slow worker, reading while others compute, more
workers, stages that start their workers."""

from __future__ import annotations

import dataclasses
import statistics
import tempfile
import time
import unittest.mock
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import farcall_analytics as fa
from benchmarks.analytics.shaped import EVEN, FAST, WORKERS, Bench, Point, prepare
from benchmarks.analytics.shaper import Shape, describe
from farcall_analytics import stages
from farcall_analytics.model import Method
from farcall_endpoint import Engine
from tests.support.analytics_data import tpcds

ROUND_PARTS: Final = (0.02, 0.025, 1 / 30, 0.05)
"""Of the data, which the memory of a hybrid exchange holds."""
_NETWORK: Final = 4.0
"""Bytes per second that each byte of that memory has: nodes with more of it have more networks."""
_ROUNDS: Final = Point(50e6, 50, Method.HYBRID)
_PIPELINED: Final = Point(60e6, 100, Method.HYBRID)
_PIPELINED_PART: Final = 0.1
"""Of the data, which the memory holds: as much as some more tasks write than there are workers."""
_STRAGGLERS: Final = Point(60e6, 32, Method.COMBINED)
_STRAGGLED: Final = dataclasses.replace(EVEN, worker_read_bytes=2e6, worker_written_bytes=2e6)
_OVERLAP: Final = Point(320e6, 32, Method.COMBINED)
_SMALL: Final = 10e6
_OVERLAPPED: Final = Shape(worker_read_bytes=240e6, worker_written_bytes=240e6, latency_s=0.005, latency_sigma=0.5)
"""So that tasks wait about as long as they compute."""
_TOGETHER: Final = 8
"""Tasks of a call of which one computes while others read and write."""
_QUERIES: Final = (1, 94)
_SHARE: Final = 200_000
"""Bytes of each task of the queries: of its input, and of what it puts together."""
_QUERIED: Final = Shape(worker_read_bytes=0.03e6, worker_written_bytes=0.03e6, latency_s=0.03, latency_sigma=0.5)


def measure(*, repetitions: int = 1, scale: float = 1.0) -> dict[str, Any]:
    """All of them. ``scale``: of the data, for a test."""

    def scaled(point: Point) -> Point:
        return dataclasses.replace(point, size=point.size * scale)

    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:  # limits are those of shapes, not of a disk
        bench = Bench(Path(directory))
        return {
            "rounds": _rounds(bench, scaled(_ROUNDS), repetitions),
            "pipelined": _pipelined(bench, scaled(_PIPELINED), repetitions),
            "stragglers": _stragglers(bench, scaled(_STRAGGLERS), repetitions),
            "overlap": _overlap(bench, scaled(_OVERLAP), repetitions),
            "parallel": _parallel(bench, _SMALL * scale, repetitions),
            "elastic": _elastic(Path(directory), repetitions),
        }


def _rounds(bench: Bench, point: Point, repetitions: int) -> list[dict[str, Any]]:
    """Seconds of the stages by the part of the data for which there is memory."""
    found = []
    for part in ROUND_PARTS:
        own = dataclasses.replace(point, parts=round(1 / min(ROUND_PARTS)))
        size = part * point.size
        network = dataclasses.replace(FAST, read_bytes=_NETWORK * size, written_bytes=_NETWORK * size)
        seconds = [
            bench.run(own, slow=EVEN, fast=network, fast_bytes=size, partitions=WORKERS).stages_s
            for _ in range(repetitions)
        ]
        found.append({"part": part, "seconds": seconds})
        print(f"rounds of {part:.1%}: {seconds[0]:.2f} s", flush=True)
    return found


def _pipelined(bench: Bench, point: Point, repetitions: int) -> dict[str, list[float]]:
    """Seconds of the stages if rounds follow one another, and if two of half the size are done at the same time."""
    found: dict[str, list[float]] = {"one after the other": [], "at the same time": []}
    own: dict[str, Any] = {"slow": EVEN, "fast_bytes": _PIPELINED_PART * point.size, "partitions": WORKERS}
    for _ in range(repetitions):
        for name, pipelined in (("one after the other", False), ("at the same time", True)):
            found[name].append(bench.run(point, pipelined=pipelined, **own).stages_s)
    print(f"rounds at the same time: {found}", flush=True)
    return found


def _stragglers(bench: Bench, point: Point, repetitions: int) -> dict[str, list[float]]:
    """Seconds of the stages with no slow worker, and with one that has an eighth of the bandwidth."""
    slow = dataclasses.replace(_STRAGGLED, slow_workers=1, slow_factor=8.0)
    found: dict[str, list[float]] = {"none": [], "one": [], "one, no copies": []}
    for _ in range(repetitions):
        found["none"].append(bench.run(point, slow=_STRAGGLED, copies_after=0.75).stages_s)
        found["one"].append(bench.run(point, slow=slow, copies_after=0.75).stages_s)
        found["one, no copies"].append(bench.run(point, slow=slow).stages_s)
    print(f"slow worker: {found}", flush=True)
    return found


def _overlap(bench: Bench, point: Point, repetitions: int) -> dict[str, list[float]]:
    """Seconds of the stages if a task reads, computes and writes, and if those of a call do so at the same time."""
    found: dict[str, list[float]] = {"apart": [], "at the same time": []}
    for _ in range(repetitions):
        for name, count in (("apart", 1), ("at the same time", _TOGETHER)):
            found[name].append(bench.run(point, slow=_OVERLAPPED, workers=2, tasks_per_call=count).stages_s)
    print(f"overlap: {found}", flush=True)
    return found


def _parallel(bench: Bench, size: float, repetitions: int) -> dict[str, list[float]]:
    """Seconds of the stages of a small sort by two workers and by four times as many."""
    slow = dataclasses.replace(EVEN, worker_read_bytes=1.5e6, worker_written_bytes=1.5e6)
    found: dict[str, list[float]] = {}
    for _ in range(repetitions):
        for parts in (2, WORKERS):
            seconds = bench.run(Point(size, parts, Method.COMBINED), slow=slow).stages_s
            found.setdefault(str(parts), []).append(seconds)
    print(f"parallel: {found}", flush=True)
    return found


def _elastic(directory: Path, repetitions: int) -> list[dict[str, Any]]:
    """Seconds of workers of two queries of TPC-DS: if each stage starts its own, no more than it has tasks, and if as
    many as the widest stage has are there all the time."""
    found = []
    tables = tpcds(directory / "tpcds")
    files = {name: str(path) for name, path in tables.items()}
    start_s = _start_s()
    # the data is small, that of the paper is not
    with unittest.mock.patch.object(stages, "BROADCAST_BYTES", -1), Engine(max_workers=WORKERS) as engine:
        prepare(engine)
        for number in _QUERIES:
            query = (tables["item"].parent / f"q{number}.sql").read_text()
            own = [_workers_s(directory / f"q{number}-{each}", engine, query, files) for each in range(repetitions)]
            found.append({"query": number, "start_s": start_s, "runs": own})
            print(f"elastic: {found[-1]}", flush=True)
    return found


def _workers_s(place: Path, engine: Engine, query: str, files: Mapping[str, str]) -> dict[str, float]:
    place.mkdir()
    url = describe(place / "slow.json", f"file://{place}/blocks", _QUERIED)
    dataset = fa.sql(query, tables=files, executor=engine, storage=url, share_bytes=_SHARE, partition_bytes=_SHARE)
    outcome = dataset.write_parquet(str(place / "out"))
    return {
        "starts": sum(min(WORKERS, each.tasks) for each in outcome.stages),
        "busy_s": sum(each.busy_s for each in outcome.stages),
        "widest": min(WORKERS, max(each.tasks for each in outcome.stages)),
        "seconds": outcome.seconds,
    }


def _start_s() -> float:
    """Seconds until a new worker has run its first call."""
    found = []
    for _ in range(3):
        began = time.monotonic()
        with Engine(max_workers=1) as engine:
            engine.submit(abs, -1).result()
            found.append(time.monotonic() - began)
    return statistics.median(found)
