"""Files that move, in answers of the API."""

from __future__ import annotations

from typing import Any

import pytest

from farcall_common.staging import Staging
from farcall_common.store.model import RunningStaging, Task, TaskResult
from farcall_common.wire.states import Reporter, TaskState
from tests.support.memory_api import BOB
from tests.unit.test_lambdas_graphs import GraphLab

SCAN = "s3://lab/raw/scan7.h5"
IN = Staging("staging-in", 10, 3, 1_200_000_000, 4_000_000_000, SCAN, "", 5.0)


@pytest.fixture
def lab() -> GraphLab:
    return GraphLab()


def start(lab: GraphLab, *states: TaskState) -> Task:
    """A task that its endpoint has."""
    [task] = lab.submitted()
    lab.lease(1)
    for state in (TaskState.WAITING_FOR_NODES, *states):
        lab.move(task.task_id, state)
    return task


def report(lab: GraphLab, task: Task, *staging: Staging) -> None:
    lab.seen(staging=tuple(RunningStaging(task.task_id, each) for each in staging))


def why(lab: GraphLab, task: Task) -> Any:
    return lab.api.call("GET", f"/v3/tasks/{task.task_id}/why").body


def test_files_that_move_are_those_of_the_last_report(lab: GraphLab) -> None:
    task = start(lab)
    report(lab, task, IN)
    shown = {"state": "staging-in", "files": 10, "files_done": 3, "bytes": 1_200_000_000, "total": 4_000_000_000}
    assert lab.show(task.task_id).body["staging"] == shown | {"url": SCAN, "since": 5.0}
    report(lab, task)
    assert "staging" not in lab.show(task.task_id).body


def test_others_do_not_see_them(lab: GraphLab) -> None:
    task = start(lab)
    report(lab, task, IN)
    assert lab.show(task.task_id, caller=BOB).status == 404
    assert lab.api.call("GET", f"/v3/tasks/{task.task_id}/why", caller=BOB).status == 404
    for path in (f"/v3/endpoints/{lab.endpoint_id}", f"/v2/endpoints/{lab.endpoint_id}/status"):
        assert SCAN not in str(lab.api.call("GET", path).body)


def test_why_a_task_waits_for_its_files(lab: GraphLab) -> None:
    task = start(lab)
    since = lab.at().timestamp() - 12
    report(lab, task, Staging("staging-in", 10, 3, 1_200_000_000, 4_000_000_000, SCAN, "", since))
    answer = why(lab, task)
    assert answer["reason"] == "STAGING_IN"
    assert "copies the files that the task reads: 3 of 10 are there, 1.2 of 4.0 GB, for 12 s" in answer["text"]
    assert answer["text"].endswith(f"; now {SCAN}.")


def test_why_a_task_waits_for_copies_on_its_node(lab: GraphLab) -> None:
    task = start(lab)
    report(lab, task, Staging("staging-in", 10, 3, to_node=True))
    answer = why(lab, task)
    assert answer["reason"] == "STAGING_IN"
    assert "copies them to the node that runs it: 3 of 10 are there" in answer["text"]


def test_why_a_task_whose_function_has_returned_still_runs(lab: GraphLab) -> None:
    task = start(lab, TaskState.RUNNING)
    report(lab, task, Staging("staging-out", 3, 1, problem="the storage does not answer."))
    answer = why(lab, task)
    assert answer["reason"] == "STAGING_OUT"
    assert "stores the files that the task has written: 1 of 3 is stored" in answer["text"]
    assert answer["text"].endswith(". The last problem: the storage does not answer.")


def test_of_a_task_that_has_ended_the_files_are_shown_that_were_copied(lab: GraphLab) -> None:
    task = start(lab, TaskState.RUNNING)
    files = [{"url": SCAN, "mode": "r", "size_bytes": 3}]
    details = {"files": files}
    ended = TaskResult(
        task.task_id, lab.endpoint_id, 1, TaskState.SUCCESS, Reporter.AGENT, result=b"r", details=details
    )
    lab.database.record_results([ended], at=lab.at())
    report(lab, task, IN)
    answer = lab.show(task.task_id).body
    assert answer["details"]["files"] == files
    assert "staging" not in answer
    assert why(lab, task)["reason"] == "ENDED"
