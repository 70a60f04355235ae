"""Parts of the forwarder: outbox, sanitising, caches, key look-ups, store steps, settings."""

from __future__ import annotations

import asyncio
import dataclasses
import datetime as dt
import json
import math
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from farcall_common.errors import ConfigurationError, EndpointInUse, Fault
from farcall_common.store.model import (
    Endpoint,
    EndpointStatus,
    EnvironmentState,
    ForwarderInfo,
    FunctionBody,
    LeasedTask,
    PeerKey,
    PeerKind,
    Presence,
    QueuedTask,
    Task,
    TaskResult,
)
from farcall_common.store.ports import Records
from farcall_common.task_options import TaskOptions
from farcall_common.wire import EndpointReport, Reporter, TaskState
from farcall_forwarder.adapters.pool import Batcher, StorePool
from farcall_forwarder.adapters.steps import StoreSteps
from farcall_forwarder.adapters.zap import find_peers
from farcall_forwarder.core.actions import (
    Announce,
    ClaimEndpoint,
    FlushResults,
    LeaseTasks,
    MaintainEndpoint,
    ReadCancels,
    ReadLeases,
    ReadTasks,
    RecordSpoolGeneration,
    RestoreQueue,
    SetPresence,
    StoreStep,
    Withdraw,
)
from farcall_forwarder.core.endpoint import FunctionCache
from farcall_forwarder.core.events import (
    Announced,
    CancelsRead,
    ClaimRefused,
    EndpointClaimed,
    EndpointMaintained,
    Event,
    LeasesRead,
    QueueRestored,
    StepFenced,
    StepLost,
    TasksLeased,
    TasksRead,
    TransitionsRecorded,
)
from farcall_forwarder.core.outbox import Outbox
from farcall_forwarder.core.run_tasks import orders
from farcall_forwarder.core.transitions import TransitionBuffer
from farcall_forwarder.core.untrusted import (
    MAX_DETAILS,
    clean_details,
    clean_error,
    clean_map,
    clean_retry,
    clean_status,
    clean_time,
)
from farcall_forwarder.service import key_pair
from farcall_forwarder.settings import Settings
from tests.support.stores import FakeDatabase, FakeQueue, fake_stores, single
from tests.unit.test_store_queue import Clock
from tests.waiting import WAIT_S

# -- outbox ------------------------------------------------------------------------------------------------------------


def result(task_id: str, endpoint_id: str = "a") -> TaskResult:
    return TaskResult(task_id, endpoint_id, 1, TaskState.SUCCESS, Reporter.AGENT, result=task_id.encode())


def flush(outbox: Outbox, rows: int = 10) -> FlushResults | None:
    return outbox.next_flush(rows=rows, watchers=(), url_ttl_s=60)


def ids_of(step: FlushResults | None) -> list[list[str]]:
    assert step is not None
    return [[result.task_id for result in batch.results] for batch in step.batches]


def two_endpoints() -> Outbox:
    outbox = Outbox()
    for endpoint_id in ("a", "b"):
        outbox.admit(endpoint_id, generation=1)
        outbox.open(endpoint_id, fence=7)
    return outbox


def land(outbox: Outbox, step: FlushResults | None) -> FlushResults:
    """Finish a flush."""
    assert step is not None
    outbox.flushed(step.batches)
    return step


def test_one_flush_at_a_time_and_endpoints_take_turns() -> None:
    outbox = two_endpoints()
    for number in range(5):
        outbox.add(result(f"a{number}"), verified=True)
    outbox.add(result("b0", "b"), verified=True)
    step = flush(outbox, rows=4)
    assert ids_of(step) == [["a0", "a1", "a2", "a3"]]
    assert flush(outbox, rows=4) is None
    land(outbox, step)
    assert ids_of(flush(outbox, rows=4)) == [["b0"], ["a4"]]


def test_a_second_flush_begins_only_if_full_and_a_third_never() -> None:
    outbox = two_endpoints()
    for number in range(7):
        outbox.add(result(f"a{number}"), verified=True)
    first, second = flush(outbox, rows=2), flush(outbox, rows=2)
    assert (ids_of(first), ids_of(second)) == ([["a0", "a1"]], [["a2", "a3"]])
    assert flush(outbox, rows=2) is None
    land(outbox, second)
    assert (len(outbox), outbox.is_flushing) == (3, True)
    outbox.add(result("a0"), verified=True)  # still under way in the first flush
    outbox.add(result("a2"), verified=True)  # reported again, after it was recorded
    assert len(outbox) == 4
    land(outbox, first)
    assert not outbox.is_flushing


