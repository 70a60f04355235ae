"""An unmodified globus-sdk client against the API, and the API's answers against those that globus-sdk publishes."""

from __future__ import annotations

import datetime as dt
import json
import re
import uuid
from collections.abc import Callable, Iterator
from typing import Any, cast
from urllib.parse import urlsplit

import globus_sdk
import pytest
import requests
import responses
from globus_sdk.testing import RegisteredResponse, get_response_set

from farcall_common.errors import ErrorRecord, Fault
from farcall_common.store import TaskResult
from farcall_common.wire.states import Reporter, TaskState
from tests.support.memory_api import MemoryApi

URL = "https://farcall.example.org"
V2, V3 = globus_sdk.ComputeClientV2, globus_sdk.ComputeClientV3


class Lab:
    """globus-sdk clients whose requests the API in memory answers."""

    def __init__(self, mock: responses.RequestsMock) -> None:
        self.api = MemoryApi()
        for method in ("GET", "POST", "PUT", "DELETE"):
            mock.add_callback(method, re.compile(f"{URL}/.*"), callback=self._answer)
        authorizer = globus_sdk.AccessTokenAuthorizer("token")
        # One attempt: the library's own retries sleep.
        retry = globus_sdk.transport.RetryConfig(max_retries=0)
        self.v2 = V2(base_url=URL, authorizer=authorizer, retry_config=retry)
        self.v3 = V3(base_url=URL, authorizer=authorizer, retry_config=retry)

    def _answer(self, request: requests.PreparedRequest) -> tuple[int, dict[str, str], str]:
        assert request.headers["Authorization"] == "Bearer token"
        url = urlsplit(str(request.url))
        body = request.body.decode() if isinstance(request.body, bytes) else request.body
        path = f"{url.path}?{url.query}"
        headers = {name: str(value) for name, value in request.headers.items()}
        answer = self.api.call(str(request.method), path, body, headers=headers)
        return answer.status, dict(answer.headers), json.dumps(answer.body)

    def function(self) -> str:
        data = {"function_name": "howdy", "function_code": "4\n01\nx", "meta": {"python_version": "3.12.6"}}
        return str(self.v3.register_function(data)["function_uuid"])

    def endpoint(self) -> str:
        return str(self.v3.register_endpoint({"endpoint_name": "my-endpoint"})["endpoint_id"])

    def task(self) -> str:
        function_id = self.function()
        answer = self.v3.submit(self.endpoint(), {"tasks": {function_id: ["p"]}, "create_queue": False})
        return str(answer["tasks"][function_id][0])

    def end(self, task_id: str, state: TaskState, **fields: Any) -> None:
        task = self.api.stores.tasks.get_tasks([task_id])[task_id]
        result = TaskResult(task_id, task.endpoint_id, 1, state, Reporter.AGENT, **fields)
        self.api.stores.tasks.record_results([result], at=dt.datetime.fromtimestamp(self.api.clock.now, dt.UTC))


@pytest.fixture
def lab() -> Iterator[Lab]:
    with responses.RequestsMock(assert_all_requests_are_fired=False) as mock:
        yield Lab(mock)


def published(method: Any, name: str = "default") -> Any:
    """The answer that globus-sdk publishes for a method of its client."""
    return cast(RegisteredResponse, get_response_set(method).lookup(name)).json


def keys(value: Any) -> Any:
    """The shape of a document: its keys, all the way down, and no values."""
    if isinstance(value, dict):
        return {key: keys(item) for key, item in value.items()}
    if isinstance(value, list):
        return [keys(value[0])] if value else []
    return ...


def test_version(lab: Lab) -> None:
    assert isinstance(lab.v2.get_version().data, str)
    everything = lab.v2.get_version(service="all").data
    # globus_compute_sdk reads min_ep_version, globus-sdk publishes min_endpoint_version.
    assert everything.keys() == published(V2.get_version, "all").keys() | {"min_ep_version"}


