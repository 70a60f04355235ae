"""Exceptions of user code and defects of ours in the executor's threads: no future stays open."""

from __future__ import annotations

import concurrent.futures
import sys
import threading
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from farcall import Client, Executor, InputFailed
from farcall.testing import FakeCloud
from farcall_common.errors import DeserializationError, SerializationError, TaskFailed
from farcall_common.payload import JSONData
from tests.waiting import WAIT_S

Answer = Callable[[httpx.Request], httpx.Response | None]


class ExitsWhenPickled:
    def __reduce__(self) -> Any:
        sys.exit(1)


class ExitsWhenShown(Exception):
    def __str__(self) -> str:
        sys.exit(1)


class ExitsWhenRead:
    def __reduce__(self) -> Any:
        return sys.exit, (1,)


def executor_of(cloud: FakeCloud, answer: Answer) -> Executor:
    """An executor some of whose requests are answered by the test, or end as it says."""

    def respond(request: httpx.Request) -> httpx.Response:
        return answer(request) or cloud.transport.handle_request(request)

    client = Client("https://farcall.test", cloud.token, transport=httpx.MockTransport(respond))
    return Executor(cloud.endpoint_id, client=client)


def test_a_large_result_whose_reading_exits_fails_alone(cloud: FakeCloud) -> None:
    def made(kind: Any) -> Any:
        return kind(), b"x" * 100_000

    with cloud.client() as client, Executor(cloud.endpoint_id, client=client) as executor:
        future = executor.submit(made, ExitsWhenRead)
        error = future.exception(WAIT_S)
        assert isinstance(error, DeserializationError)
        assert isinstance(error.__cause__, SystemExit)
        assert executor.submit(pow, 2, 3).result(WAIT_S) == 8
        with pytest.raises(DeserializationError):
            client.get_result(future.task_id)


def test_an_argument_that_comes_later_and_exits_when_pickled_fails_its_call(cloud: FakeCloud) -> None:
    with cloud.client() as client, Executor(cloud.endpoint_id, client=client) as executor:
        later: concurrent.futures.Future[Any] = concurrent.futures.Future()
        call = executor.submit(id, later)
        later.set_result(ExitsWhenPickled())
        error = call.exception(WAIT_S)
        assert isinstance(error, SerializationError)
        assert "SystemExit: 1" in str(error)


def test_an_argument_whose_failure_cannot_be_shown_fails_its_call(cloud: FakeCloud) -> None:
    with cloud.client() as client, Executor(cloud.endpoint_id, client=client) as executor:
        later: concurrent.futures.Future[Any] = concurrent.futures.Future()
        call = executor.submit(id, later)
        later.set_exception(ExitsWhenShown())
        error = call.exception(WAIT_S)
        assert isinstance(error, InputFailed)
        assert isinstance(error.__cause__, ExitsWhenShown)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_upload_defect_fails_its_call(cloud: FakeCloud) -> None:
    def explode(request: httpx.Request) -> httpx.Response | None:
        if request.method == "PUT":
            raise ZeroDivisionError("a defect of ours")
        return None

    with executor_of(cloud, explode) as executor:
        with pytest.raises(ZeroDivisionError):
            executor.submit(len, b"x" * 1_000_000).result(WAIT_S)
        assert executor.submit(pow, 2, 3).result(WAIT_S) == 8


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_waiting_submitter_is_released_when_the_sender_dies(cloud: FakeCloud) -> None:
    at_submit, go_on = threading.Event(), threading.Event()

    def explode(request: httpx.Request) -> httpx.Response | None:
        if request.url.path.endswith("/submit"):
            at_submit.set()
            assert go_on.wait(WAIT_S)
            raise ZeroDivisionError("a defect of ours")
        return None

    with executor_of(cloud, explode) as executor:
        futures = [executor.submit(len, b"x" * 10_000)]
        assert at_submit.wait(WAIT_S)
        executor._engine._unsent.acquire(256 * 1024 * 1024, wait=False)
        waiting = threading.Thread(target=lambda: futures.append(executor.submit(len, b"x" * 10_000)))
        waiting.start()
        while len(executor._engine.unsettled()) < 2:
            assert waiting.is_alive()
        go_on.set()
        waiting.join(WAIT_S)
        assert not waiting.is_alive()
        for future in futures:
            with pytest.raises(ZeroDivisionError):
                future.result(WAIT_S)
        with pytest.raises(concurrent.futures.BrokenExecutor):
            executor.submit(len, b"x")


def test_a_submit_that_was_interrupted_leaves_no_future_open(cloud: FakeCloud, monkeypatch: pytest.MonkeyPatch) -> None:
    with cloud.client() as client, Executor(cloud.endpoint_id, client=client) as executor:

        def interrupted(*_: object, **__: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(executor._engine._unsent, "acquire", interrupted)
            with pytest.raises(KeyboardInterrupt):
                executor.submit(len, b"x" * 10_000)
        assert executor._engine.unsettled() == []


def test_plain_data_mode_returns_no_pickled_exception(cloud: FakeCloud) -> None:
    with (
        cloud.client() as client,
        Executor(cloud.endpoint_id, client=client, result_serializers=[JSONData], raise_original=True) as executor,
    ):
        error = executor.submit(divmod, 1, 0).exception(WAIT_S)
        assert isinstance(error, TaskFailed)
        assert isinstance(error, ZeroDivisionError)
        assert error.__cause__ is None
        assert error.record.exception_data is None


def test_output_of_a_failed_task_with_raise_original(cloud: FakeCloud) -> None:
    with (
        cloud.client() as client,
        Executor(cloud.endpoint_id, client=client, raise_original=True) as executor,
    ):
        future = executor.submit(divmod, 1, 0)
        with pytest.raises(ZeroDivisionError):
            future.result(WAIT_S)
        again = executor.reload_tasks()
        assert again[0] is not future
        assert type(again[0].exception(WAIT_S)) is ZeroDivisionError
        assert future.stdout is None
