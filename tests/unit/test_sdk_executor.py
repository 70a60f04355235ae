"""The executor against a cloud in memory: the contract of concurrent.futures, and ours."""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import gc
import math
import os
import sys
import threading
import time
import types
import uuid
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import httpx
import msgspec
import pytest

from farcall import (
    Client,
    EndpointUnknown,
    Executor,
    FunctionUnknown,
    Graph,
    PayloadTooLarge,
    SerializationError,
    TaskFailed,
    Unauthenticated,
    Unavailable,
    chain,
    track,
)
from farcall.testing import FakeCloud
from farcall_common.errors import (
    ConfigurationError,
    DeserializationError,
    InvalidRequest,
    TaskGroupUnknown,
)
from farcall_common.green_threads import refuse_green_threads
from tests.waiting import WAIT_S

Wrapper = Callable[[httpx.Request], httpx.Response | None]


def divide(a: float, b: float = 1) -> float:
    return a / b


def repeat(text: str, times: int) -> str:
    return text * times


@pytest.fixture
def executor(cloud: FakeCloud) -> Iterator[Executor]:
    with cloud.client() as client, Executor(cloud.endpoint_id, client=client) as executor:
        yield executor


def client_of(cloud: FakeCloud, wrapper: Wrapper) -> Client:
    """A client whose requests pass ``wrapper`` first; its answer, if it gives one, is used."""
    transport = httpx.MockTransport(lambda request: wrapper(request) or cloud.transport.handle_request(request))
    return Client("https://farcall.test", cloud.token, transport=transport)


class Gate:
    """Holds submits back until it is opened, and keeps what passed."""

    def __init__(self) -> None:
        self.reached, self.open = threading.Event(), threading.Event()
        self.submits: list[dict[str, Any]] = []
        self.cancelled: list[str] = []

    def __call__(self, request: httpx.Request) -> httpx.Response | None:
        if request.url.path.endswith("/submit"):
            self.reached.set()
            assert self.open.wait(WAIT_S)
            self.submits.append(msgspec.json.decode(request.content))
        if request.url.path.endswith("/cancel"):
            self.cancelled += msgspec.json.decode(request.content)["task_ids"]
        return None

    @property
    def batches(self) -> list[int]:
        return [sum(map(len, body["tasks"].values())) for body in self.submits]


def test_submit(executor: Executor) -> None:
    future = executor.submit(divide, 6, b=3)
    assert uuid.UUID(future.task_id).version == 7
    assert future.task_group_id == executor.task_group_id
    assert future.result(WAIT_S) == 2.0
    assert future.done()
    assert not future.cancel()
    assert future.attempt == 1
    timings = future.timings
    assert timings["client_submitted_at"] <= timings["client_accepted_at"] <= timings["client_received_at"]
    assert timings["started_at"] <= timings["ended_at"]


def test_lambdas_closures_and_builtins(executor: Executor) -> None:
    n = 5
    assert executor.submit(lambda x: x + n, 1).result(WAIT_S) == 6
    assert executor.submit(len, "abc").result(WAIT_S) == 3


def test_exception_of_a_function_is_raised(executor: Executor) -> None:
    future = executor.submit(divide, 1, 0)
    with pytest.raises(TaskFailed, match="division by zero") as caught:
        future.result(WAIT_S)
    assert "Remote traceback" in caught.value.__notes__[0]
    assert future.exception(WAIT_S) is caught.value
    assert executor.submit(divide, 1).result(WAIT_S) == 1  # life goes on


def test_big_arguments_and_results(executor: Executor) -> None:
    data = os.urandom(3_000_000)
    assert executor.submit(len, data).result(WAIT_S) == len(data)
    assert executor.submit(repeat, "ab", 2_000_000).result(WAIT_S) == "ab" * 2_000_000


def test_submit_refuses_unserializable_arguments(executor: Executor) -> None:
    with pytest.raises(SerializationError, match=r"[Aa]rgument 2"):
        executor.submit(divide, 1, (n for n in range(3)))  # type: ignore[call-overload]
    with pytest.raises(PayloadTooLarge, match="of len take"):
        executor.submit(len, b"x" * 11_000_000)
    with pytest.raises(SerializationError):
        executor.submit(None)  # type: ignore[call-overload]
    assert executor._engine.unsettled() == []


