"""What a type checker sees of the public names. ``make check`` reads this, and what is marked as an error must be one;
running it shows that the calls are possible."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Iterator
from typing import Any, assert_type

import pytest

from farcall import (
    Client,
    ComputeFuture,
    ErrorRecord,
    Executor,
    FarcallError,
    ShellFunction,
    ShellResult,
    TaskFailed,
    TaskInfo,
    Why,
    track,
)
from farcall.testing import FakeCloud
from farcall_endpoint import Engine
from farcall_endpoint.engine import EngineFuture

WAIT_S = 20.0


def cube(number: int) -> int:
    return number**3


def named(name: str, *, times: int = 1) -> str:
    return name * times


@pytest.fixture
def cloud() -> Iterator[FakeCloud]:
    with FakeCloud() as cloud:
        yield cloud


@pytest.fixture
def client(cloud: FakeCloud) -> Iterator[Client]:
    with cloud.client() as client:
        yield client


def test_a_future_has_the_type_of_what_the_function_returns(cloud: FakeCloud, client: Client) -> None:
    with Executor(cloud.endpoint_id, client) as executor:
        future = executor.submit(cube, 2)
        assert_type(future, ComputeFuture[int])
        assert_type(future.result(WAIT_S), int)
        assert_type(executor.submit(named, "x", times=2), ComputeFuture[str])
        assert_type(executor.options(walltime_s=60).submit(cube, 2), ComputeFuture[int])
        assert_type(executor.map(cube, range(3), chunksize=2), Iterator[int])
        assert_type(executor.submit_to_registered_function(executor.register_function(cube), (2,)), ComputeFuture[Any])
        assert_type(future.timings, dict[str, float])
        assert_type(future.why(), Why)
        assert_type([each.result() for each in track([future])], list[int])
        standard: concurrent.futures.Future[int] = future
        general: concurrent.futures.Executor = executor
        assert (standard.done(), general) == (True, executor)


def test_command_lines_have_results_of_their_own(cloud: FakeCloud, client: Client) -> None:
    with Executor(cloud.endpoint_id, client) as executor:
        future = executor.submit(ShellFunction("true"))
        assert_type(future, ComputeFuture[ShellResult | dict[str, Any]])
        future.cancel()


def test_a_client_answers_in_types(cloud: FakeCloud, client: Client) -> None:
    task_id = client.run(2, endpoint_id=cloud.endpoint_id, function_id=client.register_function(cube))
    assert_type(task_id, str)
    assert_type(client.get_result(task_id, wait_s=WAIT_S), Any)
    assert_type(client.get_task(task_id), TaskInfo)
    assert_type(client.get_task(task_id).exception, Exception | None)
    assert_type(client.get_batch_result([task_id]), dict[str, TaskInfo])


def test_errors_have_records() -> None:
    error = TaskFailed("it failed")
    assert_type(error.record, ErrorRecord)
    assert_type(error.record.retry_after_s, float | None)
    assert_type(error.remote_traceback, str | None)
    general: FarcallError = error
    assert general is error


def test_what_is_wrong_is_an_error_for_the_checker_too(client: Client) -> None:
    with pytest.raises(TypeError):
        Executor(client=client, batch_size="many")  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        Executor(client=client, walltime=5)  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        client.run(2)  # type: ignore[call-arg]


def type_of_the_engine(engine: Engine) -> None:
    """For the checker alone: it knows the arguments, too."""
    assert_type(engine.submit(cube, 2), EngineFuture[int])
    engine.submit(cube, "two")  # type: ignore[arg-type]
    engine.submit(named, "x", many=2)  # type: ignore[call-arg]
    assert_type(engine.map(cube, range(3)), Iterator[int])


async def type_of_what_is_awaited(future: ComputeFuture[int]) -> None:
    """For the checker alone."""
    assert_type(await future, int)
