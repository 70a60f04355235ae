"""What programs written for ``concurrent.futures`` rely on, after CPython's own tests of executors.

One suite for a thread pool (the reference), the engine without a cloud, and the SDK's executor.

Where ours differ on purpose the test says how; ``docs/concepts/executors.md`` has the list.
"""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import gc
import logging
import os
import pickle
import subprocess
import sys
import textwrap
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from farcall import Executor
from farcall.testing import FakeCloud
from farcall_common.errors import (
    ConfigurationError,
    DeserializationError,
    SerializationError,
    TaskFailed,
    TaskLost,
)
from farcall_common.payload.functions import Function
from farcall_common.payload.native import NATIVE
from farcall_common.task_options import TaskOptions
from farcall_common.wire import TaskSpec
from farcall_endpoint import Engine
from farcall_endpoint.engine.future import EngineFuture
from farcall_endpoint.engine.loop import Submission
from tests.waiting import WAIT_S, wait_until

Make = Callable[..., concurrent.futures.Executor]
Future = concurrent.futures.Future[Any]


class Mine(Exception):
    """A class that no other program has."""


class MyLookup(KeyError):
    """One below a built-in."""


class ExitsWhenRead:
    """Reading it ends the program, if nothing prevents that."""

    def __reduce__(self) -> Any:
        return sys.exit, (1,)


class Referred:
    def method(self) -> int:
        return 7


def fail(error: BaseException) -> None:
    raise error


