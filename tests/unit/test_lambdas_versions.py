"""Versions of functions, aliases, and what tasks record of them."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Callable
from typing import Any

import pytest

from farcall_common.store.model import Function
from farcall_lambdas.settings import ApiSettings
from tests.support.memory_api import ALICE, BOB, MemoryApi
from tests.support.stores import FakeDatabase, fake_stores

FIRST, SECOND = "10\n01\nversion1", "10\n01\nversion2"


@pytest.fixture
def api() -> MemoryApi:
    return MemoryApi()


@pytest.fixture
def function_id(api: MemoryApi) -> str:
    return api.function(function_code=FIRST, description="first", meta={"a": 1})


def update(api: MemoryApi, function_id: str, **changes: Any) -> int:
    answer = api.call("PUT", f"/v3/functions/{function_id}", changes)
    assert answer.status == 200, answer.body
    assert answer.body["function_uuid"] == function_id
    return int(answer.body["version"])


def code(api: MemoryApi, function_id: str, query: str = "") -> Any:
    return api.call("GET", f"/v2/functions/{function_id}{query}").body.get("function_code")


def submit(api: MemoryApi, reference: str, **options: Any) -> Any:
    endpoint_id = api.endpoint()
    return api.call("POST", f"/v3/endpoints/{endpoint_id}/submit", {"tasks": {reference: ["4\n11\n1"]}, **options})


def test_new_code_is_a_new_version_and_the_old_one_stays(api: MemoryApi, function_id: str) -> None:
    assert update(api, function_id, function_code=SECOND, meta={"a": 2}) == 2
    assert (code(api, function_id), code(api, function_id, "?version=1")) == (SECOND, FIRST)
    assert api.call("GET", f"/v2/functions/{function_id}?version=3").body["code"] == "FUNCTION_UNKNOWN"
    [entry] = api.call("GET", "/v3/functions").body["functions"]
    assert (entry["version"], entry["metadata"], entry["description"]) == (2, {"a": 2}, "first")


def test_repeated_update_changes_nothing(api: MemoryApi, function_id: str) -> None:
    assert update(api, function_id, function_code=FIRST, meta={"a": 1}) == 1
    assert update(api, function_id, function_code=SECOND) == 2
    assert update(api, function_id, function_code=SECOND) == 2


def test_function_fields_change_for_all_versions(api: MemoryApi, function_id: str) -> None:
    update(api, function_id, function_code=SECOND)
    assert update(api, function_id, function_name="g", description="better", public=True) == 2
    assert api.call("GET", f"/v2/functions/{function_id}?version=1", caller=BOB).body["function_name"] == "g"


def test_memoization_is_kept_by_new_versions(api: MemoryApi, function_id: str) -> None:
    assert update(api, function_id, memoize=True) == 2
    assert update(api, function_id, function_code=SECOND, meta={"b": 1}) == 3
    versions = api.call("GET", f"/v3/functions/{function_id}/versions").body["versions"]
    assert [each["metadata"] for each in versions] == [{"b": 1, "memoize": True}, {"a": 1, "memoize": True}, {"a": 1}]


def test_versions_are_listed_newest_first(api: MemoryApi, function_id: str) -> None:
    api.clock.now += 5
    update(api, function_id, function_code=SECOND)
    versions = api.call("GET", f"/v3/functions/{function_id}/versions").body["versions"]
    hashes = [hashlib.sha256(each.encode()).hexdigest() for each in (SECOND, FIRST)]
    assert [(each["version"], each["function_hash"]) for each in versions] == [(2, hashes[0]), (1, hashes[1])]
    assert versions[0]["created_at"] - versions[1]["created_at"] == 5


def test_version_may_be_source_text(api: MemoryApi, function_id: str) -> None:
    update(api, function_id, function_code="def f(): pass", serialized=False)
    assert code(api, function_id) == "18\nst\nf:def f(): pass"


def test_only_its_owner_changes_a_function(api: MemoryApi, function_id: str) -> None:
    update(api, function_id, public=True)
    refused = api.call("PUT", f"/v3/functions/{function_id}", {"function_code": SECOND}, caller=BOB)
    assert (refused.status, refused.body["code"]) == (403, "FORBIDDEN")
    assert api.call("GET", f"/v3/functions/{function_id}/versions", caller=BOB).status == 200


def test_versions_have_a_quota_and_bodies_a_limit() -> None:
    api = MemoryApi(settings=ApiSettings(max_versions=2, max_payload_bytes=20))
    function_id = api.function(function_code=FIRST)
    update(api, function_id, function_code=SECOND)
    over = api.call("PUT", f"/v3/functions/{function_id}", {"function_code": "x"})
    assert (over.status, over.body["code"]) == (429, "QUOTA_EXCEEDED")
    large = api.call("PUT", f"/v3/functions/{function_id}", {"function_code": "x" * 21})
    assert (large.status, large.body["code"]) == (413, "PAYLOAD_TOO_LARGE")


class RacedDatabase(FakeDatabase):
    """Makes the calls in ``before_add``, each once, before it adds a function."""

    def __init__(self) -> None:
        super().__init__()
        self.before_add: list[Callable[[], object]] = []

    def add_function(self, function: Function) -> None:
        if self.before_add:
            self.before_add.pop()()
        super().add_function(function)


def test_concurrent_updates_are_two_versions() -> None:
    database = RacedDatabase()
    api = MemoryApi(stores=fake_stores(database=database))
    function_id = api.function(function_code=FIRST)
    database.before_add.append(lambda: update(api, function_id, function_code=SECOND))
    assert update(api, function_id, function_code="10\n01\nversion3") == 3
    assert code(api, function_id, "?version=2") == SECOND


def test_a_task_records_the_version_that_it_runs(api: MemoryApi, function_id: str) -> None:
    update(api, function_id, function_code=SECOND)
    seen = {}
    for reference in (function_id, f"{function_id}@1", f"{function_id}@2"):
        answer = submit(api, reference)
        [task_id] = answer.body["tasks"][reference]
        task = api.stores.tasks.get_tasks([task_id])[task_id]
        shown = api.call("GET", f"/v2/tasks/{task_id}").body
        assert (shown["function_id"], shown["function_version"]) == (function_id, task.function_version)
        seen[reference] = (task.function_id, task.function_version, task.function_hash)
    hashes = [hashlib.sha256(each.encode()).hexdigest() for each in (FIRST, SECOND)]
    assert seen == {
        function_id: (function_id, 2, hashes[1]),
        f"{function_id}@1": (function_id, 1, hashes[0]),
        f"{function_id}@2": (function_id, 2, hashes[1]),
    }
    listed = api.call("GET", "/v3/tasks").body["tasks"]
    assert sorted(each["function_version"] for each in listed) == [1, 2, 2]


def test_allow_list_covers_all_versions_of_a_function(api: MemoryApi, function_id: str) -> None:
    endpoint_id = api.endpoint(allowed_functions=[function_id])
    answer = api.call("POST", f"/v3/endpoints/{endpoint_id}/submit", {"tasks": {f"{function_id}@1": ["x"]}})
    assert answer.status == 200


@pytest.mark.parametrize("reference", ["@1", "@0", "@01", "@x", "@"])
def test_invalid_versions_are_refused(api: MemoryApi, function_id: str, reference: str) -> None:
    wanted = str(uuid.uuid4()) + reference if reference == "@1" else function_id + reference
    answer = submit(api, wanted)
    assert (answer.status, answer.body["code"]) in ((404, "FUNCTION_UNKNOWN"), (422, "INVALID_REQUEST"))


def test_an_alias_names_a_version_or_the_newest(api: MemoryApi, function_id: str) -> None:
    update(api, function_id, function_code=SECOND)
    pinned = api.call("POST", "/v3/aliases", {"name": "stable", "function_id": function_id, "version": 1})
    assert pinned.body == {"name": "stable", "function_uuid": function_id, "version": 1}
    api.call("POST", "/v3/aliases", {"name": "newest", "function_id": function_id})
    found = {each: api.call("GET", f"/v3/functions/{each}").body for each in ("stable", "newest", f"{function_id}@1")}
    assert [(each["version"], each["reference"]) for each in found.values()] == [
        (1, f"{function_id}@1"),
        (2, function_id),
        (1, f"{function_id}@1"),
    ]
    assert [each["name"] for each in api.call("GET", "/v3/aliases").body["aliases"]] == ["newest", "stable"]
    assert api.call("GET", "/v3/aliases", caller=BOB).body["aliases"] == []
    assert api.call("GET", "/v3/functions/stable", caller=BOB).body["code"] == "FUNCTION_UNKNOWN"


def test_alias_is_deleted_alone_and_with_its_function(api: MemoryApi, function_id: str) -> None:
    for name in ("one", "two"):
        api.call("POST", "/v3/aliases", {"name": name, "function_id": function_id})
    assert api.call("DELETE", "/v3/aliases/one").body == {"result": 302}
    assert api.call("DELETE", "/v3/aliases/one").body["code"] == "FUNCTION_UNKNOWN"
    api.call("DELETE", f"/v2/functions/{function_id}")
    assert api.call("GET", "/v3/aliases").body["aliases"] == []


def test_alias_needs_permission_to_run_its_function(api: MemoryApi, function_id: str) -> None:
    body = {"name": "theirs", "function_id": function_id}
    assert api.call("POST", "/v3/aliases", body, caller=BOB).status == 403
    update(api, function_id, public=True)
    assert api.call("POST", "/v3/aliases", body, caller=BOB).status == 200
    assert api.call("POST", "/v3/aliases", {**body, "version": 9}).body["code"] == "FUNCTION_UNKNOWN"
    assert api.stores.functions.get_alias(ALICE.identity_id, "theirs") is None


@pytest.mark.parametrize("name", ["", "a b", "a@1", "-a", "x" * 101, "0199c0de-0000-7000-8000-000000000001", "a" * 32])
def test_invalid_alias_names_are_refused(api: MemoryApi, function_id: str, name: str) -> None:
    answer = api.call("POST", "/v3/aliases", {"name": name, "function_id": function_id})
    assert (answer.status, answer.body["code"]) == (422, "INVALID_REQUEST")


SIGNED = "-----BEGIN SSH SIGNATURE-----\nU1NIU0lH\n-----END SSH SIGNATURE-----\n"


def signature(api: MemoryApi, function_id: str) -> Any:
    return api.call("GET", f"/v2/functions/{function_id}").body["metadata"].get("ssh_signature")


def test_a_signature_is_stored_with_its_version(api: MemoryApi) -> None:
    function_id = api.function(function_code=FIRST, meta={"ssh_signature": "mine", "a": 1}, signature=SIGNED)
    assert signature(api, function_id) == SIGNED
    assert update(api, function_id, meta={"a": 2}) == 2
    assert update(api, function_id, memoize=True) == 3
    assert signature(api, function_id) == SIGNED, "name and code are what was signed"
    assert update(api, function_id, function_code=SECOND) == 4
    assert signature(api, function_id) is None
    assert update(api, function_id, signature=SIGNED) == 5
    assert update(api, function_id, function_name="renamed") == 6
    assert signature(api, function_id) is None
    assert update(api, function_id, function_name="again", signature=SIGNED) == 7
    assert signature(api, function_id) == SIGNED
    answer = api.call("PUT", f"/v3/functions/{function_id}", {"signature": "x"})
    assert answer.status in (400, 422), answer.body
