"""Quotas by person: service accounts count for their creator, for every limit of an identity."""

from __future__ import annotations

import base64
import dataclasses
import datetime as dt
import itertools
import uuid
from collections.abc import Callable
from typing import Any, Final

import pytest

from farcall_common.fairness import identity_of, payer_of
from farcall_common.limits import MIB
from farcall_common.store.model import QueuedTask, QueueMemory, TaskResult
from farcall_common.wire.states import Reporter, TaskState
from farcall_lambdas.identity import Identity
from farcall_lambdas.settings import ApiSettings
from tests.support.memory_api import ALICE, BOB, Answer, MemoryApi, admitted
from tests.support.stores import FakeQueue, single

MALLORY: Final = Identity("00000000-0000-4000-8000-0000000000ee", "mallory@example.org", provider="dev")

#: Limits that are not of an identity: of a request, an object, the deployment, or times.
_OTHERS: Final = frozenset(
    {
        *("max_payload_bytes", "max_inline_bytes", "max_request_bytes", "max_response_bytes", "max_tasks_per_request"),
        *("max_memory_percent", "max_queue_outage_s", "max_versions", "max_shares", "max_members", "database_bytes"),
        *("heartbeat_s", "online_window_s", "ticket_ttl_s", "url_ttl_s", "settle_s", "reconcile_period_s"),
        *("retention_days", "purge_batch", "purge_until_s", "repair_until_s", "max_wait_days", "audit_days"),
        *("globus_scope", "max_tokens", "max_accounts"),  # service accounts make neither
    }
)


class World:
    """Mallory with service accounts, beside Bob and an endpoint of Alice's that all may use."""

    def __init__(self, **limits: Any) -> None:
        self.api = MemoryApi(settings=ApiSettings(**limits))
        self.endpoint_id = self.api.endpoint(public=True)
        self.function_id = self.api.function(public=True)
        self.accounts = [self.new_account(f"robot-{number}") for number in range(3)]
        queue = self.api.stores.queue
        assert isinstance(queue, FakeQueue)
        self.queue = queue
        self.endpoints: list[tuple[Identity, str]] = []

    def new_account(self, name: str) -> Identity:
        answer = self.api.call("POST", "/v3/accounts", {"name": name}, caller=MALLORY)
        assert answer.status == 200, answer.body
        return Identity(answer.body["account_id"], name, provider="farcall", creator=MALLORY)

    def submit(self, caller: Identity, endpoint_id: str = "", payload: str = "4\n00\nx", count: int = 1) -> Answer:
        path = f"/v3/endpoints/{endpoint_id or self.endpoint_id}/submit"
        return self.api.call("POST", path, {"tasks": {self.function_id: [payload] * count}}, caller=caller)


def _own_waiting(world: World, caller: Identity) -> int:
    """At each of the endpoints of the caller: short queues are not added up."""
    if caller is BOB:
        world.endpoints.append((BOB, world.api.endpoint(caller=BOB)))
    tried = [world.submit(caller, id_, count=500).status == 200 for owner, id_ in world.endpoints if owner is caller]
    world.api.clock.now += 2
    return sum(tried)


def _waiting(world: World, caller: Identity) -> bool:
    return world.submit(caller, count=10).status == 200


def _memory(world: World, caller: Identity) -> bool:
    is_done = world.submit(caller, payload="4\n00\n" + "x" * 4000, count=10).status == 200
    held = sum(world.queue.bytes_of(each.identity_id) for each in (MALLORY, *world.accounts, BOB))
    world.queue.has_memory = QueueMemory(used_bytes=held + 1000, max_bytes=MIB)
    world.api.clock.now += 2
    return is_done


def _function(world: World, caller: Identity, code: str = "f") -> bool:
    body = {"function_name": "f", "function_code": "4\n01\n" + code}
    return world.api.call("POST", "/v3/functions", body, caller=caller).status == 200


def _function_bytes(world: World, caller: Identity) -> bool:
    return _function(world, caller, "f" * 10_000)


def _endpoint(world: World, caller: Identity) -> bool:
    return world.api.call("POST", "/v3/endpoints", {"endpoint_name": "e"}, caller=caller).status == 200


def _container(world: World, caller: Identity) -> bool:
    body = {
        "name": f"of-{len(world.api.stores.functions.list_containers(caller.identity_id))}",
        "type": "docker",
        "location": "python:3.12",
    }
    return world.api.call("POST", "/v2/containers", body, caller=caller).status == 200


def _team(world: World, caller: Identity) -> bool:
    return world.api.call("POST", "/v3/teams", {"name": uuid.uuid4().hex}, caller=caller).status == 200


