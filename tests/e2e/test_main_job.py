"""The main job: real functions on a real endpoint, through every part of the cloud tier."""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from concurrent.futures import CancelledError, as_completed
from pathlib import Path
from typing import Any

import pytest

import farcall
from farcall_common.errors import TaskFailed, TaskPending, TaskUnknown
from farcall_common.wire import TaskState
from farcall_local.endpoint import LocalEndpoint
from tests.waiting import WAIT_S


def hello(event: str) -> str:
    return f"hello, {event}"


def square(number: int) -> int:
    return number * number


def reverse(data: bytes) -> bytes:
    return data[::-1]


def sleep(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


def wait_for(path: str) -> str:
    while not os.path.exists(path):  # noqa: PTH110 - it travels without this module's imports
        time.sleep(0.01)
    return "released"


def outer(divisor: int) -> float:
    return inner(divisor)


def inner(divisor: int) -> float:
    print("about to divide")
    return 1 / divisor


@pytest.mark.smoke
def test_run_a_registered_function(client: farcall.Client, endpoint: LocalEndpoint) -> None:
    function_id = client.register_function(hello, description="greets")
    task_id = client.run("world", endpoint_id=endpoint.endpoint_id, function_id=function_id)
    assert client.get_result(task_id, wait_s=WAIT_S) == "hello, world"

    info = client.get_task(task_id)
    assert info.state is TaskState.SUCCESS
    assert info.attempt == 1
    moments = ["submitted_at", "enqueued_at", "leased_at", "started_at", "ended_at", "returned_at"]
    assert [info.timings[moment] for moment in moments] == sorted(info.timings[moment] for moment in moments)


@pytest.mark.smoke
def test_the_history_of_a_task_is_kept(client: farcall.Client, endpoint: LocalEndpoint) -> None:
    function_id = client.register_function(hello)
    task_id = client.run("history", endpoint_id=endpoint.endpoint_id, function_id=function_id)
    client.get_result(task_id, wait_s=WAIT_S)
    states = [event["state"] for event in client.get_task_events(task_id)]
    assert states[0] == "received"
    assert states[-1] == "success"


def test_a_function_is_found_by_its_name(client: farcall.Client) -> None:
    function_id = client.register_function(square, name=f"square-{uuid.uuid4()}")
    name = client.get_function(function_id)["function_name"]
    assert [each["function_uuid"] for each in client.get_functions(search=name)] == [function_id]


def test_batch_of_a_thousand(client: farcall.Client, endpoint: LocalEndpoint) -> None:
    batch = client.create_batch()
    function_id = client.register_function(square)
    for number in range(1_000):
        batch.add(function_id, (number,))
    client.batch_run(endpoint.endpoint_id, batch)

    deadline = time.monotonic() + WAIT_S
    found = client.get_batch_result(batch.task_ids)
    while any(info.pending for info in found.values()):
        assert time.monotonic() < deadline, "the batch hangs"
        found = client.get_batch_result(batch.task_ids)

    assert [found[task_id].result() for task_id in batch.task_ids] == [number * number for number in range(1_000)]
    assert batch.task_group_id is not None
    assert sorted(client.get_task_group(batch.task_group_id)) == sorted(batch.task_ids)


def test_submitting_a_batch_twice_runs_it_once(client: farcall.Client, endpoint: LocalEndpoint) -> None:
    batch = client.create_batch()
    task_id = batch.add(client.register_function(square), (3,))
    client.batch_run(endpoint.endpoint_id, batch)
    client.batch_run(endpoint.endpoint_id, batch)
    assert client.get_result(task_id, wait_s=WAIT_S) == 9
    assert client.get_task(task_id).attempt == 1


@pytest.mark.smoke
def test_map_keeps_the_order(executor: farcall.Executor) -> None:
    assert list(executor.map(square, range(200), timeout=WAIT_S)) == [number * number for number in range(200)]


def test_map_in_chunks(executor: farcall.Executor) -> None:
    results = executor.map(square, range(500), chunksize=50, timeout=WAIT_S)
    assert list(results) == [number * number for number in range(500)]


def test_futures_complete_as_they_are_done(executor: farcall.Executor, tmp_path: Path) -> None:
    slow: farcall.ComputeFuture[Any] = executor.submit(wait_for, str(tmp_path / "release"))
    fast: farcall.ComputeFuture[Any] = executor.submit(sleep, 0.0)
    completed = as_completed([slow, fast], timeout=WAIT_S)
    try:
        assert next(completed) is fast
    finally:
        (tmp_path / "release").touch()
    assert next(completed) is slow
    assert slow.result() == "released"


@pytest.mark.smoke
def test_a_round_trip_of_five_megabytes(executor: farcall.Executor) -> None:
    data = os.urandom(5_000_000)
    assert executor.submit(reverse, data).result(WAIT_S) == data[::-1]


@pytest.mark.parametrize("size_bytes", [0, 1, 40_000, 70_000, 1_000_000])
def test_sizes_around_the_inline_limit(executor: farcall.Executor, size_bytes: int) -> None:
    data = os.urandom(size_bytes)
    assert executor.submit(reverse, data).result(WAIT_S) == data[::-1]


def test_a_big_result_is_read_by_task_id(client: farcall.Client, endpoint: LocalEndpoint) -> None:
    data = os.urandom(1_000_000)
    task_id = client.run(data, endpoint_id=endpoint.endpoint_id, function_id=client.register_function(reverse))
    assert client.get_result(task_id, wait_s=WAIT_S) == data[::-1]
    assert client.get_result(task_id) == data[::-1], "reading a result does not use it up"


@pytest.mark.smoke
def test_the_remote_traceback_is_shown(executor: farcall.Executor) -> None:
    failure = executor.submit(outer, 0).exception(WAIT_S)
    assert isinstance(failure, TaskFailed)
    assert failure.record.exception_type is not None
    assert "ZeroDivisionError" in failure.record.exception_type
    trace = failure.remote_traceback
    assert trace is not None
    assert "in outer" in trace
    assert "return 1 / divisor" in trace
    assert "farcall_endpoint" not in trace
    assert failure.record.stdout_tail is not None
    assert "about to divide" in failure.record.stdout_tail
    assert executor.submit(hello, "still here").result(WAIT_S) == "hello, still here"


@pytest.mark.smoke
def test_cancel_a_running_task(client: farcall.Client, executor: farcall.Executor) -> None:
    future = executor.submit(sleep, 600)
    wait_for_state(client, future.task_id, TaskState.RUNNING)
    assert future.cancel()
    with pytest.raises(CancelledError):
        future.result(WAIT_S)
    wait_for_state(client, future.task_id, TaskState.CANCELLED)
    assert executor.submit(hello, "free again").result(WAIT_S) == "hello, free again"


def test_cancel_a_waiting_task(client: farcall.Client, endpoint: LocalEndpoint, executor: farcall.Executor) -> None:
    function_id = client.register_function(sleep)
    batch = client.create_batch()
    for _ in range(20):
        batch.add(function_id, (600,))
    client.batch_run(endpoint.endpoint_id, batch)
    outcomes = client.cancel_many(batch.task_ids)
    assert {outcome["outcome"] for outcome in outcomes.values()} <= {"cancelled", "requested"}
    for task_id in batch.task_ids:
        wait_for_state(client, task_id, TaskState.CANCELLED)
    assert executor.submit(hello, "free again").result(WAIT_S) == "hello, free again"


def test_a_pending_task_is_reported_as_pending(client: farcall.Client, executor: farcall.Executor) -> None:
    future = executor.submit(sleep, 600)
    wait_for_state(client, future.task_id, TaskState.RUNNING)
    with pytest.raises(TaskPending):
        client.get_result(future.task_id)
    future.cancel()


def test_the_endpoint_is_online(client: farcall.Client, endpoint: LocalEndpoint) -> None:
    assert client.get_endpoint_status(endpoint.endpoint_id)["status"] == "online"
    assert endpoint.endpoint_id in [each["uuid"] for each in client.get_endpoints(role="owner")]


def wait_for_state(client: farcall.Client, task_id: str, state: TaskState) -> None:
    """Wait until a task is in a state; asking takes a few milliseconds, which is pause enough."""
    deadline = time.monotonic() + WAIT_S
    found = None
    while found is not state:
        assert time.monotonic() < deadline, f"the task is still {found}"
        with contextlib.suppress(TaskUnknown):  # an executor submits in the background
            found = client.get_task(task_id).state
        assert found is None or found is state or not found.is_terminal, f"the task ended as {found}"
