"""What a caller with a token could do to the service and to others. Here on fakes; test_api_attacks runs the same on
real stores."""

from __future__ import annotations

import dataclasses
import json
import re
import uuid
from collections.abc import Callable, Sequence
from typing import Any, Final

import pytest

from farcall_common.errors import Conflict, Unavailable
from farcall_common.limits import MAX_FUNCTIONS_PER_SUBMIT
from farcall_common.store.model import ForwarderInfo
from farcall_common.wire.ids import new_task_id
from farcall_lambdas.answers import error_response
from farcall_lambdas.identity import Identity
from farcall_lambdas.models.fields import MAX_DESCRIPTION, MAX_METADATA_BYTES, MAX_TITLE
from farcall_lambdas.openapi import document
from farcall_lambdas.settings import ApiSettings
from tests.support.memory_api import Answer, MemoryApi

PAYLOAD: Final = "4\n00\nx"
SECRET: Final = "the name of a secret"
MakeApi = Callable[..., MemoryApi]


def new_identity() -> Identity:
    """An identity that is new to the API."""
    return Identity(str(uuid.uuid4()), "new@example.org")


class Person:
    """A caller with an endpoint and a function."""

    def __init__(self, api: MemoryApi, identity: Identity | None = None) -> None:
        self.api = api
        self.identity = identity or new_identity()
        self.endpoint_id = self.endpoint()
        self.function_id = self.function()

    def call(self, method: str, path: str, body: Any = None, **options: Any) -> Answer:
        return self.api.call(method, path, body, caller=self.identity, **options)

    def ok(self, method: str, path: str, body: Any = None, **options: Any) -> Any:
        answer = self.call(method, path, body, **options)
        assert answer.status == 200, answer.body
        return answer.body

    def refused(self, status: int, code: str, method: str, path: str, body: Any = None) -> Answer:
        answer = self.call(method, path, body)
        assert (answer.status, answer.body["code"]) == (status, code), answer.body
        assert len(json.dumps(answer.body)) < 5_000
        return answer

    def endpoint(self, **fields: Any) -> str:
        return str(self.ok("POST", "/v3/endpoints", {"endpoint_name": SECRET, **fields})["endpoint_id"])

    def function(self, **fields: Any) -> str:
        body = {"function_name": SECRET, "function_code": PAYLOAD, **fields}
        return str(self.ok("POST", "/v3/functions", body)["function_uuid"])

    def submit(self, count: int = 1, *, endpoint_id: str = "", function: str = "", **fields: Any) -> Answer:
        body = {"tasks": {function or self.function_id: [PAYLOAD] * count}, **fields}
        return self.call("POST", f"/v3/endpoints/{endpoint_id or self.endpoint_id}/submit", body)


class WatchedStore:
    """A store, real or fake: ``before`` is called with the first argument of each call of ``method``."""

    def __init__(self, store: object, method: str, before: Callable[[Any], object]) -> None:
        self._store = store
        self._method = method
        self._before = before

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._store, name)
        if name != self._method:
            return found

        def watched(wanted: Any, **options: Any) -> Any:
            self._before(wanted)
            return found(wanted, **options)

        return watched


