"""What a later release wrote, read by this one: both are there during a deployment, and this one after a rollback."""

from __future__ import annotations

import datetime as dt
import json
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import psycopg
import pytest
import redis

from farcall_common import wire
from farcall_common.errors import ErrorRecord, Fault
from farcall_common.store import (
    Endpoint,
    ForwarderInfo,
    PeerKey,
    PeerKind,
    Queue,
    Records,
    SharedResults,
    Stores,
    StoreSettings,
    TaskEvent,
    ValkeyQueue,
    open_records,
    open_stores,
)
from farcall_common.wire import Reporter, TaskState
from farcall_forwarder.adapters.batched_steps import delivery_of
from tests.integration.forwarder_peers import Agent, Cloud, environ, forwarding
from tests.integration.store_servers import Valkey
from tests.support.stores import single
from tests.unit.test_store_queue import lease, make_queued, make_result, own
from tests.unit.test_store_records import RecordsSuite, make_task, make_task_result, transition
from tests.waiting import wait_until

__all__ = ["environ"]

#: A state that this release does not know.
LATER = "hibernating"


@pytest.fixture
def expanded_url(postgres_url: str) -> str:
    """A database that a later release has migrated already: each table has a column more, and tasks may end in a way
    that this release does not know."""
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        tables = connection.execute("SELECT tablename FROM pg_tables WHERE schemaname = 'public'").fetchall()
        assert len(tables) > 8
        for (table,) in tables:
            connection.execute(f"ALTER TABLE {table} ADD COLUMN added_later text NOT NULL DEFAULT 'later'".encode())
        connection.execute("ALTER TABLE task DROP CONSTRAINT task_ended_check")
    return postgres_url


@pytest.fixture
def records(expanded_url: str) -> Iterator[Records]:
    records = open_records(expanded_url, timeout_s=5)
    yield records
    records.close()


@pytest.fixture
def queue(valkey: Valkey) -> Iterator[Queue]:
    queue = ValkeyQueue(valkey.url)
    yield queue
    queue.close()


@pytest.fixture
def server(valkey: Valkey) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(valkey.url) as client:
        yield client


class TestRecordsOfALaterSchema(RecordsSuite):
    """A migration that adds is harmless to the code that it finds."""


def rewrite(url: str, task_id: str, **columns: Any) -> None:
    """Change a row behind the back of this release."""
    changes = ", ".join(f"{name} = %({name})s" for name in columns)
    with psycopg.connect(url, autocommit=True) as connection:
        changed = connection.execute(
            f"UPDATE task SET {changes} WHERE task_id = %(id)s".encode(), {**columns, "id": task_id}
        )
        assert changed.rowcount == 1


def later(value: object, **fields: Any) -> bytes:
    """A value as a later release would pack it: with a field that this one lacks, or words that it does not know."""
    return msgspec.msgpack.encode({**as_dict(value), "added_later": {"deep": [1]}, **fields})


def as_dict(value: object) -> dict[str, Any]:
    fields = msgspec.to_builtins(value, builtin_types=(bytes,))
    assert isinstance(fields, dict)
    return fields


# -- rows --------------------------------------------------------------------------------------------------------------


def test_a_result_of_an_unknown_kind_is_a_failure_and_is_kept(records: Records, expanded_url: str) -> None:
    records.tasks.add_tasks([make_task("t1"), make_task("t2")])
    records.tasks.record_results([make_task_result("t1")], at=dt.datetime.now(dt.UTC))
    error = {"code": "LATER", "message": "as the later release says", "fault": "us", "added_later": 1}
    rewrite(expanded_url, "t1", state=LATER, error=json.dumps(error))
    ended = records.tasks.get_tasks(["t1"])["t1"]
    assert (ended.state, ended.error and ended.error.code) == (TaskState.FAILED, "LATER")
    assert not records.tasks.record_results([make_task_result("t1", result=b"another")], at=dt.datetime.now(dt.UTC))
    assert not records.tasks.record_transitions([transition("t1", TaskState.RUNNING, attempt=7)])
    assert [task.task_id for task in records.tasks.list_open_tasks("e1")] == ["t2"]
    [group] = records.tasks.list_groups("alice")
    assert group.states == {TaskState.FAILED: 1, TaskState.RECEIVED: 1}
    with psycopg.connect(expanded_url) as connection:
        assert connection.execute("SELECT state FROM task WHERE task_id = 't1'").fetchone() == (LATER,)


