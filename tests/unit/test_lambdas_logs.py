"""Ids in the lines of the functions' logs: they join a client's request, the gateway's, and Lambda's invocation."""

from __future__ import annotations

import importlib
import inspect
import io
import json
import pkgutil
from collections.abc import Callable
from typing import Any

import pytest

from farcall_common.trace_ids import trace_ids
from farcall_lambdas import handlers
from farcall_lambdas.logs import configure, logger
from tests.support.memory_api import MemoryApi

Lines = Callable[[], list[dict[str, Any]]]
SPAN = "00-{}-00f067aa0ba902b7-01"


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> Lines:
    written = io.StringIO()
    configure("INFO")
    monkeypatch.setattr(logger.registered_handler, "stream", written)

    def read() -> list[dict[str, Any]]:
        return [json.loads(line) for line in written.getvalue().splitlines()]

    return read


def test_all_lines_of_a_request_have_its_ids(lines: Lines) -> None:
    api = MemoryApi()
    function = {"function_name": "f", "function_code": "4\n01\nf"}
    function_id = api.call("POST", "/v3/functions", function).body["function_uuid"]
    endpoint_id = api.call("POST", "/v3/endpoints", {"endpoint_name": "laptop"}).body["endpoint_id"]
    before = len(lines())
    submit = {"tasks": {function_id: ["p"]}}
    answer = api.call("POST", f"/v3/endpoints/{endpoint_id}/submit", submit, headers={"X-Farcall-Request-Id": "a-1"})
    api.call("GET", "/v3/functions")
    accepted, request, after = lines()[before:]
    assert [accepted["message"], request["message"], after["message"]] == ["tasks accepted", "request", "request"]
    assert accepted["request_id"] == request["request_id"] == answer.body["request_id"]
    assert accepted["correlation_id"] == request["correlation_id"] == "a-1"
    assert after["request_id"] != request["request_id"]
    assert "correlation_id" not in after


def test_ids_that_answers_do_not_repeat_are_not_logged(lines: Lines) -> None:
    MemoryApi().call("GET", "/v3/functions", headers={"X-Farcall-Request-Id": 'a"\n'})
    assert all("correlation_id" not in line for line in lines())


@pytest.mark.parametrize("name", [each.name for each in pkgutil.iter_modules(handlers.__path__)])
def test_every_function_logs_the_id_of_its_invocation(name: str) -> None:
    """The resolver does so for the API."""
    module = importlib.import_module(f"farcall_lambdas.handlers.{name}")
    assert name == "api" or "log_ids(function_request_id=" in inspect.getsource(module.handle)


def test_traces_of_a_message_are_one_text() -> None:
    ids = [f"{number:032x}" for number in range(12)]
    assert trace_ids([None, "", *(SPAN.format(each) for each in ids[:1] * 3)]) == ids[0]
    assert trace_ids(map(SPAN.format, ids)) == " ".join(ids[:10])
    assert trace_ids([None, ""]) == ""