def test_the_first_report_stays_while_it_waits_and_while_it_is_flushed() -> None:
    outbox = two_endpoints()
    outbox.add(result("a0"), verified=True)
    outbox.add(result("a0"), verified=True)
    assert len(outbox) == 1
    flush(outbox)
    outbox.add(result("a0"), verified=True)
    assert len(outbox) == 0


def test_results_wait_while_their_queue_is_rebuilt() -> None:
    outbox = two_endpoints()
    outbox.hold("a")
    outbox.add(result("a0"), verified=False)
    outbox.add(result("b0", "b"), verified=True)
    assert ids_of(land(outbox, flush(outbox))) == [["b0"]]
    outbox.open("a", fence=8)
    step = flush(outbox)
    assert step is not None
    assert (step.batches[0].fence, set(step.batches[0].unverified)) == (8, {"a0"})


def test_an_unflushed_batch_waits_again_unless_a_new_generation_began() -> None:
    outbox = two_endpoints()
    outbox.add(result("a0"), verified=True)
    step = land(outbox, flush(outbox))
    outbox.put_back(step.batches[0])
    assert len(outbox) == 1
    outbox.admit("a", generation=2)
    assert len(outbox) == 0
    outbox.put_back(step.batches[0])
    assert len(outbox) == 0


def test_a_report_of_a_new_generation_counts_although_the_old_one_is_under_way() -> None:
    outbox = two_endpoints()
    outbox.add(result("a0"), verified=True)
    flush(outbox)
    outbox.admit("a", generation=2)
    outbox.add(result("a0"), verified=False)
    assert len(outbox) == 1


# -- sanitising --------------------------------------------------------------------------------------------------------

NOW = 1_800_000_000.0

_json_like = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@given(st.dictionaries(st.text(), _json_like))
def test_any_map_becomes_json_that_postgresql_accepts(value: dict[str, Any]) -> None:
    text = json.dumps(clean_map(value), allow_nan=False)
    assert "\\u0000" not in text


@pytest.mark.parametrize("forged", [-1e9, "1", True, None])
def test_earlier_runs_never_reduce_the_usage_of_a_task(forged: object) -> None:
    assert clean_details({"earlier_run_s": forged, "retries_used": 1}, now=NOW) == {"retries_used": 1}
    assert clean_details({"earlier_run_s": 1.5}, now=NOW) == {"earlier_run_s": 1.5}


@given(st.dictionaries(st.sampled_from(["code", "message", "fault", "retryable", "attempt", "hint"]), _json_like))
def test_any_error_becomes_a_record(data: dict[str, Any]) -> None:
    record = clean_error(data, endpoint_id="endpoint", attempt=3)
    json.dumps(record.to_json(), allow_nan=False)
    assert (record.endpoint_id, record.attempt) == ("endpoint", 3)
    assert isinstance(record.code, str)


def test_a_valid_error_is_unchanged() -> None:
    data = {"code": "TASK_FAILED", "message": "boom", "fault": "user_code", "traceback": "line 1", "new_field": 1}
    record = clean_error(data, endpoint_id="endpoint", attempt=1)
    assert (record.code, record.message, record.fault, record.traceback) == (
        "TASK_FAILED",
        "boom",
        Fault.USER_CODE,
        "line 1",
    )


def test_reasons_of_attempts_are_short_texts() -> None:
    data = {"code": "TASK_FAILED", "message": "boom", "reasons": ["x" * 60_000, {"a": "y" * 60_000}, 1] * 100}
    record = clean_error(data, endpoint_id="endpoint", attempt=1)
    assert all(isinstance(reason, str) for reason in record.reasons or ())
    assert 1_000 < len(json.dumps(record.to_json())) < 300_000


def test_too_large_details_are_dropped() -> None:
    details = {"stdout_tail": "x" * 4096, "stderr_tail": "\N{SNOWMAN}" * 4096, "node": {"cores": 64}}
    assert clean_details(details, now=NOW) == details
    filler = MAX_DETAILS - len(json.dumps({"text": ""}))
    assert clean_details({"text": "x" * filler}, now=NOW) == {"text": "x" * filler}
    assert clean_details({"text": "x" * (filler + 1)}, now=NOW) == {}
    long = {str(number): "x" * 1000 for number in range(100)}
    assert clean_details(long, now=NOW) == {}
    used: dict[str, Any] = {"earlier_run_s": 5.0, "stage_calls": 2, "stage_run_s": 3.0}
    assert clean_details(long | used, now=NOW) == used, "a task cannot make what it has used too long"


