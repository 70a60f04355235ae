"""The queue in a real Valkey: the suite of every Queue, and what only a server can get wrong."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis

from farcall_common.errors import QueueDataLost, Unavailable
from farcall_common.store import ForwarderInfo, PeerKey, PeerKind, Queue, ValkeyQueue, queue_valkey
from farcall_common.store.model import HeldLeases, MaintenanceResult, RunningLimit
from farcall_common.store.queue_valkey import DELETED_TTL_S, MARKER_TTL_S
from tests.integration.store_servers import Valkey, queue_with_clock
from tests.support.stores import FakeQueue, single
from tests.unit.test_store_queue import (
    TARGET,
    Clock,
    QueueSuite,
    backlog,
    lease,
    leased_ids,
    make_queued,
    make_result,
    own,
    recount,
    with_targets,
)


@pytest.fixture
def queue(valkey: Valkey) -> Iterator[Queue]:
    queue = ValkeyQueue(valkey.url)
    yield queue
    queue.close()


@pytest.fixture
def server(valkey: Valkey) -> Iterator[redis.Redis]:
    client = redis.Redis.from_url(valkey.url)
    yield client
    client.close()


class TestValkeyQueue(QueueSuite):
    @pytest.fixture
    def clocked(self, valkey: Valkey) -> Iterator[tuple[Queue, Clock]]:
        with queue_with_clock(valkey.url) as clocked:
            yield clocked

    @pytest.fixture
    def queue(self, clocked: tuple[Queue, Clock]) -> Queue:
        return clocked[0]

    @pytest.fixture
    def clock(self, clocked: tuple[Queue, Clock]) -> Clock:
        return clocked[1]

    @pytest.fixture
    def wipe(self, valkey: Valkey, clock: Clock) -> Callable[[], None]:
        def wipe() -> None:
            valkey.wipe()
            clock.now = clock.now  # which was there too

        return wipe

    @pytest.fixture
    def forget_results(self, server: redis.Redis) -> Callable[[], None]:
        def forget() -> None:
            """The time of those that have one is over."""
            for key in list(server.scan_iter("t:*")):
                if server.ttl(key) != -1:
                    server.delete(key)

        return forget

    @pytest.fixture
    def cut(self, valkey: Valkey) -> Iterator[Callable[[], None]]:
        yield valkey.kill
        valkey.start()


def test_a_recount_corrects_bytes(queue: Queue, server: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    fence = own(queue)
    queue.enqueue([make_queued(f"t{number}") for number in range(4)])
    lease(queue, fence, limit=2)
    queue.cancel("e1", ["t3"])
    right = queue.bytes_of("alice")
    for endpoint_id in ("e1", "idle"):
        server.hset(f"b:{{{endpoint_id}}}", mapping={"alice": 12345, "gone": 99})
        for submitter in ("alice", "gone"):
            server.sadd(f"at:{submitter}", endpoint_id)
    server.srem("at:alice", "e1")
    assert queue.bytes_of("alice") == 12345

    monkeypatch.setattr(queue_valkey, "_RECOUNTED", 3)
    recount(queue)
    assert server.hget("b:{e1}", "alice") == b"12345", "more tasks than one step counts"

    monkeypatch.setattr(queue_valkey, "_RECOUNTED", 4)
    recount(queue)
    assert (queue.bytes_of("alice"), queue.bytes_of("gone")) == (right, 0)
    assert server.smembers("at:alice") == {b"e1"}


def test_only_expendable_keys_have_a_time_to_live(queue: Queue, server: redis.Redis) -> None:
    """A cache short of memory evicts keys with a TTL; a task that waits, runs or is not yet recorded has none."""
    fence = own(queue)
    queue.enqueue([make_queued(f"t{n}") for n in range(4)])
    lease(queue, fence, limit=3)
    queue.cancel("e1", ["t0"])
    single.ack(queue, fence, [make_result("t1"), make_result("t2")])
    queue.flushed({"e1": ["t2"]})
    assert {key for key in server.scan_iter() if server.ttl(key) != -1} == {b"t:{e1}:t2"}
    assert 0 < server.ttl("t:{e1}:t2") <= MARKER_TTL_S
    assert server.hget("t:{e1}:t2", "task") is None
    assert server.hget("t:{e1}:t2", "result") is None


def test_keys_of_an_endpoint_are_in_one_slot(queue: Queue, server: redis.Redis) -> None:
    fence = own(queue)
    queue.enqueue([make_queued(f"t{n}") for n in range(3)])
    lease(queue, fence, limit=2)
    queue.cancel("e1", ["t0"])
    single.ack(queue, fence, [make_result("t1")])
    keys = set(server.scan_iter())
    assert len(keys - {b"at:alice"}) == 12
    assert all(b"{e1}" in key for key in keys - {b"at:alice"})
    assert server.smembers("at:alice") == {b"e1"}

    assert queue.forget_endpoint("e1", limit=10)

    assert set(server.scan_iter()) == {b"own:{e1}"}
    assert 0 < server.ttl("own:{e1}") <= DELETED_TTL_S


def test_a_killed_server_is_a_wiped_one(queue: Queue, valkey: Valkey) -> None:
    fence = own(queue, tasks=[make_queued("t1")])
    lease(queue, fence)
    valkey.kill()
    with pytest.raises(Unavailable):
        single.lease(queue, "e1", fence, limit=1, lease_s=30)
    valkey.start()
    with pytest.raises(QueueDataLost):
        single.lease(queue, "e1", fence, limit=1, lease_s=30)
    assert lease(queue, own(queue, tasks=[make_queued("t1")])) == ["t1"]


def test_peers_and_forwarders_expire_on_the_server(queue: Queue, server: redis.Redis) -> None:
    queue.admit(PeerKey("key", PeerKind.CLIENT, "alice"), ttl_s=60)
    queue.announce(ForwarderInfo("w1", "tcp://127.0.0.1:1", "key"), ttl_s=15)
    assert 0 < server.ttl("zap:key") <= 60
    assert 0 < server.ttl("fwd:w1") <= 15


def test_two_adapters_share_one_queue(queue: Queue, valkey: Valkey) -> None:
    fence = own(queue)
    other = ValkeyQueue(valkey.url)
    other.enqueue([make_queued("t1")])
    assert lease(queue, fence) == ["t1"]
    other.close()


def test_maintenance_works_on_a_server_that_has_some_of_its_scripts(queue: Queue, server: redis.Redis) -> None:
    """As after a failover, when others were here first: leases must not be reaped because their renewal is unknown."""
    fence = own(queue)
    queue.enqueue([make_queued("t1", idempotent=False), make_queued("t2")])
    server.script_flush()
    single.mark_disconnected(queue, "e1", "w1", fence)
    queue.outbox("e1")
    single.lease(queue, "e1", fence, limit=2, lease_s=0)
    found = queue.maintain("w1", {"e1": HeldLeases(fence, "spool", ["t1", "t2"])}, ttl_s=45, lease_s=30)
    assert found == {"e1": MaintenanceResult([], [])}
    assert single.leased(queue, "e1", fence) == {"t1": 1, "t2": 1}


def test_batched_steps_work_on_a_server_without_scripts(queue: Queue, server: redis.Redis) -> None:
    fence = own(queue, tasks=[make_queued("t1")])
    server.script_flush()
    found = queue.lease({"e1": (fence, 5, 0), "e2": (1, 5, 0)}, lease_s=30)
    assert leased_ids(found["e1"]) == ["t1"]
    assert isinstance(found["e2"], QueueDataLost)


def test_every_script_declares_its_arguments() -> None:
    scripts = Path(__file__).parents[2] / "common" / "farcall_common" / "store" / "lua"
    assert all(path.read_text().startswith("-- ARGV: ") for path in scripts.glob("*.lua") if path.stem != "prelude")


@pytest.mark.parametrize("seed", range(4))
def test_the_scripts_and_the_fake_divide_work_the_same_way(seed: int, valkey: Valkey, server: redis.Redis) -> None:
    """Whatever happens, and in whatever order: the same tasks leave in the same order, and nothing is left behind."""
    with queue_with_clock(valkey.url) as (queue, clock):
        chance = random.Random(seed)
        both: list[Queue] = [queue, FakeQueue(clock)]
        owners = ["alice", "bob", "carol", "dave"]
        weights = {"bob": 2, "carol": 5}
        fences = [single.claim(each, "e1", "w1", weights=weights, ttl_s=45) for each in both]
        for each, fence in zip(both, fences, strict=True):
            single.mark_restored(each, "e1", fence)
        ids: list[str] = []
        leased: list[str] = []
        for step in range(250):
            clock.now = step
            owner_id = chance.choice(owners)
            answers: list[object]
            match chance.choice(
                ["enqueue", "enqueue", "lease", "lease", "ack", "unlease", "cancel", "reap", "restore", "limits"]
            ):
                case "enqueue":
                    qos = chance.choice([None, None, TARGET])
                    tasks = [
                        make_queued(f"{owner_id}-{step}-{n}", owner_id=owner_id, qos=qos)
                        for n in range(chance.randint(1, 6))
                    ]
                    ids += [task.task_id for task in tasks]
                    answers = [each.enqueue(tasks) for each in both]
                case "lease":
                    limit, reserve = chance.randint(0, 9), chance.randint(0, 3)
                    found = [
                        each.lease({"e1": (fence, limit, reserve)}, lease_s=30)["e1"]
                        for each, fence in zip(both, fences, strict=True)
                    ]
                    answers = [leased_ids(each) for each in found]
                    leased += leased_ids(found[1])
                case "ack":
                    results = [make_result(task_id) for task_id in chance.sample(ids, min(3, len(ids)))]
                    for each, fence in zip(both, fences, strict=True):
                        single.ack(each, fence, results)
                    answers = [each.outbox("e1") for each in both]
                case "unlease":
                    back = chance.sample(list(dict.fromkeys(leased)), min(2, len(set(leased))))
                    for each, fence in zip(both, fences, strict=True):
                        each.unlease("e1", fence, back)
                    answers = [each.depth(["e1"]) for each in both]
                case "cancel":
                    gone = chance.sample(ids, min(2, len(ids)))
                    answers = [each.cancel("e1", gone) for each in both]
                case "reap":
                    reaped = [single.reap(each, "e1", fence) for each, fence in zip(both, fences, strict=True)]
                    answers = [sorted(leased_ids(each)) for each in reaped]
                case "limits":
                    few = {
                        each: RunningLimit(chance.choice([None, 1, 2, 4]), chance.choice([None, 1, 3]))
                        for each in chance.sample(owners, chance.randint(0, 3))
                    }
                    complete = chance.random() < 0.5
                    for each in both:
                        each.set_limits({"e1": few}, complete=complete)
                    answers = [each.depth(["e1"]) for each in both]
                case _:
                    again = [
                        make_queued(task_id, owner_id=task_id.partition("-")[0], qos=chance.choice([None, TARGET]))
                        for task_id in chance.sample(ids, min(2, len(ids)))
                    ]
                    for each, fence in zip(both, fences, strict=True):
                        each.restore("e1", fence, again, held={again[0].task_id: 1} if again else {}, lease_s=30)
                    answers = [single.leased(each, "e1", fence) for each, fence in zip(both, fences, strict=True)]
            assert answers[0] == answers[1], step
            assert queue.depth_of("e1", owner_id) == both[1].depth_of("e1", owner_id)
            assert queue.bytes_of(owner_id) == both[1].bytes_of(owner_id)
            for task_id in chance.sample(ids, min(3, len(ids))):
                assert queue.position("e1", task_id) == both[1].position("e1", task_id)
        queue.set_limits({"e1": {}}, complete=True)
        while still := [task_id for task_id, _ in single.leased(queue, "e1", fences[0]).items()]:
            single.ack(queue, fences[0], [make_result(task_id) for task_id in still])
            lease(queue, fences[0])
        assert server.keys("[qrhc]:*") == []


def test_lanes_that_a_script_of_another_release_has_moved_leave_in_the_end(queue: Queue, server: redis.Redis) -> None:
    """To it they are two submitters, with a limit for the one without targets."""
    fence = own(queue)
    queue.set_limits({"e1": {"alice": RunningLimit(max_running=1)}}, complete=True)
    queue.enqueue([*backlog("alice", 2), *with_targets("alice", 2)])
    assert lease(queue, fence) == ["alice-0"]
    server.zadd("r:{e1}", {"alice!": 2})
    assert lease(queue, fence) == []
    assert queue.position("e1", "alice-target-0").limit == 1

    server.hdel("h:{e1}", "n:alice", "t:alice")  # its ack
    queue.cancel("e1", ["alice-1"])
    queue.set_limits({"e1": {"alice": RunningLimit(max_running=1)}}, complete=True)  # the reconciler, each minute
    assert lease(queue, fence) == ["alice-target-0"]
