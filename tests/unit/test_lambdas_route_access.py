"""Every route of the API's document, by every kind of caller: each may do what the table of rights says."""

from __future__ import annotations

import dataclasses
import json
import re
import uuid
from collections.abc import Callable, Mapping
from typing import Any, Final

import pytest
from aws_lambda_powertools.utilities.typing import LambdaContext

from farcall_common.errors import ConfigurationError
from farcall_common.store.model import ForwarderInfo
from farcall_lambdas import app
from farcall_lambdas.identity import Identity
from farcall_lambdas.openapi import document
from farcall_lambdas.proxy_event import proxy_event
from farcall_lambdas.route_access import INTERACTIVE, ROUTE_ACCESS, SCOPES, RouteAccess
from farcall_lambdas.signed_caller import CallerKey, CallerKeys
from tests.support.memory_api import Answer, MemoryApi, admitted

PAYLOAD: Final = "4\n00\nx"
KEY: Final = CallerKey(lambda: "k" * 32)
RANKS: Final = {None: 0, "see": 1, "use": 2, "manage": 3, "own": 4}
ROUTES: Final = {
    (method.upper(), path): operation["x-farcall-access"]
    for path, operations in json.loads(document())["paths"].items()
    for method, operation in operations.items()
}


def new_identity() -> Identity:
    return Identity(str(uuid.uuid4()), "person@example.org")


@dataclasses.dataclass(frozen=True)
class World:
    """What an owner has: one of everything that a route can name."""

    api: MemoryApi
    owner: Identity
    ids: Mapping[str, str]

    @classmethod
    def make(cls, api: MemoryApi, *, public: bool) -> World:
        owner, key = new_identity(), f"{uuid.uuid4().hex}{'k' * 8}"

        def ok(path: str, body: Any) -> Any:
            answer = api.call("POST", path, body, caller=owner)
            assert answer.status == 200, answer.body
            return answer.body

        endpoint_id = api.endpoint(caller=owner, public=public)
        function_id = api.function(caller=owner, public=public)
        ok(f"/v3/endpoints/{endpoint_id}/connect", {"public_key": key})
        ok("/v3/aliases", {"name": "alias", "function_id": function_id})
        container_id = ok("/v3/containers", {"type": "docker", "location": "image"})["container_id"]
        account_id = ok("/v3/accounts", {"name": "robot"})["account_id"]
        token_id = ok("/v3/tokens", {"name": "ci", "scopes": ["tasks:read"]})["token_id"]
        shares = {
            each: api.share(f"{each}s/{id_}", new_identity(), caller=owner)["share_id"]
            for each, id_ in (("endpoint", endpoint_id), ("function", function_id))
        }
        team_id = ok("/v3/teams", {"name": "optics"})["team_id"]
        added = api.call("PUT", f"/v3/teams/{team_id}/members", {"kind": "name", "id": "ada@lab.org"}, caller=owner)
        assert added.status == 200
        submitted = ok(f"/v3/endpoints/{endpoint_id}/submit", {"tasks": {function_id: [PAYLOAD]}})
        ran = api.call(
            "POST", "/actions/run", _action({"endpoint_id": endpoint_id, "function_id": function_id}), caller=owner
        )
        assert ran.status == 202, ran.body
        ids = {
            "endpoint_id": endpoint_id,
            "function_id": function_id,
            "function": function_id,
            "name": "alias",
            "container_id": container_id,
            "container": container_id,
            "technology": "docker",
            "task_group_id": submitted["task_group_id"],
            "task_id": submitted["tasks"][function_id][0],
            "public_key": key,
            "account_id": account_id,
            "token_id": token_id,
            "endpoint_share_id": shares["endpoint"],
            "function_share_id": shares["function"],
            "team_id": team_id,
            "action_id": ran.body["action_id"],
        }
        return cls(api, owner, ids)

    def request(self, method: str, path: str) -> tuple[str, Any]:
        """Path and body of a valid request about the owner's things."""
        named = path.replace("{share_id}", "{function_share_id}" if "functions" in path else "{endpoint_share_id}")
        there = re.sub(r"{(\w+)}", lambda found: self.ids[found[1]], named)
        if query := QUERIES.get((method, path)):
            there += query(self.ids)
        return there, BODIES[method, path](self.ids) if (method, path) in BODIES else None

    def call(self, method: str, path: str, caller: Identity | None) -> Answer:
        there, body = self.request(method, path)
        return self.api.call(method, there, body, caller=caller)


