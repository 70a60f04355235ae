"""Sizes of answers: no route answers with more bytes than a Lambda function can send, whatever it may have to show.

:class:`~tests.support.memory_api.MemoryApi` checks the size of every answer as Lambda's runtime writes it: the body is
text inside JSON.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import json
import re
from collections.abc import Callable
from typing import Any, Final

import pytest

from farcall._batch import PreparedTask, chunks, encode_payload, encode_submit
from farcall_common.errors import ErrorRecord
from farcall_common.limits import (
    MAX_INLINE_BYTES,
    MAX_LAMBDA_ANSWER_BYTES,
    MAX_NESTED_REQUEST_BYTES,
    MAX_OUTPUT_TASKS,
    MAX_REQUEST_BYTES,
    MAX_TASKS_PER_REQUEST,
)
from farcall_common.nested_json import nested_bytes, sent_bytes
from farcall_common.store.model import (
    Action,
    AuditEntry,
    EndpointStatus,
    EnvironmentState,
    Function,
    FunctionAlias,
    ObjectKind,
    Presence,
    Right,
    Share,
    Task,
    TaskEvent,
    TaskResult,
    Team,
    TeamMember,
)
from farcall_common.task_options import TaskOptions
from farcall_common.wire.ids import new_id, new_task_id
from farcall_common.wire.states import Reporter, TaskState
from farcall_forwarder.core.untrusted import MAX_DETAILS, MAX_TEXT, clean_details, clean_error
from farcall_lambdas.models.fields import MAX_DESCRIPTION, MAX_METADATA_BYTES, MAX_TITLE
from farcall_lambdas.openapi import document
from farcall_lambdas.settings import ApiSettings
from tests.support.memory_api import ALICE, BOB, Answer, MemoryApi

#: A character that takes 14 bytes in an answer, for texts that are limited by characters.
WIDE: Final = "\N{SNAKE}"
#: One that takes four bytes, for texts that are limited by bytes of JSON.
QUOTE: Final = '"'
GLOBUS: Final = {"X-Globus-Client-Info": "product=python-sdk"}
AT: Final = dt.datetime.fromtimestamp(1_700_000_000, dt.UTC)
#: A value whose text in JSON is a quarter of what an answer has of it.
EXPANDING: Final = f"[{','.join(['1e15'] * (MAX_INLINE_BYTES // 5 - 10))}]"


def metadata() -> dict[str, Any]:
    """The most metadata that something registered may have."""
    return {"a": QUOTE * (MAX_METADATA_BYTES // 2 - 10)}


@dataclasses.dataclass
class Lab:
    """An API with an endpoint and a function of Alice's, and as much of everything as its limits admit."""

    api: MemoryApi
    endpoint_id: str
    function_id: str

    @property
    def stores(self) -> Any:
        return self.api.stores

    def call(self, method: str, path: str, body: object = None, **options: Any) -> Answer:
        return self.api.call(method, path, body, **options)

    def tasks(self, count: int, **result: Any) -> list[str]:
        """Tasks that have ended: with a result, or an error."""
        ids = [new_task_id() for _ in range(count)]
        group_id = new_id()
        self.stores.tasks.add_tasks(
            [
                Task(id_, group_id, ALICE.identity_id, self.endpoint_id, self.function_id, "", b"p", submitted_at=AT)
                for id_ in ids
            ]
        )
        state = TaskState.FAILED if "error" in result else TaskState.SUCCESS
        self.stores.tasks.record_results(
            [TaskResult(id_, self.endpoint_id, 1, state, Reporter.AGENT, **result) for id_ in ids], at=AT
        )
        return ids


@pytest.fixture
def lab() -> Lab:
    api = MemoryApi(settings=ApiSettings(rate_burst=10**9, rate_per_s=10**9))
    wide: dict[str, Any] = {"display_name": WIDE * MAX_TITLE, "description": WIDE * MAX_DESCRIPTION}
    endpoint_id = api.endpoint(endpoint_name=WIDE * MAX_TITLE, **wide, metadata={"config": metadata()["a"]})
    function_id = api.function(function_name=WIDE * MAX_TITLE, description=WIDE * MAX_DESCRIPTION, meta=metadata())
    return Lab(api, endpoint_id, function_id)


