"""The queue in a real Valkey: the suite of every Queue, and what only a server can get wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis

from farcall_common.errors import QueueDataLost, Unavailable
from farcall_common.store import ForwarderInfo, PeerKey, PeerKind, Queue, ValkeyQueue
from farcall_common.store.model import Holding, Tended
from farcall_common.store.queue_valkey import MARKER_TTL_S
from tests.integration.store_servers import Valkey
from tests.unit.test_store_queue import QueueSuite, lease, leased_ids, make_queued, make_result, own


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
    def wipe(self, valkey: Valkey) -> Callable[[], None]:
        return valkey.wipe

    @pytest.fixture
    def forget_ends(self, server: redis.Redis) -> Callable[[], None]:
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


def test_only_what_may_be_forgotten_has_a_time_to_live(queue: Queue, server: redis.Redis) -> None:
    """A cache short of memory evicts keys with a TTL; a task that waits, runs or is not yet recorded has none."""
    fence = own(queue)
    queue.enqueue([make_queued(f"t{n}") for n in range(4)], now=0)
    lease(queue, fence, limit=3)
    queue.cancel("e1", ["t0"], now=1)
    queue.ack(fence, [make_result("t1"), make_result("t2")], now=1)
    queue.flushed("e1", ["t2"])
    assert {key for key in server.scan_iter() if server.ttl(key) != -1} == {b"t:{e1}:t2"}
    assert 0 < server.ttl("t:{e1}:t2") <= MARKER_TTL_S
    assert server.hget("t:{e1}:t2", "task") is None
    assert server.hget("t:{e1}:t2", "result") is None


def test_an_endpoint_lives_in_one_slot(queue: Queue, server: redis.Redis) -> None:
    fence = own(queue)
    queue.enqueue([make_queued(f"t{n}") for n in range(3)], now=0)
    lease(queue, fence, limit=2)
    queue.cancel("e1", ["t0"], now=1)
    queue.ack(fence, [make_result("t1")], now=1)
    keys = list(server.scan_iter())
    assert len(keys) == 8
    assert all(b"{e1}" in key for key in keys)


def test_a_killed_server_is_a_wiped_one(queue: Queue, valkey: Valkey) -> None:
    fence = own(queue, tasks=[make_queued("t1")])
    lease(queue, fence)
    valkey.kill()
    with pytest.raises(Unavailable):
        queue.lease("e1", fence, limit=1, lease_s=30, now=1)
    valkey.start()
    with pytest.raises(QueueDataLost):
        queue.lease("e1", fence, limit=1, lease_s=30, now=1)
    assert lease(queue, own(queue, tasks=[make_queued("t1")])) == ["t1"]


def test_peers_and_forwarders_are_forgotten_by_the_server_too(queue: Queue, server: redis.Redis) -> None:
    queue.admit(PeerKey("key", PeerKind.CLIENT, "alice"), ttl_s=60)
    queue.announce(ForwarderInfo("w1", "tcp://127.0.0.1:1", "key"), ttl_s=15, now=0)
    assert 0 < server.ttl("zap:key") <= 60
    assert 0 < server.ttl("fwd:w1") <= 15


def test_two_adapters_share_one_queue(queue: Queue, valkey: Valkey) -> None:
    fence = own(queue)
    other = ValkeyQueue(valkey.url)
    other.enqueue([make_queued("t1")], now=0)
    assert lease(queue, fence) == ["t1"]
    other.close()


def test_an_upkeep_goes_well_on_a_server_that_knows_some_of_its_scripts(queue: Queue, server: redis.Redis) -> None:
    """As after a failover, when others were here first: leases must not be reaped because their renewal is unknown."""
    fence = own(queue)
    queue.enqueue([make_queued("t1", idempotent=False), make_queued("t2")], now=0)
    lease(queue, fence)
    server.script_flush()
    queue.keep("e1", "w1", fence, ttl_s=45, now=1)
    queue.reap("e1", fence, now=1)
    queue.outbox("e1")
    found = queue.tend("w1", {"e1": Holding(fence, "spool", ["t1", "t2"])}, ttl_s=45, lease_s=30, now=99)
    assert found == {"e1": Tended([], [])}
    assert queue.leased("e1", fence) == {"t1": 1, "t2": 1}


def test_steps_of_one_kind_go_well_on_a_server_that_knows_none(queue: Queue, server: redis.Redis) -> None:
    fence = own(queue, tasks=[make_queued("t1")])
    server.script_flush()
    found = queue.lease_many({"e1": (fence, 5), "e2": (1, 5)}, lease_s=30, now=1)
    assert leased_ids(found["e1"]) == ["t1"]
    assert isinstance(found["e2"], QueueDataLost)


def test_every_script_says_what_it_takes() -> None:
    scripts = Path(__file__).parents[2] / "common" / "farcall_common" / "store" / "lua"
    assert all(path.read_text().startswith("-- ARGV: ") for path in scripts.glob("*.lua") if path.stem != "prelude")
