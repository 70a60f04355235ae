"""Reading tasks."""

from __future__ import annotations

import datetime as dt
import uuid
from typing import Any

import pytest

from farcall_common.errors import ErrorRecord, Fault
from farcall_common.store.model import BlobRef, TaskEvent, TaskResult
from farcall_common.wire.states import Reporter, TaskState
from farcall_lambdas.settings import ApiSettings
from tests.support.memory_api import ALICE, BOB, MemoryApi
from tests.support.stores import FakeBlobs

TAKES_REFS = {"X-Farcall-Accept": "blob-ref"}
GLOBUS = {"X-Globus-Client-Info": "product=python-sdk,version=4.9.1"}


class Lab:
    """An API with tasks."""

    def __init__(self, settings: ApiSettings | None = None) -> None:
        self.api = MemoryApi(settings=settings)
        self.function_id = self.api.function()
        self.endpoint_id = self.api.endpoint()
        self.group_id = str(uuid.uuid4())

    def submit(self, count: int = 1) -> list[str]:
        body = {"tasks": {self.function_id: ["p"] * count}, "task_group_id": self.group_id}
        answer = self.api.call("POST", f"/v3/endpoints/{self.endpoint_id}/submit", body)
        return list(answer.body["tasks"][self.function_id])

    def end(self, task_id: str, state: TaskState = TaskState.SUCCESS, **fields: Any) -> None:
        reporter = Reporter.AGENT if state is not TaskState.LOST else Reporter.FORWARDER
        result = TaskResult(task_id, self.endpoint_id, 1, state, reporter, **fields)
        first = self.api.stores.tasks.record_results([result], at=dt.datetime.fromtimestamp(self.api.clock.now, dt.UTC))
        assert task_id in first

    def end_with_blob(self, task_id: str, size: int = 100, *, head: bytes = b"") -> BlobRef:
        data = head + b"r" * size
        ref = self.api.stores.blobs.write(f"{ALICE.identity_id}/{task_id}", data)
        self.end(task_id, result_ref=ref)
        return ref

    def get(self, task_id: str, **options: Any) -> Any:
        answer = self.api.call("GET", f"/v2/tasks/{task_id}", **options)
        assert answer.status == 200, answer.body
        return answer.body


@pytest.fixture
def lab() -> Lab:
    return Lab()


def test_a_pending_task_has_neither_result_nor_exception(lab: Lab) -> None:
    [task_id] = lab.submit()

    task = lab.get(task_id)

    assert task["status"] == "received"
    assert not {"result", "exception", "completion_t", "result_ref", "reason", "error"} & task.keys()
    assert (task["task_group_id"], task["endpoint_id"], task["attempt"]) == (lab.group_id, lab.endpoint_id, 0)


def test_result_can_be_read_repeatedly(lab: Lab) -> None:
    [task_id] = lab.submit()
    details = {"python_version": "3.12.1", "dill_version": "0.3.9"}
    timings = {"started_at": 1.5, "ended_at": 2.5}
    lab.end(task_id, result="00\né".encode(), details=details, timings=timings)

    first, again = lab.get(task_id), lab.get(task_id)

    assert first == again
    assert (first["status"], first["result"]) == ("success", "00\né")
    assert first["completion_t"] == str(lab.api.clock.now)
    assert first["details"] == {**details, "task_transitions": {"execution-start": 1.5, "execution-end": 2.5}}
    assert first["timings"]["started_at"] == 1.5


def test_oversized_result_names_the_globus_compute_exception(lab: Lab) -> None:
    [task_id] = lab.submit()
    lab.end(task_id, TaskState.FAILED, error=ErrorRecord("RESULT_TOO_LARGE", "The result has 9 bytes.", "Write it."))

    task = lab.get(task_id)

    assert task["exception"] == "MaxResultSizeExceeded: The result has 9 bytes."
    assert task["error"]["message"] == "The result has 9 bytes."


def test_a_failed_task_shows_the_remote_traceback_and_the_error(lab: Lab) -> None:
    [task_id] = lab.submit()
    error = ErrorRecord(
        "TASK_FAILED", "ValueError: no", fault=Fault.USER_CODE, exception_type="ValueError", traceback="Traceback: no"
    )
    lab.end(task_id, TaskState.FAILED, error=error)

    task = lab.get(task_id)

    assert (task["status"], task["exception"]) == ("failed", "Traceback: no")
    assert task["error"] == error.to_json()
    assert "result" not in task


