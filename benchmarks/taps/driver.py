"""TaPS benchmark driver: runs applications, or failures, on one executor, and prints the figures as JSON.

    python -m benchmarks.taps.driver EXECUTOR [--quick] [--objects DIRECTORY | --failures KIND …]

Runs with the interpreter of an environment that has TaPS, its executors and Farcall; in an empty directory.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import importlib.metadata
import json
import random
import re
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from taps.apps import AppConfig
from taps.apps.synthetic import warmup_task
from taps.engine import Engine
from taps.plugins import get_app_configs, get_executor_configs, get_filter_configs, get_transformer_configs

import benchmarks.taps.plugins  # noqa: F401 - it registers them
from benchmarks.taps.workloads import APPLICATIONS, EXECUTORS, LARGE, LARGE_TYPES, QUICK, connector, synthetic

_TIMEOUT_S: Final = 60.0
_CODE: Final = re.compile(r"^\[[A-Z_]+\]")
"""In the message of an error of Farcall."""
_PACKAGES: Final = ("taps", "dask", "parsl", "ray", "numpy")


class Records:
    """What TaPS records of the tasks of an application."""

    def __init__(self) -> None:
        self.found: list[Mapping[str, Any]] = []
        self._changed = threading.Condition()

    def log(self, record: Mapping[str, Any]) -> None:
        """Take a record; any thread."""
        with self._changed:
            self.found.append(record)
            self._changed.notify()

    def close(self) -> None:
        """Nothing."""

    def wait_for(self, count: int) -> None:
        """Wait until so many tasks have ended.

        :raises TimeoutError: after a minute.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: len(self.found) >= count, _TIMEOUT_S):
                raise TimeoutError(f"{len(self.found)} of {count} tasks have ended after {_TIMEOUT_S:g} s")

    def failed(self) -> list[tuple[str, str]]:
        """Task and error, for each that failed: the class, and the code of an error of ours."""
        errors = [(each["name"], each["exception"]) for each in self.found if not each["success"]]
        return [(name, " ".join([error["type"], *_CODE.findall(error["message"])])) for name, error in errors]


def measure(title: str, applications: Mapping[str, Mapping[str, Any]], directory: Path | None) -> dict[str, Any]:
    """Seconds until the first result, and of each application; the second time that it runs, and the first.

    :param directory: for large values; None: they are in messages.
    """
    began = time.perf_counter()
    records = Records()
    with _engine(title, records, directory) as engine:
        engine.submit(warmup_task).result(_TIMEOUT_S)
        first_result_s = time.perf_counter() - began
        records.wait_for(1)
        figures = {name: _application(engine, records, options) for name, options in applications.items()}
    versions = {each: importlib.metadata.version(each) for each in _PACKAGES}
    return {"first_result_s": first_result_s, "applications": figures, "versions": versions}


def _application(engine: Engine, records: Records, options: Mapping[str, Any]) -> dict[str, Any]:
    random.seed(0)
    with contextlib.closing(_configuration(options).get_app()) as app:
        first_s, _ = _run(engine, records, app)
        took_s, tasks = _run(engine, records, app)
    return {"first_s": first_s, "makespan_s": took_s, "tasks": tasks}


def _run(engine: Engine, records: Records, app: Any) -> tuple[float, int]:
    """Seconds of an application, and its tasks.

    :raises RuntimeError: if a task failed.
    """
    before = engine.tasks_executed
    began = time.perf_counter()
    app.run(engine=engine, run_dir=Path.cwd())
    took_s = time.perf_counter() - began
    records.wait_for(engine.tasks_executed)
    if failed := records.failed():
        raise RuntimeError(f"tasks failed: {failed}")
    return took_s, engine.tasks_executed - before


def inject(title: str, kinds: Sequence[str]) -> dict[str, Any]:
    """For each kind of failure, what an application of two tasks sees of it: the second needs the result of the first,
    which fails. Then whether the executor still runs tasks."""
    seen = {}
    records = Records()
    with _engine(title, records) as engine:
        for kind in kinds:
            records.found.clear()
            before = engine.tasks_executed
            options = {"name": "failures", "base": "synthetic", "config": synthetic("sequential", 2)}
            with contextlib.closing(_configuration({**options, "failure_type": kind}).get_app()) as app:
                raised = _raised(lambda app=app: app.run(engine=engine, run_dir=Path.cwd()))
            with contextlib.suppress(TimeoutError):
                records.wait_for(engine.tasks_executed - before)
            after = _raised(lambda: engine.submit(warmup_task).result(_TIMEOUT_S))
            seen[kind] = {"raised": raised, "tasks": records.failed(), "after": after}
    return {"failures": seen}


def _raised(action: Any) -> str | None:
    """The class of what an action raises."""
    try:
        action()
    except Exception as error:  # noqa: BLE001 - each executor has its own
        return type(error).__name__
    return None


def _engine(title: str, records: Records, directory: Path | None = None) -> Engine:
    options = EXECUTORS[title]
    executor: concurrent.futures.Executor = get_executor_configs()[options["name"]](**options).get_executor()
    if directory is None:
        return Engine(executor, record_logger=records)
    large = get_filter_configs()["object-type"](patterns=LARGE_TYPES).get_filter()
    by_proxy = get_transformer_configs()["proxystore"](connector=connector(str(directory))).get_transformer()
    return Engine(executor, filter_=large, transformer=by_proxy, record_logger=records)


def _configuration(options: Mapping[str, Any]) -> AppConfig:
    return get_app_configs()[options["name"]](**options)


def main() -> None:
    """Measure, print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("executor", choices=EXECUTORS)
    parser.add_argument("--quick", action="store_true", help="two small applications")
    parser.add_argument("--failures", nargs="+", metavar="KIND", help="failures instead of applications")
    parser.add_argument("--objects", type=Path, metavar="DIRECTORY", help="large values are files here")
    options = parser.parse_args()
    applications = QUICK if options.quick else APPLICATIONS
    if options.failures:
        found = inject(options.executor, options.failures)
    elif options.objects:
        large = {name: applications[name] for name in LARGE if name in applications}
        found = measure(options.executor, large, options.objects)
    else:
        found = measure(options.executor, applications, None)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