@pytest.mark.parametrize("transitions", ["x", 5, ["a", 1], None, {"a": "soon", "b": True, "c": [], "d": math.nan}])
def test_transitions_of_a_task_are_times_by_name(transitions: object) -> None:
    assert clean_details({"task_transitions": transitions}, now=NOW) == {"task_transitions": {}}
    times = {"execution-start": 1.5, "execution-end": 2}
    assert clean_details({"task_transitions": times, "os": "linux"}, now=NOW) == {
        "task_transitions": times,
        "os": "linux",
    }


@pytest.mark.parametrize(("seconds", "kept"), [(1.5, True), (3, True), ("1", False), (None, False), (True, False)])
def test_seconds_of_earlier_runs_are_a_number(seconds: object, kept: bool) -> None:
    assert clean_details({"earlier_run_s": seconds, "x": 1}, now=NOW) == {"x": 1} | (
        {"earlier_run_s": seconds} if kept else {}
    )


RETRY = {"retry": 2, "retries": 3, "retry_at": 1000.0, "error": "a.b.Away"}


def test_the_detail_of_a_retry_is_kept() -> None:
    assert clean_retry(RETRY, now=990.0) == RETRY
    assert clean_retry({**RETRY, "more": "free text"}, now=990.0) == RETRY


@pytest.mark.parametrize(
    ("change", "left_out"),
    [
        ({"error": "a whole sentence"}, {"error"}),
        ({"error": 5}, {"error"}),
        ({"error": "x" * 300}, {"error"}),
        ({"retry_at": 1e18}, {"retry_at"}),
        ({"retry_at": float("nan")}, {"retry_at"}),
        ({"retry_at": "soon"}, {"retry_at"}),
        ({"retry": 0}, set(RETRY)),
        ({"retry": 4}, set(RETRY)),
        ({"retry": True}, set(RETRY)),
        ({"retries": 2**60}, set(RETRY)),
        ({"retries": "3"}, set(RETRY)),
    ],
)
def test_what_an_agent_invents_about_a_retry_is_left_out(change: dict[str, object], left_out: set[str]) -> None:
    expected = {name: value for name, value in RETRY.items() if name not in left_out}
    assert clean_retry({**RETRY, **change}, now=990.0) == expected


def test_long_and_deep_values_are_truncated() -> None:
    deep: dict[str, Any] = {}
    deepest = deep
    for _ in range(50):
        deepest["next"] = {}
        deepest = deepest["next"]
    cleaned = clean_map({"deep": deep, "long": "x" * 1_000_000, "many": list(range(100_000))})
    assert len(msgspec.json.encode(cleaned)) < 70_000


@pytest.mark.parametrize("at", [None, math.inf, -1e300, 1e300, 0.0])
def test_impossible_times_are_dropped(at: float | None) -> None:
    assert clean_time(at, now=1_800_000_000.0) is None


def test_numbers_fit_a_column_of_integers() -> None:
    assert clean_status(EndpointReport(managers=2**63), now=1.0).managers == 2**31 - 1
    assert clean_status(EndpointReport(pending_blocks=2**63), now=1.0).pending_blocks == 2**31 - 1
    assert (
        clean_status(EndpointReport(detail={"problem": "no \0 room"}), now=1.0).problem
        == "no \N{REPLACEMENT CHARACTER} room"
    )
    assert len(clean_status(EndpointReport(detail={"problem": "x" * 9999}), now=1.0).problem) == 1000
    assert clean_status(EndpointReport(detail={"problem": ["odd"]}), now=1.0).problem == ""


def test_environments_of_a_report_are_bounded() -> None:
    def cleaned(environments: Any) -> tuple[EnvironmentState, ...]:
        return clean_status(EndpointReport(detail={"environments": environments}), now=1_800_000_000.0).environments

    good = EnvironmentState(
        "k", "sci", "uv", "n1", 1, 2, 3, True, "uv is installing", 1_799_999_999.0, "none", 1_800_000_240.0
    )
    assert cleaned([dataclasses.asdict(good)]) == (good,)
    nothing = EnvironmentState("", "", "", "")
    odd: dict[str, Any] = {
        "key": 5,
        "label": None,
        "warm": -1,
        "busy": True,
        "starting": 1.5,
        "forkable": 1,
        "since": "x",
        "retry_at": 1e300,
        "text": [],
    }
    assert cleaned([odd, {}, {"since": 1e300}, {"since": True}]) == (nothing,) * 4
    assert cleaned([{"warm": 2**63}])[0].warm in (0, 2**31 - 1)
    [long] = cleaned([dict.fromkeys(("key", "label", "type", "node", "text", "problem"), "x" * 9999)])
    assert len(msgspec.json.encode(long)) < 2000
    assert len(cleaned([{}] * 100)) == 20
    for wrong in (None, "sci", {"key": "k"}, ["sci", 5, None]):
        assert cleaned(wrong) == ()