@pytest.mark.parametrize("state", [TaskState.LOST, TaskState.CANCELLED])
def test_globus_client_sees_other_terminal_states_as_failed(lab: Lab, state: TaskState) -> None:
    [task_id] = lab.submit()
    lab.end(task_id, state, error=ErrorRecord(f"TASK_{state.upper()}", "It is gone."))

    ours, theirs = lab.get(task_id), lab.get(task_id, headers=GLOBUS)

    assert (ours["status"], theirs["status"]) == (state.value, "failed")
    assert ours["exception"] == theirs["exception"] == "It is gone."
    assert theirs["error"]["code"] == f"TASK_{state.upper()}"


class TestBlobs:
    def test_a_client_that_takes_references_gets_one(self, lab: Lab) -> None:
        [task_id] = lab.submit()
        ref = lab.end_with_blob(task_id)

        task = lab.get(task_id, headers=TAKES_REFS)

        assert task["result_ref"]["url"]
        assert {key: task["result_ref"][key] for key in ("blob_key", "size_bytes", "sha256")} == {
            "blob_key": ref.blob_key,
            "size_bytes": ref.size_bytes,
            "sha256": ref.sha256,
        }
        assert not {"result", "reason"} & task.keys()

    def test_any_other_client_gets_the_result_itself(self, lab: Lab) -> None:
        [task_id] = lab.submit()
        lab.end_with_blob(task_id)

        task = lab.get(task_id)

        assert task["result"] == "r" * 100
        assert "result_ref" not in task

    def test_results_that_do_not_fit_are_counted_and_can_be_fetched(self) -> None:
        lab = Lab(ApiSettings(max_response_bytes=50))
        [task_id] = lab.submit()
        lab.end_with_blob(task_id)

        task = lab.get(task_id)

        assert task["status"] == "success"
        assert "100 bytes" in task["reason"]
        assert task["result_ref"]["url"]

    def test_fields_for_our_sdk_are_shown_to_it_only(self, lab: Lab) -> None:
        large, small = lab.submit(2)
        lab.end_with_blob(large, head=b"f3\n{}\n\x80")
        lab.end(small, result=b"f0\ngAVLAS4=")

        for task_id in (large, small):
            task, to_globus = lab.get(task_id), lab.get(task_id, headers=GLOBUS)
            assert "result_serializers" in task["reason"]
            assert not {"result", "exception"} & task.keys()
            assert to_globus["exception"] == task["reason"]
            assert "reason" not in lab.get(task_id, headers=TAKES_REFS)
        assert lab.get(large)["result_ref"]["url"]
        assert lab.get(small, headers=TAKES_REFS)["result"] == "f0\ngAVLAS4="

    def test_missing_blob_does_not_affect_other_tasks(self, lab: Lab) -> None:
        gone, fine = lab.submit(2)
        lab.end(gone, result_ref=BlobRef(f"{ALICE.identity_id}/gone", 10, "0" * 64))
        lab.end(fine, result=b"00\nr")

        results = lab.api.call("POST", "/v2/batch_status", {"task_ids": [gone, fine]}).body["results"]

        assert "expired" in results[gone]["reason"]
        assert results[fine]["result"] == "00\nr"

    def test_read_can_be_retried_while_the_blob_store_is_unavailable(self, lab: Lab) -> None:
        [task_id] = lab.submit()
        lab.end_with_blob(task_id)
        assert isinstance(lab.api.stores.blobs, FakeBlobs)
        lab.api.stores.blobs.reachable = False

        answer = lab.api.call("GET", f"/v2/tasks/{task_id}")

        assert (answer.status, answer.body["retryable"]) == (503, True)


