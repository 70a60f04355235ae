"""Tasks that call other functions: checks of a submit, withdrawn rights, memoization, stages in answers."""

from __future__ import annotations

import hashlib
import json
import uuid
from typing import Any

import msgspec
import pytest

from farcall_common.graphs import StageState
from farcall_common.limits import MAX_CALLEES_PER_SUBMIT
from farcall_common.store.model import GraphState, Task, TaskResult
from farcall_common.task_options import Callee, TaskOptions
from farcall_common.wire.states import Reporter, TaskState
from tests.support.memory_api import ALICE, BOB, Answer, admitted
from tests.unit.test_lambdas_environments import PACKAGES, SCI, EnvironmentLab
from tests.unit.test_lambdas_submit import PAYLOAD

RUNNING = TaskState.RUNNING
LOAD = StageState(0, "load", "done", ended=1, run_s=1.5)
RESIZE = StageState(1, "resize", "running", calls=40, ended=12, failed=1, started_at=5.0, run_s=30.0, node="n1")
WRITE = StageState(2, "write", "waiting")


class GraphLab(EnvironmentLab):
    """A lab whose endpoint runs graphs, and a second function."""

    def __init__(self, **endpoint: Any) -> None:
        super().__init__(**endpoint)
        self.connect(containers=["apptainer", "uv"])
        self.callee_id = self.function(function_name="resize", function_code="4\n01\ng")

    def refused(self, *callees: str, **fields: Any) -> tuple[int, Any, Any]:
        before, depth = self.count(), self.queue.depth([self.endpoint_id])
        answer = self.submit(callees=list(callees), **fields)
        assert (self.count(), self.queue.depth([self.endpoint_id])) == (before, depth)
        return answer.status, answer.body.get("code"), answer.body.get("message")

    def graph(self, **fields: Any) -> Task:
        [task] = self.submitted(callees=[self.callee_id], **fields)
        return task

    def show(self, task_id: str, *, caller: Any = ALICE) -> Answer:
        return self.api.call("GET", f"/v2/tasks/{task_id}", caller=caller)


@pytest.fixture
def lab() -> GraphLab:
    return GraphLab()


def sha(body: str) -> str:
    return hashlib.sha256(body.encode()).hexdigest()


# -- submit ------------------------------------------------------------------------------------------------------------


def test_callees_are_resolved_and_travel_with_each_task(lab: GraphLab) -> None:
    new = {"function_code": "4\n01\nh"}
    assert lab.api.call("PUT", f"/v3/functions/{lab.callee_id}", new).body["version"] == 2
    references = [lab.callee_id, f"{lab.callee_id}@1", lab.function_id, lab.callee_id.upper()]
    tasks = lab.submitted({lab.function_id: [PAYLOAD, "a"]}, callees=references)
    newest = Callee(lab.callee_id, sha("4\n01\nh"), 2)
    for task in tasks:
        assert task.options == TaskOptions(
            callees=(
                newest,
                Callee(lab.callee_id, sha("4\n01\ng"), 1),
                Callee(lab.function_id, sha("4\n01\nf"), 1),
                newest,
            )
        )
        assert task.function_id == lab.function_id
    assert lab.queue.depth([lab.endpoint_id]) == 2


def test_callees_in_the_older_form_of_a_submit(lab: GraphLab) -> None:
    body = {"tasks": [[lab.function_id, lab.endpoint_id, "p"]], "callees": [lab.callee_id]}
    [result] = lab.api.call("POST", "/v2/submit", body).body["results"]
    task = lab.database.get_tasks([result["task_uuid"]])[result["task_uuid"]]
    assert task.options.callees == (Callee(lab.callee_id, sha("4\n01\ng"), 1),)


@pytest.mark.parametrize("wrong", ["f", ["resize"], [5], ["x@1"], [None], {}, [["a", "b"]]])
def test_malformed_callees_are_refused(lab: GraphLab, wrong: Any) -> None:
    assert lab.submit(callees=wrong).status == 422
    assert lab.submit(callees=[str(uuid.uuid4())] * 1001).status == 422
    assert lab.count() == 0


def test_callee_that_does_not_exist_is_named(lab: GraphLab) -> None:
    nothing = str(uuid.uuid4())
    assert lab.refused(lab.callee_id, nothing) == (404, "FUNCTION_UNKNOWN", f"There is no function {nothing}.")
    missing = f"{lab.callee_id}@2"
    assert lab.refused(missing) == (404, "FUNCTION_UNKNOWN", f"There is no function {missing}.")
    assert lab.api.call("DELETE", f"/v2/functions/{lab.callee_id}").status == 200
    assert lab.refused(lab.callee_id)[1] == "FUNCTION_UNKNOWN"