def test_unreadable_result_raises(executor: Executor, cloud: FakeCloud) -> None:
    gate, go_on = threading.Event(), threading.Event()

    def hold(request: httpx.Request) -> httpx.Response | None:
        if request.url.path == "/v2/batch_status":
            gate.set()
            assert go_on.wait(WAIT_S)
        return None

    with client_of(cloud, hold) as client, Executor(cloud.endpoint_id, client=client) as executor:
        future = executor.submit(divide, 1)
        assert gate.wait(WAIT_S)
        while not cloud._tasks[future.task_id].ended():
            time.sleep(0.001)
        cloud._tasks[future.task_id].result = b"zz\nfrom the future"
        go_on.set()
        with pytest.raises(DeserializationError):
            future.result(WAIT_S)


def test_map(executor: Executor) -> None:
    assert list(executor.map(divide, [2, 4, 6], [1, 2, 3], timeout=WAIT_S)) == [2, 2, 2]
    assert list(executor.map(divide, range(10), chunksize=3, timeout=WAIT_S)) == list(range(10))
    assert list(executor.map(divide, [])) == []
    assert list(executor.map(divide, [], chunksize=3)) == []


def test_map_raises_at_the_failed_call(executor: Executor) -> None:
    results = executor.map(divide, [1, 1, 1], [1, 0, 1])
    assert next(results) == 1
    with pytest.raises(TaskFailed):
        next(results)


def test_map_gives_up_after_its_timeout_and_cancels_the_rest(offline: FakeCloud) -> None:
    with offline.client() as client, Executor(offline.endpoint_id, client=client) as executor:
        with pytest.raises(TimeoutError):
            list(executor.map(divide, range(5), timeout=0.05))
        assert executor._engine.unsettled() == []


