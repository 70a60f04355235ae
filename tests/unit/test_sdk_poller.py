"""Polling through a sleep of the machine."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

import httpx
import pytest

from farcall import Client, ComputeFuture, Unavailable, Why
from farcall._client import connection_of
from farcall._future import TaskRecord
from farcall._results import Collector, Poller, ResultReader
from farcall._task_output import TaskOutput
from farcall.testing import FakeCloud
from tests.waiting import WAIT_S

NIGHT_S = 8 * 3600.0


class Laptop:
    """Asks for the end of a task. While the lid is closed nothing runs, and no answer comes in."""

    def __init__(self, cloud: FakeCloud, *, retry_timeout_s: float) -> None:
        self.asked, self.slept_s, self.unreachable = 0, 0.0, 0
        self._cloud = cloud
        client = Client("https://farcall.test", cloud.token, transport=httpx.MockTransport(self._answer))
        function_id = client.register_function(abs)
        task_id = client.run(-7, endpoint_id=cloud.endpoint_id, function_id=function_id)
        self.future: ComputeFuture[Any] = ComputeFuture(
            TaskRecord(task_id, adopted=True), task_group_id="g", endpoint_id="e", owner=self
        )
        connection = connection_of(client)
        reader = ResultReader(connection.api, connection.blobs, connection.policy, connection.sealer)
        collector = Collector(reader, on_finished=lambda: None)
        collector.add(self.future)
        self._poller = Poller(
            connection_of(client).api,
            collector,
            stream_is_open=lambda: False,
            retry_timeout_s=retry_timeout_s,
            clock=lambda: time.monotonic() + self.slept_s,
        )
        self._thread = threading.Thread(target=self._poller.run)
        self._client = client

    def _answer(self, request: httpx.Request) -> httpx.Response:
        if request.url.path != "/v2/batch_status":
            return self._cloud.transport.handle_request(request)
        self.asked += 1
        if self.asked == 2:
            self.slept_s = NIGHT_S  # the lid is closed while this is on its way
        if 2 <= self.asked < 2 + self.unreachable:
            raise httpx.ReadError("cut")
        if self.asked == 2 + self.unreachable:
            self._cloud.run_waiting()
        return self._cloud.transport.handle_request(request)

    def cancel(self, task: TaskRecord) -> None:
        pass

    def why(self, task_id: str) -> Why:
        return self._client.why(task_id)

    def cause_of_delay(self, endpoint_id: str) -> str:
        return ""

    def output(self, task_id: str) -> TaskOutput | None:
        return None

    def details(self, task: TaskRecord) -> Mapping[str, Any]:
        return {}

    def read(self, task: TaskRecord, data: bytes, what: str, *, signed: bool) -> Any:
        raise NotImplementedError

    def open(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._poller.stop()
        self._thread.join(WAIT_S)
        self._client.close()


@pytest.fixture
def laptop() -> Iterator[Laptop]:
    with FakeCloud(workers=0) as cloud:
        laptop = Laptop(cloud, retry_timeout_s=90.0)
        yield laptop
        laptop.close()


def test_sleep_of_the_machine_is_not_an_outage(laptop: Laptop) -> None:
    laptop.unreachable = 3  # the network is not up yet
    laptop.open()
    assert laptop.future.result(WAIT_S) == 7
    assert laptop.asked == 5


def test_repeated_sleep_reaches_the_timeout() -> None:
    with FakeCloud(workers=0) as cloud:
        laptop = Laptop(cloud, retry_timeout_s=30.0)  # less than what a sleep counts for
        laptop.unreachable = 10_000
        laptop.open()
        with pytest.raises(Unavailable, match="no contact with the API for 6"):
            laptop.future.result(WAIT_S)
        laptop.close()
