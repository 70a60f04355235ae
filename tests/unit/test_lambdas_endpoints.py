"""Routes of endpoints."""

from __future__ import annotations

import dataclasses
import datetime as dt
import uuid
from typing import Any

import pytest

from farcall_common.store.model import EndpointStatus, Presence, TaskResult
from farcall_common.wire.states import Reporter, TaskState
from tests.support.memory_api import ALICE, BOB, MemoryApi
from tests.support.stores import fake_stores


@pytest.fixture
def api() -> MemoryApi:
    return MemoryApi()


def test_a_registered_endpoint_belongs_to_the_caller(api: MemoryApi) -> None:
    endpoint_id = api.endpoint(display_name="My laptop", public=True, description="at home")

    stored = api.stores.endpoints.get_endpoint(endpoint_id)
    assert stored is not None
    assert (stored.owner_id, stored.name, stored.display_name) == (ALICE.identity_id, "laptop", "My laptop")
    assert (stored.public, stored.description, stored.allowed_functions) == (True, "at home", None)


def test_only_the_owner_sees_an_endpoint_as_owned(api: MemoryApi) -> None:
    endpoint_id = api.endpoint(public=True, metadata={"owned": True})
    path = f"/v2/endpoints/{endpoint_id}"
    assert api.call("GET", path).body["owned"] is True
    assert api.call("GET", path, caller=BOB).body["owned"] is False
    linked = dataclasses.replace(BOB, identity_set=frozenset({BOB.identity_id, ALICE.identity_id}))
    assert api.call("GET", path, caller=linked).body["owned"] is True


def test_update_changes_only_the_sent_fields(api: MemoryApi) -> None:
    endpoint_id = api.endpoint(display_name="Old", metadata={"hostname": "h1", "endpoint_version": "1"})

    answer = api.call("PUT", f"/v3/endpoints/{endpoint_id}", {"display_name": "New", "metadata": {"hostname": "h2"}})

    shown = api.call("GET", f"/v2/endpoints/{endpoint_id}").body
    assert answer.status == 200
    assert (shown["name"], shown["display_name"], shown["hostname"]) == ("laptop", "New", "h2")
    assert shown["endpoint_version"] == "1"


def test_an_allow_list_is_set_and_cleared(api: MemoryApi) -> None:
    function_id = str(uuid.uuid4())
    endpoint_id = api.endpoint(allowed_functions=[function_id.upper()])
    path = f"/v3/endpoints/{endpoint_id}/allowed_functions"
    restricted = {"endpoint_id": endpoint_id, "restricted": True, "functions": [function_id]}
    assert api.call("GET", path).body == restricted

    api.call("PUT", f"/v3/endpoints/{endpoint_id}", {"allowed_functions": None})

    assert api.call("GET", path).body == {"endpoint_id": endpoint_id, "restricted": False, "functions": []}


def test_endpoints_are_listed_by_role(api: MemoryApi) -> None:
    mine = api.endpoint()
    public = api.call("POST", "/v3/endpoints", {"endpoint_name": "open", "public": True}, caller=BOB).body
    granted = api.call("POST", "/v3/endpoints", {"endpoint_name": "lab"}, caller=BOB).body
    api.call("POST", "/v3/endpoints", {"endpoint_name": "private"}, caller=BOB)
    api.share(f"endpoints/{granted['endpoint_id']}", ALICE, "see", caller=BOB)

    owned = api.call("GET", "/v2/endpoints").body
    usable = api.call("GET", "/v2/endpoints?role=any").body

    entry = {"uuid": mine, "name": "laptop", "display_name": None, "owner": ALICE.identity_id}
    assert owned == [entry | {"owned": True, "status": "offline"}]
    globus = {"X-Globus-Client-Info": "product=python-sdk"}
    assert api.call("GET", "/v2/endpoints", headers=globus).body == [entry]
    assert {each["uuid"] for each in usable} == {mine, public["endpoint_id"], granted["endpoint_id"]}
    assert {each["uuid"] for each in usable if each["owned"]} == {mine}
    assert api.call("GET", "/v2/endpoints?role=king").status == 422


def test_endpoint_is_online_while_heartbeats_arrive(api: MemoryApi) -> None:
    endpoint_id = api.endpoint()
    path = f"/v2/endpoints/{endpoint_id}/status"
    assert api.call("GET", path).body["status"] == "offline"

    status = EndpointStatus(managers=1, total_workers=4, idle_workers=3, pending_tasks=2, outstanding_tasks=5, blocks=2)
    status = dataclasses.replace(status, reported_at=api.clock.now - 3.0)
    api.stores.endpoints.set_presence([Presence(endpoint_id, True, status)])
    details = {"total_workers": 4, "idle_workers": 3, "pending_tasks": 2, "outstanding_tasks": 5, "managers": 1}
    details |= {"blocks": 2, "pending_blocks": 0}
    reported = {"reported_at": api.clock.now - 3.0, "age_s": 3.0}
    assert api.call("GET", path).body == {"status": "online", "details": details} | reported

    api.stores.endpoints.set_presence([Presence(endpoint_id, True, dataclasses.replace(status, problem="no nodes"))])
    assert api.call("GET", path).body["problem"] == "no nodes"
    api.share(f"endpoints/{endpoint_id}", BOB, "see")
    assert "problem" not in api.call("GET", path, caller=BOB).body
    api.share(f"endpoints/{endpoint_id}", BOB, "use")
    assert api.call("GET", path, caller=BOB).body["problem"] == "no nodes"

    api.clock.now += 121
    assert api.call("GET", path).body["status"] == "offline"