# -- transitions, functions, RunTasks ----------------------------------------------------------------------------------


def test_transitions_of_one_task_are_bounded() -> None:
    transitions = TransitionBuffer()
    for _ in range(1000):
        transitions.add("task", TaskState.RUNNING, Reporter.AGENT, at=0.0, attempt=1, now_mono=0.0)
    assert len(transitions.take(10)) < 100
    assert transitions.since is None


def test_the_function_cache_is_bounded_by_bytes() -> None:
    cache = FunctionCache(limit_bytes=10)
    cache.add("f", "a", FunctionBody("name", b"12345"))
    cache.add("f", "b", FunctionBody("name", b"12345"))
    assert cache.get("f", "a")
    cache.add("f", "c", FunctionBody("name", b"12345"))
    found = [cache.get("f", function_hash) for function_hash in "abc"]
    assert [each and each.body for each in found] == [b"12345", None, b"12345"]


def test_run_tasks_messages_are_split_by_bytes_and_functions_come_first() -> None:
    tasks = [
        LeasedTask(
            QueuedTask(f"task{number}", "group", "owner", "endpoint", "function", "hash", b"x" * 60, TaskOptions()),
            attempt=1,
            enqueued_at=0.0,
            leased_at=0.0,
        )
        for number in range(3)
    ]
    messages = list(orders(tasks, new_functions=[("hash", FunctionBody("name", b"y" * 30))], urls={}, limit_bytes=100))
    assert [(len(order.functions), len(order.tasks), len(frames)) for order, frames in messages] == [
        (1, 1, 2),
        (0, 1, 1),
        (0, 1, 1),
    ]


# -- keys --------------------------------------------------------------------------------------------------------------


def test_keys_are_looked_up_in_the_queue_then_in_the_database() -> None:
    queue, records = FakeQueue(), FakeDatabase().records
    records.endpoints.put_endpoint(Endpoint("endpoint", "owner", "name"))
    for key in ("agent's", "client's"):
        records.endpoints.add_endpoint_key("endpoint", key, at=dt.datetime.now(dt.UTC))
    client = PeerKey("client's", PeerKind.CLIENT, "owner")
    queue.admit(client, ttl_s=60)
    assert find_peers(queue, records.endpoints, ["client's", "unknown", "agent's"]) == {
        "client's": client,
        "agent's": PeerKey("agent's", PeerKind.AGENT, "endpoint"),
        "unknown": None,
    }


def test_without_the_queue_only_keys_of_endpoints_are_decided() -> None:
    queue, database = FakeQueue(), FakeDatabase()
    endpoints = database.records.endpoints
    endpoints.put_endpoint(Endpoint("endpoint", "owner", "name"))
    endpoints.add_endpoint_key("endpoint", "agent's", at=dt.datetime.now(dt.UTC))
    queue.reachable = False
    assert find_peers(queue, endpoints, ["agent's", "another"]) == {
        "agent's": PeerKey("agent's", PeerKind.AGENT, "endpoint")
    }
    database.reachable = False
    assert find_peers(queue, endpoints, ["agent's"]) == {}


# -- the pool ----------------------------------------------------------------------------------------------------------


class SlowSteps(StoreSteps):
    """Steps that block until a test releases them."""

    def __init__(self) -> None:
        self.began = threading.Event()
        self.may_end = threading.Event()
        self.has_ended = False

    def perform(self, steps: Sequence[StoreStep]) -> Sequence[Event]:
        self.began.set()
        self.may_end.wait(WAIT_S)
        self.has_ended = True
        return ()


