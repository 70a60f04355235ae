"""Calls and functions as bytes, requests that hold them, and the memory they may take."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from farcall import PayloadTooLarge, SerializationError
from farcall._api import BlobRef
from farcall._batch import (
    MAX_BYTES,
    PreparedTask,
    chunks,
    encode_payload,
    encode_submit,
)
from farcall._engine import MemoryBudget
from farcall._functions import FunctionTable, pack_call, registration
from farcall_common.limits import MAX_PAYLOAD_BYTES, TASKS_PER_SUBMIT
from farcall_common.payload import Serializer
from farcall_common.task_options import TaskOptions
from tests.waiting import WAIT_S


def double(x: int) -> int:
    """Twice as much.

    And no more.
    """
    return 2 * x


def iter_once() -> Iterator[int]:
    yield 1


class Scale:
    def __init__(self, by: int) -> None:
        self.by = by

    def __call__(self, x: int) -> int:
        return self.by * x


def test_call_round_trips() -> None:
    packed = pack_call((1, "é"), {"key": [None]}, function_name="f")
    assert Serializer().unpack_call(packed.payload) == ((1, "é"), {"key": [None]})
    assert Serializer().unpack_call(pack_call((), {}, function_name="f").payload) == ((), {})


def test_an_argument_that_cannot_be_sent_is_named() -> None:
    with pytest.raises(SerializationError, match=r"[Aa]rgument 2 .*generator"):
        pack_call((1, iter_once()), {}, function_name="f")
    with pytest.raises(SerializationError, match="'where'"):
        pack_call((), {"where": iter_once()}, function_name="f")


def test_too_large_arguments_are_refused_and_the_largest_is_named() -> None:
    with pytest.raises(
        PayloadTooLarge, match=r"of f take 1\d\.\d MiB when serialised, 1\d\.\d MiB of it argument 'image'"
    ) as e:
        pack_call((b"small",), {"image": b"x" * MAX_PAYLOAD_BYTES}, function_name="f")
    assert "path or a reference" in e.value.hint


def test_a_function_that_closes_over_too_much_is_refused() -> None:
    data = b"x" * MAX_PAYLOAD_BYTES

    def size() -> int:
        return len(data)

    with pytest.raises(PayloadTooLarge, match="function size"):
        registration(size)


def test_registration_metadata() -> None:
    body = registration(double, metadata={"project": "X"})
    assert body["function_name"] == "double"
    assert body["description"] == "Twice as much.\n\n    And no more.\n    "
    assert body["meta"]["project"] == "X"
    assert body["meta"]["python_version"].startswith("3.")
    assert len(body["meta"]["serde_identifier"]) == 2
    assert Serializer().unpack_function(body["function_code"].encode())(21) == 42


@pytest.mark.parametrize("value", [3, None, "f"])
def test_only_callables_can_be_registered(value: Any) -> None:
    with pytest.raises(SerializationError, match="cannot be called"):
        registration(value)


def test_a_plain_function_has_one_handle() -> None:
    table = FunctionTable()
    assert table.handle(double) is table.handle(double)
    assert table.handle(len) is not table.handle(double)


def test_functions_with_state_are_identified_by_their_bytes() -> None:
    table = FunctionTable()
    scale = Scale(2)
    before = table.handle(scale)
    assert table.handle(scale) is before
    scale.by = 3
    assert table.handle(scale) is not before
    assert table.handle(functools.partial(double, 1)) is table.handle(functools.partial(double, 1))
    assert table.handle(functools.partial(double, 1)) is not table.handle(functools.partial(double, 2))


def test_a_registered_function_is_not_registered_again() -> None:
    table = FunctionTable()
    handle = table.registered("id-1", double)
    assert handle.function_id == "id-1"
    assert table.handle(double) is handle
    assert table.registered("id-1") is handle


def test_function_table_evicts_old_functions_and_keeps_working() -> None:
    table = FunctionTable()
    functions = [eval(f"lambda: {n}") for n in range(1100)]
    handles = [table.handle(function) for function in functions]
    assert table.handle(functions[0]) is handles[0]  # by its bytes
    assert len({id(handle) for handle in handles}) == 1100


def prepared(count: int, size: int = 10) -> list[PreparedTask]:
    return [PreparedTask(f"t{n}", "f", b'"' + b"x" * size + b'"') for n in range(count)]


def test_requests_are_bounded_by_tasks_and_bytes() -> None:
    assert [len(chunk) for chunk in chunks(prepared(2 * TASKS_PER_SUBMIT + 1))] == [
        TASKS_PER_SUBMIT,
        TASKS_PER_SUBMIT,
        1,
    ]
    big = list(chunks(prepared(150, size=60_000)))
    assert sum(map(len, big)) == 150
    assert len(big) == 3
    for chunk in big:
        body, _ = encode_submit(chunk, task_group_id="g", options=TaskOptions())
        assert len(body) <= MAX_BYTES + 1000
    assert list(chunks([])) == []


def test_submit_has_the_api_schema() -> None:
    ref = BlobRef("owner/abc", 70_000, "abc")
    tasks = [
        PreparedTask("t1", "f1", encode_payload(b'5\n11\n"a')),
        PreparedTask("t2", "f2", encode_payload(ref)),
        PreparedTask("t3", "f1", encode_payload("é".encode())),
        PreparedTask("t4", "f1", encode_payload(b"b1 1\n\xff")),
    ]
    body, ids = encode_submit(tasks, task_group_id="g", options=TaskOptions.of(idempotent=False, walltime_s=9.5))
    assert ids == {"f1": ["t1", "t3", "t4"], "f2": ["t2"]}
    assert msgspec.json.decode(body) == {
        "task_group_id": "g",
        "idempotent": False,
        "max_attempts": 3,
        "walltime_s": 9.5,
        "tasks": {
            "f1": ['5\n11\n"a', "é", {"base64": "YjEgMQr/"}],
            "f2": [{"blob_key": "owner/abc", "size_bytes": 70_000, "sha256": "abc"}],
        },
        "task_ids": ids,
    }


def test_budget_blocks_callers_over_it() -> None:
    budget = MemoryBudget(100)
    budget.acquire(60)
    budget.acquire(60, wait=False)
    waiting, let_in = threading.Event(), threading.Event()

    def take() -> None:
        waiting.set()
        budget.acquire(60)
        let_in.set()

    thread = threading.Thread(target=take)
    thread.start()
    assert waiting.wait(WAIT_S)
    budget.release(60)
    assert not let_in.wait(0.02)
    budget.release(60)
    assert let_in.wait(WAIT_S)
    thread.join()


def test_budget_admits_one_oversized_call() -> None:
    MemoryBudget(10).acquire(1000)
