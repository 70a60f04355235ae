"""The client means the same to the real API and to the fake one: one suite for both, over memory."""

from __future__ import annotations

import concurrent.futures
import datetime as dt
import hashlib
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import httpx
import msgspec
import pytest

from farcall import (
    Client,
    EndpointIncompatible,
    EndpointUnknown,
    Executor,
    FarcallError,
    File,
    FunctionUnknown,
    InvalidRequest,
    PayloadTooLarge,
    TaskCancelled,
    TaskFailed,
    TaskPending,
    TaskUnknown,
    Unsupported,
)
from farcall._client import connection_of
from farcall.testing import FakeCloud
from farcall_common.errors import (
    BlobUnknown,
    Conflict,
    ContainerUnknown,
    Forbidden,
    NoForwarder,
    NotFound,
    TaskGroupUnknown,
    TaskIdReused,
)
from farcall_common.file_arguments import local_path, placed, without_files
from farcall_common.payload import Serializer, describe_exception
from farcall_common.ssh_signatures import AllowedSigners, statement
from farcall_common.store.model import TaskEvent, TaskResult
from farcall_common.wire import Reporter, TaskState, new_task_id
from farcall_lambdas.settings import ApiSettings
from tests.support.memory_api import MemoryApi
from tests.support.stores import FakeBlobs
from tests.unit.test_ssh_signatures import KEY, line, write_key
from tests.waiting import WAIT_S

serializer = Serializer()


def divide(a: float, b: float = 1) -> float:
    return a / b


def repeat(text: str, times: int) -> str:
    return text * times


def text_of(file: File) -> str:
    return file.path.read_text()


class Cloud(Protocol):
    """A deployment with one endpoint that does nothing by itself."""

    client: Client
    endpoint_id: str

    def run_what_waits(self) -> None: ...


class Fake:
    def __init__(self) -> None:
        self.cloud = FakeCloud(workers=0)
        self.client = self.cloud.client()
        self.endpoint_id = self.cloud.endpoint_id

    def run_what_waits(self) -> None:
        self.cloud.run_waiting()


class Real:
    """The real routes and services over fake stores, and an endpoint of a few lines."""

    def __init__(self, settings: ApiSettings | None = None) -> None:
        self.api = MemoryApi(settings=settings)
        self.client = Client("https://farcall.test", "any-token", transport=httpx.MockTransport(self._answer))
        self.endpoint_id = self.api.endpoint(endpoint_name="memory")

    def _answer(self, request: httpx.Request) -> httpx.Response:
        blobs = self.api.stores.blobs
        assert isinstance(blobs, FakeBlobs)
        url = str(request.url)
        if url.startswith("http://blobs.test/"):
            memory_url = url.replace("http://blobs.test/", "memory://blobs/")
            if request.method == "PUT":
                blobs.put(memory_url, request.content)
                return httpx.Response(200)
            return httpx.Response(200, content=blobs.fetch(memory_url))
        path = request.url.raw_path.decode()
        headers = {"X-Farcall-Accept": request.headers["x-farcall-accept"]}
        answer = self.api.call(request.method, path, request.content.decode() or None, headers=headers)
        return httpx.Response(answer.status, json=_with_reachable_blobs(answer.body), headers=answer.headers)

    def run_what_waits(self) -> None:
        records = self.api.stores
        results = []
        for task in records.tasks.list_open_tasks(self.endpoint_id):
            found = records.functions.get_bodies([(task.function_id, task.function_hash)])
            code = found[task.function_id][task.function_hash].body
            payload = task.payload or self.api.stores.blobs.read(task.payload_ref.blob_key)  # type: ignore[union-attr]
            result = TaskResult(task.task_id, self.endpoint_id, 1, TaskState.SUCCESS, Reporter.AGENT)
            try:
                with placed(lambda file: str(local_path(file.url))):
                    args, kwargs = serializer.unpack_call(without_files(payload))
                value = serializer.serialize(serializer.unpack_function(code)(*args, **kwargs))
                fields: dict[str, Any] = {"result": value}
                if len(value) > 64 * 1024:
                    fields = {"result_ref": self.api.stores.blobs.write(f"{task.owner_id}/{uuid.uuid4()}", value)}
            except ArithmeticError as error:
                record = describe_exception(error, attempt=1, endpoint_id=self.endpoint_id)
                fields = {"state": TaskState.FAILED, "error": record}
            results.append(msgspec.structs.replace(result, **fields))
        records.tasks.record_results(results, at=dt.datetime.now(dt.UTC))