def _action(ids: Mapping[str, str]) -> Any:
    task = {"function_id": ids["function_id"]}
    return {"request_id": str(uuid.uuid4()), "body": {"endpoint_id": ids["endpoint_id"], "tasks": [task]}}


def _code(_: Mapping[str, str]) -> Any:
    return {"function_name": "f", "function_code": PAYLOAD}


def _container(_: Mapping[str, str]) -> Any:
    return {"type": "docker", "location": "other"}


def _name(_: Mapping[str, str]) -> Any:
    return {"endpoint_name": "e"}


def _share(_: Mapping[str, str]) -> Any:
    return {"grantee": {"kind": "name", "id": "grace@lab.org"}, "right": "use"}


#: Bodies of valid requests: every operation of the document with a body is here.
BODIES: Final[Mapping[tuple[str, str], Callable[[Mapping[str, str]], Any]]] = {
    ("POST", "/v2/functions"): _code,
    ("POST", "/v3/functions"): _code,
    ("PUT", "/v3/functions/{function_id}"): lambda _: {"description": "d"},
    ("POST", "/v3/aliases"): lambda ids: {"name": "other", "function_id": ids["function_id"]},
    ("POST", "/v2/containers"): _container,
    ("POST", "/v3/containers"): _container,
    ("POST", "/v2/endpoints"): _name,
    ("POST", "/v3/endpoints"): _name,
    ("PUT", "/v3/endpoints/{endpoint_id}"): lambda _: {"description": "d"},
    ("POST", "/v3/endpoints/{endpoint_id}/connect"): lambda ids: {"public_key": ids["public_key"]},
    ("POST", "/v3/endpoints/{endpoint_id}/submit"): lambda ids: {"tasks": {ids["function_id"]: [PAYLOAD]}},
    ("POST", "/v3/endpoints/{endpoint_id}/tasks/cancel"): lambda ids: {"task_ids": [ids["task_id"]]},
    ("POST", "/v3/stream"): lambda _: {"public_key": f"{uuid.uuid4().hex}{'s' * 8}"},
    ("POST", "/v3/blobs"): lambda _: {"size_bytes": 1, "sha256": "0" * 64},
    ("POST", "/v2/submit"): lambda ids: {"tasks": [[ids["function_id"], ids["endpoint_id"], PAYLOAD]]},
    ("POST", "/v2/batch_status"): lambda ids: {"task_ids": [ids["task_id"]]},
    ("POST", "/v3/batch_output"): lambda ids: {"tasks": [{"task_id": ids["task_id"]}]},
    ("POST", "/v3/tasks/cancel"): lambda ids: {"task_ids": [ids["task_id"]]},
    ("POST", "/v3/tasks/{task_id}/retry"): lambda _: {},
    ("PUT", "/v3/endpoints/{endpoint_id}/shares"): _share,
    ("PUT", "/v3/functions/{function_id}/shares"): _share,
    ("POST", "/v3/teams"): lambda _: {"name": "other"},
    ("PUT", "/v3/teams/{team_id}/members"): lambda _: {"kind": "name", "id": "grace@lab.org"},
    ("POST", "/v3/tokens"): lambda _: {"name": "ci", "scopes": ["tasks:read"]},
    ("POST", "/v3/accounts"): lambda _: {"name": "other"},
    ("POST", "/actions/run"): _action,
    ("POST", "/actions/actions"): _action,
}
QUERIES: Final[Mapping[tuple[str, str], Callable[[Mapping[str, str]], str]]] = {
    ("DELETE", "/v3/endpoints/{endpoint_id}/keys"): lambda ids: f"?public_key={ids['public_key']}",
    ("GET", "/v3/ids"): lambda ids: f"?kind=task&beginning={ids['task_id']}",
    ("DELETE", "/v3/teams/{team_id}/members"): lambda _: "?kind=name&id=ada%40lab.org",
}

