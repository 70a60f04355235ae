"""Remembered results: which calls are answered from memory, and which are not."""

from __future__ import annotations

import datetime as dt
import hashlib
from typing import Any

import pytest

from farcall_common.errors import ErrorRecord, Fault
from farcall_common.store.model import BlobRef, TaskResult
from farcall_common.wire.ids import new_task_id
from farcall_common.wire.states import Reporter, TaskState
from farcall_lambdas.settings import ApiSettings
from tests.support.memory_api import BOB
from tests.unit.test_lambdas_submit import PAYLOAD, Lab


class MemoLab(Lab):
    """A lab whose tasks can be ended."""

    def run(self, *, caller: Any = None, **fields: Any) -> tuple[str, Any]:
        """Submit one task: its id, and what the answer says that it came to."""
        answer = self.submit(memoize=True, **fields) if caller is None else self.submit(memoize=True, caller=caller)
        assert answer.status == 200, answer.body
        [[task_id]] = answer.body["tasks"].values()
        return task_id, answer.body.get("results", {}).get(task_id)

    def end(self, task_id: str, *, state: TaskState = TaskState.SUCCESS, **fields: Any) -> None:
        given = {"result": b"answer"} | fields
        ended = TaskResult(task_id, self.endpoint_id, 1, state, Reporter.AGENT, **given)
        assert self.records.tasks.record_results([ended], at=dt.datetime.fromtimestamp(self.api.clock.now, dt.UTC))


@pytest.fixture
def lab() -> MemoLab:
    return MemoLab()


def test_a_repeated_call_ends_at_once_and_is_never_queued(lab: MemoLab) -> None:
    first, nothing = lab.run()
    assert nothing is None
    lab.end(first, details={"python_version": "3.12"})

    second, result = lab.run()

    assert (result["status"], result["result"], result["attempt"]) == ("success", "answer", 0)
    assert result["details"] == {
        "python_version": "3.12",
        "memoized_from": first,
        "memoized_endpoint_id": lab.endpoint_id,
        "task_transitions": {},
    }
    assert float(result["completion_t"]) == lab.api.clock.now
    assert lab.queue.depth([lab.endpoint_id]) == 1
    assert lab.api.call("GET", f"/v2/tasks/{second}").body["result"] == "answer"
    events = lab.api.call("GET", f"/v3/tasks/{second}/events").body["events"]
    assert [(event["state"], event["reporter"]) for event in events] == [("received", "api"), ("success", "api")]


def test_memo_key_is_function_and_payload_bytes(lab: MemoLab) -> None:
    lab.end(lab.run()[0])
    same_code, other_code = lab.function(function_name="renamed"), lab.function(function_code="4\n01\ng")

    assert lab.run(tasks={same_code: [PAYLOAD]})[1]["result"] == "answer"
    assert lab.run(tasks={other_code: [PAYLOAD]})[1] is None
    assert lab.run(tasks={lab.function_id: [PAYLOAD + " "]})[1] is None
    assert lab.run(result_serializers=["JSONData"])[1] is None
    assert lab.run(task_group_id=new_task_id(), walltime_s=5, idempotent=False)[1]["result"] == "answer"


def test_a_payload_in_the_blob_store_is_the_same_payload(lab: MemoLab) -> None:
    lab.end(lab.run()[0])
    sha256 = hashlib.sha256(PAYLOAD.encode()).hexdigest()
    grant = lab.api.call("POST", "/v3/blobs", {"size_bytes": len(PAYLOAD), "sha256": sha256}).body
    lab.api.stores.blobs.write(grant["blob_key"], PAYLOAD.encode())

    reference = {"blob_key": grant["blob_key"], "size_bytes": len(PAYLOAD), "sha256": sha256}

    assert lab.run(tasks={lab.function_id: [reference]})[1]["result"] == "answer"


def test_memoization_is_opt_in(lab: MemoLab) -> None:
    plain = lab.submit().body["tasks"][lab.function_id][0]
    lab.end(plain)
    assert lab.run()[1] is None  # a task that did not ask to be remembered is not
    lab.end(lab.run()[0])
    assert "results" not in lab.submit().body
    assert "results" not in lab.submit(memoize=False).body