def _with_reachable_blobs(body: Any) -> Any:
    """Addresses that httpx takes, for those that only the fake store does."""
    match body:
        case dict():
            return {key: _with_reachable_blobs(value) for key, value in body.items()}
        case str():
            return body.replace("memory://blobs/", "http://blobs.test/")
    return body


@pytest.fixture(params=["fake", "real"])
def cloud(request: pytest.FixtureRequest) -> Iterator[Cloud]:
    cloud: Cloud = Fake() if request.param == "fake" else Real()
    with cloud.client:
        yield cloud


def run_until_done(cloud: Cloud, future: concurrent.futures.Future[Any]) -> None:
    """An executor sends when it likes to."""
    deadline = time.monotonic() + WAIT_S
    while not future.done() and time.monotonic() < deadline:
        cloud.run_what_waits()
        concurrent.futures.wait([future], timeout=0.02)


def test_a_call_from_start_to_end(cloud: Cloud) -> None:
    client = cloud.client
    function_id = client.register_function(divide, description="Shares out.", metadata={"v": 2})
    task_id = client.run(6, b=3, endpoint_id=cloud.endpoint_id, function_id=function_id)
    with pytest.raises(TaskPending):
        client.get_result(task_id)
    assert client.get_task(task_id).pending
    cloud.run_what_waits()
    assert client.get_result(task_id) == 2.0
    assert client.get_result(task_id) == 2.0  # reading changes nothing
    info = client.get_batch_result([task_id])[task_id]
    assert (info.state, info.endpoint_id, info.function_id) == ("success", cloud.endpoint_id, function_id)
    assert info.finished_at is not None
    events = client.get_task_events(task_id)
    assert events[0]["state"] == "received"
    assert events[-1]["state"] == "success"
    assert {"state", "reporter", "at", "attempt", "detail"} <= events[0].keys()
    (entry,) = client.get_tasks(state="success")
    assert entry["task_id"] == task_id
    assert {"status", "task_group_id", "endpoint_id", "function_id", "attempt"} <= entry.keys()
    assert entry["finished_at"] >= 0
    assert client.get_tasks(state="running") == []
    assert client.get_task_group(info.task_group_id) == [task_id]


def test_failures_keep_their_traceback(cloud: Cloud) -> None:
    client = cloud.client
    task_id = client.run(1, 0, endpoint_id=cloud.endpoint_id, function_id=client.register_function(divide))
    cloud.run_what_waits()
    with pytest.raises(TaskFailed, match="ZeroDivisionError") as caught:
        client.get_result(task_id)
    assert f"Remote traceback (endpoint {cloud.endpoint_id}, attempt 1):" in caught.value.__notes__[0]
    assert client.get_tasks()[0]["error"]["exception_type"] == "ZeroDivisionError"


def test_big_arguments_and_results_are_blobs(cloud: Cloud) -> None:
    client = cloud.client
    length = client.register_function(len)
    repetition = client.register_function(repeat)
    first = client.run(b"x" * 300_000, endpoint_id=cloud.endpoint_id, function_id=length)
    second = client.run("ab", 200_000, endpoint_id=cloud.endpoint_id, function_id=repetition)
    cloud.run_what_waits()
    assert client.get_result(first) == 300_000
    assert client.get_result(second) == "ab" * 200_000


def test_an_executor_gets_its_results(cloud: Cloud) -> None:
    with Executor(cloud.endpoint_id, client=cloud.client) as executor:
        futures = [executor.submit(divide, n) for n in range(50)]
        big = executor.submit(len, b"x" * 100_000)
        assert executor._engine.flush(WAIT_S)
        cloud.run_what_waits()
        assert [future.result(WAIT_S) for future in futures] == list(range(50))
        assert big.result(WAIT_S) == 100_000


@pytest.mark.parametrize("size", [5, 80_000])
def test_a_call_with_a_file(cloud: Cloud, tmp_path: Path, size: int) -> None:
    (tmp_path / "data.txt").write_text("12345")
    file, client = File((tmp_path / "data.txt").as_uri()), cloud.client
    function_id = client.register_function(text_of)
    task_id = client.run(file, endpoint_id=cloud.endpoint_id, function_id=function_id)
    with Executor(cloud.endpoint_id, client=client) as executor:
        future = executor.submit(lambda files, _: files[0].url, [file], bytes(size))  # inline, and in a blob
        run_until_done(cloud, future)
        assert future.result() == file.url
    assert client.get_result(task_id) == "12345"


