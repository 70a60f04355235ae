"""Sorts through each method of exchange on storages with limits, beside what the model predicts."""

from __future__ import annotations

import dataclasses
import itertools
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import farcall_analytics as fa
from benchmarks.analytics.data import checksum, write_records
from farcall_analytics.curves import constant
from farcall_analytics.model import Method, Plan, Shuffle, estimate
from farcall_analytics.profiles import Codec, Profile, Tier, Workers
from farcall_analytics.shaper import Shape, describe
from farcall_endpoint import Engine

WORKERS: Final = 8
RECORD: Final = 100
SLOW: Final = Shape(reads=300.0, writes=200.0, worker_read_bytes=12e6, worker_written_bytes=12e6, latency_s=0.015)
FAST: Final = Shape(reads=5_000.0, writes=5_000.0, read_bytes=80e6, written_bytes=80e6, latency_s=0.001)
"""An object store and a memory with less of everything than a cloud's, so that its limits are met with little data."""
SIZES: Final = (30e6, 100e6)
PARTS: Final = (8, 24, 48)
ROUND_PART: Final = 0.25
_CALIBRATION: Final = (60e6, 16)


@dataclasses.dataclass(frozen=True)
class Point:
    """A sort: bytes, tasks on each side of the exchange, method."""

    size: float
    parts: int
    method: Method


POINTS: Final = tuple(
    Point(size, parts, method)
    for size, parts, method in itertools.product(
        SIZES, PARTS, (Method.SLOW, Method.COMBINED, Method.TWO_LEVEL, Method.FAST, Method.HYBRID)
    )
)


def measure(points: Sequence[Point] = POINTS, *, repetitions: int = 1) -> dict[str, Any]:
    """Seconds of each point, measured and predicted."""
    with tempfile.TemporaryDirectory() as directory, Engine(max_workers=WORKERS) as engine:
        bench = Bench(Path(directory), engine)
        prepare(engine)
        workers = bench.calibrate()
        rows = []
        for point in points:
            measured = sorted(bench.run(point) for _ in range(repetitions))
            found = _predicted(point, workers)
            rows.append({**dataclasses.asdict(point), "measured_s": measured, "predicted_s": found})
            print(f"{point}: {measured[len(measured) // 2]:.2f} s, predicted {found:.2f} s", flush=True)
    shapes = {"slow": dataclasses.asdict(SLOW), "fast": dataclasses.asdict(FAST)}
    return {"points": rows, "workers": WORKERS, "shapes": shapes, "calibrated": dataclasses.asdict(workers)}


def prepare(engine: Engine) -> None:
    """Let workers import what tasks need, so that no measurement begins with it."""
    list(engine.map(_import, range(WORKERS * 4)))


class Bench:
    """Sorts on storages with limits."""

    def __init__(self, directory: Path, engine: Engine) -> None:
        self._directory = directory
        self._engine = engine
        self._inputs: dict[tuple[float, int], str] = {}
        self._runs = itertools.count()
        (directory / "slow").mkdir()
        (directory / "fast").mkdir()
        self._slow = describe(directory / "slow.json", f"file://{directory}/slow", SLOW)
        self._fast = describe(directory / "fast.json", f"file://{directory}/fast", FAST)

    def run(self, point: Point, **options: Any) -> float:
        """Seconds of the stages of a sort, without those of its sample.

        :raises RuntimeError: if it is no sort.
        """
        source = self._input(point)
        output = self._directory / f"out-{next(self._runs)}"
        settings: dict[str, Any] = {
            "storage": self._slow,
            "fast_storage": self._fast,
            "fast_bytes": ROUND_PART * point.size,
            "method": point.method,
            "partitions": point.parts,
            "copies_after": None,
            **options,
        }
        dataset = fa.read_parquet(source, executor=self._engine, share_bytes=10**12, **settings)
        outcome = dataset.sort("key").write_parquet(str(output))
        before = checksum(sorted(map(str, Path(source).parent.iterdir())))
        after = checksum(list(outcome.paths))
        if after != (*before[:2], True):
            raise RuntimeError(f"{point}: {after}, of {before}")
        return sum(each.seconds - each.sampled_s for each in outcome.stages)

    def calibrate(self) -> Workers:
        """What tasks cost without limits: from one size and number of tasks."""
        size, parts = _CALIBRATION
        point = Point(size, parts, Method.COMBINED)
        plain = f"file://{self._directory}/plain"
        empty_s = self.run(dataclasses.replace(point, size=RECORD * 1_000), storage=plain)
        seconds = min(self.run(point, storage=plain) for _ in range(3))
        rate = size / max(0.01, (seconds - empty_s) / 2)
        per_wave_s = empty_s / (2 * parts / WORKERS)
        return _workers(rate, per_wave_s)

    def _input(self, point: Point) -> str:
        key = (point.size, point.parts)
        if key not in self._inputs:
            directory = self._directory / f"in-{point.size:.0f}-{point.parts}"
            self._inputs[key] = write_records(directory, int(point.size / RECORD), files=point.parts)
        return self._inputs[key]


def _workers(rate: float, call_s: float) -> Workers:
    """:param rate: bytes per second that all of them together partition, and combine; they share the processors."""
    own = rate / WORKERS
    return Workers(
        memories=(1e9,), most=WORKERS, call_s=call_s, partition_bytes_per_s=own, combine_bytes_per_s=own, data_part=0.5
    )


def _predicted(point: Point, workers: Workers) -> float:
    tiers: Mapping[str, Tier] = {"slow": _tier("slow", SLOW), "fast": _tier("fast", FAST, is_fast=True)}
    memory = point.size / point.parts / workers.data_part  # so much that there are so many tasks
    own = dataclasses.replace(workers, memories=(memory,))
    if point.method is Method.HYBRID:
        plan = Plan(point.method, "slow", memory, WORKERS, "fast", ROUND_PART * point.size)
    else:
        plan = Plan(point.method, "fast" if point.method is Method.FAST else "slow", memory, WORKERS)
    return estimate(Shuffle(point.size), plan, Profile(own, tiers, (Codec("none"),))).seconds


def _tier(name: str, shape: Shape, *, is_fast: bool = False) -> Tier:
    return Tier(
        name,
        reads_per_s=constant(shape.reads),
        writes_per_s=constant(shape.writes),
        read_bytes_per_s=constant(min(shape.worker_read_bytes, 1e15)),
        write_bytes_per_s=constant(min(shape.worker_written_bytes, 1e15)),
        total_bytes_per_s=min(shape.read_bytes, shape.written_bytes),
        latency_s=shape.latency_s,
        is_fast=is_fast,
    )


def _import(_: int) -> None:
    import farcall_analytics.tasks  # noqa: F401
