"""After the end of a task: dead letters, trying again, discarding."""

from __future__ import annotations

import datetime as dt
from typing import Any

import pytest

from farcall_common.errors import ErrorRecord
from farcall_common.store.model import BlobRef, TaskResult
from farcall_common.task_options import TaskOptions
from farcall_common.wire.ids import new_task_id
from farcall_common.wire.states import Reporter, TaskState
from farcall_lambdas.identity import Identity
from farcall_lambdas.settings import ApiSettings
from tests.support.memory_api import ALICE, BOB, MemoryApi
from tests.support.stores import FakeBlobs

GLOBUS = {"X-Globus-Client-Info": "product=python-sdk,version=4.9.1"}


class Lab:
    """An API with an endpoint of Alice's that everybody may use, and a function for everybody."""

    def __init__(self, settings: ApiSettings | None = None) -> None:
        self.api = MemoryApi(settings=settings)
        self.records = self.api.stores
        self.function_id = self.api.function(public=True, memoize=True)
        self.endpoint_id = self.api.endpoint(public=True)

    def submit(self, count: int = 1, *, caller: Identity = ALICE, **options: Any) -> list[str]:
        body = {"tasks": {self.function_id: ["p"] * count}, "memoize": False, **options}
        answer = self.api.call("POST", f"/v3/endpoints/{self.endpoint_id}/submit", body, caller=caller)
        assert answer.status == 200, answer.body
        return list(answer.body["tasks"][self.function_id])

    def end(self, task_id: str, state: TaskState, error: ErrorRecord | None = None) -> None:
        result = b"r" if state is TaskState.SUCCESS else None
        reporter = Reporter.AGENT if state is TaskState.SUCCESS else Reporter.FORWARDER
        end = TaskResult(task_id, self.endpoint_id, 1, state, reporter, result=result, error=error)
        at = dt.datetime.fromtimestamp(self.api.clock.now, dt.UTC)
        assert task_id in self.records.tasks.record_results([end], at=at)

    def kill(self, task_id: str) -> None:
        error = ErrorRecord(
            "TASK_DEAD_LETTERED",
            "signal 9: secret",
            hint="secret",
            exception_type="secret",
            builtin_type="secret",
            traceback="secret",
            stdout_tail="secret",
            reasons=("9", "secret"),
        )
        self.end(task_id, TaskState.DEAD_LETTERED, error)

    def letters(self, *, caller: Identity = ALICE, query: str = "") -> list[dict[str, Any]]:
        answer = self.api.call("GET", f"/v3/tasks?state=dead-lettered{query}", caller=caller)
        assert answer.status == 200, answer.body
        return list(answer.body["tasks"])

    def retry(self, task_id: str, *, new_id: str | None = None, caller: Identity = ALICE) -> Any:
        body = {"task_id": new_id} if new_id else {}
        return self.api.call("POST", f"/v3/tasks/{task_id}/retry", body, caller=caller)

    def discard(self, task_id: str, *, caller: Identity = ALICE) -> Any:
        return self.api.call("POST", f"/v3/tasks/{task_id}/discard", caller=caller)


@pytest.fixture
def lab() -> Lab:
    return Lab()


def test_dead_letter_lists_the_outcome_of_each_attempt(lab: Lab) -> None:
    [task_id] = lab.submit()
    lab.kill(task_id)

    ours = lab.api.call("GET", f"/v2/tasks/{task_id}").body
    theirs = lab.api.call("GET", f"/v2/tasks/{task_id}", headers=GLOBUS).body

    assert (ours["status"], theirs["status"]) == ("dead-lettered", "failed")
    assert ours["error"]["reasons"] == ["9", "secret"]
    assert [letter["task_id"] for letter in lab.letters()] == [task_id]


def test_a_sealed_call_is_not_retried(lab: Lab) -> None:
    [inline] = lab.submit(tasks={lab.function_id: ["fs\nAAAA"]})
    lab.end(inline, TaskState.SUCCESS)
    [by_error] = lab.submit()
    lab.end(by_error, TaskState.FAILED, ErrorRecord("TASK_FAILED", "sealed", sealed="fs\nAAAA"))
    for task_id in (inline, by_error):
        answer = lab.retry(task_id)
        assert (answer.status, answer.body["code"], answer.body["hint"]) == (409, "CONFLICT", "Submit the call again.")