#: Kinds of callers with the right that each has on the endpoint and the function of an owner: one line each.
KINDS: Final[Mapping[str, tuple[str | None, Callable[[MemoryApi], tuple[World, Identity]]]]] = {
    "has no right": (None, lambda api: (World.make(api, public=False), new_identity())),
    "uses what is public": ("use", lambda api: (World.make(api, public=True), new_identity())),
    "sees": ("see", lambda api: _shared(api, "see")),
    "uses": ("use", lambda api: _shared(api, "use")),
    "manages": ("manage", lambda api: _shared(api, "manage")),
    "owner": ("own", lambda api: (world := World.make(api, public=False), world.owner)),
    "owner by a linked identity": ("own", lambda api: (world := World.make(api, public=False), _linked(world.owner))),
}


def _shared(api: MemoryApi, right: str) -> tuple[World, Identity]:
    """Endpoint and function are shared with the caller."""
    world, caller = World.make(api, public=False), new_identity()
    for path in (f"endpoints/{world.ids['endpoint_id']}", f"functions/{world.ids['function_id']}"):
        api.share(path, caller, right, caller=world.owner)
    return world, caller


def _linked(owner: Identity) -> Identity:
    return dataclasses.replace(new_identity(), identity_set=frozenset({owner.identity_id}))


@pytest.fixture(scope="module")
def api() -> MemoryApi:
    api = MemoryApi()
    api.stores.queue.announce(ForwarderInfo("f", "tcp://10.0.0.1:443", "1" * 40), ttl_s=1e9)
    return api


def is_refused(answer: Answer) -> bool:
    """Whether the caller lacks a right, by the status or by the entries of an answer about several objects."""
    if answer.status in (401, 403, 404):
        return True
    results = answer.body.get("results") if isinstance(answer.body, dict) else None
    entries = list(results.values() if isinstance(results, dict) else results or ())
    unknown = isinstance(answer.body, dict) and answer.body.get("unknown")
    return bool(unknown) or any(
        each.get("outcome") == "unknown" or each.get("http_status_code") in (403, 404) for each in entries
    )


def test_every_route_is_in_the_table_and_every_scope_in_the_list() -> None:
    assert {(method, path.replace("{", "<").replace("}", ">")) for method, path in ROUTES} == ROUTE_ACCESS.keys()
    assert {access.scope for access in ROUTE_ACCESS.values()} - {None, INTERACTIVE} == SCOPES.keys()
    for (method, path), access in ROUTE_ACCESS.items():
        assert (access.object is None) == (access.right is None), (method, path)