def capture(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
    return args, kwargs


def until(path: str) -> str:
    """Wait for a file."""
    import pathlib
    import time

    while not pathlib.Path(path).exists():
        time.sleep(0.005)
    return path


@pytest.fixture(scope="module")
def cloud() -> Iterator[FakeCloud]:
    with FakeCloud(workers=2) as cloud:
        yield cloud


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(max_workers=2) as engine:
        yield engine


@pytest.fixture
def threads() -> Iterator[concurrent.futures.Executor]:
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        yield pool


@pytest.fixture(scope="module")
def executor(cloud: FakeCloud) -> Iterator[Executor]:
    with cloud.client() as client, Executor(cloud.endpoint_id, client=client) as executor:
        yield executor


OURS = ("engine", "executor")


@pytest.fixture(params=("threads", *OURS))
def pool(request: pytest.FixtureRequest) -> concurrent.futures.Executor:
    found: concurrent.futures.Executor = request.getfixturevalue(request.param)
    return found


@pytest.fixture(params=OURS)
def ours(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(request.param)


@pytest.fixture(params=("threads", *OURS))
def fresh(request: pytest.FixtureRequest) -> Iterator[concurrent.futures.Executor]:
    """A pool that the test may shut down."""
    with FakeCloud(workers=2) as cloud, cloud.client() as client:
        if request.param == "threads":
            yield concurrent.futures.ThreadPoolExecutor(2)
        elif request.param == "engine":
            yield Engine(max_workers=2)
        else:
            yield Executor(cloud.endpoint_id, client=client)


# -- submit and map ----------------------------------------------------------------------------------------------------


def test_arguments_of_every_kind_arrive(pool: concurrent.futures.Executor) -> None:
    assert pool.submit(pow, 2, 8).result(WAIT_S) == 256
    assert pool.submit(capture, 1, self=2, fn=3).result(WAIT_S) == ((1,), {"self": 2, "fn": 3})
    for wrong in ({}, {"fn": capture, "arg": 1}):
        with pytest.raises(TypeError):
            pool.submit(**wrong)  # type: ignore[call-arg]


def test_map_is_in_order_and_ends_with_the_shortest(pool: concurrent.futures.Executor) -> None:
    assert list(pool.map(pow, range(10), range(10))) == list(map(pow, range(10), range(10)))
    assert list(pool.map(pow, range(40), range(10), chunksize=3)) == list(map(pow, range(10), range(10)))
    if not isinstance(pool, concurrent.futures.ThreadPoolExecutor):
        with pytest.raises(ValueError, match="chunksize"):
            pool.map(pow, [1], [1], chunksize=0)


def test_map_raises_at_the_failed_call(pool: concurrent.futures.Executor) -> None:
    results = pool.map(divmod, [1, 1, 1, 1], [2, 3, 0, 5])
    assert (next(results), next(results)) == ((0, 1), (0, 1))
    with pytest.raises(ZeroDivisionError):
        next(results)
    with pytest.raises(StopIteration):
        next(results)


def test_map_times_out(pool: concurrent.futures.Executor, tmp_path: Path) -> None:
    ready, never = tmp_path / "ready", tmp_path / "never"
    ready.touch()
    with pytest.raises(TimeoutError):
        list(pool.map(until, [str(ready), str(never)], timeout=1))
    never.touch()


def test_map_does_not_keep_what_it_yielded(pool: concurrent.futures.Executor) -> None:
    for chunksize in (1, 2):
        for kept in pool.map(_referred, range(4), chunksize=chunksize):
            reference = weakref.ref(kept)
            del kept
            wait_until(lambda reference=reference: reference() is None)  # type: ignore[misc]


def _referred(_: int) -> Referred:
    return Referred()


@pytest.mark.parametrize("how", ["argument", "method"])
def test_arguments_of_a_call_are_freed_without_the_garbage_collector(
    pool: concurrent.futures.Executor, how: str
) -> None:
    gc.collect()
    gc.disable()
    try:
        thing = Referred()
        reference = weakref.ref(thing)
        future = pool.submit(thing.method) if how == "method" else pool.submit(Referred.method, thing)
        assert future.result(WAIT_S) == 7
        del thing, future
        wait_until(lambda: reference() is None)
    finally:
        gc.enable()


# -- waiting -----------------------------------------------------------------------------------------------------------


def test_waiting_for_the_first_for_an_error_and_for_all(pool: concurrent.futures.Executor, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    held: Future = pool.submit(until, str(gate))
    done, not_done = concurrent.futures.wait([held, pool.submit(pow, 2, 2)], WAIT_S, "FIRST_COMPLETED")
    assert held in not_done
    assert len(done) == 1
    done, not_done = concurrent.futures.wait([held, pool.submit(fail, Mine())], WAIT_S, "FIRST_EXCEPTION")
    assert held in not_done
    gate.touch()
    done, not_done = concurrent.futures.wait([held, *done], WAIT_S)
    assert not not_done
    again: list[Future] = [pool.submit(pow, 2, n) for n in range(5)]
    assert set(concurrent.futures.as_completed([*again, held], WAIT_S)) == {*again, held}


def test_a_wait_times_out_and_the_call_continues(pool: concurrent.futures.Executor, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    future: Future = pool.submit(until, str(gate))
    with pytest.raises(TimeoutError):
        future.result(0.01)
    with pytest.raises(TimeoutError):
        future.exception(0)
    gate.touch()
    assert future.result(WAIT_S) == str(gate)


def test_coroutines_wait_too(pool: concurrent.futures.Executor) -> None:
    async def several() -> list[Any]:
        loop = asyncio.get_running_loop()
        return list(await asyncio.gather(*(loop.run_in_executor(pool, capture, n) for n in range(4))))

    async def failing() -> None:
        await asyncio.get_running_loop().run_in_executor(pool, divmod, 1, 0)

    assert asyncio.run(several()) == [((n,), {}) for n in range(4)]
    with pytest.raises(ZeroDivisionError):
        asyncio.run(failing())


# -- what a function raised --------------------------------------------------------------------------------------------

BUILT_IN = [
    ZeroDivisionError("/"),
    KeyError("key"),
    FileNotFoundError(2, "no such file", "name"),
    UserWarning("careful"),
    ModuleNotFoundError("absent"),
    MyLookup("mine"),
]


@pytest.mark.parametrize("error", BUILT_IN, ids=lambda error: type(error).__name__)
def test_a_built_in_exception_is_caught_as_one(pool: concurrent.futures.Executor, error: Exception) -> None:
    nearest = KeyError if isinstance(error, MyLookup) else type(error)
    raised = pool.submit(fail, error).exception(WAIT_S)
    assert isinstance(raised, nearest)
    if isinstance(error, OSError) and isinstance(raised, OSError):
        assert (raised.errno, raised.filename) == (2, "name")


@pytest.mark.parametrize("error", [*BUILT_IN, Mine("alone", 3)], ids=lambda error: type(error).__name__)
def test_remote_exceptions_are_task_failures_with_the_original(ours: Any, error: Exception) -> None:
    raised = ours.submit(fail, error).exception(WAIT_S)
    assert isinstance(raised, TaskFailed)
    assert type(raised.__cause__) is type(error)
    assert raised.__cause__.args == error.args
    assert "raise error" in (raised.remote_traceback or "")
    assert "raise error" in "".join(traceback.format_exception(raised))
    again = pickle.loads(pickle.dumps(raised))
    assert (type(again), str(again), again.record) == (type(raised), str(raised), raised.record)
    assert repr(raised).startswith("TaskFailed(")


def test_the_original_exception_is_raised_on_request(ours: Any) -> None:
    faithful = ours.options(raise_original=True)
    with pytest.raises(Mine) as caught:
        faithful.submit(fail, Mine("alone")).result(WAIT_S)
    assert type(caught.value) is Mine
    assert "raise error" in "".join(traceback.format_exception(caught.value))
    with pytest.raises(TimeoutError, match="in the function"):
        faithful.submit(fail, TimeoutError("in the function")).result(WAIT_S)
    with pytest.raises(SystemExit):
        faithful.submit(sys.exit, 3).result(WAIT_S)


@pytest.mark.parametrize("error", [TimeoutError("slow"), StopIteration(3), SystemExit(3), KeyboardInterrupt()])
def test_remote_timeouts_and_cancellations_are_only_task_failures(ours: Any, error: BaseException) -> None:
    raised = ours.submit(fail, error).exception(WAIT_S)
    assert isinstance(raised, TaskFailed)
    assert not isinstance(raised, type(error))
    assert type(raised.__cause__) is type(error)

    async def awaited() -> None:
        await asyncio.wrap_future(ours.submit(fail, error))

    with pytest.raises(TaskFailed):
        asyncio.run(awaited())


# -- callbacks ---------------------------------------------------------------------------------------------------------


def test_callbacks_run_in_order_and_after_one_that_raised(
    pool: concurrent.futures.Executor, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gate, called = tmp_path / "gate", collections.deque[int]()
    future: Future = pool.submit(until, str(gate))
    future.add_done_callback(lambda _: called.append(1))
    future.add_done_callback(lambda _: fail(ValueError("in a callback")))
    future.add_done_callback(lambda _: called.append(2))
    with caplog.at_level(logging.ERROR, "concurrent.futures"):
        gate.touch()
        wait_until(lambda: len(called) == 2)
    assert list(called) == [1, 2]
    assert "in a callback" in caplog.text


def test_a_callback_that_exits_does_not_end_the_executor(
    ours: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gate, called = tmp_path / "gate", collections.deque[int]()
    future = ours.submit(until, str(gate))
    future.add_done_callback(lambda _: sys.exit(5))
    future.add_done_callback(lambda _: called.append(1))
    with caplog.at_level(logging.ERROR, "concurrent.futures"):
        gate.touch()
        wait_until(lambda: called)
    assert "SystemExit" in caplog.text
    assert ours.submit(pow, 2, 3).result(WAIT_S) == 8


# -- what cannot travel ------------------------------------------------------------------------------------------------


def test_a_result_whose_reading_exits_fails_alone(ours: Any) -> None:
    def made(make: Any) -> Any:
        return make()

    error = ours.submit(made, ExitsWhenRead).exception(WAIT_S)
    assert isinstance(error, DeserializationError)
    assert isinstance(error.__cause__, SystemExit)
    assert ours.submit(pow, 2, 3).result(WAIT_S) == 8


def test_an_exception_whose_reading_exits_is_reported_as_text(ours: Any) -> None:
    class Odd(ValueError):
        def __reduce__(self) -> Any:
            return sys.exit, (1,)

    def odd() -> None:
        raise Odd("its text")

    for view in (ours, ours.options(raise_original=True)):
        error = view.submit(odd).exception(WAIT_S)
        assert isinstance(error, TaskFailed)
        assert isinstance(error, ValueError)
        assert error.__cause__ is None
        assert "its text" in str(error)
    assert ours.submit(pow, 2, 3).result(WAIT_S) == 8


def test_an_exception_that_raises_when_it_is_shown_is_reported(ours: Any) -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            sys.exit(1)

        def __reduce__(self) -> Any:
            sys.exit(1)

    def mute() -> None:
        raise Mute

    error = ours.submit(mute).exception(WAIT_S)
    assert isinstance(error, TaskFailed)
    assert str(error.record.exception_type).endswith("Mute")
    assert ours.submit(pow, 2, 3).result(WAIT_S) == 8


def test_submit_refuses_unserializable_arguments(ours: Any) -> None:
    """The standard library's process pool has it in the future instead."""
    with pytest.raises(SerializationError):
        ours.submit(sum, (number for number in range(3)))
    assert ours.submit(pow, 2, 3).result(WAIT_S) == 8


# -- the end -----------------------------------------------------------------------------------------------------------


def test_a_shut_down_pool_refuses_calls(fresh: concurrent.futures.Executor) -> None:
    future: Future = fresh.submit(pow, 2, 3)
    fresh.shutdown()
    assert future.result(0) == 8
    with pytest.raises(RuntimeError, match="cannot schedule new futures"):
        fresh.submit(pow, 2, 3)
    fresh.shutdown()


def test_results_come_after_a_shutdown_that_does_not_wait(fresh: concurrent.futures.Executor, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    futures: list[Future] = [fresh.submit(until, str(gate)) for _ in range(4)]
    fresh.shutdown(wait=False)
    gate.touch()
    assert [future.result(WAIT_S) for future in futures] == [str(gate)] * 4


def test_a_cancelling_shutdown_starts_no_pending_call(fresh: concurrent.futures.Executor, tmp_path: Path) -> None:
    """In a pool of the standard library what runs is finished; ours end it, too."""
    gate = tmp_path / "gate"
    futures: list[Future] = [fresh.submit(until, str(gate)) for _ in range(20)]

    def release() -> None:
        wait_until(lambda: futures[-1].cancelled())
        gate.touch()

    releaser = threading.Thread(target=release)
    releaser.start()
    fresh.shutdown(cancel_futures=True)
    releaser.join()
    assert all(future.done() for future in futures)
    finished = [future for future in futures if not future.cancelled()]
    assert len(finished) <= (2 if isinstance(fresh, concurrent.futures.ThreadPoolExecutor) else 0)


PROGRAM = """
    import atexit, os, sys, time

    def late():  # registered first, so called last
        try:
            pool.submit(pow, 2, 3)
        except RuntimeError as error:
            print("refused:", error)
        if held is not None:
            try:
                print("held:", type(held.exception()).__name__)
            except BaseException as error:
                print("held:", type(error).__name__)

    held = None
    atexit.register(late)
"""


def run(program: str) -> str:
    path = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM) + textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        env=os.environ | {"PYTHONPATH": path},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_an_ended_engine_refuses_calls() -> None:
    told = run("""
        from farcall_endpoint import Engine
        pool = Engine(max_workers=1)
        print(pool.submit(pow, 2, 2).result())
    """)
    assert told.splitlines() == ["4", "refused: cannot schedule new futures after shutdown"]


def test_an_ended_executor_refuses_calls_and_leaves_no_future_open() -> None:
    told = run("""
        from farcall import Executor
        from farcall.testing import FakeCloud
        cloud = FakeCloud(workers=0)
        pool = Executor(cloud.endpoint_id, client=cloud.client())
        held = pool.submit(pow, 2, 2)
    """)
    assert told.splitlines() == ["refused: cannot schedule new futures after interpreter shutdown", "held: Unavailable"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_engine_that_crashes_fails_its_futures_and_refuses_calls(tmp_path: Path) -> None:
    with Engine(max_workers=1) as engine:
        held = engine.submit(until, str(tmp_path / "never"))
        future: EngineFuture[Any] = EngineFuture("broken", engine._cancel)
        spec = TaskSpec("broken", 1, "", "", TaskOptions(max_attempts=1, result_serializers=NATIVE), 0)
        unhashable: Any = []
        engine._loop.submit(Submission(spec, Function("f", b"", unhashable), b"", future))
        for each in (held, future):
            with pytest.raises(TaskLost, match="engine ended"):
                each.result(WAIT_S)
        engine._loop.join()
        with pytest.raises(concurrent.futures.BrokenExecutor):
            engine.submit(pow, 2, 3)


# -- what programs look at ---------------------------------------------------------------------------------------------


def test_the_size_of_a_pool_can_be_read(pool: Any) -> None:
    assert pool._max_workers >= 1


@pytest.mark.parametrize("wrong", [0, -1])
def test_a_pool_without_workers_is_a_value_error(wrong: int) -> None:
    with pytest.raises(ValueError, match="max_workers"):
        concurrent.futures.ThreadPoolExecutor(wrong)
    with pytest.raises(ValueError, match="max_workers") as caught:
        Engine(wrong)
    assert isinstance(caught.value, ConfigurationError)