def test_closing_the_pool_waits_for_calls_under_way() -> None:
    steps = SlowSteps()

    async def close_in_the_middle() -> None:
        pool = StorePool(steps)
        task = asyncio.create_task(pool.perform([Withdraw("forwarder")]))
        await asyncio.to_thread(steps.began.wait, 60)
        task.cancel()
        closing = asyncio.create_task(asyncio.to_thread(pool.close))
        done, _ = await asyncio.wait([closing], timeout=0.05)
        assert not done
        steps.may_end.set()
        await closing

    asyncio.run(close_in_the_middle())
    assert steps.has_ended


# -- batches of steps --------------------------------------------------------------------------------------------------


def test_a_step_is_performed_at_once_and_later_ones_as_a_batch() -> None:
    performed: list[list[str]] = []
    answers: list[Sequence[Event]] = []

    async def run() -> None:
        may_answer = asyncio.Semaphore(0)
        has_begun = asyncio.Semaphore(0)

        async def perform(steps: Sequence[StoreStep]) -> Sequence[Event]:
            performed.append([step.forwarder_id for step in steps if isinstance(step, Withdraw)])
            has_begun.release()
            await may_answer.acquire()
            return [TransitionsRecorded() for _ in steps]

        async with asyncio.timeout(60), asyncio.TaskGroup() as group:
            batcher = Batcher(group, perform, answers.append, limits={Withdraw: 2})
            batcher.add(Withdraw("a"))
            await has_begun.acquire()
            for name in "bcd":
                batcher.add(Withdraw(name))
            for _ in range(2):
                may_answer.release()
                await has_begun.acquire()
            settling = asyncio.create_task(batcher.settle())
            await asyncio.sleep(0)
            assert not settling.done()
            may_answer.release()
            await settling

    asyncio.run(run())
    assert performed == [["a"], ["b", "c"], ["d"]]
    assert list(map(len, answers)) == [1, 2, 1]


def test_steps_of_other_kinds_are_performed_side_by_side() -> None:
    begun: list[StoreStep] = []

    async def run() -> None:
        may_answer = asyncio.Event()

        async def perform(steps: Sequence[StoreStep]) -> Sequence[Event]:
            begun.extend(steps)
            await may_answer.wait()
            return ()

        async with asyncio.timeout(60), asyncio.TaskGroup() as group:
            batcher = Batcher(group, perform, lambda _: None)
            for name in "ab":
                batcher.add(Withdraw(name))
            while len(begun) < 2:
                await asyncio.sleep(0)
            may_answer.set()
            await batcher.settle()

    asyncio.run(run())
    assert begun == [Withdraw("a"), Withdraw("b")]


def test_leases_wait_for_an_unavailable_queue_and_are_refused_one_by_one() -> None:
    queue = FakeQueue()
    fence = single.claim(queue, "a", "forwarder", ttl_s=45)
    single.mark_restored(queue, "a", fence)
    queue.reachable = False
    stores = fake_stores(queue=queue)
    steps = StoreSteps(stores, forwarder_id="forwarder", clock=lambda: 1.0)
    wanted = [LeaseTasks("a", fence, 5, 30.0), LeaseTasks("b", 1, 5, 30.0)]

    async def lease() -> Sequence[Event]:
        pool = StorePool(steps)
        try:
            leasing = asyncio.create_task(pool.perform(wanted))
            async with asyncio.timeout(60):
                while not pool.is_degraded:
                    await asyncio.sleep(0)
                queue.reachable = True
                return await leasing
        finally:
            pool.close()

    assert asyncio.run(lease()) == [TasksLeased("a", fence, 5, []), StepLost(wanted[1])]


def queue_of(*endpoint_ids: str) -> tuple[FakeQueue, dict[str, int]]:
    """A queue with these endpoints, claimed but not restored, and their fences."""
    queue = FakeQueue()
    return queue, {endpoint_id: single.claim(queue, endpoint_id, "forwarder", ttl_s=45) for endpoint_id in endpoint_ids}


def steps_on(queue: FakeQueue, records: Records) -> StoreSteps:
    stores = dataclasses.replace(fake_stores(queue=queue), **vars(records))
    return StoreSteps(stores, forwarder_id="forwarder", clock=lambda: 1.0)


