"""Every error answers in one shape."""

from __future__ import annotations

import json
import logging
from typing import Any, NoReturn

import pytest
from aws_lambda_powertools.utilities.typing import LambdaContext

from farcall_common import errors
from farcall_lambdas.answers import status_of
from farcall_lambdas.proxy_event import proxy_event
from farcall_lambdas.settings import ApiSettings
from tests.support.memory_api import ALICE, MemoryApi
from tests.support.stores import FakeDatabase, fake_stores

SHAPE = {
    "code", "message", "hint", "fault", "retryable", "status", "http_status_code", "reason", "error_args", "request_id",
}  # fmt: skip


@pytest.fixture
def api() -> MemoryApi:
    return MemoryApi()


class BrokenDatabase(FakeDatabase):
    """Lists no tasks: it raises ``error``."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self._error = error

    def list_tasks(self, *_: object, **__: object) -> NoReturn:
        raise self._error


def broken_api(error: Exception) -> MemoryApi:
    return MemoryApi(stores=fake_stores(database=BrokenDatabase(error)))


def check(answer: Any, status: int, code: str) -> None:
    assert answer.status == answer.body["http_status_code"] == status
    assert answer.body.keys() - {"retry_after_s"} == SHAPE
    assert (answer.body["code"], answer.body["status"]) == (code, "Failed")
    assert answer.body["reason"] == answer.body["message"] != ""
    assert answer.headers["Content-Type"] == "application/json"


@pytest.mark.parametrize(
    "text", ["{", "nonsense", '{"task_ids": [NaN]}', "[" * 100_000, '{"a": ' + "9" * 5000 + "}", '{"a": 1} {}', "\0"]
)
def test_invalid_json_is_refused(api: MemoryApi, text: str) -> None:
    check(api.call("POST", "/v2/batch_status", text), 400, "INVALID_REQUEST")


@pytest.mark.parametrize(
    ("error", "retry_after"),
    [
        (errors.Unavailable("away"), "2"),
        (errors.Unavailable("away", retry_after_s=7), "7"),
        (errors.QueueDataLost("away"), "2"),
    ],
)
def test_an_outage_says_when_to_try_again(error: errors.FarcallError, retry_after: str) -> None:
    answer = broken_api(error).call("GET", "/v3/tasks")
    check(answer, 503, error.code)
    assert answer.headers["Retry-After"] == retry_after
    assert answer.body["retry_after_s"] == float(retry_after)


@pytest.mark.parametrize(
    ("path", "request_id", "is_repeated"),
    [
        ("/v3/whoami", "0b9e-7", True),
        ("/v3/nowhere", "0b9e-7", True),
        ("/v3/whoami", "", False),
        ("/v3/whoami", "a\r\nSet-Cookie: b", False),
        ("/v3/whoami", "a" * 65, False),
    ],
)
def test_an_answer_repeats_the_id_of_its_request(api: MemoryApi, path: str, request_id: str, is_repeated: bool) -> None:
    headers = api.call("GET", path, headers={"X-Farcall-Request-Id": request_id}).headers
    assert headers.get("x-farcall-request-id") == (request_id if is_repeated else None)
    assert "x-farcall-request-id" not in api.call("GET", path).headers


def test_body_that_is_not_text_is_refused(api: MemoryApi) -> None:
    check(api.call("POST", "/v2/batch_status", b"\xff\xfe"), 400, "INVALID_REQUEST")


def test_base64_body_with_json_is_read(api: MemoryApi) -> None:
    assert api.call("POST", "/v2/batch_status", b'{"task_ids": []}').status == 422


@pytest.mark.parametrize("body", ["", "{}", "[]", "null", '"x"', "1", '{"task_ids": 1}', '{"task_ids": ["x"]}'])
def test_json_with_the_wrong_schema_is_refused(api: MemoryApi, body: str) -> None:
    check(api.call("POST", "/v2/batch_status", body), 422, "INVALID_REQUEST")


def test_missing_body_is_refused(api: MemoryApi) -> None:
    check(api.call("POST", "/v2/batch_status"), 422, "INVALID_REQUEST")


def test_other_content_type_is_refused(api: MemoryApi) -> None:
    answer = api.call("POST", "/v2/batch_status", "a=1", headers={"Content-Type": "text/plain"})

    check(answer, 415, "INVALID_REQUEST")


def test_oversized_body_is_refused() -> None:
    api = MemoryApi(settings=ApiSettings(max_request_bytes=100))

    check(api.call("POST", "/v2/batch_status", {"task_ids": ["x" * 100]}), 413, "REQUEST_TOO_LARGE")


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/"),
        ("GET", "/v2/nothing"),
        ("PATCH", "/v2/functions/x"),
        ("GET", "/v3/blobs"),
        ("OPTIONS", "/v3/blobs"),
    ],
)
def test_unknown_route_is_not_found(api: MemoryApi, method: str, path: str) -> None:
    check(api.call(method, path), 404, "NOT_FOUND")


def test_unauthenticated_request_is_refused(api: MemoryApi) -> None:
    check(api.call("GET", "/v3/tasks", caller=None), 401, "UNAUTHENTICATED")


def test_a_validation_error_never_shows_the_value(api: MemoryApi) -> None:
    answer = api.call("POST", "/v2/batch_status", {"task_ids": [{"secret": "sesame"}]})

    check(answer, 422, "INVALID_REQUEST")
    assert "sesame" not in json.dumps(answer.body)


def test_bug_is_logged_and_not_shown(caplog: pytest.LogCaptureFixture) -> None:
    api = broken_api(ZeroDivisionError("the inside of the machine"))

    with caplog.at_level(logging.ERROR):
        answer = api.call("GET", "/v3/tasks")

    check(answer, 500, "INTERNAL")
    assert (answer.body["fault"], answer.body["request_id"] in answer.body["message"]) == ("us", True)
    assert "inside" not in json.dumps(answer.body)
    [record] = caplog.records
    assert record.exc_info is not None


def test_internal_errors_are_not_shown_to_callers() -> None:
    api = broken_api(errors.Fenced("stale owner"))

    check(api.call("GET", "/v3/tasks"), 500, "INTERNAL")


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (errors.InvalidRequest, 400), (errors.PayloadTooLarge, 413), (errors.Unauthenticated, 401),
        (errors.Forbidden, 403), (errors.NotFound, 404), (errors.TaskUnknown, 404), (errors.BlobUnknown, 404),
        (errors.Conflict, 409), (errors.TaskIdReused, 409), (errors.LimitExceeded, 429), (errors.QuotaExceeded, 429),
        (errors.Unavailable, 503),
        (errors.NoForwarder, 503), (errors.QueueDataLost, 503), (errors.Fenced, 500), (errors.FarcallError, 500),
    ],
)  # fmt: skip
def test_every_error_has_a_status(error: type[errors.FarcallError], status: int) -> None:
    assert status_of(error("x")) == status


def test_request_context_does_not_leak_into_the_next_request(api: MemoryApi) -> None:
    api.call("GET", "/v3/tasks")

    assert api.call("GET", "/v3/tasks", caller=None).status == 401
    assert api.call("GET", "/v3/tasks").status == 200


def test_paths_may_carry_the_stage_and_a_trailing_slash(api: MemoryApi) -> None:
    event = proxy_event("GET", "/v3/tasks/", caller=ALICE)

    assert api.application.answer(event, LambdaContext())["statusCode"] == 200


def test_version_is_returned(api: MemoryApi) -> None:
    everything = api.call("GET", "/v2/version?service=all").body

    assert api.call("GET", "/v2/version").body == everything["api"]
    assert everything["min_ep_version"] == everything["min_endpoint_version"]