def test_an_open_task_in_an_unknown_state_can_end(records: Records, expanded_url: str) -> None:
    records.tasks.add_tasks([make_task("t1")])
    rewrite(expanded_url, "t1", state=LATER)
    [open_task] = records.tasks.list_open_tasks("e1")
    assert open_task.state is TaskState.RUNNING
    assert list(records.tasks.record_results([make_task_result("t1")], at=dt.datetime.now(dt.UTC))) == ["t1"]
    assert records.tasks.get_tasks(["t1"])["t1"].state is TaskState.SUCCESS


def test_events_and_references_with_unknown_fields_are_read(records: Records, expanded_url: str) -> None:
    records.tasks.add_tasks([make_task("t1")])
    ref = {"blob_key": "alice/k", "size_bytes": 3, "sha256": "k", "added_later": True}
    rewrite(expanded_url, "t1", payload=None, payload_ref=json.dumps(ref))
    stored = records.tasks.get_tasks(["t1"])["t1"].payload_ref
    assert stored is not None
    assert (stored.blob_key, stored.size_bytes) == ("alice/k", 3)
    with psycopg.connect(expanded_url, autocommit=True) as connection:
        insert = (
            b"INSERT INTO task_event (task_id, state, reporter, at, attempt, detail) VALUES (%s, %s, %s, now(), 1, %s)"
        )
        connection.execute(insert, ("t1", LATER, "forwarder", json.dumps({"spool_id": "s"})))
        connection.execute(insert, ("t1", LATER, "forwarder", json.dumps({"code": "LATER"})))
    events = records.tasks.list_events("t1")
    assert [(event.state, event.reporter) for event in events[1:]] == [
        (TaskState.RUNNING, Reporter.FORWARDER),
        (TaskState.FAILED, Reporter.FORWARDER),
    ]
    assert isinstance(events[1], TaskEvent)
    assert events[1].detail == {"spool_id": "s"}  # where a task was sent to is never overlooked


def test_unknown_reporters_and_faults_are_accepted(records: Records, expanded_url: str) -> None:
    records.tasks.add_tasks([make_task("t1", idempotent=False), make_task("t2")])
    records.tasks.record_results([make_task_result("t1")], at=dt.datetime.now(dt.UTC))
    error = {"code": "LATER", "message": "as the later release says", "fault": "weather", "hint": "Wait."}
    rewrite(expanded_url, "t1", state="failed", result=None, error=json.dumps(error))
    with psycopg.connect(expanded_url, autocommit=True) as connection:
        connection.execute(
            b"INSERT INTO task_event (task_id, state, reporter, at, attempt, detail)"
            b" VALUES ('t2', 'running', 'broker', now(), 1, '{\"spool_id\": \"s\"}')"
        )
    assert records.tasks.get_tasks(["t1"])["t1"].error == ErrorRecord("LATER", error["message"], "Wait.", Fault.US)
    assert [task.error and task.error.fault for task in records.tasks.list_tasks("alice")] == [None, Fault.US]
    assert [event.reporter for event in records.tasks.list_events("t2")] == [Reporter.API, Reporter.FORWARDER]
    assert delivery_of(records.tasks, "t2") == (frozenset({"s"}), False)
    with psycopg.connect(expanded_url) as connection:  # it is not written back over
        stored = connection.execute("SELECT error FROM task WHERE task_id = 't1'").fetchone()
    assert stored == (error,)


def test_an_error_with_unknown_fields_is_read(records: Records, expanded_url: str) -> None:
    error = ErrorRecord("BOOM", "boom", fault=Fault.USER_CODE)
    records.tasks.add_tasks([make_task("t1")])
    end = make_task_result("t1", result=None, state=TaskState.FAILED, error=error)
    records.tasks.record_results([end], at=dt.datetime.now(dt.UTC))
    rewrite(expanded_url, "t1", error=json.dumps({**error.to_json(), "added_later": ["x"]}))
    assert records.tasks.get_tasks(["t1"])["t1"].error == error


# -- the queue ---------------------------------------------------------------------------------------------------------