def test_callee_must_be_one_that_the_caller_may_run(lab: GraphLab) -> None:
    bobs = lab.function(caller=BOB)
    status, code, message = lab.refused(bobs)
    assert (status, code, message) == (403, "FORBIDDEN", f"You may not use function {bobs}.")
    lab.api.share(f"functions/{bobs}", ALICE, caller=BOB)
    assert lab.submit(callees=[bobs]).status == 200
    token = admitted(lab.api.token(functions=[lab.function_id]))
    status, code, message = lab.refused(lab.callee_id, caller=token)
    assert (status, message) == (403, f"The token is not for function {lab.callee_id}.")
    both = admitted(lab.api.token(functions=[lab.function_id, lab.callee_id]))
    assert lab.submit(callees=[lab.callee_id], caller=both).status == 200


def test_callee_must_be_one_that_the_endpoint_runs(lab: GraphLab) -> None:
    path = f"/v3/endpoints/{lab.endpoint_id}"
    assert lab.api.call("PUT", path, {"allowed_functions": [lab.function_id]}).status == 200
    status, code, message = lab.refused(lab.callee_id)
    assert (status, code) == (403, "FUNCTION_NOT_PERMITTED")
    assert message == f"Endpoint {lab.endpoint_id} does not run function {lab.callee_id}@1."
    [version] = lab.api.call("GET", f"/v3/functions/{lab.callee_id}/versions").body["versions"]
    assert f"add resize (SHA-256 {version['function_hash']}) to" in lab.submit(callees=[lab.callee_id]).body["hint"]
    assert lab.submit().status == 200
    assert lab.api.call("PUT", path, {"allowed_functions": [lab.function_id, f"{lab.callee_id}@1"]}).status == 200
    assert lab.submit(callees=[lab.callee_id]).status == 200


def test_callee_runs_in_its_own_environment_or_in_that_of_the_submit(lab: GraphLab) -> None:
    contained = lab.function(container="sci")
    [task] = lab.submitted(callees=[lab.callee_id, contained])
    assert task.options.environment is None
    assert [each.environment for each in task.options.callees] == [None, SCI]
    [task] = lab.submitted({contained: ["p"]}, callees=[lab.callee_id, contained])
    assert task.options.environment == SCI
    assert [each.environment for each in task.options.callees] == [None, SCI]  # and not in that of the task
    [task] = lab.submitted(callees=[lab.callee_id, contained], environment=PACKAGES)
    assert {each.environment for each in task.options.callees} == {task.options.environment}


def test_environment_of_a_callee_must_be_one_that_the_endpoint_runs(lab: GraphLab) -> None:
    docker = lab.function(function_name="train", environment={"type": "docker", "location": "python:3.12"})
    status, code, message = lab.refused(docker)
    assert (status, code) == (400, "ENDPOINT_INCOMPATIBLE")
    assert message == (
        "Callee train requires container docker:python:3.12 (docker), and endpoint laptop runs apptainer, uv."
    )
    assert lab.submit(callees=[docker], environment=PACKAGES).status == 200
    lab.api.call("PUT", f"/v3/endpoints/{lab.endpoint_id}", {"allowed_functions": [lab.function_id, lab.callee_id]})
    assert lab.submit(callees=[lab.callee_id]).status == 200
    status, code, message = lab.refused(lab.callee_id, environment=PACKAGES)
    assert code == "FUNCTION_NOT_PERMITTED"


def test_byte_code_of_a_callee_must_be_of_the_python_of_the_endpoint(lab: GraphLab) -> None:
    old = lab.function(function_name="old", meta={"byte_code_of_python": "3.11"})
    status, code, message = lab.refused(old)
    assert (status, code) == (400, "ENDPOINT_INCOMPATIBLE")
    assert message.startswith(f"Function old ({old}) is byte code of Python 3.11")
    assert lab.submit(callees=[old], environment=PACKAGES).status == 200


def test_endpoint_that_never_connected_may_get_graphs() -> None:
    lab = EnvironmentLab()
    endpoint_id = lab.api.endpoint()
    body = {"tasks": {lab.function_id: ["p"]}, "callees": [lab.function()]}
    assert lab.api.call("POST", f"/v3/endpoints/{endpoint_id}/submit", body).status == 200


