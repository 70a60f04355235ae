"""The small parts of the core: what waits for the database, what peers' words are cut down to, caches, settings."""

from __future__ import annotations

import asyncio
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

from farcall_common.errors import ConfigurationError, Fault, Unavailable
from farcall_common.store.fakes import FakeBlobs, FakeQueue, FakeRecords
from farcall_common.store.model import Endpoint, LeasedTask, PeerKey, PeerKind, QueuedTask, TaskResult
from farcall_common.store.settings import Stores
from farcall_common.store.tickets import Tickets
from farcall_common.wire import EndpointReport, Reporter, TaskState
from farcall_forwarder.adapters.pool import StorePool
from farcall_forwarder.adapters.steps import StoreSteps
from farcall_forwarder.adapters.together import Together
from farcall_forwarder.adapters.zap import find_peer
from farcall_forwarder.core.actions import FlushResults, LeaseTasks, StoreStep, Withdraw
from farcall_forwarder.core.dispatch import orders
from farcall_forwarder.core.events import Event, MovesRecorded, StepLost, TasksLeased
from farcall_forwarder.core.functions import FunctionCache
from farcall_forwarder.core.moves import MoveBuffer
from farcall_forwarder.core.outbox import Outbox
from farcall_forwarder.core.untrusted import clean_error, clean_map, clean_status, clean_time
from farcall_forwarder.service import key_pair
from farcall_forwarder.settings import Settings

# -- outbox ------------------------------------------------------------------------------------------------------------


def end(task_id: str, endpoint_id: str = "a") -> TaskResult:
    return TaskResult(task_id, endpoint_id, 1, TaskState.SUCCESS, Reporter.AGENT, result=task_id.encode())


def flush(outbox: Outbox, rows: int = 10) -> FlushResults | None:
    return outbox.next_flush(rows=rows, watchers=(), url_ttl_s=60)


def ids_of(step: FlushResults | None) -> list[list[str]]:
    assert step is not None
    return [[result.task_id for result in batch.results] for batch in step.batches]


def two_endpoints() -> Outbox:
    outbox = Outbox()
    for endpoint_id in ("a", "b"):
        outbox.admit(endpoint_id, life=1)
        outbox.open(endpoint_id, fence=7)
    return outbox


def land(outbox: Outbox, step: FlushResults | None) -> FlushResults:
    """The flush has come back."""
    assert step is not None
    outbox.flushed(step.batches)
    return step


def test_one_flush_at_a_time_and_every_endpoint_gets_its_turn() -> None:
    outbox = two_endpoints()
    for number in range(5):
        outbox.add(end(f"a{number}"), verified=True)
    outbox.add(end("b0", "b"), verified=True)
    step = flush(outbox, rows=4)
    assert ids_of(step) == [["a0", "a1", "a2", "a3"]]
    assert flush(outbox, rows=4) is None
    land(outbox, step)
    assert ids_of(flush(outbox, rows=4)) == [["b0"], ["a4"]]


def test_a_second_flush_begins_only_when_it_is_full_and_a_third_never() -> None:
    outbox = two_endpoints()
    for number in range(7):
        outbox.add(end(f"a{number}"), verified=True)
    first, second = flush(outbox, rows=2), flush(outbox, rows=2)
    assert (ids_of(first), ids_of(second)) == ([["a0", "a1"]], [["a2", "a3"]])
    assert flush(outbox, rows=2) is None
    land(outbox, second)
    assert (len(outbox), outbox.is_flushing) == (3, True)
    outbox.add(end("a0"), verified=True)  # the first one still has it
    outbox.add(end("a2"), verified=True)  # reported again, after it was recorded
    assert len(outbox) == 4
    land(outbox, first)
    assert not outbox.is_flushing


def test_the_first_report_stays_while_it_waits_and_while_it_is_flushed() -> None:
    outbox = two_endpoints()
    outbox.add(end("a0"), verified=True)
    outbox.add(end("a0"), verified=True)
    assert len(outbox) == 1
    flush(outbox)
    outbox.add(end("a0"), verified=True)
    assert len(outbox) == 0


def test_ends_wait_while_their_queue_is_rebuilt() -> None:
    outbox = two_endpoints()
    outbox.hold("a")
    outbox.add(end("a0"), verified=False)
    outbox.add(end("b0", "b"), verified=True)
    assert ids_of(land(outbox, flush(outbox))) == [["b0"]]
    outbox.open("a", fence=8)
    step = flush(outbox)
    assert step is not None
    assert (step.batches[0].fence, set(step.batches[0].unverified)) == (8, {"a0"})


