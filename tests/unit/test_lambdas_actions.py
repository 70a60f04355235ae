"""Actions of Globus Flows: what becomes of a request, who may read and manage it, when it is forgotten; and attacks.
Each answer is checked by the published schema."""

from __future__ import annotations

import dataclasses
import datetime as dt
import json
import uuid
from pathlib import Path
from typing import Any, Final

import jsonschema
import pytest
import yaml

from farcall_common.errors import ErrorRecord, Unavailable
from farcall_common.json_calls import JSON_PREFIX, pack_json_call, read_json_result
from farcall_common.limits import MAX_ACTION_PRINCIPALS, MAX_REQUEST_BYTES
from farcall_common.payload import Serializer
from farcall_common.store.model import ForwarderInfo, Task, TaskResult
from farcall_common.wire.states import Reporter, TaskState
from farcall_lambdas.identity import Identity
from farcall_lambdas.models.actions import duration_of, seconds_of
from farcall_lambdas.settings import ApiSettings
from tests.support.memory_api import ALICE, BOB, Answer, MemoryApi, admitted

DATA: Final = Path(__file__).parents[1] / "contract" / "data" / "flows"
SCHEMAS: Final = {name: yaml.safe_load((DATA / f"action_{name}.yaml").read_text()) for name in ("status", "request")}
GROUP_ID: Final = "6a0cc1de-0000-4000-8000-00000000000a"
DAY_S: Final = 86_400


def urn(identity: Identity) -> str:
    return f"urn:globus:auth:identity:{identity.identity_id}"


class Lab:
    """The API in memory with an endpoint and a function of Alice's, and another endpoint."""

    def __init__(self, **settings: Any) -> None:
        self.api = MemoryApi(settings=ApiSettings(**settings))
        self.endpoint_id, self.other_endpoint_id = self.api.endpoint(), self.api.endpoint()
        self.function_id = self.api.function()

    def request(self, *args: Any, **fields: Any) -> dict[str, Any]:
        """A request of one task for each of these lists of arguments."""
        tasks = [{"function_id": self.function_id, "args": each} for each in args or ([],)]
        return {"request_id": str(uuid.uuid4()), "body": {"endpoint_id": self.endpoint_id, "tasks": tasks}, **fields}

    def call(self, method: str, path: str, body: Any = None, *, caller: Identity = ALICE) -> Answer:
        return self.api.call(method, f"/actions{path}", body, caller=caller)

    def run(self, request: Any = None, *, caller: Identity = ALICE) -> dict[str, Any]:
        request = request or self.request()
        jsonschema.validate(request, SCHEMAS["request"])
        return self._checked(self.call("POST", "/run", request, caller=caller), 202)

    def status(self, action_id: str, *, caller: Identity = ALICE) -> dict[str, Any]:
        return self._checked(self.call("GET", f"/{action_id}/status", caller=caller))

    def do(self, what: str, action_id: str, *, caller: Identity = ALICE) -> dict[str, Any]:
        return self._checked(self.call("POST", f"/{action_id}/{what}", caller=caller))

    def _checked(self, answer: Answer, status: int = 200) -> dict[str, Any]:
        assert answer.status == status, answer.body
        jsonschema.validate(answer.body, SCHEMAS["status"])
        return dict(answer.body)

    def tasks(self, action: dict[str, Any]) -> list[Task]:
        ids = [each["task_id"] for each in action["details"]["results"]]
        found = self.api.stores.tasks.get_tasks(ids)
        return [found[each] for each in ids]

    def end(self, task_id: str, value: Any = None, *, state: TaskState = TaskState.SUCCESS, **fields: Any) -> None:
        if state is TaskState.SUCCESS and not fields:
            fields = {"result": JSON_PREFIX + json.dumps(value).encode()}
        [task] = self.api.stores.tasks.get_tasks([task_id]).values()
        result = TaskResult(task_id, task.endpoint_id, 1, state, Reporter.AGENT, **fields)
        assert self.api.stores.tasks.record_results([result], at=self.now())

    def now(self) -> dt.datetime:
        return dt.datetime.fromtimestamp(self.api.clock.now, dt.UTC)


@pytest.fixture
def lab() -> Lab:
    return Lab()


def refusal(answer: Answer) -> tuple[int, str]:
    """Status and code of a refusal, which has the shape of the interface and ours in it."""
    body = answer.body
    assert set(body) == {"code", "description", "error"}
    assert body["description"].startswith(body["error"]["message"])
    assert body["error"]["http_status_code"] == answer.status
    return answer.status, str(body["code"])