def _stored(world: World, caller: Identity) -> bool:
    body = {"size_bytes": 4 * MIB, "sha256": uuid.uuid4().hex * 2}
    return world.api.call("POST", "/v3/blobs", body, caller=caller).status == 200


def _rows(world: World, caller: Identity) -> bool:
    return world.submit(caller, payload="4\n00\n" + "x" * 60_000, count=50).status == 200


def _request(world: World, caller: Identity) -> bool:
    return world.api.call("GET", "/v3/whoami", caller=caller).status == 200


def _key(world: World, caller: Identity) -> bool:
    key = base64.b85encode(uuid.uuid4().bytes * 2).decode()  # 40 characters, as Z85 has them
    answer = world.api.call("POST", "/v3/stream", {"public_key": key.translate(_Z85)}, caller=caller)
    return answer.status != 429


_Z85: Final = str.maketrans("_`~;|", "/[]:.")

#: One attempt that counts for the limits, by their names; with what they are in the test.
_ATTEMPTS: Final[dict[str, tuple[dict[str, Any], Callable[[World, Identity], int]]]] = {
    "max_queue_depth": ({"max_queue_depth": 1_000}, _waiting),
    "max_waiting": ({"max_waiting": 6_000}, _own_waiting),
    "max_identity_memory_percent": ({"max_identity_memory_percent": 25}, _memory),
    "max_functions": ({"max_functions": 5}, _function),
    "max_function_bytes": ({"max_function_bytes": 60_000}, _function_bytes),
    "max_endpoints": ({"max_endpoints": 5}, _endpoint),
    "max_containers": ({"max_containers": 5}, _container),
    "max_teams": ({"max_teams": 5}, _team),
    "max_stored_bytes_per_day": ({"max_stored_bytes_per_day": 20 * MIB}, _stored),
    "max_identity_storage_percent": ({"max_identity_storage_percent": 10, "database_bytes": 100 * MIB}, _rows),
    "rate_per_s": ({"rate_per_s": 1e-9, "rate_burst": 50}, _request),
    "rate_burst": ({"rate_per_s": 1e-9, "rate_burst": 50}, _request),
    "key_rate_per_s": ({"key_rate_per_s": 1e-9, "key_burst": 5}, _key),
    "key_burst": ({"key_rate_per_s": 1e-9, "key_burst": 5}, _key),
}


def _done(world: World, attempt: Callable[[World, Identity], int], callers: list[Identity]) -> int:
    """How many attempts succeed, until all of the callers are refused; but not more than a few."""
    done, left = 0, list(callers)
    if attempt is _own_waiting:
        owners = [each for each, _ in zip(itertools.cycle(callers), range(4), strict=False)]
        world.endpoints = [(each, world.api.endpoint(caller=each)) for each in owners]
    while left and done < 500:
        for caller in list(left):
            succeeded = int(attempt(world, caller))
            done += succeeded
            if not succeeded:
                left.remove(caller)
    return done


def test_each_limit_of_an_identity_is_tried() -> None:
    fields = {field.name for field in dataclasses.fields(ApiSettings)}
    assert fields == _OTHERS | _ATTEMPTS.keys()


@pytest.mark.parametrize("limit", _ATTEMPTS)
def test_service_accounts_get_no_more_than_their_creator_alone(limit: str) -> None:
    settings, attempt = _ATTEMPTS[limit]
    alone = _done(World(**settings), attempt, [MALLORY])
    world = World(**settings)
    together = _done(world, attempt, [*world.accounts, MALLORY])
    assert 0 < alone < 500
    assert together <= alone
    assert attempt(world, BOB), "and others are served"


@pytest.mark.parametrize("limit", ["max_functions", "max_containers", "rate_burst", "max_queue_depth"])
def test_new_accounts_in_place_of_deleted_ones_get_no_more(limit: str) -> None:
    settings, attempt = _ATTEMPTS[limit]
    alone = _done(World(**settings), attempt, [MALLORY])
    world, done = World(**settings), 0
    for number in range(3):
        account = world.new_account(f"new-{number}") if limit != "rate_burst" else world.accounts[number]
        done += _done(world, attempt, [account])
        if limit != "rate_burst":
            assert world.api.call("DELETE", f"/v3/accounts/{account.identity_id}", caller=MALLORY).status == 200
    assert done <= alone


def _lab(**allowance: Any) -> World:
    """An endpoint of Alice's with the same allowance for Mallory and each account."""
    world = World()
    world.endpoint_id = world.api.endpoint()
    for each in (MALLORY, *world.accounts, BOB):
        world.api.share(f"endpoints/{world.endpoint_id}", each, allowance=allowance)
    return world