def test_a_repeated_submit_is_harmless_and_a_reused_id_is_refused(cloud: Cloud) -> None:
    client, path = cloud.client, f"/v3/endpoints/{cloud.endpoint_id}/submit"
    function_id, task_id, group_id = client.register_function(divide), new_task_id(), str(uuid.uuid4())
    body = {"task_group_id": group_id, "tasks": {function_id: ["payload"]}, "task_ids": {function_id: [task_id]}}
    answers = [connection_of(client).api.http.call("POST", path, body=body) for _ in range(2)]
    for answer in answers:
        assert answer["tasks"] == {function_id: [task_id]}
        assert (answer["task_group_id"], answer["endpoint_id"]) == (group_id, cloud.endpoint_id)
        assert answer["request_id"]
    with pytest.raises(TaskIdReused):
        connection_of(client).api.http.call("POST", path, body=body | {"tasks": {function_id: ["another"]}})
    assert len(client.get_tasks()) == 1


def test_a_waiting_task_has_a_reason(cloud: Cloud) -> None:
    client = cloud.client
    function_id = client.register_function(divide)
    first, second = (client.run(1, n, endpoint_id=cloud.endpoint_id, function_id=function_id) for n in (1, 2))
    why = client.why(second)
    assert (why.reason, why.state, why.queue_position, why.queue_depth) == ("ENDPOINT_NEVER_SEEN", "received", 1, 2)
    assert (why.task_id, why.endpoint_id, why.endpoint_online) == (second, cloud.endpoint_id, False)
    assert "was never online" in str(why)
    assert why.state_age_s >= 0
    assert client.why(first).queue_position == 0
    cloud.run_what_waits()
    assert client.why(first).reason == "ENDED"
    with Executor(cloud.endpoint_id, client=client) as executor:
        future = executor.submit(divide, 5)
        dependent = executor.submit(divide, future, 2)
        while future.why().reason == "NOT_SENT":
            pass
        assert future.why().reason == "ENDPOINT_NEVER_SEEN"
        waits = dependent.why()
        assert (waits.reason, waits.state) == ("WAITING_FOR_INPUTS", "unsent")
        assert future.task_id in waits.text
        cloud.run_what_waits()
        assert future.result(WAIT_S) == 5
        assert future.why().reason == "ENDED"
        assert executor._engine.flush(WAIT_S)
        assert dependent.why().reason == "ENDPOINT_NEVER_SEEN"
        assert dependent.cancel()
        assert "cancelled" in dependent.why().text


def test_cancelling(cloud: Cloud) -> None:
    client = cloud.client
    task_id = client.run(1, endpoint_id=cloud.endpoint_id, function_id=client.register_function(divide))
    unknown_id = str(uuid.uuid4())
    outcomes = client.cancel_many([task_id, unknown_id])
    assert (outcomes[task_id]["outcome"], outcomes[unknown_id]["outcome"]) == ("cancelled", "unknown")
    assert client.cancel(task_id)["outcome"] == "finished"
    with pytest.raises(TaskCancelled):
        client.get_result(task_id)


def test_keys_of_an_endpoint_are_listed_and_unknown_ones_not_revoked(cloud: Cloud) -> None:
    assert cloud.client.get_endpoint_keys(cloud.endpoint_id) == []
    with pytest.raises(NotFound):
        cloud.client.revoke_endpoint_key(cloud.endpoint_id, "k" * 40)


def test_the_owner_of_an_endpoint_lists_and_cancels_its_open_tasks(cloud: Cloud) -> None:
    client = cloud.client
    one, other = client.register_function(divide), client.register_function(repeat)
    first = client.run(1, endpoint_id=cloud.endpoint_id, function_id=one)
    second, third = (client.run("a", 2, endpoint_id=cloud.endpoint_id, function_id=other) for _ in range(2))

    [shown] = client.iter_endpoint_tasks(cloud.endpoint_id, function_id=one)
    assert (shown["task_id"], shown["function_id"], shown["function_version"]) == (first, one, 1)
    assert shown["age_s"] >= 0
    everything = list(client.iter_endpoint_tasks(cloud.endpoint_id, submitter=shown["submitter"]))
    assert {each["task_id"] for each in everything} == {first, second, third}

    outcomes = client.cancel_endpoint_tasks(cloud.endpoint_id, [first])
    assert {task_id: each["outcome"] for task_id, each in outcomes.items()} == {first: "cancelled"}
    outcomes = client.cancel_endpoint_tasks(cloud.endpoint_id, function_id=other)
    assert {task_id: each["outcome"] for task_id, each in outcomes.items()} == dict.fromkeys(
        (second, third), "cancelled"
    )
    assert list(client.iter_endpoint_tasks(cloud.endpoint_id)) == []
    for wanted in ({}, {"task_ids": [first], "submitter": shown["submitter"]}):
        with pytest.raises(InvalidRequest):
            client.cancel_endpoint_tasks(cloud.endpoint_id, **wanted)


