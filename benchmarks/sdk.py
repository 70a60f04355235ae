"""The SDK: its own work for each task, and bursts of calls through the whole local tier, with peers beside it.

    python -m benchmarks.sdk [--output FILE]

The overhead is processor time of the SDK's threads with nothing behind the transport: what is left when network and
service are infinitely fast. Bursts go through real processes on loopback, two workers; those of peers stay on the
machine by design (no service, no database), so they say what a local pool costs, not what a service could.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import statistics
import subprocess
import sys
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
from benchmarks.engine.functions import noop
from benchmarks.machine import circumstances, facts
from benchmarks.sdk_bursts import ROUNDS, WORKERS, measured
from farcall_common.wire import Envelope, ResultsReady, StreamResult, TaskState, decode, encode

Report = dict[str, Any]

PEERS: Final = {"ProcessPoolExecutor": None, "Parsl tuned": "parsl", "Ray tasks": "ray"}
OVERHEAD_TASKS: Final = 5000
OVERHEAD_ROUNDS: Final = 7
AT_ONCE: Final = 5000
_ENVIRONMENTS: Final = Path(__file__).parent / "engine" / ".venv-peers"
_WITHIN_S: Final = 300
_WISH_US: Final = 50


def main() -> None:
    """Measure, write, print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "sdk.json")
    parser.add_argument("--only-overhead", action="store_true", help="print that part, and write nothing")
    options = parser.parse_args()
    report: Report = {
        "measured_at": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "machine": facts(),
        "overhead_us": overhead(),
    }
    if options.only_overhead:
        print(json.dumps(report, indent=1))
        return
    report["bursts"] = {"farcall": bursts()} | {name: peer for name in PEERS if (peer := peer_bursts(name))}
    options.output.write_text(json.dumps(report, indent=1) + "\n")
    print(as_tables(report))


# -- the SDK alone -----------------------------------------------------------------------------------------------------


class _Gate(httpx.BaseTransport):
    """An API that takes every submit at once; its own work is counted apart. Submits wait while it is shut."""

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
        knows = "/endpoints/" in request.url.path or request.url.path.endswith("/cancel")
        return httpx.Response(200 if knows else 503, json={"results": {}})


def overhead() -> dict[str, dict[str, float]]:
    """Microseconds of processor time for each task: in ``submit()``, from there to the wire, and from the bytes of a
    result to its future."""
    gate = _Gate()
    parts: dict[str, list[float]] = {"submit": [], "to_wire": [], "result": []}
    with farcall.Client("http://farcall.test", "token", transport=gate) as client:
        executor = farcall.Executor("00000000-0000-4000-8000-000000000002", client, batch_size=500)
        executor.submit(abs, 0)
        _wait_until_taken(executor, 1)
        for number in range(OVERHEAD_ROUNDS):
            gate.open.clear()
            executor.submit(abs, 0)  # its request holds the others back, so that the two parts do not overlap
            began_s = time.thread_time()
            futures = [executor.submit(abs, value) for value in range(OVERHEAD_TASKS)]
            parts["submit"].append(time.thread_time() - began_s)
            began_s, gate.own_s = time.process_time(), 0.0
            gate.open.set()
            _wait_until_taken(executor, 2 + number + (number + 1) * OVERHEAD_TASKS)
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
    return {name: _spread([each / OVERHEAD_TASKS * 1e6 for each in values]) for name, values in parts.items()}


def _wait_until_taken(executor: farcall.Executor, count: int) -> None:
    deadline = time.monotonic() + _WITHIN_S
    while executor.task_count_submitted < count:
        assert time.monotonic() < deadline
        time.sleep(0.002)


def _pushed(futures: Sequence[farcall.ComputeFuture[int]], first: int) -> Sequence[bytes]:
    """What a forwarder pushes of a hundred tasks, with the stations and details that it pushes."""
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


# -- the whole way -----------------------------------------------------------------------------------------------------


