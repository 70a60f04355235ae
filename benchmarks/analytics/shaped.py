"""Sorts through each method of exchange on storages with limits: seconds and dollars, measured and predicted."""

from __future__ import annotations

import dataclasses
import itertools
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import farcall_analytics as fa
from benchmarks.analytics.data import checksum, write_records
from benchmarks.analytics.shaper import Shape, counts_of, describe, is_shaped
from farcall_analytics.curves import Slowdowns, constant
from farcall_analytics.model import Estimate, Method, Plan, Shuffle, estimate
from farcall_analytics.prices import LAMBDA_2026, S3_2026, VALKEY_SERVERLESS_2026
from farcall_analytics.profiles import Codec, Profile, Tier, Workers
from farcall_endpoint import Engine

WORKERS: Final = 8
MEMORY: Final = 1e9
"""Of a worker, for its price."""
RECORD: Final = 100
SLOW: Final = Shape(
    reads=300.0,
    writes=200.0,
    worker_read_bytes=12e6,
    worker_written_bytes=12e6,
    latency_s=0.015,
    latency_sigma=0.5,
    slow_workers=1,
    slow_factor=2.5,
)
FAST: Final = Shape(
    reads=5_000.0, writes=5_000.0, read_bytes=80e6, written_bytes=80e6, latency_s=0.001, latency_sigma=0.5
)
"""An object store and a memory with less of everything than a cloud's, so that its limits are met with little data."""
EVEN: Final = dataclasses.replace(SLOW, slow_workers=0)
"""The object store without a slow worker."""
PARTS: Final = {30e6: (8, 24, 48, 96), 100e6: (8, 24, 48)}
"""Tasks on each side of an exchange, by its bytes."""
ROUND_PART: Final = 0.25
_CALIBRATION: Final = (60e6, 16)


@dataclasses.dataclass(frozen=True)
class Point:
    """A sort: bytes, tasks on each side of the exchange, method."""

    size: float
    parts: int
    method: Method


class Run(NamedTuple):
    """What a sort took: seconds with the start of the workers, those of its stages, and dollars by what was counted."""

    seconds: float
    stages_s: float
    dollars: float


POINTS: Final = tuple(
    Point(size, parts, method)
    for size, counts in PARTS.items()
    for parts, method in itertools.product(
        counts, (Method.SLOW, Method.COMBINED, Method.TWO_LEVEL, Method.FAST, Method.HYBRID)
    )
)


def measure(points: Sequence[Point] = POINTS, *, repetitions: int = 1) -> dict[str, Any]:
    """Seconds and dollars of each point, measured and predicted. The workers are started for each measurement."""
    with tempfile.TemporaryDirectory() as directory:
        bench = Bench(Path(directory))
        workers = calibrate(bench)
        rows = []
        for point in points:
            runs = [bench.run(point) for _ in range(repetitions)]
            found = predicted(point, workers)
            rows.append(
                {
                    **dataclasses.asdict(point),
                    "measured_s": sorted(each.seconds for each in runs),
                    "predicted_s": found.seconds,
                    "low_s": found.low_s,
                    "high_s": found.high_s,
                    "dollars": sorted(each.dollars for each in runs),
                    "predicted_dollars": found.dollars,
                }
            )
            print(f"{point}: {runs[0].seconds:.2f} s, predicted {found.seconds:.2f} s", flush=True)
    shapes = {"slow": dataclasses.asdict(SLOW), "fast": dataclasses.asdict(FAST)}
    return {"points": rows, "workers": WORKERS, "shapes": shapes, "calibrated": dataclasses.asdict(workers)}