def test_calls_are_memoized_on_request(cloud: Cloud) -> None:
    client = cloud.client
    function_id = client.register_function(divide)

    def run(*args: float, memoize: bool | None = None, **kwargs: Any) -> str:
        return client.run(*args, endpoint_id=cloud.endpoint_id, function_id=function_id, memoize=memoize, **kwargs)

    first = run(6, b=3, memoize=True)
    cloud.run_what_waits()
    second = run(6, b=3, memoize=True)
    assert client.get_result(second) == 2.0
    assert client.get_task(second).details["memoized_from"] == first
    assert client.get_task(second).attempt == 0
    assert client.get_task(run(6, b=3)).pending
    assert client.get_task(run(6, b=4, memoize=True)).pending
    with Executor(cloud.endpoint_id, client=client, memoize=True) as executor:
        assert executor.submit(divide, 6, b=3).result(WAIT_S) == 2.0
        pending = executor.options(memoize=False).submit(divide, 6, b=3)
        assert executor.submit(divide, a=6, b=3).cancel()
        assert executor._engine.flush(WAIT_S)
        cloud.run_what_waits()
        assert pending.result(WAIT_S) == 2.0


def test_a_function_can_be_memoized_for_all_its_calls(cloud: Cloud) -> None:
    client = cloud.client
    function_id = client.register_function(divide, memoize=True)
    client.run(1, 2, endpoint_id=cloud.endpoint_id, function_id=function_id)
    cloud.run_what_waits()
    with Executor(cloud.endpoint_id, client=client) as executor:
        assert executor.submit_to_registered_function(function_id, (1, 2)).result(WAIT_S) == 0.5
    assert client.get_function(function_id)["metadata"]["memoize"] is True


def test_a_task_that_has_ended_runs_again_as_a_new_one(cloud: Cloud) -> None:
    function_id = cloud.client.register_function(divide)
    task_id = cloud.client.run(6, 3, endpoint_id=cloud.endpoint_id, function_id=function_id)
    with pytest.raises(Conflict):
        cloud.client.retry(task_id)
    cloud.run_what_waits()
    again = cloud.client.retry(task_id)
    cloud.run_what_waits()
    info = cloud.client.get_task(again)
    assert (info.result(), info.retry_of, again != task_id) == (2.0, task_id, True)
    with pytest.raises(Conflict):
        cloud.client.discard(task_id)
    with pytest.raises(TaskUnknown):
        cloud.client.retry(str(uuid.uuid4()))


def test_tasks_and_audit_records_are_read_in_pages(cloud: Cloud) -> None:
    function_id = cloud.client.register_function(divide)
    ids = [cloud.client.run(n, 1, endpoint_id=cloud.endpoint_id, function_id=function_id) for n in range(5)]
    assert {task["task_id"] for task in cloud.client.iter_tasks(page=2)} == set(ids)
    assert len(cloud.client.get_tasks(limit=3)) == 3
    assert list(cloud.client.iter_tasks(until=1.0)) == []
    submits = [entry for entry in cloud.client.iter_audit() if entry["action"] == "tasks.submit"]
    assert [(entry["object_id"], entry["detail"]["tasks"]) for entry in submits] == [(cloud.endpoint_id, 1)] * 5


def test_usage_is_summed(cloud: Cloud) -> None:
    function_id = cloud.client.register_function(divide)
    today = dt.datetime.now(dt.UTC).date()
    days: dict[str, Any] = {"since": today - dt.timedelta(1), "until": today + dt.timedelta(1)}
    assert list(cloud.client.iter_usage()) == []
    for divisor in (1, 2, 0):
        cloud.client.run(1, divisor, endpoint_id=cloud.endpoint_id, function_id=function_id)
    cloud.run_what_waits()
    [entry] = cloud.client.iter_usage(["day", "function", "endpoint"], endpoint_id=cloud.endpoint_id, **days)
    assert (entry["day"], entry["function_id"], entry["endpoint_id"]) == (str(today), function_id, cloud.endpoint_id)
    assert (entry["tasks"], entry["failed"], entry["gpu_s"], entry["stages"]) == (3, 1, 0.0, 0)
    assert entry["core_s"] == entry["wall_s"] >= 0.0
    sums = ("tasks", "failed", "wall_s", "core_s", "gpu_s", "stages")
    assert entry.keys() == {"day", "function_id", "endpoint_id", *sums}
    [account] = cloud.client.iter_usage(["account"], **days)
    assert account["account"] == ""
    assert [each["tasks"] for each in cloud.client.iter_usage(["identity"], of="endpoints", **days)] == [3]
    assert list(cloud.client.iter_usage(since=days["since"], until=days["since"])) == []
    assert list(cloud.client.iter_usage(endpoint_id=uuid.uuid4(), **days)) == []
    with pytest.raises(Forbidden):
        list(cloud.client.iter_usage(of="all"))