class TestBatches:
    def test_own_tasks_are_read_in_a_batch_and_others_are_unknown(self, lab: Lab) -> None:
        done, pending = lab.submit(2)
        lab.end(done, result=b"00\nr")
        unknown = str(uuid.uuid4())

        body = lab.api.call("POST", "/v2/batch_status", {"task_ids": [done, pending, unknown]}).body

        assert body["response"] == "batch"
        assert body["results"][done]["result"] == "00\nr"
        assert body["results"][pending]["status"] == "received"
        assert (body["results"].keys(), body["unknown"]) == ({done, pending}, [unknown])

    def test_globus_client_gets_an_unknown_task_as_a_failed_one(self, lab: Lab) -> None:
        unknown = str(uuid.uuid4())

        body = lab.api.call("POST", "/v2/batch_status", {"task_ids": [unknown]}, headers=GLOBUS).body

        assert body["results"][unknown]["error"]["code"] == "TASK_UNKNOWN"
        assert (body["results"][unknown]["task_id"], body["results"][unknown]["status"]) == (unknown, "failed")
        assert "exception" not in body["results"][unknown]
        assert "unknown" not in body

    def test_thousands_of_unknown_tasks_are_not_spelled_out(self, lab: Lab) -> None:
        ids = [str(uuid.uuid4()) for _ in range(10_000)]

        answer = lab.api.call("POST", "/v2/batch_status", {"task_ids": ids})

        assert answer.body == {"response": "batch", "results": {}, "unknown": ids}

    def test_results_that_do_not_fit_come_with_the_next_request(self) -> None:
        lab = Lab(ApiSettings(max_response_bytes=10_000))
        waiting = lab.submit(3)
        for task_id in waiting:
            lab.end_with_blob(task_id, size=6_000)

        rounds = 0
        while waiting:
            results = lab.api.call("POST", "/v2/batch_status", {"task_ids": waiting}).body["results"]
            assert [task["result"] for task in results.values()] == ["r" * 6_000]
            waiting = [task_id for task_id in waiting if task_id not in results]
            rounds += 1

        assert rounds == 3

    def test_inline_results_are_bounded_as_well(self) -> None:
        lab = Lab(ApiSettings(max_response_bytes=10_000))
        task_ids = lab.submit(3)
        for task_id in task_ids:
            lab.end(task_id, result=b'"' * 3_000)  # each takes two bytes as JSON

        results = lab.api.call("POST", "/v2/batch_status", {"task_ids": task_ids}, headers=TAKES_REFS).body["results"]

        assert list(results) == task_ids[:1]

    def test_too_many_or_no_tasks_are_refused(self) -> None:
        lab = Lab(ApiSettings(max_tasks_per_request=2))

        statuses = [
            lab.api.call("POST", "/v2/batch_status", {"task_ids": [str(uuid.uuid4())] * n}).status for n in (0, 2, 3)
        ]

        assert statuses == [422, 200, 400]


class TestOthers:
    def test_task_of_another_user_is_not_found(self, lab: Lab) -> None:
        [task_id] = lab.submit()
        lab.end(task_id, result=b"00\nsecret")

        answers = [
            lab.api.call("GET", f"/v2/tasks/{task_id}", caller=BOB),
            lab.api.call("GET", f"/v3/tasks/{task_id}/events", caller=BOB),
            lab.api.call("POST", f"/v3/tasks/{task_id}/cancel", caller=BOB),
            lab.api.call("GET", f"/v2/tasks/{uuid.uuid4()}"),
        ]
        batch = lab.api.call("POST", "/v2/batch_status", {"task_ids": [task_id]}, caller=BOB)

        assert {(answer.status, answer.body["code"]) for answer in answers} == {(404, "TASK_UNKNOWN")}
        assert (batch.body["results"], batch.body["unknown"]) == ({}, [task_id])
        assert lab.api.call("GET", "/v3/tasks", caller=BOB).body == {"tasks": []}
        assert lab.api.call("GET", f"/v2/taskgroup/{lab.group_id}", caller=BOB).body["code"] == "TASK_GROUP_UNKNOWN"

    def test_linked_identity_owns_tasks_too(self, lab: Lab) -> None:
        [task_id] = lab.submit()
        linked = type(BOB)(BOB.identity_id, BOB.username, frozenset({ALICE.identity_id}))

        assert lab.get(task_id, caller=linked)["task_id"] == task_id


def test_a_group_lists_its_tasks_in_order(lab: Lab) -> None:
    task_ids = lab.submit(3)

    group = lab.api.call("GET", f"/v2/taskgroup/{lab.group_id}").body

    assert [each["id"] for each in group["tasks"]] == task_ids
    assert group["tasks"][0]["created_at"] == "2023-11-14T22:13:20.000000"