class TestIntrospection:
    def test_it_names_the_scope_and_the_schema_of_the_body(self) -> None:
        lab = Lab(globus_scope="https://auth.globus.org/scopes/x/all")
        described = lab.call("GET", "").body
        assert described["globus_auth_scope"] == "https://auth.globus.org/scopes/x/all"
        assert described["types"] == ["ACTION"]
        assert (described["synchronous"], described["log_supported"]) == (False, True)
        assert described["maximum_deadline"] == "P30D"
        assert "does not use Globus" not in described["description"]
        assert lab.call("GET", "/").body == described
        schema = described["input_schema"]
        jsonschema.validators.validator_for(schema).check_schema(schema)
        jsonschema.validate(lab.request()["body"], schema)
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({"endpoint_id": 1}, schema)

    def test_without_globus_it_says_so(self, lab: Lab) -> None:
        described = lab.call("GET", "").body
        assert described["globus_auth_scope"] == ""
        assert "does not use Globus Auth" in described["description"]

    def test_the_scope_comes_from_the_environment(self) -> None:
        assert ApiSettings.from_environment({"FARCALL_GLOBUS_SCOPE": "s"}).globus_scope == "s"
        assert ApiSettings.from_environment({}).globus_scope == ""


class TestRun:
    def test_arguments_are_json_that_workers_read(self, lab: Lab) -> None:
        request = lab.request()
        request["body"]["tasks"] = [
            {"function_id": lab.function_id, "args": [1, "é\u2028\0", None], "kwargs": {"x": {"y": [2.5]}}},
            {"function_id": lab.function_id},
        ]
        first, second = lab.tasks(lab.run(request))
        assert Serializer().unpack_call(first.payload or b"") == ((1, "é\u2028\0", None), {"x": {"y": [2.5]}})
        assert Serializer().unpack_call(second.payload or b"") == ((), {})
        assert first.options.result_serializers == ("JSONData", "DillDataBase64")

    @pytest.mark.parametrize("value", ["half a pair \ud800", 10**400, "\x1b[31m\u202e", {"\ud800": 1}, 1e308, -0.0])
    def test_unusual_json_arrives_as_it_is(self, lab: Lab, value: Any) -> None:
        request = lab.request([value])
        first = lab.run(request)
        [task] = lab.tasks(first)
        assert Serializer().unpack_call(task.payload or b"") == ((value,), {})
        assert lab.run(request) == first

    @pytest.mark.parametrize(
        ("fields", "called"),
        [
            ({"args": [1, 2]}, ((1, 2), {})),
            ({"args": 7}, ((7,), {})),
            ({"args": {"a": 1}}, (({"a": 1},), {})),
            ({"args": "[1, [2]]"}, ((1, [2]), {})),
            ({"args": "text"}, (("text",), {})),
            ({"args": "[NaN]"}, (("[NaN]",), {})),
            ({"args": '{"a": 1}'}, (('{"a": 1}',), {})),
            ({"kwargs": {"a": 1}}, ((), {"a": 1})),
            ({"payload": {"a": 1}}, ((), {"a": 1})),
            ({"args": [0], "payload": '{"a": 1}'}, ((0,), {"a": 1})),
            ({"kwargs": '{"a": 1}'}, ((), {"a": 1})),
        ],
    )
    def test_the_older_form_of_a_call(self, lab: Lab, fields: dict[str, Any], called: Any) -> None:
        body = {"endpoint": lab.endpoint_id, "function": lab.function_id, **fields}
        [task] = lab.tasks(lab.run({"request_id": "1", "body": body}))
        assert Serializer().unpack_call(task.payload or b"") == called

    def test_tasks_of_several_functions_and_endpoints_keep_their_order(self, lab: Lab) -> None:
        other = lab.api.function()
        named = [(lab.endpoint_id, other), (lab.other_endpoint_id, lab.function_id), (lab.endpoint_id, lab.function_id)]
        tasks = [{"endpoint": e, "function": f, "args": [n]} for n, (e, f) in enumerate(named, start=1)]
        body = {"endpoint": lab.endpoint_id, "function": lab.function_id, "args": [0], "tasks": tasks}
        action = lab.run({"request_id": "1", "body": body})
        found = lab.tasks(action)
        assert [(each.endpoint_id, each.function_id) for each in found] == [
            (lab.endpoint_id, lab.function_id),
            *named,
        ]
        for number, each in enumerate(found):
            assert Serializer().unpack_call(each.payload or b"") == ((number,), {})
            lab.end(each.task_id, number)
        assert lab.status(action["action_id"])["details"]["result"] == [0, 1, 2, 3]

    def test_options_of_tasks_are_those_of_a_submit(self, lab: Lab) -> None:
        request, group_id = lab.request(), str(uuid.uuid4())
        request["body"] |= {
            "task_group_id": group_id,
            "walltime_s": 60,
            "retries": 2,
            "resource_specification": {"num_nodes": 2},
            "environment": {"type": "docker", "location": "python:3.12"},
            "result_serializers": ["11"],
            "create_queue": False,
        }
        connected = {"public_key": f"{uuid.uuid4().hex}{'k' * 8}", "containers": ["docker"]}
        lab.api.stores.queue.announce(ForwarderInfo("f", "tcp://10.0.0.1:443", "1" * 40), ttl_s=1e9)
        assert lab.api.call("POST", f"/v3/endpoints/{lab.endpoint_id}/connect", connected).status == 200
        [task] = lab.tasks(lab.run(request))
        assert lab.run(request)["details"]["results"][0]["task_id"] == task.task_id
        options = task.options
        assert options.environment is not None
        assert options.environment.location == "python:3.12"
        assert (options.walltime_s, options.retries, options.num_nodes) == (60, 2, 2)
        assert options.result_serializers == ("11",)
        assert task.task_group_id == group_id

    def test_without_a_group_the_action_is_one(self, lab: Lab) -> None:
        action = lab.run(lab.request([1], [2]))
        group = lab.api.call("GET", f"/v2/taskgroup/{action['action_id']}").body
        assert len(group["tasks"]) == 2
        assert action["details"]["task_group_id"] == action["action_id"]

    @pytest.mark.parametrize(
        ("change", "named"),
        [
            ({"body": {}}, "there is no task"),
            ({"body": {"tasks": []}}, "there is no task"),
            ({"body": []}, "body"),
            ({"request_id": ""}, "request_id"),
            ({"request_id": "a\0"}, "request_id"),
            ({"label": ""}, "label"),
            ({"label": "x" * 65}, "label"),
            ({"label": "half a pair \ud800"}, "label"),
            ({"monitor_by": ["public"]}, "monitor_by"),
            ({"manage_by": ["all_authenticated_users"]}, "manage_by"),
            ({"manage_by": [f"urn:globus:groups:id:{GROUP_ID}"] * (MAX_ACTION_PRINCIPALS + 1)}, "manage_by"),
            ({"allowed_clients": ["creator"]}, "allowed_clients"),
            ({"release_after": "30 days"}, "release_after"),
            ({"release_after": "P"}, "release_after"),
            ({"release_after": 5}, "release_after"),
            ({"deadline": "soon"}, "deadline"),
            ({"deadline": "9999-12-31T23:59:59-23:00"}, "deadline"),
        ],
    )
    def test_a_malformed_request_is_refused_with_the_field(self, lab: Lab, change: Any, named: str) -> None:
        answer = lab.call("POST", "/run", {**lab.request(), **change})
        assert refusal(answer) == (422, "RequestValidationError")
        assert named in answer.body["description"]
        assert lab.call("GET", "/actions").body == []

    @pytest.mark.parametrize(
        "task",
        [
            {"args": [1]},
            {"function": "F", "function_id": "F"},
            {"function_id": "F", "kwargs": [1]},
            {"function_id": "F", "kwargs": "[1]"},
            {"function_id": "F", "payload": "{"},
            {"function_id": "F", "kwargs": {}, "payload": {}},
            {"function_id": "F", "args": json.loads("[" * 70 + "]" * 70)},
            {"function_id": "F", "args": "[" * 70 + "]" * 70},
            {"function_id": "F", "kwargs": '{"a": NaN}'},
            {"function_id": "not an id"},
        ],
    )
    def test_a_malformed_task_is_refused(self, lab: Lab, task: dict[str, Any]) -> None:
        named = {name: lab.function_id if value == "F" else value for name, value in task.items()}
        request = lab.request()
        request["body"]["tasks"] = [named]
        assert refusal(lab.call("POST", "/run", request)) == (422, "RequestValidationError")

    def test_a_task_without_an_endpoint_is_refused(self, lab: Lab) -> None:
        request = {"request_id": "1", "body": {"tasks": [{"function_id": lab.function_id}]}}
        assert "endpoint" in lab.call("POST", "/run", request).body["description"]

    def test_what_a_submit_refuses_is_no_action(self, lab: Lab) -> None:
        unknown = str(uuid.uuid4())
        for change, status in (
            ({"endpoint_id": unknown}, 404),
            ({"tasks": [{"function_id": unknown}]}, 404),
            ({"user_endpoint_config": {"a": 1}}, 400),
        ):
            request = lab.request()
            request["body"] |= change
            assert refusal(lab.call("POST", "/run", request)) == (status, "BadActionRequest")
            fixed = lab.request(request_id=request["request_id"])
            assert lab.run(fixed)["status"] == "ACTIVE", "the request id is free again"
        assert refusal(lab.call("POST", "/run", lab.request(), caller=BOB)) == (403, "UnauthorizedRequest")
        assert lab.call("GET", "/actions", caller=BOB).body == []

    def test_if_one_endpoint_refuses_its_tasks_the_others_are_cancelled(self, lab: Lab) -> None:
        tasks = [{"endpoint_id": each, "function_id": lab.function_id} for each in (lab.endpoint_id, str(uuid.uuid4()))]
        answer = lab.call("POST", "/run", {"request_id": "1", "body": {"tasks": tasks}})
        assert refusal(answer) == (404, "BadActionRequest")
        [task] = lab.api.call("GET", "/v3/tasks").body["tasks"]
        assert task["status"] == "cancelled"
        assert lab.call("GET", "/actions?status=failed").body == []

    def test_too_much_is_refused_by_the_limits_of_a_submit(self) -> None:
        lab = Lab(max_tasks_per_request=2, max_payload_bytes=1000)
        assert refusal(lab.call("POST", "/run", lab.request([1], [2], [3])))[0] == 400
        assert refusal(lab.call("POST", "/run", lab.request(["x" * 1000])))[0] == 413
        assert refusal(lab.call("POST", "/run", " " * (MAX_REQUEST_BYTES + 1)))[0] == 413
        assert refusal(lab.call("POST", "/run", "{"))[0] == 400
        assert refusal(lab.call("POST", "/run", '{"request_id": NaN}'))[0] == 400
        assert len(lab.run(lab.request([1], [2]))["details"]["results"]) == 2


