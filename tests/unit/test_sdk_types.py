"""What a type checker sees of the public names. ``make check`` reads this, and what is marked as an error must be one;
running it shows that the calls are possible."""

from __future__ import annotations

import concurrent.futures
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, assert_type

import pytest

from farcall import (
    Client,
    ComputeFuture,
    ErrorRecord,
    Executor,
    FarcallError,
    Function,
    Graph,
    MPIFunction,
    Reference,
    ShellFunction,
    ShellResult,
    StageHandle,
    StageList,
    Stages,
    TaskFailed,
    TaskInfo,
    Why,
    chain,
    function,
    store,
    track,
)
from farcall.testing import FakeCloud
from farcall_endpoint import Engine
from farcall_endpoint.engine import EngineFuture
from tests.waiting import WAIT_S

REPOSITORY: Final = Path(__file__).parents[2]


def cube(number: int) -> int:
    return number**3


def power(base: int, exponent: int) -> int:
    return int(base**exponent)


def total(numbers: list[int]) -> int:
    return sum(numbers)


def named(name: str, *, times: int = 1) -> str:
    return name * times


def test_a_future_has_the_return_type_of_the_function(cloud: FakeCloud, client: Client) -> None:
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


def test_shell_functions_have_typed_results(cloud: FakeCloud, client: Client) -> None:
    with Executor(cloud.endpoint_id, client) as executor:
        future = executor.submit(ShellFunction("true"))
        assert_type(future, ComputeFuture[ShellResult])
        future.cancel()
        as_dict = executor.submit(MPIFunction("true {ranks}", return_dict=True), ranks=2)
        assert_type(as_dict, ComputeFuture[dict[str, Any]])
        as_dict.cancel()


def test_futures_are_accepted_as_arguments(cloud: FakeCloud, client: Client) -> None:
    with Executor(cloud.endpoint_id, client) as executor:
        two = executor.submit(cube, 1)
        assert_type(executor.submit(cube, two), ComputeFuture[int])
        assert_type(executor.submit(total, [two, two]), ComputeFuture[int])
        assert_type(executor.submit(lambda x: (x, cube(x)), two), ComputeFuture[tuple[Any, int]])


def test_references_are_accepted_as_arguments(cloud: FakeCloud, client: Client, tmp_path: Path) -> None:
    objects = store.Store(store.Directory(tmp_path / "objects"))
    two, twos = objects.put(2), objects.put([2, 2])
    assert_type(two, Reference[int])
    assert_type(two.get(), int)
    with Executor(cloud.endpoint_id, client) as executor, Engine(max_workers=1) as engine:
        third = executor.submit(named, "x", times=two)  # type: ignore[arg-type]
        assert third.result(timeout=WAIT_S) == "xx"
        assert_type(executor.submit(cube, two), ComputeFuture[int])
        assert_type(executor.submit(power, 3, two), ComputeFuture[int])
        assert_type(engine.submit(total, twos), EngineFuture[int])
        assert_type(engine.submit(power, 3, two), EngineFuture[int])
        assert_type(store.get(twos), list[int])


def test_client_methods_have_typed_results(cloud: FakeCloud, client: Client) -> None:
    task_id = client.run(2, endpoint_id=cloud.endpoint_id, function_id=client.register_function(cube))
    assert_type(task_id, str)
    assert_type(client.get_result(task_id, wait_s=WAIT_S), Any)
    assert_type(client.get_task(task_id), TaskInfo)
    assert_type(client.get_task(task_id).exception, Exception | None)
    assert_type(client.get_batch_result([task_id]), dict[str, TaskInfo])


def test_a_stage_has_the_return_type_of_its_function(cloud: FakeCloud, client: Client) -> None:
    graph = Graph()
    cubed = graph.call(cube, 2)
    many = graph.map(cube, [2, 3])
    assert_type(cubed, StageHandle[int])
    assert_type(many, StageList[int])
    assert_type(graph.map(cube, graph.call(list, range(3))), StageHandle[list[int]])
    assert_type(graph.options(walltime_s=60).call(total, many), StageHandle[int])
    both = chain(named, len)
    assert_type(both("x", times=2), int)
    with Executor(cloud.endpoint_id, client) as executor:
        assert_type(executor.submit(graph, cubed), ComputeFuture[int])
        assert_type(executor.submit(graph, many), ComputeFuture[list[int]])
        assert_type(executor.submit(graph, [cubed]), ComputeFuture[list[int]])
        assert_type(executor.submit(graph, (cubed, many)), ComputeFuture[Any])
        assert_type(executor.submit(both, "x", times=2), ComputeFuture[int])
        assert_type(executor.map(both, ["x"]), Iterator[int])
        assert_type(executor.submit(both, "x").stages, Stages)
    if TYPE_CHECKING:
        executor.submit(both, 2)  # type: ignore[call-overload]


