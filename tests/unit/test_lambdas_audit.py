"""Who did what."""

from __future__ import annotations

import logging
import uuid
from typing import Any

import pytest
from aws_lambda_powertools.utilities.typing import LambdaContext

from farcall_lambdas.identity import Identity
from farcall_lambdas.proxy_event import proxy_event
from tests.support.memory_api import ALICE, BOB, MemoryApi
from tests.support.stores import FakeQueue

KEY = "rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7"


class Lab:
    def __init__(self) -> None:
        self.api = MemoryApi()

    def do(self, method: str, path: str, body: object = None, *, caller: Identity = ALICE) -> Any:
        self.api.clock.now += 1
        answer = self.api.call(method, path, body, caller=caller)
        assert answer.status == 200, answer.body
        return answer.body

    def actions(self, *, caller: Identity = ALICE, query: str = "") -> list[tuple[str, str]]:
        entries = self.api.call("GET", f"/v3/audit{query}", caller=caller).body["entries"]
        return [(entry["action"], entry["object_id"]) for entry in entries]


@pytest.fixture
def lab() -> Lab:
    return Lab()


def test_every_change_has_an_audit_entry(lab: Lab) -> None:
    function = {"function_name": "f", "function_code": "4\n01\nf"}
    function_id = lab.do("POST", "/v3/functions", function)["function_uuid"]
    lab.do("PUT", f"/v3/functions/{function_id}", {"function_code": "4\n01\ng"})
    lab.do("PUT", f"/v3/functions/{function_id}", {"public": True})
    lab.do("POST", "/v3/aliases", {"name": "fit", "function_id": function_id})
    lab.do("DELETE", "/v3/aliases/fit")
    endpoint_id = lab.do("POST", "/v3/endpoints", {"endpoint_name": "laptop"})["endpoint_id"]
    lab.do("PUT", f"/v3/endpoints/{endpoint_id}", {"public": True})
    submit = {"tasks": {function_id: ["p", "q"]}}
    [task_id, other_id] = lab.do("POST", f"/v3/endpoints/{endpoint_id}/submit", submit)["tasks"][function_id]
    lab.do("POST", f"/v3/tasks/{task_id}/cancel")
    retried = lab.do("POST", f"/v3/tasks/{task_id}/retry", {})["task_id"]
    lab.do("DELETE", f"/v2/functions/{function_id}")
    lab.do("DELETE", f"/v2/endpoints/{endpoint_id}")

    assert lab.actions() == [
        ("function.register", function_id),
        ("function.update", function_id),
        ("function.update", function_id),
        ("alias.put", "fit"),
        ("alias.delete", "fit"),
        ("endpoint.register", endpoint_id),
        ("endpoint.update", endpoint_id),
        ("tasks.submit", endpoint_id),
        ("task.cancel", task_id),
        ("task.retry", task_id),
        ("function.delete", function_id),
        ("endpoint.delete", endpoint_id),
    ]
    entries = lab.api.call("GET", "/v3/audit").body["entries"]
    [submitted] = [entry for entry in entries if entry["action"] == "tasks.submit"]
    assert (submitted["detail"]["tasks"], submitted["detail"]["functions"]) == (2, [f"{function_id}@2"])
    [retry] = [entry for entry in entries if entry["action"] == "task.retry"]
    assert (retry["detail"]["task_id"], retry["detail"]["tasks"]) == (retried, 1)
    assert other_id not in str(entries)


def test_new_key_has_an_audit_entry(lab: Lab) -> None:
    endpoint_id = lab.do("POST", "/v3/endpoints", {"endpoint_name": "laptop"})["endpoint_id"]
    for _ in range(2):
        lab.api.call("POST", f"/v3/endpoints/{endpoint_id}/connect", {"public_key": KEY})
    assert [action for action, _ in lab.actions()] == ["endpoint.register", "endpoint.key"]


def test_refused_or_empty_change_has_no_audit_entry(lab: Lab) -> None:
    lab.api.call("DELETE", f"/v2/functions/{uuid.uuid4()}")
    lab.api.call("POST", f"/v3/endpoints/{uuid.uuid4()}/submit", {"tasks": {str(uuid.uuid4()): ["p"]}})
    lab.do("GET", "/v3/tasks")
    lab.do("POST", "/v3/tasks/cancel", {"task_ids": [str(uuid.uuid4())]})
    assert lab.actions() == []


def test_owner_sees_actions_of_others_on_its_endpoint(lab: Lab) -> None:
    endpoint = lab.do("POST", "/v3/endpoints", {"endpoint_name": "laptop", "public": True})
    function = {"function_name": "f", "function_code": "4\n01\nf"}
    function_id = lab.do("POST", "/v3/functions", function, caller=BOB)["function_uuid"]
    lab.do("POST", f"/v3/endpoints/{endpoint['endpoint_id']}/submit", {"tasks": {function_id: ["p"]}}, caller=BOB)

    assert [action for action, _ in lab.actions()] == ["endpoint.register", "tasks.submit"]
    assert [action for action, _ in lab.actions(caller=BOB)] == ["function.register", "tasks.submit"]
    last = lab.api.call("GET", "/v3/audit").body["entries"][-1]
    assert (last["identity_id"], last["owner_id"]) == (BOB.identity_id, ALICE.identity_id)


def test_audit_is_paged_to_any_size(lab: Lab) -> None:
    ids = [lab.do("POST", "/v3/endpoints", {"endpoint_name": f"e{n}"})["endpoint_id"] for n in range(7)]
    found: list[str] = []
    page = lab.api.call("GET", "/v3/audit?limit=3").body
    while True:
        found += [entry["object_id"] for entry in page["entries"]]
        if "next" not in page:
            break
        page = lab.api.call("GET", f"/v3/audit?limit=3&after={page['next']}").body
    assert found == ids
    since = lab.api.clock.now - 1
    assert [object_id for _, object_id in lab.actions(query=f"?since={since}")] == ids[-2:]
    assert [object_id for _, object_id in lab.actions(query=f"?since={since}&until={since + 1}")] == ids[-2:-1]