class TestRepeats:
    def test_the_same_request_is_the_same_action(self, lab: Lab) -> None:
        request = lab.request([1], [2], label="x")
        first, second = lab.run(request), lab.run(request)
        assert first == second
        reordered = json.dumps(request, sort_keys=True)
        assert lab.call("POST", "/actions", reordered).body == first
        assert len(lab.api.call("GET", "/v3/tasks").body["tasks"]) == 2

    @pytest.mark.parametrize("change", [{"label": "other"}, {"monitor_by": [urn(BOB)]}, {"release_after": "P1D"}])
    def test_another_request_of_that_id_is_refused(self, lab: Lab, change: dict[str, Any]) -> None:
        request = lab.request([1])
        lab.run(request)
        other_body = {**request["body"], "retries": 1}
        for changed in ({**request, **change}, {**request, "body": other_body}):
            answer = lab.call("POST", "/run", changed)
            assert refusal(answer) == (409, "ActionConflict")
            assert answer.body["error"]["code"] == "REQUEST_ID_REUSED"

    def test_request_ids_of_others_are_others(self, lab: Lab) -> None:
        endpoint_id = lab.api.endpoint(caller=BOB, public=True)
        body = {"endpoint_id": endpoint_id, "tasks": [{"function_id": lab.api.function(public=True, caller=BOB)}]}
        ids = {lab.run({"request_id": "1", "body": body}, caller=each)["action_id"] for each in (ALICE, BOB)}
        assert len(ids) == 2

    def test_a_request_is_finished_when_it_is_repeated_after_a_crash(self, lab: Lab) -> None:
        stores = lab.api.stores
        request = lab.request([1])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(stores.tasks, "add_tasks", _away)
            assert refusal(lab.call("POST", "/run", request)) == (503, "ActionProviderError")
        [row] = stores.actions.list_actions([ALICE.identity_id])
        assert lab.call("GET", f"/{row.action_id}/status").status == 404, "nothing runs yet"
        assert lab.call("GET", "/actions").body == []
        assert lab.run(request)["action_id"] == row.action_id

    def test_a_repeat_after_the_endpoint_was_deleted_is_still_the_action(self, lab: Lab) -> None:
        request = lab.request([1])
        action = lab.run(request)
        assert lab.api.call("DELETE", f"/v2/endpoints/{lab.endpoint_id}").status == 200
        again = lab.run(request)
        assert (again["action_id"], again["status"]) == (action["action_id"], "FAILED")