def test_unknown_ids(cloud: Cloud) -> None:
    client, unknown_id = cloud.client, str(uuid.uuid4())
    function_id = client.register_function(divide)
    with pytest.raises(FunctionUnknown):
        client.get_function(unknown_id)
    with pytest.raises(FunctionUnknown):
        client.delete_function(unknown_id)
    with pytest.raises(FunctionUnknown):
        client.run(1, endpoint_id=cloud.endpoint_id, function_id=unknown_id)
    with pytest.raises(EndpointUnknown):
        client.run(1, endpoint_id=unknown_id, function_id=function_id)
    for ask in (client.get_endpoint, client.get_endpoint_status, client.get_allowed_functions):
        with pytest.raises(EndpointUnknown):
            ask(unknown_id)
    for ask_task in (client.get_task, client.get_task_events, client.cancel, client.why):
        with pytest.raises(TaskUnknown):
            ask_task(unknown_id)
    with pytest.raises(TaskGroupUnknown):
        client.get_task_group(unknown_id)
    info = client.get_batch_result([unknown_id])[unknown_id]
    assert info.state is None
    assert not info.pending
    with pytest.raises(TaskUnknown):
        info.result()


def test_functions(cloud: Cloud) -> None:
    client = cloud.client
    function_id = client.register_function(divide, name="share out", description="Fairly.", metadata={"v": 2})
    client.register_function(repeat, public=True)
    shown = client.get_function(function_id)
    assert shown["function_uuid"] == function_id
    assert shown["function_name"] == "share out"
    assert shown["metadata"]["v"] == 2
    assert serializer.unpack_function(shown["function_code"].encode())(6, 3) == 2
    assert {each["function_name"] for each in client.get_functions()} == {"share out", "repeat"}
    assert len(client.get_functions(limit=1)) == 1
    (found,) = client.get_functions(search="fair")
    assert found["function_uuid"] == function_id
    assert found["created_at"] > 0
    assert {"function_hash", "version", "description", "public", "metadata"} <= found.keys()
    client.delete_function(function_id)
    with pytest.raises(FunctionUnknown):
        client.get_function(function_id)


def test_versions_of_a_function(cloud: Cloud) -> None:
    client = cloud.client
    function_id = client.register_function(divide, metadata={"v": 1}, memoize=True)
    assert client.update_function(function_id, repeat) == 2
    assert client.update_function(function_id, repeat) == 2
    assert client.update_function(function_id, description="Both.", public=True) == 2
    assert [each["version"] for each in client.get_function_versions(function_id)] == [2, 1]
    first, newest = client.get_function(function_id, version=1), client.get_function(function_id)
    assert (first["metadata"]["v"], first["metadata"]["memoize"], first["description"]) == (1, True, "Both.")
    assert ("v" in newest["metadata"], newest["metadata"]["memoize"]) == (False, True)
    assert client.get_functions()[0]["version"] == 2
    ids = [client.run(6, 3, endpoint_id=cloud.endpoint_id, function_id=f"{function_id}@1")]
    ids.append(client.run("ab", 2, endpoint_id=cloud.endpoint_id, function_id=function_id))
    cloud.run_what_waits()
    assert [client.get_result(task_id) for task_id in ids] == [2, "abab"]
    versions = {each["task_id"]: each["function_version"] for each in client.get_tasks()}
    assert versions == dict(zip(ids, (1, 2), strict=True))
    with pytest.raises(FunctionUnknown):
        client.run(endpoint_id=cloud.endpoint_id, function_id=f"{function_id}@3")


