"""Calls that get values from other workers, past the manager: two real workers, and the test as their manager."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from farcall_endpoint.contracts.manager_worker import (
    INLINE_BYTES,
    MANAGER,
    CallOrder,
    Delivery,
    Done,
    InputOrder,
    Peer,
    Sync,
    Synced,
)
from farcall_endpoint.host.shared_memory import Body, MemoryFile, SharedBytes, ancillary
from farcall_endpoint.worker.arenas import LEDGER_BYTES, Returns, new_ledger
from farcall_endpoint.worker.edges import edge_pair
from tests.support.worker import WorkerUnderTest, values_of, worker_under_test

AWAITED = InputOrder((0,), awaited=True)
SIZES = [1000, 64_000, 1_000_000, 10_000_000]


def connect(first: WorkerUnderTest, second: WorkerUnderTest, number: int = 7) -> None:
    """As a manager."""
    (here, ledger), (there, _) = edge_pair()
    for worker, end in ((first, here), (second, there)):
        body = (SharedBytes(MemoryFile(end.detach()), 0, 1), SharedBytes(ledger, 0, LEDGER_BYTES))
        worker.channel.send(Peer(number, worker is first), body)


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[WorkerUnderTest, WorkerUnderTest]]:
    with (
        worker_under_test(tmp_path_factory.mktemp("first")) as first,
        worker_under_test(tmp_path_factory.mktemp("second")) as second,
    ):
        connect(first, second)
        yield first, second


def ended(worker: WorkerUnderTest) -> tuple[Done, list[Any]]:
    done, body = worker.expect(Done)
    assert done.error is None, done.error
    return done, values_of(done, body)


def deliver(*keys: tuple[str, int], peer: int = 7) -> CallOrder:
    return CallOrder(is_edge=True, deliver=tuple(Delivery(peer, *key) for key in keys))


def array(size: int) -> Any:
    import numpy

    return numpy.arange(size).astype("u1")


def summed(value: Any, also: Any = None) -> tuple[int, int, object]:
    total = int(value.sum())
    value[:] = 0  # its own copy
    return len(value), total, also


@pytest.mark.parametrize("size", SIZES)
def test_a_value_goes_to_a_waiting_call_and_to_the_manager(
    workers: tuple[WorkerUnderTest, WorkerUnderTest], size: int
) -> None:
    producer, consumer = workers
    expected = np.arange(size).astype("u1")
    consumer.order(summed, None, call=CallOrder((AWAITED,), is_edge=True), task_id="g/1")
    producer.order(array, size, call=deliver(("g/1", 0)), task_id="g/0")
    assert ended(consumer)[1] == [(size, int(expected.sum()), None)]
    done, [value] = ended(producer)
    assert done.undelivered == ()
    np.testing.assert_array_equal(value, expected)


def test_a_call_may_wait_for_several_values_and_get_others_with_its_order(
    workers: tuple[WorkerUnderTest, WorkerUnderTest],
) -> None:
    producer, consumer = workers
    # What arrives before the order waits for it.
    producer.order(array, 100_000, call=deliver(("g/2", 0), ("g/2", 1)))
    ended(producer)
    orders = (AWAITED, InputOrder((1, 0), awaited=True), InputOrder((1, 1), missing=True))

    def both(first: Any, others: list[Any]) -> list[int]:
        return [int(first.sum()), *[int(each.sum()) for each in others]]

    consumer.order(both, None, [None, None], call=CallOrder(orders, is_edge=True), task_id="g/2")
    total = int(np.arange(100_000).astype("u1").sum())
    assert ended(consumer)[1] == [[total, total]]


def test_what_is_not_delivered_is_reported(workers: tuple[WorkerUnderTest, WorkerUnderTest]) -> None:
    producer, _ = workers
    order = CallOrder(is_edge=True, deliver=(Delivery(99, "g/1", 0), Delivery(7, "g/3", 0)))
    producer.order(array, 10, call=order)
    done, [value] = ended(producer)
    assert done.undelivered == (0,)
    assert len(value) == 10
    large = CallOrder(is_edge=True, room_bytes=100, deliver=(Delivery(7, "g/1", 0),))  # on the disk
    producer.order(array, 1000, call=large)
    assert ended(producer)[0].undelivered == (0,)


def test_a_call_that_waits_can_be_taken_back(workers: tuple[WorkerUnderTest, WorkerUnderTest]) -> None:
    producer, consumer = workers
    awaiting = CallOrder((AWAITED,), is_edge=True)
    consumer.order(summed, None, call=awaiting, task_id="g/4")
    consumer.order(len, "behind it", task_id="g/5")
    assert consumer.channel.revoke() == 2
    consumer.channel.send(Sync())
    consumer.expect(Synced)
    # What arrives for it later is not taken for another one; the same call can be sent again.
    producer.order(array, 100_000, call=deliver(("g/4", 0)))
    ended(producer)
    consumer.order(len, "123", task_id="g/5")
    consumer.expect(Done)
    consumer.order(summed, None, call=awaiting, task_id="g/4")
    assert ended(consumer)[1][0][0] == 100_000


def test_orders_that_come_while_a_call_waits_are_run_after_it(
    workers: tuple[WorkerUnderTest, WorkerUnderTest],
) -> None:
    producer, consumer = workers
    consumer.order(summed, None, call=CallOrder((AWAITED,), is_edge=True), task_id="g/6")
    consumer.order(len, "123", task_id="g/7")
    producer.order(array, 1000, call=deliver(("g/6", 0)))
    ended(producer)
    assert consumer.expect(Done)[0].task_id == "g/6"
    assert consumer.expect(Done)[0].task_id == "g/7"


def test_values_for_many_calls_may_come_before_those_are_made(workers: tuple[WorkerUnderTest, WorkerUnderTest]) -> None:
    producer, consumer = workers

    def pause() -> None:
        import time

        time.sleep(0.3)

    consumer.order(pause)
    for number in range(100):
        producer.order(abs, -number, call=deliver((f"early/{number}", 0)))
        ended(producer)
    # While the first call waits, the order of the second comes.
    for number in range(2):
        consumer.order(abs, None, call=CallOrder((AWAITED,), is_edge=True), task_id=f"early/{number}")
    consumer.expect(Done)
    assert [ended(consumer)[1] for _ in range(2)] == [[0], [1]]


def test_a_function_that_keeps_its_value_does_not_change_what_was_delivered(
    workers: tuple[WorkerUnderTest, WorkerUnderTest],
) -> None:
    producer, consumer = workers

    def kept(number: int) -> Any:
        import builtins

        import numpy

        held: Any = builtins.__dict__.setdefault("held_by_a_test", numpy.zeros(200_000, "u1"))
        held[:] = number
        return held

    for number in range(5):
        producer.order(kept, number, call=deliver((f"k/{number}", 0)))
        ended(producer)
    for number in range(5):
        consumer.order(summed, None, call=CallOrder((AWAITED,), is_edge=True), task_id=f"k/{number}")
        assert ended(consumer)[1] == [(200_000, 200_000 * number, None)]


def test_a_producer_that_is_killed_leaves_its_consumer_to_the_manager(
    tmp_path: Path, workers: tuple[WorkerUnderTest, WorkerUnderTest]
) -> None:
    _, consumer = workers
    with worker_under_test(tmp_path) as producer:
        connect(producer, consumer, 8)
        consumer.order(summed, None, call=CallOrder((AWAITED,), is_edge=True), task_id="g/8")
        os.kill(producer.process.pid, signal.SIGKILL)
        producer.process.wait()
    assert consumer.channel.revoke() == 1
    consumer.channel.send(Sync())
    consumer.expect(Synced)
    consumer.order(len, "123", task_id="g/9")
    assert consumer.expect(Done)[0].task_id == "g/9"


def test_a_consumer_that_is_killed_costs_its_producer_nothing(
    tmp_path: Path, workers: tuple[WorkerUnderTest, WorkerUnderTest]
) -> None:
    producer, _ = workers
    with worker_under_test(tmp_path) as consumer:
        connect(producer, consumer, 9)
        producer.order(array, 1_000_000, call=deliver(("g/10", 0), peer=9))
        assert ended(producer)[0].undelivered == ()
        os.kill(consumer.process.pid, signal.SIGKILL)
        consumer.process.wait()
    producer.order(array, 1_000_000, call=deliver(("g/10", 0), peer=9))
    done, [value] = ended(producer)
    assert done.undelivered == (0,)
    assert len(value) == 1_000_000


# -- memory that the manager has, too ----------------------------------------------------------------------------------


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[WorkerUnderTest, WorkerUnderTest, Returns]]:
    """A producer whose manager returns its arenas, and a consumer."""
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    with worker_under_test(tmp_path / "first") as first, worker_under_test(tmp_path / "second") as second:
        connect(first, second)
        ledger = new_ledger()
        first.channel.send(Peer(MANAGER, first=False), (SharedBytes(ledger, 0, LEDGER_BYTES),))
        yield first, second, Returns(ledger)


def produced(
    workers: tuple[WorkerUnderTest, WorkerUnderTest, Returns], number: int, *, consume: bool = True
) -> tuple[tuple[int, int], Body]:
    """A value of a producer, and its arena."""
    producer, consumer, returns = workers
    producer.order(numbers, number, call=deliver(("g/1", 0)) if consume else deliver(("g/1", 0), peer=99))
    done, body = producer.expect(Done)
    if consume:
        consumer.order(summed, None, call=CallOrder((AWAITED,), is_edge=True), task_id="g/1")
        assert ended(consumer)[1] == [(200_000, 200_000 * number, None)]
    assert done.lent is not None
    return done.lent, returns.body(body, *done.lent)


def numbers(number: int) -> Any:
    import numpy

    return numpy.full(200_000, number, "u1")


def test_an_arena_is_used_again_when_consumer_and_manager_have_returned_it(
    pair: tuple[WorkerUnderTest, WorkerUnderTest, Returns],
) -> None:
    used = {produced(pair, number)[0] for number in range(30)}
    assert len(used) <= 2


def test_what_the_manager_holds_does_not_change(pair: tuple[WorkerUnderTest, WorkerUnderTest, Returns]) -> None:
    held = [produced(pair, number) for number in range(10)]
    assert len({lent for lent, _ in held}) == 10
    for number, (_, body) in enumerate(held):
        assert isinstance(body, SharedBytes)
        assert body.read(body.size - 1000, 1000) == bytes([number]) * 1000


@pytest.mark.parametrize("consume", [True, False])
def test_what_the_manager_passes_on_or_maps_is_not_used_again(
    pair: tuple[WorkerUnderTest, WorkerUnderTest, Returns], consume: bool
) -> None:
    here, there = socket.socketpair()
    used = set()
    with here, there:
        for number in range(5):
            lent, body = produced(pair, number, consume=consume)
            used.add(lent[0])
            assert isinstance(body, SharedBytes)
            if number % 2:
                body.view()
            else:
                here.sendmsg([b"x"], ancillary([body.memory]))
            del body
    assert len(used) == 5


def test_a_forged_arena_is_refused_or_harms_its_own_worker_only() -> None:
    returns = Returns(new_ledger())
    with pytest.raises(ValueError, match="slot"):
        returns.body(b"", 1, 128)
    assert returns.body(b"x", 1, 2) == b"x"


# -- values that functions write where they stay -----------------------------------------------------------------------


def in_place(number: int, size: int) -> Any:
    import numpy

    from farcall_common.running import current

    array = numpy.frombuffer(current().buffer(size), "u1")
    array[:] = number
    return {"array": array, "number": number}


def looked_at(value: Any) -> tuple[int, int, int]:
    return value["number"], int(value["array"].sum()), len(value["array"])


@pytest.mark.parametrize("size", SIZES)
def test_a_function_writes_its_value_in_place(
    pair: tuple[WorkerUnderTest, WorkerUnderTest, Returns], size: int
) -> None:
    producer, consumer, returns = pair
    used = []
    for number in range(6):
        producer.order(in_place, number, size, call=deliver(("g/1", 0)))
        done, body = producer.expect(Done)
        assert (done.error, done.undelivered) == (None, ())
        if done.lent is not None:
            used.append(done.lent[0])
            body = returns.body(body, *done.lent)
        del body
        consumer.order(looked_at, None, call=CallOrder((AWAITED,), is_edge=True), task_id="g/1")
        assert ended(consumer)[1] == [(number, number * size, size)]
    assert len(set(used)) == (1 if used else 0)  # that of the buffer: a copy would be in another one
    assert bool(used) == (size > INLINE_BYTES)


def test_a_value_in_place_goes_to_the_manager_alone_too(
    workers: tuple[WorkerUnderTest, WorkerUnderTest],
) -> None:
    producer, _ = workers
    [value] = producer.values(in_place, 3, 1_000_000, call=CallOrder(is_edge=True))
    assert int(value["array"].sum()) == 3_000_000
    # Without an edge it is written as any other result.
    producer.order(in_place, 3, 1_000_000)
    assert producer.expect(Done)[0].error is None


def test_a_buffer_that_cannot_be_is_refused(workers: tuple[WorkerUnderTest, WorkerUnderTest]) -> None:
    producer, _ = workers

    def impossible(size: int) -> str:
        from farcall_common.running import current

        try:
            current().buffer(size)
        except ValueError as error:
            return str(error)
        return "there was"

    for size in (-1, 2**62, 2**70):
        [said] = producer.values(impossible, size, call=CallOrder(is_edge=True))
        assert "a buffer of" in said
