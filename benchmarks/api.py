"""API benchmark: throughput and latency of submits in the Lambda handler.

    python -m benchmarks.api [--seconds 5] [--batch 100] [--output FILE]

The code from the proxy event to the answer, on real PostgreSQL (commits are durable) and Valkey, which share the
machine's cores with it. API Gateway, the authorizer and the network are not included.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import dataclasses
import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import psutil
from aws_lambda_powertools.utilities.typing import LambdaContext

from benchmarks.report import (
    GOAL_COLUMNS,
    Report,
    goal_row,
    heading,
    new_report,
    page,
    parse_options,
    save,
    table,
)
from farcall_common.store import StoreSettings, open_stores
from farcall_common.wire.ids import new_task_id
from farcall_lambdas.app import Application
from farcall_lambdas.proxy_event import proxy_event
from farcall_lambdas.settings import ApiSettings
from farcall_local.tier import LocalTier
from tests.support.memory_api import ALICE

#: Concurrent processes: a Lambda handles one request at a time.
PROCESSES: Final = (1, 2, 4)
#: A call with one small argument.
PAYLOAD: Final = "33\n11\neyJhIjogMX0=aaaaaaaaaaaaaaaaaaaa\n"
#: Limits that are checked and never reached.
SETTINGS: Final = ApiSettings(
    max_queue_depth=100_000_000, max_waiting=100_000_000, rate_per_s=1e6, rate_burst=100_000_000
)


@dataclasses.dataclass(frozen=True)
class Work:
    """The load of one process: batches of this many tasks for this many seconds."""

    environment: Mapping[str, str]
    endpoint_id: str
    function_id: str
    batch: int
    seconds: float


def main() -> None:
    """Measure, write, print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=5.0, help="length of each measurement")
    parser.add_argument("--batch", type=int, default=100)
    options = parse_options(parser, "api.json")
    report = new_report(
        batch=options.batch, seconds=options.seconds, accepted_per_s={}, batch_ms={}, cpu_ms_per_batch={}
    )
    with tempfile.TemporaryDirectory() as directory, LocalTier(Path(directory)) as tier:
        environment = {
            "FARCALL_DATABASE_URL": tier.state.database_url,
            "FARCALL_QUEUE_URL": tier.state.queue_url,
            "FARCALL_BLOB_BUCKET": "not-used-by-small-payloads",
            "FARCALL_TICKET_KEY": "not used by submits, but long enough",
        }
        endpoint_id, function_id = _register(environment)
        work = Work(environment, endpoint_id, function_id, 1, options.seconds)
        report["single_ms"] = _spread(submit(dataclasses.replace(work, seconds=min(3.0, options.seconds))).durations_s)
        work = dataclasses.replace(work, batch=options.batch)
        for count in PROCESSES:
            before_s = _cpu_of_stores(tier)
            parts = _at_once(work, count)
            stores_s = _cpu_of_stores(tier) - before_s
            durations = [one for part in parts for one in part.durations_s]
            rate = sum(len(part.durations_s) * work.batch / sum(part.durations_s) for part in parts)
            report["accepted_per_s"][str(count)] = round(rate)
            report["batch_ms"][str(count)] = _spread(durations)
            report["cpu_ms_per_batch"][str(count)] = {
                "handler": round(1000 * sum(part.cpu_s for part in parts) / len(durations), 2),
                "stores": round(1000 * stores_s / len(durations), 2),
            }
    save(report, options.output, as_table)


@dataclasses.dataclass(frozen=True)
class Done:
    """Seconds that each batch took in the handler, and the CPU time of all of them."""

    durations_s: Sequence[float]
    cpu_s: float


