"""Who is calling, the limits in force, and task groups."""

from __future__ import annotations

import uuid
from typing import Any

import pytest

from farcall_lambdas.identity import Identity
from farcall_lambdas.settings import ApiSettings
from tests.support.memory_api import ALICE, BOB, MemoryApi


def test_account_shows_identity_and_limits() -> None:
    api = MemoryApi(settings=ApiSettings(max_functions=5, rate_per_s=7.5))
    for _ in range(2):
        api.call("POST", "/v3/functions", {"function_name": "f", "function_code": "x"})
    caller = Identity(ALICE.identity_id, "alice", frozenset({"other", "third"}), provider="globus")
    said = api.call("GET", "/v3/whoami", caller=caller).body
    limits = said.pop("limits")
    assert said == {
        "identity_id": ALICE.identity_id,
        "username": "alice",
        "linked": ["other", "third"],
        "provider": "globus",
    }
    assert limits["functions"] == {"used": 2, "limit": 5}
    assert limits["endpoints"] == {"used": 0, "limit": 1000}
    assert (limits["rate_per_s"], limits["max_payload_bytes"]) == (7.5, 10 * 1024 * 1024)
    assert api.call("GET", "/v3/whoami", caller=None).status == 401


@pytest.fixture
def api() -> MemoryApi:
    return MemoryApi()


def submit(api: MemoryApi, group_id: str, count: int, *, caller: Identity = ALICE) -> Any:
    api.clock.now += 1
    function_id, endpoint_id = api.function(caller=caller), api.endpoint(caller=caller)
    body = {"tasks": {function_id: ["p"] * count}, "task_group_id": group_id}
    answer = api.call("POST", f"/v3/endpoints/{endpoint_id}/submit", body, caller=caller)
    return answer.body["tasks"][function_id]


def test_groups_are_listed_newest_first_with_their_states(api: MemoryApi) -> None:
    first, second = str(uuid.uuid4()), str(uuid.uuid4())
    task_ids = submit(api, first, 3)
    submit(api, second, 1)
    submit(api, str(uuid.uuid4()), 1, caller=BOB)
    api.call("POST", f"/v3/tasks/{task_ids[0]}/cancel")
    answer = api.call("GET", "/v3/groups").body
    assert [(each["task_group_id"], each["tasks"], each["states"]) for each in answer["groups"]] == [
        (second, 1, {"received": 1}),
        (first, 3, {"received": 2, "cancelled": 1}),
    ]
    assert answer["next"] is None


def test_ids_of_own_tasks_and_groups_are_found_by_their_first_digits(api: MemoryApi) -> None:
    group_id = "abcd0123-0000-4000-8000-000000000001"
    task_ids = submit(api, group_id, 2)
    submit(api, "abcd0123-0000-4000-8000-000000000002", 1, caller=BOB)

    def found(kind: str, beginning: str) -> Any:
        answer = api.call("GET", f"/v3/ids?kind={kind}&beginning={beginning}")
        return answer.body["ids"] if answer.status == 200 else answer.status

    assert found("group", "abcd") == found("group", "ABCD0123-0") == found("group", "abcd01230") == [group_id]
    assert found("group", group_id) == [group_id]
    assert found("group", "abce") == found("task", "abcd") == []
    assert found("task", task_ids[0][:30]) in ([task_ids[0]], sorted(task_ids, reverse=True))
    assert found("task", "abc") == found("task", "wxyz") == found("function", "abcd") == 422


def test_more_digits_are_wanted_if_too_many_ids_begin_alike(api: MemoryApi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api.stores.tasks, "find_ids", lambda *_, **__: (["a"], False))
    answer = api.call("GET", "/v3/ids?kind=task&beginning=0199")
    assert (answer.body["code"], answer.body["hint"]) == ("INVALID_REQUEST", "Give more digits.")


def test_groups_are_paged(api: MemoryApi) -> None:
    ids = [str(uuid.uuid4()) for _ in range(5)]
    for group_id in ids:
        submit(api, group_id, 1)
    seen, page = [], "/v3/groups?limit=2"
    for _ in range(3):
        answer = api.call("GET", page).body
        seen += [each["task_group_id"] for each in answer["groups"]]
        page = f"/v3/groups?limit=2&before={answer['next']}"
    assert seen == ids[::-1]
    assert answer["next"] is None