class AbuseSuite:
    """Needs the fixture ``make_api``, which takes settings."""

    @pytest.fixture
    def api(self, make_api: MakeApi) -> MemoryApi:
        return make_api()

    @pytest.fixture
    def person(self, api: MemoryApi) -> Person:
        return Person(api)

    # what is another user's

    def test_no_route_shows_data_of_another_user(self, person: Person) -> None:
        victim, thief = person, Person(person.api)
        alias = f"alias-{uuid.uuid4()}"
        victim.ok("POST", "/v3/aliases", {"name": alias, "function_id": victim.function_id})
        image = {"name": SECRET.replace(" ", "-"), "type": "docker", "location": SECRET}
        container_id = victim.ok("POST", "/v3/containers", image)["container_id"]
        submitted = victim.submit().body
        [task_id] = submitted["tasks"][victim.function_id]
        group_id = submitted["task_group_id"]
        body = {"endpoint_id": victim.endpoint_id, "tasks": [{"function_id": victim.function_id}]}
        ran = victim.call("POST", "/actions/run", {"request_id": "1", "label": SECRET, "body": body})
        assert ran.status == 202
        ids = {
            "action_id": ran.body["action_id"],
            "function_id": victim.function_id,
            "function": victim.function_id,
            "name": alias,
            "container_id": container_id,
            "container": container_id,
            "technology": "docker",
            "endpoint_id": victim.endpoint_id,
            "task_id": task_id,
            "task_group_id": group_id,
            "token_id": victim.ok("POST", "/v3/tokens", {"name": SECRET, "scopes": ["tasks:read"]})["token_id"],
            "account_id": victim.ok("POST", "/v3/accounts", {"name": "robot"})["account_id"],
            "team_id": victim.ok("POST", "/v3/teams", {"name": SECRET})["team_id"],
        }
        share = {"grantee": {"kind": "name", "id": "grace@lab.org"}, "right": "use"}
        for path in (f"/v3/endpoints/{victim.endpoint_id}/shares", f"/v3/functions/{victim.function_id}/shares"):
            ids["share_id"] = victim.ok("PUT", path, share)["share_id"]

        def told(answer: Answer) -> set[str]:
            return {each for name, each in ids.items() if name != "technology" and each in json.dumps(answer.body)}

        bodies = {
            "/v3/endpoints/{endpoint_id}/submit": {"tasks": {victim.function_id: [PAYLOAD]}},
            "/v3/endpoints/{endpoint_id}/connect": {"public_key": "k" * 40},
            "/v3/endpoints/{endpoint_id}/shares": share,
            "/v3/functions/{function_id}/shares": share,
            "/v3/teams/{team_id}/members": {"kind": "name", "id": "grace@lab.org"},
        }
        queries = {
            "/v3/endpoints/{endpoint_id}/keys": f"?public_key={'k' * 40}",
            "/v3/teams/{team_id}/members": "?kind=name&id=grace%40lab.org",
        }
        tried = 0
        for path, methods in json.loads(document())["paths"].items():
            there = re.sub(r"{(\w+)}", lambda found: ids[found[1]], path)
            query = queries.get(path, "")
            for method in methods if there != path else ():
                answer = thief.call(method.upper(), there + query, bodies.get(path, {} if method != "get" else None))
                assert answer.status in (403, 404), (method, path, answer.body)
                assert told(answer) <= set(there.split("/")), (method, path, answer.body)
                tried += 1
        assert tried > 20
        lists = [
            "/v3/functions",
            "/v3/containers",
            "/v3/aliases",
            "/v3/groups",
            f"/v3/ids?kind=group&beginning={group_id}",
            f"/v3/ids?kind=task&beginning={task_id[:4]}",
            "/v3/tasks",
            "/v3/audit",
            "/v3/tokens",
            "/v3/accounts",
            "/v3/usage",
            "/v3/usage?of=endpoints&by=identity,endpoint,function",
            "/v2/endpoints",
            "/actions/actions",
        ]
        filters = ["", "?role=any", f"?state=dead-lettered&endpoint_id={victim.endpoint_id}", f"?before={group_id}"]
        for path in (f"{each}{query}" for each in lists for query in (filters if "?" not in each else [""])):
            assert told(thief.call("GET", path)) == set(), path
        several = thief.ok("POST", "/v2/batch_status", {"task_ids": [task_id]})
        assert several == {"response": "batch", "results": {}, "unknown": [task_id]}
        globus = {"X-Globus-Client-Info": "product=python-sdk"}
        spelled_out = thief.ok("POST", "/v2/batch_status", {"task_ids": [task_id]}, headers=globus)
        assert spelled_out["results"][task_id]["error"]["code"] == "TASK_UNKNOWN"
        assert group_id not in json.dumps(spelled_out)

    def test_a_group_shows_only_the_callers_tasks_in_it(self, person: Person) -> None:
        other = Person(person.api)
        group_id = person.submit().body["task_group_id"]
        assert other.submit(task_group_id=group_id).status == 200
        for each in (person, other):
            assert len(each.ok("GET", f"/v2/taskgroup/{group_id}")["tasks"]) == 1

    def test_allow_list_does_not_change_with_new_versions(self, person: Person) -> None:
        other = Person(person.api)
        theirs, own = other.function(public=True), person.function_id
        endpoint_id = person.endpoint(public=True, allowed_functions=[f"{theirs.upper()}@1", own])
        assert other.submit(endpoint_id=endpoint_id, function=theirs).status == 200

        other.ok("PUT", f"/v3/functions/{theirs}", {"function_code": "8\n00\nmalware"})
        person.ok("PUT", f"/v3/functions/{own}", {"function_code": "7\n00\nbetter"})

        refused = other.submit(endpoint_id=endpoint_id, function=theirs)
        assert (refused.status, refused.body["code"]) == (403, "FUNCTION_NOT_PERMITTED")
        assert other.submit(endpoint_id=endpoint_id, function=f"{theirs}@1").status == 200
        assert person.submit(endpoint_id=endpoint_id, function=own).status == 200, "one's own may"
        listed = person.ok("GET", f"/v3/endpoints/{endpoint_id}/allowed_functions")["functions"]
        assert listed == [f"{theirs}@1", own]
        person.ok("PUT", f"/v3/endpoints/{endpoint_id}", {"allowed_functions": [f"{own}@1"]})
        assert person.submit(endpoint_id=endpoint_id, function=own).status == 403
        assert person.submit(endpoint_id=endpoint_id, function=f"{own}@1").status == 200

    def test_another_users_function_is_allowed_by_version_only(self, person: Person) -> None:
        theirs = Person(person.api).function(public=True)
        for method, path in (("POST", "/v3/endpoints"), ("PUT", f"/v3/endpoints/{person.endpoint_id}")):
            body = {"endpoint_name": "e", "allowed_functions": [person.function_id, theirs]}
            answer = person.refused(400, "INVALID_REQUEST", method, path, body)
            assert theirs in answer.body["message"]
            assert f"{theirs}@VERSION" in answer.body["hint"]
        assert person.ok("GET", f"/v3/endpoints/{person.endpoint_id}/allowed_functions")["restricted"] is False

    @pytest.mark.parametrize("entry", ["{}@0", "{}@", "{}@x", "{}@1 ", "{}@1@2", "@1", "{}@99999999999"])
    def test_allowed_version_is_a_version(self, person: Person, entry: str) -> None:
        body = {"allowed_functions": [entry.format(person.function_id)]}
        person.refused(422, "INVALID_REQUEST", "PUT", f"/v3/endpoints/{person.endpoint_id}", body)

    @pytest.mark.parametrize("change", ["private", "gone"])
    def test_connecting_agent_reverts_no_change(self, person: Person, change: str) -> None:
        other = Person(person.api)
        path = f"/v3/endpoints/{person.endpoint_id}"
        person.ok("PUT", path, {"public": True})

        def meanwhile(_keys: Sequence[str]) -> None:
            if change == "private":
                person.ok("PUT", path, {"public": False})
            else:
                person.ok("DELETE", path.replace("v3", "v2"))

        # The last read of a connect.
        endpoints: Any = WatchedStore(person.api.stores.endpoints, "find_endpoints_by_key", meanwhile)
        raced = MemoryApi(stores=dataclasses.replace(person.api.stores, endpoints=endpoints))
        agent = {"public_key": new_key(), "python_version": "3.12.1"}
        raced.call("POST", f"{path}/connect", agent, caller=person.identity)

        assert other.call("GET", path.replace("v3", "v2")).status == {"private": 403, "gone": 404}[change]

    # requests that are more work than others

    def test_invalid_requests_count_against_the_rate_limit(self, make_api: MakeApi) -> None:
        api, caller = make_api(rate_per_s=0.5, rate_burst=3), new_identity()
        sent: list[tuple[str, str, Any]] = [
            ("POST", "/v3/functions", {"function_name": 1}),
            ("POST", "/v3/functions", "no JSON"),
            ("GET", "/v3/no/such/route", None),
            ("GET", "/v2/version", None),
        ]
        assert [api.call(*each, caller=caller).status for each in sent] == [422, 400, 404, 429]

    @pytest.mark.parametrize(
        "body",
        [
            '{{"tasks": {{{wrong_keys}}}}}',
            '{{"tasks": {{"{function}": [{zeros}]}}}}',
            '{{"tasks": {{"{function}": ["p"]}}, "task_ids": {{"{function}": [{zeros}]}}}}',
            '{{"tasks": {{"{function}": ["p"]}}, "traceparents": {{"{function}": [{zeros}]}}}}',
            '{{"tasks": {{"{function}": ["p"]}}, "result_serializers": [{zeros}]}}',
        ],
        ids=["functions", "payloads", "ids", "spans", "strategies"],
    )
    def test_request_with_many_errors_is_cheap(self, person: Person, body: str) -> None:
        many = 300_000
        wrong_keys = ",".join(f'"{number}":0' for number in range(many)) if "wrong_keys" in body else ""
        text = body.format(function=person.function_id, zeros=",".join("0" * 1_000_000), wrong_keys=wrong_keys)

        told = person.refused(422, "INVALID_REQUEST", "POST", f"/v3/endpoints/{person.endpoint_id}/submit", text).body

        places = re.search(r"and (\d+) more$", told["reason"])
        assert places is None or int(places[1]) < 100, "some ten seconds, and a gigabyte, when every place is looked at"

    def test_validation_errors_are_truncated(self, person: Person) -> None:
        for key in ("x" * 3_000_000, "\\u0001" * 600_000):
            text = f'{{"tasks": {{"{key}": ["p"]}}}}'
            person.refused(422, "INVALID_REQUEST", "POST", f"/v3/endpoints/{person.endpoint_id}/submit", text)

    def test_functions_per_submit_are_bounded(self, person: Person) -> None:
        body = {"tasks": {str(uuid.uuid4()): ["p"] for _ in range(MAX_FUNCTIONS_PER_SUBMIT + 1)}}
        person.refused(422, "INVALID_REQUEST", "POST", f"/v3/endpoints/{person.endpoint_id}/submit", body)

    def test_blob_references_per_submit_are_bounded(self, person: Person) -> None:
        digests = [f"{number:064x}" for number in range(1001)]
        refs = [
            {"blob_key": f"{person.identity.identity_id}/{each}", "size_bytes": 1, "sha256": each} for each in digests
        ]
        body = {"tasks": {person.function_id: refs}}
        person.refused(400, "TOO_MANY_TASKS", "POST", f"/v3/endpoints/{person.endpoint_id}/submit", body)

    def test_limits_apply_to_the_older_submit_format(self, make_api: MakeApi) -> None:
        person = Person(make_api(max_tasks_per_request=3))
        tasks = [[str(uuid.uuid4()), str(uuid.uuid4()), PAYLOAD] for _ in range(4)]
        person.refused(400, "TOO_MANY_TASKS", "POST", "/v2/submit", {"tasks": tasks})
        spent = Person(make_api(rate_per_s=0.5, rate_burst=5))

        results = spent.ok("POST", "/v2/submit", {"tasks": tasks})["results"]

        assert [each["http_status_code"] for each in results] == [404, 404, 404, 429]

    def test_results_that_do_not_fit_are_not_read(self, person: Person) -> None:
        [ids] = person.submit(1000).body["tasks"].values()
        asked: list[int] = []
        tasks: Any = WatchedStore(person.api.stores.tasks, "get_tasks", lambda task_ids: asked.append(len(task_ids)))
        stores = dataclasses.replace(person.api.stores, tasks=tasks)
        small = MemoryApi(stores=stores, settings=ApiSettings(max_response_bytes=10_000))

        answer = small.call("POST", "/v2/batch_status", {"task_ids": ids}, caller=person.identity)

        views = answer.body["results"]

        assert 1 <= len(views) <= 5
        assert set(views) == set(ids[: len(views)])
        assert asked == [500]

    # what is kept, and shown in lists

    @pytest.mark.parametrize(
        ("path", "field", "most"),
        [
            ("/v3/functions", "function_name", MAX_TITLE),
            ("/v3/functions", "description", MAX_DESCRIPTION),
            ("/v3/endpoints", "endpoint_name", MAX_TITLE),
            ("/v3/endpoints", "display_name", MAX_TITLE),
            ("/v3/endpoints", "description", MAX_DESCRIPTION),
            ("/v3/containers", "location", MAX_TITLE),
            ("/v3/containers", "description", MAX_DESCRIPTION),
        ],
    )
    def test_text_length_is_bounded(self, person: Person, path: str, field: str, most: int) -> None:
        whole = {
            "/v3/functions": {"function_name": "f", "function_code": "x"},
            "/v3/endpoints": {"endpoint_name": "e"},
            "/v3/containers": {"type": "docker", "location": "x"},
        }[path]
        person.ok("POST", path, {**whole, field: "x" * most})
        person.refused(422, "INVALID_REQUEST", "POST", path, {**whole, field: "x" * (most + 1)})

    def test_metadata_size_is_bounded_also_when_merged(self, person: Person) -> None:
        big = {"a": "x" * MAX_METADATA_BYTES}
        path = f"/v3/endpoints/{person.endpoint_id}"
        person.refused(422, "INVALID_REQUEST", "PUT", path, {"metadata": big})
        code = {"function_name": "f", "function_code": "x"}
        person.refused(422, "INVALID_REQUEST", "POST", "/v3/functions", {**code, "meta": big})
        connect = {"public_key": new_key(), "packages": big}
        person.refused(422, "INVALID_REQUEST", "POST", f"{path}/connect", connect)

        statuses = [
            person.call("PUT", path, {"metadata": {name: "x" * (MAX_METADATA_BYTES - 100)}}).status for name in "abc"
        ]

        assert statuses == [200, 200, 400]

    def test_list_answers_are_bounded(self, make_api: MakeApi) -> None:
        person = Person(make_api(max_response_bytes=20_000))
        for number in range(10):
            person.function(description="x" * 5_000, public=True)
            person.endpoint(display_name=f"{number}{'x' * 900}", public=True)
            person.ok("POST", "/v3/containers", {"type": "docker", "location": "l", "description": "x" * 5_000})

        for path in ("/v3/functions", "/v3/containers", "/v2/endpoints?role=any", "/v2/endpoints"):
            answer = person.ok("GET", path)
            assert 500 < len(json.dumps(answer)) < 20_000, path

    def test_truncated_page_of_tasks_has_a_next_page(self, make_api: MakeApi) -> None:
        person = Person(make_api(max_response_bytes=5_000))
        [ids] = person.submit(15).body["tasks"].values()
        found: list[str] = []
        before = ""
        for _ in range(10):
            page = person.ok("GET", f"/v3/tasks?limit=1000{before}")
            found += [task["task_id"] for task in page["tasks"]]
            if "next" not in page:
                break
            before = f"&before={page['next']}"
        assert sorted(found) == sorted(ids)

    def test_truncated_group_is_marked(self, make_api: MakeApi) -> None:
        person = Person(make_api(max_response_bytes=1_000))
        for count, status in ((10, 200), (11, 400)):
            group_id = person.submit(count).body["task_group_id"]
            assert person.call("GET", f"/v2/taskgroup/{group_id}").status == status

    # quotas, and ways around them

    def test_waiting_tasks_of_an_owner_are_counted_over_all_endpoints(self, make_api: MakeApi) -> None:
        person = Person(make_api(max_waiting=3_000))
        assert person.submit(2_000).status == 200
        person.api.clock.now += 2
        second = person.endpoint(public=True)
        assert person.submit(1_000, endpoint_id=second).status == 200, "a short queue is always let in"
        other = Person(person.api)
        person.api.clock.now += 2

        for each in (person, other):
            answer = each.submit(1_001, endpoint_id=second)
            assert (answer.status, answer.body["code"], answer.headers["Retry-After"]) == (429, "QUEUE_FULL", "5")

        assert other.submit(2_000).status == 200, "each owner has room of its own"

    def test_versions_count_as_functions(self, make_api: MakeApi) -> None:
        person = Person(make_api(max_functions=3))
        path = f"/v3/functions/{person.function_id}"
        for number in range(2):
            person.ok("PUT", path, {"function_code": f"{number}"})
        person.refused(429, "QUOTA_EXCEEDED", "PUT", path, {"function_code": "third"})
        person.refused(429, "QUOTA_EXCEEDED", "POST", "/v3/functions", {"function_name": "f", "function_code": "x"})
        person.ok("PUT", path, {"description": "the same code"})
        assert person.ok("GET", "/v3/whoami")["limits"]["functions"] == {"used": 3, "limit": 3}

    def test_function_bytes_are_bounded(self, make_api: MakeApi) -> None:
        person = Person(make_api(max_function_bytes=1_000))
        person.function(function_code="x" * 900)
        body = {"function_name": "f", "function_code": "x" * 200}
        person.refused(429, "QUOTA_EXCEEDED", "POST", "/v3/functions", body)
        person.refused(429, "QUOTA_EXCEEDED", "PUT", f"/v3/functions/{person.function_id}", body)
        assert Person(person.api).function(function_code="x" * 900)

    def test_only_new_keys_count_against_the_quota(self, make_api: MakeApi) -> None:
        person = Person(make_api(key_rate_per_s=0.5, key_burst=3))
        announce(person.api)
        keys = [new_key() for _ in range(4)]
        for key in (*keys[:2], *keys[:2], *keys[:2]):
            person.ok("POST", "/v3/stream", {"public_key": key})
        path = f"/v3/endpoints/{person.endpoint_id}/connect"
        person.ok("POST", path, {"public_key": keys[2]})

        for route in (path, "/v3/stream"):
            answer = person.refused(429, "RATE_LIMITED", "POST", route, {"public_key": keys[3]})
            assert 0 < answer.body["retry_after_s"] <= 2.0  # by the clock of the queue
        person.ok("POST", path, {"public_key": keys[2]})

    def test_key_of_another_user_is_not_taken_over(self, person: Person) -> None:
        announce(person.api)
        key, other = new_key(), Person(person.api)
        person.ok("POST", "/v3/stream", {"public_key": key})

        other.refused(403, "FORBIDDEN", "POST", "/v3/stream", {"public_key": key})
        path = f"/v3/endpoints/{other.endpoint_id}/connect"
        other.refused(403, "FORBIDDEN", "POST", path, {"public_key": key})

        known = person.api.stores.queue.find_peers([key])[key]
        assert known.subject == person.identity.identity_id

    # tokens

    def test_expired_token_is_refused_despite_a_cached_policy(self, api: MemoryApi) -> None:
        caller = Identity(str(uuid.uuid4()), "late", expires_at=api.clock.now + 100)
        said = Identity.from_context(caller.to_context())
        assert said.expires_at == caller.expires_at

        statuses = []
        for wait_s in (0, 110, 30):
            api.clock.now += wait_s
            statuses.append(api.call("GET", "/v3/tasks", caller=caller).status)

        assert statuses == [200, 200, 401], "clocks may differ by half a minute"


