"""Progress of tasks in answers of the API."""

from __future__ import annotations

import pytest

from farcall_common.progress import Progress
from farcall_common.store.model import RunningProgress, Task, TaskResult
from farcall_common.wire.states import Reporter, TaskState
from tests.support.memory_api import BOB
from tests.unit.test_lambdas_graphs import GraphLab


@pytest.fixture
def lab() -> GraphLab:
    return GraphLab()


def start(lab: GraphLab, *progress: Progress) -> Task:
    """A task that runs, and what its endpoint reports."""
    [task] = lab.submitted()
    lab.lease(1)
    for state in (TaskState.WAITING_FOR_NODES, TaskState.RUNNING):
        lab.move(task.task_id, state)
    lab.seen(progress=tuple(RunningProgress(task.task_id, each) for each in progress))
    return task


def end(lab: GraphLab, task: Task, **details: object) -> None:
    ended = TaskResult(
        task.task_id, lab.endpoint_id, 1, TaskState.SUCCESS, Reporter.AGENT, result=b"r", details=details
    )
    lab.database.record_results([ended], at=lab.at())


def test_progress_of_a_running_task_is_that_of_the_last_report(lab: GraphLab) -> None:
    task = start(lab, Progress(3, 10, "fitting", 5.0))
    assert lab.show(task.task_id).body["progress"] == {"done": 3, "total": 10, "text": "fitting", "at": 5.0}
    lab.seen(progress=(RunningProgress(task.task_id, Progress(0.5, None, "", 6.0)),))
    assert lab.show(task.task_id).body["progress"] == {"done": 0.5, "text": "", "at": 6.0}
    lab.seen()
    assert "progress" not in lab.show(task.task_id).body


def test_why_says_how_far_a_running_task_is_and_when_it_said_so(lab: GraphLab) -> None:
    at = lab.at().timestamp()
    task = start(lab, Progress(3, 10, "fitting", at - 90))
    assert lab.why(task.task_id)["text"].endswith("; progress: 3 of 10 (30 %): fitting (as of 90 s ago).")
    lab.seen(progress=(RunningProgress(task.task_id, Progress(4, at=at + 3600)),))  # by a clock that is ahead
    assert lab.why(task.task_id)["text"].endswith("; progress: 4 (as of now).")
    lab.seen()
    assert lab.why(task.task_id)["text"].endswith(" (attempt 1).")


def test_others_do_not_see_it(lab: GraphLab) -> None:
    task = start(lab, Progress(3, 10, "hush"))
    assert lab.show(task.task_id, caller=BOB).status == 404
    for path in (f"/v3/endpoints/{lab.endpoint_id}", f"/v2/endpoints/{lab.endpoint_id}/status"):
        assert "hush" not in str(lab.api.call("GET", path).body)


def test_a_task_that_has_ended_shows_the_last_one(lab: GraphLab) -> None:
    task = start(lab, Progress(3, 10))
    last = {"done": 10, "total": 10, "text": "done", "at": 7.0}
    end(lab, task, progress=last)
    answer = lab.show(task.task_id).body
    assert answer["progress"] == last
    assert answer["details"]["progress"] == last


def test_what_cannot_be_read_is_left_out(lab: GraphLab) -> None:
    task = start(lab)
    end(lab, task, progress={"done": "x"})
    answer = lab.show(task.task_id)
    assert answer.status == 200
    assert "progress" not in answer.body