class Bench:
    """Sorts of records whose rows go through storages with limits."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._inputs: dict[tuple[float, int], str] = {}
        self._runs = itertools.count()

    def run(
        self, point: Point, *, slow: Shape = SLOW, fast: Shape = FAST, workers: int | None = None, **options: Any
    ) -> Run:
        """Start workers, and sort.

        :param slow, fast: of the object store, and of the memory. ``options``: settings that differ.
        :raises RuntimeError: if it is no sort.
        """
        source = self._input(point)
        place = self.directory / f"run-{next(self._runs)}"
        storage, memory = self._storages(place, slow, fast)
        settings: dict[str, Any] = {
            "storage": storage,
            "fast_storage": memory if point.method in (Method.FAST, Method.HYBRID) else "",
            "fast_bytes": ROUND_PART * point.size,
            "method": point.method,
            "codec": "none",
            "partitions": point.parts,
            "copies_after": None,
            "tasks_per_call": 1,
            "pipelined": False,
            **options,
        }
        workers = workers or WORKERS
        began = time.monotonic()
        with Engine(max_workers=workers) as engine:
            prepare(engine)
            start_s = time.monotonic() - began
            dataset = fa.read_parquet(source, executor=engine, share_bytes=10**12, **settings)
            outcome = dataset.sort("key").write_parquet(str(place / "out"))
        before = checksum(sorted(map(str, Path(source).parent.iterdir())))
        if checksum(list(outcome.paths)) != (*before[:2], True):
            raise RuntimeError(f"{point}: it is no sort")
        stages_s = sum(each.seconds - each.sampled_s for each in outcome.stages)
        worker_s = workers * start_s + sum(
            min(workers, each.tasks) * (each.seconds - each.sampled_s) for each in outcome.stages
        )
        return Run(start_s + stages_s, stages_s, _dollars(storage, memory, worker_s, stages_s, point.size))

    def _storages(self, place: Path, slow: Shape, fast: Shape) -> tuple[str, str]:
        """Of a run: what was requested of them is counted from zero."""
        found = []
        for name, shape in (("slow", slow), ("fast", fast)):
            (place / name).mkdir(parents=True)
            found.append(describe(place / f"{name}.json", f"file://{place}/{name}", shape))
        return found[0], found[1]

    def _input(self, point: Point) -> str:
        key = (point.size, point.parts)
        if key not in self._inputs:
            directory = self.directory / f"in-{point.size:.0f}-{point.parts}"
            self._inputs[key] = write_records(directory, int(point.size / RECORD), files=point.parts)
        return self._inputs[key]


def calibrate(bench: Bench) -> Workers:
    """What tasks cost without limits: from one size and number of tasks."""
    size, parts = _CALIBRATION
    point = Point(size, parts, Method.COMBINED)
    plain = f"file://{bench.directory}/plain"
    empty = [bench.run(dataclasses.replace(point, size=RECORD * 1_000), storage=plain) for _ in range(3)]
    empty_s = min(each.stages_s for each in empty)
    seconds = min(bench.run(point, storage=plain).stages_s for _ in range(3))
    rate = size / max(0.01, (seconds - empty_s) / 2)
    start_s = sorted(each.seconds - each.stages_s for each in empty)[1]
    return workers_of(rate, empty_s / (2 * parts / WORKERS), start_s)


def workers_of(rate: float, call_s: float, start_s: float) -> Workers:
    """:param rate: bytes per second that all of them together partition, and combine; they share the processors."""
    own = rate / WORKERS
    return Workers(
        memories=(MEMORY,),
        most=WORKERS,
        start_s=start_s,
        call_s=call_s,
        partition_bytes_per_s=own,
        combine_bytes_per_s=own,
        data_part=0.5,
        slowdowns=Slowdowns.of(_factors(SLOW)),
        price=dataclasses.replace(LAMBDA_2026, call=0.0, step_s=0.0),
    )


def predicted(point: Point, workers: Workers) -> Estimate:
    """What the model says of a point."""
    tiers: Mapping[str, Tier] = {"slow": tier_of("slow", SLOW), "fast": tier_of("fast", FAST, is_fast=True)}
    plan = Plan(point.method, "slow", MEMORY, WORKERS, partitions=point.parts)
    if point.method is Method.HYBRID:
        plan = dataclasses.replace(plan, fast_tier="fast", fast_bytes=ROUND_PART * point.size)
    if point.method is Method.FAST:
        plan = dataclasses.replace(plan, tier="fast")
    return estimate(Shuffle(point.size, writers=point.parts), plan, Profile(workers, tiers, (Codec("none"),)))


def tier_of(name: str, shape: Shape, *, is_fast: bool = False) -> Tier:
    """What a shape is for the model."""
    factors = _factors(shape)
    slowness = sum(factors) / len(factors)
    return Tier(
        name,
        reads_per_s=constant(shape.reads),
        writes_per_s=constant(shape.writes),
        read_bytes_per_s=constant(min(shape.worker_read_bytes / slowness, 1e15)),
        write_bytes_per_s=constant(min(shape.worker_written_bytes / slowness, 1e15)),
        total_bytes_per_s=min(shape.read_bytes, shape.written_bytes),
        latency_s=shape.latency_s,
        is_fast=is_fast,
        price=VALKEY_SERVERLESS_2026 if is_fast else S3_2026,
    )


def prepare(engine: Engine) -> None:
    """Let all workers import what tasks need."""
    list(engine.map(_import, range(WORKERS * 4)))


def _factors(shape: Shape) -> list[float]:
    return [1.0] * (WORKERS - shape.slow_workers) + [shape.slow_factor] * shape.slow_workers


def _dollars(storage: str, fast: str, worker_s: float, seconds: float, size: float) -> float:
    """By requests and bytes that were counted, and seconds of workers, also those in which they wait."""
    total = worker_s * MEMORY * LAMBDA_2026.byte_s
    for url, price in ((storage, S3_2026), (fast, VALKEY_SERVERLESS_2026)):
        if not is_shaped(url):
            continue
        found = counts_of(url)
        total += found.reads * price.read + found.writes * price.write
        total += found.read_bytes * price.byte_read + found.written_bytes * price.byte_written
        total += min(size, found.written_bytes) * price.byte_s * seconds
    return total


def _import(_: int) -> None:
    import farcall_analytics.tasks  # noqa: F401 - so that no measurement begins with it
