"""What a full queue takes of Valkey's memory, as docs/limits.md says it."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from farcall_common.store import ValkeyQueue
from farcall_common.store.model import QueuedTask, Task
from farcall_common.wire import new_id, new_task_id
from farcall_lambdas.models.fields import MAX_SMALL_BYTES
from farcall_lambdas.settings import ApiSettings
from tests.integration.store_servers import Valkey
from tests.support.memory_api import BOB, Answer, Clock, MemoryApi
from tests.support.stores import fake_stores, single
from tests.task_fields import with_options
from tests.unit.test_store_queue import LEASE_S, make_result

PAGE = (Path(__file__).parents[2] / "docs" / "limits.md").read_text()
TASKS = 3000
ENDPOINT_ID = new_id()
#: Of the Valkey with little memory.
MAX_BYTES = 48 * 2**20


def documented_bytes(pattern: str) -> int:
    found = re.search(pattern, PAGE)
    assert found, pattern
    return int(found[1].replace(",", ""))


USUAL_BYTES = documented_bytes(r"task takes about ([\d,]+) bytes there")
MOST_BYTES = documented_bytes(r"bytes there, and ([\d,]+) at most")
MARKER_BYTES = documented_bytes(r"leaves a\s+marker of about ([\d,]+) bytes")


@pytest.fixture
def queue(valkey: Valkey) -> Iterator[ValkeyQueue]:
    """A queue whose scripts Valkey has loaded: their memory is not that of tasks."""
    opened = ValkeyQueue(valkey.url)
    run_to_the_end(opened, tasks(1, endpoint_id=new_id(), payload=b""))
    yield opened
    opened.close()


@pytest.fixture
def used_bytes(valkey: Valkey) -> Iterator[Callable[[], int]]:
    client = redis.Redis.from_url(valkey.url)

    def read() -> int:
        return int(client.info("memory")["used_memory"])

    yield read
    client.close()


def run_to_the_end(queue: ValkeyQueue, waiting: list[QueuedTask]) -> int:
    """Restore, lease and end tasks of one endpoint; returns how many were leased."""
    endpoint_id = waiting[0].endpoint_id
    fence = single.claim(queue, endpoint_id, "forwarder", ttl_s=45)
    queue.restore(endpoint_id, fence, waiting, held={}, lease_s=LEASE_S)
    single.mark_restored(queue, endpoint_id, fence)
    leased = single.lease(queue, endpoint_id, fence, limit=len(waiting), lease_s=LEASE_S)
    task_ids = [each.task.task_id for each in leased]
    single.ack(queue, fence, [make_result(task_id, endpoint_id=endpoint_id) for task_id in task_ids])
    queue.flushed({endpoint_id: task_ids})
    queue.enqueue(waiting)  # nothing: they have ended
    return len(task_ids)


def tasks(count: int = TASKS, *, endpoint_id: str = ENDPOINT_ID, **fields: Any) -> list[QueuedTask]:
    group_id, owner_id, function_id = new_id(), new_id(), new_id()
    return [
        QueuedTask.of(
            Task(
                task_id=new_task_id(),
                task_group_id=group_id,
                owner_id=owner_id,
                endpoint_id=endpoint_id,
                function_id=function_id,
                function_hash="0" * 64,
                **with_options(fields),
            )
        )
        for _ in range(count)
    ]


@pytest.mark.parametrize(
    ("fields", "allowed_bytes"),
    [
        ({"payload": os.urandom(300)}, USUAL_BYTES),
        ({"payload": os.urandom(64 * 1024)}, USUAL_BYTES),
        ({"payload": os.urandom(4 * 1024)}, MOST_BYTES),
        (
            {
                "payload": os.urandom(4 * 1024),
                "resource_specification": {"x": "y" * (MAX_SMALL_BYTES - 20)},
                "result_serializers": tuple("z" * 100 for _ in range(32)),
            },
            MOST_BYTES,
        ),
    ],
    ids=["small", "64 KiB", "4 KiB", "as large as can be"],
)
def test_a_full_queue_stays_within_its_memory(
    fields: dict[str, Any], allowed_bytes: int, queue: ValkeyQueue, used_bytes: Callable[[], int]
) -> None:
    before = used_bytes()
    queue.enqueue(tasks(**fields))
    assert queue.depth([ENDPOINT_ID]) == TASKS
    each = (used_bytes() - before) / TASKS
    print(f"{each:.0f} bytes of Valkey a task")
    assert each < allowed_bytes


@pytest.fixture
def small_valkey() -> Iterator[Valkey]:
    with tempfile.TemporaryDirectory() as directory:
        server = Valkey(Path(directory))
        server.start(maxmemory=MAX_BYTES)
        yield server
        server.kill()


def test_a_flood_of_one_submitter_leaves_the_queue_usable_for_others(small_valkey: Valkey) -> None:
    """Large specifications make small requests large in the queue."""
    clock = Clock()
    with contextlib.closing(ValkeyQueue(small_valkey.url)) as queue:
        api = MemoryApi(
            stores=dataclasses.replace(fake_stores(clock), queue=queue),
            clock=clock,
            settings=ApiSettings(rate_burst=10**9),
        )
        theirs, mine = api.function(), api.function(caller=BOB)
        endpoint_id = api.endpoint(caller=BOB, public=True)

        def flood() -> Answer:
            clock.now += 1
            body = {"tasks": {theirs: ["p"] * 500}, "resource_specification": {"x": "y" * (MAX_SMALL_BYTES - 20)}}
            return api.call("POST", f"/v3/endpoints/{api.endpoint()}/submit", body)

        answers = [flood() for _ in range(MAX_BYTES // (500 * MAX_SMALL_BYTES) + 2)]
        assert {answer.status for answer in answers} == {200, 429}
        assert answers[-1].body["code"] == "QUEUE_FULL"
        memory = queue.memory()
        assert memory.max_bytes == MAX_BYTES
        assert memory.used_bytes < MAX_BYTES / 2

        submitted = api.call("POST", f"/v3/endpoints/{endpoint_id}/submit", {"tasks": {mine: ["p"] * 10}}, caller=BOB)
        assert submitted.status == 200
        fence = single.claim(queue, endpoint_id, "forwarder", ttl_s=45)
        single.mark_restored(queue, endpoint_id, fence)
        leased = single.lease(queue, endpoint_id, fence, limit=10, lease_s=LEASE_S)
        assert [each.task.task_id for each in leased] == submitted.body["tasks"][mine]
        results = [make_result(each.task.task_id, endpoint_id=endpoint_id) for each in leased]
        single.ack(queue, fence, results)
        assert len(queue.outbox(endpoint_id)) == 10


def test_ended_tasks_leave_little_memory_in_use(queue: ValkeyQueue, used_bytes: Callable[[], int]) -> None:
    waiting = tasks(payload=os.urandom(4 * 1024))
    before = used_bytes()
    ended = run_to_the_end(queue, waiting)
    each_bytes = (used_bytes() - before) / TASKS
    print(f"{each_bytes:.0f} bytes of Valkey an ended task")
    assert ended == TASKS
    assert each_bytes < MARKER_BYTES