def test_callees_of_all_tasks_are_limited(lab: GraphLab) -> None:
    most = MAX_CALLEES_PER_SUBMIT // 500
    status, code, message = lab.refused(*[lab.callee_id] * 500, tasks={lab.function_id: ["p"] * (most + 1)})
    assert (status, code) == (400, "TOO_MANY_TASKS")
    assert message == "201 tasks with 500 callees each in one request; 100000 callees are allowed in all."
    assert lab.submit({lab.function_id: ["p"] * 2}, callees=[lab.callee_id] * 1000).status == 200


def test_environments_of_callees_are_limited(lab: GraphLab) -> None:
    wide = {"type": "uv", "requirements": [f"package-{number}=={number}" for number in range(80)]}
    function_id = lab.function(environment=wide)
    status, code, message = lab.refused(*[function_id] * 1000)
    assert (status, code) == (413, "PAYLOAD_TOO_LARGE")
    assert message.startswith("The 1000 callees have ")
    assert message.endswith(" bytes with their environments; 524288 are allowed.")


def test_a_thousand_callees_have_about_a_hundred_kib(lab: GraphLab) -> None:
    callees = tuple(Callee(str(uuid.uuid4()), sha("f"), 1) for _ in range(1000))
    options = TaskOptions(callees=callees)
    assert len(msgspec.msgpack.encode(options)) < len(msgspec.json.encode(options)) < 120_000


def test_repeated_submit_of_a_graph_is_harmless(lab: GraphLab) -> None:
    ids = {lab.function_id: [str(uuid.uuid4())]}
    for _ in range(2):
        assert lab.submit(task_ids=ids, callees=[lab.callee_id]).body["tasks"] == ids
    assert lab.count() == 1


def test_audit_names_callees_some_at_most(lab: GraphLab) -> None:
    lab.graph()
    many = [lab.function() for _ in range(25)]
    assert lab.submit(callees=[*many, *many]).status == 200
    lab.submit()
    entries = lab.api.call("GET", "/v3/audit").body["entries"]
    details = [entry["detail"] for entry in entries if entry["action"] == "tasks.submit"]
    assert details[0]["callees"] == [f"{lab.callee_id}@1"]
    assert details[1]["callees"] == [f"{each}@1" for each in many[:20]]
    assert "callees" not in details[2]


def test_a_retry_calls_the_same_versions(lab: GraphLab) -> None:
    task = lab.graph()
    lab.api.call("PUT", f"/v3/functions/{lab.callee_id}", {"function_code": "4\n01\nh"})
    lab.end(task.task_id, TaskState.CANCELLED, error=None)
    answer = lab.api.call("POST", f"/v3/tasks/{task.task_id}/retry", {})
    assert answer.status == 200, answer.body
    retried = lab.database.get_tasks([answer.body["task_id"]])[answer.body["task_id"]]
    assert retried.options.callees == task.options.callees


def test_memoized_result_is_of_the_same_callees(lab: GraphLab) -> None:
    def run(*callees: str, **fields: Any) -> str | None:
        [task] = lab.submitted(memoize=True, callees=list(callees), **fields)
        if task.state is not TaskState.SUCCESS:
            lab.end(task.task_id, TaskState.SUCCESS, result=b"r")
            return None
        return str(task.details["memoized_from"])

    other = lab.function(function_code="4\n01\nh")
    assert [run(lab.callee_id), run(other), run(lab.callee_id, other), run(other, lab.callee_id), run()] == [None] * 5
    assert run(lab.callee_id) is not None
    assert run(lab.callee_id, environment=PACKAGES) is None
    same = lab.function(function_code="4\n01\ng")  # the same body
    assert run(same) is not None
    contained = lab.function(function_code="4\n01\ng", container="sci")
    assert run(contained) is None


def test_options_of_an_older_reader_lose_callees_only() -> None:
    """Why a graph is not sent to an agent that does not know it: it would call its function with the graph."""

    class Older(msgspec.Struct):
        idempotent: bool = True
        walltime_s: float | None = None

    options = TaskOptions(walltime_s=5.0, callees=(Callee("f", "h", 1, SCI),))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(options), type=Older) == Older(walltime_s=5.0)
    assert msgspec.json.decode(msgspec.json.encode(options), type=Older) == Older(walltime_s=5.0)
    assert msgspec.json.decode(b'{"callees": [["f", "h"]]}', type=TaskOptions).callees == (Callee("f", "h"),)


# -- withdrawn rights --------------------------------------------------------------------------------------------------


def cancelled(lab: GraphLab, task: Task) -> Any:
    body = lab.show(task.task_id).body
    return body["status"], (body.get("error") or {}).get("message")


