"""Dead letters: results of tasks without attempts left."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from farcall_common.errors import TaskDeadLettered, error_from_record
from farcall_common.store.model import LeasedTask, QueuedTask, TaskResult
from farcall_common.task_options import TaskOptions
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


def test_the_last_failed_attempt_makes_a_dead_letter() -> None:
    result = read()
    assert (result.state, result.reporter) == (TaskState.DEAD_LETTERED, Reporter.FORWARDER)
    assert result.error is not None
    assert (result.error.code, result.error.message, result.error.stderr_tail) == (
        "TASK_DEAD_LETTERED",
        "it died",
        "oops",
    )
    assert result.error.reasons == ("signal 9", "7")
    assert result.error.hint.startswith("Look. ")
    assert f"`farcall tasks retry {TASK}`" in result.error.hint
    assert f"`farcall tasks discard {TASK}`" in result.error.hint


@pytest.mark.parametrize("changes", [{"exhausted": False}, {"state": TaskState.LOST}, {"state": TaskState.CANCELLED}])
def test_no_other_result_is_a_dead_letter(changes: dict[str, Any]) -> None:
    result = read(**changes)
    assert result.state is changes.get("state", TaskState.FAILED)
    assert result.reporter is Reporter.AGENT
    assert result.error is not None
    assert result.error.code == "WORKER_DIED"


def test_an_agent_cannot_report_a_dead_letter() -> None:
    """Only the forwarder sets this state. A report with it is malformed."""
    result = read(state=TaskState.DEAD_LETTERED)
    assert result.error is not None
    assert (result.state, result.error.code) == (TaskState.FAILED, "RESULT_MALFORMED")


def test_an_endpoint_that_disconnected_in_each_attempt_creates_a_dead_letter() -> None:
    task = QueuedTask(TASK, "g", "o", "e", "f", "h", b"p", TaskOptions(max_attempts=3))
    result = results.reaped_result(LeasedTask(task, 3, 0.0, 1.0), endpoint_id="e")
    assert result.state is TaskState.DEAD_LETTERED
    assert result.error is not None
    assert len(result.error.reasons or ()) == 3


def test_clients_receive_dead_letters_in_a_state_of_version_1() -> None:
    streams = StreamHub(forwarder_id="f", policy=Policy())
    streams.open(b"peer", "o", groups=["g"], cursor=None)
    task = QueuedTask(TASK, "g", "o", "e", "f", "h", b"p", TaskOptions(max_attempts=1))
    result = results.reaped_result(LeasedTask(task, 1, 0.0, 1.0), endpoint_id="e")
    reaped = msgspec.structs.replace(result, task_group_id="g", owner_id="o")
    [push] = streams.publish([reaped], {}, recorded_at=1.0)
    [received] = push.message.results
    assert received.state is TaskState.FAILED
    assert received.error is not None
    assert reaped.error is not None
    assert isinstance(error_from_record(reaped.error), TaskDeadLettered)
    assert received.error["code"] == "TASK_DEAD_LETTERED"
