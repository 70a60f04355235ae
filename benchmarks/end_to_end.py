"""End-to-end benchmark: start-up, memory, latency, throughput and recovery of the whole system on the local tier.

    python -m benchmarks.end_to_end [--tasks 10000] [--calls 1000] [--output FILE]

Real processes on loopback: SDK → API → PostgreSQL and Valkey → forwarder → agent → manager → worker and back.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import shutil
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil

import farcall
from benchmarks.machine import pss_mib
from benchmarks.report import Figure, figure_table, new_report
from examples import latency
from farcall_local.control import wipe
from farcall_local.endpoint import LocalEndpoint
from farcall_local.postgres_files import PostgresInstall
from farcall_local.postgres_template import template_path
from farcall_local.tier import LocalTier

WARM_STARTS = 3


def nothing() -> None:
    """A no-op."""


@contextlib.contextmanager
def deployment(directory: Path) -> Iterator[tuple[LocalTier, LocalEndpoint, farcall.Client]]:
    """A tier, an endpoint and a client for it."""
    with (
        LocalTier(directory / "tier") as tier,
        LocalEndpoint("bench", home=directory, environment=tier.environment()) as endpoint,
        farcall.Client(tier.api_url, tier.token) as client,
    ):
        yield tier, endpoint, client


def starts(directory: Path) -> list[Figure]:
    """Start-up time of the tier: without a database template, with one, and with its own data."""
    shutil.rmtree(template_path(PostgresInstall.find()), ignore_errors=True)
    cold_s = start_s(directory / "cold")
    fresh_s = statistics.median(start_s(directory / f"warm-{number}") for number in range(WARM_STARTS))
    again_s = start_s(directory / "cold")
    for tier in directory.iterdir():
        wipe(tier)
    return [
        Figure("start of the local tier, cold (no database template)", cold_s, "s"),
        Figure("start of the local tier, warm (new directory)", fresh_s, "s", "<= 3", fresh_s <= 3),
        Figure("start of the local tier, warm (same directory again)", again_s, "s", "<= 3", again_s <= 3),
    ]


def start_s(directory: Path) -> float:
    began = time.perf_counter()
    with LocalTier(directory):
        return time.perf_counter() - began


def memory(tier: LocalTier, endpoint: LocalEndpoint) -> list[Figure]:
    """Proportional set size of each idle process."""
    figures = [Figure("memory: supervisor", pss_mib(tier.state.supervisor_pid), "MiB")]
    for name, process in tier.state.processes.items():
        assert process.pid is not None
        family = [process.pid, *(child.pid for child in psutil.Process(process.pid).children(recursive=True))]
        figures.append(Figure(f"memory: {name}", sum(map(pss_mib, family)), "MiB"))
    agent = endpoint.agent()
    assert agent is not None
    figures.append(Figure("memory: endpoint agent", pss_mib(agent.pid), "MiB"))
    for role in ("manager", "worker"):
        found = [pss_mib(process.pid) for process in endpoint.processes(role)]
        figures.append(Figure(f"memory: endpoint {role} (each of {len(found)})", statistics.mean(found), "MiB"))
    return figures


def round_trips(client: farcall.Client, endpoint: LocalEndpoint, *, calls: int) -> list[Figure]:
    """Sequential warm calls, in total and by part."""
    measured = latency.measure(client, endpoint.endpoint_id, calls=calls, warm_up=100)
    figures = []
    for part in ("total", "client", "service", "forwarder", "endpoint", "execution"):
        values = [getattr(each, part) * 1000 for each in measured]
        middle, high = (latency.percentile(values, percent) for percent in (50, 99))
        goal = ("<= 10", middle <= 10) if part == "total" else ("", None)
        figures += [
            Figure(f"round trip, {part}, p50", middle, "ms", *goal),
            Figure(f"round trip, {part}, p99", high, "ms"),
        ]
    return figures


def large_values(client: farcall.Client, endpoint: LocalEndpoint, *, calls: int) -> list[Figure]:
    """Sequential calls that return their bytes. Above 64 KiB these go through the blob store."""
    goals = {1_000: None, 100_000: 10, 1_000_000: 20, 5_000_000: 70}
    figures = []
    with farcall.Executor(endpoint.endpoint_id, client=client) as executor:
        executor.submit(echo, b"").result(timeout=60)
        first_ms = echo_ms(executor, 1_000_000)
        figures.append(
            Figure("first large value of a program, 1,000,000 bytes", first_ms, "ms", "<= 250", first_ms <= 250)
        )
        for size_bytes, goal_ms in goals.items():
            middle = statistics.median(echo_ms(executor, size_bytes) for _ in range(calls))
            goal = ("", None) if goal_ms is None else (f"<= {goal_ms}", middle <= goal_ms)
            figures.append(Figure(f"round trip of {size_bytes:,} bytes, p50", middle, "ms", *goal))
    return figures


def echo(value: bytes) -> bytes:
    return value


def echo_ms(executor: farcall.Executor, size_bytes: int) -> float:
    value = os.urandom(size_bytes)
    began = time.perf_counter()
    assert executor.submit(echo, value).result(timeout=60) == value
    return (time.perf_counter() - began) * 1000


def throughput(client: farcall.Client, endpoint: LocalEndpoint, *, tasks: int) -> list[Figure]:
    """No-ops through the executor, from the first submit to the last result."""
    with farcall.Executor(endpoint.endpoint_id, client=client) as executor:
        executor.submit(nothing).result()
        began = time.perf_counter()
        futures = [executor.submit(nothing) for _ in range(tasks)]
        submitted_s = time.perf_counter() - began
        results = [future.result(timeout=600) for future in futures]
        took_s = time.perf_counter() - began
    rate = len(results) / took_s
    return [
        Figure(f"{tasks:,} no-ops, results", len(results), "", f"{tasks}", len(results) == tasks),
        Figure(f"{tasks:,} no-ops, end to end", rate, "tasks/s", ">= 3000", rate >= 3000),
        Figure(f"{tasks:,} no-ops, calls of submit()", tasks / submitted_s, "calls/s"),
    ]


def recovery(tier: LocalTier, client: farcall.Client, endpoint: LocalEndpoint, *, tasks: int) -> list[Figure]:
    """Tasks while the forwarder is killed twice and Valkey wiped once."""
    done = 0
    progress = threading.Condition()

    def count(_: object) -> None:
        nonlocal done
        with progress:
            done += 1
            progress.notify()

    faults: Sequence[tuple[float, Callable[[], object]]] = [
        (0.2, lambda: tier.kill("forwarder")),
        (0.4, tier.wipe_queue),
        (0.6, lambda: tier.kill("forwarder", signal_number=signal.SIGKILL)),
    ]
    with farcall.Executor(endpoint.endpoint_id, client=client, max_attempts=10) as executor:
        began = time.perf_counter()
        futures = [executor.submit(latency.hello, str(number)) for number in range(tasks)]
        for future in futures:
            future.add_done_callback(count)
        for share, fault in faults:
            with progress:
                progress.wait_for(lambda share=share: done >= share * tasks, timeout=600)  # type: ignore[misc]
            fault()
        right = sum(
            future.exception(timeout=600) is None and future.result() == f"hello, {number}"
            for number, future in enumerate(futures)
        )
        took_s = time.perf_counter() - began
    name = f"{tasks:,} tasks, forwarder killed twice, Valkey wiped"
    return [
        Figure(f"{name}: results", right, "", f"{tasks}", right == tasks),
        Figure(f"{name}: lost", tasks - right, "", "0", right == tasks),
        Figure(f"{name}: end to end", tasks / took_s, "tasks/s"),
    ]


def main() -> None:
    """Measure, write, print."""
    parser = argparse.ArgumentParser(description="Measure the whole system on the local tier.")
    parser.add_argument("--tasks", type=int, default=10_000, help="tasks for throughput and recovery")
    parser.add_argument("--calls", type=int, default=1_000, help="sequential calls for latency")
    parser.add_argument("--output", type=Path, help="also write the JSON here")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    report = new_report()
    directory = Path(tempfile.mkdtemp(prefix="farcall-bench-"))
    figures: list[Figure] = []
    try:
        _progress("starts …")
        figures += starts(directory / "starts")
        with deployment(directory) as (tier, endpoint, client):
            with farcall.Executor(endpoint.endpoint_id, client=client) as executor:
                executor.submit(nothing).result(timeout=60)
            figures += memory(tier, endpoint)
            _progress("round trips …")
            figures += round_trips(client, endpoint, calls=options.calls)
            _progress("large values …")
            figures += large_values(client, endpoint, calls=max(10, options.calls // 20))
            _progress("throughput …")
            figures += throughput(client, endpoint, tasks=options.tasks)
            _progress("recovery …")
            figures += recovery(tier, client, endpoint, tasks=options.tasks)
    finally:
        wipe(directory / "tier")
        shutil.rmtree(directory, ignore_errors=True)
    report["figures"] = [dataclasses.asdict(figure) for figure in figures]
    print(figure_table(report), file=sys.stderr)
    text = json.dumps(report, indent=2)
    print(text)
    if options.output:
        options.output.write_text(text + "\n")


def _progress(step: str) -> None:
    print(step, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