class _OnTier:
    """The executor as the other contestants are."""

    def __init__(self, executor: farcall.Executor) -> None:
        self._executor = executor

    def submit(self, function: Any, *args: Any) -> Any:
        return self._executor.submit(function, *args)

    def gather(self, handles: Sequence[Any]) -> list[Any]:
        return [handle.result(_WITHIN_S) for handle in handles]

    def stop(self) -> None:
        self._executor.shutdown()


def bursts() -> Report:
    """Bursts through an executor whose requests hold as many calls, and many calls at once in such requests."""
    figures: Report = {}
    with tempfile.TemporaryDirectory() as directory, deployment(Path(directory)) as (_, endpoint, client):
        for size in ROUNDS:
            contestant = _OnTier(farcall.Executor(endpoint.endpoint_id, client, batch_size=size))
            contestant.gather([contestant.submit(noop) for _ in range(10)])
            figures[str(size)] = measured(contestant, size)
            count = AT_ONCE if size > 1 else AT_ONCE // 5
            began = time.perf_counter()
            contestant.gather([contestant.submit(noop) for _ in range(count)])
            figures[str(size)]["at_once_per_s"] = count / (time.perf_counter() - began)
            contestant.stop()
    return figures


def peer_bursts(name: str) -> Report | None:
    """The same on a peer, if its environment is there (``make bench-engine`` makes them)."""
    environment = PEERS[name]
    python = Path(sys.executable) if environment is None else _ENVIRONMENTS / environment / "bin" / "python"
    if not python.exists():
        return None
    with tempfile.TemporaryDirectory() as directory:
        path = os.pathsep.join((str(python.parent), os.environ["PATH"]))  # where its own programs are
        place = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "PATH": path}
        command = [str(python), "-m", "benchmarks.sdk_bursts", name]
        done = subprocess.run(command, cwd=directory, env=place, stdout=subprocess.PIPE, timeout=_WITHIN_S, check=True)
    figures: Report = json.loads(done.stdout.splitlines()[-1])
    return figures


# -- tables ------------------------------------------------------------------------------------------------------------


def as_tables(report: Report) -> str:
    """Markdown."""
    machine, parts = report["machine"], report["overhead_us"]
    total = sum(part["median"] for part in parts.values())
    named = {
        "submit": "`submit()`, in the caller's thread",
        "to_wire": "from there to the bytes of the request",
        "result": "from the bytes of the result to the future",
    }
    where = (
        f"Measured at {report['measured_at']} on {machine['cores']} cores of {machine['cpu']}, Python "
        f"{machine['python']}, {circumstances(machine)}; {WORKERS} workers."
    )
    lines = [
        where,
        "",
        "| the SDK's processor time for each task | us: median (min to max) | wish | reached |",
        "|---|--:|--:|---|",
        *[
            f"| {text} | {parts[name]['median']:.1f} ({parts[name]['min']:.1f} to {parts[name]['max']:.1f}) | | |"
            for name, text in named.items()
        ],
        f"| in all | {total:.1f} | <= {_WISH_US} | {'yes' if total <= _WISH_US else '**no**'} |",
        "",
        "| no-ops in hand at once | " + " | ".join(f"{size:,}" for size in ROUNDS) + " |",
        "|---|" + "--:|" * len(ROUNDS),
    ]
    for name, sizes in report["bursts"].items():
        shown = [sizes[str(size)] for size in ROUNDS]
        times = " | ".join(f"{each['p50_ms']:,.1f} ({each['p99_ms']:,.1f})" for each in shown)
        lines.append(f"| {name}: all back after, ms p50 (p99) | {times} |")
        lines.append(f"| {name}: tasks/s | " + " | ".join(f"{each['per_s']:,.0f}" for each in shown) + " |")
    many = " | ".join(f"{report['bursts']['farcall'][str(size)]['at_once_per_s']:,.0f}" for size in ROUNDS)
    lines.append(f"| farcall: {AT_ONCE:,} at once in requests of so many, tasks/s | {many} |")
    return "\n".join(lines) + "\n"


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


if __name__ == "__main__":
    main()