@pytest.mark.parametrize("bad", [{"chunksize": 0}, {"buffersize": 0}])
def test_map_checks_its_arguments(executor: Executor, bad: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        executor.map(divide, [1], **bad)


def test_futures_work_with_the_standard_library(executor: Executor) -> None:
    futures = [executor.submit(divide, n) for n in range(20)]
    assert {f.result() for f in concurrent.futures.as_completed(futures, WAIT_S)} == set(range(20))
    assert [future.result() for future in track(futures[:3], show=False)]
    assert sum(track(executor.map(divide, [1, 2]), total=2, show=False)) == 3

    async def gather() -> list[float]:
        return await asyncio.gather(*(asyncio.wrap_future(executor.submit(divide, n)) for n in range(3)))

    assert asyncio.run(gather()) == [0, 1, 2]


def test_waiting_for_the_first_of_several(offline: FakeCloud) -> None:
    with offline.client() as client, Executor(offline.endpoint_id, client=client) as executor:
        futures = [executor.submit(divide, n) for n in range(3)]
        assert executor._engine.flush(WAIT_S)
        assert concurrent.futures.wait(futures, 0).not_done == set(futures)
        futures[1].cancel()
        done, waiting = concurrent.futures.wait(futures, WAIT_S, concurrent.futures.FIRST_COMPLETED)
        assert (done, waiting) == ({futures[1]}, {futures[0], futures[2]})
        offline.run_waiting()
        assert concurrent.futures.wait(futures, WAIT_S).done == set(futures)


def test_futures_can_be_awaited(executor: Executor) -> None:
    async def chain() -> float:
        half = await executor.submit(divide, 8, 2)
        return await executor.submit(divide, half, 2)

    async def fail() -> None:
        await executor.submit(divide, 1, 0)

    assert asyncio.run(chain()) == 2
    with pytest.raises(TaskFailed, match="ZeroDivisionError"):
        asyncio.run(fail())


def test_cancelled_await_cancels_the_task(offline: FakeCloud) -> None:
    with offline.client() as client, Executor(offline.endpoint_id, client=client) as executor:
        future = executor.submit(divide, 1)
        assert executor._engine.flush(WAIT_S)

        async def give_up() -> None:
            await asyncio.wait_for(future, 0.01)

        with pytest.raises(TimeoutError):
            asyncio.run(give_up())
        assert future.cancelled()
    with offline.client() as client:
        assert client.get_task(future.task_id).state == "cancelled"


def test_tasks_of_another_process_are_reloaded(offline: FakeCloud) -> None:
    with offline.client() as client:
        batch = client.create_batch()
        function_id = client.register_function(divide)
        ids = [batch.add(function_id, args) for args in ((1, 2), (3, 4), (1, 0))]
        client.batch_run(offline.endpoint_id, batch)
        offline._run(offline._tasks[ids[0]])
        with Executor(offline.endpoint_id, client=client) as executor:
            futures = executor.reload_tasks(uuid.UUID(batch.task_group_id))
            assert executor.task_group_id == batch.task_group_id
            assert [future.task_id for future in futures] == ids
            assert futures[0].result(WAIT_S) == 0.5
            assert not futures[1].done()
            again = executor.reload_tasks()
            assert again[1:] == futures[1:]
            own = executor.submit(divide, 5)
            assert executor._engine.flush(WAIT_S)
            offline.run_waiting()
            assert futures[1].result(WAIT_S) == 0.75
            assert isinstance(futures[2].exception(WAIT_S), TaskFailed)
            assert own.result(WAIT_S) == 5
            assert [future.task_id for future in executor.reload_tasks()] == [*ids, own.task_id]
            assert "client_submitted_at" not in futures[0].timings
            assert not futures[0].cancel()


def test_reloading_a_group_that_is_not_there(executor: Executor) -> None:
    with pytest.raises(TaskGroupUnknown):
        executor.reload_tasks()


def test_submit_rate_can_be_limited(cloud: FakeCloud) -> None:
    gate = Gate()
    with (
        client_of(cloud, gate) as client,
        Executor(
            cloud.endpoint_id, client=client, batch_size=1, api_burst_limit=1, api_burst_window_s=0.05
        ) as executor,
    ):
        gate.open.set()
        began = time.monotonic()
        assert [future.result(WAIT_S) for future in [executor.submit(divide, n) for n in range(4)]] == [0, 1, 2, 3]
        assert time.monotonic() - began >= 0.15
        executor.api_burst_limit = None
        assert (executor.api_burst_limit, executor.api_burst_window_s) == (None, 0.05)
        executor.api_burst_window_s = 1.0
        assert executor.submit(divide, 1).result(WAIT_S) == 1


def test_the_first_call_goes_at_once_and_the_others_collect(cloud: FakeCloud) -> None:
    gate = Gate()
    with client_of(cloud, gate) as client, Executor(cloud.endpoint_id, client=client, batch_size=100) as executor:
        futures = [executor.submit(divide, 0)]
        assert gate.reached.wait(WAIT_S)
        futures += [executor.submit(divide, n) for n in range(1, 251)]
        gate.open.set()
        assert [future.result(WAIT_S) for future in futures] == list(range(251))
        assert gate.batches == [1, 100, 100, 50]
        assert all(body["task_group_id"] == executor.task_group_id for body in gate.submits)


def test_a_function_is_registered_once(cloud: FakeCloud) -> None:
    with cloud.client() as client, Executor(cloud.endpoint_id, client=client) as executor:
        for future in [executor.submit(divide, n) for n in range(20)]:
            future.result(WAIT_S)
        assert len(client.get_functions()) == 1
        function_id = executor.register_function(repeat, description="mine")
        assert executor.submit(repeat, "a", 2).result(WAIT_S) == "aa"
        assert executor.submit_to_registered_function(function_id, ("b",), {"times": 2}).result(WAIT_S) == "bb"
        assert [each["description"] for each in client.get_functions()] == ["mine", None]


def test_a_function_that_raises_is_retried(cloud: FakeCloud, tmp_path: Path) -> None:
    """Without waiting: the fake has no back-off."""

    def fail(path: str, times: int) -> int:
        import pathlib

        log = pathlib.Path(path)
        runs = len(log.read_text()) + 1 if log.exists() else 1
        log.write_text("x" * runs)
        if runs <= times:
            raise FileNotFoundError(runs)
        return runs

    with cloud.client() as client, Executor(cloud.endpoint_id, client=client, retries=2) as executor:
        assert executor.retry_on == ()
        executor.retry_on = OSError
        assert str(executor.retry_on) == "('builtins.OSError',)"
        first = executor.submit(fail, str(tmp_path / "a"), 2)
        assert first.result(WAIT_S) == 3
        error = executor.submit(fail, str(tmp_path / "b"), 9).exception(WAIT_S)
        other = executor.options(retry_on="ValueError").submit(fail, str(tmp_path / "c"), 9).exception(WAIT_S)
        waits = [each["detail"] for each in client.get_task_events(first.task_id) if each["detail"]]
    assert isinstance(error, TaskFailed)
    assert error.record.retries_used == 2
    assert "after 2 retries" in error.__notes__[0]
    assert [(each["retry"], each["retries"], each["error"]) for each in waits] == [
        (1, 2, "FileNotFoundError"),
        (2, 2, "FileNotFoundError"),
    ]
    assert isinstance(other, TaskFailed)
    assert other.record.retries_used is None
    with pytest.raises(ValueError, match="did you mean OSError"):
        executor.retry_on = "OSErorr"


def test_task_options_go_with_every_task(cloud: FakeCloud) -> None:
    gate = Gate()
    gate.open.set()
    with (
        client_of(cloud, gate) as client,
        Executor(cloud.endpoint_id, client=client, idempotent=False, max_attempts=1, walltime_s=5.0) as executor,
    ):
        executor.submit(divide, 1).result(WAIT_S)
    assert {k: gate.submits[0][k] for k in ("idempotent", "max_attempts", "walltime_s")} == {
        "idempotent": False,
        "max_attempts": 1,
        "walltime_s": 5.0,
    }


def test_cancelled_unsent_call_is_never_sent(cloud: FakeCloud) -> None:
    gate = Gate()
    with client_of(cloud, gate) as client, Executor(cloud.endpoint_id, client=client) as executor:
        first = executor.submit(divide, 1)
        assert gate.reached.wait(WAIT_S)
        waiting = [executor.submit(divide, n) for n in range(3)]
        assert waiting[1].cancel()
        assert waiting[1].cancel()
        assert waiting[1].cancelled()
        gate.open.set()
        assert first.result(WAIT_S) == 1
        assert [waiting[0].result(WAIT_S), waiting[2].result(WAIT_S)] == [0, 2]
        sent = {id_ for body in gate.submits for ids in body["task_ids"].values() for id_ in ids}
        assert waiting[1].task_id not in sent
    assert gate.cancelled == []


def test_cancel_of_a_sent_call_reaches_the_api_and_wakes_waiters(offline: FakeCloud) -> None:
    with offline.client() as client, Executor(offline.endpoint_id, client=client) as executor:
        future = executor.submit(divide, 1)
        assert executor._engine.flush(WAIT_S)
        heard: list[object] = []
        future.add_done_callback(heard.append)
        assert future.cancel()
        assert concurrent.futures.wait([future], WAIT_S).done == {future}
        assert heard == [future]
        with pytest.raises(concurrent.futures.CancelledError):
            future.result()
    with offline.client() as client:
        assert client.get_task(future.task_id).state == "cancelled"


def test_a_task_that_was_cancelled_elsewhere_is_a_cancelled_future(offline: FakeCloud) -> None:
    with offline.client() as client, Executor(offline.endpoint_id, client=client) as executor:
        future = executor.submit(divide, 1)
        assert executor._engine.flush(WAIT_S)
        client.cancel(future.task_id)
        with pytest.raises(concurrent.futures.CancelledError):
            future.result(WAIT_S)
        assert future.cancelled()


def test_an_endpoint_that_is_offline_is_waited_for(offline: FakeCloud) -> None:
    with offline.client() as client, Executor(offline.endpoint_id, client=client) as executor:
        future = executor.submit(divide, 4, 2)
        assert executor._engine.flush(WAIT_S)
        assert not future.done()
        offline.start()
        assert future.result(WAIT_S) == 2


def test_shutdown_waits_for_open_futures(cloud: FakeCloud) -> None:
    with cloud.client() as client:
        executor = Executor(cloud.endpoint_id, client=client)
        futures = [executor.submit(divide, n) for n in range(50)]
        executor.shutdown()
        assert all(future.done() for future in futures)
        with pytest.raises(RuntimeError, match="after shutdown"):
            executor.submit(divide, 1)
        executor.shutdown()  # again is harmless
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("farcall")]


