"""Delays: tasks that wait are asked about, and reported once."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator, Mapping
from typing import Any

import httpx
import pytest

from farcall import Client, Executor
from farcall._client import connection_of
from farcall._delays import DelayWatch, log_delay
from farcall._future import ComputeFuture, TaskRecord
from farcall._results import Collector, ResultReader
from farcall._task_info import Why
from farcall._task_output import TaskOutput
from farcall.testing import FakeCloud
from tests.waiting import wait_until

WAIT_S = 30.0


class Waiting:
    """One open task of an endpoint that is asked about as time passes."""

    def __init__(self, cloud: FakeCloud) -> None:
        self.cloud, self.mono, self.asked, self.is_cut = cloud, time.monotonic(), 0, False
        self.reported: list[Why] = []
        self.answers: list[dict[str, Any]] = []
        """Instead of the cloud's, in turn."""
        self._client = Client("https://farcall.test", cloud.token, transport=httpx.MockTransport(self._answer))
        connection = connection_of(self._client)
        reader = ResultReader(connection.api, connection.blobs, connection.policy, connection.sealer)
        self.collector = Collector(reader, on_finished=lambda: None)
        self.watch = DelayWatch(connection.api, self.collector, clock=lambda: self.mono)
        self.watch.report = self.reported.append
        self.future = self.submit()

    def _answer(self, request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("/why"):
            self.asked += 1
            if self.is_cut:
                raise httpx.ReadError("cut")
            if self.answers:
                found = json.loads(self.cloud.transport.handle_request(request).read())
                return httpx.Response(200, json=found | self.answers.pop(0))
        return self.cloud.transport.handle_request(request)

    def submit(self) -> ComputeFuture[Any]:
        function_id = self._client.register_function(abs)
        task_id = self._client.run(-7, endpoint_id=self.cloud.endpoint_id, function_id=function_id)
        record = TaskRecord(task_id, adopted=True)
        future = ComputeFuture[Any](record, task_group_id="g", endpoint_id=self.cloud.endpoint_id, owner=self)
        self.collector.add(future)
        return future

    def after(self, seconds: float) -> bool:
        self.mono += seconds
        return self.watch.check()

    def cancel(self, task: TaskRecord) -> None:
        self.collector.drop(task.task_id)

    def why(self, task_id: str) -> Why:
        return self._client.why(task_id)

    def cause_of_delay(self, endpoint_id: str) -> str:
        return self.watch.cause(endpoint_id)

    def output(self, task_id: str) -> TaskOutput | None:
        return None

    def details(self, task: TaskRecord) -> Mapping[str, Any]:
        return {}

    def read(self, task: TaskRecord, data: bytes, what: str, *, signed: bool) -> Any:
        raise NotImplementedError

    def close(self) -> None:
        self._client.close()


@pytest.fixture
def waiting() -> Iterator[Waiting]:
    with FakeCloud(workers=0) as cloud:
        found = Waiting(cloud)
        yield found
        found.close()


def test_a_task_for_an_endpoint_that_is_off_is_reported_once_after_three_seconds(waiting: Waiting) -> None:
    assert waiting.after(2.5)
    assert waiting.asked == 0
    assert waiting.after(1.0)
    assert [why.reason for why in waiting.reported] == ["ENDPOINT_NEVER_SEEN"]
    waiting.after(10.0)
    assert waiting.asked == 1
    waiting.after(30.0)
    assert (waiting.asked, len(waiting.reported)) == (2, 1)


def test_a_time_out_names_the_delay(waiting: Waiting) -> None:
    with pytest.raises(TimeoutError, match=r"has not ended after 0 s; future\.why\(\) gives the reason"):
        waiting.future.result(0)
    waiting.after(3.5)
    for wait in (waiting.future.result, waiting.future.exception):
        with pytest.raises(
            TimeoutError, match=r"task .+ has not ended after 0\.01 s\. Endpoint fake was never online\."
        ):
            wait(0.01)


def test_a_task_that_runs_is_not_reported(waiting: Waiting) -> None:
    waiting.cloud.run_waiting()
    waiting.after(3.5)
    assert (waiting.asked, waiting.reported) == (1, [])


def test_a_start_of_an_environment_is_reported_once_soon_after_the_endpoint_has_reported_it(waiting: Waiting) -> None:
    text = "The task waits for environment sci to start on node n3: looking for a Python, 5 s so far."
    waiting.answers = [{"reason": "STARTING"}, *[{"reason": "ENVIRONMENT_STARTING", "text": text}] * 2]
    waiting.after(3.5)
    assert waiting.reported == []
    waiting.after(3.0)
    assert [str(why) for why in waiting.reported] == [text]
    assert "looking for a Python" in waiting.watch.cause(waiting.cloud.endpoint_id)
    waiting.after(30.0)
    assert (waiting.asked, len(waiting.reported)) == (3, 1)


def test_a_delay_ends_and_the_next_one_is_reported_again(waiting: Waiting) -> None:
    waiting.after(3.5)
    waiting.future.cancel()
    assert not waiting.after(1.0)
    assert waiting.watch.cause(waiting.cloud.endpoint_id) == ""
    waiting.submit()
    waiting.after(3.5)
    assert len(waiting.reported) == 2


def test_an_api_that_does_not_answer_is_not_a_delay_of_the_endpoint(waiting: Waiting) -> None:
    waiting.is_cut = True
    waiting.after(3.5)
    assert (waiting.asked, waiting.reported) == (1, [])


def test_the_text_for_other_tasks_leaves_out_the_place_in_the_queue(
    waiting: Waiting, caplog: pytest.LogCaptureFixture
) -> None:
    text = "Endpoint lab has been offline since 12:00 (5 s); 3 tasks go first."
    why = Why("task", "ENDPOINT_OFFLINE", text, "received", state_age_s=5.0)
    waiting.watch._delays["lab"] = why
    assert waiting.watch.cause("lab") == "Endpoint lab has been offline since 12:00 (5 s)"
    with caplog.at_level(logging.WARNING, "farcall"):
        log_delay(why)
    assert caplog.messages == [f"task task waits: {text}"]


def test_an_executor_warns_about_an_endpoint_that_is_off(caplog: pytest.LogCaptureFixture) -> None:
    with FakeCloud(workers=0) as cloud, cloud.client() as client:
        executor = Executor(cloud.endpoint_id, client=client)
        future = executor.submit(abs, -7)
        wait_until(lambda: bool(caplog.messages), "the delay is reported")
        assert caplog.messages == [f"task {future.task_id} waits: Endpoint fake was never online."]
        with pytest.raises(TimeoutError, match="Endpoint fake was never online"):
            future.result(0)
        cloud.start(workers=1)
        assert future.result(WAIT_S) == 7
        executor.shutdown()
