"""Why a task is where it is."""

from __future__ import annotations

import datetime as dt
import uuid
from typing import Any

import pytest

from farcall_common.errors import ErrorRecord, Fault
from farcall_common.store.model import EndpointStatus, Presence, TaskEvent, TaskResult
from farcall_common.wire.states import Reporter, TaskState
from tests.support.memory_api import BOB
from tests.support.stores import single
from tests.unit.test_lambdas_submit import PAYLOAD, Lab
from tests.unit.test_store_queue import make_queued


class WhyLab(Lab):
    """A lab whose endpoint and tasks can be put into any situation."""

    def at(self) -> dt.datetime:
        return dt.datetime.fromtimestamp(self.api.clock.now, dt.UTC)

    def tasks(self, count: int = 1) -> list[str]:
        return list(self.submit({self.function_id: [PAYLOAD] * count}).body["tasks"][self.function_id])

    def seen(self, *, online: bool = True, **status: Any) -> None:
        self.records.endpoints.set_presence([Presence(self.endpoint_id, online, EndpointStatus(**status))])

    def lease(self, count: int) -> None:
        fence = single.claim(self.queue, self.endpoint_id, "f", ttl_s=60)
        single.mark_restored(self.queue, self.endpoint_id, fence)
        single.lease(self.queue, self.endpoint_id, fence, limit=count, lease_s=60)

    def move(self, task_id: str, state: TaskState, **detail: Any) -> None:
        reporter = Reporter.FORWARDER if state is TaskState.WAITING_FOR_NODES else Reporter.AGENT
        event = TaskEvent(task_id, state, reporter, self.at(), attempt=1, detail=detail)
        self.records.tasks.record_transitions([event])

    def end(self, task_id: str, state: TaskState, **fields: Any) -> None:
        self.records.tasks.record_results(
            [TaskResult(task_id, self.endpoint_id, 1, state, Reporter.AGENT, **fields)], at=self.at()
        )

    def why(self, task_id: str) -> Any:
        answer = self.api.call("GET", f"/v3/tasks/{task_id}/why")
        assert answer.status == 200, answer.body
        assert answer.body["text"].endswith(".")
        return answer.body


@pytest.fixture
def lab() -> WhyLab:
    return WhyLab()


def test_reason_endpoint_never_started(lab: WhyLab) -> None:
    first, second, third = lab.tasks(3)
    lab.api.clock.now += 90
    answer = lab.why(third)
    assert answer["reason"] == "ENDPOINT_NEVER_SEEN"
    assert answer["text"] == (
        "Endpoint laptop was never online: `farcall-endpoint start` on its machine starts it; 2 tasks go first."
    )
    assert (answer["state"], answer["state_age_s"], answer["attempt"]) == ("received", 90, 0)
    assert (answer["queue_position"], answer["queue_depth"]) == (2, 3)
    assert answer["endpoint"]["status"] == "offline"
    assert lab.why(first)["text"].endswith("; the task is the first in its queue.")
    assert lab.why(second)["text"].endswith("; one task goes first.")


def test_reason_counts_turns_of_submitters(lab: WhyLab) -> None:
    others = [make_queued(f"t{n}", endpoint_id=lab.endpoint_id, owner_id=f"other {n % 2}") for n in range(10)]
    lab.queue.enqueue(others)
    first, second, third = lab.tasks(3)
    lab.seen(managers=1, total_workers=4)
    answer = lab.why(third)
    assert answer["text"].endswith("busy; 2 tasks of yours go first, and 3 submitters take turns.")
    assert (answer["queue_position"], answer["queue_depth"], answer["queue_submitters"]) == (2, 13, 3)
    assert lab.why(first)["text"].endswith("; the task is the next of yours, and 3 submitters take turns.")
    assert lab.why(second)["text"].endswith("; one task of yours goes first, and 3 submitters take turns.")
    assert "other" not in str(answer)


def test_reason_endpoint_offline(lab: WhyLab) -> None:
    lab.seen(managers=1, total_workers=4)
    [task_id] = lab.tasks()
    lab.seen(online=False)
    lab.api.clock.now += 3 * 3600
    answer = lab.why(task_id)
    assert answer["reason"] == "ENDPOINT_OFFLINE"
    assert "has been offline since 2023-11-14 22:13:20 UTC (3 hours)" in answer["text"]
    assert answer["endpoint"]["seen_at"] == lab.api.clock.now - 3 * 3600


