"""A sort of records from Parquet to Parquet, through an exchange, beside engines of one process, and Ray and Spark."""

from __future__ import annotations

import itertools
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import farcall_analytics as fa
from benchmarks.analytics.data import checksum, write_records
from benchmarks.engine.environments import interpreter
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
_RAY: Final = """
import ray, sys
source, output = sys.argv[1:]
ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
data = ray.data.read_parquet(source.rpartition("/")[0]).sort("key")
data.write_parquet(output, arrow_parquet_args_fn=lambda: {"compression": "none"})
"""
_SPARK: Final = """
import pyspark.sql, sys
source, output = sys.argv[1:]
builder = pyspark.sql.SparkSession.builder.master("local[2]").config("spark.driver.memory", "6g")
session = builder.config("spark.ui.enabled", "false").config("spark.log.level", "ERROR").getOrCreate()
session.read.parquet(source).sort("key").write.option("compression", "uncompressed").parquet(output)
"""
PEERS: Final = {
    "DuckDB": (None, _DUCKDB),
    "Polars": (None, _POLARS),
    "Ray Data": ("ray-data", _RAY),
    "Spark": ("spark", _SPARK),
}
"""Environments, as :func:`~benchmarks.engine.environments.interpreter` has them, and programs."""
INSTALLED: Final = {name: found for name, found in PEERS.items() if found[0] is None}
"""Those that need no other environment."""


def measure(
    *, records: int = RECORDS, repetitions: int = 3, peers: Mapping[str, tuple[str | None, str]] = PEERS
) -> dict[str, Any]:
    """Seconds of each way, as often as asked, one after the other. Spark needs Java, and is left out where there is
    none."""
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
            for peer, (environment, program) in peers.items():
                if environment == "spark" and shutil.which("java") is None:
                    continue
                command = [str(interpreter(environment)), "-c", program]
                output = directory / f"out-{next(runs)}.parquet"
                started = time.monotonic()
                subprocess.run([*command, source, output], check=True, stderr=subprocess.DEVNULL)
                paths = sorted(map(str, output.glob("*.parquet"))) if output.is_dir() else [str(output)]
                _keep(seconds, peer, started, paths, wanted)
    return {"records": records, "seconds": seconds}


def _sort(engine: Engine, source: str, output: Path, partitions: int, place: str, directory: Path) -> list[str]:
    with tempfile.TemporaryDirectory(dir="/dev/shm" if place == "memory" else directory) as storage:
        dataset = fa.read_parquet(
            source,
            executor=engine,
            storage=f"file://{storage}",
            partitions=partitions,
            share_bytes=10**12,
            compression="none",
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