def test_deleted_callee_of_someone_else_cancels_waiting_tasks(lab: GraphLab) -> None:
    bobs = lab.function(caller=BOB, public=True)
    [task] = lab.submitted(callees=[lab.callee_id, bobs])
    other = lab.graph()
    assert lab.api.call("DELETE", f"/v2/functions/{bobs}", caller=BOB).status == 200
    what = f"The right to run function {bobs} was withdrawn while the task was open."
    assert cancelled(lab, task) == ("cancelled", what)
    assert cancelled(lab, other)[0] == "received"


def test_callee_that_an_endpoint_does_not_run_any_more_cancels_waiting_tasks(lab: GraphLab) -> None:
    task, plain = lab.graph(), lab.submitted()[0]
    lab.api.call("PUT", f"/v3/endpoints/{lab.endpoint_id}", {"allowed_functions": [lab.function_id]})
    what = f"function {lab.callee_id}@1 on endpoint {lab.endpoint_id}"
    assert cancelled(lab, task) == ("cancelled", f"The right to run {what} was withdrawn while the task was open.")
    assert cancelled(lab, plain)[0] == "received"


def test_a_graph_is_cancelled_as_a_task(lab: GraphLab) -> None:
    task = lab.graph()
    assert lab.api.call("POST", f"/v3/tasks/{task.task_id}/cancel").body["outcome"] == "cancelled"
    sent = lab.graph()
    lab.lease(1)
    assert lab.api.call("POST", f"/v3/tasks/{sent.task_id}/cancel").body["outcome"] == "requested"


# -- stages ------------------------------------------------------------------------------------------------------------


def start(lab: GraphLab, **status: Any) -> Task:
    """A graph that runs, and what its endpoint reports."""
    task = lab.graph()
    lab.lease(1)
    for state in (TaskState.WAITING_FOR_NODES, RUNNING):
        lab.move(task.task_id, state)
    lab.seen(graphs=(GraphState(task.task_id, (LOAD, RESIZE, WRITE)),), **status)
    return task


def test_stages_of_a_running_graph_are_those_of_the_last_report(lab: GraphLab) -> None:
    task = start(lab)
    stages = lab.show(task.task_id).body["stages"]
    assert [(each["name"], each["state"], each["calls"], each["ended"]) for each in stages] == [
        ("load", "done", 1, 1),
        ("resize", "running", 40, 12),
        ("write", "waiting", 1, 0),
    ]
    assert stages[1] == {
        "number": 1,
        "name": "resize",
        "state": "running",
        "calls": 40,
        "ended": 12,
        "failed": 1,
        "retries": 0,
        "run_s": 30.0,
        "value_bytes": 0,
        "workers": [],
        "node": "n1",
        "started_at": 5.0,
    }
    [entry] = lab.api.call("POST", "/v2/batch_status", {"task_ids": [task.task_id]}).body["results"].values()
    assert "stages" not in entry


def test_stages_are_for_those_who_may_see_the_task(lab: GraphLab) -> None:
    """A user of the same endpoint sees neither the task nor, in the endpoint's status, what it does."""
    task = start(lab)
    lab.api.call("PUT", f"/v3/endpoints/{lab.endpoint_id}", {"public": True})
    assert lab.show(task.task_id, caller=BOB).status == 404
    for caller in (ALICE, BOB):
        shown = lab.api.call("GET", f"/v2/endpoints/{lab.endpoint_id}/status", caller=caller)
        assert shown.status == 200
        assert "resize" not in json.dumps(shown.body)
        assert task.task_id not in json.dumps(shown.body)
    body = {"tasks": {lab.function(caller=BOB): ["p"]}}
    [[bobs]] = lab.api.call("POST", f"/v3/endpoints/{lab.endpoint_id}/submit", body, caller=BOB).body["tasks"].values()
    for path in (f"/v2/tasks/{bobs}", f"/v3/tasks/{bobs}/why"):
        assert "resize" not in json.dumps(lab.api.call("GET", path, caller=BOB).body)


def test_stages_of_a_finished_graph_are_those_of_its_result(lab: GraphLab) -> None:
    task = start(lab)
    error = {"code": "TASK_FAILED", "message": "boom"}
    ended = [LOAD, StageState(1, "resize", "failed", calls=40, ended=40, failed=1, workers=(7,), error=error)]
    details = {"stages": msgspec.to_builtins(ended), "stage_calls": 41, "stage_run_s": 31.5}
    lab.end(task.task_id, TaskState.SUCCESS, result=b"r", details=json.loads(json.dumps(details)))
    body = lab.show(task.task_id).body
    assert [(each["state"], each["ended"], each["workers"]) for each in body["stages"]] == [
        ("done", 1, []),
        ("failed", 40, [7]),
    ]
    assert body["stages"][1]["error"] == error
    assert body["details"]["stage_calls"] == 41
    last = lab.api.call("GET", f"/v3/tasks/{task.task_id}/events").body["events"][-1]
    assert (last["state"], last["detail"]) == ("success", {"stage_calls": 41})
    usage = lab.api.call("GET", "/v3/usage").body["usage"]
    assert [(each["tasks"], each["stages"]) for each in usage] == [(1, 41)]