def _away(*_: Any, **__: Any) -> Any:
    raise Unavailable("The database is unavailable.")


class TestStatus:
    def test_an_action_is_active_until_all_tasks_have_ended(self, lab: Lab) -> None:
        action = lab.run(lab.request([1], [2], label="Beam 7"))
        first, second = lab.tasks(action)
        assert (action["status"], action["display_status"]) == ("ACTIVE", "0 of 2 tasks have ended")
        assert action["start_time"] == "2023-11-14T22:13:20Z"
        assert [each["status"] for each in action["details"]["results"]] == ["received", "received"]
        assert "was never online" in action["details"]["results"][0]["why"]
        lab.api.clock.now += 5
        lab.end(first.task_id, {"a": [1]})
        half = lab.status(action["action_id"])
        assert (half["status"], half["display_status"]) == ("ACTIVE", "1 of 2 tasks have ended")
        assert "completion_time" not in half
        lab.end(second.task_id, None)
        done = lab.status(action["action_id"])
        assert (done["status"], done["display_status"]) == ("SUCCEEDED", "2 of 2 tasks have ended")
        assert done["details"]["result"] == [{"a": [1]}, None]
        assert [each["output"] for each in done["details"]["results"]] == [{"a": [1]}, None]
        assert done["completion_time"] == "2023-11-14T22:13:25Z"
        assert done["creator_id"] == urn(ALICE)
        assert done["label"] == "Beam 7"

    def test_a_failure_has_code_message_and_hint(self, lab: Lab) -> None:
        action = lab.run(lab.request([1], [2]))
        first, second = lab.tasks(action)
        lab.end(first.task_id, 5)
        lab.end(second.task_id, state=TaskState.FAILED, error=ErrorRecord("TASK_FAILED", "KeyError: 'x'", hint="Look."))
        done = lab.status(action["action_id"])
        assert done["status"] == "FAILED"
        assert (done["details"]["code"], done["details"]["description"]) == ("TASK_FAILED", "KeyError: 'x'")
        assert done["details"]["results"][0]["output"] == 5
        assert done["details"]["results"][1]["error"] == {
            "code": "TASK_FAILED",
            "message": "KeyError: 'x'",
            "hint": "Look.",
        }
        assert "result" not in done["details"]

    @pytest.mark.parametrize(
        "result",
        [b"00\ngASVBQ==", b"f0\nx", b"11\nNaN", b"11\n[", b"11\n" + b"[" * 70 + b"]" * 70, b"\xff", b'11\n"\\ud800"'],
    )
    def test_a_result_that_is_not_json_is_named(self, lab: Lab, result: bytes) -> None:
        action = lab.run()
        [task] = lab.tasks(action)
        lab.end(task.task_id, result=result)
        done = lab.status(action["action_id"])
        assert (done["status"], done["details"]["result"]) == ("SUCCEEDED", [None])
        [entry] = done["details"]["results"]
        assert "output" not in entry
        assert entry["reason"]

    def test_a_large_result_is_shown_from_the_blob_store(self, lab: Lab) -> None:
        action = lab.run()
        [task] = lab.tasks(action)
        ref = lab.api.stores.blobs.write(
            f"{ALICE.identity_id}/{task.task_id}", JSON_PREFIX + b'"%b"' % (b"x" * 100_000)
        )
        lab.end(task.task_id, result_ref=ref)
        assert lab.status(action["action_id"])["details"]["result"] == ["x" * 100_000]

    def test_results_that_do_not_fit_are_left_out(self) -> None:
        lab = Lab(max_response_bytes=20_000)
        action = lab.run(lab.request(*[[n] for n in range(8)]))
        for each in lab.tasks(action):
            lab.end(each.task_id, "x" * 2_000)
        results = lab.status(action["action_id"])["details"]["results"]
        shown = [each for each in results if "output" in each]
        assert 1 <= len(shown) < 8
        assert all("too many bytes" in each["reason"] for each in results if each not in shown)

    def test_hundreds_of_errors_fit_an_answer(self, lab: Lab) -> None:
        action = lab.run(lab.request(*[[n] for n in range(150)]))
        for each in lab.tasks(action):
            lab.end(each.task_id, state=TaskState.FAILED, error=ErrorRecord("TASK_FAILED", "x" * 4_000))
        errors = [each["error"] for each in lab.status(action["action_id"])["details"]["results"]]
        assert [set(each) for each in errors[:100]] == [{"code", "message", "hint"}] * 100
        assert errors[100:] == [{"code": "TASK_FAILED"}] * 50

    def test_only_the_first_open_tasks_are_explained(self, lab: Lab) -> None:
        results = lab.run(lab.request(*[[n] for n in range(15)]))["details"]["results"]
        assert ["why" in each for each in results] == [True] * 10 + [False] * 5

    def test_both_forms_of_the_interface_are_the_same(self, lab: Lab) -> None:
        answer = lab.call("POST", "/actions", lab.request([1]))
        assert answer.status == 202
        id_ = answer.body["action_id"]
        assert lab.call("GET", f"/actions/{id_}").body == lab.status(id_)
        assert lab.call("GET", f"/actions/{id_}/log").body == lab.call("GET", f"/{id_}/log").body
        cancelled = lab.call("POST", f"/actions/{id_}/cancel")
        assert cancelled.body["status"] == "FAILED"
        assert lab.call("DELETE", f"/actions/{id_}").body == cancelled.body
        assert lab.call("GET", f"/actions/{id_}").status == 404


