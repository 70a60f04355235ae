"""Routes of functions."""

from __future__ import annotations

import hashlib
import uuid
from typing import Any

import pytest

from farcall_lambdas.settings import ApiSettings
from tests.support.memory_api import ALICE, BOB, MemoryApi

CODE = "10\n01\npacked!"


@pytest.fixture
def api() -> MemoryApi:
    return MemoryApi()


def register(api: MemoryApi, **changes: Any) -> str:
    return api.function(**{"function_code": CODE, **changes})


@pytest.mark.parametrize("version", ["v2", "v3"])
def test_a_registered_function_is_stored_with_its_hash(api: MemoryApi, version: str) -> None:
    meta = {"python_version": "3.12.6", "sdk_version": "2.28.1"}
    body = {"function_name": "howdy", "function_code": CODE, "meta": meta, "description": "says it", "public": True}

    answer = api.call("POST", f"/{version}/functions", body)

    stored = api.stores.functions.get_functions([answer.body["function_uuid"]]).get(answer.body["function_uuid"])
    assert stored is not None
    assert (stored.owner_id, stored.name, stored.body) == (ALICE.identity_id, "howdy", CODE.encode())
    assert stored.body_hash == hashlib.sha256(CODE.encode()).hexdigest()
    assert (stored.metadata, stored.description, stored.public) == (meta, "says it", True)


def test_source_text_is_packed_as_in_globus_compute(api: MemoryApi) -> None:
    source = "def f(x):\n    return 'é' * x\n"

    function_id = register(api, function_code=source, serialized=False)

    stored = api.stores.functions.get_functions([function_id]).get(function_id)
    buffer = f"st\nf:{source}"
    assert stored is not None
    assert stored.body.decode() == f"{len(buffer)}\n{buffer}"


def test_a_function_is_shown_with_its_code(api: MemoryApi) -> None:
    function_id = register(api, description="says it")

    answer = api.call("GET", f"/v2/functions/{function_id}")

    assert answer.body == {
        "function_uuid": function_id,
        "function_name": "f",
        "function_code": CODE,
        "description": "says it",
        "metadata": {},
    }


def test_own_functions_are_searched_newest_first(api: MemoryApi) -> None:
    first = register(api, function_name="count_bright_spots")
    api.clock.now += 1
    second = register(api, function_name="preview", description="after counting")
    register(api, function_name="other")
    api.call("POST", "/v3/functions", {"function_name": "count_too", "function_code": CODE}, caller=BOB)

    answer = api.call("GET", "/v3/functions?search=count")

    assert [each["function_uuid"] for each in answer.body["functions"]] == [second, first]
    assert answer.body["functions"][1]["function_hash"] == hashlib.sha256(CODE.encode()).hexdigest()
    assert len(api.call("GET", "/v3/functions?limit=1").body["functions"]) == 1


def test_public_function_is_run_by_all_and_deleted_by_its_owner(api: MemoryApi) -> None:
    function_id = register(api, public=True)

    assert api.call("GET", f"/v2/functions/{function_id}", caller=BOB).status == 200
    refused = api.call("DELETE", f"/v2/functions/{function_id}", caller=BOB)
    assert (refused.status, refused.body["code"]) == (403, "FORBIDDEN")

    assert api.call("DELETE", f"/v2/functions/{function_id}").body == {"result": 302}
    assert api.call("GET", f"/v2/functions/{function_id}").body["code"] == "FUNCTION_UNKNOWN"


def test_a_private_function_needs_a_share(api: MemoryApi) -> None:
    function_id = register(api)
    refused = api.call("GET", f"/v2/functions/{function_id}", caller=BOB)
    assert refused.status == 403
    assert f"farcall functions share {function_id} --with {BOB.identity_id} --right see" in refused.body["hint"]

    api.share(f"functions/{function_id}", BOB, "see")

    assert api.call("GET", f"/v2/functions/{function_id}", caller=BOB).status == 200


def test_an_unknown_function_is_not_found(api: MemoryApi) -> None:
    answer = api.call("GET", f"/v2/functions/{uuid.uuid4()}")

    assert (answer.status, answer.body["code"], answer.body["fault"]) == (404, "FUNCTION_UNKNOWN", "caller")


@pytest.mark.parametrize("change", [{"group": str(uuid.uuid4())}, {"ha_endpoint_id": str(uuid.uuid4())}])
def test_unenforced_sharing_is_refused(api: MemoryApi, change: dict[str, str]) -> None:
    answer = api.call("POST", "/v3/functions", {"function_name": "f", "function_code": CODE, **change})

    assert (answer.status, answer.body["code"]) == (400, "INVALID_REQUEST")


def test_a_body_over_the_limit_is_refused() -> None:
    api = MemoryApi(settings=ApiSettings(max_payload_bytes=100))

    answer = api.call("POST", "/v3/functions", {"function_name": "f", "function_code": "x" * 101})

    assert (answer.status, answer.body["code"]) == (413, "PAYLOAD_TOO_LARGE")


@pytest.mark.parametrize(
    ("body", "where"),
    [
        ({"function_name": "f"}, "body.function_code"),
        ({"function_name": "", "function_code": CODE}, "body.function_name"),
        ({"function_name": "f\0", "function_code": CODE}, "body.function_name"),
        ({"function_name": "f", "function_code": "\ud800"}, "body.function_code"),
        ({"function_name": "f", "function_code": CODE, "meta": {"a": ["\0"]}}, "body.meta"),
        ([], "body"),
    ],
)
def test_unstorable_value_is_refused_with_its_location(api: MemoryApi, body: object, where: str) -> None:
    answer = api.call("POST", "/v3/functions", body)

    assert (answer.status, answer.body["code"]) == (422, "INVALID_REQUEST")
    assert answer.body["message"].startswith(where)
