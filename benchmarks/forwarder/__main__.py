"""Forwarder benchmark: ``python -m benchmarks.forwarder`` measures the capacity of one forwarder process.

A local tier (PostgreSQL whose commits reach the disk, Valkey, a forwarder) and up to 4,000 simulated endpoints in the
process that measures. Everything shares the cores of this machine. The tasks wait in their queues before the clock
starts: the measured part is the way from there to the agent and back into the database.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime as dt
import hashlib
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

import psutil

from benchmarks.forwarder.peers import PeerLoop, SimulatedClient, SimulatedEndpoint, SimulatedPeer, Tally
from benchmarks.machine import pss_mib
from benchmarks.report import Figure, figure_table, new_report, parse_options, save
from farcall_common import wire
from farcall_common.store import (
    Endpoint,
    ForwarderInfo,
    Function,
    PeerKind,
    QueuedTask,
    Stores,
    StoreSettings,
    Task,
    open_stores,
)
from farcall_common.wire import TaskState
from farcall_local.tier import LocalTier

_OWNER_ID: Final = wire.new_id()
_BODY: Final = b"01\nnot decoded"
#: Tasks per message where numbers of endpoints are compared: tasks share the cost of their message, so that the cost
#: of a task depends on this number.
_BATCH: Final = 16
#: Measured points: number of endpoints, and tasks that each of them takes at a time.
_POINTS: Final = ((1, 1000), (1, _BATCH), (256, 64), (256, _BATCH), (4000, _BATCH))
#: Most batches of an endpoint: batches follow one another, and few endpoints with small ones would take long.
_BATCHES: Final = 500
#: Largest ratio that counts as flat.
_FLAT: Final = 1.25
_PAGE: Final = 1000
_TIMEOUT_S: Final = 300.0
#: A peer that is not admitted within this time connects again.
_RECONNECT_S: Final = 30.0


class Bench:
    """A tier, its stores, and the simulated peers of its forwarder."""

    def __init__(self, tier: LocalTier, stores: Stores, peers: PeerLoop) -> None:
        self.tier = tier
        self.stores = stores
        self.peers = peers
        self.endpoints: list[SimulatedEndpoint] = []
        self.tally = Tally()
        self._task_group_id = wire.new_id()
        digest = hashlib.sha256(_BODY).hexdigest()
        self.function = Function(wire.new_id(), _OWNER_ID, "nothing", _BODY, digest)
        stores.functions.add_function(self.function)

    @property
    def forwarder(self) -> psutil.Process:
        return psutil.Process(self.tier.wait_up("forwarder"))

    def cpu_s(self) -> dict[str, float]:
        """CPU time of all processes of the tier and of this one so far, in seconds."""
        here = psutil.Process()
        engines = [(child.name(), cpu_s(child)) for child in here.children(recursive=True)]
        return {
            "forwarder's": cpu_s(self.forwarder),
            "PostgreSQL's": sum(taken for name, taken in engines if name.startswith("postgres")),
            "Valkey's": sum(taken for name, taken in engines if name.startswith("valkey")),
            "the endpoints'": cpu_s(here),
        }

    def address(self, *, other_than: str = "") -> ForwarderInfo:
        """The running forwarder, or the next one after ``other_than``."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            for info in self.stores.queue.forwarders():
                if info.forwarder_id != other_than:
                    return info
            time.sleep(0.01)
        raise TimeoutError("no forwarder")

    def add_endpoints(self, count: int) -> list[SimulatedEndpoint]:
        """Register endpoints that may connect."""
        added = []
        for _ in range(count):
            endpoint = SimulatedEndpoint(wire.new_id(), PeerKind.AGENT, tally=self.tally)
            self.stores.endpoints.put_endpoint(Endpoint(endpoint.subject, _OWNER_ID, f"bench-{endpoint.subject}"))
            now = dt.datetime.now(dt.UTC)
            self.stores.endpoints.add_endpoint_key(endpoint.subject, endpoint.key.public_key, at=now)
            self.stores.queue.admit(endpoint.key, ttl_s=3600)
            added.append(endpoint)
        self.endpoints += added
        return added

    def open_all(self, peers: Sequence[SimulatedPeer], forwarder: ForwarderInfo) -> float:
        """Connect all of these at once; returns the seconds until the last one was admitted.

        A peer that is not admitted for a while tries again, as an agent does: on a busy machine handshakes take longer
        than libzmq permits.
        """
        started_at = time.monotonic()
        waiting = peers
        while waiting and time.monotonic() - started_at < _TIMEOUT_S:
            self.peers.disconnect(waiting)
            self.peers.connect(waiting, forwarder)
            with contextlib.suppress(TimeoutError):
                self.peers.until(lambda: all(peer.is_open for peer in peers), "all are admitted", within_s=_RECONNECT_S)
            waiting = [peer for peer in peers if not peer.is_open]
        if waiting:
            raise TimeoutError(f"{len(waiting)} peers were not admitted")
        return time.monotonic() - started_at

    def submit(self, endpoints: Sequence[SimulatedEndpoint], each: int) -> list[str]:
        """Record and enqueue tasks, the same number for each endpoint."""
        at = dt.datetime.now(dt.UTC)
        tasks = [self._task(endpoint.subject, at) for endpoint in endpoints for _ in range(each)]
        for start in range(0, len(tasks), _PAGE):
            self.stores.tasks.add_tasks(tasks[start : start + _PAGE])
            self.peers.serve(0.0)
        for start in range(0, len(tasks), each):
            batch = [QueuedTask.of(task) for task in tasks[start : start + each]]
            self.stores.queue.enqueue(batch)
            self.peers.serve(0.0)
        return [task.task_id for task in tasks]

    def _task(self, endpoint_id: str, at: dt.datetime) -> Task:
        return Task(
            wire.new_task_id(),
            self._task_group_id,
            _OWNER_ID,
            endpoint_id,
            self.function.function_id,
            self.function.body_hash,
            b"11\nno arguments",
            submitted_at=at,
        )

    def count_failed(self, task_ids: Sequence[str]) -> int:
        """Number of these tasks that did not succeed."""
        found = 0
        for start in range(0, len(task_ids), _PAGE):
            tasks = self.stores.tasks.get_tasks(task_ids[start : start + _PAGE])
            found += sum(task.state is TaskState.SUCCESS for task in tasks.values())
        return len(task_ids) - found