def test_shutdown_without_waiting_still_brings_the_results(cloud: FakeCloud) -> None:
    with cloud.client() as client:
        executor = Executor(cloud.endpoint_id, client=client)
        future = executor.submit(divide, 1)
        executor.shutdown(wait=False)
        assert future.result(WAIT_S) == 1
        executor.shutdown()


def test_shutdown_can_cancel_futures(offline: FakeCloud) -> None:
    with offline.client() as client:
        executor = Executor(offline.endpoint_id, client=client)
        futures = [executor.submit(divide, n) for n in range(5)]
        assert executor._engine.flush(WAIT_S)
        executor.shutdown(cancel_futures=True)
        assert all(future.cancelled() for future in futures)
        assert [task["status"] for task in client.get_tasks()] == ["cancelled"] * 5


def test_an_interrupted_block_does_not_wait_for_ever(offline: FakeCloud) -> None:
    futures: list[concurrent.futures.Future[float]] = []

    def interrupt() -> None:
        with Executor(offline.endpoint_id, client=client) as executor:
            futures.append(executor.submit(divide, 1))
            raise KeyboardInterrupt

    with offline.client() as client, pytest.raises(KeyboardInterrupt):
        interrupt()
    assert not futures[0].cancelled()


def test_unreferenced_executor_ends_after_its_last_future(offline: FakeCloud) -> None:
    with offline.client() as client:
        executor = Executor(offline.endpoint_id, client=client)
        future = executor.submit(divide, 1)
        engine, gone = executor._engine, weakref.ref(executor)
        del executor
        gc.collect()
        assert gone() is None
        offline.start()
        assert future.result(WAIT_S) == 1
        engine.join()
        assert not any(thread.is_alive() for thread in engine._threads)


