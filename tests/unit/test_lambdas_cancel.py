"""Cancelling tasks."""

from __future__ import annotations

import datetime as dt
import uuid
from typing import Any

import pytest

from farcall_common.store.model import TaskResult
from farcall_common.wire.states import Reporter, TaskState
from farcall_lambdas.services.reconcile import Reconciled
from tests.support.memory_api import BOB, MemoryApi
from tests.support.stores import FakeQueue, single


class Lab:
    """An API with one endpoint, its queue, and a forwarder that can lease."""

    def __init__(self) -> None:
        self.api = MemoryApi()
        assert isinstance(self.api.stores.queue, FakeQueue)
        self.queue = self.api.stores.queue
        self.records = self.api.stores
        self.function_id = self.api.function()
        self.endpoint_id = self.api.endpoint()
        self.fence = single.claim(self.queue, self.endpoint_id, "fwd-1", ttl_s=1e9)
        single.mark_restored(self.queue, self.endpoint_id, self.fence)

    def submit(self, count: int = 1) -> list[str]:
        body = {"tasks": {self.function_id: ["p"] * count}}
        answer = self.api.call("POST", f"/v3/endpoints/{self.endpoint_id}/submit", body)
        return list(answer.body["tasks"][self.function_id])

    def lease(self, limit: int = 1) -> list[str]:
        leased = single.lease(self.queue, self.endpoint_id, self.fence, limit=limit, lease_s=30)
        return [each.task.task_id for each in leased]

    def success(self, task_id: str) -> TaskResult:
        return TaskResult(task_id, self.endpoint_id, 1, TaskState.SUCCESS, Reporter.AGENT, result=b"00\nr")

    def cancel(self, task_id: str) -> Any:
        answer = self.api.call("POST", f"/v3/tasks/{task_id}/cancel")
        assert answer.status == 200, answer.body
        return answer.body

    def state(self, task_id: str) -> TaskState:
        return self.records.tasks.get_tasks([task_id])[task_id].state


@pytest.fixture
def lab() -> Lab:
    return Lab()


def test_cancelled_waiting_task_never_runs(lab: Lab) -> None:
    [task_id] = lab.submit()

    answer = lab.cancel(task_id)

    assert answer == {"task_id": task_id, "outcome": "cancelled", "status": "cancelled"}
    assert lab.api.call("GET", f"/v2/tasks/{task_id}").body["error"]["code"] == "TASK_CANCELLED"
    assert lab.lease() == []
    assert lab.queue.outbox(lab.endpoint_id) == []


def test_cancelled_leased_task_gets_a_cancel_request_and_a_wake_up(lab: Lab) -> None:
    [task_id] = lab.submit()
    lab.lease()
    wake_ups = lab.queue.listen("fwd-1")

    answer = lab.cancel(task_id)

    assert (answer["outcome"], answer["status"]) == ("requested", "received")
    assert single.cancel_requests(lab.queue, lab.endpoint_id, lab.fence) == [task_id]
    assert wake_ups.get(0) == [lab.endpoint_id]
    assert not lab.state(task_id).is_terminal


def test_cancel_of_a_finished_task_changes_nothing(lab: Lab) -> None:
    [task_id] = lab.submit()
    at = dt.datetime.fromtimestamp(lab.api.clock.now, dt.UTC)
    lab.records.tasks.record_results([lab.success(task_id)], at=at)

    assert lab.cancel(task_id) == {"task_id": task_id, "outcome": "finished", "status": "success"}


def test_task_with_a_result_in_the_outbox_is_finished(lab: Lab) -> None:
    [task_id] = lab.submit()
    lab.lease()
    single.ack(lab.queue, lab.fence, [lab.success(task_id)])

    assert lab.cancel(task_id) == {"task_id": task_id, "outcome": "finished"}
    assert not lab.state(task_id).is_terminal


def test_task_lost_by_the_queue_is_cancelled_in_the_database(lab: Lab) -> None:
    [task_id] = lab.submit()
    lab.queue.wipe()

    assert lab.cancel(task_id)["outcome"] == "cancelled"
    assert lab.state(task_id) is TaskState.CANCELLED


def test_cancel_is_idempotent(lab: Lab) -> None:
    [task_id] = lab.submit()
    lab.cancel(task_id)

    assert lab.cancel(task_id) == {"task_id": task_id, "outcome": "finished", "status": "cancelled"}


def test_tasks_of_a_batch_are_cancelled_by_their_state(lab: Lab) -> None:
    leased, *waiting = lab.submit(3)
    assert lab.lease() == [leased]
    unknown = str(uuid.uuid4())

    body = lab.api.call("POST", "/v3/tasks/cancel", {"task_ids": [leased, *waiting, unknown]}).body

    outcomes = {task_id: each["outcome"] for task_id, each in body["results"].items()}
    assert outcomes == {leased: "requested", **dict.fromkeys(waiting, "cancelled"), unknown: "unknown"}


def test_task_of_another_user_cannot_be_cancelled(lab: Lab) -> None:
    [task_id] = lab.submit()

    body = lab.api.call("POST", "/v3/tasks/cancel", {"task_ids": [task_id]}, caller=BOB).body

    assert body["results"][task_id]["outcome"] == "unknown"
    assert lab.queue.depth([lab.endpoint_id]) == 1


def test_cancel_can_be_retried_while_the_queue_is_unavailable(lab: Lab) -> None:
    [task_id] = lab.submit()
    lab.queue.reachable = False

    answer = lab.api.call("POST", f"/v3/tasks/{task_id}/cancel")

    assert (answer.status, answer.body["retryable"]) == (503, True)
    assert not lab.state(task_id).is_terminal


def test_cancel_interrupted_by_a_crash_is_completed_by_the_reconciler(lab: Lab) -> None:
    [task_id] = lab.submit()
    lab.queue.cancel(lab.endpoint_id, [task_id])
    lab.api.clock.now += 60

    done = lab.api.application.services.reconciler.run()

    assert done == Reconciled(endpoints=1, recorded=1)
    assert lab.state(task_id) is TaskState.CANCELLED