def test_what_was_not_flushed_waits_again_unless_a_new_life_began() -> None:
    outbox = two_endpoints()
    outbox.add(end("a0"), verified=True)
    step = land(outbox, flush(outbox))
    outbox.put_back(step.batches[0])
    assert len(outbox) == 1
    outbox.admit("a", life=2)
    assert len(outbox) == 0
    outbox.put_back(step.batches[0])
    assert len(outbox) == 0


def test_a_report_of_a_new_life_counts_although_the_old_one_is_under_way() -> None:
    outbox = two_endpoints()
    outbox.add(end("a0"), verified=True)
    flush(outbox)
    outbox.admit("a", life=2)
    outbox.add(end("a0"), verified=False)
    assert len(outbox) == 1


# -- words of peers ----------------------------------------------------------------------------------------------------

_json_like = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@given(st.dictionaries(st.text(), _json_like))
def test_any_map_becomes_json_that_postgresql_takes(value: dict[str, Any]) -> None:
    text = json.dumps(clean_map(value), allow_nan=False)
    assert "\\u0000" not in text


@given(st.dictionaries(st.sampled_from(["code", "message", "fault", "retryable", "attempt", "hint"]), _json_like))
def test_any_error_becomes_a_record(data: dict[str, Any]) -> None:
    record = clean_error(data, endpoint_id="endpoint", attempt=3)
    json.dumps(record.to_json(), allow_nan=False)
    assert (record.endpoint_id, record.attempt) == ("endpoint", 3)
    assert isinstance(record.code, str)


def test_a_good_error_stays_as_it_is() -> None:
    data = {"code": "TASK_FAILED", "message": "boom", "fault": "user_code", "traceback": "line 1", "new_field": 1}
    record = clean_error(data, endpoint_id="endpoint", attempt=1)
    assert (record.code, record.message, record.fault, record.traceback) == (
        "TASK_FAILED",
        "boom",
        Fault.USER_CODE,
        "line 1",
    )


def test_long_and_deep_values_are_cut() -> None:
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
    assert clean_status(EndpointReport(managers=2**63)).managers == 2**31 - 1
    assert clean_status(EndpointReport(detail={"problem": "no \0 room"})).problem == "no \N{REPLACEMENT CHARACTER} room"
    assert len(clean_status(EndpointReport(detail={"problem": "x" * 9999})).problem) == 1000
    assert clean_status(EndpointReport(detail={"problem": ["odd"]})).problem == ""


# -- moves, functions, orders ------------------------------------------------------------------------------------------


def test_an_agent_cannot_fill_the_memory_with_moves() -> None:
    moves = MoveBuffer()
    for _ in range(1000):
        moves.add("task", TaskState.RUNNING, Reporter.AGENT, at=0.0, attempt=1, now_mono=0.0)
    assert len(moves.take(10)) < 100
    assert moves.since is None


def test_the_function_cache_is_bounded_by_bytes() -> None:
    cache = FunctionCache(limit_bytes=10)
    cache.add("a", "name", b"12345")
    cache.add("b", "name", b"12345")
    assert cache.get("a")
    cache.add("c", "name", b"12345")
    assert (cache.get("a"), cache.get("b"), cache.get("c")) == (("name", b"12345"), None, ("name", b"12345"))


def test_orders_are_cut_by_bytes_and_functions_come_first() -> None:
    tasks = [
        LeasedTask(
            QueuedTask(f"task{number}", "group", "owner", "endpoint", "function", "hash", b"x" * 60),
            attempt=1,
            enqueued_at=0.0,
            leased_at=0.0,
        )
        for number in range(3)
    ]
    messages = list(orders(tasks, bodies={"hash": ("name", b"y" * 30)}, urls={}, limit_bytes=100))
    assert [(len(order.functions), len(order.tasks), len(frames)) for order, frames in messages] == [
        (1, 1, 2),
        (0, 1, 1),
        (0, 1, 1),
    ]


# -- keys --------------------------------------------------------------------------------------------------------------


def test_a_key_is_looked_for_in_the_queue_then_in_the_database() -> None:
    queue, records = FakeQueue(), FakeRecords()
    records.put_endpoint(Endpoint("endpoint", "owner", "name"))
    assert find_peer(queue, records, "key") is None
    records._keys["key"] = "endpoint"
    assert find_peer(queue, records, "key") == PeerKey("key", PeerKind.AGENT, "endpoint")
    client = PeerKey("key", PeerKind.CLIENT, "owner")
    queue.admit(client, ttl_s=60)
    assert find_peer(queue, records, "key") == client


def test_without_the_queue_endpoints_are_known_and_others_may_not_be_refused_for_good() -> None:
    queue, records = FakeQueue(), FakeRecords()
    queue.reachable = False
    with pytest.raises(Unavailable):
        find_peer(queue, records, "key")
    records._keys["key"] = "endpoint"
    assert find_peer(queue, records, "key") == PeerKey("key", PeerKind.AGENT, "endpoint")


