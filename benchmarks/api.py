"""The submit path of the API: how many tasks it accepts, and how long a submit takes at the handler.

    python -m benchmarks.api [--seconds 5] [--batch 100] [--output FILE]

What a Lambda runs, from the proxy event to the answer, on real PostgreSQL (commits are durable) and Valkey, which share
the machine's cores with it. API Gateway, the authorizer and the network are not in it.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import dataclasses
import datetime as dt
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

from benchmarks.machine import circumstances, facts
from farcall_common.store import StoreSettings, open_stores
from farcall_common.wire.ids import new_task_id
from farcall_lambdas.app import Application
from farcall_lambdas.proxy_event import proxy_event
from farcall_lambdas.settings import ApiSettings
from farcall_local.tier import LocalTier
from tests.support.memory_api import ALICE

#: Processes that accept at once; a Lambda answers one request at a time, so load is processes.
PROCESSES: Final = (1, 2, 4)
#: A call with one small argument.
PAYLOAD: Final = "33\n11\neyJhIjogMX0=aaaaaaaaaaaaaaaaaaaa\n"
#: The limits are looked at as always, and never reached.
SETTINGS: Final = ApiSettings(
    max_queue_depth=100_000_000, max_waiting=100_000_000, rate_per_s=1e6, rate_burst=100_000_000
)

Report = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Work:
    """What one process submits: batches of so many tasks for so many seconds."""

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
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "api.json")
    options = parser.parse_args()
    report: Report = {
        "measured_at": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "machine": facts(),
        "batch": options.batch,
        "seconds": options.seconds,
        "accepted_per_s": {},
        "batch_ms": {},
        "cpu_ms_per_batch": {},
    }
    with tempfile.TemporaryDirectory() as directory, LocalTier(Path(directory)) as tier:
        environment = {
            "FARCALL_DATABASE_URL": tier.state.database_url,
            "FARCALL_QUEUE_URL": tier.state.queue_url,
            "FARCALL_BLOB_BUCKET": "not-used-by-small-payloads",
            "FARCALL_TICKET_KEY": "not used by submits, but long enough",
        }
        endpoint_id, function_id = _prepared(environment)
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
    options.output.write_text(json.dumps(report, indent=1) + "\n")
    print(as_table(report))


@dataclasses.dataclass(frozen=True)
class Done:
    """How many seconds each batch took at the handler, and the processor time of all of them."""

    durations_s: Sequence[float]
    cpu_s: float


def submit(work: Work) -> Done:
    """Submit one batch after the other."""
    stores = open_stores(StoreSettings.from_environment(work.environment), max_connections=1)
    application = Application.over(stores, SETTINGS)
    path = f"/v3/endpoints/{work.endpoint_id}/submit"
    durations, cpu_s = [], 0.0
    try:
        _answer(application, path, _body(work))  # connections are opened, code is imported
        until = time.perf_counter() + work.seconds
        while (began := time.perf_counter()) < until:
            body = _body(work)
            began, began_cpu = time.perf_counter(), time.process_time()
            _answer(application, path, body)
            durations.append(time.perf_counter() - began)
            cpu_s += time.process_time() - began_cpu
    finally:
        stores.close()
    return Done(durations, cpu_s)


def as_table(report: Report) -> str:
    """The figures, as Markdown."""
    machine = report["machine"]
    best = max(report["accepted_per_s"].values())
    single = report["single_ms"]
    where = (
        f"Measured at {report['measured_at']} on {machine['cores']} cores of {machine['cpu']}, Python "
        f"{machine['python']}, {circumstances(machine)}; PostgreSQL and Valkey on the same cores."
    )
    lines = [
        where,
        "",
        "| figure | measured | wish | reached |",
        "|---|--:|--:|---|",
        f"| one submit of one task, p50 | {single['p50']:.2f} ms | <= 5 | {_reached(single['p50'] <= 5)} |",
        f"| one submit of one task, p99 | {single['p99']:.2f} ms | | |",
    ]
    for count, rate in report["accepted_per_s"].items():
        processes = "1 process" if count == "1" else f"{count} processes"
        wish = f">= 20,000 | {_reached(rate >= 20_000)}" if rate == best else " | "
        spread = report["batch_ms"][count]
        lines.append(f"| tasks accepted in batches of {report['batch']}, {processes} | {rate:,} /s | {wish} |")
        lines.append(f"| of which each batch, p50 (p99) | {spread['p50']:.1f} ({spread['p99']:.1f}) ms | | |")
    cpu = report["cpu_ms_per_batch"]["1"]
    ceiling = 1000 * machine["cores"] * report["batch"] / (cpu["handler"] + cpu["stores"])
    lines.append(
        f"| processor time of a batch: handler, and stores | {cpu['handler']:.1f} and {cpu['stores']:.1f} ms | | |"
    )
    lines.append(f"| which is, for {machine['cores']} cores that do nothing else, at most | {ceiling:,.0f} /s | | |")
    return "\n".join(lines) + "\n"


def _prepared(environment: Mapping[str, str]) -> tuple[str, str]:
    """An endpoint that nobody serves, and a function."""
    stores = open_stores(StoreSettings.from_environment(environment), max_connections=1)
    application = Application.over(stores, SETTINGS)
    endpoint = _answer(application, "/v3/endpoints", {"endpoint_name": "nobody"})
    function = _answer(application, "/v3/functions", {"function_name": "f", "function_code": PAYLOAD})
    stores.close()
    return endpoint["endpoint_id"], function["function_uuid"]


def _at_once(work: Work, count: int) -> list[Done]:
    """What so many processes accept at the same time."""
    with concurrent.futures.ProcessPoolExecutor(count, mp_context=multiprocessing.get_context("spawn")) as pool:
        return list(pool.map(submit, [work] * count))


def _cpu_of_stores(tier: LocalTier) -> float:
    """Processor seconds of PostgreSQL, with its ended connections, and of Valkey."""
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
    """As the SDK sends it: with the ids of the tasks, so that it may be sent again."""
    ids = [new_task_id() for _ in range(work.batch)]
    return {"tasks": {work.function_id: [PAYLOAD] * work.batch}, "task_ids": {work.function_id: ids}}


def _answer(application: Application, path: str, body: object) -> Any:
    answer = application.answer(proxy_event("POST", path, json.dumps(body), caller=ALICE), LambdaContext())
    assert answer["statusCode"] == 200, answer["body"]
    return json.loads(answer["body"])


def _spread(durations: Sequence[float]) -> dict[str, float]:
    """Percentiles in milliseconds."""
    cuts = statistics.quantiles(durations, n=100)
    return {"p50": round(cuts[49] * 1000, 3), "p99": round(cuts[98] * 1000, 3), "count": len(durations)}


def _reached(yes: bool) -> str:
    return "yes" if yes else "**no**"


if __name__ == "__main__":
    main()
