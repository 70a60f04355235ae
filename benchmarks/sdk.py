"""SDK benchmark: CPU time per task in the SDK, and bursts of calls through the local tier, compared with peers.

    python -m benchmarks.sdk [--output FILE]

The overhead is the CPU time of the SDK's threads with a transport that answers at once. Bursts go through real
processes on loopback, with two workers. Peers run without service and database: they show the cost of a local pool.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import httpx
import msgspec

import farcall
from benchmarks.end_to_end import deployment
from benchmarks.engine.driver import BURST_ROUNDS, BURST_WORKERS, burst
from benchmarks.engine.environments import interpreter_path, run_driver
from benchmarks.engine.functions import noop
from benchmarks.report import (
    GOAL_COLUMNS,
    Report,
    goal_row,
    heading,
    new_report,
    page,
    parse_options,
    save,
    spread,
    table,
)
from farcall_common.wire import Envelope, ResultsReady, StreamResult, TaskState, decode, encode

PEERS: Final = {"ProcessPoolExecutor": None, "Parsl tuned": "parsl", "Ray tasks": "ray"}
OVERHEAD_TASKS: Final = 5000
OVERHEAD_ROUNDS: Final = 7
AT_ONCE: Final = 5000
_TIMEOUT_S: Final = 300
_GOAL_US: Final = 50


def main() -> None:
    """Measure, write, print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only-overhead", action="store_true", help="print that part, and write nothing")
    options = parse_options(parser, "sdk.json")
    report = new_report(overhead_us=overhead())
    if options.only_overhead:
        print(json.dumps(report, indent=1))
        return
    report["bursts"] = {"farcall": bursts()} | {name: peer for name in PEERS if (peer := peer_bursts(name))}
    save(report, options.output, as_tables)


# -- the SDK alone -----------------------------------------------------------------------------------------------------


class _Gate(httpx.BaseTransport):
    """An API that accepts every submit while it is open, and measures its own CPU time."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.open.set()
        self.own_s = 0.0

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("/submit"):
            self.open.wait()
            began_s = time.thread_time()
            ids = msgspec.json.decode(request.read())["task_ids"]
            response = httpx.Response(200, content=msgspec.json.encode({"tasks": ids}))
            self.own_s += time.thread_time() - began_s
            return response
        if request.url.path.endswith("/functions"):
            return httpx.Response(200, json={"function_uuid": "00000000-0000-4000-8000-000000000001"})
        is_known = "/endpoints/" in request.url.path or request.url.path.endswith("/cancel")
        return httpx.Response(200 if is_known else 503, json={"results": {}})


def overhead() -> dict[str, dict[str, float]]:
    """CPU microseconds per task: in ``submit()``, from there to the request, and from a result to its future."""
    gate = _Gate()
    parts: dict[str, list[float]] = {"submit": [], "to_wire": [], "result": []}
    with farcall.Client("http://farcall.test", "token", transport=gate) as client:
        executor = farcall.Executor("00000000-0000-4000-8000-000000000002", client, batch_size=500)
        executor.submit(abs, 0)
        _wait_until_submitted(executor, 1)
        for number in range(OVERHEAD_ROUNDS):
            gate.open.clear()
            executor.submit(abs, 0)  # its request delays the others, so that the two parts do not overlap
            began_s = time.thread_time()
            futures = [executor.submit(abs, value) for value in range(OVERHEAD_TASKS)]
            parts["submit"].append(time.thread_time() - began_s)
            began_s, gate.own_s = time.process_time(), 0.0
            gate.open.set()
            _wait_until_submitted(executor, 2 + number + (number + 1) * OVERHEAD_TASKS)
            parts["to_wire"].append(time.process_time() - began_s - gate.own_s)
            messages = [_pushed(futures, at) for at in range(0, OVERHEAD_TASKS, 100)]
            began_s = time.thread_time()
            for frames in messages:
                envelope = decode(frames)
                assert isinstance(envelope.message, ResultsReady)
                executor._engine._collector.take_pushed(envelope.message.results, envelope.frames)
            parts["result"].append(time.thread_time() - began_s)
            assert [future.result(0) for future in futures] == list(range(OVERHEAD_TASKS))
        executor.shutdown(wait=False, cancel_futures=True)
    return {name: spread([each / OVERHEAD_TASKS * 1e6 for each in values]) for name, values in parts.items()}


def _wait_until_submitted(executor: farcall.Executor, count: int) -> None:
    deadline = time.monotonic() + _TIMEOUT_S
    while executor.task_count_submitted < count:
        assert time.monotonic() < deadline
        time.sleep(0.002)


def _pushed(futures: Sequence[farcall.ComputeFuture[int]], first: int) -> Sequence[bytes]:
    """A forwarder's message with the results of a hundred tasks, with timings and details."""
    at = time.time()
    stations = ("submitted_at", "enqueued_at", "leased_at", "accepted_at", "started_at", "ended_at", "returned_at")
    results = tuple(
        StreamResult(
            task_id=future.task_id,
            task_group_id=future.task_group_id,
            state=TaskState.SUCCESS,
            attempt=1,
            result=frame,
            finished_at=at,
            timings=dict.fromkeys(stations, at),
            details={"python_version": "3.11.7", "os": "Linux"},
        )
        for frame, future in enumerate(futures[first : first + 100])
    )
    values = tuple(b"11\n%d" % (first + number) for number in range(len(results)))
    return encode(Envelope(ResultsReady(cursor="1-1", results=results), values))


