"""Sorts on the file system in the memory of this machine, beside what the model predicts from a profile of it."""

from __future__ import annotations

import dataclasses
import itertools
import os
import tempfile
from pathlib import Path
from typing import Any, Final

import farcall_analytics as fa
from benchmarks.analytics.data import write_records
from benchmarks.analytics.shaped import RECORD, prepare
from farcall_analytics import profile_files
from farcall_analytics.measuring import measure as measure_profile
from farcall_analytics.profiles import Profile
from farcall_endpoint import Engine

WORKERS: Final = 2
SIZES: Final = (50e6, 100e6, 200e6, 400e6)
PARTS: Final = (4, 8, 16)
_CALIBRATION: Final = (150e6, 6)


def measure(*, repetitions: int = 3, scale: float = 1.0) -> dict[str, Any]:
    """Seconds of each sort, measured and predicted before it began."""
    before = os.environ.get("FARCALL_HOME")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name, Engine(max_workers=WORKERS) as engine:
        os.environ["FARCALL_HOME"] = f"{name}/home"
        try:
            prepare(engine)
            return {"points": _points(Path(name), engine, repetitions, scale)}
        finally:
            os.environ.pop("FARCALL_HOME") if before is None else os.environ.update(FARCALL_HOME=before)


def _points(directory: Path, engine: Engine, repetitions: int, scale: float) -> list[dict[str, Any]]:
    storage = f"file://{directory}/blocks"
    profile = _calibrated(directory, engine, storage, measure_profile(engine, [storage]), scale)
    profile_files.save(profile_files.profile_path(engine), profile, list(profile.tiers))
    found = []
    for size, parts in itertools.product(SIZES, PARTS):
        runs = [_sort(directory, engine, storage, size * scale, parts) for _ in range(repetitions)]
        own = {"size": size, "parts": parts, "measured_s": sorted(run[0] for run in runs), "predicted_s": runs[0][1]}
        found.append(own)
        print(f"unshaped: {own}", flush=True)
    return found


def _calibrated(directory: Path, engine: Engine, storage: str, profile: Profile, scale: float) -> Profile:
    """The profile with the rates of processors that one sort of records has: its rows are not those of a profile."""
    size, parts = _CALIBRATION
    for _ in range(2):  # the first one shows the rate, the second one what is left
        profile_files.save(profile_files.profile_path(engine), profile, list(profile.tiers))
        measured, expected = min(_sort(directory, engine, storage, size * scale, parts) for _ in range(2))
        factor = expected / measured
        workers = profile.workers
        rates = {name: getattr(workers, name) * factor for name in ("partition_bytes_per_s", "combine_bytes_per_s")}
        profile = dataclasses.replace(profile, workers=dataclasses.replace(workers, **rates))
    return profile


def _sort(directory: Path, engine: Engine, storage: str, size: float, parts: int) -> tuple[float, float]:
    """Seconds of the stages without those of the sample, and what was predicted."""
    place = directory / f"in-{size:.0f}-{parts}"
    if not place.exists():
        write_records(place, int(size / RECORD), files=parts)
    dataset = fa.read_parquet(
        f"{place}/*.parquet",
        executor=engine,
        storage=storage,
        share_bytes=10**12,
        partitions=parts,
        method="combined",
        codec="none",
        tasks_per_call=1,
    )
    outcome = dataset.sort("key").write_parquet(str(directory / "out"))
    for each in outcome.paths:
        Path(each).unlink()
    return sum(each.seconds - each.sampled_s for each in outcome.stages), outcome.plan.estimate.seconds