class TestAccess:
    def test_actions_of_others_do_not_exist(self, lab: Lab) -> None:
        id_ = lab.run()["action_id"]
        for action_id in (id_, str(uuid.uuid4()), "x", "..", "%00", id_.upper()):
            for method, what in (("GET", "status"), ("GET", "log"), ("POST", "cancel"), ("POST", "release")):
                answer = lab.call(method, f"/{action_id}/{what}", caller=BOB)
                assert answer.status == 404
                assert action_id == ".." or answer.body["error"]["code"] in ("ACTION_UNKNOWN", "NOT_FOUND")
        assert lab.call("GET", "/actions", caller=BOB).body == []
        assert lab.status(id_)["status"] == "ACTIVE"

    @pytest.mark.parametrize("by_group", [False, True])
    def test_monitors_read_and_managers_manage(self, lab: Lab, by_group: bool) -> None:
        member = dataclasses.replace(BOB, verified=frozenset({f"group {GROUP_ID}"})) if by_group else BOB
        named = f"urn:globus:groups:id:{GROUP_ID.upper()}" if by_group else urn(BOB)
        read = lab.run(lab.request(monitor_by=[named]))["action_id"]
        manage = lab.run(lab.request(manage_by=[named]))["action_id"]
        assert lab.status(read, caller=member)["monitor_by"] == [named]
        assert lab.call("GET", f"/{read}/log", caller=member).body["entries"]
        assert refusal(lab.call("POST", f"/{read}/cancel", caller=member)) == (404, "ActionNotFound")
        assert refusal(lab.call("GET", f"/{manage}/status", caller=member)) == (404, "ActionNotFound")
        cancelled = lab.do("cancel", manage, caller=member)
        assert cancelled["details"]["description"] == "A manager of the action cancelled the task."
        assert lab.do("release", manage, caller=member)["status"] == "FAILED"
        other_user = Identity(str(uuid.uuid4()), "eve@example.org")
        assert lab.call("GET", f"/{read}/status", caller=other_user).status == 404
        entries = lab.api.call("GET", "/v3/audit").body["entries"]
        assert [each["action"] for each in entries if each["identity_id"] == BOB.identity_id] == [
            "tasks.cancel",
            "action.release",
        ]

    def test_a_monitor_without_the_group_any_more_is_refused(self, lab: Lab) -> None:
        id_ = lab.run(lab.request(monitor_by=[f"urn:globus:groups:id:{GROUP_ID}"]))["action_id"]
        member = dataclasses.replace(BOB, verified=frozenset({f"group {GROUP_ID}"}))
        assert lab.status(id_, caller=member)
        assert lab.call("GET", f"/{id_}/status", caller=BOB).status == 404

    def test_a_token_of_a_monitor_keeps_its_limits(self, lab: Lab) -> None:
        id_ = lab.run(lab.request(monitor_by=[urn(BOB)]))["action_id"]
        others = lab.api.endpoint(caller=BOB)
        for limits, status in (({}, 200), ({"endpoints": [others]}, 404)):
            caller = admitted(lab.api.token(caller=BOB, **limits))
            assert lab.call("GET", f"/{id_}/status", caller=caller).status == status

    def test_the_owner_of_the_endpoint_reads_nothing(self, lab: Lab) -> None:
        endpoint_id = lab.api.endpoint(caller=BOB, public=True)
        request = lab.request()
        request["body"]["endpoint_id"] = endpoint_id
        assert lab.call("GET", f"/{lab.run(request)['action_id']}/status", caller=BOB).status == 404