@pytest.mark.parametrize("skew_s", [-3600.0, 3600.0])
def test_a_forwarder_with_a_wrong_clock_is_registered_and_keeps_its_leases(skew_s: float) -> None:
    clock = Clock(1_000_000.0)
    queue, records = FakeQueue(clock), FakeDatabase().records
    records.endpoints.put_endpoint(Endpoint("a", "owner", "a"))
    records.endpoints.add_endpoint_key("a", "key a", at=dt.datetime.now(dt.UTC))
    queue.announce(ForwarderInfo("other", "tcp://127.0.0.1:1", "key"), ttl_s=15)
    stores = dataclasses.replace(fake_stores(queue=queue), **vars(records))
    steps = StoreSteps(stores, forwarder_id="skewed", clock=lambda: clock.now + skew_s)
    assert steps.perform([Announce(ForwarderInfo("skewed", "tcp://127.0.0.1:2", "key"), 15.0)]) == [Announced(1)]
    assert [info.forwarder_id for info in queue.forwarders()] == ["other", "skewed"]
    (claimed,) = steps.perform([ClaimEndpoint("a", 1, "key a", "spool", 45.0)])
    assert isinstance(claimed, EndpointClaimed)
    single.mark_restored(queue, "a", claimed.fence)
    task = Task("t1", "group", "owner", "a", "function", "hash", b"x", options=TaskOptions(idempotent=False))
    queue.enqueue([QueuedTask.of(task)])
    steps.perform([LeaseTasks("a", claimed.fence, 5, 30.0)])
    clock.now += 29
    (maintained,) = steps.perform([MaintainEndpoint("a", claimed.fence, [], "spool", 45.0, 30.0)])
    assert isinstance(maintained, EndpointMaintained)
    assert maintained.reaped == []
    with pytest.raises(EndpointInUse):
        single.claim(queue, "a", "other", spool_id="another", ttl_s=45)


def test_claims_are_batched_and_refused_one_by_one() -> None:
    queue, _ = queue_of("a")
    single.claim(queue, "b", "another forwarder", spool_id="another", ttl_s=45)
    records = FakeDatabase().records
    for endpoint_id in "abc":
        records.endpoints.put_endpoint(Endpoint(endpoint_id, "owner", endpoint_id))
        records.endpoints.add_endpoint_key(endpoint_id, f"key {endpoint_id}", at=dt.datetime.now(dt.UTC))
    names = ["deleted", *"abc"]
    steps = [ClaimEndpoint(name, number, f"key {name}", "spool", 45.0) for number, name in enumerate(names)]
    outcomes = dict[int, str]()
    for answer in steps_on(queue, records).perform(steps):
        assert isinstance(answer, ClaimRefused | EndpointClaimed)
        outcomes[answer.generation] = answer.error.code if isinstance(answer, ClaimRefused) else "let in"
    assert outcomes == {0: "ENDPOINT_UNKNOWN", 1: "let in", 2: "ENDPOINT_IN_USE", 3: "let in"}


def test_a_claim_with_a_key_that_is_not_the_endpoints_is_refused() -> None:
    queue, _ = queue_of("a")
    records = FakeDatabase().records
    now = dt.datetime.now(dt.UTC)
    for endpoint_id in "ab":
        records.endpoints.put_endpoint(Endpoint(endpoint_id, "owner", endpoint_id))
        records.endpoints.add_endpoint_key(endpoint_id, f"key {endpoint_id}", at=now)
    records.endpoints.add_endpoint_key("a", "revoked", at=now)
    records.endpoints.revoke_endpoint_key("a", "revoked", at=now)

    for public_key in ("revoked", "unknown", "key b"):
        [answer] = steps_on(queue, records).perform([ClaimEndpoint("a", 1, public_key, "spool", 45.0)])
        assert isinstance(answer, ClaimRefused)
        assert answer.error.code == "TICKET_INVALID"
    [answer] = steps_on(queue, records).perform([ClaimEndpoint("a", 1, "key a", "spool", 45.0)])
    assert isinstance(answer, EndpointClaimed)


def test_a_claim_with_an_old_copy_of_the_spool_is_refused() -> None:
    queue, records = FakeQueue(), FakeDatabase().records
    records.endpoints.put_endpoint(Endpoint("a", "owner", "a"))
    records.endpoints.add_endpoint_key("a", "key a", at=dt.datetime.now(dt.UTC))
    steps = steps_on(queue, records)

    def claim(spool_id: str, spool_generation: int) -> str:
        [answer] = steps.perform([ClaimEndpoint("a", 1, "key a", spool_id, 45.0, spool_generation=spool_generation)])
        return answer.error.code if isinstance(answer, ClaimRefused) else "let in"

    assert [claim("spool", 0), claim("spool", 1)] == ["let in"] * 2
    steps.perform([RecordSpoolGeneration("a", 1, "spool", 3)])
    fence = single.claim(queue, "a", "other", spool_id="spool", ttl_s=45)
    single.mark_restored(queue, "a", fence)
    assert claim("spool", 2) == "SPOOL_OUTDATED"
    assert queue.renew_ownership("other", {"a": (fence, "spool")}, ttl_s=45) == []  # it still owns it
    assert [claim("spool", 3), claim("spool", 4)] == ["let in"] * 2
    assert [claim("spool", 3), claim("spool", 0)] == ["SPOOL_OUTDATED"] * 2
    queue.evict("a")
    assert [claim("new", 0), claim("new", 0)] == ["let in", "let in"]