def test_a_queued_task_with_unknown_fields_is_leased(queue: Queue, server: redis.Redis) -> None:
    fence = own(queue)
    queue.enqueue([make_queued("t1")])
    server.hset("t:{e1}:t1", "task", later(make_queued("t1")))
    [leased] = single.lease(queue, "e1", fence, limit=5, lease_s=30)
    assert leased.task == make_queued("t1")


@pytest.mark.parametrize(
    "unknown",
    [
        {"state": LATER},
        {"reporter": "broker"},
        {"state": "failed", "result": None, "error": {"code": "LATER", "message": "m", "fault": "weather"}},
    ],
    ids=["state", "reporter", "fault"],
)
def test_a_result_of_an_unknown_kind_is_left_to_newer_releases(
    queue: Queue, server: redis.Redis, unknown: dict[str, Any]
) -> None:
    fence = own(queue)
    queue.enqueue([make_queued("t1"), make_queued("t2")])
    lease(queue, fence)
    single.ack(queue, fence, [make_result("t1"), make_result("t2")])
    server.hset("t:{e1}:t1", "result", later(make_result("t1"), **unknown))
    assert [end.task_id for end in queue.outbox("e1")] == ["t2"]
    queue.flushed({"e1": ["t2"]})
    assert server.lrange("o:{e1}", 0, -1) == [b"t1"]


def test_peers_and_forwarders_of_an_unknown_kind_are_ignored(queue: Queue, server: redis.Redis) -> None:
    known, unknown = PeerKey("known", PeerKind.AGENT, "e1"), PeerKey("unknown", PeerKind.AGENT, "e1")
    server.set("zap:known", later(known))
    server.set("zap:unknown", later(unknown, kind="something else"))
    assert queue.find_peers(["known", "unknown"]) == {"known": known}
    info = ForwarderInfo("w1", "tcp://127.0.0.1:1", "key")
    queue.announce(info, ttl_s=15)
    server.set("fwd:w1", later(info))
    assert queue.forwarders() == [info]


# -- a forwarder -------------------------------------------------------------------------------------------------------


@pytest.fixture
def stores(expanded_url: str, environ: dict[str, str]) -> Iterator[Stores]:
    opened = open_stores(StoreSettings.from_environment(environ), max_connections=6)
    yield opened
    opened.close()


def test_a_forwarder_works_with_a_later_api_and_a_later_forwarder(
    stores: Stores, expanded_url: str, server: redis.Redis
) -> None:
    cloud = Cloud(stores)
    endpoint_id = cloud.add_endpoint()
    with forwarding(stores) as forwarder, Agent(cloud, endpoint_id, forwarder) as agent:
        agent.open_session(credit=5)
        [held] = cloud.submit_new(endpoint_id, 1)
        [spec] = agent.take(1)
        # The later release ends the task in its own way, and says so to the one beside it.
        rewrite(expanded_url, held, state=LATER, finished_at=dt.datetime.now(dt.UTC))
        shared = SharedResults([make_result(held, endpoint_id=endpoint_id)], {}, time.time())
        words = later(shared, results=[as_dict(shared.results[0]) | {"state": LATER}])
        assert server.publish(f"results:{forwarder.service.forwarder_id}", words) == 1
        server.publish(f"wake:{forwarder.service.forwarder_id}", wire.new_id())
        # The agent reports its own end, comes again, and learns that the task is over; what comes next runs.
        agent.finish([spec])
        agent.until_recorded([held])
        agent.spool[held] = spec
        agent.connect(forwarder)
        assert [ref.task_id for ref in agent.open_session(credit=5).forget] == [held]
        [task] = cloud.tasks(endpoint_id, 1)
        stores.tasks.add_tasks([task])
        cloud.enqueue([task])
        agent.finish(agent.take(1))
        agent.until_recorded([task.task_id])
        wait_until(lambda: bool(_endpoint(stores, endpoint_id).online), "the endpoint is shown as online")
    over = cloud.task(held)
    assert (over.state, over.result) == (TaskState.FAILED, None)
    assert cloud.task(task.task_id).state is TaskState.SUCCESS


def _endpoint(stores: Stores, endpoint_id: str) -> Endpoint:
    endpoint = stores.endpoints.get_endpoint(endpoint_id)
    assert endpoint is not None
    return endpoint