class TestEnd:
    def test_cancel_is_harmless_when_repeated_and_after_the_end(self, lab: Lab) -> None:
        id_ = lab.run(lab.request([1], [2]))["action_id"]
        first = lab.do("cancel", id_)
        assert (first["status"], first["details"]["code"]) == ("FAILED", "TASK_CANCELLED")
        assert lab.do("cancel", id_) == first

    def test_only_an_action_that_has_ended_is_released(self, lab: Lab) -> None:
        request = lab.request()
        action = lab.run(request)
        id_ = action["action_id"]
        assert refusal(lab.call("POST", f"/{id_}/release")) == (409, "ActionConflict")
        lab.end(lab.tasks(action)[0].task_id, 7)
        released = lab.do("release", id_)
        assert released["details"]["result"] == [7]
        assert refusal(lab.call("GET", f"/{id_}/status")) == (404, "ActionNotFound")
        assert refusal(lab.call("POST", f"/{id_}/release")) == (404, "ActionNotFound")
        assert lab.run(request)["action_id"] != id_, "the request id is free"
        assert lab.api.call("GET", f"/v2/tasks/{lab.tasks(action)[0].task_id}").status == 200, "the task is kept"

    @pytest.mark.parametrize(
        ("wanted", "shown", "seconds"),
        [
            ("PT90S", "PT90S", 90),
            ("P1DT12H", "PT129600S", 129_600),
            ("P2W", "P14D", 14 * DAY_S),
            ("P9Y", "P30D", 30 * DAY_S),
        ],
    )
    def test_it_is_forgotten_release_after_its_end(self, lab: Lab, wanted: str, shown: str, seconds: int) -> None:
        request = lab.request(release_after=wanted)
        action = lab.run(request)
        assert action["release_after"] == shown
        lab.end(lab.tasks(action)[0].task_id, 7)
        lab.api.clock.now += seconds - 1
        assert lab.status(action["action_id"])["status"] == "SUCCEEDED"
        lab.api.clock.now += 1
        assert lab.call("GET", "/actions?status=succeeded").body == []
        assert lab.run(request)["action_id"] != action["action_id"]
        assert lab.call("GET", f"/{action['action_id']}/status").status == 404

    def test_the_reconciler_deletes_old_actions(self) -> None:
        lab = Lab(retention_days=3, max_wait_days=4)
        action = lab.run()
        lab.end(lab.tasks(action)[0].task_id, 7)
        reconciler, stores = lab.api.application.services.reconciler, lab.api.stores
        lab.api.clock.now += 4 * DAY_S
        reconciler.run()
        assert lab.call("GET", f"/{action['action_id']}/status").status == 404, "its task is gone"
        second = lab.run()["action_id"]
        lab.api.clock.now += 3 * DAY_S + 1
        reconciler.run()
        assert [each.action_id for each in stores.actions.list_actions([ALICE.identity_id])] == [second]

    def test_open_tasks_are_cancelled_at_the_deadline(self, lab: Lab) -> None:
        deadline = (lab.now() + dt.timedelta(minutes=5)).isoformat()
        request = lab.request([1], deadline=deadline)
        late, other = lab.run(request), lab.run()
        reconciler = lab.api.application.services.reconciler
        lab.api.clock.now += 299
        assert reconciler.run().actions_overdue == 0
        lab.api.clock.now += 1
        assert reconciler.run().actions_overdue == 1
        assert reconciler.run().actions_overdue == 0
        done = lab.status(late["action_id"])
        assert done["status"] == "FAILED"
        assert done["details"]["description"].startswith("The deadline of the action, 2023-11-14 22:18:20 UTC, has")
        assert lab.status(other["action_id"])["status"] == "ACTIVE"
        assert lab.run(request)["action_id"] == late["action_id"], "it was in time when it was new"

    @pytest.mark.parametrize("seconds", [0, -1, 31 * DAY_S])
    def test_a_deadline_that_cannot_be_kept_is_refused(self, lab: Lab, seconds: int) -> None:
        deadline = (lab.now() + dt.timedelta(seconds=seconds)).isoformat()
        assert refusal(lab.call("POST", "/run", lab.request(deadline=deadline))) == (400, "BadActionRequest")
        assert lab.api.stores.actions.list_actions([ALICE.identity_id]) == []