def test_signatures_of_a_function(cloud: Cloud, tmp_path: Path) -> None:
    client, key = cloud.client, write_key(tmp_path, KEY)
    signers = AllowedSigners.parse(line("ssh-ed25519"), source="signers")

    def is_signed() -> bool:
        newest = client.get_function(function_id)
        message = statement(newest["function_name"], hashlib.sha256(newest["function_code"].encode()).hexdigest())
        signature = newest["metadata"].get("ssh_signature")
        return bool(signature and signers.verify(message, signature))

    function_id = client.register_function(divide, metadata={"v": 1}, sign_with=key)
    assert is_signed()
    assert client.update_function(function_id, metadata={"v": 2}) == 2
    assert is_signed(), "metadata are not signed"
    assert client.update_function(function_id, repeat) == 3
    assert not is_signed()
    assert client.update_function(function_id, sign_with=key) == 4
    assert is_signed()
    assert client.update_function(function_id, name="times") == 5
    assert not is_signed()
    assert client.update_function(function_id, divide, name="over", sign_with=key) == 6
    assert is_signed()


def test_aliases(cloud: Cloud) -> None:
    client = cloud.client
    function_id = client.register_function(divide)
    client.update_function(function_id, repeat)
    client.set_alias("stable", function_id, version=1)
    client.set_alias("newest", function_id)
    assert client.find_function("stable")["reference"] == f"{function_id}@1"
    task_id = client.run(6, 3, endpoint_id=cloud.endpoint_id, function_id="stable")
    cloud.run_what_waits()
    assert client.get_result(task_id) == 2
    with Executor(cloud.endpoint_id, client=client) as executor:
        future = executor.submit_to_registered_function("newest", ["ab", 2])
        with pytest.raises(FunctionUnknown):
            executor.submit_to_registered_function("unheard-of")
        run_until_done(cloud, future)
        assert future.result(0) == "abab"
    client.set_alias("stable", function_id)
    assert [(each["name"], each["version"]) for each in client.get_aliases()] == [("newest", None), ("stable", None)]
    client.delete_alias("stable")
    with pytest.raises(FunctionUnknown):
        client.run(endpoint_id=cloud.endpoint_id, function_id="stable")


def test_containers(cloud: Cloud) -> None:
    client = cloud.client
    container_id = client.register_container("/images/xtal.sif", "singularity", "xtal", "diffraction")
    assert client.register_container("/images/xtal.sif", "singularity", "xtal") == container_id
    with pytest.raises(Conflict):
        client.register_container("/images/other.sif", "singularity", "xtal")
    shown = client.get_container("xtal")
    assert client.get_container(container_id, "singularity") == shown == client.get_containers()[0]
    assert (shown["location"], shown["description"]) == ("/images/xtal.sif", "diffraction")
    assert client.get_container_build_status(container_id) == "provided"
    function_id = client.register_function(divide)
    with pytest.raises(EndpointIncompatible, match=r"xtal \(singularity\), and endpoint .* runs no containers"):
        client.run(1, endpoint_id=cloud.endpoint_id, function_id=function_id, container="xtal")
    with Executor(cloud.endpoint_id, client=client, container_id=container_id) as executor:
        assert executor.options(container_id=None).container_id is None
        with pytest.raises(EndpointIncompatible):
            executor.submit(divide, 1).result(WAIT_S)
    client.delete_container("xtal")
    with pytest.raises(ContainerUnknown):
        client.get_container("xtal")


def test_containers_of_packages(cloud: Cloud) -> None:
    client = cloud.client
    container_id = client.register_container(requirements=["polars==1.*"], name="frames", preload=["polars"])
    shown = client.get_container("frames")
    assert (shown["container_uuid"], shown["type"], shown["location"]) == (container_id, "uv", "")
    assert (shown["requirements"], shown["preload"]) == (["polars==1.*"], ["polars"])
    with pytest.raises(Conflict):
        client.register_container(requirements=["polars==0.*"], name="frames")
    for wrong in (
        {"container_type": "aptainer", "location": "x"},
        {"container_type": "conda", "location": "base"},
        {"location": "x"},
    ):
        with pytest.raises(InvalidRequest):
            client.register_container(**wrong)


