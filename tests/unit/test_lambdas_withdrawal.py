"""Withdrawn rights reach open tasks, and the owner of an endpoint sees and cancels them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from farcall_common.store.model import CancelOutcome
from farcall_common.wire.states import TaskState
from farcall_lambdas.services import Services, withdrawal
from farcall_lambdas.settings import ApiSettings
from tests.support.memory_api import ALICE, BOB, MemoryApi
from tests.support.stores import FakeQueue, single


class Lab:
    """A public endpoint of Alice, a public function of hers, and a forwarder that can lease."""

    def __init__(self) -> None:
        self.api = MemoryApi()
        assert isinstance(self.api.stores.queue, FakeQueue)
        self.queue = self.api.stores.queue
        self.function_id = self.api.function(public=True)
        self.endpoint_id = self.api.endpoint(public=True)
        self.fence = self.claim()

    def claim(self) -> int:
        fence = single.claim(self.queue, self.endpoint_id, "fwd-1", ttl_s=1e9)
        single.mark_restored(self.queue, self.endpoint_id, fence)
        return fence

    def submit(self, count: int = 1, *, caller: Any = BOB, function_id: str = "") -> list[str]:
        function_id = function_id or self.function_id
        body = {"tasks": {function_id: ["p"] * count}}
        answer = self.api.call("POST", f"/v3/endpoints/{self.endpoint_id}/submit", body, caller=caller)
        assert answer.status == 200, answer.body
        return list(answer.body["tasks"][function_id])

    def lease(self, limit: int = 10) -> list[str]:
        leased = single.lease(self.queue, self.endpoint_id, self.fence, limit=limit, lease_s=30)
        return [each.task.task_id for each in leased]

    def change(self, **fields: object) -> None:
        answer = self.api.call("PUT", f"/v3/endpoints/{self.endpoint_id}", fields)
        assert answer.status == 200, answer.body

    def error(self, task_id: str, *, caller: Any = BOB) -> Any:
        body = self.api.call("GET", f"/v2/tasks/{task_id}", caller=caller).body
        return body["status"], (body.get("error") or {}).get("code")

    def actions(self, caller: Any) -> list[Any]:
        entries = self.api.call("GET", "/v3/audit", caller=caller).body["entries"]
        return [entry for entry in entries if entry["action"] == "tasks.cancel"]

    def reconcile(self) -> int:
        """A round; how many tasks it cancelled because a right was withdrawn."""
        services = Services.over(self.api.stores, ApiSettings(), clock=self.api.clock)
        return services.reconciler.run().withdrawn

    def is_fenced(self) -> bool:
        return self.endpoint_id in self.queue.renew_ownership("fwd-1", {self.endpoint_id: (self.fence, "")}, ttl_s=9)


GONE = ("cancelled", "RIGHT_WITHDRAWN")
OPEN = ("received", None)


@pytest.fixture
def lab() -> Lab:
    return Lab()


def test_tasks_of_others_do_not_run_on_an_endpoint_that_was_made_private(lab: Lab) -> None:
    [theirs], [own] = lab.submit(), lab.submit(caller=ALICE)

    lab.change(public=False)

    assert lab.error(theirs) == GONE
    assert lab.error(own, caller=ALICE) == OPEN
    assert lab.lease() == [own]
    shown = lab.api.call("GET", f"/v2/tasks/{theirs}", caller=BOB).body["error"]
    assert lab.endpoint_id in shown["message"]
    assert "withdrawn" in shown["message"]
    assert shown["hint"]


def test_both_sides_read_in_the_audit_that_a_withdrawn_right_cancelled_tasks(lab: Lab) -> None:
    [theirs] = lab.submit()

    lab.change(public=False)

    for caller in (ALICE, BOB):
        [entry] = lab.actions(caller)
        assert (entry["identity_id"], entry["object_id"]) == (ALICE.identity_id, lab.endpoint_id)
        assert entry["detail"] == {"code": "RIGHT_WITHDRAWN", "tasks": 1, "task_ids": [theirs]}


@pytest.mark.parametrize("fields", [{"public": False}, {"allowed_functions": []}])
def test_waiting_tasks_are_kept_on_request_and_cancelled_later(lab: Lab, fields: dict[str, object]) -> None:
    [theirs] = lab.submit()

    lab.change(**fields, waiting_tasks="keep")
    assert lab.error(theirs) == OPEN
    lab.api.clock.now += 120
    lab.reconcile()
    assert lab.error(theirs) == OPEN

    lab.change(**fields, waiting_tasks="cancel")
    assert lab.error(theirs) == GONE


def test_tasks_of_functions_that_left_the_allow_list_do_not_run(lab: Lab) -> None:
    other = lab.api.function(public=True)
    by_version = lab.api.function(public=True)
    [gone], [kept] = lab.submit(), lab.submit(function_id=other)
    [fixed], [own] = lab.submit(function_id=by_version), lab.submit(caller=ALICE)

    lab.change(allowed_functions=[other, f"{by_version}@1"])

    assert lab.error(gone) == GONE
    assert lab.error(own, caller=ALICE) == GONE
    lab.fence = lab.claim()
    assert sorted(lab.lease()) == sorted([kept, fixed])


def test_a_wider_list_or_another_name_cancels_nothing(lab: Lab) -> None:
    other = lab.api.function(public=True)
    lab.change(allowed_functions=[lab.function_id])
    [theirs] = lab.submit()

    lab.change(allowed_functions=[lab.function_id, other], display_name="new")
    lab.change(allowed_functions=None)
    lab.api.clock.now += 120
    lab.reconcile()

    assert lab.error(theirs) == OPEN
    assert lab.api.stores.endpoints.list_withdrawals() == []


def test_dispatched_tasks_get_a_cancel_request(lab: Lab) -> None:
    [theirs] = lab.submit()
    lab.lease()

    lab.change(public=False)

    assert single.cancel_requests(lab.queue, lab.endpoint_id, lab.fence) == [theirs]
    assert lab.actions(BOB)


@pytest.mark.parametrize("is_deleted", [True, False])
def test_tasks_of_others_end_with_the_right_to_their_function(lab: Lab, is_deleted: bool) -> None:
    kept = lab.api.function(public=True)
    [theirs], [own], [other] = lab.submit(), lab.submit(caller=ALICE), lab.submit(function_id=kept)

    if is_deleted:
        answer = lab.api.call("DELETE", f"/v2/functions/{lab.function_id}")
    else:
        answer = lab.api.call("PUT", f"/v3/functions/{lab.function_id}", {"public": False})

    assert answer.status == 200, answer.body
    assert lab.error(theirs) == GONE
    assert lab.error(own, caller=ALICE) == lab.error(other) == OPEN


def test_tasks_of_others_are_kept_with_their_function_on_request(lab: Lab) -> None:
    [theirs] = lab.submit()
    lab.api.call("PUT", f"/v3/functions/{lab.function_id}", {"public": False, "waiting_tasks": "keep"})
    assert lab.error(theirs) == OPEN
    lab.api.call("DELETE", f"/v2/functions/{lab.function_id}?waiting_tasks=keep")
    assert lab.error(theirs) == OPEN


def test_the_reconciler_cancels_what_the_request_did_not(lab: Lab) -> None:
    """The queue was unavailable, and a submit was under way that had read the endpoint before."""
    [theirs] = lab.submit()
    lab.queue.reachable = False
    lab.change(public=False)
    lab.queue.reachable = True
    assert lab.error(theirs) == OPEN

    assert lab.reconcile() == 1
    assert lab.error(theirs) == GONE

    endpoints = lab.api.stores.endpoints
    endpoints.change_endpoint(lab.endpoint_id, {"public": True})
    [late] = lab.submit()
    endpoints.change_endpoint(lab.endpoint_id, {"public": False})
    lab.api.clock.now += 61
    assert lab.reconcile() == 1
    assert lab.error(late) == GONE
    assert endpoints.list_withdrawals() == []


def test_linked_identities_of_the_owner_keep_their_rights(lab: Lab) -> None:
    linked = dataclasses.replace(BOB, identity_set=frozenset({BOB.identity_id, ALICE.identity_id}))
    [theirs] = lab.submit()
    answer = lab.api.call("PUT", f"/v3/endpoints/{lab.endpoint_id}", {"public": False}, caller=linked)
    assert answer.status == 200
    assert lab.error(theirs) == OPEN


def test_persons_with_a_share_keep_their_rights(lab: Lab) -> None:
    lab.api.share(f"endpoints/{lab.endpoint_id}", BOB)
    [theirs] = lab.submit()
    lab.change(public=False)
    assert lab.error(theirs) == OPEN


def test_another_kind_of_list_ends_the_session_of_the_agent(lab: Lab) -> None:
    """Its forwarder reads whether arguments must be data when the agent connects."""
    lab.submit()
    lab.change(allowed_functions=[lab.function_id])
    assert lab.is_fenced()
    lab.fence = lab.claim()
    lab.change(allowed_functions=[])
    assert not lab.is_fenced()
    lab.change(allowed_functions=None)
    assert lab.is_fenced()


def test_the_reconciler_ends_the_session_of_the_agent_when_the_request_could_not(lab: Lab) -> None:
    lab.queue.reachable = False
    lab.change(allowed_functions=[lab.function_id])
    lab.queue.reachable = True
    assert not lab.is_fenced()
    lab.reconcile()
    assert lab.is_fenced()
    lab.fence = lab.claim()
    lab.reconcile()
    assert not lab.is_fenced()


def test_the_owner_of_an_endpoint_lists_its_open_tasks(lab: Lab) -> None:
    other = lab.api.function(public=True)
    first, [second] = lab.submit(2), lab.submit(caller=ALICE, function_id=other)
    lab.api.clock.now += 5
    path = f"/v3/endpoints/{lab.endpoint_id}/tasks"

    answer = lab.api.call("GET", path).body

    assert {each["task_id"] for each in answer["tasks"]} == {*first, second}
    assert "next" not in answer
    [shown] = lab.api.call("GET", f"{path}?function_id={other}").body["tasks"]
    assert shown == {
        "task_id": second,
        "submitter": ALICE.identity_id,
        "function_id": other,
        "function_version": 1,
        "status": TaskState.RECEIVED,
        "age_s": 5.0,
    }
    page = lab.api.call("GET", f"{path}?submitter={BOB.identity_id}&limit=1").body
    rest = lab.api.call("GET", f"{path}?submitter={BOB.identity_id}&after={page['next']}").body
    assert [each["task_id"] for each in page["tasks"] + rest["tasks"]] == sorted(first)


def test_only_the_owner_of_an_endpoint_lists_and_cancels_its_tasks(lab: Lab) -> None:
    [own] = lab.submit(caller=ALICE)
    path = f"/v3/endpoints/{lab.endpoint_id}/tasks"
    for body in ({"task_ids": [own]}, {"submitter": ALICE.identity_id}):
        assert lab.api.call("POST", f"{path}/cancel", body, caller=BOB).status == 403
    assert lab.api.call("GET", path, caller=BOB).status == 403
    assert lab.error(own, caller=ALICE) == OPEN


@pytest.mark.parametrize("by", ["task_ids", "submitter", "function_id"])
def test_the_owner_of_an_endpoint_cancels_tasks_of_others(lab: Lab, by: str) -> None:
    other = lab.api.function(public=True)
    [theirs], [own] = lab.submit(), lab.submit(caller=ALICE, function_id=other)
    wanted = {"task_ids": [theirs], "submitter": BOB.identity_id, "function_id": lab.function_id}[by]

    answer = lab.api.call("POST", f"/v3/endpoints/{lab.endpoint_id}/tasks/cancel", {by: wanted}).body

    assert answer == {"results": {theirs: {"task_id": theirs, "outcome": "cancelled", "status": "cancelled"}}}
    shown = lab.api.call("GET", f"/v2/tasks/{theirs}", caller=BOB).body["error"]
    assert (shown["code"], shown["message"]) == ("TASK_CANCELLED", "The owner of the endpoint cancelled the task.")
    assert lab.lease() == [own]
    assert lab.actions(ALICE) == lab.actions(BOB) != []
    assert lab.queue.cancel(lab.endpoint_id, [theirs]) == {theirs: CancelOutcome.FINISHED}


def test_tasks_of_other_endpoints_are_unknown_to_the_owner_of_an_endpoint(lab: Lab) -> None:
    elsewhere = lab.api.endpoint(caller=BOB)
    body = {"tasks": {lab.function_id: ["p"]}}
    answer = lab.api.call("POST", f"/v3/endpoints/{elsewhere}/submit", body, caller=BOB)
    [theirs] = answer.body["tasks"][lab.function_id]

    answer = lab.api.call("POST", f"/v3/endpoints/{lab.endpoint_id}/tasks/cancel", {"task_ids": [theirs]})

    assert answer.body["results"][theirs]["outcome"] == "unknown"
    assert lab.error(theirs) == OPEN


@pytest.mark.parametrize("body", [{}, {"task_ids": ["0" * 32], "submitter": "0" * 32}, {"task_ids": []}])
def test_an_unclear_request_cancels_nothing(lab: Lab, body: dict[str, object]) -> None:
    lab.submit()
    answer = lab.api.call("POST", f"/v3/endpoints/{lab.endpoint_id}/tasks/cancel", body)
    assert (answer.status, answer.body["code"]) in {(400, "INVALID_REQUEST"), (422, "INVALID_REQUEST")}
    assert len(lab.lease()) == 1


def test_many_tasks_of_one_owner_do_not_delay_the_withdrawal_of_another(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(withdrawal, "_PAGE", 5)
    monkeypatch.setattr(withdrawal, "_REQUEST_S", 0.0)  # a request cancels one page
    api = lab.api
    many = lab.submit(100)
    lab.change(public=False)
    lab.endpoint_id = api.endpoint(public=True, caller=BOB)
    few = lab.submit(6, caller=ALICE)
    answer = api.call("PUT", f"/v3/endpoints/{lab.endpoint_id}", {"public": False}, caller=BOB)
    assert answer.status == 200
    assert lab.error(few[-1], caller=ALICE) == OPEN

    service = api.application.services.reconciler._withdrawals
    for _ in range(2):  # rounds with time for one page each
        api.clock.now += ApiSettings().reconcile_period_s
        assert service.continue_all(until=0.0) in {1, 5}

    assert lab.error(few[-1], caller=ALICE) == GONE
    assert lab.error(many[-1]) == OPEN
    while service.continue_all(until=api.clock.now + 1):
        api.clock.now += 1
    assert lab.error(many[-1]) == GONE
