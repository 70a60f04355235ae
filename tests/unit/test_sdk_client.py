"""The client against a cloud in memory."""

from __future__ import annotations

import threading
import uuid
from typing import Any

import httpx
import msgspec
import pytest

from farcall import (
    Client,
    EndpointUnknown,
    Executor,
    FunctionUnknown,
    TaskCancelled,
    TaskFailed,
    TaskPending,
    TaskUnknown,
    Unauthenticated,
)
from farcall._api import Blobs
from farcall._client import connection_of
from farcall.testing import FakeCloud
from farcall_common.errors import BlobUnknown, DeserializationError, FarcallError
from tests.waiting import WAIT_S


def divide(a: int, b: int = 1) -> float:
    return a / b


def repeat(text: str, times: int) -> str:
    return text * times


def spied(cloud: FakeCloud, seen: list[httpx.Request]) -> Client:
    def handle(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return cloud.transport.handle_request(request)

    return Client("https://farcall.test", cloud.token, transport=httpx.MockTransport(handle))


def test_run_and_get_the_result(client: Client, cloud: FakeCloud) -> None:
    function_id = client.register_function(divide)
    task_id = client.run(6, b=3, endpoint_id=cloud.endpoint_id, function_id=function_id)
    assert client.get_result(task_id, wait_s=WAIT_S) == 2.0
    info = client.get_task(task_id)
    assert (info.task_id, info.state, info.pending, info.attempt) == (task_id, "success", False, 1)
    assert (info.endpoint_id, info.function_id) == (cloud.endpoint_id, function_id)
    assert info.timings["started_at"] <= info.timings["ended_at"]
    assert [event["state"] for event in client.get_task_events(task_id)] == ["received", "running", "success"]


def test_a_failed_task_raises_with_the_remote_traceback(client: Client, cloud: FakeCloud) -> None:
    function_id = client.register_function(divide)
    task_id = client.run(1, 0, endpoint_id=cloud.endpoint_id, function_id=function_id)
    with pytest.raises(TaskFailed, match="ZeroDivisionError: division by zero") as caught:
        client.get_result(task_id, wait_s=WAIT_S)
    assert caught.value.record.exception_type == "ZeroDivisionError"
    (note,) = caught.value.__notes__
    assert note.startswith(f"Remote traceback (endpoint {cloud.endpoint_id}, attempt 1):")
    assert "return a / b" in note


def test_batch_returns_every_failure(client: Client, cloud: FakeCloud) -> None:
    divide_id, repeat_id = client.register_function(divide), client.register_function(repeat)
    batch = client.create_batch()
    good = batch.add(divide_id, (4,), {"b": 2})
    bad = batch.add(divide_id, (4,), {"b": 0})
    big = batch.add(repeat_id, ("x", 100_000))
    assert len(batch) == 3
    assert bool(batch)
    answer = client.batch_run(cloud.endpoint_id, batch)
    assert answer["tasks"] == {divide_id: [good, bad], repeat_id: [big]}
    assert answer["task_group_id"] == batch.task_group_id
    for ended in (good, big):
        client.get_result(ended, wait_s=WAIT_S)
    unknown_id = str(uuid.uuid4())
    with pytest.raises(TaskFailed):
        client.get_result(bad, wait_s=WAIT_S)
    results = client.get_batch_result([bad, unknown_id, good, big])
    assert list(results) == [bad, unknown_id, good, big]
    assert results[good].result() == 2.0
    assert results[big].result() == "x" * 100_000
    with pytest.raises(TaskFailed):
        results[bad].result()
    with pytest.raises(TaskUnknown):
        results[unknown_id].result()
    assert not results[unknown_id].pending
    assert client.get_task_group(batch.task_group_id) == [good, bad, big]


def test_batch_can_run_again(client: Client, cloud: FakeCloud) -> None:
    batch = client.create_batch()
    batch.add(client.register_function(divide), (1,))
    first = client.batch_run(cloud.endpoint_id, batch)
    again = client.batch_run(cloud.endpoint_id, batch)
    assert first["tasks"] == again["tasks"]
    assert len(client.get_tasks()) == 1


def test_a_large_batch_is_sent_in_several_requests(cloud: FakeCloud) -> None:
    seen: list[httpx.Request] = []
    with spied(cloud, seen) as client:
        function_id = client.register_function(divide)
        batch = client.create_batch()
        ids = [batch.add(function_id, (n,)) for n in range(2500)]
        answer = client.batch_run(cloud.endpoint_id, batch)
        assert answer["tasks"][function_id] == ids == batch.task_ids
        sizes = [
            len(msgspec.json.decode(request.content)["tasks"][function_id])
            for request in seen
            if request.url.path.endswith("/submit")
        ]
        assert sizes == [1000, 1000, 500]
        for task_id in ids:
            client.get_result(task_id, wait_s=WAIT_S)
        assert [info.result() for info in client.get_batch_result(ids).values()] == list(range(2500))


def test_results_that_an_answer_left_out_are_requested_again(cloud: FakeCloud) -> None:
    def handle(request: httpx.Request) -> httpx.Response:
        response = cloud.transport.handle_request(request)
        if request.url.path == "/v2/batch_status":
            results = msgspec.json.decode(response.content)["results"]
            return httpx.Response(200, json={"response": "batch", "results": dict([*results.items()][:2])})
        return response

    with Client("https://farcall.test", cloud.token, transport=httpx.MockTransport(handle)) as client:
        function_id = client.register_function(divide)
        ids = [client.run(n, endpoint_id=cloud.endpoint_id, function_id=function_id) for n in range(5)]
        for task_id in ids:
            client.get_result(task_id, wait_s=WAIT_S)
        assert [info.result() for info in client.get_batch_result(ids).values()] == list(range(5))


def test_equal_big_arguments_are_uploaded_once(cloud: FakeCloud) -> None:
    seen: list[httpx.Request] = []
    with spied(cloud, seen) as client:
        function_id = client.register_function(len)
        for _ in range(2):
            task_id = client.run(b"x" * 1_000_000, endpoint_id=cloud.endpoint_id, function_id=function_id)
            assert client.get_result(task_id, wait_s=WAIT_S) == 1_000_000
        assert [request.method for request in seen].count("PUT") == 1
        submits = [msgspec.json.decode(request.content) for request in seen if request.url.path.endswith("/submit")]
        (payload,) = submits[0]["tasks"][function_id]
        assert set(payload) == {"blob_key", "size_bytes", "sha256"}


def test_equal_bytes_in_two_threads_are_uploaded_once(cloud: FakeCloud) -> None:
    started, go_on, puts = threading.Event(), threading.Event(), []

    def handle(request: httpx.Request) -> httpx.Response:
        if request.method == "PUT":
            puts.append(request)
            started.set()
            assert go_on.wait(WAIT_S)
        return cloud.transport.handle_request(request)

    with Client("https://farcall.test", cloud.token, transport=httpx.MockTransport(handle)) as client:
        refs: list[Any] = []
        threads = [
            threading.Thread(target=lambda: refs.append(connection_of(client).blobs.upload(b"data"))) for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        assert started.wait(WAIT_S)
        go_on.set()
        for thread in threads:
            thread.join()
        assert refs[0] == refs[1]
        assert len(puts) == 1


def test_failed_upload_is_retried_by_the_next_call(cloud: FakeCloud) -> None:
    failures = [httpx.Response(400, text="<Code>BadDigest</Code>")]

    def handle(request: httpx.Request) -> httpx.Response:
        return failures.pop() if request.method == "PUT" and failures else cloud.transport.handle_request(request)

    with Client("https://farcall.test", cloud.token, transport=httpx.MockTransport(handle)) as client:
        with pytest.raises(FarcallError):
            connection_of(client).blobs.upload(b"data")
        assert connection_of(client).blobs.upload(b"data").size_bytes == 4


def test_an_expired_upload_address_is_requested_again(cloud: FakeCloud) -> None:
    cut = httpx.ReadError("cut, and then nothing for an hour")
    answers: list[Exception | httpx.Response] = [cut, httpx.Response(403, text="<Code>AccessDenied</Code>")]
    asked: list[str] = []

    def handle(request: httpx.Request) -> httpx.Response:
        asked.append(f"{request.method} {request.url.path}")
        if request.method == "PUT" and answers:
            answer = answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer
        return cloud.transport.handle_request(request)

    with Client("https://farcall.test", cloud.token, transport=httpx.MockTransport(handle)) as client:
        assert connection_of(client).blobs.upload(b"data").size_bytes == 4
    assert asked.count("POST /v3/blobs") == 2


def test_damaged_downloads_are_detected(cloud: FakeCloud, client: Client) -> None:
    blobs: Blobs = connection_of(client).blobs
    ref = blobs.upload(b"data")
    cloud._blobs[ref.blob_key] = b"DATA"
    with pytest.raises(DeserializationError, match="not those that were stored"):
        blobs.download(ref, f"https://blobs.farcall.test/{ref.blob_key}", retry_timeout_s=0)


def test_an_expired_download_address_is_requested_again(cloud: FakeCloud) -> None:
    gets: list[str] = []

    def handle(request: httpx.Request) -> httpx.Response:
        if request.url.host == "blobs.farcall.test" and request.method == "GET":
            gets.append(str(request.url))
            if len(gets) == 1:
                return httpx.Response(403, text="<Error><Code>AccessDenied</Code></Error>")
        return cloud.transport.handle_request(request)

    with Client("https://farcall.test", cloud.token, transport=httpx.MockTransport(handle)) as client:
        function_id = client.register_function(repeat)
        task_id = client.run("ab", 50_000, endpoint_id=cloud.endpoint_id, function_id=function_id)
        assert client.get_result(task_id, wait_s=WAIT_S) == "ab" * 50_000
        assert len(gets) == 2


@pytest.mark.parametrize("status", [403, 404])
def test_a_deleted_result_is_blob_unknown(cloud: FakeCloud, status: int) -> None:
    def handle(request: httpx.Request) -> httpx.Response:
        if request.url.host == "blobs.farcall.test" and request.method == "GET":
            return httpx.Response(status, text="<Error><Code>NoSuchKey</Code></Error>")
        return cloud.transport.handle_request(request)

    with Client("https://farcall.test", cloud.token, transport=httpx.MockTransport(handle)) as client:
        with Executor(cloud.endpoint_id, client=client) as executor:
            future = executor.submit(repeat, "ab", 50_000)
            assert isinstance(future.exception(WAIT_S), BlobUnknown)
        with pytest.raises(BlobUnknown, match="retention time; run the task again") as caught:
            client.get_result(future.task_id)
        assert not caught.value.record.retryable


def test_a_result_that_cannot_be_read_here_does_not_hide_the_others(cloud: FakeCloud, client: Client) -> None:
    function_id = client.register_function(divide)
    good, broken = (client.run(n, endpoint_id=cloud.endpoint_id, function_id=function_id) for n in (1, 2))
    for task_id in (good, broken):
        client.get_result(task_id, wait_s=WAIT_S)
    cloud._tasks[broken].result = b"zz\nfrom the future"
    results = client.get_batch_result([good, broken])
    assert results[good].result() == 1
    with pytest.raises(DeserializationError):
        results[broken].result()


def test_tasks_that_have_not_ended_are_pending_and_can_be_cancelled() -> None:
    with FakeCloud(workers=0) as cloud, cloud.client() as client:
        assert client.get_endpoint_status(cloud.endpoint_id)["status"] == "offline"
        function_id = client.register_function(divide)
        task_id = client.run(1, endpoint_id=cloud.endpoint_id, function_id=function_id)
        with pytest.raises(TaskPending):
            client.get_result(task_id)
        with pytest.raises(TaskPending):
            client.get_result(task_id, wait_s=0.03)
        assert client.get_batch_result([task_id])[task_id].pending
        assert [task["status"] for task in client.get_tasks(state="received")] == ["received"]
        assert client.cancel(task_id)["outcome"] == "cancelled"
        assert client.cancel(task_id)["outcome"] == "finished"
        with pytest.raises(TaskCancelled):
            client.get_result(task_id)
        with pytest.raises(TaskUnknown):
            client.cancel(str(uuid.uuid4()))


def test_functions_can_be_found_and_deleted(client: Client, cloud: FakeCloud) -> None:
    function_id = client.register_function(divide, name="share out", description="Fairly.", metadata={"v": 2})
    client.register_function(repeat)
    assert [each["function_name"] for each in client.get_functions()] == ["repeat", "share out"]
    assert [each["function_uuid"] for each in client.get_functions(search="fair")] == [function_id]
    assert client.get_function(function_id)["metadata"]["v"] == 2
    client.delete_function(function_id)
    with pytest.raises(FunctionUnknown):
        client.get_function(function_id)
    with pytest.raises(FunctionUnknown):
        client.run(1, endpoint_id=cloud.endpoint_id, function_id=function_id)


def test_endpoints_can_be_found(client: Client, cloud: FakeCloud) -> None:
    assert [each["uuid"] for each in client.get_endpoints()] == [cloud.endpoint_id]
    assert client.get_endpoint(cloud.endpoint_id)["name"] == "fake"
    assert client.get_endpoint_status(cloud.endpoint_id)["status"] == "online"
    assert client.get_allowed_functions(cloud.endpoint_id)["restricted"] is False
    with pytest.raises(EndpointUnknown):
        client.get_endpoint(str(uuid.uuid4()))


def test_a_wrong_token_is_raised_at_once(cloud: FakeCloud) -> None:
    with Client("https://farcall.test", "wrong", transport=cloud.transport) as client:
        with pytest.raises(Unauthenticated) as caught:
            client.version_check()
        assert "FARCALL_TOKEN" in caught.value.hint


def test_the_version_of_the_api(client: Client) -> None:
    assert client.version_check()["api"]
