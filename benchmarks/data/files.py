"""Files of tasks: one from an object store, compared with the library alone, and one that many tasks share."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import obstore
from obstore.store import S3Store

from benchmarks.report import GOAL_COLUMNS, Figure, Report, goal_row, heading, page, spread, table
from farcall_endpoint import Engine, File

_BYTES: Final = 1_000_000_000
_QUICK_BYTES: Final = 20_000_000
_SHARED_BYTES: Final = 50_000_000
_LARGE: Final = ("large-1", "large-2", "large-3", "large-4")
_TASKS: Final = 1000
_GOAL: Final = 0.8
_BUCKET: Final = "benchmark"
_TIMEOUT_S: Final = 300
Samples = dict[str, float]


def size_of(file: Any) -> int:
    """The size of a task's file."""
    return int(os.stat(file).st_size)  # noqa: PTH116 - a File is a path for all libraries


def nothing() -> int:
    """A task without a file."""
    return 0


def measure(*, quick: bool, full: bool) -> Samples:  # noqa: ARG001 - all of it in every round
    """One round."""
    size = _QUICK_BYTES if quick else _BYTES
    shared = min(size, _SHARED_BYTES)
    tasks = _TASKS // (10 if quick else 1)
    sizes = {**dict.fromkeys(_LARGE, size), "shared": shared, "small": 1000}
    with _objects(sizes) as url, Engine(max_workers=2) as engine, tempfile.TemporaryDirectory() as directory:
        engine.wait_ready()
        first_s = _staged(engine, "small", 1000)
        alone_s = staged_s = 0.0
        for number, key in enumerate(_LARGE):
            for is_staged in (number % 2 == 0, number % 2 == 1):
                os.sync()  # what is written before is not to be paid for by what follows
                if is_staged:
                    staged_s += _staged(engine, key, size)
                else:
                    alone_s += _alone(url, key, Path(directory, key))
        again_s = _staged(engine, _LARGE[0], size)
        began = time.perf_counter()
        futures = [engine.submit(size_of, File(f"s3://{_BUCKET}/shared")) for _ in range(tasks)]
        assert {future.result(timeout=_TIMEOUT_S) for future in futures} == {shared}
        shared_s = time.perf_counter() - began
        began = time.perf_counter()
        for future in [engine.submit(nothing) for _ in range(tasks)]:
            future.result(timeout=_TIMEOUT_S)
        without_s = time.perf_counter() - began
    return {
        "the first file, 1 KB, round trip of the task, ms": 1000 * first_s,
        "one file, obstore alone, MB/s": len(_LARGE) * size / alone_s / 1e6,
        "one file, task with it, MB/s": len(_LARGE) * size / staged_s / 1e6,
        "one file, task with it to obstore alone": alone_s / staged_s,
        "the same file again, round trip of the task, ms": 1000 * again_s,
        "tasks that share one file, ms a task": 1000 * shared_s / tasks,
        "tasks without a file, ms a task": 1000 * without_s / tasks,
    }


def _staged(engine: Engine, key: str, size: int) -> float:
    """Seconds of a task with a file."""
    began = time.perf_counter()
    assert engine.submit(size_of, File(f"s3://{_BUCKET}/{key}")).result(timeout=_TIMEOUT_S) == size
    return time.perf_counter() - began


def _alone(url: str, key: str, path: Path) -> float:
    """Seconds of the library by itself. The file stays, as that of a task does."""
    store = S3Store(_BUCKET, config={"endpoint": url}, client_options={"allow_http": True})
    with path.open("wb") as file:
        began = time.perf_counter()
        for chunk in obstore.get(store, key).stream(min_chunk_size=2**18):
            file.write(memoryview(chunk))
        return time.perf_counter() - began


@contextlib.contextmanager
def _objects(sizes: Mapping[str, int]) -> Iterator[str]:
    """The address of a server with objects of these sizes, which the environment names meanwhile."""
    with tempfile.TemporaryDirectory() as directory:
        bucket = Path(directory, _BUCKET)
        bucket.mkdir()
        for key, size in sizes.items():
            (bucket / key).write_bytes(os.urandom(1000) * (size // 1000))
        command = [sys.executable, "-m", "benchmarks.data.object_server", directory]
        server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert server.stdout is not None
        former = dict(os.environ)
        os.environ |= {
            "AWS_ACCESS_KEY_ID": "a",
            "AWS_SECRET_ACCESS_KEY": "b",
            "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": server.stdout.readline().strip(),
        }
        try:
            yield os.environ["AWS_ENDPOINT_URL"]
        finally:
            os.environ.clear()
            os.environ.update(former)
            server.communicate()


def as_table(report: Report) -> str:
    """The goal, and medians and spreads of all rounds."""
    rounds: list[Samples] = report["rounds"]
    found = {name: spread([each[name] for each in rounds]) for name in rounds[0]}
    ratio = found["one file, task with it to obstore alone"]["median"]
    goal = Figure("a file staged in, to the library alone", ratio, "x", f"≥ {_GOAL:g}", ratio >= _GOAL)
    rows = [(name, *(f"{each[key]:,.3g}" for key in ("median", "min", "max"))) for name, each in found.items()]
    return page(
        heading(
            report,
            f"{len(rounds)} rounds; {len(_LARGE)} files of {_BYTES // 10**6:,} MB, by obstore and by tasks in turn",
            f"{_TASKS:,} tasks share one of {_SHARED_BYTES // 10**6} MB",
        ),
        table(GOAL_COLUMNS, [goal_row(goal.name, goal.shown(), goal.goal, goal.reached)]),
        table(("figure", "median", "min", "max"), rows),
    )
