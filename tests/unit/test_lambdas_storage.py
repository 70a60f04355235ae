"""Nothing is added to a database whose disk is nearly full, and what was accepted still ends."""

from __future__ import annotations

import datetime as dt

import pytest

from farcall_common.store.model import TaskResult
from farcall_common.wire.states import Reporter, TaskState
from farcall_lambdas.settings import ApiSettings
from tests.support.memory_api import MemoryApi
from tests.support.stores import FakeDatabase

FUNCTION = {"function_name": "f", "function_code": "c"}
ENDPOINT = {"endpoint_name": "e"}


class Lab:
    def __init__(self, settings: ApiSettings | None = None) -> None:
        self.api = MemoryApi(settings=settings or ApiSettings(database_bytes=1000))
        assert isinstance(self.api.stores.database, FakeDatabase)
        self.records, self.database = self.api.stores, self.api.stores.database
        self.function_id, self.endpoint_id = self.api.function(), self.api.endpoint()
        self.submit = f"/v3/endpoints/{self.endpoint_id}/submit"
        self.tasks = {"tasks": {self.function_id: ["p"]}}

    def fill(self, size_bytes: int) -> None:
        self.database.stored_bytes = size_bytes
        self.api.clock.now += 60


@pytest.fixture
def lab() -> Lab:
    return Lab()


def test_nearly_full_database_refuses_writes_with_retry_after(lab: Lab) -> None:
    lab.fill(851)
    for method, path, body in (
        ("POST", lab.submit, lab.tasks),
        ("POST", "/v3/functions", FUNCTION),
        ("PUT", f"/v3/functions/{lab.function_id}", {"function_code": "other"}),
        ("POST", "/v3/endpoints", ENDPOINT),
        ("POST", "/v2/containers", {"type": "docker", "location": "python"}),
        ("POST", "/v3/aliases", {"name": "mine", "function_id": lab.function_id}),
    ):
        answer = lab.api.call(method, path, body)
        assert (answer.status, answer.body["code"]) == (503, "STORAGE_LOW"), path
        assert answer.headers["Retry-After"] == "60"


def test_accepted_tasks_are_served_with_a_nearly_full_database(lab: Lab) -> None:
    wanted = {**lab.tasks, "task_ids": {lab.function_id: ["0198a000-0000-7000-8000-000000000001"]}}
    first = lab.api.call("POST", lab.submit, wanted)
    lab.fill(999)

    assert lab.api.call("POST", lab.submit, wanted).body["tasks"] == first.body["tasks"]
    [task_id] = first.body["tasks"][lab.function_id]
    at = dt.datetime.fromtimestamp(lab.api.clock.now, dt.UTC)
    end = TaskResult(task_id, lab.endpoint_id, 1, TaskState.SUCCESS, Reporter.AGENT, result=b"r")
    assert lab.records.tasks.record_results([end], at=at)
    assert lab.api.call("GET", f"/v2/tasks/{task_id}").body["status"] == "success"


def test_database_size_is_measured_once_a_minute(lab: Lab) -> None:
    lab.fill(850)
    assert lab.api.call("POST", lab.submit, lab.tasks).status == 200
    lab.database.stored_bytes = 851
    lab.api.clock.now += 59
    assert lab.api.call("POST", lab.submit, lab.tasks).status == 200
    lab.api.clock.now += 1
    assert lab.api.call("POST", lab.submit, lab.tasks).status == 503
    lab.fill(10)
    assert lab.api.call("POST", lab.submit, lab.tasks).status == 200


def test_unknown_disk_size_refuses_no_request() -> None:
    lab = Lab(ApiSettings())
    lab.fill(10**15)
    assert lab.api.call("POST", lab.submit, lab.tasks).status == 200
