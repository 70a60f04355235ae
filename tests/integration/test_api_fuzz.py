"""Requests made up from the OpenAPI document: whatever is sent, the answer is one that the document announces.

Half of the requests are valid by the document and half break it. Ids in them are sometimes those of things that exist,
so that requests get past the first look-up. The same requests are made each time.
"""

from __future__ import annotations

import dataclasses
import json
import re
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final
from urllib.parse import parse_qs, unquote, urlsplit

import boto3
import hypothesis
import pytest
import requests
import schemathesis
from aws_lambda_powertools.utilities.typing import LambdaContext
from hypothesis import HealthCheck
from hypothesis import strategies as st
from schemathesis.checks import (
    content_type_conformance,
    negative_data_rejection,
    not_a_server_error,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from schemathesis.core.failures import FailureGroup
from schemathesis.core.parameters import ParameterLocation
from schemathesis.core.result import Ok

from farcall_common.errors import Unauthenticated
from farcall_common.store import ForwarderInfo, Stores, StoreSettings, open_stores
from farcall_lambdas.answers import error_response
from farcall_lambdas.app import Application
from farcall_lambdas.openapi import document
from farcall_lambdas.proxy_event import proxy_event
from farcall_lambdas.settings import ApiSettings
from tests.integration.store_servers import Valkey
from tests.support.memory_api import ALICE, CREDENTIALS
from tests.support.stores import fake_stores
from tests.unit.test_lambdas_errors import BrokenDatabase

BASE_URL: Final = "http://api.example.org"
SCHEMA: Final = schemathesis.openapi.from_dict(json.loads(document()))
OPERATIONS: Final = {
    f"{read.ok().method.upper()} {read.ok().path}": read.ok()
    for read in SCHEMA.get_all_operations()
    if isinstance(read, Ok)
}
CHECKS: Final = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    negative_data_rejection,
]
UUID: Final = re.compile(r"[0-9a-fA-F-]{32,36}")


@dataclasses.dataclass(frozen=True)
class World:
    """The API on real stores, and ids of what exists there."""

    application: Application
    ids: Mapping[str, str]

    def answer(self, request: requests.PreparedRequest) -> schemathesis.Response:
        """What API Gateway and its authorizer would do with a request."""
        if "Authorization" not in request.headers:
            path = urlsplit(request.url or "").path
            refusal = error_response(Unauthenticated("There is no token."), request_id="1", path=path)
            return _response(request, refusal.status_code, {"content-type": [str(refusal.content_type)]}, refusal.body)
        url = urlsplit(request.url or "")
        body = request.body if isinstance(request.body, bytes | None) else str(request.body).encode()
        text = None if body is None else _text_or_bytes(body)
        event = proxy_event(str(request.method), "/", text, caller=ALICE, headers=dict(request.headers))
        query = parse_qs(url.query, keep_blank_values=True)
        event |= {
            "path": unquote(url.path),
            "queryStringParameters": {name: values[-1] for name, values in query.items()} or None,
            "multiValueQueryStringParameters": query or None,
        }
        answer = self.application.answer(event, LambdaContext())
        return _response(request, answer["statusCode"], answer["multiValueHeaders"], answer["body"])

    def at_home(self, value: Any, key: str = "") -> Any:
        """A body in which every id is that of something that exists."""
        if isinstance(value, dict):
            by_function = key in ("tasks", "task_ids") and all(map(UUID.match, value))
            renamed = {self.ids["function_id"] if by_function else name: item for name, item in value.items()}
            return {name: self.at_home(item, key if by_function else name) for name, item in renamed.items()}
        if isinstance(value, list):
            return [self.at_home(item, key) for item in value]
        if isinstance(value, str) and UUID.fullmatch(value):
            return self.ids.get(key.removesuffix("s"), self.ids["function_id"])
        return value


@pytest.fixture
def world(postgres_url: str, valkey: Valkey, s3_environment: None) -> Iterator[World]:
    bucket = f"fuzz-{uuid.uuid4()}"
    boto3.client("s3").create_bucket(Bucket=bucket)
    stores = open_stores(
        StoreSettings.from_environment(
            {
                "FARCALL_DATABASE_URL": postgres_url,
                "FARCALL_QUEUE_URL": valkey.url,
                "FARCALL_BLOB_BUCKET": bucket,
                "FARCALL_TICKET_KEY": "k" * 32,
            }
        ),
        max_connections=1,
    )
    yield _world(stores)
    stores.close()


@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_response_is_in_the_openapi_document(operation: str, world: World) -> None:
    for mode in schemathesis.GenerationMode:
        _fuzz(OPERATIONS[operation], mode, world)


