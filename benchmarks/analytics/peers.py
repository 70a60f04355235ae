"""A sort of records from Parquet to Parquet, through an exchange, beside engines that run in one process."""

from __future__ import annotations

import itertools
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import farcall_analytics as fa
from benchmarks.analytics.data import checksum, write_records
from farcall_endpoint import Engine

RECORDS: Final = 10_000_000
FILES: Final = 8
PARTITIONS: Final = (4, 8)
_DUCKDB: Final = """
import duckdb, sys
source, output = sys.argv[1:]
duckdb.sql(f"copy (select * from '{source}' order by key) to '{output}' (format parquet, compression uncompressed)")
"""
_POLARS: Final = """
import polars, sys
source, output = sys.argv[1:]
polars.scan_parquet(source).sort("key").sink_parquet(output, compression="uncompressed")
"""
PROGRAMS: Final = {"DuckDB": _DUCKDB, "Polars": _POLARS}


def measure(*, records: int = RECORDS, repetitions: int = 3) -> dict[str, Any]:
    """Seconds of each way, as often as asked, one after the other."""
    seconds: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as name, Engine(max_workers=2) as engine:
        directory = Path(name)
        source = write_records(directory / "in", records, files=FILES)
        wanted = checksum(sorted(map(str, (directory / "in").iterdir())))
        runs = itertools.count()
        for _ in range(repetitions):
            for partitions, place in itertools.product(PARTITIONS, ("file", "memory")):
                output = directory / f"out-{next(runs)}"
                started = time.monotonic()
                paths = _sort(engine, source, output, partitions, place, directory)
                _keep(seconds, f"farcall, {partitions} partitions, {place}", started, paths, wanted)
            for peer, program in PROGRAMS.items():
                output = directory / f"out-{next(runs)}.parquet"
                started = time.monotonic()
                subprocess.run([sys.executable, "-c", program, source, output], check=True)
                _keep(seconds, peer, started, [str(output)], wanted)
    return {"records": records, "seconds": seconds}


def _sort(engine: Engine, source: str, output: Path, partitions: int, place: str, directory: Path) -> list[str]:
    with tempfile.TemporaryDirectory(dir="/dev/shm" if place == "memory" else directory) as storage:
        dataset = fa.read_parquet(
            source, executor=engine, storage=f"file://{storage}", partitions=partitions, share_bytes=10**12
        )
        return list(dataset.sort("key").write_parquet(str(output)).paths)


def _keep(
    seconds: dict[str, list[float]], name: str, started: float, paths: list[str], wanted: tuple[int, int, bool]
) -> None:
    elapsed_s = time.monotonic() - started
    if checksum(paths) != (*wanted[:2], True):
        raise RuntimeError(f"{name} has not sorted them")
    for path in paths:
        Path(path).unlink()
    seconds.setdefault(name, []).append(elapsed_s)
    print(f"{name}: {elapsed_s:.2f} s", flush=True)
