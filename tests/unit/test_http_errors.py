"""HTTP errors: statuses of errors, and errors of responses."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, Final

import pytest

from farcall_common.errors import (
    BlobUnknown,
    ConfigurationError,
    EndpointIncompatible,
    EndpointUnknown,
    FarcallError,
    Fault,
    Forbidden,
    ForwarderWaking,
    FunctionNotPermitted,
    InvalidRequest,
    LimitExceeded,
    NotFound,
    ProtocolError,
    QuotaExceeded,
    RateLimited,
    RequestTooLarge,
    TaskPending,
    Unauthenticated,
    Unavailable,
    Unsupported,
    error_from_record,
)
from farcall_common.http_errors import error_from_response, status_of
from tests.unit.product import error_classes, modules

CLASSES: Final = error_classes()
HTML: Final = b"<html><head><title>404 Not Found</title></head><body>nginx</body></html>"
REQUEST: Final = "GET https://api.test/v3/me"
#: Modules that read answers of identity providers, which have a shape of their own (RFC 6749).
IDENTITY_PROVIDERS: Final = {"farcall_common.globus", "farcall_common.login", "farcall_lambdas.auth.providers"}


def ours(code: str, **more: Any) -> bytes:
    return json.dumps({"code": code, "message": "no", "hint": "do that", "fault": "caller", **more}).encode()


def gateway(message: str | None) -> bytes:
    return json.dumps({"message": message}).encode()


def store(code: str) -> bytes:
    return f'<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>{code}</Code><Message>m</Message></Error>'.encode()


def read(status: int, body: bytes, headers: Mapping[str, str] | None = None) -> FarcallError:
    return error_from_response(status, headers or {}, body, request=REQUEST)


@pytest.mark.parametrize(
    ("status", "body", "cls", "retryable"),
    [
        # Farcall's own record
        (404, ours("ENDPOINT_UNKNOWN"), EndpointUnknown, False),
        (403, ours("FUNCTION_NOT_PERMITTED"), FunctionNotPermitted, False),
        (400, ours("ENDPOINT_INCOMPATIBLE"), EndpointIncompatible, False),
        (400, ours("UNSUPPORTED"), Unsupported, False),
        (429, ours("QUOTA_EXCEEDED"), QuotaExceeded, False),
        (503, ours("FORWARDER_WAKING", fault="us", retryable=True), ForwarderWaking, True),
        (500, ours("INTERNAL", fault="us", retryable=True), FarcallError, True),
        # ... with a code of a newer API
        (400, ours("OF_TOMORROW"), InvalidRequest, False),
        (422, ours("OF_TOMORROW"), InvalidRequest, False),
        (401, ours("OF_TOMORROW"), Unauthenticated, False),
        (403, ours("OF_TOMORROW"), Forbidden, False),
        (404, ours("OF_TOMORROW"), NotFound, False),
        (429, ours("OF_TOMORROW", retryable=True), LimitExceeded, True),
        (503, ours("OF_TOMORROW", retryable=True), Unavailable, True),
        (500, ours("OF_TOMORROW"), FarcallError, False),
        # API Gateway's own answers
        (401, gateway("Unauthorized"), Unauthenticated, False),
        (403, gateway("Forbidden"), Forbidden, False),
        (403, gateway("Missing Authentication Token"), Forbidden, False),
        (400, gateway(None), ProtocolError, False),
        (404, gateway("Not Found"), ProtocolError, False),
        (413, gateway("Request Too Long"), RequestTooLarge, False),
        (429, gateway("Too Many Requests"), RateLimited, True),
        (500, gateway("Internal server error"), Unavailable, True),
        (502, gateway("Internal server error"), Unavailable, True),
        (503, gateway("Service Unavailable"), Unavailable, True),
        (504, gateway("Endpoint request timed out"), Unavailable, True),
        # an object store's
        (403, store("AccessDenied"), Forbidden, False),
        (404, store("NoSuchKey"), BlobUnknown, False),
        (404, store("NoSuchBucket"), ProtocolError, False),
        (400, store("RequestTimeout"), Unavailable, True),
        (400, store("EntityTooLarge"), ProtocolError, False),
        (503, store("SlowDown"), Unavailable, True),
        # proxies, other services, nothing at all
        (302, b"", ProtocolError, False),
        (400, HTML, ProtocolError, False),
        (401, HTML, Unauthenticated, False),
        (403, HTML, Forbidden, False),
        (404, HTML, ProtocolError, False),
        (404, b"", ProtocolError, False),
        (405, HTML, ProtocolError, False),
        (407, HTML, ConfigurationError, False),
        (408, b"", Unavailable, True),
        (409, HTML, ProtocolError, False),
        (413, HTML, RequestTooLarge, False),
        (418, b'["teapot"]', ProtocolError, False),
        (425, b"", Unavailable, True),
        (429, HTML, RateLimited, True),
        (500, HTML, Unavailable, True),
        (502, HTML, Unavailable, True),
        (503, b"\xff\xfe", Unavailable, True),
        (511, HTML, Unavailable, True),
        # other services that have a code and a message
        (404, b'{"code": 404, "message": "page not found"}', ProtocolError, False),
        (404, b'{"code": 5, "message": "Not Found", "details": []}', ProtocolError, False),
        (404, b'{"code": "NotFound", "message": "no"}', ProtocolError, False),
        # records that are not whole
        (404, b'{"code": "NOT_FOUND"}', ProtocolError, False),
        (404, ours("NOT_FOUND", fault=7), ProtocolError, False),
        (503, ours("UNAVAILABLE", retry_after_s="soon"), Unavailable, True),
    ],
)
def test_each_status_has_its_error(status: int, body: bytes, cls: type[FarcallError], retryable: bool) -> None:
    error = read(status, body)
    assert type(error) is cls
    assert error.record.retryable is retryable


def test_a_record_is_kept_whole() -> None:
    body = ours("STORAGE_LOW", fault="us", retryable=True, retry_after_s=2.5, http_status_code=503, shade="blue")
    record = read(503, body, {"Retry-After": "90"}).record
    assert (record.code, record.message, record.hint) == ("STORAGE_LOW", "no", "do that")
    assert (record.fault, record.retryable, record.retry_after_s) == (Fault.US, True, 2.5)
    assert read(400, ours("X", fault="weather")).record.fault is Fault.US


@pytest.mark.parametrize("name", ["Retry-After", "retry-after"])
@pytest.mark.parametrize("body", [ours("UNAVAILABLE", retryable=True), gateway("Service Unavailable"), HTML])
def test_retry_after_counts_where_the_body_has_none(name: str, body: bytes) -> None:
    assert read(503, body, {"Server": "x", name: "90"}).record.retry_after_s == 90
    assert read(503, body, {name: "-1"}).record.retry_after_s == 0
    assert read(503, body, {name: "Wed, 21 Oct 2026 07:28:00 GMT"}).record.retry_after_s is None
    assert read(503, body).record.retry_after_s is None
    assert read(503, body, {name: "99999999999"}).record.retry_after_s == 3600
    assert read(503, body, {name: "inf"}).record.retry_after_s is None


@pytest.mark.parametrize(("given", "used"), [(-5, 0), (2.5, 2.5), (1e12, 3600)])
def test_the_wait_that_a_body_names_is_bounded(given: float, used: float) -> None:
    assert read(429, ours("RATE_LIMITED", retryable=True, retry_after_s=given)).record.retry_after_s == used


def test_a_deeply_nested_body_is_no_record() -> None:
    assert isinstance(read(404, b'{"a":' * 100_000), ProtocolError)


def test_the_message_has_the_request_and_the_response() -> None:
    assert read(403, gateway("Forbidden")).record.message == f"{REQUEST} answered with HTTP 403 (Forbidden)"
    assert read(403, store("RequestTimeTooSkewed")).record.message.endswith("(RequestTimeTooSkewed)")
    assert read(404, HTML).record.message.endswith("HTTP 404")
    moved = read(301, b"", {"location": "https://login.test/in?token=secret"}).record.message
    assert moved.endswith("(redirect to https://login.test/in)")
    assert len(read(500, gateway("x" * 10_000)).record.message) < 300
    assert "\n" not in read(500, gateway("a\nb")).record.message


def test_hints_name_the_likely_cause() -> None:
    assert "FARCALL_API_URL" in read(404, HTML).hint
    assert read(400, store("BadDigest")).hint == ""
    assert "HTTPS_PROXY" in read(407, HTML).hint
    assert "owner" not in read(403, HTML).hint
    assert "farcall login" in read(401, gateway("Unauthorized")).hint


@pytest.mark.parametrize("cls", CLASSES.values(), ids=CLASSES)
def test_an_error_is_read_from_its_response(cls: type[FarcallError]) -> None:
    """Also one whose code the caller does not know: its class has the same status."""
    record = cls("no").record
    assert type(read(status_of(cls), json.dumps(record.to_json()).encode())) is cls
    unknown = read(status_of(cls), json.dumps(record.to_json() | {"code": "OF_TOMORROW"}).encode())
    assert status_of(type(unknown)) == status_of(cls)


def test_an_error_has_the_status_of_its_nearest_ancestor() -> None:
    assert status_of(RequestTooLarge) == 413
    assert status_of(EndpointIncompatible) == 400
    assert status_of(TaskPending) == 500
    assert status_of(type(error_from_record(NotFound("x").record))) == 404


def test_no_other_module_maps_statuses_to_errors() -> None:
    """What this finds: a status next to an error class in a dict or a tuple, and a condition with a status under which
    an error of ours is raised or returned."""
    names = {cls.__name__ for cls in CLASSES.values()}
    statuses = {int(status) for status in HTTPStatus if status >= 300}

    def is_status(node: ast.AST | None) -> bool:
        return isinstance(node, ast.Constant) and type(node.value) is int and node.value in statuses

    def is_error(node: ast.AST | None) -> bool:
        return isinstance(node, ast.Name) and node.id in names

    def maps(node: ast.AST) -> bool:
        if isinstance(node, ast.Dict):
            both = (*node.keys, *node.values)
            return any(map(is_status, both)) and any(map(is_error, both))
        if isinstance(node, ast.Tuple):
            return any(map(is_status, node.elts)) and any(map(is_error, node.elts))
        if isinstance(node, ast.If) and "status" in ast.dump(node.test) and any(map(is_status, ast.walk(node.test))):
            made = [each.func for each in ast.walk(ast.Module(node.body, [])) if isinstance(each, ast.Call)]
            return any(map(is_error, made))
        return False

    found = {name for name, tree in modules() if any(map(maps, ast.walk(tree)))}
    assert found == {"farcall_common.http_errors"} | IDENTITY_PROVIDERS