def test_every_route_is_tried() -> None:
    described = {(method, path) for path, methods in json.loads(document())["paths"].items() for method in methods}

    assert {(each.method, each.path) for each in OPERATIONS.values()} == described


def test_a_server_error_would_be_found() -> None:
    world = _world(fake_stores(database=BrokenDatabase(RuntimeError("a bug"))))

    with pytest.raises(FailureGroup, match="Server error"):
        _fuzz(OPERATIONS["GET /v3/tasks"], schemathesis.GenerationMode.POSITIVE, world)


def _fuzz(
    operation: schemathesis.APIOperation[Any, Any, Any, Any], mode: schemathesis.GenerationMode, world: World
) -> None:
    if mode is schemathesis.GenerationMode.NEGATIVE and not (
        operation.body or operation.path_parameters or operation.query
    ):
        return

    @hypothesis.settings(
        max_examples=15, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )
    @hypothesis.given(case=operation.as_strategy(generation_mode=mode), at_home=st.booleans())
    def one(case: schemathesis.Case[Any], at_home: bool) -> None:
        checks = CHECKS
        if at_home:
            case.body = world.at_home(case.body) if isinstance(case.body, dict | list) else case.body
            case.path_parameters = {name: world.ids[name] for name in case.path_parameters or {}}
            body = case.meta and case.meta.components.get(ParameterLocation.BODY)
            if not body or body.mode is not schemathesis.GenerationMode.NEGATIVE:
                # What was wrong was the path, which is right now, or a parameter in the query that is ignored.
                checks = [check for check in CHECKS if check is not negative_data_rejection]
        kwargs = case.as_transport_kwargs(base_url=BASE_URL)
        request = requests.Request(
            **{name: kwargs[name] for name in ("method", "url", "params", "headers", "data", "json") if name in kwargs}
        ).prepare()
        case.validate_response(world.answer(request), checks=checks)

    one()


def _world(stores: Stores) -> World:
    application = Application.over(stores, ApiSettings(rate_burst=1_000_000), credentials=CREDENTIALS)
    call = _caller(application)
    stores.queue.announce(ForwarderInfo("f1", address="tcp://127.0.0.1:1", server_key="k" * 40), ttl_s=600)
    function_id = call("POST", "/v3/functions", {"function_name": "f", "function_code": "4\n01\nf"})["function_uuid"]
    endpoint_id = call("POST", "/v3/endpoints", {"endpoint_name": "laptop"})["endpoint_id"]
    image = {"name": "xtal", "type": "docker", "location": "python:3.12"}
    container_id = call("POST", "/v3/containers", image)["container_id"]
    call("POST", "/v3/aliases", {"name": "stable", "function_id": function_id})
    submitted = call("POST", f"/v3/endpoints/{endpoint_id}/submit", {"tasks": {function_id: ["4\n00\nx"]}})
    token_id = call("POST", "/v3/tokens", {"name": "ci", "scopes": ["tasks:read"]})["token_id"]
    account_id = call("POST", "/v3/accounts", {"name": "robot"})["account_id"]
    team_id = call("POST", "/v3/teams", {"name": "optics"})["team_id"]
    share = {"grantee": {"kind": "name", "id": "grace@lab.org"}, "right": "use"}
    share_id = call("PUT", f"/v3/endpoints/{endpoint_id}/shares", share)["share_id"]
    task = {"function_id": function_id}
    action = call("POST", "/actions/run", {"request_id": "1", "body": {"endpoint_id": endpoint_id, "tasks": [task]}})
    return World(
        application,
        {
            "function_id": function_id,
            "function": "stable",
            "name": "stable",
            "container_id": container_id,
            "container": "xtal",
            "technology": "docker",
            "endpoint_id": endpoint_id,
            "task_id": submitted["tasks"][function_id][0],
            "task_group_id": submitted["task_group_id"],
            "action_id": action["action_id"],
            "token_id": token_id,
            "account_id": account_id,
            "team_id": team_id,
            "share_id": share_id,
        },
    )


def _caller(application: Application) -> Callable[[str, str, Any], Any]:
    def call(method: str, path: str, body: Any) -> Any:
        answer = application.answer(proxy_event(method, path, json.dumps(body), caller=ALICE), LambdaContext())
        assert answer["statusCode"] in (200, 202), answer["body"]
        return json.loads(answer["body"])

    return call


def _response(
    request: requests.PreparedRequest, status: int, headers: Mapping[str, list[str]], body: str | None
) -> schemathesis.Response:
    content = (body or "").encode()
    return schemathesis.Response(status, headers, content, request, elapsed=0.0, verify=False)


def _text_or_bytes(body: bytes) -> str | bytes:
    """API Gateway hands a body on as text if it is text."""
    try:
        return body.decode()
    except UnicodeDecodeError:
        return body
