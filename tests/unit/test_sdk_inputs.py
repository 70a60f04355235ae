"""Futures as arguments of other calls."""

from __future__ import annotations

import concurrent.futures
import gc
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from farcall import Executor, InputFailed, SerializationError, TaskFailed
from farcall._future import failure_of, inputs_of, resolved, when_all_done
from farcall.testing import FakeCloud
from tests.waiting import WAIT_S


def add(*numbers: float) -> float:
    return sum(numbers)


def total(numbers: Any, *, extra: Any = ()) -> float:
    return float(sum(numbers) + sum(extra.values() if isinstance(extra, dict) else extra))


def divide(a: float, b: float) -> float:
    return a / b


@pytest.fixture
def executor() -> Iterator[Executor]:
    with FakeCloud() as cloud, cloud.client() as client, Executor(cloud.endpoint_id, client) as executor:
        yield executor


@pytest.fixture
def offline() -> Iterator[tuple[FakeCloud, Executor]]:
    with FakeCloud(workers=0) as cloud, cloud.client() as client, Executor(cloud.endpoint_id, client) as executor:
        yield cloud, executor


def done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


def test_futures_are_found_in_documented_containers() -> None:
    a, b, c, d = (done(n) for n in range(4))
    assert inputs_of((a, 1, [b, a], ({"deep": c},)), {"x": {"key": d}, "y": "text"}) == (a, b, d)
    assert inputs_of((1, "a", [1, 2], {"k": 1}), {"x": None}) == ()
    assert resolved((a, [b, 5], (c,), {d}), {"k": {"x": d, "y": 1}}) == (
        (0, [1, 5], (2,), {3}),
        {"k": {"x": 3, "y": 1}},
    )
    untouched = object()
    assert resolved((untouched,), {})[0][0] is untouched


def test_callback_runs_after_the_last_future() -> None:
    acted: list[None] = []
    first: Future[int] = Future()
    second: Future[int] = Future()
    when_all_done([first, second, done(1)], lambda: acted.append(None))
    first.set_result(1)
    assert acted == []
    second.cancel()
    assert acted == [None]
    assert isinstance(failure_of([first, second]), InputFailed)
    assert failure_of([first]) is None


def test_chain_runs_without_a_waiter(executor: Executor) -> None:
    future = executor.submit(add, 1, 2)
    for _ in range(5):
        future = executor.submit(add, future, future)
    assert future.result(WAIT_S) == 3 * 2**5


def test_fan_out_and_fan_in(executor: Executor) -> None:
    parts = [executor.submit(add, n, 0.5) for n in range(10)]
    whole = executor.submit(total, parts, extra={"a": parts[0], "b": 1})
    assert whole.result(WAIT_S) == sum(n + 0.5 for n in range(10)) + 0.5 + 1
    assert list(executor.map(add, parts, chunksize=3, timeout=WAIT_S)) == [n + 0.5 for n in range(10)]


def test_futures_of_other_executors_are_accepted(executor: Executor) -> None:
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        assert executor.submit(add, pool.submit(pow, 2, 5), 1).result(WAIT_S) == 33


def test_large_inputs_are_sent(executor: Executor) -> None:
    big = executor.submit(bytes, 300_000)
    assert executor.submit(len, big).result(WAIT_S) == 300_000


def test_call_is_sent_after_its_inputs_are_done(offline: tuple[FakeCloud, Executor]) -> None:
    cloud, executor = offline
    mine: Future[int] = Future()
    future = executor.submit(add, mine, 1)
    other = executor.submit(add, 5)
    deadline = time.monotonic() + WAIT_S
    while other.task_id not in cloud._tasks:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert future.task_id not in cloud._tasks
    mine.set_result(41)
    assert executor._engine.flush(WAIT_S)
    assert future.task_id in cloud._tasks
    cloud.run_waiting()
    assert future.result(WAIT_S) == 42


def test_a_failed_input_fails_the_call_with_the_chain(executor: Executor) -> None:
    bad = executor.submit(divide, 1, 0)
    last = executor.submit(add, executor.submit(add, bad, 1), 2)
    with pytest.raises(InputFailed, match=r"its argument, task .*, failed") as caught:
        last.result(WAIT_S)
    middle = caught.value.__cause__
    assert isinstance(middle, InputFailed)
    assert bad.task_id in str(middle)
    assert isinstance(middle.__cause__, TaskFailed)
    assert "Remote traceback" in middle.__cause__.__notes__[0]


def test_a_cancelled_input_fails_the_call_and_a_cancelled_call_leaves_its_input(
    offline: tuple[FakeCloud, Executor],
) -> None:
    cloud, executor = offline
    first = executor.submit(add, 1)
    second, third = executor.submit(add, first), executor.submit(add, first)
    assert third.cancel()
    assert not first.done()
    assert first.cancel()
    with pytest.raises(InputFailed, match="was cancelled") as caught:
        second.result(WAIT_S)
    assert isinstance(caught.value.__cause__, concurrent.futures.CancelledError)
    assert third.cancelled()
    assert {second.task_id, third.task_id}.isdisjoint(cloud._tasks)


@pytest.mark.parametrize("value", [(n for n in range(3)), [[]]], ids=["cannot be pickled", "not hashable"])
def test_a_result_that_cannot_be_an_argument_fails_the_call(executor: Executor, value: Any) -> None:
    inputs = {done(each) for each in value} if isinstance(value, list) else done(value)
    with pytest.raises((SerializationError, TypeError)):
        executor.submit(total, inputs).result(WAIT_S)


def test_a_chain_keeps_no_result_alive(executor: Executor) -> None:
    first = executor.submit(add, 1)
    last = executor.submit(add, executor.submit(add, first))
    gone = weakref.ref(first)
    assert last.result(WAIT_S) == 1
    del first
    deadline = time.monotonic() + WAIT_S
    while gone() is not None:  # the threads may hold it for a moment
        assert time.monotonic() < deadline
        gc.collect()


def test_shutdown_waits_for_calls_that_wait() -> None:
    with FakeCloud() as cloud, cloud.client() as client:
        executor = Executor(cloud.endpoint_id, client)
        future = executor.submit(add, executor.submit(add, 1, 1), 1)
        executor.shutdown()
        assert future.result(0) == 3
