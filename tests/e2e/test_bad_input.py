"""Invalid input: each ends in one clear error with a code and a hint, at once."""

from __future__ import annotations

import os
import sys
import types
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

import farcall
from farcall_common.errors import (
    EndpointUnknown,
    FarcallError,
    Forbidden,
    FunctionUnknown,
    PayloadTooLarge,
    SerializationError,
    TaskFailed,
    TaskGroupUnknown,
    TaskUnknown,
    Unauthenticated,
)
from farcall_local.deployment import Deployment
from farcall_local.endpoint import LocalEndpoint
from tests.waiting import WAIT_S

OVER_THE_LIMIT = 11 * 1024 * 1024


def hello(event: str) -> str:
    return f"hello, {event}"


@pytest.fixture
def web(cloud: Deployment) -> Iterator[httpx.Client]:
    """The bare REST API, as ada."""
    headers = {"Authorization": f"Bearer {cloud.tokens['ada']}"}
    with httpx.Client(base_url=cloud.api_url, headers=headers, timeout=WAIT_S, trust_env=False) as client:
        yield client


def assert_clear(error: BaseException | None, kind: type[FarcallError]) -> FarcallError:
    """An error of the right kind that says what to do."""
    assert isinstance(error, kind), repr(error)
    assert error.record.code.isupper()
    assert error.record.message
    assert error.record.hint
    return error


def refused(call: Callable[[], object], kind: type[FarcallError]) -> FarcallError:
    with pytest.raises(kind) as caught:
        call()
    return assert_clear(caught.value, kind)


def test_unknown_ids(client: farcall.Client, endpoint: LocalEndpoint) -> None:
    nothing = str(uuid.uuid4())
    known = client.register_function(hello)
    refused(lambda: client.run("x", endpoint_id=endpoint.endpoint_id, function_id=nothing), FunctionUnknown)
    refused(lambda: client.run("x", endpoint_id=nothing, function_id=known), EndpointUnknown)
    refused(lambda: client.get_function(nothing), FunctionUnknown)
    refused(lambda: client.get_endpoint(nothing), EndpointUnknown)
    refused(lambda: client.get_task(nothing), TaskUnknown)
    refused(lambda: client.cancel(nothing), TaskUnknown)
    with pytest.raises(TaskGroupUnknown, match=nothing):
        client.get_task_group(nothing)


def test_an_executor_at_an_unknown_endpoint_does_not_hang(client: farcall.Client) -> None:
    with farcall.Executor(str(uuid.uuid4()), client=client) as executor:
        assert_clear(executor.submit(hello, "x").exception(WAIT_S), EndpointUnknown)


@pytest.mark.smoke
def test_another_owners_functions_endpoints_and_tasks(
    client: farcall.Client,
    other_client: farcall.Client,
    endpoint: LocalEndpoint,
    own_endpoint: Callable[..., LocalEndpoint],
) -> None:
    theirs = client.register_function(hello)
    task_id = client.run("private", endpoint_id=endpoint.endpoint_id, function_id=theirs)
    mine = own_endpoint(user="grace").endpoint_id
    refused(lambda: other_client.run("x", endpoint_id=mine, function_id=theirs), Forbidden)
    refused(
        lambda: other_client.run(
            "x", endpoint_id=endpoint.endpoint_id, function_id=other_client.register_function(hello)
        ),
        Forbidden,
    )
    refused(lambda: other_client.delete_function(theirs), Forbidden)
    refused(lambda: other_client.delete_endpoint(endpoint.endpoint_id), Forbidden)
    refused(lambda: other_client.get_task(task_id), TaskUnknown)  # not even whether it exists
    refused(lambda: other_client.cancel(task_id), TaskUnknown)
    assert client.get_result(task_id, wait_s=WAIT_S) == "hello, private"


@pytest.mark.smoke
def test_wrong_token(cloud: Deployment) -> None:
    with farcall.Client(cloud.api_url, "not-a-token") as anonymous:
        refused(lambda: anonymous.register_function(hello), Unauthenticated)