def test_endpoint_owner_sees_all_dead_letters_of_it(lab: Lab) -> None:
    [mine], [bobs] = lab.submit(), lab.submit(caller=BOB)
    lab.kill(mine)
    lab.kill(bobs)

    seen = {letter["task_id"]: letter for letter in lab.letters(query=f"&endpoint_id={lab.endpoint_id}")}

    assert seen.keys() == {mine, bobs}
    assert (seen[bobs]["owner_id"], "owner_id" in seen[mine]) == (BOB.identity_id, False)
    assert seen[bobs]["error"]["code"] == "TASK_DEAD_LETTERED"
    assert "secret" not in str(seen[bobs])
    assert [each["task_id"] for each in lab.letters(caller=BOB, query=f"&endpoint_id={lab.endpoint_id}")] == [bobs]
    assert [each["task_id"] for each in lab.letters()] == [mine]
    everything = lab.api.call("GET", f"/v3/tasks?endpoint_id={lab.endpoint_id}").body["tasks"]
    assert [each["task_id"] for each in everything] == [mine]


def test_retry_is_a_new_task_with_the_same_options(lab: Lab) -> None:
    options: dict[str, Any] = {"max_attempts": 7, "walltime_s": 5.0, "resource_specification": {"cores": 2}}
    [task_id] = lab.submit(idempotent=True, result_serializers=["00"], memory_bytes=5, **options)
    lab.kill(task_id)

    answer = lab.retry(task_id)

    assert answer.status == 200
    new_id = answer.body["task_id"]
    assert answer.body["retry_of"] == task_id != new_id
    found = lab.records.tasks.get_tasks([task_id, new_id])
    old, new = found[task_id], found[new_id]
    for name in ("payload", "endpoint_id", "function_hash", "task_group_id"):
        assert getattr(new, name) == getattr(old, name)
    assert old.options == TaskOptions(result_serializers=("00",), memory_bytes=5, memoize=False, **options)
    assert new.options == old.options
    assert (new.state, new.retry_of) == (TaskState.RECEIVED, task_id)
    assert lab.api.call("GET", f"/v2/tasks/{new_id}").body["retry_of"] == task_id
    assert lab.api.stores.queue.depth([lab.endpoint_id]) == 2
    assert [letter["task_id"] for letter in lab.letters()] == [task_id]


def test_retry_runs_the_same_function_version(lab: Lab) -> None:
    [task_id] = lab.submit()
    lab.kill(task_id)
    code = {"function_code": "4\n01\ng"}
    assert lab.api.call("PUT", f"/v3/functions/{lab.function_id}", code).body["version"] == 2

    new_id = lab.retry(task_id).body["task_id"]

    assert lab.records.tasks.get_tasks([new_id])[new_id].function_version == 1


def test_repeated_retry_request_creates_one_task(lab: Lab) -> None:
    [task_id] = lab.submit()
    lab.kill(task_id)
    new_id = new_task_id()

    answers = [lab.retry(task_id, new_id=new_id) for _ in range(3)]

    assert [(answer.status, answer.body["task_id"]) for answer in answers] == [(200, new_id)] * 3
    assert lab.api.stores.queue.depth([lab.endpoint_id]) == 2
    assert lab.retry(task_id, new_id=task_id).body["code"] == "INVALID_REQUEST"


def test_retry_of_a_success_is_not_memoized(lab: Lab) -> None:
    [task_id] = lab.submit(memoize=True)
    lab.end(task_id, TaskState.SUCCESS)

    new_id = lab.retry(task_id).body["task_id"]

    assert lab.records.tasks.get_tasks([new_id])[new_id].state is TaskState.RECEIVED


def test_open_task_cannot_be_retried(lab: Lab) -> None:
    [task_id] = lab.submit()

    answer = lab.retry(task_id)

    assert (answer.status, answer.body["code"]) == (409, "CONFLICT")


def test_a_retry_is_bounded_like_a_submit() -> None:
    lab = Lab(ApiSettings(max_queue_depth=1))
    [task_id] = lab.submit()
    lab.kill(task_id)
    assert lab.retry(task_id).body["code"] == "QUEUE_FULL"