def test_registering_a_function(lab: Lab) -> None:
    data = {"function_name": "f", "function_code": "4\n01\nx"}

    assert lab.v2.register_function(data).data.keys() == published(V2.register_function).keys()
    assert lab.v3.register_function(data).data.keys() == published(V3.register_function).keys()


def test_reading_and_deleting_a_function(lab: Lab) -> None:
    function_id = lab.function()

    assert lab.v2.get_function(function_id).data.keys() == published(V2.get_function).keys()
    assert lab.v2.delete_function(function_id).data == published(V2.delete_function)


def test_registering_an_endpoint(lab: Lab) -> None:
    data = {"endpoint_name": "e"}

    assert keys(lab.v2.register_endpoint(data).data) == keys(published(V2.register_endpoint))
    first = lab.v3.register_endpoint(data).data
    assert keys(first) == keys(published(V3.register_endpoint))
    assert keys(lab.v3.update_endpoint(first["endpoint_id"], data).data) == keys(published(V3.update_endpoint))


def test_missing_versions_of_a_function_are_none(lab: Lab) -> None:
    data = {"function_name": "howdy", "function_code": "4\n01\nx"}
    function_id = str(lab.v3.register_function(data)["function_uuid"])
    assert lab.v2.get_function(function_id)["metadata"] == {"python_version": None, "sdk_version": None}


def test_reading_and_deleting_an_endpoint(lab: Lab) -> None:
    endpoint_id = lab.endpoint()

    ours = {"owned"}  # for our client, which reads pickles of the caller's endpoints only
    assert lab.v2.get_endpoint(endpoint_id).data.keys() == published(V2.get_endpoint).keys() | ours
    assert keys(lab.v2.get_endpoint_status(endpoint_id).data) == keys(published(V2.get_endpoint_status))
    assert keys(lab.v2.get_endpoints().data) == keys(published(V2.get_endpoints))
    assert keys(lab.v2.get_endpoints(role="any").data) == keys(published(V2.get_endpoints, "any"))
    assert lab.v3.get_endpoint_allowlist(endpoint_id).data.keys() == published(V3.get_endpoint_allowlist).keys()
    assert lab.v2.delete_endpoint(endpoint_id).data == published(V2.delete_endpoint)


def test_submitting_as_globus_compute_does_today(lab: Lab) -> None:
    function_id, endpoint_id = lab.function(), lab.endpoint()
    data = {
        "create_queue": False,
        "tasks": {function_id: ["a", "b"]},
        "task_group_id": str(uuid.uuid4()),
        "resource_specification": {"num_nodes": 1},
        "user_runtime": {"globus_compute_sdk_version": "4.19.0", "python": {"version": "3.12.6"}},
        "result_serializers": ["globus_compute_sdk.serialize.JSONData"],
    }

    answer = lab.v3.submit(endpoint_id, data).data

    assert answer.keys() == published(V3.submit).keys()
    assert list(answer["tasks"]) == [function_id]
    assert len(answer["tasks"][function_id]) == 2


def test_their_executors_requests_are_refused_at_once_with_a_hint(lab: Lab) -> None:
    function_id, endpoint_id = lab.function(), lab.endpoint()
    refused: list[Callable[[], Any]] = [
        lambda: lab.v3.submit(endpoint_id, {"create_queue": True, "tasks": {function_id: ["a"]}}),
        lambda: lab.v2.get_result_amqp_url(),
        lambda: lab.v2.lock_endpoint(endpoint_id),
        lambda: lab.v3.lock_endpoint(endpoint_id),
    ]
    said = []
    for ask in refused:
        with pytest.raises(globus_sdk.GlobusAPIError) as caught:
            ask()
        assert (caught.value.http_status, caught.value.code) == (400, "UNSUPPORTED")
        said.append(f"{caught.value.message} {json.loads(caught.value.text)['hint']}")
    assert all("use farcall.Executor" in text for text in said[:2])
    assert all("farcall-endpoint stop" in text for text in said[2:])
    assert lab.api.call("GET", "/v3/tasks").body["tasks"] == []


