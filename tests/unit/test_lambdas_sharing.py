"""Sharing: rights of people, groups and teams to endpoints and functions, their end, and who may give them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from farcall_lambdas.allowed_users import SOME_GROUPS, AllowedUsers
from farcall_lambdas.identity import Identity
from farcall_lambdas.services import Services
from farcall_lambdas.settings import ApiSettings
from tests.support.memory_api import ALICE, BOB, MemoryApi, admitted

#: What a provider has verified about Bob.
BOB_OF_LAB = dataclasses.replace(BOB, verified=frozenset({"name bob@example.org", "group lab-7", "domain example.org"}))
CAROL = Identity("ca401000-0000-4000-8000-000000000003", "carol@example.org")


@pytest.fixture
def api() -> MemoryApi:
    return MemoryApi()


def statuses(api: MemoryApi, endpoint_id: str, caller: Identity) -> dict[str, int]:
    """The answers for each level of rights."""
    task = {"tasks": {api.function(caller=caller): ["p"]}}
    return {
        "see": api.call("GET", f"/v2/endpoints/{endpoint_id}", caller=caller).status,
        "use": api.call("POST", f"/v3/endpoints/{endpoint_id}/submit", task, caller=caller).status,
        "manage": api.call("GET", f"/v3/endpoints/{endpoint_id}/tasks", caller=caller).status,
        "own": api.call("DELETE", f"/v3/endpoints/{endpoint_id}/credential", caller=caller).status,
    }


@pytest.mark.parametrize(
    ("right", "allowed"), [("see", {"see"}), ("use", {"see", "use"}), ("manage", {"see", "use", "manage"})]
)
@pytest.mark.parametrize("grantee", [f"identity {BOB.identity_id}", "name Bob@Example.org", "group lab-7"])
def test_each_right_includes_the_lesser_ones(api: MemoryApi, grantee: str, right: str, allowed: set[str]) -> None:
    endpoint_id = api.endpoint()
    api.share(f"endpoints/{endpoint_id}", grantee, right)
    assert statuses(api, endpoint_id, BOB_OF_LAB) == {
        level: 200 if level in allowed else 403 for level in ("see", "use", "manage", "own")
    }
    assert statuses(api, endpoint_id, CAROL) == dict.fromkeys(("see", "use", "manage", "own"), 403)


def test_the_code_of_a_function_is_for_those_who_may_see_it_and_runs_for_those_who_may_use_it(api: MemoryApi) -> None:
    function_id, endpoint_id = api.function(), api.endpoint(public=True)
    api.share(f"functions/{function_id}", BOB, "see")
    task = {"tasks": {function_id: ["p"]}}
    assert api.call("GET", f"/v2/functions/{function_id}", caller=BOB).status == 200
    assert api.call("POST", f"/v3/endpoints/{endpoint_id}/submit", task, caller=BOB).status == 403

    api.share(f"functions/{function_id}", BOB, "manage")

    assert api.call("POST", f"/v3/endpoints/{endpoint_id}/submit", task, caller=BOB).status == 200
    changed = api.call("PUT", f"/v3/functions/{function_id}", {"description": "Bob's words"}, caller=BOB)
    assert changed.status == 200
    assert api.call("DELETE", f"/v2/functions/{function_id}", caller=BOB).status == 403


def test_a_manager_gives_use_but_no_manager_is_named_or_removed_by_another(api: MemoryApi) -> None:
    endpoint_id = api.endpoint()
    path = f"/v3/endpoints/{endpoint_id}/shares"
    api.share(f"endpoints/{endpoint_id}", BOB, "manage")
    api.share(f"endpoints/{endpoint_id}", CAROL, "use", caller=BOB)
    share = {"grantee": {"kind": "identity", "id": CAROL.identity_id}, "right": "manage"}
    assert api.call("PUT", path, share, caller=BOB).status == 403
    [bobs] = [each for each in api.call("GET", path).body["shares"] if each["right"] == "manage"]
    assert api.call("DELETE", f"{path}/{bobs['share_id']}", caller=BOB).status == 403
    own = {"grantee": {"kind": "identity", "id": BOB.identity_id}, "right": "see"}
    assert api.call("PUT", path, own, caller=BOB).status == 403
    assert api.call("GET", path, caller=CAROL).status == 403
    assert api.call("DELETE", f"{path}/{bobs['share_id']}").status == 200
    assert api.call("GET", path, caller=BOB).status == 403


def test_a_share_with_the_same_grantee_is_replaced(api: MemoryApi) -> None:
    endpoint_id = api.endpoint()
    first = api.share(f"endpoints/{endpoint_id}", "name bob@example.org", "use")
    second = api.share(f"endpoints/{endpoint_id}", "name BOB@example.org", "see", note="to look only")
    assert (first["share_id"], second["right"], second["note"]) == (second["share_id"], "see", "to look only")
    assert api.call("GET", f"/v3/endpoints/{endpoint_id}/shares").body["shares"] == [second]
    assert statuses(api, endpoint_id, BOB_OF_LAB)["use"] == 403


def test_people_see_what_is_shared_with_them(api: MemoryApi) -> None:
    endpoint_id, function_id = api.endpoint(), api.function()
    api.share(f"endpoints/{endpoint_id}", "group lab-7", "use", note="for the course")
    api.clock.now += 1
    api.share(f"functions/{function_id}", BOB, "see")
    found = api.call("GET", "/v3/shared", caller=BOB_OF_LAB).body["shared"]
    assert [(each["kind"], each["object_id"], each["name"], each["share"]["right"]) for each in found] == [
        ("function", function_id, "f", "see"),
        ("endpoint", endpoint_id, "laptop", "use"),
    ]
    assert found[1]["share"]["note"] == "for the course"
    assert api.call("GET", "/v3/shared", caller=CAROL).body == {"shared": []}
    assert api.call("DELETE", f"/v2/endpoints/{endpoint_id}").status == 200
    assert len(api.call("GET", "/v3/shared", caller=BOB_OF_LAB).body["shared"]) == 1


def test_what_is_shared_with_a_group_is_not_listed_for_a_token_of_a_former_member(api: MemoryApi) -> None:
    secret = api.token(caller=BOB_OF_LAB)
    of_token = admitted(secret, AllowedUsers.everyone())
    endpoint_id = api.endpoint()
    api.share(f"endpoints/{endpoint_id}", "group lab-7", "use")
    assert len(api.call("GET", "/v3/shared", caller=of_token).body["shared"]) == 1
    left = dataclasses.replace(BOB_OF_LAB, verified=frozenset({"name bob@example.org"}))
    assert api.call("GET", f"/v2/endpoints/{endpoint_id}", caller=left).status == 403
    assert api.call("GET", "/v3/shared", caller=of_token).body["shared"] == []
    assert api.call("GET", "/v2/endpoints?role=any", caller=of_token).body == []


def test_the_end_of_a_share_that_a_manager_gave_is_in_the_audit_of_the_owner(api: MemoryApi) -> None:
    endpoint_id = api.endpoint()
    api.share(f"endpoints/{endpoint_id}", BOB, "manage")
    api.share(f"endpoints/{endpoint_id}", CAROL, "use", caller=BOB, ends_at=api.clock.now + 10)
    api.clock.now += 11
    Services.over(api.stores, ApiSettings(), clock=api.clock).reconciler.run()
    assert "share.end" in {each["action"] for each in api.call("GET", "/v3/audit").body["entries"]}


def test_tasks_of_an_identity_that_is_linked_with_the_owner_keep_their_right(api: MemoryApi) -> None:
    other_id = "a11ce000-0000-4000-8000-0000000000ff"
    both = dataclasses.replace(ALICE, identity_id=other_id, identity_set=frozenset({other_id, ALICE.identity_id}))
    endpoint_id, function_id = api.endpoint(), api.function()
    submitted = api.call("POST", f"/v3/endpoints/{endpoint_id}/submit", {"tasks": {function_id: ["p"]}}, caller=both)
    [task_id] = submitted.body["tasks"][function_id]
    api.share(f"endpoints/{endpoint_id}", BOB, "use", ends_at=api.clock.now + 10)
    api.clock.now += 11
    Services.over(api.stores, ApiSettings(), clock=api.clock).reconciler.run()
    assert api.call("GET", f"/v2/tasks/{task_id}", caller=both).body["status"] == "received"


def test_a_function_with_managers_is_allowed_at_an_endpoint_by_version_only(api: MemoryApi) -> None:
    function_id, endpoint_id = api.function(), api.endpoint()
    path, manager = f"/v3/endpoints/{endpoint_id}", {"grantee": {"kind": "identity", "id": BOB.identity_id}}
    assert api.call("PUT", path, {"allowed_functions": [function_id]}).status == 200
    refused = api.call("PUT", f"/v3/functions/{function_id}/shares", {**manager, "right": "manage"})
    assert (refused.status, endpoint_id in refused.body["message"]) == (400, True)
    assert api.call("PUT", path, {"allowed_functions": [f"{function_id}@1"]}).status == 200
    api.share(f"functions/{function_id}", BOB, "manage")
    refused = api.call("PUT", path, {"allowed_functions": [function_id]})
    assert (refused.status, "managers" in refused.body["message"]) == (400, True)


def test_a_member_leaves_a_team_of_another(api: MemoryApi) -> None:
    team_id = api.call("POST", "/v3/teams", {"name": "optics"}).body["team_id"]
    path = f"/v3/teams/{team_id}/members"
    for each in (BOB, CAROL):
        assert api.call("PUT", path, {"kind": "identity", "id": each.identity_id}).status == 200
    assert api.call("DELETE", f"{path}?kind=identity&id={CAROL.identity_id}", caller=BOB).status == 403
    assert api.call("DELETE", f"{path}?kind=identity&id={BOB.identity_id}", caller=BOB).status == 200
    assert api.call("GET", path, caller=BOB).status == 404


class Shared:
    """A private endpoint of Alice that is shared with Bob, a function of his, and an open task."""

    def __init__(self, api: MemoryApi, grantee: str, **fields: Any) -> None:
        self.api = api
        self.endpoint_id = api.endpoint()
        self.share = api.share(f"endpoints/{self.endpoint_id}", grantee, "use", **fields)
        self.function_id = api.function(caller=BOB)
        answer = self.submit()
        assert answer.status == 200, answer.body
        [self.task_id] = answer.body["tasks"][self.function_id]

    def submit(self, caller: Identity = BOB_OF_LAB) -> Any:
        body = {"tasks": {self.function_id: ["p"]}}
        return self.api.call("POST", f"/v3/endpoints/{self.endpoint_id}/submit", body, caller=caller)

    def code(self) -> str | None:
        """The error of the task, after a round of the reconciler."""
        Services.over(self.api.stores, ApiSettings(), clock=self.api.clock).reconciler.run()
        body = self.api.call("GET", f"/v2/tasks/{self.task_id}", caller=BOB).body
        return (body.get("error") or {}).get("code")


def test_tasks_are_cancelled_when_a_share_is_taken_back(api: MemoryApi) -> None:
    lab = Shared(api, "name bob@example.org")
    share_id = lab.share["share_id"]
    assert api.call("DELETE", f"/v3/endpoints/{lab.endpoint_id}/shares/{share_id}").status == 200
    assert (lab.code(), lab.submit().status) == ("RIGHT_WITHDRAWN", 403)
    again = api.call("DELETE", f"/v3/endpoints/{lab.endpoint_id}/shares/{share_id}")
    assert again.status == 404


def test_tasks_are_cancelled_when_use_becomes_see(api: MemoryApi) -> None:
    lab = Shared(api, "name bob@example.org")
    api.share(f"endpoints/{lab.endpoint_id}", "name bob@example.org", "see")
    assert lab.code() == "RIGHT_WITHDRAWN"


def test_a_right_that_two_shares_give_is_lost_with_the_second(api: MemoryApi) -> None:
    lab = Shared(api, "name bob@example.org")
    other = api.share(f"endpoints/{lab.endpoint_id}", "group lab-7", "manage")
    path = f"/v3/endpoints/{lab.endpoint_id}/shares"
    assert api.call("DELETE", f"{path}/{lab.share['share_id']}").status == 200
    assert lab.code() is None
    assert api.call("DELETE", f"{path}/{other['share_id']}").status == 200
    assert lab.code() == "RIGHT_WITHDRAWN"


def test_a_share_ends_at_its_time_and_is_deleted(api: MemoryApi) -> None:
    lab = Shared(api, "name bob@example.org", ends_at=api.clock.now + 100)
    assert lab.code() is None
    api.clock.now += 101
    assert lab.submit().status == 403
    assert lab.code() == "RIGHT_WITHDRAWN"
    assert api.call("GET", f"/v3/endpoints/{lab.endpoint_id}/shares").body == {"shares": []}
    assert "share.end" in {each["action"] for each in api.call("GET", "/v3/audit").body["entries"]}
    past = {"grantee": {"kind": "name", "id": "x"}, "right": "use", "ends_at": api.clock.now}
    assert api.call("PUT", f"/v3/endpoints/{lab.endpoint_id}/shares", past).status == 400


def test_tasks_are_cancelled_after_their_submitter_has_left_the_group(api: MemoryApi) -> None:
    lab = Shared(api, "group lab-7")
    assert lab.code() is None
    left = dataclasses.replace(BOB_OF_LAB, verified=frozenset({"name bob@example.org"}))
    assert lab.submit(left).status == 403
    assert lab.code() == "RIGHT_WITHDRAWN"


def test_a_lost_group_is_noticed_by_a_process_that_knew_its_member_before(api: MemoryApi) -> None:
    without = dataclasses.replace(BOB_OF_LAB, verified=frozenset({"name bob@example.org"}))
    other, private = MemoryApi(stores=api.stores, clock=api.clock), f"/v2/endpoints/{api.endpoint()}"
    assert other.call("GET", private, caller=without).status == 403
    lab = Shared(api, "group lab-7")
    api.clock.now += 61
    assert other.call("GET", private, caller=without).status == 403
    assert lab.code() == "RIGHT_WITHDRAWN"


def test_tasks_are_kept_while_the_groups_of_their_submitter_are_not_known(api: MemoryApi) -> None:
    lab = Shared(api, "group lab-7")
    unknown = dataclasses.replace(BOB, verified=frozenset({"name bob@example.org", SOME_GROUPS}))
    assert lab.submit(unknown).status == 403
    assert lab.code() is None


def test_teams_have_members_who_have_what_is_shared_with_the_team(api: MemoryApi) -> None:
    team = api.call("POST", "/v3/teams", {"name": "optics"}).body
    path = f"/v3/teams/{team['team_id']}"
    member = {"kind": "name", "id": "Bob@example.org"}
    assert api.call("PUT", f"{path}/members", member).status == 200
    assert api.call("PUT", f"{path}/members", member).status == 200
    lab = Shared(api, f"team {team['team_id']}")
    [found] = api.call("GET", f"{path}/members", caller=BOB_OF_LAB).body["members"]
    assert found["member"] == {"kind": "name", "id": "bob@example.org"}
    assert api.call("GET", "/v3/teams", caller=BOB_OF_LAB).body["teams"] == [team]
    assert api.call("PUT", f"{path}/members", {"kind": "name", "id": "eve"}, caller=BOB_OF_LAB).status == 403
    assert api.call("DELETE", path, caller=BOB_OF_LAB).status == 403
    for method, each in (("GET", f"{path}/members"), ("DELETE", path)):
        assert api.call(method, each, caller=CAROL).status == 404, "callers learn of their own teams only"

    gone = api.call("DELETE", f"{path}/members?kind=name&id=bob%40example.org")

    assert (gone.status, lab.code(), lab.submit().status) == (200, "RIGHT_WITHDRAWN", 403)
    assert api.call("DELETE", f"{path}/members?kind=name&id=bob%40example.org").status == 404


def test_what_was_shared_with_a_deleted_team_is_withdrawn(api: MemoryApi) -> None:
    team_id = api.call("POST", "/v3/teams", {"name": "optics"}).body["team_id"]
    api.call("PUT", f"/v3/teams/{team_id}/members", {"kind": "identity", "id": BOB.identity_id})
    lab = Shared(api, f"team {team_id}")
    assert api.call("DELETE", f"/v3/teams/{team_id}").status == 200
    assert lab.code() == "RIGHT_WITHDRAWN"
    assert api.call("GET", f"/v3/endpoints/{lab.endpoint_id}/shares").body == {"shares": []}


def test_nothing_is_shared_with_a_team_of_others(api: MemoryApi) -> None:
    team_id = api.call("POST", "/v3/teams", {"name": "optics"}, caller=CAROL).body["team_id"]
    share = {"grantee": {"kind": "team", "id": team_id}, "right": "use"}
    assert api.call("PUT", f"/v3/endpoints/{api.endpoint()}/shares", share).status == 404


@pytest.mark.parametrize(
    "grantee",
    [
        {"kind": "everyone", "id": "x"},
        {"kind": "name", "id": ""},
        {"kind": "name", "id": "two words"},
        {"kind": "name", "id": "a\0b"},
        {"kind": "name", "id": "x" * 201},
        {"kind": "identity"},
    ],
)
def test_wrong_grantees_are_refused(api: MemoryApi, grantee: dict[str, str]) -> None:
    share = {"grantee": grantee, "right": "use"}
    assert api.call("PUT", f"/v3/endpoints/{api.endpoint()}/shares", share).status == 422


def test_shares_teams_and_members_are_limited() -> None:
    api = MemoryApi(settings=ApiSettings(max_shares=1, max_teams=1, max_members=1))
    endpoint_id = api.endpoint()
    api.share(f"endpoints/{endpoint_id}", BOB)
    api.share(f"endpoints/{endpoint_id}", BOB, "see")
    more = {"grantee": {"kind": "name", "id": "x"}, "right": "use"}
    refused = [api.call("PUT", f"/v3/endpoints/{endpoint_id}/shares", more)]
    team_id = api.call("POST", "/v3/teams", {"name": "optics"}).body["team_id"]
    refused.append(api.call("POST", "/v3/teams", {"name": "more"}))
    api.call("PUT", f"/v3/teams/{team_id}/members", {"kind": "name", "id": "x"})
    assert api.call("PUT", f"/v3/teams/{team_id}/members", {"kind": "name", "id": "x"}).status == 200
    refused.append(api.call("PUT", f"/v3/teams/{team_id}/members", {"kind": "name", "id": "y"}))
    assert [each.body["code"] for each in refused] == ["QUOTA_EXCEEDED"] * 3


def test_a_manager_allows_functions_of_the_endpoints_owner_only_without_a_version(api: MemoryApi) -> None:
    """The manager could change a function of theirs after the owner has read the list."""
    endpoint_id = api.endpoint()
    api.share(f"endpoints/{endpoint_id}", BOB, "manage")
    theirs, own = api.function(caller=BOB), api.function()
    allow = {"allowed_functions": [theirs]}
    assert api.call("PUT", f"/v3/endpoints/{endpoint_id}", allow, caller=BOB).status == 400
    allow = {"allowed_functions": [own, f"{theirs}@1"]}
    assert api.call("PUT", f"/v3/endpoints/{endpoint_id}", allow, caller=BOB).status == 200


def test_both_sides_of_a_share_are_in_the_audit(api: MemoryApi) -> None:
    endpoint_id = api.endpoint()
    api.share(f"endpoints/{endpoint_id}", BOB, "manage")
    share = api.share(f"endpoints/{endpoint_id}", CAROL, "use", caller=BOB)
    api.call("DELETE", f"/v3/endpoints/{endpoint_id}/shares/{share['share_id']}", caller=BOB)
    entries = api.call("GET", "/v3/audit").body["entries"]
    assert [(each["action"], each["identity_id"]) for each in entries if each["action"].startswith("share.")] == [
        ("share.put", ALICE.identity_id),
        ("share.put", BOB.identity_id),
        ("share.delete", BOB.identity_id),
    ]