def test_reason_endpoint_offline_after_missing_heartbeats(lab: WhyLab) -> None:
    lab.seen(total_workers=4, idle_workers=4)
    [task_id] = lab.tasks()
    lab.api.clock.now += 600
    assert lab.why(task_id)["reason"] == "ENDPOINT_OFFLINE"


def test_reason_includes_the_problem_of_the_endpoint(lab: WhyLab) -> None:
    [task_id] = lab.tasks()
    lab.seen(total_workers=2, idle_workers=2, problem="5 blocks in a row never connected: sbatch says no account.")
    answer = lab.why(task_id)
    assert answer["reason"] == "ENDPOINT_PROBLEM"
    assert "has a problem: 5 blocks in a row never connected: sbatch says no account; the task" in answer["text"]
    assert answer["endpoint"]["problem"].startswith("5 blocks")


def test_reason_no_workers_or_busy_workers(lab: WhyLab) -> None:
    first, second = lab.tasks(2)
    lab.seen(managers=0)
    assert lab.why(second)["reason"] == "NO_WORKERS"
    lab.seen(managers=1, total_workers=4, pending_tasks=7)
    answer = lab.why(second)
    assert answer["reason"] == "WORKERS_BUSY"
    assert answer["text"] == "Endpoint laptop is online, and all 4 workers are busy; one task goes first."
    lab.lease(1)
    lab.move(first, TaskState.WAITING_FOR_NODES)
    answer = lab.why(first)
    assert answer["text"].endswith("all 4 workers are busy; the task has reached it, with 6 tasks that wait there.")
    assert answer["queue_position"] is None
    lab.seen(managers=1, total_workers=4, pending_tasks=2)
    assert lab.why(first)["text"].endswith("the task has reached it, with one task that waits there.")
    lab.seen(managers=1, total_workers=1)
    assert "its worker is busy" in lab.why(first)["text"]


@pytest.mark.parametrize(
    ("error", "text"),
    [
        ({"error": "OSError"}, "It raised OSError; retry 2 of 3 in 4 s."),
        ({}, "It raised an exception; retry 2 of 3 in 4 s."),
        ({"error": "WALLTIME_EXCEEDED"}, "It ran longer than its walltime; retry 2 of 3 in 4 s."),
    ],
)
def test_reason_of_a_task_that_waits_for_a_retry(lab: WhyLab, error: dict[str, str], text: str) -> None:
    [task_id] = lab.tasks()
    lab.seen(total_workers=1)
    lab.lease(1)
    lab.move(task_id, TaskState.RUNNING)
    lab.move(task_id, TaskState.WAITING_FOR_NODES, retry=2, retries=3, retry_at=lab.api.clock.now + 3.5, **error)
    answer = lab.why(task_id)
    assert (answer["reason"], answer["text"].partition(" If it has not")[0]) == ("RETRYING", text)
    lab.api.clock.now += 4
    assert lab.why(task_id)["reason"] == "WORKERS_BUSY", "its time has come"


def test_reason_says_how_old_the_numbers_are(lab: WhyLab) -> None:
    [task_id] = lab.tasks()
    lab.seen()
    answer = lab.why(task_id)
    assert answer["text"].startswith("Endpoint laptop has connected, and has not reported its workers yet; ")
    assert "age_s" not in answer["endpoint"]
    lab.seen(blocks=2, pending_blocks=2, reported_at=lab.api.clock.now)
    assert (
        "has no workers yet: 2 blocks wait for nodes, or for the first manager to start (as of now); "
        in (lab.why(task_id)["text"])
    )
    lab.seen(managers=1, total_workers=4, blocks=1, reported_at=lab.api.clock.now)
    lab.api.clock.now += 14
    answer = lab.why(task_id)
    assert "all 4 workers are busy (as of 14 s ago); the task is" in answer["text"]
    assert (answer["endpoint"]["reported_at"], answer["endpoint"]["age_s"]) == (lab.api.clock.now - 14, 14.0)
    lab.seen(managers=1, total_workers=4, idle_workers=1, reported_at=lab.api.clock.now + 5)
    assert "a worker is idle (as of now); " in lab.why(task_id)["text"], "the clocks of two machines differ"