def submit(work: Work) -> Done:
    """Submit batches sequentially."""
    stores = open_stores(StoreSettings.from_environment(work.environment), max_connections=1)
    application = Application.over(stores, SETTINGS)
    path = f"/v3/endpoints/{work.endpoint_id}/submit"
    durations, cpu_s = [], 0.0
    try:
        _post(application, path, _body(work))  # opens connections and imports code
        until = time.perf_counter() + work.seconds
        while (began := time.perf_counter()) < until:
            body = _body(work)
            began, began_cpu = time.perf_counter(), time.process_time()
            _post(application, path, body)
            durations.append(time.perf_counter() - began)
            cpu_s += time.process_time() - began_cpu
    finally:
        stores.close()
    return Done(durations, cpu_s)


def as_table(report: Report) -> str:
    """The figures, as Markdown."""
    best = max(report["accepted_per_s"].values())
    single = report["single_ms"]
    rows = [
        goal_row("submit of one task, p50", f"{single['p50']:.2f} ms", "<= 5", single["p50"] <= 5),
        goal_row("submit of one task, p99", f"{single['p99']:.2f} ms"),
    ]
    for count, rate in report["accepted_per_s"].items():
        name = f"batches of {report['batch']}, {'1 process' if count == '1' else f'{count} processes'}"
        goal = (">= 20,000", rate >= 20_000) if rate == best else ()
        times = report["batch_ms"][count]
        rows.append(goal_row(f"{name}: tasks", f"{rate:,} /s", *goal))
        rows.append(goal_row(f"{name}: time of a batch, p50 (p99)", f"{times['p50']:.1f} ({times['p99']:.1f}) ms"))
    cpu, cores = report["cpu_ms_per_batch"]["1"], report["machine"]["cores"]
    ceiling = 1000 * cores * report["batch"] / (cpu["handler"] + cpu["stores"])
    rows.append(
        goal_row("CPU time of a batch: handler, and stores", f"{cpu['handler']:.1f} and {cpu['stores']:.1f} ms")
    )
    rows.append(goal_row(f"most tasks on {cores} cores at this CPU time", f"{ceiling:,.0f} /s"))
    return page(heading(report, "PostgreSQL and Valkey on the same cores"), table(GOAL_COLUMNS, rows))


def _register(environment: Mapping[str, str]) -> tuple[str, str]:
    """Register an endpoint without an agent, and a function."""
    stores = open_stores(StoreSettings.from_environment(environment), max_connections=1)
    application = Application.over(stores, SETTINGS)
    endpoint = _post(application, "/v3/endpoints", {"endpoint_name": "offline"})
    function = _post(application, "/v3/functions", {"function_name": "f", "function_code": PAYLOAD})
    stores.close()
    return endpoint["endpoint_id"], function["function_uuid"]


def _at_once(work: Work, count: int) -> list[Done]:
    """The results of this many concurrent processes."""
    with concurrent.futures.ProcessPoolExecutor(count, mp_context=multiprocessing.get_context("spawn")) as pool:
        return list(pool.map(submit, [work] * count))


def _cpu_of_stores(tier: LocalTier) -> float:
    """CPU seconds of PostgreSQL, with its closed connections, and of Valkey."""
    total_s = 0.0
    for name in ("postgres", "valkey"):
        parent = psutil.Process(tier.pid(name))
        for process in [parent, *parent.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                total_s += times.user + times.system
        times = parent.cpu_times()
        total_s += times.children_user + times.children_system
    return total_s


def _body(work: Work) -> Any:
    """The request body of the SDK: with task ids, so that it can be retried."""
    ids = [new_task_id() for _ in range(work.batch)]
    return {"tasks": {work.function_id: [PAYLOAD] * work.batch}, "task_ids": {work.function_id: ids}}


def _post(application: Application, path: str, body: object) -> Any:
    answer = application.answer(proxy_event("POST", path, json.dumps(body), caller=ALICE), LambdaContext())
    assert answer["statusCode"] == 200, answer["body"]
    return json.loads(answer["body"])


def _spread(durations: Sequence[float]) -> dict[str, float]:
    """Percentiles in milliseconds."""
    cuts = statistics.quantiles(durations, n=100)
    return {"p50": round(cuts[49] * 1000, 3), "p99": round(cuts[98] * 1000, 3), "count": len(durations)}


if __name__ == "__main__":
    main()
