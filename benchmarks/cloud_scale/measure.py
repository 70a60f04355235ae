"""Cost of one task in each part of the cloud tier: ``python -m benchmarks.cloud_scale.measure``.

No-ops run through a whole local tier. The CPU time of each part, PostgreSQL's write-ahead log and transactions, and the
commands of Valkey are read before and after. Prints the tables ``[per_task]`` and ``[per_endpoint]`` of
``inputs.toml``.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import psutil
import psycopg
import redis
import zmq

import farcall
from farcall_common.store import open_records
from farcall_common.store.model import Endpoint, EndpointStatus, Presence
from farcall_common.wire import new_id
from farcall_lambdas.canary import http_caller
from farcall_local.endpoint import LocalEndpoint
from farcall_local.tier import LocalTier

_TASKS = 20_000
_WAITING = 20_000
_ENDPOINTS = 500
_REPEATS = 5_000
#: Presences in one statement: those of 4,000 endpoints that come due in the same half second.
_PRESENCES = 67
_SETTLE_S = 3.0


def noop() -> None:
    """A no-op."""


def main() -> None:
    """Measure, and print."""
    with (
        tempfile.TemporaryDirectory() as home,
        LocalTier() as tier,
        LocalEndpoint("scale", home=Path(home), environment=tier.environment()) as endpoint,
        farcall.Client(tier.api_url, tier.token) as client,
    ):
        _run(client, endpoint.endpoint_id, 1000)  # warm
        time.sleep(_SETTLE_S)
        before = _read(tier)
        _run(client, endpoint.endpoint_id, _TASKS)
        time.sleep(_SETTLE_S)
        used = {name: (after - before[name]) / _TASKS for name, after in _read(tier).items()}
        endpoint.stop()
        waiting_bytes = _memory_of_waiting(tier, client, endpoint.endpoint_id)
        presence_us = _presence(tier)
        api_us, postgres_us = _connects(tier, endpoint.endpoint_id)
    print("[per_task]  # of a no-op, submitted in batches of up to 1,000")
    for part in ("api", "postgres", "valkey", "forwarder"):
        print(f"{part}_us = {1e6 * used[part]:.0f}")
    print(f"wal_bytes = {used['wal_bytes']:.0f}")
    print(f"transactions = {used['transactions']:.4f}")
    print(f"valkey_commands = {used['commands']:.2f}")
    print(f"database_bytes = {used['database_bytes']:.0f}")
    print(f"waiting_bytes = {waiting_bytes:.0f}")
    print("[per_endpoint]")
    print(f"presence_postgres_us = {presence_us:.0f}")
    print(f"connect_api_us = {api_us:.0f}")
    print(f"connect_postgres_us = {postgres_us:.0f}")


def _run(client: farcall.Client, endpoint_id: str, tasks: int) -> None:
    with farcall.Executor(endpoint_id, client=client, batch_size=1000) as executor:
        futures = [executor.submit(noop) for _ in range(tasks)]
        for future in futures:
            future.result(120)


def _memory_of_waiting(tier: LocalTier, client: farcall.Client, endpoint_id: str) -> float:
    """Bytes of Valkey's memory for a waiting task."""
    queue = redis.Redis.from_url(tier.state.queue_url)
    empty = int(queue.info("memory")["used_memory"])
    batch = client.create_batch()
    function_id = client.register_function(noop)
    for _ in range(_WAITING):
        batch.add(function_id)
    client.batch_run(endpoint_id, batch)
    full = int(queue.info("memory")["used_memory"])
    queue.close()
    return (full - empty) / _WAITING


def _presence(tier: LocalTier) -> float:
    """CPU microseconds of PostgreSQL to record the presence of an endpoint."""
    records = open_records(tier.state.database_url)
    endpoint_ids = [new_id() for _ in range(_ENDPOINTS)]
    for endpoint_id in endpoint_ids:
        records.endpoints.put_endpoint(Endpoint(endpoint_id, new_id(), "measured"))
    before = _read(tier)["postgres"]
    for number in range(_REPEATS):
        start = number * _PRESENCES % (_ENDPOINTS - _PRESENCES)
        records.endpoints.set_presence(
            [Presence(each, True, EndpointStatus()) for each in endpoint_ids[start : start + _PRESENCES]]
        )
    used = _read(tier)["postgres"] - before
    records.close()
    return 1e6 * used / _REPEATS / _PRESENCES


def _connects(tier: LocalTier, endpoint_id: str) -> tuple[float, float]:
    """CPU microseconds of API and PostgreSQL for a connect request of an endpoint."""
    body = {"public_key": zmq.curve_keypair()[0].decode()}
    call = http_caller(tier.api_url, tier.token)
    before = _read(tier)
    for _ in range(_REPEATS):
        call("POST", f"/v3/endpoints/{endpoint_id}/connect", body)
    after = _read(tier)
    return tuple(1e6 * (after[part] - before[part]) / _REPEATS for part in ("api", "postgres"))  # type: ignore[return-value]


def _read(tier: LocalTier) -> Mapping[str, float]:
    found = {name: _processor_s(process.pid) for name, process in tier.state.processes.items() if process.pid}
    with psycopg.connect(tier.state.database_url, autocommit=True) as database:
        [wal] = database.execute("SELECT wal_bytes FROM pg_stat_wal").fetchone() or (0,)
        [commits] = database.execute("SELECT sum(xact_commit) FROM pg_stat_database").fetchone() or (0,)
        [size] = database.execute("SELECT pg_database_size(current_database())").fetchone() or (0,)
    queue = redis.Redis.from_url(tier.state.queue_url)
    commands = int(queue.info("stats")["total_commands_processed"])
    queue.close()
    counters = {"wal_bytes": wal, "transactions": commits, "database_bytes": size, "commands": commands}
    return found | {name: float(value) for name, value in counters.items()}


def _processor_s(pid: int) -> float:
    """CPU seconds of a process and its children, ended ones included."""
    process = psutil.Process(pid)
    total = 0.0
    for each in [process, *process.children(recursive=True)]:
        times = each.cpu_times()
        total += times.user + times.system
    times = process.cpu_times()
    return total + times.children_user + times.children_system


if __name__ == "__main__":
    main()