def test_a_call_adds_one_object_to_those_of_a_standard_future(cloud: FakeCloud) -> None:
    # Each object that the garbage collector tracks costs CPU at every collection while the call is open.
    def tracked_by(make: Callable[[], object]) -> float:
        gc.collect()
        before = len(gc.get_objects())
        kept = [make() for _ in range(calls)]
        return (len(gc.get_objects()) - before) / len(kept)

    calls, gate = 500, Gate()
    with client_of(cloud, gate) as client, Executor(cloud.endpoint_id, client=client) as executor:
        executor.submit(divide, 1)
        assert gate.reached.wait(WAIT_S)  # the sender waits from here on
        gc.disable()
        try:
            added = tracked_by(lambda: executor.submit(divide, 1)) - tracked_by(concurrent.futures.Future[float])
        finally:
            gc.enable()
            gate.open.set()
    assert added == pytest.approx(1, abs=0.2)  # its record; what other threads make meanwhile


@pytest.mark.parametrize("unknown", ["function", "endpoint"])
def test_unknown_ids_fail_the_future(cloud: FakeCloud, unknown: str) -> None:
    unknown_id = str(uuid.uuid4())
    with cloud.client() as client:
        endpoint_id = unknown_id if unknown == "endpoint" else cloud.endpoint_id
        function_id = unknown_id if unknown == "function" else client.register_function(divide)
        with Executor(endpoint_id, client=client) as executor:
            future = executor.submit_to_registered_function(function_id, (1,))
            error = EndpointUnknown if unknown == "endpoint" else FunctionUnknown
            with pytest.raises(error, match=unknown_id):
                future.result(WAIT_S)


def test_refused_task_does_not_affect_others(cloud: FakeCloud) -> None:
    gate = Gate()
    poisoned: list[str] = []

    def refuse(request: httpx.Request) -> httpx.Response | None:
        gate(request)
        if request.url.path.endswith("/submit"):
            ids = msgspec.json.decode(request.content)["task_ids"]
            if any(task_id in poisoned for of_function in ids.values() for task_id in of_function):
                return httpx.Response(400, json={"code": "INVALID_REQUEST", "message": "bad", "fault": "caller"})
        return None

    with client_of(cloud, refuse) as client, Executor(cloud.endpoint_id, client=client) as executor:
        first = executor.submit(divide, 1)
        assert gate.reached.wait(WAIT_S)
        futures = [executor.submit(divide, n) for n in range(20)]
        unknown = executor.submit_to_registered_function(str(uuid.uuid4()))
        poisoned.append(futures[7].task_id)
        gate.open.set()
        assert first.result(WAIT_S) == 1
        with pytest.raises(FunctionUnknown):
            unknown.result(WAIT_S)
        for n, future in enumerate(futures):
            if n == 7:
                assert "INVALID_REQUEST" in str(future.exception(WAIT_S))
            else:
                assert future.result(WAIT_S) == n


#: What a submit may come to on its way through API Gateway, whether the tasks were taken or not.
FAILURES = (
    httpx.ReadError("cut"),
    httpx.RemoteProtocolError("closed without an answer"),
    httpx.ReadTimeout("nothing for 30 s"),
    httpx.Response(429, headers={"retry-after": "0"}, json={"message": "Too Many Requests"}),
    httpx.Response(502, text="<html><body><h1>502 Bad Gateway</h1></body></html>"),
    httpx.Response(503, json={"message": "Service Unavailable"}),
    httpx.Response(504, json={"message": "Endpoint request timed out"}),
)