def largest_error() -> ErrorRecord:
    """The most that a forwarder records of an error."""
    names = ("message", "hint", "traceback", "exception_type", "stdout_tail", "stderr_tail", "exception_data", "sealed")
    texts = dict.fromkeys(names, WIDE * MAX_TEXT)
    return clean_error({"code": "X" * MAX_TEXT, **texts}, endpoint_id="e", attempt=1)


def largest_details() -> dict[str, Any]:
    """The most that a forwarder records of a graph's details."""
    stages = [
        {"number": number, "name": WIDE * 100, "state": "done", "node": QUOTE * 100, "calls": 10**6}
        for number in range(10_000)
    ]
    rest = {"stdout_tail": QUOTE * (MAX_DETAILS // 2 - 100)}
    return clean_details({"stages": stages, **rest}, now=AT.timestamp())


# -- one scenario for each route whose answer can be large -------------------------------------------------------------


def many_results(lab: Lab) -> list[Answer]:
    answers = []
    for text in (QUOTE, "\x01", "é", WIDE):
        ids = lab.tasks(120, result=(text * (MAX_INLINE_BYTES // len(text.encode()))).encode())
        answers.append(lab.call("POST", "/v2/batch_status", {"task_ids": ids}))
    ids = lab.tasks(20, error=largest_error()) + lab.tasks(40, result=b"r", details=largest_details())
    answers.append(lab.call("POST", "/v2/batch_status", {"task_ids": ids}))
    unknown = {"task_ids": [new_task_id() for _ in range(MAX_TASKS_PER_REQUEST)]}
    return [*answers, lab.call("POST", "/v2/batch_status", unknown, headers=GLOBUS)]


def one_result(lab: Lab) -> list[Answer]:
    stored = [
        lab.tasks(1, error=largest_error()),
        lab.tasks(1, result=("\x01" * MAX_INLINE_BYTES).encode(), details=largest_details()),
    ]
    for text in (QUOTE, "x"):
        data = (text * 4_500_000).encode()
        ref = lab.api.stores.blobs.write(ALICE.identity_id, data)
        stored.append(lab.tasks(1, result_ref=ref, details=largest_details()))
    return [lab.call("GET", f"/v2/tasks/{task_id}") for [task_id] in stored]


def list_of_tasks(lab: Lab) -> list[Answer]:
    lab.tasks(1000)
    answers = [lab.call("GET", "/v3/tasks?limit=1000")]
    lab.tasks(30, error=largest_error())
    return [*answers, lab.call("GET", "/v3/tasks?limit=1000")]


def task_group(lab: Lab) -> list[Answer]:
    [first, *_] = lab.tasks(45_000)
    group_id = lab.stores.tasks.get_tasks([first])[first].task_group_id
    return [lab.call("GET", f"/v2/taskgroup/{group_id}")]


def task_events(lab: Lab) -> list[Answer]:
    [task_id] = lab.tasks(1)
    detail = {"reason": WIDE * 1000}
    for number in range(1000):
        event = TaskEvent(task_id, TaskState.WAITING_FOR_EP, Reporter.FORWARDER, AT, number, detail)
        lab.stores.tasks._events.append(event)
    return [lab.call("GET", f"/v3/tasks/{task_id}/events")]


def output(lab: Lab) -> list[Answer]:
    details = {"stdout_tail": QUOTE * (MAX_DETAILS // 2 - 100)}
    ids = lab.tasks(MAX_OUTPUT_TASKS, result=b"r", details=details)
    return [lab.call("POST", "/v3/batch_output", {"tasks": [{"task_id": id_} for id_ in ids]})]


def submit(lab: Lab) -> list[Answer]:
    lab.call("PUT", f"/v3/functions/{lab.function_id}", {"memoize": True})
    endpoint = f"/v3/endpoints/{lab.endpoint_id}/submit"
    [task_id] = lab.call("POST", endpoint, {"tasks": {lab.function_id: ["p"]}}).body["tasks"][lab.function_id]
    done = TaskResult(
        task_id,
        lab.endpoint_id,
        1,
        TaskState.SUCCESS,
        Reporter.AGENT,
        result=b'"' * MAX_INLINE_BYTES,
    )
    lab.stores.tasks.record_results([done], at=AT)
    return [lab.call("POST", endpoint, {"tasks": {lab.function_id: ["p"] * MAX_TASKS_PER_REQUEST}})]


def submit_v2(lab: Lab) -> list[Answer]:
    tasks = [[lab.function_id, new_id(), "p"] for _ in range(MAX_TASKS_PER_REQUEST)]
    return [lab.call("POST", "/v2/submit", {"tasks": tasks})]


def cancelled(lab: Lab) -> list[Answer]:
    ids = lab.tasks(MAX_TASKS_PER_REQUEST)
    path = f"/v3/endpoints/{lab.endpoint_id}/tasks/cancel"
    return [lab.call("POST", each, {"task_ids": ids}) for each in ("/v3/tasks/cancel", path)]


def open_tasks(lab: Lab) -> list[Answer]:
    body = {"tasks": {lab.function_id: ["p"] * 1000}}
    lab.call("POST", f"/v3/endpoints/{lab.endpoint_id}/submit", body)
    return [lab.call("GET", f"/v3/endpoints/{lab.endpoint_id}/tasks?limit=1000")]


def functions(lab: Lab) -> list[Answer]:
    for number in range(1000):
        lab.stores.functions.add_function(
            Function(new_id(), ALICE.identity_id, WIDE * MAX_TITLE, b"b", "h", metadata=metadata(), created_at=AT)
        )
        version = Function(lab.function_id, ALICE.identity_id, "f", b"b", "h", version=number + 2, metadata=metadata())
        lab.stores.functions.add_function(version)
    return [
        lab.call("GET", "/v3/functions?limit=1000"),
        lab.call("GET", f"/v3/functions/{lab.function_id}/versions?limit=1000"),
        lab.call("GET", f"/v3/functions/{lab.function_id}"),
    ]


def one_function(lab: Lab) -> list[Answer]:
    """Of each kind of text, the largest function that can be registered."""
    answers = []
    for text in ("x", QUOTE, "\n", "é", WIDE):
        most = (MAX_REQUEST_BYTES - 2_000) // len(json.dumps(text, ensure_ascii=False)[1:-1].encode())
        for size in (most, most // 2, most // 4, most // 8):
            body = {"function_name": "f", "function_code": text * size, "meta": metadata()}
            registered = lab.call("POST", "/v3/functions", json.dumps(body, ensure_ascii=False))
            if registered.status == 200:
                answers.append(lab.call("GET", f"/v2/functions/{registered.body['function_uuid']}"))
                break
            assert registered.status == 413
        else:
            raise AssertionError(text)
    return answers


def aliases(lab: Lab) -> list[Answer]:
    for number in range(ApiSettings().max_functions):
        name = f"{number:06}{'n' * 94}"
        lab.stores.functions.put_alias(FunctionAlias(ALICE.identity_id, name, lab.function_id, 2**31 - 1))
    return [lab.call("GET", "/v3/aliases")]


def containers(lab: Lab) -> list[Answer]:
    requirements = [WIDE * 290] * 20
    body = {"type": "uv", "description": WIDE * MAX_DESCRIPTION, "requirements": requirements}
    for _ in range(100):
        assert lab.call("POST", "/v3/containers", body).status in (200, 422)
        docker = {"type": "docker", "location": "l", "description": WIDE * MAX_DESCRIPTION}
        assert lab.call("POST", "/v3/containers", docker).status == 200
    return [lab.call("GET", "/v3/containers?limit=1000")]


def endpoints(lab: Lab) -> list[Answer]:
    for _ in range(500):
        lab.api.endpoint(endpoint_name=WIDE * MAX_TITLE, display_name=WIDE * MAX_TITLE)
    return [lab.call("GET", f"/v2/endpoints{query}") for query in ("", "?role=any")]


def one_endpoint(lab: Lab) -> list[Answer]:
    allowed = [f"{new_id()}@2147483" for _ in range(10_000)]
    lab.call("PUT", f"/v3/endpoints/{lab.endpoint_id}", {"allowed_functions": allowed})
    text, problem = WIDE * 200, WIDE * 1000
    state = EnvironmentState("k" * 32, text, "t" * 32, text, text=text, problem=problem)
    status = EndpointStatus(problem=problem, environments=(state,) * 20)
    lab.stores.endpoints.set_presence([Presence(lab.endpoint_id, True, status)])
    [task_id] = lab.call(
        "POST", f"/v3/endpoints/{lab.endpoint_id}/submit", {"tasks": {lab.function_id: ["p"]}}
    ).body.get("tasks", {lab.function_id: lab.tasks(1)})[lab.function_id]
    return [
        lab.call("GET", f"/v2/endpoints/{lab.endpoint_id}"),
        lab.call("GET", f"/v2/endpoints/{lab.endpoint_id}/status"),
        lab.call("GET", f"/v3/endpoints/{lab.endpoint_id}/allowed_functions"),
        lab.call("GET", f"/v3/endpoints/{lab.endpoint_id}/qos"),
        lab.call("GET", f"/v3/tasks/{task_id}/why"),
    ]


def shares(lab: Lab) -> list[Answer]:
    def share(object_id: str, grantee: str, granted_by: str) -> Share:
        kind = ObjectKind.ENDPOINT
        return Share(new_id(), kind, object_id, grantee, Right.USE, granted_by, AT, note=WIDE * MAX_TITLE)

    for number in range(1000):
        grantee = f"name {number:04}{WIDE * 196}"
        lab.stores.shares.put_share(share(lab.endpoint_id, grantee, ALICE.identity_id))
        lab.stores.shares.put_share(dataclasses.replace(share(lab.function_id, grantee, ""), kind=ObjectKind.FUNCTION))
    for _ in range(500):
        theirs = lab.api.endpoint(caller=BOB, endpoint_name=WIDE * MAX_TITLE)
        lab.stores.shares.put_share(share(theirs, f"identity {ALICE.identity_id}", BOB.identity_id))
    paths = (f"endpoints/{lab.endpoint_id}/shares", f"functions/{lab.function_id}/shares", "shared")
    answers = [lab.call("GET", f"/v3/{path}") for path in paths]
    for each in answers[:2]:
        assert len(each.body["shares"]) == 1000, "the owner sees every grantee"
    return answers


def teams(lab: Lab) -> list[Answer]:
    for number in range(1000):
        lab.stores.shares.add_team(Team(new_id(), ALICE.identity_id, f"{number:04}{WIDE * 996}", AT))
    team_id = new_id()
    lab.stores.shares.add_team(Team(team_id, ALICE.identity_id, "mine", AT))
    for number in range(1000):
        lab.stores.shares.put_member(TeamMember(team_id, f"name {number:04}{WIDE * 196}", AT))
    return [lab.call("GET", "/v3/teams"), lab.call("GET", f"/v3/teams/{team_id}/members")]


def audit(lab: Lab) -> list[Answer]:
    detail = {"name": WIDE * MAX_TITLE}
    entries = [AuditEntry(AT, ALICE.identity_id, "function.register", new_id(), ALICE.identity_id, detail)] * 1000
    lab.stores.audit.add_entries(entries)
    found, after = 0, ""
    answers = []
    while True:
        answers.append(lab.call("GET", f"/v3/audit?limit=1000{after}"))
        found += len(answers[-1].body["entries"])
        if "next" not in answers[-1].body:
            break
        after = f"&after={answers[-1].body['next']}"
    assert found >= 1000, "the pages have all entries"
    return answers


def tokens(lab: Lab) -> list[Answer]:
    limits: dict[str, Any] = {"endpoints": [lab.endpoint_id] * 100, "functions": [lab.function_id] * 100}
    for _ in range(100):
        lab.api.token(name=WIDE * 100, **limits)
    return [lab.call("GET", "/v3/tokens")]


def actions(lab: Lab) -> list[Answer]:
    """Of each kind of result: 3,000 tasks, some with the largest results."""
    answers = []
    for text, many in ((EXPANDING, 100), (f'"{WIDE * 16_000}"', 100), ("no JSON", 3_000)):
        action = Action(new_task_id(), ALICE.identity_id, new_id(), "h", 3_000, AT, 10**9, label=WIDE * 64)
        lab.stores.actions.add_action(action)
        answers += action_answers(lab, action, text, many)
    return answers


def action_answers(lab: Lab, action: Action, text: str, many: int) -> list[Answer]:
    ids = action.task_ids()
    group_id = new_id()
    lab.stores.tasks.add_tasks(
        [Task(each, group_id, ALICE.identity_id, lab.endpoint_id, lab.function_id, "", b"p") for each in ids]
    )
    results = [
        TaskResult(
            each,
            lab.endpoint_id,
            1,
            TaskState.SUCCESS,
            Reporter.AGENT,
            result=f"11\n{text}".encode() if number < many else b"11\n1e15",
        )
        for number, each in enumerate(ids)
    ]
    lab.stores.tasks.record_results(results, at=AT)
    return [
        lab.call("GET", f"/actions/{action.action_id}/status"),
        lab.call("GET", f"/actions/actions/{action.action_id}"),
        lab.call("GET", "/actions/actions?status=active,succeeded"),
        lab.call("GET", f"/actions/{action.action_id}/log?limit=1000"),
    ]


def failed_actions(lab: Lab) -> list[Answer]:
    action = Action(new_task_id(), ALICE.identity_id, new_id(), "h", 200, AT, 10**9)
    lab.stores.actions.add_action(action)
    ids = action.task_ids()
    lab.stores.tasks.add_tasks(
        [Task(each, new_id(), ALICE.identity_id, lab.endpoint_id, lab.function_id, "", b"p") for each in ids]
    )
    error = largest_error()
    results = [TaskResult(each, lab.endpoint_id, 1, TaskState.FAILED, Reporter.AGENT, error=error) for each in ids]
    lab.stores.tasks.record_results(results, at=AT)
    return [lab.call("GET", f"/actions/{action.action_id}/status")]


LARGE: Final[dict[Callable[[Lab], list[Answer]], str]] = {
    many_results: "POST /v2/batch_status",
    one_result: "GET /v2/tasks/{task_id}",
    list_of_tasks: "GET /v3/tasks",
    task_group: "GET /v2/taskgroup/{task_group_id}",
    task_events: "GET /v3/tasks/{task_id}/events",
    output: "POST /v3/batch_output",
    submit: "POST /v3/endpoints/{endpoint_id}/submit",
    submit_v2: "POST /v2/submit",
    cancelled: "POST /v3/tasks/cancel, POST /v3/endpoints/{endpoint_id}/tasks/cancel",
    open_tasks: "GET /v3/endpoints/{endpoint_id}/tasks",
    functions: "GET /v3/functions, GET /v3/functions/{function_id}/versions, GET /v3/functions/{function}",
    one_function: "GET /v2/functions/{function_id}",
    aliases: "GET /v3/aliases",
    containers: "GET /v3/containers",
    endpoints: "GET /v2/endpoints",
    one_endpoint: "GET /v2/endpoints/{endpoint_id}, GET /v2/endpoints/{endpoint_id}/status, "
    "GET /v3/endpoints/{endpoint_id}/allowed_functions, GET /v3/endpoints/{endpoint_id}/qos, "
    "GET /v3/tasks/{task_id}/why",
    shares: "GET /v3/endpoints/{endpoint_id}/shares, GET /v3/functions/{function_id}/shares, GET /v3/shared",
    teams: "GET /v3/teams, GET /v3/teams/{team_id}/members",
    audit: "GET /v3/audit",
    tokens: "GET /v3/tokens",
    actions: "GET /actions/{action_id}/status, GET /actions/actions/{action_id}, GET /actions/actions, "
    "GET /actions/{action_id}/log",
    failed_actions: "GET /actions/{action_id}/status",
}

#: Routes with the answer of one that is above: the newer form, or an action after a change.
ALIKE: Final = (
    "GET /actions/actions/{action_id}/log, POST /actions/run, POST /actions/actions, POST /actions/{action_id}/cancel, "
    "POST /actions/actions/{action_id}/cancel, POST /actions/{action_id}/release, DELETE /actions/actions/{action_id}"
)
#: Routes that answer with some fields about one object, some at most of it, or a thousand rows of numbers.
SMALL: Final = (
    "DELETE /v2/endpoints/{endpoint_id}, DELETE /v2/functions/{function_id}, DELETE /v3/accounts/{account_id}, "
    "DELETE /v3/aliases/{name}, DELETE /v3/containers/{container}, DELETE /v3/endpoints/{endpoint_id}/credential, "
    "DELETE /v3/endpoints/{endpoint_id}/keys, DELETE /v3/endpoints/{endpoint_id}/shares/{share_id}, "
    "DELETE /v3/functions/{function_id}/shares/{share_id}, DELETE /v3/teams/{team_id}, "
    "DELETE /v3/teams/{team_id}/members, DELETE /v3/tokens/{token_id}, GET /actions, "
    "GET /v2/containers/build/{container_id}, GET /v2/containers/{container_id}/{technology}, "
    "GET /v2/get_amqp_result_connection_url, GET /v2/version, GET /v3/accounts, GET /v3/containers/{container}, "
    "GET /v3/endpoints/{endpoint_id}/keys, GET /v3/groups, GET /v3/ids, GET /v3/usage, GET /v3/whoami, "
    "POST /v2/containers, POST /v2/endpoints, POST /v2/endpoints/{endpoint_id}/lock, POST /v2/functions, "
    "POST /v3/accounts, POST /v3/aliases, POST /v3/blobs, POST /v3/containers, POST /v3/endpoints, "
    "POST /v3/endpoints/{endpoint_id}/connect, POST /v3/endpoints/{endpoint_id}/credential, "
    "POST /v3/endpoints/{endpoint_id}/lock, POST /v3/functions, POST /v3/stream, POST /v3/tasks/{task_id}/cancel, "
    "POST /v3/tasks/{task_id}/discard, POST /v3/tasks/{task_id}/retry, POST /v3/teams, POST /v3/tokens, "
    "PUT /v3/endpoints/{endpoint_id}, PUT /v3/endpoints/{endpoint_id}/shares, PUT /v3/functions/{function_id}, "
    "PUT /v3/functions/{function_id}/shares, PUT /v3/teams/{team_id}/members"
)


@pytest.mark.parametrize("fill", LARGE, ids=lambda fill: fill.__name__)
def test_largest_answers_can_be_sent(lab: Lab, fill: Callable[[Lab], list[Answer]]) -> None:
    """MemoryApi checks the size of each; an answer that was replaced by an error is none."""
    for answer in fill(lab):
        assert answer.status == 200, answer.body


def test_every_route_is_tried_or_has_a_small_answer() -> None:
    paths = json.loads(document())["paths"]
    routes = {f"{method.upper()} {path}" for path, methods in paths.items() for method in methods}
    assert routes == set(", ".join((*LARGE.values(), ALIKE, SMALL)).split(", "))


def test_an_answer_that_cannot_be_sent_is_an_error(lab: Lab) -> None:
    """Of an earlier release a function may be larger than what is registered now."""
    body = b'"' * 3_000_000
    function = Function(new_id(), ALICE.identity_id, "f", body, "h", created_at=AT)
    lab.stores.functions.add_function(function)

    answer = lab.call("GET", f"/v2/functions/{function.function_id}")

    assert (answer.status, answer.body["code"]) == (400, "ANSWER_TOO_LARGE")
    assert re.search(r"has \d+ bytes; \d+ are allowed", answer.body["message"])


def test_a_request_that_cannot_be_sent_to_lambda_is_refused(lab: Lab) -> None:
    """Within the limit of a request, and beyond that of Lambda: API Gateway refuses it, and the local API does."""
    payloads = {lab.function_id: [QUOTE * 1_000] * 2_000}
    text = json.dumps({"tasks": payloads})
    assert len(text) < MAX_REQUEST_BYTES < MAX_LAMBDA_ANSWER_BYTES < nested_bytes(text)

    answer = lab.call("POST", f"/v3/endpoints/{lab.endpoint_id}/submit", text)

    assert (answer.status, answer.body["code"]) == (413, "REQUEST_TOO_LARGE")


@pytest.mark.parametrize("text", ["x", QUOTE, "\\", "\n", "\x01", "é", WIDE, 'a"b\\c\nd'])
def test_sent_bytes_are_those_of_the_body_inside_an_answer(text: str) -> None:
    body = json.dumps({"result": text}, separators=(",", ":"))
    whole = len(json.dumps(body, ensure_ascii=False).encode())
    without = len(json.dumps(json.dumps({"result": ""}, separators=(",", ":"))))
    assert sent_bytes(text) - sent_bytes("") == whole - without
    assert nested_bytes(body) == whole


def test_requests_of_the_sdk_can_be_sent_to_lambda() -> None:
    """The SDK divides calls so that the event of each request is within Lambda's limit, whatever the arguments are."""
    for text in (QUOTE, "\\", "\n", "\x01", "é", "x"):
        payload = encode_payload((text * (60_000 // len(text.encode()))).encode())
        tasks = [PreparedTask(new_task_id(), new_id(), payload) for _ in range(150)]
        for chunk in chunks(tasks):
            body, _ = encode_submit(chunk, task_group_id=new_id(), options=TaskOptions())
            assert len(body) <= MAX_REQUEST_BYTES
            assert nested_bytes(body.decode()) <= MAX_NESTED_REQUEST_BYTES