def test_a_task_never_runs_outside_its_environment(cloud: Cloud) -> None:
    client = cloud.client
    client.register_container("/images/xtal.sif", "singularity", "xtal")
    function_id = client.register_function(divide, container="xtal")
    packed = client.register_function(divide, requirements=["polars"])
    assert client.get_function(function_id)["metadata"]["task_environment"]["name"] == "xtal"
    for called, wanted in ((function_id, "xtal"), (packed, "uv:polars")):
        with pytest.raises(EndpointIncompatible, match=rf"{wanted} .*, and endpoint .* runs no containers"):
            client.run(1, endpoint_id=cloud.endpoint_id, function_id=called)
    with Executor(cloud.endpoint_id, client=client, requirements=["polars"]) as executor:
        with pytest.raises(EndpointIncompatible, match="uv:polars"):
            executor.submit(divide, 1).result(WAIT_S)
        with pytest.raises(EndpointIncompatible, match="docker:python"):
            executor.options(environment={"type": "docker", "location": "python"}).submit(divide, 1).result(WAIT_S)
    assert client.update_function(function_id, name="other") == 1
    assert client.update_function(function_id, container="") == 2
    assert "task_environment" not in client.get_function(function_id)["metadata"]
    with pytest.raises(ContainerUnknown):
        client.update_function(function_id, container="unheard-of")


def test_groups(cloud: Cloud) -> None:
    client = cloud.client
    function_id = client.register_function(divide)
    ids = []
    for size in (1, 3):
        batch = client.create_batch()
        for _ in range(size):
            batch.add(function_id, [1])
        ids.append(client.batch_run(cloud.endpoint_id, batch)["task_group_id"])
        cloud.run_what_waits()
    groups = {each["task_group_id"]: (each["tasks"], each["states"]) for each in client.get_task_groups()}
    assert groups == {ids[0]: (1, {"success": 1}), ids[1]: (3, {"success": 3})}
    assert len(client.get_task_groups(limit=1)) == 1


def test_the_callers_identity(cloud: Cloud) -> None:
    before = cloud.client.whoami()
    cloud.client.register_function(divide)
    who = cloud.client.whoami()
    assert who["identity_id"] == cloud.client.get_endpoints(role="owner")[0]["owner"]
    assert {"username", "linked", "provider", "limits"} <= who.keys()
    assert who["limits"]["functions"]["used"] == before["limits"]["functions"]["used"] + 1


def test_endpoints(cloud: Cloud) -> None:
    client = cloud.client
    (entry,) = client.get_endpoints()
    assert entry["uuid"] == cloud.endpoint_id
    assert {"name", "display_name", "owner"} <= entry.keys()
    assert client.get_endpoints(role="owner") == [entry]
    assert client.get_endpoint(cloud.endpoint_id)["uuid"] == cloud.endpoint_id
    status = client.get_endpoint_status(cloud.endpoint_id)
    assert status["status"] == "offline"
    assert set(status["details"]) == {
        "managers",
        "total_workers",
        "idle_workers",
        "pending_tasks",
        "outstanding_tasks",
    }
    assert client.get_allowed_functions(cloud.endpoint_id)["restricted"] is False


def test_blobs_must_exist_and_fit(cloud: Cloud) -> None:
    client, function_id = cloud.client, cloud.client.register_function(divide)
    ref = connection_of(client).blobs.upload(b"data")
    missing = {"blob_key": ref.blob_key[:-64] + "0" * 64, "size_bytes": 4, "sha256": "0" * 64}
    body = {"tasks": {function_id: [missing]}, "task_ids": {function_id: [new_task_id()]}}
    with pytest.raises(BlobUnknown):
        connection_of(client).api.http.call("POST", f"/v3/endpoints/{cloud.endpoint_id}/submit", body=body)
    with pytest.raises(PayloadTooLarge):
        connection_of(client).api.grant_blob(size_bytes=11 * 1024 * 1024, sha256="0" * 64)


@pytest.mark.parametrize("body", [b"{", b"[]", b"nonsense"])
def test_malformed_requests(cloud: Cloud, body: bytes) -> None:
    with pytest.raises(InvalidRequest):
        connection_of(cloud.client).api.http.call("POST", "/v3/functions", body=body)


def test_unknown_routes(cloud: Cloud) -> None:
    with pytest.raises(FarcallError, match="NOT_FOUND"):
        connection_of(cloud.client).api.http.call("GET", "/v9/everything")


def test_there_is_no_stream_without_a_forwarder(cloud: Cloud) -> None:
    with pytest.raises(NoForwarder) as caught:
        connection_of(cloud.client).api.open_stream("0" * 40)
    assert caught.value.record.retryable
    assert caught.value.record.retry_after_s


def test_the_version(cloud: Cloud) -> None:
    assert {"api", "min_sdk_version", "min_ep_version", "min_endpoint_version"} <= cloud.client.version_check().keys()