def test_own_tasks_are_listed_newest_first_by_state(lab: Lab) -> None:
    first, second = lab.submit(2)
    lab.end(first, TaskState.FAILED, error=ErrorRecord("TASK_FAILED", "no"))

    tasks = lab.api.call("GET", "/v3/tasks").body["tasks"]
    failed = lab.api.call("GET", "/v3/tasks?state=failed").body["tasks"]

    assert [each["task_id"] for each in tasks] == [second, first]
    assert [(each["task_id"], each["error"]["code"]) for each in failed] == [(first, "TASK_FAILED")]
    assert len(lab.api.call("GET", "/v3/tasks?limit=1").body["tasks"]) == 1
    assert lab.api.call("GET", "/v3/tasks?state=asleep").status == 422


def test_a_task_has_a_history(lab: Lab) -> None:
    [task_id] = lab.submit()
    at = dt.datetime.fromtimestamp(5.0, dt.UTC)
    move = TaskEvent(task_id, TaskState.RUNNING, Reporter.AGENT, at, attempt=1, detail={"manager": "m1"})
    lab.api.stores.tasks.record_transitions([move])

    body = lab.api.call("GET", f"/v3/tasks/{task_id}/events").body

    assert [(each["state"], each["reporter"]) for each in body["events"]] == [("received", "api"), ("running", "agent")]
    assert body["events"][1] == {
        "state": "running", "reporter": "agent", "at": 5.0, "attempt": 1, "detail": {"manager": "m1"}
    }  # fmt: skip


@pytest.mark.parametrize("transitions", ["x", 5, ["a"], [["a", 1]], None, {"execution-start": "soon"}])
def test_a_malformed_report_of_an_endpoint_does_not_break_answers(lab: Lab, transitions: object) -> None:
    broken, other = lab.submit(2)
    lab.end(broken, result=b"r", details={"task_transitions": transitions}, timings={"ended_at": 2.0})
    lab.end(other, result=b"r")

    for caller_headers in ({}, GLOBUS):
        assert lab.get(broken, headers=caller_headers)["result"] == "r"
        answer = lab.api.call("POST", "/v2/batch_status", {"task_ids": [broken, other]}, headers=caller_headers)
        assert answer.status == 200
        assert {task["result"] for task in answer.body["results"].values()} == {"r"}


def test_a_task_that_cannot_be_shown_is_an_error_of_its_own(lab: Lab) -> None:
    broken, other = lab.submit(2)
    lab.end(broken, TaskState.FAILED, error=ErrorRecord("X", "m", traceback=5))  # type: ignore[arg-type]
    lab.end(other, result=b"r")

    answer = lab.api.call("POST", "/v2/batch_status", {"task_ids": [broken, other]})

    assert answer.status == 200
    assert answer.body["results"][other]["result"] == "r"
    shown = answer.body["results"][broken]
    assert (shown["status"], shown["error"]["code"]) == ("failed", "RESULT_MALFORMED")
    assert lab.get(broken) == shown


def test_a_long_history_is_read_in_pages() -> None:
    lab = Lab(ApiSettings(max_response_bytes=3000))
    [task_id] = lab.submit()
    at = dt.datetime.fromtimestamp(5.0, dt.UTC)
    moves = [TaskEvent(task_id, TaskState.RUNNING, Reporter.AGENT, at, attempt=number) for number in range(1, 9)]
    lab.api.stores.tasks.record_transitions(moves)
    path = f"/v3/tasks/{task_id}/events"

    first = lab.api.call("GET", f"{path}?limit=3").body
    second = lab.api.call("GET", f"{path}?after={first['next']}").body  # as many as fit an answer
    third = lab.api.call("GET", f"{path}?after={second['next']}").body

    pages = [[event["attempt"] for event in page["events"]] for page in (first, second, third)]
    assert pages == [[0, 1, 2], [3, 4, 5, 6, 7], [8]]
    assert "next" not in third
    for query in ("limit=0", "limit=1001", "after=-1", "after=x"):
        assert lab.api.call("GET", f"{path}?{query}").status == 422