def test_restores_are_batched_and_fenced_one_by_one() -> None:
    queue, fences = queue_of("idle", "busy", "gone")
    single.claim(queue, "gone", "another forwarder", ttl_s=45)
    records = FakeDatabase().records
    for endpoint_id in ("busy", "gone"):
        records.tasks.add_tasks([Task(f"of {endpoint_id}", "group", "owner", endpoint_id, "function", "hash", b"")])
    steps = [RestoreQueue(endpoint_id, fence, {}, 30.0) for endpoint_id, fence in fences.items()]
    answers = steps_on(queue, records).perform(steps)
    assert answers == [
        QueueRestored("idle", fences["idle"]),
        QueueRestored("busy", fences["busy"]),
        StepFenced(steps[2]),
    ]
    assert (queue.depth(["idle"]), queue.depth(["busy"]), queue.depth(["gone"])) == (0, 1, 0)
    read = [ReadLeases(endpoint_id, fence) for endpoint_id, fence in fences.items()]
    assert list(map(type, steps_on(queue, records).perform(read))) == [LeasesRead, LeasesRead, StepFenced]


def test_task_reads_are_batched_and_answered_per_endpoint() -> None:
    records = FakeDatabase().records
    records.tasks.add_tasks([Task(f"t{n}", "group", "owner", "a", "function", "hash", b"x") for n in range(3)])
    steps = [ReadTasks("a", 1, ["t0", "t1"], frozenset({"t1"})), ReadTasks("b", 1, ["t2", "nowhere"], frozenset())]
    first, second = steps_on(FakeQueue(), records).perform(steps)
    assert isinstance(first, TasksRead)
    assert isinstance(second, TasksRead)
    assert (set(first.tasks), set(second.tasks)) == ({"t0", "t1"}, {"t2"})
    assert first.tasks["t0"].payload is None  # not needed here


def test_cancel_reads_are_batched_and_fenced_one_by_one() -> None:
    queue, fences = queue_of("a", "b", "c")
    for endpoint_id, fence in fences.items():
        single.mark_restored(queue, endpoint_id, fence)
    queue.enqueue([QueuedTask.of(Task("t1", "group", "owner", "a", "function", "hash", b"x"))])
    single.lease(queue, "a", fences["a"], limit=9, lease_s=30)
    queue.cancel("a", ["t1"])
    single.claim(queue, "b", "another forwarder", ttl_s=45)
    steps = [ReadCancels(endpoint_id, fence) for endpoint_id, fence in fences.items()]
    assert steps_on(queue, FakeDatabase().records).perform(steps) == [
        CancelsRead("a", fences["a"], ["t1"]),
        StepFenced(steps[1]),
        CancelsRead("c", fences["c"], []),
    ]


def test_presence_of_a_stale_owner_is_fenced_and_the_others_are_recorded() -> None:
    queue, fences = queue_of("a", "b", "c")
    for endpoint_id, fence in fences.items():
        single.mark_restored(queue, endpoint_id, fence)
    single.claim(queue, "b", "another forwarder", ttl_s=45)
    records = FakeDatabase().records
    for endpoint_id in fences:
        records.endpoints.put_endpoint(Endpoint(endpoint_id, "owner", endpoint_id))
    records.endpoints.set_presence([Presence("b", True, EndpointStatus())])
    steps = [
        SetPresence("a", fences["a"], True, EndpointStatus(), 45.0),
        SetPresence("b", fences["b"], False, EndpointStatus(), 45.0),
        SetPresence("a", fences["a"], False, EndpointStatus(), 45.0),
        SetPresence("c", fences["c"], True, EndpointStatus(managers=1), 45.0),
    ]
    assert steps_on(queue, records).perform(steps) == [StepFenced(steps[1])]
    shown = {endpoint_id: records.endpoints.get_endpoint(endpoint_id) for endpoint_id in fences}
    assert {id_: endpoint.online for id_, endpoint in shown.items() if endpoint} == {"a": False, "b": True, "c": True}