def test_errors_have_records() -> None:
    error = TaskFailed("it failed")
    assert_type(error.record, ErrorRecord)
    assert_type(error.record.retry_after_s, float | None)
    assert_type(error.remote_traceback, str | None)
    general: FarcallError = error
    assert general is error


def test_wrong_arguments_are_type_errors(client: Client) -> None:
    with pytest.raises(TypeError):
        Executor(client=client, batch_size="many")  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        Executor(client=client, walltime=5)  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        client.run(2)  # type: ignore[call-arg]


def test_every_public_type_is_known_to_other_checkers_too() -> None:
    """As Pyright counts it: what a user's editor shows."""
    sources = os.pathsep.join(str(REPOSITORY / part) for part in ("common", "sdk"))
    scripts = Path(sys.executable).parent
    report = subprocess.run(
        [scripts / "basedpyright", "--verifytypes", "farcall", "--ignoreexternal", "--outputjson"],
        # it looks for other packages with the first Python in PATH, whatever ``--pythonpath`` says
        env={**os.environ, "PYTHONPATH": sources, "PATH": f"{scripts}:{os.environ['PATH']}"},
        stdout=subprocess.PIPE,
        timeout=WAIT_S,
        check=False,
    )
    answer = json.loads(report.stdout)["typeCompleteness"]
    unknown = [each["name"] for each in answer["symbols"] if each["isExported"] and not each["isTypeKnown"]]
    assert (answer["completenessScore"], unknown) == (1, [])


def type_of_arguments(executor: Executor) -> None:
    """For the checker alone: it knows the arguments of what is submitted."""
    executor.submit(cube, "two")  # type: ignore[arg-type]
    executor.submit(named, "x", many=2)  # type: ignore[call-arg]
    executor.submit(cube)  # type: ignore[call-overload]


@function
def cubed(number: int) -> int:
    return number**3


@function(endpoint="here", walltime_s=60)
def named_there(name: str, *, times: int = 1) -> str:
    return name * times


def test_decorated_functions_have_the_types_of_their_functions() -> None:
    known: Function[[int], int] = cubed
    assert known is cubed
    assert_type(cubed(2), int)
    assert_type(named_there("x", times=2), str)
    assert_type(named_there.options(walltime_s=5)("x"), str)


def type_of_decorated_functions(executor: Executor) -> None:
    """For the checker alone: decorated functions keep their arguments and their result."""
    assert_type(cubed.submit(2), ComputeFuture[int])
    assert_type(cubed.submit(cubed.submit(2)), ComputeFuture[int])
    assert_type(cubed.map(range(3), chunksize=2), Iterator[int])
    assert_type(named_there.submit("x", times=2), ComputeFuture[str])
    assert_type(executor.submit(cubed, 2), ComputeFuture[int])
    assert_type(executor.map(cubed, range(3)), Iterator[int])
    cubed("two")  # type: ignore[arg-type]
    cubed.submit("two")  # type: ignore[arg-type]
    named_there.submit("x", many=2)  # type: ignore[arg-type]
    executor.submit(cubed, "two")  # type: ignore[arg-type]
    function(walltime=3)(cube)  # type: ignore[call-overload]


def type_of_the_engine(engine: Engine) -> None:
    """For the checker alone: it knows the arguments, too."""
    assert_type(engine.submit(cube, 2), EngineFuture[int])
    engine.submit(cube, "two")  # type: ignore[call-overload]
    engine.submit(named, "x", many=2)  # type: ignore[call-arg]
    assert_type(engine.map(cube, range(3)), Iterator[int])


async def type_of_what_is_awaited(future: ComputeFuture[int]) -> None:
    """For the checker alone."""
    assert_type(await future, int)