# -- the pool ----------------------------------------------------------------------------------------------------------


class SlowSteps(StoreSteps):
    """Steps that last until they are let go."""

    def __init__(self) -> None:
        self.began = threading.Event()
        self.may_end = threading.Event()
        self.has_ended = False

    def perform(self, step: StoreStep) -> None:
        self.began.set()
        self.may_end.wait(10)
        self.has_ended = True


def test_a_closed_pool_leaves_no_call_under_way() -> None:
    steps = SlowSteps()

    async def close_in_the_middle() -> None:
        pool = StorePool(steps)
        task = asyncio.create_task(pool.perform(Withdraw("forwarder")))
        await asyncio.to_thread(steps.began.wait, 10)
        task.cancel()
        closing = asyncio.create_task(asyncio.to_thread(pool.close))
        done, _ = await asyncio.wait([closing], timeout=0.05)
        assert not done
        steps.may_end.set()
        await closing

    asyncio.run(close_in_the_middle())
    assert steps.has_ended


# -- steps that travel together ----------------------------------------------------------------------------------------


def test_a_step_goes_at_once_and_what_comes_meanwhile_goes_together() -> None:
    performed: list[list[str]] = []
    answers: list[Sequence[Event]] = []

    async def run() -> None:
        may_answer = asyncio.Semaphore(0)
        has_begun = asyncio.Semaphore(0)

        async def perform(steps: Sequence[Withdraw]) -> Sequence[Event]:
            performed.append([step.forwarder_id for step in steps])
            has_begun.release()
            await may_answer.acquire()
            return [MovesRecorded() for _ in steps]

        together = Together(perform, limit=2)
        running = asyncio.create_task(together.run(answers.append))
        async with asyncio.timeout(10):
            together.add(Withdraw("a"))
            await has_begun.acquire()
            for name in "bcd":
                together.add(Withdraw(name))
            for _ in range(2):
                may_answer.release()
                await has_begun.acquire()
        running.cancel()
        await asyncio.wait([running])

    asyncio.run(run())
    assert performed == [["a"], ["b", "c"], ["d"]]
    assert list(map(len, answers)) == [1, 2]


def test_leases_wait_for_a_queue_that_is_away_and_are_refused_one_by_one() -> None:
    queue = FakeQueue()
    fence = queue.claim("a", "forwarder", ttl_s=45, now=0)
    queue.mark_restored("a", fence)
    queue.reachable = False
    stores = Stores(FakeRecords(), queue, FakeBlobs(), Tickets("k" * 32))
    steps = StoreSteps(stores, forwarder_id="forwarder", clock=lambda: 1.0)
    wanted = [LeaseTasks("a", fence, 5, 30.0), LeaseTasks("b", 1, 5, 30.0)]

    async def lease() -> Sequence[Event]:
        pool = StorePool(steps)
        try:
            leasing = asyncio.create_task(pool.lease(wanted))
            async with asyncio.timeout(10):
                while not pool.is_degraded:
                    await asyncio.sleep(0)
                queue.reachable = True
                return await leasing
        finally:
            pool.close()

    assert asyncio.run(lease()) == [TasksLeased("a", fence, 5, []), StepLost(wanted[1])]


# -- settings ----------------------------------------------------------------------------------------------------------


def test_arguments_beat_the_environment_and_that_the_defaults() -> None:
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
def test_wrong_settings_are_named(environ: dict[str, str]) -> None:
    with pytest.raises(ConfigurationError):
        Settings.read([], environ)


def test_forwarders_behind_one_address_have_one_key_and_others_their_own() -> None:
    seed = Settings.read([], {"FARCALL_FORWARDER_KEY_SEED": "s" * 64}).key_seed
    public_key, secret_key = key_pair(seed)
    assert key_pair(seed) == (public_key, secret_key)
    assert zmq.curve_public(secret_key) == public_key
    assert key_pair("t" * 64)[0] != public_key
    assert key_pair("")[0] != key_pair("")[0]
    assert seed not in repr(Settings(key_seed=seed))


def test_leases_are_prolonged_well_before_they_end() -> None:
    policy = Settings(lease_s=3.0).policy
    assert policy.upkeep_s <= policy.lease_s / 3


def test_the_address_is_the_bound_one_unless_another_is_advertised() -> None:
    assert Settings(host="127.0.0.1").address(7) == "tcp://127.0.0.1:7"
    assert Settings(host="127.0.0.1", advertise="farcall.example").address(7) == "tcp://farcall.example:7"
    assert Settings(advertise="farcall.example:443").address(7) == "tcp://farcall.example:443"
    assert "0.0.0.0" not in Settings(host="0.0.0.0").address(7)
