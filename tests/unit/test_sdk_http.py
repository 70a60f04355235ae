"""HTTP client: retries, and errors mapped to ours."""

from __future__ import annotations

import functools
import gzip
import os
import threading
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from farcall import EndpointIncompatible, Settings
from farcall._http import Http
from farcall_common.backoff import Backoff
from farcall_common.errors import (
    ConfigurationError,
    FarcallError,
    Fault,
    Forbidden,
    FunctionNotPermitted,
    FunctionUnknown,
    InvalidRequest,
    LimitExceeded,
    ProtocolError,
    RequestTooLarge,
    Unauthenticated,
    Unavailable,
)

AT_ONCE = functools.partial(Backoff, first_s=0.0, most_s=0.0)
Handler = Callable[[httpx.Request], httpx.Response]


def http(handler: Handler, *, retry_timeout_s: float = 60.0, api_url: str = "http://api.test") -> Http:
    settings = Settings(api_url, "secret-token")
    return Http(
        settings, timeout_s=5, retry_timeout_s=retry_timeout_s, backoff=AT_ONCE, transport=httpx.MockTransport(handler)
    )


def answers(*responses: httpx.Response | Exception) -> tuple[Handler, list[httpx.Request]]:
    left, seen = list(responses), list[httpx.Request]()

    def handle(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        response = left.pop(0)
        if isinstance(response, Exception):
            raise response
        return response

    return handle, seen


def record(code: str, *, retryable: bool = False, **more: Any) -> dict[str, Any]:
    return {"code": code, "message": "no", "hint": "do that", "fault": "caller", "retryable": retryable, **more}


def test_a_call_carries_the_token_and_json() -> None:
    handle, seen = answers(httpx.Response(200, json={"ok": True}))
    assert http(handle).call("POST", "/v3/x", body={"a": [1]}, query={"limit": 3}) == {"ok": True}
    (request,) = seen
    assert str(request.url) == "http://api.test/v3/x?limit=3"
    assert request.headers["authorization"] == "Bearer secret-token"
    assert request.headers["x-farcall-accept"] == "blob-ref"
    assert request.content == b'{"a":[1]}'


@pytest.mark.parametrize(
    "failure",
    [
        httpx.ConnectError("refused"),
        httpx.ReadTimeout("late"),
        httpx.RemoteProtocolError("cut"),
        httpx.Response(503, json=record("NO_FORWARDER", retryable=True)),
        httpx.Response(429, json=record("LIMIT_EXCEEDED", retryable=True)),
        httpx.Response(502, text="<html>bad gateway</html>"),
        httpx.Response(429, text="slow down"),
        # API Gateway's own: its limits, a function that takes longer than 29 s, one that ended without an answer.
        httpx.Response(429, json={"message": "Too Many Requests"}),
        httpx.Response(504, json={"message": "Endpoint request timed out"}),
        httpx.Response(502, json={"message": "Internal server error"}),
        httpx.Response(503, json={"message": "Service Unavailable"}),
    ],
)
def test_transient_failures_are_retried(failure: httpx.Response | Exception) -> None:
    handle, seen = answers(failure, failure, httpx.Response(200, json=7))
    assert http(handle).call("GET", "/x") == 7
    assert len(seen) == 3


def test_retry_after_is_used() -> None:
    handle, seen = answers(
        httpx.Response(429, headers={"retry-after": "3600"}, json=record("LIMIT_EXCEEDED", retryable=True))
    )
    with pytest.raises(LimitExceeded) as caught:
        http(handle, retry_timeout_s=60).call("GET", "/x")  # an hour is longer than the retry time-out: not tried
    assert caught.value.record.retry_after_s == 3600
    assert len(seen) == 1


def test_retry_after_of_the_header_completes_the_record() -> None:
    handle, _ = answers(httpx.Response(503, headers={"retry-after": "90"}, json=record("UNAVAILABLE", retryable=True)))
    with pytest.raises(Unavailable) as caught:
        http(handle).call("GET", "/x")
    assert caught.value.record.retry_after_s == 90
    assert caught.value.hint == "do that"


def test_error_is_raised_after_the_timeout() -> None:
    handle, seen = answers(*[httpx.ConnectError("refused")] * 2)
    with pytest.raises(Unavailable, match="refused") as caught:
        http(handle, retry_timeout_s=0).call("GET", "/x")
    assert caught.value.record.fault is Fault.NETWORK
    assert caught.value.record.retryable
    assert len(seen) == 1


def test_machine_sleep_does_not_count_as_waiting() -> None:
    now = 0.0

    def handle(request: httpx.Request) -> httpx.Response:
        nonlocal now
        attempts.append(now)
        now += 3600.0 if len(attempts) == 1 else 20.0  # the lid was closed while the first was under way
        raise httpx.ReadError("cut")

    attempts = list[float]()
    settings = Settings("http://api.test", "secret-token")
    client = Http(
        settings,
        timeout_s=5,
        retry_timeout_s=100,
        backoff=AT_ONCE,
        transport=httpx.MockTransport(handle),
        clock=lambda: now,
    )
    with pytest.raises(Unavailable):
        client.call("GET", "/x")
    assert attempts == [0.0, 3600.0, 3620.0, 3640.0]


def test_a_set_stop_event_ends_the_retries() -> None:
    stop = threading.Event()
    stop.set()
    handle, seen = answers(*[httpx.ConnectError("refused")] * 2)
    with pytest.raises(Unavailable):
        http(handle).call("GET", "/x", stop=stop)
    assert len(seen) == 1


@pytest.mark.parametrize(
    ("response", "error"),
    [
        (httpx.Response(404, json=record("FUNCTION_UNKNOWN")), FunctionUnknown),
        (httpx.Response(422, json=record("INVALID_REQUEST")), InvalidRequest),
        (httpx.Response(400, json=record("A_CODE_OF_TOMORROW")), InvalidRequest),
        (httpx.Response(403, json=record("FUNCTION_NOT_PERMITTED")), FunctionNotPermitted),
        (httpx.Response(400, json=record("ENDPOINT_INCOMPATIBLE")), EndpointIncompatible),
        (httpx.Response(401, json={"message": "Unauthorized"}), Unauthenticated),  # API Gateway's own
        (httpx.Response(403, text="<Error>AccessDenied</Error>"), Forbidden),
        (httpx.Response(404), ProtocolError),
        (httpx.Response(413, text="too large"), RequestTooLarge),
        (httpx.Response(418), ProtocolError),
        (httpx.Response(200, text="<html>a login page</html>"), ProtocolError),
        (httpx.Response(400, json=["not", "a", "record"]), ProtocolError),
        (httpx.Response(400, json=record("X", fault="unknown")), InvalidRequest),
        (httpx.UnsupportedProtocol("gopher"), ConfigurationError),
    ],
)
def test_permanent_errors_are_raised_at_once(response: httpx.Response | Exception, error: type[FarcallError]) -> None:
    handle, seen = answers(response)
    with pytest.raises(error) as caught:
        http(handle).call("GET", "/x")
    assert type(caught.value) is error
    assert len(seen) == 1


def test_token_is_sent_to_the_api_only() -> None:
    handle, seen = answers(httpx.Response(200), httpx.Response(200, content=b"data"))
    client = http(handle)
    client.put("http://blobs.test/a?signature=1", b"data", headers={"x-amz-checksum-sha256": "abc"})
    assert client.get("http://blobs.test/a?signature=1", most_bytes=4) == b"data"
    for request in seen:
        assert "authorization" not in request.headers
        assert "secret-token" not in str(request.headers)
    assert seen[0].headers["x-amz-checksum-sha256"] == "abc"


def test_a_download_ignores_the_content_encoding() -> None:
    bomb = gzip.compress(bytes(10_000_000))
    encoded = {"content-encoding": "gzip"}
    handle, _ = answers(httpx.Response(200, headers=encoded, stream=httpx.ByteStream(bomb)))
    assert http(handle).get("http://blobs.test/a", most_bytes=len(bomb)) == bomb


def test_signatures_stay_out_of_error_messages() -> None:
    handle, _ = answers(httpx.ConnectError("refused"), httpx.Response(400, text="no"))
    client = http(handle, retry_timeout_s=0)
    for _ in range(2):
        with pytest.raises(FarcallError) as caught:
            client.get("http://blobs.test/a?X-Amz-Signature=abc", most_bytes=4)
        assert "Signature" not in str(caught.value)


def test_a_closed_client_opens_again() -> None:
    handle, _ = answers(httpx.Response(200, json=1), httpx.Response(200, json=2))
    client = http(handle)
    assert client.call("GET", "/x") == 1
    client.close()
    client.close()
    assert client.call("GET", "/x") == 2


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_uses_connections_of_its_own() -> None:
    client = http(lambda request: httpx.Response(200, json=1))
    assert client.call("GET", "/x") == 1
    inherited = client._pool
    client._lock.acquire()  # as if another thread were in the middle of something at the fork
    child = os.fork()
    if child == 0:
        ok = client.call("GET", "/x") == 1 and client._pool is not inherited
        os._exit(0 if ok else 1)
    client._lock.release()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert client._pool is inherited
    client.close()


def test_the_token_is_not_in_the_repr() -> None:
    assert "secret" not in repr(Settings("http://api.test", "secret-token"))
