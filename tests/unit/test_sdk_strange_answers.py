"""Answers that a gateway or a proxy changed: requests are repeated, and no future fails whose task runs."""

from __future__ import annotations

import collections
import contextlib
import functools
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import httpx
import pytest

from farcall import Client, ComputeFuture, Executor, Settings
from farcall._api import Api, Blobs, with_new_address
from farcall._client import connection_of
from farcall._future import TaskRecord
from farcall._http import Http
from farcall._results import Collector
from farcall._task_output import OutputCursor
from farcall.testing import FakeCloud
from farcall_common.backoff import Backoff
from farcall_common.errors import (
    ConfigurationError,
    FarcallError,
    Forbidden,
    FunctionUnknown,
    InvalidRequest,
    ProtocolError,
    RequestTooLarge,
    Unauthenticated,
    Unavailable,
)
from farcall_common.payload import JSONData, Serializer
from tests.waiting import WAIT_S

Change = Callable[[bytes], httpx.Response]

YEARS = {"retry-after": "99999999"}
HTML = "<html>Please log in to the network</html>"
CHANGES: dict[str, Change] = {
    **{
        str(status): functools.partial(lambda status, _: httpx.Response(status, text=HTML), status)
        for status in (302, 401, 403, 404, 407, 413, 429, 451, 500, 502, 503, 504)
    },
    **{
        f"{status}-later": functools.partial(lambda status, _: httpx.Response(status, headers=YEARS), status)
        for status in (403, 429, 503)
    },
    "gateway-401": lambda _: httpx.Response(401, json={"message": "Unauthorized"}),
    "html": lambda _: httpx.Response(200, text=HTML),
    "empty": lambda _: httpx.Response(200),
    "half": lambda body: httpx.Response(200, content=body[: len(body) // 2]),
    "not-utf-8": lambda body: httpx.Response(200, content=b'"\xff"'),
    "nested": lambda _: httpx.Response(200, content=b"[" * 100_000),
    "encoding": lambda body: httpx.Response(200, headers={"content-encoding": "gzip"}, stream=httpx.ByteStream(body)),
    **{
        text: functools.partial(lambda text, _: httpx.Response(200, text=text), text)
        for text in ("[]", "null", "{}", '"x"', '{"results":{}}', '{"tasks":{}}', '{"results":null}', '{"error":"no"}')
    },
}
#: Ends of paths whose answers are changed.
ROUTES = ("/submit", "/batch_status", "")


class Proxy(httpx.BaseTransport):
    """Forwards requests to a cloud, and changes the first answers of some routes after one that it leaves as it is."""

    def __init__(self, cloud: FakeCloud, change: Change, *, route: str, times: int = 3) -> None:
        self.changed = 0
        self._cloud, self._change, self._route, self._times = cloud, change, route, times

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        response = self._cloud.transport.handle_request(request)
        if request.url.path == "/v3/whoami" or not request.url.path.endswith(self._route):
            return response
        if self.changed >= self._times:
            return response
        self.changed += 1
        return self._change(response.read())


def note(starts: str, key: int) -> int:
    """Note the start in a file, and return the key."""
    descriptor = os.open(starts, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(descriptor, f"{key}\n".encode())
    os.close(descriptor)
    return key


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("name", CHANGES)
def test_no_future_fails_and_no_task_starts_twice(
    cloud: FakeCloud, tmp_path: Path, name: str, route: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("farcall._http._LONGEST_WAIT_S", 0.0)
    proxy, starts = Proxy(cloud, CHANGES[name], route=route), str(tmp_path / "starts")
    with (
        Client("https://farcall.test", cloud.token, transport=proxy) as client,
        Executor(cloud.endpoint_id, client=client, idempotent=False) as executor,
    ):
        client.whoami()  # from now on the address is known to be right
        executor._engine._api.http._backoff = functools.partial(Backoff, first_s=0.0, most_s=0.0)
        futures = [executor.submit(note, starts, key) for key in range(3)]
        assert [future.result(WAIT_S) for future in futures] == [0, 1, 2]
    assert proxy.changed
    assert collections.Counter(Path(starts).read_text().split()) == {"0": 1, "1": 1, "2": 1}


class Repeater(httpx.BaseTransport):
    """Forwards requests to a cloud, and answers each fourth request of a path as the one before it."""

    def __init__(self, cloud: FakeCloud) -> None:
        self.repeated: collections.Counter[str] = collections.Counter()
        self._cloud = cloud
        self._answers: dict[str, list[httpx.Response]] = collections.defaultdict(list)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        response = self._cloud.transport.handle_request(request)
        answers = self._answers[path := request.url.path]
        answers.append(response)
        if len(answers) % 4:
            return response
        self.repeated[path] += 1
        return httpx.Response(answers[-2].status_code, headers=answers[-2].headers, content=answers[-2].content)


def test_an_answer_to_an_earlier_request_is_repeated_until_it_is_to_this_one(cloud: FakeCloud) -> None:
    """Such an answer names another function or refuses another request."""
    repeater = Repeater(cloud)
    with Client("https://farcall.test", cloud.token, transport=repeater) as client:
        connection_of(client).api.http._backoff = functools.partial(Backoff, first_s=0.0, most_s=0.0)
        functions: list[Callable[..., Any]] = [abs, len, min, max, sum, pow, divmod]
        found = [client.get_function(client.register_function(each))["function_name"] for each in functions]
        assert found == [each.__name__ for each in functions]
    assert repeater.repeated["/v3/functions"] >= 2


class Time:
    """A clock that each request moves."""

    def __init__(self, step_s: float) -> None:
        self.now_s, self.step_s = 0.0, step_s

    def http(self, answer: Callable[[int], httpx.Response | Exception], *, retry_timeout_s: float = 300.0) -> Http:
        """A client whose requests are answered by their number."""
        self.requests: list[httpx.Request] = []

        def handle(request: httpx.Request) -> httpx.Response:
            self.now_s += self.step_s
            self.requests.append(request)
            response = answer(len(self.requests))
            if isinstance(response, Exception):
                raise response
            return response

        return Http(
            Settings("http://api.test", "token"),
            timeout_s=5,
            retry_timeout_s=retry_timeout_s,
            backoff=functools.partial(Backoff, first_s=0.0, most_s=0.0),
            transport=httpx.MockTransport(handle),
            clock=lambda: self.now_s,
        )


def strange(status: int, text: str = HTML) -> Callable[[int], httpx.Response]:
    """Strange answers after a good one."""
    return lambda number: httpx.Response(200, json={}) if number == 1 else httpx.Response(status, text=text)


@pytest.mark.parametrize(
    ("status", "error", "tolerated_s"),
    [
        (401, Unauthenticated, 30),
        (403, Forbidden, 30),
        (407, ConfigurationError, 30),
        (413, RequestTooLarge, 30),
        (404, ProtocolError, 300),
        (200, ProtocolError, 300),
    ],
)
@pytest.mark.parametrize("known", [True, False])
def test_answers_of_others_are_tolerated_if_the_address_is_known_to_be_right(
    status: int, error: type[FarcallError], tolerated_s: float, known: bool
) -> None:
    time = Time(step_s=10.0)
    http = time.http(strange(status) if known else lambda _: httpx.Response(status, text=HTML))
    if known:
        http.call("GET", "/x")
    began = time.now_s
    with pytest.raises(error) as caught:
        http.call("GET", "/x")
    assert caught.value.is_foreign
    assert time.now_s - began == (tolerated_s + 10.0 if known else 10.0)


def test_a_time_that_others_name_counts_up_to_the_longest_back_off() -> None:
    class Waits(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waited.append(timeout or 0.0)
            time.now_s += timeout or 0.0
            return False

    waited: list[float] = []
    time = Time(step_s=1.0)
    http = time.http(lambda _: httpx.Response(503, headers=YEARS), retry_timeout_s=25.0)
    with pytest.raises(Unavailable):
        http.call("GET", "/x", stop=Waits())
    assert waited == [10.0, 10.0, 2.0]


def test_a_refusal_counts_from_where_it_began() -> None:
    answers = [200, *[502] * 10, *[403] * 2, 200]
    time = Time(step_s=10.0)
    http = time.http(lambda number: httpx.Response(answers[number - 1], text="{}"))
    http.call("GET", "/x")
    assert http.call("GET", "/x") == {}


def test_a_refusal_by_farcall_is_raised_at_once() -> None:
    record = {"code": "FORBIDDEN", "message": "no", "hint": "", "fault": "caller", "retryable": False}
    time = Time(step_s=1.0)
    http = time.http(lambda number: httpx.Response(200 if number == 1 else 403, json=record))
    http.call("GET", "/x")
    with pytest.raises(Forbidden) as caught:
        http.call("GET", "/x")
    assert not caught.value.is_foreign
    assert len(time.requests) == 2


def test_a_firewall_that_refuses_a_payload_fails_its_call_only(
    cloud: FakeCloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    def handle(request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("/submit") and b"DROP TABLE" in request.content:
            refused.append(request)
            return httpx.Response(403, text=HTML)
        return cloud.transport.handle_request(request)

    refused: list[httpx.Request] = []
    monkeypatch.setattr("farcall._http.FOREIGN_RETRY_S", 0.2)
    with (
        Client("https://farcall.test", cloud.token, transport=httpx.MockTransport(handle)) as client,
        Executor(cloud.endpoint_id, client=client, serializer=Serializer(data=[JSONData()])) as executor,
    ):
        function_id = client.register_function(len)
        futures = [executor.submit_to_registered_function(function_id, (text,)) for text in ("a", "DROP TABLE", "b")]
        assert [futures[0].result(WAIT_S), futures[2].result(WAIT_S)] == [1, 1]
        with pytest.raises(Forbidden):
            futures[1].result(WAIT_S)
    assert refused


def test_a_request_that_is_too_large_for_a_proxy_is_split_at_once(cloud: FakeCloud) -> None:
    def handle(request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("/submit"):
            assert is_queued.wait(WAIT_S)
            sent.append(request.content)
            if len(request.content) > 1000:
                return httpx.Response(413, text=HTML)
        return cloud.transport.handle_request(request)

    is_queued, sent = threading.Event(), list[bytes]()
    with (
        Client("https://farcall.test", cloud.token, transport=httpx.MockTransport(handle)) as client,
        Executor(cloud.endpoint_id, client=client) as executor,
    ):
        function_id = client.register_function(abs)
        futures = [executor.submit_to_registered_function(function_id, (-key,)) for key in range(20)]
        is_queued.set()
        assert [future.result(WAIT_S) for future in futures] == list(range(20))
    assert any(len(each) > 1000 for each in sent)
    assert len(sent) == len(set(sent))


def test_a_post_is_repeated_before_the_address_is_known_as_it_may_have_been_accepted() -> None:
    time = Time(step_s=10.0)
    http = time.http(lambda number: httpx.Response(200, text=HTML if number < 3 else "{}"))
    assert http.call("POST", "/x") == {}


@pytest.mark.parametrize("method", ["upload", "download"])
@pytest.mark.parametrize("status", [200, 403, 404, 407, 413, 503])
def test_transfers_outlast_answers_of_a_proxy(method: str, status: int) -> None:
    def answer(number: int) -> httpx.Response:
        request = time.requests[-1]
        if request.url.host == "api.test":
            return httpx.Response(200, json={"blob_key": "k", "upload_url": "http://blobs.test/k", "headers": {}})
        if len([each for each in time.requests if each.url.host == "blobs.test"]) <= 2:
            return httpx.Response(status, text=HTML)
        return httpx.Response(200, content=b"" if request.method == "PUT" else b"data")

    time = Time(step_s=1.0)
    blobs = Blobs(Api(time.http(answer)))
    ref = blobs.upload(b"data")
    assert ref.size_bytes == 4
    if method == "download":
        time.requests.clear()
        if status in (403, 404, 407, 413):  # another address is requested, which only the reader of a task can do
            found = with_new_address(lambda: blobs.download(ref, "http://blobs.test/k"), stop=None)
        else:
            found = blobs.download(ref, "http://blobs.test/k")
        assert bytes(found) == b"data"


def test_a_transfer_is_repeated_for_the_time_of_its_caller() -> None:
    time = Time(step_s=30.0)
    blobs = Blobs(Api(time.http(lambda _: httpx.Response(503), retry_timeout_s=60.0)))
    with pytest.raises(Unavailable):
        blobs.upload(b"data", retry_timeout_s=3600.0)
    assert time.now_s > 3600.0


@pytest.mark.parametrize("status", [None, 403, 404, 407, 413, 503])
def test_large_arguments_and_results_are_repeated_as_long_as_the_executor_says(
    cloud: FakeCloud, status: int | None
) -> None:
    """The client itself does not repeat anything."""
    left = collections.Counter({"PUT": 3, "GET": 3})

    def handle(request: httpx.Request) -> httpx.Response:
        if request.url.host == "blobs.farcall.test" and left[request.method] > 0:
            left[request.method] -= 1
            if status is not None:
                return httpx.Response(status, text=HTML)
            raise httpx.ConnectError("refused")
        return cloud.transport.handle_request(request)

    transport = httpx.MockTransport(handle)
    with (
        Client("https://farcall.test", cloud.token, transport=transport, retry_timeout_s=0) as client,
        Executor(cloud.endpoint_id, client=client) as executor,
    ):
        executor._engine._api.http._backoff = functools.partial(Backoff, first_s=0.0, most_s=0.0)
        data = os.urandom(400_000)
        assert executor.submit(bytes, data).result(WAIT_S) == data
    assert not +left


def test_a_program_that_ends_does_not_wait_for_the_blob_store() -> None:
    program = """
import httpx
import farcall._engine
from farcall import Client, Executor
from farcall.testing import FakeCloud

farcall._engine._FLUSH_AT_EXIT_S = 0.2
cloud = FakeCloud()

def handle(request):
    if request.method == "PUT":
        raise httpx.ConnectError("refused")
    return cloud.transport.handle_request(request)

client = Client("https://farcall.test", cloud.token, transport=httpx.MockTransport(handle))
Executor(cloud.endpoint_id, client=client).submit(len, bytes(1_000_000))
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=WAIT_S, check=True)
    assert "calls that could not be sent" in ended.stderr


@pytest.mark.parametrize("answer", [{}, {"status": "resting"}, {"status": "success", "completion_t": "soon"}])
def test_a_task_fails_only_if_answers_about_it_stay_strange(cloud: FakeCloud, answer: dict[str, Any]) -> None:
    now_s = 0.0
    collector = Collector(cast("Any", None), on_finished=lambda: None, clock=lambda: now_s)
    future: ComputeFuture[Any] = ComputeFuture(
        TaskRecord("t", adopted=True), task_group_id="g", endpoint_id="e", owner=cast("Any", None)
    )
    collector.add(future)
    for now_s in (0.0, 29.0):  # noqa: B007 - the clock
        assert collector.take_polled([{"task_id": "t", **answer}]) == 0
    collector.take_polled([{"task_id": "t", "status": "running"}])
    for now_s in (31.0, 60.0):  # noqa: B007
        collector.take_polled([{"task_id": "t", **answer}])
        assert not future.done()
    now_s = 61.0
    collector.take_polled([{"task_id": "t", **answer}])
    assert isinstance(future.exception(0), ProtocolError)


@pytest.mark.parametrize("name", ["", ".", "a/b"])
def test_a_name_that_would_be_another_path_is_refused(cloud: FakeCloud, name: str) -> None:
    with cloud.client() as client:
        for call in (client.create_batch().add, client.get_function, client.delete_function):
            with pytest.raises((InvalidRequest, FunctionUnknown), match=re.escape(repr(name))):
                call(name)
        with pytest.raises(TypeError, match="Expected an id or an alias"):
            client.create_batch().add(cast("Any", None))


@pytest.mark.parametrize("path", ["/why", "/v3/batch_output"])
@pytest.mark.parametrize("field", ["endpoint", "qos", "state_age_s", "results"])
@pytest.mark.parametrize("value", [0, "x", [1], {"status": {}}, {"t": {"status": "running", "stdout": {"text": "x"}}}])
def test_strange_fields_fail_requests_and_no_thread(cloud: FakeCloud, path: str, field: str, value: object) -> None:
    def handle(request: httpx.Request) -> httpx.Response:
        response = cloud.transport.handle_request(request)
        if not request.url.path.endswith(path):
            return response
        return httpx.Response(response.status_code, json=json.loads(response.read()) | {field: value})

    transport = httpx.MockTransport(handle)
    with Client("https://farcall.test", cloud.token, transport=transport, retry_timeout_s=0) as client:
        task_id = client.run(-7, endpoint_id=cloud.endpoint_id, function_id=client.register_function(abs))
        cursor = OutputCursor("t")
        for look in (lambda: client.why(task_id), lambda: connection_of(client).output.read([cursor])):
            with contextlib.suppress(FarcallError):
                look()