@pytest.mark.parametrize("failure", FAILURES, ids=lambda it: type(it).__name__ + str(getattr(it, "status_code", "")))
@pytest.mark.parametrize("taken", [True, False])
def test_interrupted_submit_runs_once(cloud: FakeCloud, failure: Exception | httpx.Response, taken: bool) -> None:
    cut: list[httpx.Request] = []

    def cut_short(request: httpx.Request) -> httpx.Response | None:
        if not request.url.path.endswith("/submit") or len(cut) == 2:
            return None
        cut.append(request)
        if taken:
            cloud.transport.handle_request(request)
        if isinstance(failure, Exception):
            raise failure
        return failure

    with client_of(cloud, cut_short) as client, Executor(cloud.endpoint_id, client=client) as executor:
        assert list(executor.map(divide, range(20))) == list(range(20))
        assert [task["attempt"] for task in client.get_tasks()] == [1] * 20
        assert len(cut) == 2


def test_interrupted_batch_may_run_again(cloud: FakeCloud) -> None:
    cut: list[httpx.Request] = []

    def cut_short(request: httpx.Request) -> httpx.Response | None:
        if request.url.path.endswith("/submit") and not cut:
            cut.append(request)
            cloud.transport.handle_request(request)
            return httpx.Response(400, json=InvalidRequest("cut short").record.to_json())
        return None

    with client_of(cloud, cut_short) as client:
        batch = client.create_batch()
        task_id = batch.add(client.register_function(divide), (6, 3))
        with pytest.raises(InvalidRequest):
            client.batch_run(cloud.endpoint_id, batch)
        client.batch_run(cloud.endpoint_id, batch)
        assert client.get_result(task_id, wait_s=WAIT_S) == 2
        assert [task["attempt"] for task in client.get_tasks()] == [1]


def test_unavailable_api_fails_futures_after_the_timeout(cloud: FakeCloud) -> None:
    def away(request: httpx.Request) -> httpx.Response | None:
        raise httpx.ConnectError("refused")

    with (
        client_of(cloud, away) as client,
        Executor(cloud.endpoint_id, client=client, retry_timeout_s=0.2) as executor,
        pytest.raises(Unavailable, match="refused"),
    ):
        executor.submit(divide, 1).result(WAIT_S)


@pytest.mark.parametrize("status", [503, 401])
def test_unreachable_api_fails_waiting_futures_after_the_timeout(offline: FakeCloud, status: int) -> None:
    away = threading.Event()

    def leave(request: httpx.Request) -> httpx.Response | None:
        return httpx.Response(status) if away.is_set() else None

    with (
        client_of(offline, leave) as client,
        Executor(offline.endpoint_id, client=client, retry_timeout_s=0.2) as executor,
    ):
        future = executor.submit(divide, 1)
        assert executor._engine.flush(WAIT_S)
        away.set()
        error = future.exception(WAIT_S)
        if status == 503:
            assert isinstance(error, Unavailable)
            assert "get_batch_result" in error.hint
        else:
            assert isinstance(error, Unauthenticated)
            assert "farcall login" in error.hint
            assert "get_batch_result" in error.hint


def test_an_expired_token_fails_unsent_calls_and_no_others(offline: FakeCloud) -> None:
    over = threading.Event()

    def refuse(request: httpx.Request) -> httpx.Response | None:
        return httpx.Response(401, json=Unauthenticated("expired").record.to_json()) if over.is_set() else None

    with client_of(offline, refuse) as client, Executor(offline.endpoint_id, client=client) as executor:
        taken = executor.submit(divide, 1)
        assert executor._engine.flush(WAIT_S)
        over.set()
        with pytest.raises(Unauthenticated, match="farcall login"):
            executor.submit(divide, 2).result(WAIT_S)
        assert not taken.done()
        over.clear()  # the user logged in again
        offline.start()
        assert taken.result(WAIT_S) == 1


def test_a_wrong_token_fails_at_once(cloud: FakeCloud) -> None:
    with (
        Client("https://farcall.test", "wrong", transport=cloud.transport) as client,
        Executor(cloud.endpoint_id, client=client) as executor,
        pytest.raises(Unauthenticated),
    ):
        executor.submit(divide, 1).result(WAIT_S)


def test_task_unknown_to_the_api_fails(offline: FakeCloud) -> None:
    with offline.client() as client, Executor(offline.endpoint_id, client=client) as executor:
        futures = [executor.submit(divide, n) for n in range(2)]
        assert executor._engine.flush(WAIT_S)
        del offline._tasks[futures[0].task_id]
        with pytest.raises(Exception, match="TASK_UNKNOWN"):
            futures[0].result(WAIT_S)
        offline.start()
        assert futures[1].result(WAIT_S) == 1