# -- the local tier ----------------------------------------------------------------------------------------------------


class _OnTier:
    """An executor with the interface of :class:`benchmarks.engine.systems.System`."""

    def __init__(self, executor: farcall.Executor) -> None:
        self._executor = executor

    def submit(self, function: Any, *args: Any) -> Any:
        return self._executor.submit(function, *args)

    def gather(self, handles: Sequence[Any]) -> list[Any]:
        return [handle.result(_TIMEOUT_S) for handle in handles]

    def stop(self) -> None:
        self._executor.shutdown()


def bursts() -> Report:
    """Bursts with a batch size of their length, and many calls at once with that batch size."""
    figures: Report = {}
    with tempfile.TemporaryDirectory() as directory, deployment(Path(directory)) as (_, endpoint, client):
        for size in BURST_ROUNDS:
            system = _OnTier(farcall.Executor(endpoint.endpoint_id, client, batch_size=size))
            system.gather([system.submit(noop) for _ in range(10)])
            figures[str(size)] = burst(system, size)
            count = AT_ONCE if size > 1 else AT_ONCE // 5
            began = time.perf_counter()
            system.gather([system.submit(noop) for _ in range(count)])
            figures[str(size)]["at_once_per_s"] = count / (time.perf_counter() - began)
            system.stop()
    return figures


def peer_bursts(name: str) -> Report | None:
    """The same on a peer, if its environment exists (``make bench-engine`` creates it)."""
    python = interpreter_path(PEERS[name])
    return run_driver(python, name, "--bursts") if python.exists() else None


# -- tables ------------------------------------------------------------------------------------------------------------


def as_tables(report: Report) -> str:
    """Markdown."""
    parts = report["overhead_us"]
    total_us = sum(part["median"] for part in parts.values())
    named = {
        "submit": "`submit()`, in the caller's thread",
        "to_wire": "from there to the bytes of the request",
        "result": "from the bytes of the result to the future",
    }
    rows = [
        goal_row(text, f"{parts[name]['median']:.1f} ({parts[name]['min']:.1f} to {parts[name]['max']:.1f})")
        for name, text in named.items()
    ]
    rows.append(goal_row("total", f"{total_us:.1f}", f"<= {_GOAL_US}", total_us <= _GOAL_US))
    bursts = []
    for name, sizes in report["bursts"].items():
        shown = [sizes[str(size)] for size in BURST_ROUNDS]
        bursts.append([f"{name}: ms, p50 (p99)", *(f"{each['p50_ms']:,.1f} ({each['p99_ms']:,.1f})" for each in shown)])
        bursts.append([f"{name}: tasks/s", *(f"{each['per_s']:,.0f}" for each in shown)])
    many = (report["bursts"]["farcall"][str(size)]["at_once_per_s"] for size in BURST_ROUNDS)
    bursts.append(
        [f"farcall: {AT_ONCE:,} at once in batches of this size, tasks/s", *(f"{rate:,.0f}" for rate in many)]
    )
    columns = ["CPU time of the SDK per task", "us: median (min to max)", *GOAL_COLUMNS[2:]]
    return page(
        heading(report, f"{BURST_WORKERS} workers"),
        table(columns, rows),
        table(["burst of no-ops", *(f"{size:,}" for size in BURST_ROUNDS)], bursts),
    )


if __name__ == "__main__":
    main()
