"""The Lambda handlers in a process of their own, on real stores."""

from __future__ import annotations

import datetime as dt
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import boto3
import pytest

from farcall_common.store import TaskResult, ValkeyQueue, open_records
from farcall_common.store.migrate import HEAD
from farcall_common.wire.states import Reporter, TaskState
from farcall_lambdas.identity import Identity
from farcall_lambdas.proxy_event import proxy_event
from farcall_lambdas.signed_caller import CallerKey
from tests.integration.store_servers import Valkey
from tests.support.memory_api import ALICE
from tests.waiting import WAIT_S

KEY = CallerKey(lambda: "c" * 32)

#: As a Lambda runtime does it: import the handler by name, call it with events, keep it for the next one.
RUNTIME = """
import importlib, json, sys
from types import SimpleNamespace
for line in sys.stdin:
    name, event = json.loads(line)
    handle = importlib.import_module(f"farcall_lambdas.handlers.{name}").handle
    try:
        answer = {"result": handle(event, SimpleNamespace(aws_request_id="an-invocation"))}
    except Exception as error:
        answer = {"error": str(error)}
    print(json.dumps(answer), flush=True)
"""


class Runtime:
    """The process."""

    def __init__(self, environ: dict[str, str]) -> None:
        self.environ = environ
        self._process = subprocess.Popen(
            [sys.executable, "-c", RUNTIME], env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def invoke(self, handler: str, event: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps([handler, event]), file=self._process.stdin, flush=True)
        return json.loads(self._process.stdout.readline())

    def call(self, method: str, path: str, body: Any = None, *, caller: Identity | None = ALICE) -> tuple[int, Any]:
        text = None if body is None else json.dumps(body)
        answer = self.invoke("api", proxy_event(method, path, text, caller=caller, key=KEY))["result"]
        return answer["statusCode"], json.loads(answer["body"])

    def close(self) -> None:
        self._process.communicate(timeout=WAIT_S)


@pytest.fixture
def runtime(postgres_url: str, valkey: Valkey, s3_environment: None) -> Iterator[Runtime]:
    boto3.client("s3").create_bucket(Bucket="farcall-test")
    runtime = Runtime(
        {
            **os.environ,
            "FARCALL_DATABASE_URL": postgres_url,
            "FARCALL_QUEUE_URL": valkey.url,
            "FARCALL_BLOB_BUCKET": "farcall-test",
            "FARCALL_TICKET_KEY": "k" * 32,
            "FARCALL_AUTH_PROVIDER": "dev",
            "FARCALL_DEV_TOKENS": json.dumps({"sesame": {"identity_id": ALICE.identity_id, "username": "alice"}}),
            "FARCALL_ALLOWED_IDENTITIES": "*",
            "FARCALL_CALLER_KEY": "c" * 32,
        }
    )
    yield runtime
    runtime.close()


def test_the_handlers_work_together(runtime: Runtime) -> None:
    arn = "arn:aws:execute-api:eu-central-1:123456789012:abcdef/api/GET/v3/tasks"
    token = {"type": "TOKEN", "methodArn": arn, "authorizationToken": "Bearer sesame"}
    context = runtime.invoke("authorizer", token)["result"]["context"]
    assert runtime.invoke("authorizer", {**token, "authorizationToken": "Bearer x"}) == {"error": "Unauthorized"}
    assert runtime.invoke("migrator", {}) == {"result": {"revision": HEAD, "changed": False}}

    caller = Identity.from_context(context)
    _, function = runtime.call("POST", "/v3/functions", {"function_name": "f", "function_code": "c"}, caller=caller)
    _, endpoint = runtime.call("POST", "/v3/endpoints", {"endpoint_name": "e"}, caller=caller)
    path = f"/v3/endpoints/{endpoint['endpoint_id']}/submit"
    status, submitted = runtime.call("POST", path, {"tasks": {function["function_uuid"]: ["p", "q"]}}, caller=caller)

    assert status == 200
    assert len(submitted["tasks"][function["function_uuid"]]) == 2
    done = runtime.invoke("reconciler", {})["result"]
    assert done.keys() >= {"endpoints", "offered", "recorded", "purged", "audit_purged"}
    assert {name for name, count in done.items() if count} == {"endpoints"}
    assert runtime.call("GET", "/v3/tasks", caller=None)[0] == 401
    event = proxy_event("GET", "/v3/tasks", caller=None)
    event["requestContext"]["authorizer"] = {"principalId": ALICE.identity_id, "integrationLatency": 7, **context}
    assert runtime.invoke("api", event)["result"]["statusCode"] == 200, "signed by the authorizer"
    unsigned = runtime.invoke("api", proxy_event("GET", "/v3/tasks", caller=ALICE))["result"]
    assert (unsigned["statusCode"], json.loads(unsigned["body"])["code"]) == (503, "UNAVAILABLE")


def test_a_memoized_result_is_returned_without_the_queue(runtime: Runtime, postgres_url: str, valkey: Valkey) -> None:
    _, function = runtime.call("POST", "/v3/functions", {"function_name": "f", "function_code": "c"})
    _, endpoint = runtime.call("POST", "/v3/endpoints", {"endpoint_name": "e"})
    endpoint_id, function_id = endpoint["endpoint_id"], function["function_uuid"]
    body = {"tasks": {function_id: ["p", "q", "p"]}, "memoize": True}

    def submit() -> tuple[list[str], dict[str, Any]]:
        status, answer = runtime.call("POST", f"/v3/endpoints/{endpoint_id}/submit", body)
        assert status == 200
        return answer["tasks"][function_id], answer.get("results", {})

    (first, other, same), nothing = submit()
    assert nothing == {}
    records, queue = open_records(postgres_url), ValkeyQueue(valkey.url)
    success = TaskResult(first, endpoint_id, 1, TaskState.SUCCESS, Reporter.AGENT, result=b"answer")
    assert records.tasks.record_results([success], at=dt.datetime.now(dt.UTC))
    (second, _, third), results = submit()

    assert results.keys() == {second, third}
    assert {(each["status"], each["result"]) for each in results.values()} == {("success", "answer")}
    assert runtime.call("GET", f"/v2/tasks/{second}")[1]["details"]["memoized_from"] == first
    assert queue.depth([endpoint_id]) == 4
    assert {task.task_id for task in records.tasks.list_open_tasks(endpoint_id)} > {other, same}
    records.close()
    queue.close()


def test_text_that_only_json_can_hold_is_refused_as_a_client_error(runtime: Runtime) -> None:
    odd = {"function_name": "f", "function_code": "c\u0000", "description": "\ud83d\ude00", "meta": {"a": "é"}}

    status, function = runtime.call("POST", "/v3/functions", odd)

    assert status == 200
    shown = runtime.call("GET", f"/v2/functions/{function['function_uuid']}")[1]
    assert (shown["function_code"], shown["description"], shown["metadata"]) == ("c\0", "😀", {"a": "é"})
    assert runtime.call("GET", "/v3/functions?search=%00")[0] in (200, 400, 422)
    assert runtime.call("POST", "/v3/functions", {**odd, "description": "\u0000"})[0] == 422


@pytest.mark.parametrize("started_by_lambda", [True, False])
def test_connections_are_opened_before_the_first_request(runtime: Runtime, started_by_lambda: bool) -> None:
    """Lambda initializes with a whole processor, and the first request has a part of one."""
    environ = dict(runtime.environ)
    if started_by_lambda:
        environ["AWS_LAMBDA_INITIALIZATION_TYPE"] = "on-demand"
    assert _connections_after_import(environ) == (1 if started_by_lambda else 0)


def test_failed_initialization_is_repeated_at_the_first_request() -> None:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("FARCALL_")}
    program = "from farcall_lambdas.handlers import api; api.handle({}, None)"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environ | {"AWS_LAMBDA_INITIALIZATION_TYPE": "on-demand"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "in handle" in done.stderr
    assert "FARCALL_DATABASE_URL or FARCALL_DATABASE_HOST is not set" in done.stderr


def _connections_after_import(environ: dict[str, str]) -> int:
    """How many connections to the database the API's handler has open when it was only imported."""
    program = (
        "import os, psutil, urllib.parse\n"
        "from farcall_lambdas.handlers import api\n"
        "port = urllib.parse.urlsplit(os.environ['FARCALL_DATABASE_URL']).port\n"
        "connections = psutil.Process().net_connections(kind='tcp')\n"
        "print(sum(each.status == 'ESTABLISHED' and each.raddr.port == port for each in connections), flush=True)\n"
        "os._exit(0)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=True)
    return int(done.stdout)