def test_callbacks_may_submit(executor: Executor) -> None:
    chained: concurrent.futures.Future[float] = concurrent.futures.Future()

    def go_on(done: concurrent.futures.Future[float]) -> None:
        executor.submit(divide, done.result(), 2).add_done_callback(lambda last: chained.set_result(last.result()))

    executor.submit(divide, 8).add_done_callback(go_on)
    assert chained.result(WAIT_S) == 4


async def later(x: int) -> int:
    return x + 1


async def stream(x: int) -> Any:
    yield x


def numbers(x: int) -> Iterator[int]:
    yield x


class Later:
    async def __call__(self, x: int) -> int:
        return x + 1


@pytest.mark.parametrize("function", [later, functools.partial(later), Later()])
def test_coroutine_functions_are_run(executor: Executor, function: Callable[[int], Any]) -> None:
    assert executor.submit(function, 1).result(WAIT_S) == 2
    assert list(executor.map(function, range(3))) == [1, 2, 3]
    assert list(executor.map(function, range(3), chunksize=2)) == [1, 2, 3]
    graph = Graph()
    assert executor.submit(graph, graph.call(function, graph.call(function, 1))).result(WAIT_S) == 3
    assert executor.submit(chain(function, function), 1).result(WAIT_S) == 3


@pytest.mark.parametrize("function", [stream, numbers, functools.partial(numbers)])
def test_generator_functions_are_refused_before_anything_is_sent(
    executor: Executor, function: Callable[[int], Any]
) -> None:
    for call in (
        lambda: executor.submit(function, 1),
        lambda: executor.map(function, [1]),
        lambda: executor.map(function, [1], chunksize=2),
    ):
        with pytest.raises(SerializationError, match=r"is a generator function.*Return a list"):
            call()


