"""Resume: every combination of spool, lease and record of a task when an agent connects."""

from __future__ import annotations

from typing import Any

import pytest

from farcall_common.store.model import Task
from farcall_common.wire import TaskState
from farcall_forwarder.core.resume import Comparison, compare
from tests.task_fields import with_options

ENDPOINT_ID = "endpoint"
SPOOL_ID = "this spool"


def outcome(
    *,
    held: int | None = None,
    leased: int | None = None,
    task: dict[str, Any] | None = None,
    spools: frozenset[str] = frozenset(),
    accepted: bool = False,
) -> Comparison:
    """The comparison of one task."""
    record: dict[str, Any] = {
        "task_id": "task",
        "task_group_id": "group",
        "owner_id": "owner",
        "endpoint_id": ENDPOINT_ID,
        "function_id": "function",
        "function_hash": "hash",
        "payload": b"",
    }
    return compare(
        endpoint_id=ENDPOINT_ID,
        spool_id=SPOOL_ID,
        held={} if held is None else {"task": held},
        leases={} if leased is None else {"task": leased},
        tasks={} if task is None else {"task": Task(**with_options(record | task))},
        spools={"task": spools},
        accepted={"task"} if accepted else set(),
        expires_at=1.0,
    )


def test_held_and_leased_task_continues_under_the_queue_attempt() -> None:
    found = outcome(held=1, leased=2, task={})
    assert [(lease.task_id, lease.attempt) for lease in found.keep] == [("task", 2)]
    assert (found.forget, found.requeue, found.results) == ([], [], [])


def test_held_but_waiting_task_stays_in_the_queue() -> None:
    assert outcome(held=1, task={}) == Comparison()


@pytest.mark.parametrize(
    "task", [None, {"endpoint_id": "another"}, {"state": TaskState.SUCCESS}, {"state": TaskState.LOST}]
)
def test_held_but_ended_or_unknown_task_is_dropped(task: dict[str, Any] | None) -> None:
    found = outcome(held=3, task=task)
    assert [(ref.task_id, ref.attempt) for ref in found.forget] == [("task", 3)]
    assert found.keep == []


def test_leased_task_not_held_may_run_again_if_idempotent() -> None:
    assert outcome(leased=1, task={}, spools=frozenset({"another spool"})).requeue == ["task"]


@pytest.mark.parametrize("spools", [frozenset(), frozenset({SPOOL_ID})])
def test_a_non_idempotent_task_is_sent_again_if_it_cannot_have_arrived(spools: frozenset[str]) -> None:
    assert outcome(leased=1, task={"idempotent": False}, spools=spools).requeue == ["task"]


@pytest.mark.parametrize("spools", [frozenset({"another"}), frozenset({"another", SPOOL_ID})])
def test_a_non_idempotent_task_is_lost_if_it_was_sent_to_another_spool(spools: frozenset[str]) -> None:
    found = outcome(leased=1, task={"idempotent": False, "attempt": 1}, spools=spools)
    assert found.requeue == []
    [result] = found.results
    assert result.state is TaskState.LOST
    assert result.error is not None
    assert result.error.hint


def test_a_non_idempotent_task_is_lost_if_it_was_running_and_is_not_held_any_more() -> None:
    """This happens after a restore of the database: it lacks a result whose record was acknowledged to the spool."""
    task = {"idempotent": False, "attempt": 1, "state": TaskState.RUNNING}
    found = outcome(leased=1, task=task, spools=frozenset({SPOOL_ID}))
    assert found.requeue == []
    assert [result.state for result in found.results] == [TaskState.LOST]
    assert outcome(leased=1, task=task | {"idempotent": True}, spools=frozenset({SPOOL_ID})).requeue == ["task"]


@pytest.mark.parametrize("spools", [frozenset(), frozenset({SPOOL_ID})])
def test_a_non_idempotent_task_is_lost_if_it_was_accepted_and_is_not_held_any_more(spools: frozenset[str]) -> None:
    task = {"idempotent": False, "attempt": 1, "state": TaskState.WAITING_FOR_NODES}
    found = outcome(leased=1, task=task, spools=spools, accepted=True)
    assert found.requeue == []
    assert [result.state for result in found.results] == [TaskState.LOST]
    assert outcome(leased=1, task=task | {"idempotent": True}, spools=spools, accepted=True).requeue == ["task"]


def test_leased_but_ended_task_gives_the_recorded_result() -> None:
    [result] = outcome(leased=1, task={"state": TaskState.SUCCESS, "result": b"42"}).results
    assert (result.state, result.result) == (TaskState.SUCCESS, b"42")


def test_leased_task_without_a_record_is_dropped_from_the_queue() -> None:
    assert [result.state for result in outcome(leased=1).results] == [TaskState.LOST]