def test_the_api_does_not_start_with_a_route_that_is_not_in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    rest = {route: access for route, access in ROUTE_ACCESS.items() if route != ("POST", "/v3/stream")}
    for table in (rest, {**ROUTE_ACCESS, ("GET", "/v3/removed"): RouteAccess(None, None, None)}):
        monkeypatch.setattr(app, "ROUTE_ACCESS", table)
        with pytest.raises(ConfigurationError, match=r"/v3/(stream|removed)"):
            MemoryApi()


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_each_kind_of_caller_may_do_what_the_table_says(method: str, path: str, api: MemoryApi) -> None:
    access = ROUTES[method, path]
    for kind, (right, make) in KINDS.items():
        world, caller = make(api)
        has = right if access["object"] in ("endpoint", "function", None) or right == "own" else None
        if access["object"] == "alias" and caller.identity_set > {caller.identity_id}:
            continue  # each identity has its own names

        answer = world.call(method, path, caller)

        assert answer.status < 500, (kind, answer.body)
        assert answer.status != 422, (kind, "the request of this test is not valid", answer.body)
        assert is_refused(answer) == (RANKS[has] < RANKS[access["right"]]), (kind, answer.body)


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_callers_without_an_identity_are_refused(method: str, path: str, api: MemoryApi) -> None:
    world = World.make(api, public=True)
    there, body = world.request(method, path)
    signed = dataclasses.replace(api.application, caller_keys=CallerKeys(KEY))
    text = None if body is None else json.dumps(body)
    forged = proxy_event(method, there, text, caller=world.owner, key=CallerKey(lambda: "f" * 32))

    assert world.call(method, path, None).status == 401
    assert signed.answer(forged, LambdaContext())["statusCode"] == 401
    genuine = proxy_event(method, "/v3/whoami", caller=world.owner, key=KEY)
    assert signed.answer({**genuine, "httpMethod": "GET"}, LambdaContext())["statusCode"] == 200


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_the_credential_of_an_endpoint_connects_it_and_does_nothing_else(
    method: str, path: str, api: MemoryApi
) -> None:
    world = World.make(api, public=True)
    endpoint_id = world.ids["endpoint_id"]
    made = api.call("POST", f"/v3/endpoints/{endpoint_id}/credential", caller=world.owner)
    endpoint = api.stores.endpoints.get_endpoint(endpoint_id)
    assert made.status == 200
    assert endpoint is not None
    agent = dataclasses.replace(world.owner, endpoint_id=endpoint_id, credential_id=endpoint.credential_id)

    answer = world.call(method, path, agent)

    is_connect = (method, path) == ("POST", "/v3/endpoints/{endpoint_id}/connect")
    assert answer.status == (200 if is_connect else 403), answer.body


def _account(api: MemoryApi, owner: Identity) -> str:
    return str(api.call("POST", "/v3/accounts", {"name": "new"}, caller=owner).body["account_id"])


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_a_token_may_do_what_its_scopes_say_and_its_owner_may(method: str, path: str, api: MemoryApi) -> None:
    access = ROUTES[method, path]
    scope = access["scope"]
    others = [each for each in SCOPES if each != scope]
    for scopes, is_permitted in (
        (list(SCOPES), scope != INTERACTIVE),
        ([scope] if scope in SCOPES else others, scope != INTERACTIVE),
        (others, scope is None),
    ):
        world = World.make(api, public=False)
        answer = world.call(method, path, admitted(api.token(caller=world.owner, scopes=scopes)))
        assert is_refused(answer) != is_permitted, (scopes, answer.body)

    world = World.make(api, public=False)
    account = admitted(api.token(caller=world.owner, account_id=_account(api, world.owner)))
    for caller in (admitted(api.token(caller=new_identity())), account):
        answer = world.call(method, path, caller)
        assert is_refused(answer) == (access["right"] is not None or scope == INTERACTIVE), (caller, answer.body)


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_a_token_is_limited_to_its_endpoints_and_functions(method: str, path: str, api: MemoryApi) -> None:
    access = ROUTES[method, path]
    names_function = access["object"] in ("function", "task", "task_group", "action") or access["right"] == "use"
    names_endpoint = access["object"] in ("endpoint", "task", "task_group", "action")
    for limit, name, names_it in (
        ("endpoints", "endpoint_id", names_endpoint),
        ("functions", "function_id", names_function),
    ):
        keeps = limit in access["limits"]
        for is_other in (False, True):
            world = World.make(api, public=False)
            other = World.make(api, public=True)
            limits = {limit: [(other if is_other else world).ids[name]]}
            answer = world.call(method, path, admitted(api.token(caller=world.owner, **limits)))
            assert is_refused(answer) == (not keeps or (is_other and names_it)), (limits, answer.body)


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_a_revoked_token_is_refused_everywhere(method: str, path: str, api: MemoryApi) -> None:
    world = World.make(api, public=True)
    caller = admitted(api.token(caller=world.owner))
    assert api.call("DELETE", f"/v3/tokens/{caller.token_id}", caller=world.owner).status == 200

    assert world.call(method, path, caller).status == 401