def measure_handshakes(bench: Bench, count: int) -> list[Figure]:
    """Measure handshakes of clients of one owner: CURVE, key look-up, ticket, answer."""
    clients = [SimulatedClient(_OWNER_ID, PeerKind.CLIENT) for _ in range(count)]
    for client in clients:
        bench.stores.queue.admit(client.key, ttl_s=3600)
    cpu_before = cpu_s(bench.forwarder)
    took_s = bench.open_all(clients, bench.address())
    cpu_ms = (cpu_s(bench.forwarder) - cpu_before) / count * 1000
    bench.peers.disconnect()
    rate = count / took_s
    return [
        Figure(f"{count:,} clients at once: handshakes", rate, "/s", ">= 800", rate >= 800),
        Figure(f"{count:,} clients at once: forwarder's CPU time per client", cpu_ms, "ms"),
    ]


def measure_tasks(bench: Bench, endpoints: Sequence[SimulatedEndpoint], credit: int, tasks: int) -> list[Figure]:
    """Measure queued tasks, which connected endpoints take as fast as they arrive."""
    task_ids = bench.submit(endpoints, -(-tasks // len(endpoints)))
    wanted = bench.tally.recorded + len(task_ids)
    before, started_at = bench.cpu_s(), time.monotonic()
    for endpoint in endpoints:
        endpoint.give_credit(credit)
    bench.peers.until(lambda: bench.tally.recorded >= wanted, "all are recorded", within_s=_TIMEOUT_S)
    took_s, after = time.monotonic() - started_at, bench.cpu_s()
    if missing := bench.count_failed(task_ids):
        raise RuntimeError(f"{missing} tasks did not succeed")
    name = _point(len(endpoints), credit)
    rate = len(task_ids) / took_s
    is_waiting = len(endpoints) * credit < _POINTS[0][1]  # most of the time, for answers
    goal = ("", None) if is_waiting else (">= 10,000", rate >= 10_000)
    times = {part: (after[part] - before[part]) / len(task_ids) * 1e6 for part in after}
    return [
        Figure(f"{name}: tasks", rate, "/s", *goal),
        *(Figure(f"{name}: {part} CPU time per task", time_us, "us") for part, time_us in times.items()),
    ]


def _point(endpoints: int, credit: int) -> str:
    return f"{endpoints:,} endpoint{'s'[: endpoints > 1]}, {credit:,} tasks {'each ' * (endpoints > 1)}at a time"


def compared(figures: Sequence[Figure], counts: Sequence[int]) -> list[Figure]:
    """Ratio of a task's cost with the most endpoints to that with fewer, in batches of one size.

    A single endpoint does not share its steps with others, so that numbers in between are compared, too.
    """
    times_us = {figure.name: figure.value for figure in figures}
    *fewer, most = (times_us[f"{_point(count, _BATCH)}: forwarder's CPU time per task"] for count in counts)
    return [
        Figure(
            f"forwarder's CPU time per task, {_BATCH} tasks at a time: {counts[-1]:,} endpoints to {count:,}",
            most / few,
            "x",
            f"<= {_FLAT}",
            most / few <= _FLAT,
        )
        for count, few in zip(counts, fewer, strict=False)
    ]


def measure_storm(bench: Bench, tasks: int) -> list[Figure]:
    """Measure a restart: kill the forwarder while every endpoint has tasks and more wait; all reconnect at once."""
    endpoints = bench.endpoints
    for endpoint in endpoints:
        endpoint.is_holding = True
        endpoint.starts.clear()
    task_ids = bench.submit(endpoints, -(-tasks // len(endpoints)))
    bench.peers.until(
        lambda: sum(bool(endpoint.spool) for endpoint in endpoints) >= len(endpoints),
        "all hold tasks",
        within_s=_TIMEOUT_S,
    )
    killed = bench.address().forwarder_id
    started_at = time.monotonic()
    bench.tier.kill("forwarder")
    bench.peers.disconnect()
    successor = bench.address(other_than=killed)
    restarted_s = time.monotonic() - started_at
    back_s = bench.open_all(endpoints, successor)
    wanted = bench.tally.recorded + len(task_ids)
    for endpoint in endpoints:
        endpoint.is_holding = False
        if endpoint.spool:
            endpoint.finish(list(endpoint.spool.items()))
    bench.peers.until(lambda: bench.tally.recorded >= wanted, "all are recorded", within_s=_TIMEOUT_S)
    settled_s = time.monotonic() - started_at
    lost = bench.count_failed(task_ids)
    twice = sum(count > 1 for endpoint in endpoints for count in endpoint.starts.values())
    name = f"kill -9 with {len(endpoints):,} endpoints"
    return [
        Figure(f"{name}: until a new forwarder runs", restarted_s, "s"),
        Figure(f"{name}: until all are back, reconnecting at once", back_s, "s"),
        Figure(f"{name}: until {len(task_ids):,} tasks are recorded", settled_s, "s"),
        Figure(f"{name}: tasks lost", lost, "", "0", lost == 0),
        Figure(f"{name}: tasks started twice", twice, "", "0", twice == 0),
    ]


def measure_idle(bench: Bench, for_s: float) -> list[Figure]:
    """Measure the cost of idle connected endpoints."""
    process = bench.forwarder
    cpu_before, started_at = cpu_s(process), time.monotonic()
    with contextlib.suppress(TimeoutError):
        bench.peers.until(lambda: False, "nothing", within_s=for_s)
    share = (cpu_s(process) - cpu_before) / (time.monotonic() - started_at)
    memory = pss_mib(process.pid)
    count = len(bench.endpoints)
    return [
        Figure(f"{count:,} idle endpoints: memory of the forwarder", memory, "MiB", "<= 381", memory <= 381),
        Figure(f"{count:,} idle endpoints: share of a core", 100 * share, "%"),
    ]


def cpu_s(process: psutil.Process) -> float:
    """CPU time of a process so far, in seconds."""
    times = process.cpu_times()
    return float(times.user + times.system)


@contextlib.contextmanager
def deployment(directory: Path) -> Iterator[Bench]:
    """A new tier without connections."""
    with LocalTier(directory) as tier, contextlib.ExitStack() as stack:
        secrets = json.loads((directory / "secrets.json").read_text())
        environment = {
            "FARCALL_DATABASE_URL": tier.state.database_url,
            "FARCALL_QUEUE_URL": tier.state.queue_url,
            "FARCALL_BLOB_BUCKET": "not-used-by-small-payloads",
            "FARCALL_TICKET_KEY": secrets["ticket_key"],
        }
        stores = open_stores(StoreSettings.from_environment(environment))
        stack.callback(stores.close)
        yield Bench(tier, stores, stack.enter_context(PeerLoop(stores.tickets)))


def measure(points: Sequence[tuple[int, int]], tasks: int, report: Callable[[Figure], None]) -> list[Figure]:
    """All figures, in the order in which they are measured."""
    figures: list[Figure] = []

    def add(measured: Sequence[Figure]) -> None:
        for figure in measured:
            figures.append(figure)
            report(figure)

    with tempfile.TemporaryDirectory(prefix="farcall-bench-") as directory, deployment(Path(directory)) as bench:
        most = max(endpoints for endpoints, _ in points)
        add([Figure("memory of a forwarder without connections", pss_mib(bench.forwarder.pid), "MiB")])
        add(measure_handshakes(bench, most))
        for endpoints, credit in points:
            new = bench.add_endpoints(endpoints - len(bench.endpoints))
            bench.peers.disconnect()
            for endpoint in bench.endpoints:
                endpoint.credit = 0
            took_s = bench.open_all(bench.endpoints, bench.address())
            if new and endpoints == most:
                add([Figure(f"{endpoints:,} endpoints at once: admitted", endpoints / took_s, "/s")])
                add(measure_idle(bench, for_s=10.0))
            at_once = endpoints * credit
            add(measure_tasks(bench, bench.endpoints, credit, max(at_once, min(tasks, at_once * _BATCHES))))
        add(compared(figures, sorted({endpoints for endpoints, credit in points if credit == _BATCH})))
        add(
            [
                Figure(
                    f"{most:,} endpoints after the tasks: memory of the forwarder", pss_mib(bench.forwarder.pid), "MiB"
                )
            ]
        )
        add(measure_storm(bench, tasks))
    return figures


def main() -> None:
    """Measure, write, print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tasks", type=int, default=40_000, help="for each number of endpoints")
    parser.add_argument("--endpoints", type=int, default=max(_POINTS)[0], help="the most that are connected")
    options = parse_options(parser, "forwarder.json")
    points = dict.fromkeys((min(endpoints, options.endpoints), credit) for endpoints, credit in _POINTS)
    report = new_report(tasks=options.tasks)

    def progress(figure: Figure) -> None:
        print(f"{figure.name}: {figure.shown()}", file=sys.stderr, flush=True)

    report["figures"] = [dataclasses.asdict(figure) for figure in measure(list(points), options.tasks, progress)]
    save(report, options.output, figure_table)


if __name__ == "__main__":
    main()
