"""What a release before this one left in the queue."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from farcall_common.store import codec
from farcall_common.task_options import TaskOptions
from tests.unit.test_store_queue import make_queued

#: As releases before ADR 0046 packed a task.
FORMER: dict[str, Any] = {
    "task_id": "t1",
    "task_group_id": "g1",
    "owner_id": "alice",
    "endpoint_id": "e1",
    "function_id": "f1",
    "function_hash": "hash",
    "payload": b"\x00payload\xff",
    "payload_ref": None,
    "container_id": "c1",
    "idempotent": False,
    "max_attempts": 5,
    "walltime_s": 2.5,
    "result_serializers": ["a", "b"],
    "resource_specification": {"keep_output": True, "memory_bytes": 5, "queue": "q"},
    "attempt": 2,
    "submitted_at": 0.5,
    "traceparent": None,
}


def test_a_queued_task_of_a_former_release_keeps_its_options() -> None:
    assert codec.unpack_task(msgspec.msgpack.encode(FORMER)) == make_queued(
        attempt=2,
        submitted_at=0.5,
        container="c1",
        idempotent=False,
        max_attempts=5,
        walltime_s=2.5,
        result_serializers=("a", "b"),
        keep_output=True,
        memory_bytes=5,
        resource_specification={"queue": "q"},
    )


def test_missing_limit_is_left_to_the_endpoint() -> None:
    former = FORMER | {"container_id": None, "resource_specification": {"memory_bytes": "2 GB", "keep_output": True}}
    options = codec.unpack_task(msgspec.msgpack.encode(former)).options
    assert options.untranslatable() == ("memory_bytes", "2 GB")
    assert (options.idempotent, options.container) == (False, None)


def test_queued_task_round_trips() -> None:
    for task in (make_queued(), make_queued(idempotent=False, num_nodes=2)):
        assert codec.unpack_task(codec.pack(task)) == task
    assert make_queued().options == TaskOptions()


def test_invalid_task_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError):
        codec.unpack_task(msgspec.msgpack.encode({"task_id": "t1"}))