class TestLog:
    def test_pages_have_every_event_once(self, lab: Lab) -> None:
        action = lab.run(lab.request([1], [2], [3]))
        for each in lab.tasks(action):
            lab.end(each.task_id, 1)
        whole = lab.call("GET", f"/{action['action_id']}/log?limit=1000").body
        assert not whole["has_next_page"]
        assert "marker" not in whole
        assert [each["code"] for each in whole["entries"]] == ["received", "success"] * 3
        assert [each["details"]["task_id"] for each in whole["entries"]] == [
            each.task_id for each in lab.tasks(action) for _ in range(2)
        ]
        for limit in range(1, 7):
            pages, query = [], f"limit={limit}"
            while True:
                page = lab.call("GET", f"/{action['action_id']}/log?{query}").body
                assert len(page["entries"]) <= limit
                pages += page["entries"]
                if not page["has_next_page"]:
                    break
                query = f"limit={limit}&pagination_token={page['marker']}"
            assert pages == whole["entries"]

    def test_a_page_fits_an_answer(self) -> None:
        lab = Lab(max_response_bytes=2_000)
        action = lab.run(lab.request([1], [2], [3]))
        for each in lab.tasks(action):
            lab.end(each.task_id, 1)
        codes, query = [], "limit=1000"
        while True:
            page = lab.call("GET", f"/{action['action_id']}/log?{query}").body
            assert 1 <= len(page["entries"]) < 6
            codes += [each["code"] for each in page["entries"]]
            if not page["has_next_page"]:
                break
            query = f"pagination_token={page['marker']}"
        assert codes == ["received", "success"] * 3

    def test_a_wrong_page_is_refused(self, lab: Lab) -> None:
        id_ = lab.run()["action_id"]
        for query in ("pagination_token=x", "limit=0", "limit=1001", "pagination_token=1:-1"):
            assert refusal(lab.call("GET", f"/{id_}/log?{query}"))[0] == 422
        assert refusal(lab.call("GET", f"/{id_}/log?reverse_order=True"))[0] == 422
        assert lab.call("GET", f"/{id_}/log?reverse_order=false").status == 200
        assert lab.call("GET", f"/{id_}/log?pagination_token=9:9").body["entries"] == []