@pytest.mark.parametrize(
    "stages", [5, [{}], [{"number": "x"}], [{"number": 0, "name": "f", "state": "done", "calls": "1"}]]
)
def test_unreadable_stages_hide_nothing_else(lab: GraphLab, stages: Any) -> None:
    task = lab.graph()
    lab.end(task.task_id, TaskState.SUCCESS, result=b"r", details={"stages": stages})
    body = lab.show(task.task_id).body
    assert (body["status"], body["result"]) == ("success", "r")
    assert "stages" not in body


def test_answers_have_room_for_stages(lab: GraphLab) -> None:
    """Of many large graphs, an answer has those that fit."""
    large = [StageState(number, "x" * 90, "done", node="n" * 90, run_s=1.5) for number in range(1000)]
    details = {"stages": msgspec.to_builtins(large)}
    tasks = lab.submitted({lab.function_id: [PAYLOAD] * 40}, callees=[lab.callee_id])
    for task in tasks:
        lab.end(task.task_id, TaskState.SUCCESS, result=b"r", details=details)
    ids = [task.task_id for task in tasks]
    answer = lab.api.call("POST", "/v2/batch_status", {"task_ids": ids})
    assert 0 < len(answer.body["results"]) < 40
    assert len(json.dumps(answer.body)) < 6_000_000


def test_why_of_a_running_graph(lab: GraphLab) -> None:
    task = start(lab, total_workers=4)
    answer = lab.why(task.task_id)
    assert answer["reason"] == "RUNNING"
    assert answer["text"].endswith(" (attempt 1); stage resize: 12 of 40 calls have ended.")
    more = [RESIZE, *(StageState(number, "", "running") for number in (2, 3))]
    for stages, text in (
        (more, "; stage resize: 12 of 40 calls have ended, and 2 more stages run."),
        (more[1:], "; stage 2 runs, and 1 more stage runs."),
        ([LOAD, WRITE], " (attempt 1)."),
    ):
        lab.seen(graphs=(GraphState(task.task_id, tuple(stages)),))
        assert lab.why(task.task_id)["text"].endswith(text)
    lab.seen(graphs=(GraphState(task.task_id, (), 40, 12),))
    assert lab.why(task.task_id)["text"].endswith(" (attempt 1); 12 of 40 calls of its stages have ended.")
    lab.seen(graphs=(GraphState(str(uuid.uuid4()), (RESIZE,)),))
    assert lab.why(task.task_id)["text"].endswith(" (attempt 1).")


def test_run_time_of_calls_counts_against_an_allowance(lab: GraphLab) -> None:
    allowance = {"core_hours_per_month": 2.0}
    lab.api.share(f"endpoints/{lab.endpoint_id}", BOB, allowance=allowance)
    function_id = lab.function(caller=BOB)

    def submit() -> Answer:
        body = {"tasks": {function_id: ["p"]}, "callees": [function_id]}
        return lab.api.call("POST", f"/v3/endpoints/{lab.endpoint_id}/submit", body, caller=BOB)

    [[task_id]] = submit().body["tasks"].values()
    at = lab.api.clock.now
    lab.api.clock.now += 600
    ended = TaskResult(
        task_id,
        lab.endpoint_id,
        1,
        TaskState.SUCCESS,
        Reporter.AGENT,
        result=b"r",
        timings={"started_at": at, "ended_at": at + 600},
        details={"stage_calls": 100, "stage_run_s": 7200.0},
    )
    lab.database.record_results([ended], at=lab.at())
    answer = submit()
    assert (answer.status, answer.body["code"]) == (403, "ALLOWANCE_EXCEEDED")
    assert answer.body["message"].startswith("You have used 2.0 core-hours on this endpoint this month")


def test_the_payload_of_a_graph_is_never_opened(lab: GraphLab) -> None:
    for payload in ("gr\n", "gr\nnot Base64", "gr\n" + "A" * 100):
        [task] = lab.submitted({lab.function_id: [payload]}, callees=[lab.callee_id])
        assert task.payload == payload.encode()