def new_key() -> str:
    """A key in Z85 that no peer has."""
    return f"{uuid.uuid4().hex}{'k' * 8}"


def announce(api: MemoryApi) -> None:
    info = ForwarderInfo("f1", address="tcp://127.0.0.1:1", server_key="s" * 40)
    api.stores.queue.announce(info, ttl_s=600)


class TestAbuseOfFakes(AbuseSuite):
    @pytest.fixture
    def make_api(self) -> MakeApi:
        return lambda **settings: MemoryApi(settings=ApiSettings(**settings))


@pytest.mark.parametrize("kind", [Unavailable, Conflict])
def test_driver_errors_are_not_shown_to_callers(kind: type[Unavailable], caplog: pytest.LogCaptureFixture) -> None:
    cause = OSError('connection to server at "10.0.3.7" failed for user "farcall_admin"')
    error = kind(f"the database does not answer: {cause}")
    error.__cause__ = cause

    body = json.loads(error_response(error, request_id="r1").body or "")

    assert (body["message"], body["reason"]) == ("the database does not answer.",) * 2
    assert "farcall_admin" not in json.dumps(body)
    assert [str(cause) in vars(record)["reason"] for record in caplog.records] == [True]


def test_our_error_messages_are_complete() -> None:
    error = Unavailable("Globus Auth cannot be asked at the moment.")
    error.__cause__ = OSError("10.0.3.7")

    assert json.loads(error_response(error, request_id="r1").body or "")["message"] == error.record.message


def test_task_id_belongs_to_its_first_submitter() -> None:
    person, task_id = Person(MemoryApi()), new_task_id()
    thief = Person(person.api)
    assert person.submit(task_ids={person.function_id: [task_id]}).status == 200

    answer = thief.submit(task_ids={thief.function_id: [task_id]})

    assert (answer.status, answer.body["code"]) == (409, "TASK_ID_REUSED")
    assert person.identity.identity_id not in json.dumps(answer.body)
