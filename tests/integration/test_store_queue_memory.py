"""What a full queue takes of Valkey's memory, as docs/limits.md says it."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from farcall_common.store import ValkeyQueue
from farcall_common.store.model import QueuedTask, Task
from farcall_common.wire import new_id, new_task_id
from farcall_lambdas.models.fields import MAX_SMALL_BYTES
from tests.integration.store_servers import Valkey
from tests.task_fields import with_options
from tests.unit.test_store_queue import LEASE_S, make_result

PAGE = (Path(__file__).parents[2] / "docs" / "limits.md").read_text()
TASKS = 3000
ENDPOINT_ID = new_id()


def documented_bytes(pattern: str) -> int:
    found = re.search(pattern, PAGE)
    assert found, pattern
    return int(found[1].replace(",", ""))


USUAL_BYTES = documented_bytes(r"task takes about ([\d,]+) bytes there")
MOST_BYTES = documented_bytes(r"bytes there, and ([\d,]+) at most")
MARKER_BYTES = documented_bytes(r"leaves a\s+marker of about ([\d,]+) bytes")


@pytest.fixture
def queue(valkey: Valkey) -> Iterator[ValkeyQueue]:
    opened = ValkeyQueue(valkey.url)
    yield opened
    opened.close()


@pytest.fixture
def used_bytes(valkey: Valkey) -> Iterator[Callable[[], int]]:
    client = redis.Redis.from_url(valkey.url)

    def read() -> int:
        return int(client.info("memory")["used_memory"])

    yield read
    client.close()


def tasks(**fields: Any) -> list[QueuedTask]:
    group_id, owner_id, function_id = new_id(), new_id(), new_id()
    return [
        QueuedTask.of(
            Task(
                task_id=new_task_id(),
                task_group_id=group_id,
                owner_id=owner_id,
                endpoint_id=ENDPOINT_ID,
                function_id=function_id,
                function_hash="0" * 64,
                **with_options(fields),
            )
        )
        for _ in range(TASKS)
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
    assert queue.depth(ENDPOINT_ID) == TASKS
    each = (used_bytes() - before) / TASKS
    print(f"{each:.0f} bytes of Valkey a task")
    assert each < allowed_bytes


def test_what_has_ended_leaves_little(queue: ValkeyQueue, used_bytes: Callable[[], int]) -> None:
    waiting = tasks(payload=os.urandom(4 * 1024))
    before = used_bytes()
    fence = queue.claim(ENDPOINT_ID, "forwarder", ttl_s=45)
    queue.restore(ENDPOINT_ID, fence, waiting, held={}, lease_s=LEASE_S)
    queue.mark_restored(ENDPOINT_ID, fence)
    leased = queue.lease(ENDPOINT_ID, fence, limit=TASKS, lease_s=LEASE_S)
    task_ids = [each.task.task_id for each in leased]
    queue.ack(fence, [make_result(task_id, endpoint_id=ENDPOINT_ID) for task_id in task_ids])
    queue.flushed(ENDPOINT_ID, task_ids)
    each_bytes = (used_bytes() - before) / TASKS
    print(f"{each_bytes:.0f} bytes of Valkey an ended task")
    assert len(task_ids) == TASKS
    assert each_bytes < MARKER_BYTES