@pytest.mark.parametrize(
    "body", [b"{not json", b"", b"[]", b'{"tasks": 7}', b"\xff\xfe", b'{"tasks": {"not-a-uuid": ["x"]}}']
)
def test_malformed_json(web: httpx.Client, endpoint: LocalEndpoint, body: bytes) -> None:
    answer = web.post(
        f"/v3/endpoints/{endpoint.endpoint_id}/submit", content=body, headers={"Content-Type": "application/json"}
    )
    assert 400 <= answer.status_code < 500
    error = answer.json()
    assert error["code"].isupper()
    assert error["message"]
    assert error["fault"] == "caller"
    assert error["http_status_code"] == answer.status_code


def test_a_path_that_does_not_exist(web: httpx.Client) -> None:
    answer = web.get("/v3/nothing-here")
    assert answer.status_code in (403, 404)
    assert answer.json()


def test_a_payload_over_the_limit_is_refused_before_it_is_sent(executor: farcall.Executor) -> None:
    refused(lambda: executor.submit(len, os.urandom(OVER_THE_LIMIT)), PayloadTooLarge)


def test_a_payload_over_the_limit_is_refused_by_the_api(web: httpx.Client) -> None:
    answer = web.post("/v3/blobs", json={"size_bytes": OVER_THE_LIMIT, "sha256": "0" * 64})
    assert answer.status_code == 413
    assert answer.json()["code"] == "PAYLOAD_TOO_LARGE"
    assert answer.json()["hint"]


def test_an_argument_that_cannot_be_pickled(executor: farcall.Executor) -> None:
    lines: Any = (line for line in "abc")
    error = refused(lambda: executor.submit(hello, lines), SerializationError)
    assert "generator" in str(error)


def test_a_module_that_the_worker_lacks(executor: farcall.Executor) -> None:
    def needs_a_module() -> Any:
        import no_such_module_anywhere  # type: ignore[import-not-found]

        return no_such_module_anywhere

    failure = executor.submit(needs_a_module).exception(WAIT_S)
    assert isinstance(failure, TaskFailed)
    assert "no_such_module_anywhere" in str(failure)
    assert "ModuleNotFoundError" in (failure.record.exception_type or "")


def test_a_function_of_a_module_that_the_worker_lacks(
    executor: farcall.Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    site_packages = os.path.dirname(os.path.dirname(httpx.__file__))  # noqa: PTH120 - what an import would set
    absent = types.ModuleType("farcall_test_absent")
    absent.__file__ = f"{site_packages}/farcall_test_absent.py"
    exec("def greet(): return 'never'", absent.__dict__)
    monkeypatch.setitem(sys.modules, absent.__name__, absent)

    failure = executor.submit(absent.greet).exception(WAIT_S)

    error = assert_clear(failure, FarcallError)
    assert "farcall_test_absent" in str(error)


def test_a_result_that_cannot_be_sent(executor: farcall.Executor) -> None:
    def lines() -> Any:
        return (line for line in "abc")

    error = assert_clear(executor.submit(lines).exception(WAIT_S), FarcallError)
    assert error.record.code == "RESULT_NOT_SERIALIZABLE"


def test_a_result_over_the_limit(executor: farcall.Executor) -> None:
    error = assert_clear(executor.submit(os.urandom, OVER_THE_LIMIT).exception(WAIT_S), FarcallError)
    assert error.record.code == "RESULT_TOO_LARGE"


def test_a_function_that_kills_its_worker(executor: farcall.Executor) -> None:
    def die() -> None:
        import os

        os._exit(13)

    error = assert_clear(executor.submit(die).exception(WAIT_S), FarcallError)
    assert error.record.code == "TASK_DEAD_LETTERED"
    assert "worker process died" in error.record.message
    assert executor.submit(hello, "a new worker").result(WAIT_S) == "hello, a new worker"


def test_walltime(client: farcall.Client, endpoint: LocalEndpoint) -> None:
    def sleep_long() -> None:
        import time

        time.sleep(600)

    with farcall.Executor(endpoint.endpoint_id, client=client, walltime_s=0.5) as executor:
        error = assert_clear(executor.submit(sleep_long).exception(WAIT_S), FarcallError)
        assert error.record.code == "WALLTIME_EXCEEDED"