class TestList:
    def test_actions_are_listed_by_state_newest_first(self, lab: Lab) -> None:
        first, second, _ = (lab.run(lab.request(label=name)) for name in "abc")
        lab.end(lab.tasks(first)[0].task_id, 1)
        lab.do("cancel", second["action_id"])

        def listed(query: str) -> list[str]:
            found = lab.call("GET", f"/actions{query}").body
            for each in found:
                jsonschema.validate(each, SCHEMAS["status"])
            return [each["label"] for each in found]

        assert listed("") == ["c"]
        assert listed("?status=succeeded") == ["a"]
        assert listed("?status=failed,ACTIVE") == ["c", "b"]
        assert listed("?status=failed,active,succeeded&limit=2") == ["c", "b"]
        assert listed("?status=inactive") == []
        assert refusal(lab.call("GET", "/actions?roles=monitor_by"))[0] == 422

    def test_it_reads_no_more_tasks_than_a_request_may(self) -> None:
        lab = Lab(max_tasks_per_request=5)
        for _ in range(3):
            lab.run(lab.request([1], [2]))
        assert len(lab.call("GET", "/actions").body) == 2


class TestJsonCalls:
    def test_results_of_other_strategies_are_not_read(self) -> None:
        for buffer in (b"", b"1", b"00\n1", b"11", b"\x80\x04N.", b"11\n", b"11\n1e999"):
            with pytest.raises(ValueError):
                read_json_result(buffer)
        assert read_json_result(b'11\n{"a":[1,2.5,null]}') == {"a": [1, 2.5, None]}

    def test_a_number_that_json_does_not_have_is_refused(self) -> None:
        with pytest.raises(ValueError):
            pack_json_call([float("nan")], {})

    def test_a_call_is_what_the_sdk_packs(self) -> None:
        assert Serializer().unpack_call(pack_json_call([1, "ü"], {"a": "\ud800"}).encode()) == (
            (1, "ü"),
            {"a": "\ud800"},
        )

    def test_durations(self) -> None:
        for text, seconds in (("P30D", 30 * DAY_S), ("PT36H", 1.5 * DAY_S), ("P1Y2M3W", 446 * DAY_S), ("PT0.5S", 0.5)):
            assert seconds_of(text) == seconds
        for seconds in (60, DAY_S, 1.5 * DAY_S, 3600):
            assert seconds_of(duration_of(seconds)) == seconds