def test_an_endpoint_without_a_report_has_no_age(api: MemoryApi) -> None:
    endpoint_id = api.endpoint()
    api.stores.endpoints.set_presence([Presence(endpoint_id, True, EndpointStatus())])
    answer = api.call("GET", f"/v2/endpoints/{endpoint_id}/status").body
    assert answer["status"] == "online"
    assert answer.keys() == {"status", "details"}
    assert "blocks" not in answer["details"]


@pytest.mark.parametrize("hours", [1, -1])
def test_endpoint_is_online_by_the_database_clock(hours: int) -> None:
    database_s = [1_700_000_000.0]
    api = MemoryApi(stores=fake_stores(lambda: database_s[0]))
    api.clock.now = database_s[0] + 3600 * hours
    endpoint_id = api.endpoint()
    path = f"/v2/endpoints/{endpoint_id}/status"
    api.stores.endpoints.set_presence([Presence(endpoint_id, True, EndpointStatus(managers=1))])
    assert api.call("GET", path).body["status"] == "online"
    database_s[0] += 121
    assert api.call("GET", path).body["status"] == "offline"


@pytest.mark.parametrize("path", ["", "/status"])
def test_private_endpoint_is_seen_by_owner_and_grantees(api: MemoryApi, path: str) -> None:
    endpoint_id = api.endpoint()
    refused = api.call("GET", f"/v2/endpoints/{endpoint_id}{path}", caller=BOB)
    assert (refused.status, refused.body["code"]) == (403, "FORBIDDEN")

    api.share(f"endpoints/{endpoint_id}", BOB, "see")

    assert api.call("GET", f"/v2/endpoints/{endpoint_id}{path}", caller=BOB).status == 200


def test_only_the_owner_updates_and_deletes(api: MemoryApi) -> None:
    endpoint_id = api.endpoint(public=True)
    assert api.call("PUT", f"/v3/endpoints/{endpoint_id}", {"public": False}, caller=BOB).status == 403
    assert api.call("DELETE", f"/v2/endpoints/{endpoint_id}", caller=BOB).status == 403

    assert api.call("DELETE", f"/v2/endpoints/{endpoint_id}").body == {"result": 302}

    gone = api.call("PUT", f"/v3/endpoints/{endpoint_id}", {"public": False})
    assert (gone.status, gone.body["code"]) == (404, "ENDPOINT_UNKNOWN")


@pytest.mark.parametrize(
    "field", [{"authentication_policy": str(uuid.uuid4())}, {"high_assurance": True}, {"admins": [str(uuid.uuid4())]}]
)
def test_unenforced_protection_is_refused(api: MemoryApi, field: dict[str, Any]) -> None:
    answer = api.call("POST", "/v2/endpoints", {"endpoint_name": "x", **field})

    assert (answer.status, answer.body["code"]) == (400, "INVALID_REQUEST")
    assert next(iter(field)) in answer.body["message"]


def test_id_that_is_not_a_uuid_is_refused(api: MemoryApi) -> None:
    answer = api.call("GET", "/v2/endpoints/laptop")

    assert (answer.status, answer.body["message"]) == (422, "path.endpoint_id: not a UUID")


def test_endpoint_is_found_by_any_spelling_of_its_id(api: MemoryApi) -> None:
    endpoint_id = api.endpoint()

    assert api.call("GET", f"/v2/endpoints/{endpoint_id.upper()}").body["uuid"] == endpoint_id


ODD_RUNTIMES = ["3.12", 5, [], {}, {"python_version": 3}, {"python_version": "3.12", "packages": "dill"}]


@pytest.mark.parametrize("runtime", ODD_RUNTIMES)
def test_only_the_agent_reports_the_runtime_of_an_endpoint(api: MemoryApi, runtime: object) -> None:
    endpoint_id = api.endpoint()
    body = {"metadata": {"hostname": "h", "runtime": runtime}}

    refused = [
        api.call("POST", "/v3/endpoints", {"endpoint_name": "e", **body}),
        api.call("POST", "/v2/endpoints", {"endpoint_name": "e", **body}),
        api.call("PUT", f"/v3/endpoints/{endpoint_id}", body),
    ]

    assert {(answer.status, answer.body["code"]) for answer in refused} == {(400, "INVALID_REQUEST")}
    assert {answer.body["hint"] for answer in refused} == {"Leave runtime out."}
    assert "runtime" not in api.call("GET", f"/v2/endpoints/{endpoint_id}").body


@pytest.mark.parametrize("runtime", ODD_RUNTIMES)
def test_a_stored_runtime_that_cannot_be_read_is_left_out(api: MemoryApi, runtime: object) -> None:
    function_id = api.call("POST", "/v3/functions", {"function_name": "f", "function_code": "x"}).body["function_uuid"]
    endpoint_id = api.endpoint(public=True)
    api.stores.endpoints.change_endpoint(endpoint_id, {"metadata": {"runtime": runtime}})
    submitted = api.call("POST", f"/v3/endpoints/{endpoint_id}/submit", {"tasks": {function_id: ["p"]}})
    [task_id] = submitted.body["tasks"][function_id]
    result = TaskResult(task_id, endpoint_id, 1, TaskState.SUCCESS, Reporter.AGENT, result=b"r", details={"os": "x"})
    api.stores.tasks.record_results([result], at=dt.datetime.now(dt.UTC))

    shown = api.call("GET", f"/v2/endpoints/{endpoint_id}", caller=BOB)
    task = api.call("GET", f"/v2/tasks/{task_id}", headers={"X-Globus-Client-Info": "product=python-sdk"})

    assert (shown.status, shown.body["name"]) == (200, "laptop")
    assert "runtime" not in shown.body
    assert (task.status, task.body["result"]) == (200, "r")
