"""The federation of test_store_queue_model on a real Valkey, which is emptied, and killed and started again."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis

from farcall_common.store import Queue, Records, open_records
from tests.integration.store_servers import Valkey, queue_with_clock
from tests.support.stores import FakeDatabase
from tests.unit.test_store_queue import Clock
from tests.unit.test_store_queue_model import World


@pytest.fixture
def clocked(valkey: Valkey) -> Iterator[tuple[Queue, Clock]]:
    with queue_with_clock(valkey.url) as clocked:
        yield clocked


@pytest.fixture
def postgres_records(postgres_url: str) -> Iterator[Records]:
    records = open_records(postgres_url)
    yield records
    records.close()


@pytest.mark.parametrize("seed", range(100, 104))
def test_every_accepted_task_ends_once_on_valkey(seed: int, clocked: tuple[Queue, Clock], valkey: Valkey) -> None:
    world = World(FakeDatabase().records, *clocked, seed=seed)
    _survive(world, valkey, steps=5000)


def test_every_accepted_task_ends_once_on_valkey_and_postgres(
    postgres_records: Records, clocked: tuple[Queue, Clock], valkey: Valkey
) -> None:
    world = World(postgres_records, *clocked, seed=200)
    _survive(world, valkey, steps=3000)


def _survive(world: World, valkey: Valkey, *, steps: int) -> None:
    down = False

    def kill_or_start() -> None:
        nonlocal down
        if down:
            valkey.start()
        else:
            valkey.kill()
        down = not down

    def wipe() -> None:
        if not down:
            valkey.wipe()

    def forget_results() -> None:
        if not down:
            with redis.Redis.from_url(valkey.url) as server:
                for key in list(server.scan_iter("t:*")):
                    if server.ttl(key) != -1:
                        server.delete(key)

    try:
        world.run(steps, [wipe, wipe, kill_or_start, kill_or_start], forget_results=forget_results)
    finally:
        if down:
            valkey.start()
    world.settle()
    world.check()
    assert len(world.accepted) > 20
    assert world.refused > 3