def _lease(world: World, *, limit: int = 100) -> list[QueuedTask]:
    fence = single.claim(world.queue, world.endpoint_id, "w1", ttl_s=1e9)
    single.mark_restored(world.queue, world.endpoint_id, fence)
    return [each.task for each in single.lease(world.queue, world.endpoint_id, fence, limit=limit, lease_s=1e9)]


def test_service_accounts_and_their_creator_have_one_turn() -> None:
    world = _lab()
    for caller in (*world.accounts, MALLORY):
        assert world.submit(caller, count=10).status == 200
    assert world.submit(BOB, count=10).status == 200
    owners = [each.owner_id for each in _lease(world, limit=8)]
    assert owners.count(BOB.identity_id) == 4


def test_service_accounts_and_their_creator_have_one_limit_of_running_tasks() -> None:
    world = _lab(max_running=2)
    for caller in (*world.accounts, MALLORY, BOB):
        assert world.submit(caller, count=5).status == 200
    owners = [each.owner_id for each in _lease(world)]
    assert owners.count(BOB.identity_id) == 2
    assert len(owners) == 4


def test_calls_of_graphs_have_the_limit_of_running_tasks() -> None:
    world = _lab(max_running=2)
    body = {"tasks": {world.function_id: ["4\n00\nx"]}, "max_calls": 99}
    assert world.api.call("POST", f"/v3/endpoints/{world.endpoint_id}/submit", body, caller=BOB).status == 200
    assert world.api.call("POST", f"/v3/endpoints/{world.endpoint_id}/submit", body, caller=ALICE).status == 200
    assert {each.owner_id: each.options.max_calls for each in _lease(world)} == {
        BOB.identity_id: 2,
        ALICE.identity_id: None,
    }


def test_service_accounts_and_their_creator_have_one_limit_of_waiting_tasks() -> None:
    world = _lab(max_waiting=6)
    assert [world.submit(each, count=3).status for each in (*world.accounts, MALLORY, BOB)] == [200, 200, 429, 429, 200]


def test_the_most_generous_limits_of_a_person_count_for_all_accounts() -> None:
    world = _lab(max_running=1)
    world.api.share(f"endpoints/{world.endpoint_id}", MALLORY, allowance={"max_running": 3})
    for caller in (*world.accounts, MALLORY):
        assert world.submit(caller, count=5).status == 200
    assert len(_lease(world)) == 3


def test_accounts_of_the_owner_have_turns_and_limits_of_their_own() -> None:
    world = World()
    world.endpoint_id = world.api.endpoint(caller=MALLORY)
    robot = world.accounts[0]
    world.api.share(f"endpoints/{world.endpoint_id}", robot, caller=MALLORY, allowance={"max_running": 1})
    assert [world.submit(each, count=9).status for each in (robot, MALLORY)] == [200, 200]
    leased = _lease(world)
    assert [each.owner_id for each in leased].count(robot.identity_id) == 1
    assert len(leased) == 10
    [of_robot] = [each for each in leased if each.owner_id == robot.identity_id]
    assert (payer_of(of_robot.lane), identity_of(of_robot.lane)) == (MALLORY.identity_id, robot.identity_id)
    assert world.queue.bytes_of(robot.identity_id) == 0


def test_hours_of_accounts_count_for_each_other_and_after_they_were_deleted() -> None:
    world = _lab(core_hours_per_month=1)
    first, second, _ = world.accounts
    task_id = world.submit(first).body["tasks"][world.function_id][0]
    at = world.api.clock()
    result = TaskResult(
        task_id,
        world.endpoint_id,
        1,
        TaskState.SUCCESS,
        Reporter.AGENT,
        result=b"r",
        timings={"started_at": at, "ended_at": at + 7200},
    )
    world.api.stores.tasks.record_results([result], at=dt.datetime.fromtimestamp(at + 7200, dt.UTC))
    assert world.api.call("DELETE", f"/v3/accounts/{first.identity_id}", caller=MALLORY).status == 200
    assert [world.submit(each).status for each in (second, MALLORY, BOB)] == [403, 403, 200]


def test_a_token_of_an_account_names_the_payer() -> None:
    world = World()
    account_id = world.accounts[0].identity_id
    caller = admitted(world.api.token(caller=MALLORY, account_id=account_id))
    assert (caller.identity_id, caller.payer_id, caller.rate_key) == (account_id, *[MALLORY.identity_id] * 2)
    assert MALLORY.payer_id == MALLORY.quota_key(ALICE.identity_id) == MALLORY.identity_id