def test_a_history_of_many_pages_is_read_whole() -> None:
    real = Real(ApiSettings(max_response_bytes=1200))
    with real.client as client:
        function_id = client.register_function(divide)
        task_id = client.run(6, b=3, endpoint_id=real.endpoint_id, function_id=function_id)
        at = dt.datetime.now(dt.UTC)
        moves = [TaskEvent(task_id, TaskState.RUNNING, Reporter.AGENT, at, attempt=number) for number in range(1, 8)]
        real.api.stores.tasks.record_transitions(moves)
        assert [event["attempt"] for event in client.get_task_events(task_id)] == list(range(8))


def test_byte_code_that_an_endpoint_cannot_run_is_refused() -> None:
    real = Real()
    other = {"public_key": "k" * 40, "python_version": "3.99.0"}
    real.api.call("POST", f"/v3/endpoints/{real.endpoint_id}/connect", other)
    with real.client as client:
        offset = 5
        function_id = client.register_function(lambda x: x + offset)
        with pytest.raises(EndpointIncompatible, match=r"and endpoint memory runs Python 3\.99"):
            client.run(1, endpoint_id=real.endpoint_id, function_id=function_id)
        with Executor(real.endpoint_id, client=client) as executor:
            with pytest.raises(EndpointIncompatible, match="its source text alone is not enough"):
                executor.submit(lambda x: x + offset, 1).result(WAIT_S)
            future = executor.submit(divide, 1, 2)
            assert executor._engine.flush(WAIT_S)
            real.run_what_waits()
            assert future.result(WAIT_S) == 0.5
        assert client.get_endpoint(real.endpoint_id)["runtime"]["python_version"] == "3.99.0"


def test_a_configuration_that_no_endpoint_takes_is_refused_once() -> None:
    real = Real()
    with (
        real.client as client,
        Executor(real.endpoint_id, client=client, user_endpoint_config={"queue": "debug"}) as executor,
    ):
        futures = [executor.submit(divide, n) for n in range(10)]
        for future in futures:
            with pytest.raises(Unsupported, match="user_endpoint_config"):
                future.result(WAIT_S)
        executor.user_endpoint_config = None
        last = executor.submit(divide, 1)
        assert executor._engine.flush(WAIT_S)
        real.run_what_waits()
        assert last.result(WAIT_S) == 1


def test_endpoints_can_be_registered_and_changed() -> None:
    with Real().client as client:
        function_id = client.register_function(divide)
        endpoint_id = client.register_endpoint("lab", metadata={"hostname": "n1"}, public=True)["endpoint_id"]
        client.register_endpoint("lab", endpoint_id, display_name="The lab", allowed_functions=[uuid.UUID(function_id)])
        shown = client.get_endpoint_metadata(uuid.UUID(endpoint_id))
        assert (shown["name"], shown["display_name"], shown["public"]) == ("lab", "The lab", True)
        assert shown["hostname"] == "n1"
        assert client.get_allowed_functions(endpoint_id)["functions"] == [function_id]
        client.register_endpoint("lab", endpoint_id, allowed_functions=[f"{function_id.upper()}@1"])
        assert client.get_allowed_functions(endpoint_id)["functions"] == [f"{function_id}@1"]
        with pytest.raises(ValueError, match="is not a UUID"):
            client.register_endpoint("lab", endpoint_id, allowed_functions=["square"])
        for asked in ({"auth_policy": function_id}, {"high_assurance": True}, {"admins": [function_id]}):
            with pytest.raises(Unsupported, match=next(iter(asked))):
                client.register_endpoint("lab", **asked)


def test_remembered_results_that_do_not_fit_one_answer_all_arrive() -> None:
    real = Real(settings=ApiSettings(max_response_bytes=100_000))
    with real.client as client, Executor(real.endpoint_id, client=client, memoize=True) as executor:
        first = executor.submit(repeat, "x", 30_000)
        assert executor._engine.flush(WAIT_S)
        real.run_what_waits()
        assert len(first.result(WAIT_S)) == 30_000
        again = [executor.submit(repeat, "x", 30_000) for _ in range(20)]
        assert {len(future.result(WAIT_S)) for future in again} == {30_000}


def test_results_that_do_not_fit_one_answer_all_arrive() -> None:
    real = Real(settings=ApiSettings(max_response_bytes=100_000))
    with real.client as client:
        function_id = client.register_function(repeat)
        batch = client.create_batch()
        ids = [batch.add(function_id, ("x", 30_000 + n)) for n in range(20)]
        client.batch_run(real.endpoint_id, batch)
        real.run_what_waits()
        assert [len(info.result()) for info in client.get_batch_result(ids).values()] == list(range(30_000, 30_020))