def test_reason_task_is_about_to_start(lab: WhyLab) -> None:
    [task_id] = lab.tasks()
    lab.seen(managers=1, total_workers=4, idle_workers=1)
    assert lab.why(task_id)["reason"] == "NEXT"
    lab.lease(1)
    assert "the endpoint has it" in lab.why(task_id)["text"]


@pytest.mark.parametrize(
    ("state", "reason"), [(TaskState.RUNNING, "RUNNING"), (TaskState.WAITING_FOR_LAUNCH, "STARTING")]
)
def test_reason_of_dispatched_and_running_tasks(lab: WhyLab, state: TaskState, reason: str) -> None:
    [task_id] = lab.tasks()
    lab.seen(total_workers=1)
    lab.api.clock.now += 10
    lab.lease(1)
    lab.move(task_id, state)
    lab.api.clock.now += 5
    answer = lab.why(task_id)
    assert (answer["reason"], answer["state"], answer["state_age_s"]) == (reason, state, 5)
    assert "for 5 s (attempt 1)" in answer["text"]
    lab.seen(online=False)
    assert lab.why(task_id)["reason"] == "ENDPOINT_OFFLINE"
    assert lab.why(task_id)["text"].endswith("; the task has reached it.")


def test_reason_of_ended_tasks(lab: WhyLab) -> None:
    good, bad = lab.tasks(2)
    lab.end(good, TaskState.SUCCESS, result=b"x")
    lab.end(bad, TaskState.FAILED, error=ErrorRecord("TASK_FAILED", "ValueError: no", fault=Fault.USER_CODE))
    lab.api.clock.now += 240
    assert lab.why(good)["text"] == "The task finished successfully 4 minutes ago."
    assert lab.why(bad)["text"] == "The task ended as failed 4 minutes ago (ValueError: no)."
    assert lab.why(bad)["reason"] == "ENDED"


def test_reason_endpoint_deleted(lab: WhyLab) -> None:
    [task_id] = lab.tasks()
    lab.records.endpoints.delete_endpoint(lab.endpoint_id)
    answer = lab.why(task_id)
    assert answer["reason"] == "ENDPOINT_DELETED"
    assert "endpoint" not in answer


def test_reason_task_not_queued_or_queue_unavailable(lab: WhyLab) -> None:
    lab.seen(total_workers=1, idle_workers=1)
    lab.queue.reachable = False
    [task_id] = lab.tasks()
    answer = lab.why(task_id)
    assert (answer["reason"], answer["queue_depth"]) == ("QUEUE_AWAY", None)
    lab.queue.reachable = True
    assert lab.why(task_id)["reason"] == "NOT_QUEUED"


def test_tasks_of_other_users_are_not_found(lab: WhyLab) -> None:
    [task_id] = lab.tasks()
    assert lab.api.call("GET", f"/v3/tasks/{task_id}/why", caller=BOB).status == 404
    assert lab.api.call("GET", f"/v3/tasks/{uuid.uuid4()}/why").status == 404


def test_reason_includes_the_expiry_of_a_waiting_task(lab: WhyLab) -> None:
    submitted_at = lab.api.clock.now
    waiting, running = lab.tasks(2)
    answer = lab.why(waiting)
    assert answer["expires_at"] == pytest.approx(submitted_at + 30 * 86_400, abs=1)
    assert "ends as failed" not in answer["text"]
    lab.seen()
    lab.lease(1)
    lab.move(running, TaskState.RUNNING)
    assert lab.why(running)["expires_at"] is None

    lab.api.clock.now += 24 * 86_400
    expires_at = dt.datetime.fromtimestamp(submitted_at + 30 * 86_400, dt.UTC)
    assert lab.why(waiting)["text"].endswith(f"If it has not started by {expires_at:%Y-%m-%d %H:%M} UTC, it fails.")
    lab.end(waiting, TaskState.CANCELLED)
    ended = lab.why(waiting)
    assert ended["expires_at"] is None
    assert "has not started" not in ended["text"]