def test_function_can_memoize_all_its_calls(lab: MemoLab) -> None:
    function_id = lab.function(memoize=True, meta={"project": "x"})
    tasks = {function_id: [PAYLOAD]}
    [task_id] = lab.submit(tasks).body["tasks"][function_id]
    lab.end(task_id)
    assert lab.submit(tasks).body["results"]
    assert "results" not in lab.submit(tasks, memoize=False).body
    shown = lab.api.call("GET", f"/v2/functions/{function_id}").body
    assert shown["metadata"] == {"project": "x", "memoize": True}


@pytest.mark.parametrize("state", [TaskState.FAILED, TaskState.LOST, TaskState.CANCELLED])
def test_only_successes_are_memoized(lab: MemoLab, state: TaskState) -> None:
    error = ErrorRecord("NO", "no", fault=Fault.USER_CODE)
    lab.end(lab.run()[0], state=state, result=None, error=error)
    assert lab.run()[1] is None


def test_results_of_other_users_are_not_reused(lab: MemoLab) -> None:
    lab = MemoLab(public=True)
    lab.function_id = lab.function(public=True)
    lab.end(lab.run()[0])
    assert lab.run(caller=BOB)[1] is None
    assert lab.run()[1]["result"] == "answer"


def test_results_of_other_endpoints_are_not_reused(lab: MemoLab) -> None:
    own = lab.endpoint_id
    others = lab.api.call("POST", "/v3/endpoints", {"endpoint_name": "open", "public": True}, caller=BOB)
    lab.endpoint_id = others.body["endpoint_id"]
    lab.end(lab.run()[0], result=b"a lie")

    lab.endpoint_id = own

    assert lab.run()[1] is None


def test_memoized_and_new_tasks_mix_in_a_batch(lab: MemoLab) -> None:
    lab.end(lab.run()[0])
    fresh = PAYLOAD.replace("xx", "zz")
    for _ in range(3):
        answer = lab.submit({lab.function_id: [PAYLOAD, fresh, PAYLOAD]}, memoize=True).body
        one, two, three = answer["tasks"][lab.function_id]
        assert answer["results"].keys() == {one, three}
        assert {each["result"] for each in answer["results"].values()} == {"answer"}
        assert lab.records.tasks.get_tasks([two])[two].state is TaskState.RECEIVED
    assert lab.queue.depth([lab.endpoint_id]) == 4  # the first one, and the fresh ones: not told apart until one ends


def test_repeated_submit_of_a_memoized_call_gives_the_same_answer(lab: MemoLab) -> None:
    lab.end(lab.run()[0])
    task_ids = {lab.function_id: [new_task_id()]}
    answers = [lab.submit(task_ids=task_ids, memoize=True).body for _ in range(2)]
    assert answers[0]["results"] == answers[1]["results"]
    assert answers[0]["tasks"] == answers[1]["tasks"] == task_ids


def test_memoized_blob_is_referenced_while_it_exists(lab: MemoLab) -> None:
    ref = lab.api.stores.blobs.write("alice/big", b"x" * 100)
    lab.end(lab.run()[0], result=None, result_ref=ref)
    assert lab.run()[1]["result"] == "x" * 100
    gone = BlobRef("alice/gone", 100, "0" * 64)
    lab.api.clock.now += 1
    again = lab.submit(memoize=False).body["tasks"][lab.function_id][0]
    lab.end(again, result=None, result_ref=gone)
    assert lab.run()[1] is not None
    other = PAYLOAD.replace("xx", "zz")
    lab.end(lab.run(tasks={lab.function_id: [other]})[0], result=None, result_ref=gone)
    assert lab.run(tasks={lab.function_id: [other]})[1] is None


def test_results_that_do_not_fit_the_answer_are_counted() -> None:
    lab = MemoLab(ApiSettings(max_response_bytes=11_000))
    lab.end(lab.run()[0], result=b"x" * 3000)
    answer = lab.submit({lab.function_id: [PAYLOAD] * 5}, memoize=True).body
    assert (len(answer["results"]), answer["results_left_out"]) == (2, 3)
    ids = answer["tasks"][lab.function_id]
    assert {lab.records.tasks.get_tasks([task_id])[task_id].state for task_id in ids} == {TaskState.SUCCESS}


def test_older_submit_format_is_memoized(lab: MemoLab) -> None:
    lab.end(lab.run()[0])
    body = {"tasks": [[lab.function_id, lab.endpoint_id, PAYLOAD]], "memoize": True}
    [result] = lab.api.call("POST", "/v2/submit", body).body["results"]
    assert lab.api.call("GET", f"/v2/tasks/{result['task_uuid']}").body["result"] == "answer"