def test_a_retry_has_the_rights_of_a_submit(lab: Lab) -> None:
    [task_id] = lab.submit(caller=BOB)
    lab.kill(task_id)
    lab.api.call("PUT", f"/v3/endpoints/{lab.endpoint_id}", {"public": False})
    assert lab.retry(task_id, caller=BOB).status == 403
    assert lab.retry(task_id, caller=ALICE).status == 404


def test_retry_of_a_deleted_function_is_refused(lab: Lab) -> None:
    [task_id] = lab.submit()
    lab.kill(task_id)
    lab.api.call("DELETE", f"/v2/functions/{lab.function_id}")
    assert lab.retry(task_id).body["code"] == "FUNCTION_UNKNOWN"


def test_large_arguments_stay_in_the_blob_store() -> None:
    lab = Lab(ApiSettings(max_inline_bytes=10))
    ids = lab.submit(tasks={lab.function_id: ["p" * 100]})
    lab.kill(ids[0])
    new_id = lab.retry(ids[0]).body["task_id"]
    assert isinstance(lab.records.tasks.get_tasks([new_id])[new_id].payload_ref, BlobRef)

    assert isinstance(lab.api.stores.blobs, FakeBlobs)
    lab.api.stores.blobs.expire()
    answer = lab.retry(ids[0])

    assert (answer.status, answer.body["message"]) == (409, f"The arguments of task {ids[0]} have been deleted.")


def test_discarded_dead_letter_is_deleted_with_its_arguments(lab: Lab) -> None:
    [task_id] = lab.submit()
    lab.kill(task_id)

    assert [lab.discard(task_id).status for _ in range(2)] == [200, 200]

    assert lab.letters() == []
    assert lab.records.tasks.get_tasks([task_id])[task_id].payload is None
    assert lab.api.call("GET", f"/v2/tasks/{task_id}").body["status"] == "dead-lettered"
    assert lab.retry(task_id).status == 409


def test_only_own_dead_letters_can_be_discarded(lab: Lab) -> None:
    [failed], [bobs] = lab.submit(), lab.submit(caller=BOB)
    lab.end(failed, TaskState.FAILED, ErrorRecord("TASK_FAILED", "no"))
    lab.kill(bobs)
    assert (lab.discard(failed).status, lab.discard(bobs).status) == (409, 404)
    assert len(lab.letters(caller=BOB)) == 1


def test_tasks_are_paged_to_any_size(lab: Lab) -> None:
    ids = []
    for _ in range(5):
        ids += lab.submit(3)
        lab.api.clock.now += 10.000001
    found: list[str] = []
    page = lab.api.call("GET", "/v3/tasks?limit=4").body
    while True:
        found += [task["task_id"] for task in page["tasks"]]
        if "next" not in page:
            break
        page = lab.api.call("GET", f"/v3/tasks?limit=4&before={page['next']}").body
    assert sorted(found) == sorted(ids)
    assert len(found) == len(set(found))
    since = lab.api.clock.now - 21
    recent = lab.api.call("GET", f"/v3/tasks?since={since}&until={lab.api.clock.now - 15}").body["tasks"]
    assert {task["task_id"] for task in recent} == set(ids[9:12])


@pytest.mark.parametrize("query", ["before=x", "before=1", "since=-1", "since=nan", "until=1e300", "endpoint_id=x"])
def test_invalid_page_is_refused(lab: Lab, query: str) -> None:
    assert lab.api.call("GET", f"/v3/tasks?{query}").status == 422


def test_distant_cursor_is_valid(lab: Lab) -> None:
    for path in ("tasks?before", "audit?after"):
        assert lab.api.call("GET", f"/v3/{path}={'9' * 17}:{'9' * 18}").status == 200
    assert lab.api.call("GET", "/v3/audit?after=1:ff").status == 422


def test_submit_logs_one_line(lab: Lab, caplog: pytest.LogCaptureFixture) -> None:
    """The metric of accepted tasks is made of it."""
    with caplog.at_level("INFO"):
        lab.submit(5)
    told = [vars(record)["tasks_accepted"] for record in caplog.records if "tasks_accepted" in vars(record)]
    assert told == [5]
