"""What the forwarder makes of a task that has no attempt left."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from farcall_common.errors import TaskDeadLettered, error_from_record
from farcall_common.store.model import LeasedTask, QueuedTask, TaskResult
from farcall_common.wire import Reporter, ResultSpec, TaskState
from farcall_forwarder.core import results
from farcall_forwarder.core.policy import Policy
from farcall_forwarder.core.streams import StreamHub

TASK = "01932f2e-7c00-7000-8000-000000000001"
DIED = {"code": "WORKER_DIED", "message": "it died", "hint": "Look.", "fault": "user_code", "stderr_tail": "oops"}


def read(**changes: Any) -> TaskResult:
    fields = {"state": TaskState.FAILED, "error": {**DIED, "reasons": ["signal 9", 7]}, "exhausted": True}
    spec = ResultSpec(task_id=TASK, attempt=2, **{**fields, **changes})
    return results.read_result(spec, [], endpoint_id="e", lease=None, returned_at=1.0, max_inline_bytes=9)


def test_the_last_death_makes_a_dead_letter() -> None:
    end = read()
    assert (end.state, end.reporter) == (TaskState.DEAD_LETTERED, Reporter.FORWARDER)
    assert end.error is not None
    assert (end.error.code, end.error.message, end.error.stderr_tail) == ("TASK_DEAD_LETTERED", "it died", "oops")
    assert end.error.reasons == ("signal 9", "7")
    assert end.error.hint.startswith("Look. ")
    assert f"`farcall tasks retry {TASK}`" in end.error.hint
    assert f"`farcall tasks discard {TASK}`" in end.error.hint


@pytest.mark.parametrize("changes", [{"exhausted": False}, {"state": TaskState.LOST}, {"state": TaskState.CANCELLED}])
def test_no_other_end_is_one(changes: dict[str, Any]) -> None:
    end = read(**changes)
    assert end.state is changes.get("state", TaskState.FAILED)
    assert end.reporter is Reporter.AGENT
    assert end.error is not None
    assert end.error.code == "WORKER_DIED"


def test_an_agent_cannot_say_so_itself() -> None:
    """It is the cloud's word: a peer that writes the state has written something that the protocol does not allow."""
    end = read(state=TaskState.DEAD_LETTERED)
    assert end.error is not None
    assert (end.state, end.error.code) == (TaskState.FAILED, "RESULT_MALFORMED")


def test_an_endpoint_that_went_away_each_time_makes_one() -> None:
    task = QueuedTask(TASK, "g", "o", "e", "f", "h", b"p", max_attempts=3)
    end = results.reaped_result(LeasedTask(task, 3, 0.0, 1.0), endpoint_id="e")
    assert end.state is TaskState.DEAD_LETTERED
    assert end.error is not None
    assert len(end.error.reasons or ()) == 3


def test_clients_are_told_in_words_that_each_of_them_knows() -> None:
    streams = StreamHub(forwarder_id="f", policy=Policy())
    streams.open(b"peer", "o", groups=["g"], cursor=None)
    task = QueuedTask(TASK, "g", "o", "e", "f", "h", b"p", max_attempts=1)
    end = results.reaped_result(LeasedTask(task, 1, 0.0, 1.0), endpoint_id="e")
    ended = msgspec.structs.replace(end, task_group_id="g", owner_id="o")
    [push] = streams.publish([ended], {}, recorded_at=1.0)
    [told] = push.message.results
    assert told.state is TaskState.FAILED
    assert told.error is not None
    assert ended.error is not None
    assert isinstance(error_from_record(ended.error), TaskDeadLettered)
    assert told.error["code"] == "TASK_DEAD_LETTERED"