def test_source_address_is_in_audit_and_access_log(caplog: pytest.LogCaptureFixture) -> None:
    api = MemoryApi()
    event = proxy_event("POST", "/v3/endpoints", '{"endpoint_name": "laptop"}', caller=ALICE)
    event["requestContext"]["identity"] = {"sourceIp": "192.0.2.7"}
    with caplog.at_level(logging.INFO):
        api.application.answer(event, LambdaContext())

    [entry] = api.stores.audit.list_entries([ALICE.identity_id])
    assert entry.detail["source_ip"] == "192.0.2.7"
    [line] = [vars(record) for record in caplog.records if record.getMessage() == "request"]
    assert (line["method"], line["path"], line["status"]) == ("POST", "/v3/endpoints", 200)
    assert (line["identity_id"], line["source_ip"]) == (ALICE.identity_id, "192.0.2.7")


def test_source_address_of_others_is_hidden() -> None:
    api = MemoryApi()
    function_id = api.function(caller=BOB)
    endpoint_id = api.endpoint(public=True)
    body = f'{{"tasks": {{"{function_id}": ["p"]}}}}'
    event = proxy_event("POST", f"/v3/endpoints/{endpoint_id}/submit", body, caller=BOB)
    event["requestContext"]["identity"] = {"sourceIp": "192.0.2.7"}
    assert api.application.answer(event, LambdaContext())["statusCode"] == 200

    def shown_to(caller: Identity) -> list[Any]:
        entries = api.call("GET", "/v3/audit", caller=caller).body["entries"]
        return [each["detail"].get("source_ip") for each in entries if each["action"] == "tasks.submit"]

    assert (shown_to(BOB), shown_to(ALICE)) == (["192.0.2.7"], [None])


def forbidden(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.getMessage() == "request forbidden"]


def test_refusals_are_logged_and_audited_for_the_owner(lab: Lab, caplog: pytest.LogCaptureFixture) -> None:
    function = {"function_name": "f", "function_code": "4\n01\nf"}
    private = lab.do("POST", "/v3/functions", function)["function_uuid"]
    bobs = lab.do("POST", "/v3/functions", function, caller=BOB)["function_uuid"]
    hidden = lab.do("POST", "/v3/endpoints", {"endpoint_name": "hidden"})["endpoint_id"]
    listed = {"endpoint_name": "listed", "public": True, "allowed_functions": [private]}
    public = lab.do("POST", "/v3/endpoints", listed)["endpoint_id"]
    known = len(lab.actions())
    requests = [
        ("GET", f"/v2/functions/{private}", None, private, "FORBIDDEN"),
        ("DELETE", f"/v2/functions/{private}", None, private, "FORBIDDEN"),
        ("DELETE", f"/v2/endpoints/{public}", None, public, "FORBIDDEN"),
        ("POST", f"/v3/endpoints/{hidden}/submit", {"tasks": {bobs: ["p"]}}, hidden, "FORBIDDEN"),
        ("POST", f"/v3/endpoints/{public}/submit", {"tasks": {bobs: ["p"]}}, public, "FUNCTION_NOT_PERMITTED"),
        ("POST", "/v2/submit", {"tasks": [[bobs, hidden, "p"]]}, hidden, "FORBIDDEN"),
    ]

    with caplog.at_level(logging.INFO):
        for method, path, body, _, _ in requests:
            lab.api.clock.now += 1
            lab.api.call(method, path, body, caller=BOB)

    expected = [(f"{method} {path}", object_id, code) for method, path, _, object_id, code in requests]
    entries = lab.api.call("GET", "/v3/audit").body["entries"][known:]
    assert {entry["action"] for entry in entries} == {"request.forbidden"}
    assert {entry["identity_id"] for entry in entries} == {BOB.identity_id}
    audited = [(entry["detail"]["route"], entry["object_id"], entry["detail"]["code"]) for entry in entries]
    assert audited == expected
    logged = [vars(record) for record in forbidden(caplog)]
    assert [(line["route"], line["object_id"], line["code"]) for line in logged] == expected
    assert {(line["identity_id"], line["owner_id"]) for line in logged} == {(BOB.identity_id, ALICE.identity_id)}


def test_refusals_do_not_fill_the_audit(lab: Lab, caplog: pytest.LogCaptureFixture) -> None:
    endpoint_id = lab.do("POST", "/v3/endpoints", {"endpoint_name": "hidden"})["endpoint_id"]
    path = f"/v2/endpoints/{endpoint_id}"
    with caplog.at_level(logging.INFO):
        assert {lab.api.call("GET", path, caller=BOB).status for _ in range(50)} == {403}
    assert len(forbidden(caplog)) == 50
    assert lab.actions().count(("request.forbidden", endpoint_id)) == 10
    lab.api.clock.now += 400
    assert lab.api.call("GET", path, caller=BOB).status == 403
    assert lab.actions().count(("request.forbidden", endpoint_id)) == 11


def test_a_refusal_is_answered_while_the_stores_do_not_answer(lab: Lab) -> None:
    endpoint_id = lab.do("POST", "/v3/endpoints", {"endpoint_name": "hidden"})["endpoint_id"]
    assert isinstance(lab.api.stores.queue, FakeQueue)
    lab.api.stores.queue.reachable = False
    assert lab.api.call("GET", f"/v2/endpoints/{endpoint_id}", caller=BOB).status == 403