def test_many_threads_may_submit(executor: Executor) -> None:
    def submit(n: int) -> float:
        return executor.submit(divide, n).result(WAIT_S)

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert list(pool.map(submit, range(100))) == list(range(100))


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_an_executor_raises_in_a_forked_child(executor: Executor) -> None:
    child = os.fork()
    if child == 0:
        try:
            executor.submit(divide, 1)
        except RuntimeError as error:
            os._exit(0 if "parent process" in str(error) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_waits_for_nothing_of_its_parent() -> None:
    with FakeCloud(workers=0) as cloud, cloud.client() as client, Executor(cloud.endpoint_id, client) as executor:
        futures = [executor.submit(divide, 1), executor.submit(divide, 2)]
        child = os.fork()
        if child == 0:
            status = 1
            with executor:  # its end, shutdown and the collection of garbage return at once
                done, _ = concurrent.futures.wait(futures)
                errors = [str(future.exception()) for future in futures if future in done]
                if all("parent process" in error for error in errors) and not futures[0].cancel():
                    status = 7
            executor.shutdown(cancel_futures=True)
            os._exit(status if len(errors) == 2 else 2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert not any(future.done() for future in futures)
        executor.shutdown(wait=False, cancel_futures=True)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_dies_breaks_the_executor_loudly(cloud: FakeCloud) -> None:
    def explode(request: httpx.Request) -> httpx.Response | None:
        if request.url.path.endswith("/submit"):
            raise ZeroDivisionError("a bug of ours")
        return None

    with client_of(cloud, explode) as client, Executor(cloud.endpoint_id, client=client) as executor:
        with pytest.raises(ZeroDivisionError):
            executor.submit(divide, 1).result(WAIT_S)
        executor._engine._threads[0].join(WAIT_S)
        with pytest.raises(concurrent.futures.BrokenExecutor):
            executor.submit(divide, 1)


def test_an_executor_without_endpoint_uses_the_default_one(cloud: FakeCloud) -> None:
    with cloud.client() as client, Executor(client=client) as executor:
        before = executor.endpoint_id
        assert executor.submit(divide, 1).result(WAIT_S) == 1
        assert (before, executor.endpoint_id) == (None, cloud.endpoint_id)
        executor.endpoint_id = "fake"
        assert executor.options(endpoint_id=cloud.endpoint_id[:8]).submit(divide, 1).result(WAIT_S) == 1


@pytest.mark.parametrize(
    ("module", "tells", "part"),
    [("gevent.monkey", "is_module_patched", "threading"), ("eventlet.patcher", "is_monkey_patched", "thread")],
)
def test_replaced_threads_are_refused(
    cloud: FakeCloud, monkeypatch: pytest.MonkeyPatch, module: str, tells: str, part: str
) -> None:
    replaced: set[str] = set()
    library = types.SimpleNamespace(**{tells: replaced.__contains__})
    monkeypatch.setitem(sys.modules, module, library)
    refuse_green_threads("Executor")
    replaced.add(part)
    with cloud.client() as client, pytest.raises(ConfigurationError, match="has replaced the threads of this program"):
        Executor(cloud.endpoint_id, client=client)


@pytest.mark.parametrize("bad", [{"batch_size": 0}, {"batch_size": 1001}, {"max_attempts": 0}, {"walltime_s": -1}])
def test_arguments_are_checked(cloud: FakeCloud, bad: dict[str, Any]) -> None:
    with cloud.client() as client, pytest.raises(ValueError, match=next(iter(bad))):
        Executor(cloud.endpoint_id, client=client, **bad)


def test_an_unknown_endpoint_is_refused_at_once(cloud: FakeCloud) -> None:
    with cloud.client() as client, pytest.raises(EndpointUnknown, match="no endpoint named 'my-laptop'"):
        Executor("my-laptop", client=client)


def test_the_output_of_a_task_is_on_its_future(cloud: FakeCloud, executor: Executor) -> None:
    sent: list[Any] = []

    def with_details(request: httpx.Request) -> httpx.Response | None:
        if request.url.path.endswith("/submit"):
            body = msgspec.json.decode(request.content)
            sent.append((body.get("resource_specification"), body.get("keep_output")))
        if not request.url.path.endswith("/batch_status"):
            return None
        tasks = msgspec.json.decode(cloud.transport.handle_request(request).content)
        for task in tasks["results"].values():
            task["details"] = {"stdout_tail": "printed\n"}
        return httpx.Response(200, json=tasks)

    with client_of(cloud, with_details) as client, Executor(cloud.endpoint_id, client, keep_output=True) as keeping:
        keeping.resource_specification = {"num_nodes": 1}
        future = keeping.submit(divide, 4, 2)
        assert future.result(WAIT_S) == 2
        assert (future.stdout, future.stderr) == ("printed\n", None)
        keeping.options(keep_output=False).submit(divide, 4, 2).result(WAIT_S)
    assert sent == [({"num_nodes": 1}, True), ({"num_nodes": 1}, None)]
    failed = executor.submit(divide, 1, 0)
    assert failed.exception(WAIT_S)
    assert failed.stdout is None


def test_output_that_an_endpoint_has_while_it_is_offline_is_read_when_it_is_back(cloud: FakeCloud) -> None:
    offline = [True]

    def answering(request: httpx.Request) -> httpx.Response | None:
        if not request.url.path.endswith("/batch_output"):
            return None
        [task] = msgspec.json.decode(request.content)["tasks"]
        text = "" if offline[0] else "printed\n"
        stream = {"from": 0, "next": len(text), "text": text}
        answer = {"status": "success", "attempt": 1, "stdout": stream, "stderr": stream, "complete": True}
        answer |= {"source": "none", "reason": "ENDPOINT_OFFLINE"} if offline[0] else {"source": "endpoint"}
        return httpx.Response(200, json={"results": {task["task_id"]: answer}})

    with client_of(cloud, answering) as client, Executor(cloud.endpoint_id, client) as executor:
        future = executor.submit(divide, 4, 2)
        assert future.result(WAIT_S) == 2
        assert future.stdout is None
        offline[0] = False
        assert future.stdout == "printed\n"


def test_times_that_are_no_times_are_refused(cloud: FakeCloud) -> None:
    for wrong in (math.nan, -1.0):
        with pytest.raises(ValueError, match="timeout_s"):
            Client("https://farcall.test", cloud.token, transport=cloud.transport, timeout_s=wrong)
        with cloud.client() as client:
            for given in ({"retry_timeout_s": wrong}, {"api_burst_window_s": wrong}):
                with pytest.raises(ValueError, match=next(iter(given))):
                    Executor(cloud.endpoint_id, client=client, **cast("Any", given))


def test_numbers_that_json_does_not_have_are_refused(cloud: FakeCloud) -> None:
    with cloud.client() as client, pytest.raises(InvalidRequest, match="NaN"):
        client.register_function(abs, metadata={"weights": [1.0, math.inf]})