# -- settings ----------------------------------------------------------------------------------------------------------


def test_arguments_override_the_environment_which_overrides_defaults() -> None:
    environ = {"FARCALL_FORWARDER_PORT": "1", "FARCALL_FORWARDER_HEALTH_PORT": "2", "FARCALL_LOG_LEVEL": "debug"}
    settings = Settings.read(["--port", "3", "--ready-file", "/tmp/ready"], environ)
    assert (settings.port, settings.health_port, settings.log_level) == (3, 2, "DEBUG")
    assert (settings.host, settings.ready_file) == ("0.0.0.0", Path("/tmp/ready"))


@pytest.mark.parametrize(
    "environ",
    [
        {"FARCALL_FORWARDER_PORT": "x"},
        {"FARCALL_FORWARDER_PORT": "70000"},
        {"FARCALL_FORWARDER_LEASE_S": "0"},
        {"FARCALL_FORWARDER_DRAIN_S": "nan"},
        {"FARCALL_FORWARDER_KEY_SEED": "too short to be a secret"},
        {"FARCALL_LOG_LEVEL": "loud"},
        {"FARCALL_MAX_PAYLOAD_BYTES": "-1"},
    ],
)
def test_invalid_settings_are_rejected(environ: dict[str, str]) -> None:
    with pytest.raises(ConfigurationError):
        Settings.read([], environ)


def test_a_key_seed_gives_one_key_pair_and_no_seed_a_random_one() -> None:
    seed = Settings.read([], {"FARCALL_FORWARDER_KEY_SEED": "s" * 64}).key_seed
    public_key, secret_key = key_pair(seed)
    assert key_pair(seed) == (public_key, secret_key)
    assert zmq.curve_public(secret_key) == public_key
    assert key_pair("t" * 64)[0] != public_key
    assert key_pair("")[0] != key_pair("")[0]
    assert seed not in repr(Settings(key_seed=seed))


def test_leases_are_renewed_within_a_third_of_their_time() -> None:
    policy = Settings(lease_s=3.0).policy
    assert policy.maintenance_s <= policy.lease_s / 3


def test_the_address_is_the_bound_one_unless_another_is_advertised() -> None:
    assert Settings(host="127.0.0.1").address(7) == "tcp://127.0.0.1:7"
    assert Settings(host="127.0.0.1", advertise="farcall.example").address(7) == "tcp://farcall.example:7"
    assert Settings(advertise="farcall.example:443").address(7) == "tcp://farcall.example:443"
    assert "0.0.0.0" not in Settings(host="0.0.0.0").address(7)


def test_a_claim_reads_whether_the_endpoint_runs_certain_functions_only() -> None:
    queue, _ = queue_of("a")
    records = FakeDatabase().records
    for endpoint_id, allowed in (("a", None), ("b", []), ("c", ["f"])):
        records.endpoints.put_endpoint(Endpoint(endpoint_id, "owner", endpoint_id, allowed_functions=allowed))
        records.endpoints.add_endpoint_key(endpoint_id, f"key {endpoint_id}", at=dt.datetime.now(dt.UTC))
    steps = [ClaimEndpoint(name, 1, f"key {name}", "spool", 45.0) for name in "abc"]
    claimed = steps_on(queue, records).perform(steps)
    assert [isinstance(each, EndpointClaimed) and each.data_only for each in claimed] == [False, True, True]


def test_a_list_that_is_set_during_a_claim_is_read_or_ends_the_claim() -> None:
    """The API stores the list, then evicts: a claim before the eviction is stale, a later one reads the list."""

    class Races(FakeQueue):
        def claim(self, *args: Any, **kwargs: Any) -> Any:
            answers = super().claim(*args, **kwargs)
            records.endpoints.change_endpoint("a", {"allowed_functions": []})
            self.evict("a")
            return answers

    queue, records = Races(), FakeDatabase().records
    records.endpoints.put_endpoint(Endpoint("a", "owner", "a"))
    records.endpoints.add_endpoint_key("a", "key a", at=dt.datetime.now(dt.UTC))
    steps = steps_on(queue, records)
    [first] = steps.perform([ClaimEndpoint("a", 1, "key a", "spool", 45.0)])
    assert isinstance(first, EndpointClaimed)
    [answer] = steps.perform([ReadLeases("a", first.fence)])
    assert isinstance(answer, StepFenced)
    assert first.data_only
