"""GET /v3/usage: whose usage a caller sees."""

from __future__ import annotations

import dataclasses
import datetime as dt
from typing import Any

import pytest

from farcall_common.store.model import TaskResult
from farcall_common.wire.states import Reporter, TaskState
from farcall_lambdas.identity import Identity
from tests.support.memory_api import ALICE, BOB, MemoryApi

ADMIN = Identity("00000000-0000-4000-8000-0000000000ad", "admin", is_admin=True)


@pytest.fixture
def api() -> MemoryApi:
    """Bob has run two tasks on an endpoint of Alice, and Alice one."""
    api = MemoryApi()
    endpoint_id = api.endpoint(public=True)
    for caller, count in ((ALICE, 1), (BOB, 2)):
        function_id = api.function(caller=caller)
        body = {"tasks": {function_id: ["p"] * count}}
        answer = api.call("POST", f"/v3/endpoints/{endpoint_id}/submit", body, caller=caller)
        at = api.clock()
        timings = {"started_at": at - 60, "ended_at": at}
        results = [
            TaskResult(id_, endpoint_id, 1, TaskState.SUCCESS, Reporter.AGENT, result=b"r", timings=timings)
            for id_ in answer.body["tasks"][function_id]
        ]
        api.stores.tasks.record_results(results, at=dt.datetime.fromtimestamp(at + 100, dt.UTC))
    return api


def usage(api: MemoryApi, query: str = "", *, caller: Identity = ALICE) -> list[dict[str, Any]]:
    answer = api.call("GET", f"/v3/usage{query}", caller=caller)
    assert answer.status == 200, answer.body
    return list(answer.body["usage"])


def test_caller_sees_what_is_his(api: MemoryApi) -> None:
    day = str(dt.datetime.fromtimestamp(api.clock(), dt.UTC).date())
    assert usage(api) == [
        {"day": day, "tasks": 1, "failed": 0, "stages": 0, "wall_s": 60.0, "core_s": 60.0, "gpu_s": 0.0}
    ]
    assert [each["tasks"] for each in usage(api, caller=BOB)] == [2]
    assert usage(api, "?of=endpoints", caller=BOB) == []


def test_usage_of_linked_identities_is_summed(api: MemoryApi) -> None:
    both = dataclasses.replace(ALICE, identity_set=frozenset({ALICE.identity_id, BOB.identity_id}))
    assert [each["tasks"] for each in usage(api, caller=both)] == [3]


def test_owner_of_an_endpoint_sees_all_its_users(api: MemoryApi) -> None:
    found = usage(api, "?of=endpoints&by=identity")
    assert {each["identity_id"]: each["tasks"] for each in found} == {ALICE.identity_id: 1, BOB.identity_id: 2}


def test_administrators_alone_see_all(api: MemoryApi) -> None:
    assert api.call("GET", "/v3/usage?of=all").status == 403
    assert [each["tasks"] for each in usage(api, "?of=all&by=account", caller=ADMIN)] == [3]


def test_pages_and_days(api: MemoryApi) -> None:
    first = api.call("GET", "/v3/usage?of=endpoints&by=identity&limit=1").body
    second = api.call("GET", f"/v3/usage?of=endpoints&by=identity&limit=1&after={first['next']}").body
    assert len({each["identity_id"] for each in first["usage"] + second["usage"]}) == 2
    day = dt.datetime.fromtimestamp(api.clock(), dt.UTC).date()
    assert usage(api, f"?until={day}") == []
    assert len(usage(api, f"?since={day}")) == 1


@pytest.mark.parametrize("query", ["by=owner", "by=", "by=day;drop", "of=ours", "since=2026-13-01", "until=1e9"])
def test_malformed_queries_are_refused(api: MemoryApi, query: str) -> None:
    assert api.call("GET", f"/v3/usage?{query}").status == 422