def test_submitting_as_earlier_globus_compute(lab: Lab) -> None:
    tasks = [[lab.function(), lab.endpoint(), "a"]]

    answer = lab.v2.submit({"task_group_id": str(uuid.uuid4()), "tasks": tasks}).data

    assert keys(answer) == keys(published(V2.submit))
    assert {result["status"] for result in answer["results"]} == {"success"}


def test_a_task_has_its_workers_platform(lab: Lab) -> None:
    task_id = lab.task()
    endpoint_id = lab.api.call("GET", f"/v2/tasks/{task_id}").body["endpoint_id"]
    packages = {"dill": "0.4.1", "farcall-endpoint": "0.1.0"}
    runtime = {"python_version": "3.12.1", "packages": packages, "platform": "Linux-6.1-x86_64"}
    lab.api.stores.endpoints.change_endpoint(endpoint_id, {"metadata": {"runtime": runtime}})
    lab.end(task_id, TaskState.SUCCESS, result=b"10000", timings={"started_at": 1.0, "ended_at": 2.0})

    details = lab.v2.get_task(task_id).data["details"]

    assert published(V2.get_task)["details"].keys() <= {*details, "endpoint_id"}
    assert (details["os"], details["globus_compute_sdk_version"]) == ("Linux-6.1-x86_64", "farcall-endpoint 0.1.0")


def test_reading_a_task(lab: Lab) -> None:
    wanted = published(V2.get_task)
    task_id = lab.task()
    details = {name: "x" for name in wanted["details"] if name != "task_transitions"}
    lab.end(task_id, TaskState.SUCCESS, result=b"10000", details=details, timings={"started_at": 1.0, "ended_at": 2.0})

    task = lab.v2.get_task(task_id).data

    assert task.keys() >= wanted.keys()
    assert keys(task["details"]) == keys(wanted["details"])
    assert (task["task_id"], task["status"], task["result"]) == (task_id, "success", "10000")
    assert isinstance(task["completion_t"], str)
    batch = lab.v2.get_task_batch([task_id]).data
    assert batch == {"response": "batch", "results": {task_id: task}}


def test_a_failure_has_an_exception_and_no_result(lab: Lab) -> None:
    task_id = lab.task()
    error = ErrorRecord("TASK_FAILED", "ValueError: no", fault=Fault.USER_CODE, traceback="Traceback: no")
    lab.end(task_id, TaskState.FAILED, error=error)

    task = lab.v2.get_task(task_id).data

    # globus_compute_sdk looks for a result first, and for an exception only where there is none.
    assert "result" not in task
    assert (task["status"], task["exception"]) == ("failed", "Traceback: no")


def test_a_state_unknown_to_globus_clients_ends_their_wait(lab: Lab) -> None:
    task_id = lab.task()
    lab.end(task_id, TaskState.CANCELLED, error=ErrorRecord("TASK_CANCELLED", "It was cancelled."))

    task = lab.v2.get_task(task_id).data

    assert (task["status"], task["exception"]) == ("failed", "It was cancelled.")


def test_a_task_group(lab: Lab) -> None:
    task_id = lab.task()
    group_id = lab.api.stores.tasks.get_tasks([task_id])[task_id].task_group_id

    group = lab.v2.get_task_group(group_id).data

    assert keys(group) == keys(published(V2.get_task_group))
    example = published(V2.get_task_group)["tasks"][0]["created_at"]
    assert re.sub(r"\d", "0", group["tasks"][0]["created_at"]) == re.sub(r"\d", "0", example)


def test_errors_have_the_clients_format(lab: Lab) -> None:
    with pytest.raises(globus_sdk.ComputeAPIError) as caught:
        lab.v2.get_task(uuid.uuid4())

    error = caught.value
    assert (error.http_status, error.code) == (404, "TASK_UNKNOWN")
    assert "There is no task" in str(error.message)
