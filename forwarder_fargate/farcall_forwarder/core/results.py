"""Ends of tasks: those that agents report, made safe to record, and those that the forwarder has to declare."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Final

import msgspec

from farcall_common.errors import ErrorRecord, Fault, TaskCancelled, TaskDeadLettered, TaskLost, TaskUnknown
from farcall_common.store.model import BlobRef, LeasedTask, QueuedTask, Task, TaskResult
from farcall_common.wire import Reporter, ResultSpec, TaskState
from farcall_forwarder.core.leases import Lease
from farcall_forwarder.core.untrusted import clean_details, clean_error, clean_time

__all__ = [
    "MAX_ATTEMPTS",
    "blob_key",
    "cancelled",
    "check_blob",
    "dead_lettered",
    "end_reaped",
    "is_sha256",
    "lost",
    "read_result",
    "recorded_end",
    "unknown_function",
    "unknown_task",
]

#: Attempts beyond this are no numbers that a forwarder ever gave.
MAX_ATTEMPTS: Final = 1_000_000
_AGENT_FAILURES: Final = frozenset({TaskState.FAILED, TaskState.CANCELLED, TaskState.LOST})
_SHA256: Final = re.compile(r"[0-9a-f]{64}")


def is_sha256(text: str) -> bool:
    """Whether text is a SHA-256 in hex."""
    return _SHA256.fullmatch(text) is not None


def blob_key(owner_id: str, sha256: str) -> str:
    """Where an owner's bytes of this hash are stored. The owner in front keeps tenants apart."""
    return f"{owner_id}/{sha256}"


def read_result(
    spec: ResultSpec,
    frames: Sequence[bytes],
    *,
    endpoint_id: str,
    lease: Lease | None,
    returned_at: float,
    max_inline_bytes: int,
) -> TaskResult:
    """What an agent reported, as a result that may be recorded.

    A report that says nothing usable (no end, no result with its success, or a larger one than may travel inline) ends
    the task too, as failed: refusing it would make the agent repeat it for ever.
    """
    timings = dict(lease.timings) if lease else {}
    timings["returned_at"] = returned_at
    for name, at in (("started_at", spec.started_at), ("ended_at", spec.ended_at)):
        if (known := clean_time(at, now=returned_at)) is not None:
            timings[name] = known
    blob = spec.result_blob
    is_inline = spec.state is TaskState.SUCCESS and spec.result is not None and blob is None
    end = TaskResult(
        task_id=spec.task_id,
        endpoint_id=endpoint_id,
        attempt=min(spec.attempt, lease.attempt) if lease else spec.attempt,
        state=spec.state,
        reporter=Reporter.AGENT,
        result=frames[spec.result] if is_inline and spec.result is not None else None,
        details=clean_details(spec.details) if spec.details else {},
        timings=timings,
        task_group_id=lease.task_group_id if lease else "",
        owner_id=lease.owner_id if lease else "",
    )
    if end.result is not None:
        size_bytes = len(end.result)
        too_large = f"a result of {size_bytes:,} bytes inline, where only {max_inline_bytes:,} are allowed"
        return end if size_bytes <= max_inline_bytes else _malformed(end, too_large)
    if spec.state is TaskState.SUCCESS and spec.result is None and blob is not None and is_sha256(blob.sha256):
        end = msgspec.structs.replace(end, result_ref=BlobRef(blob.blob_key, blob.size_bytes, blob.sha256))
        return check_blob(end, owner_id=lease.owner_id) if lease else end
    if spec.state in _AGENT_FAILURES and spec.error is not None:
        error = clean_error(spec.error, endpoint_id=endpoint_id, attempt=spec.attempt)
        failed = msgspec.structs.replace(end, error=error)
        return dead_lettered(failed) if spec.exhausted and spec.state is TaskState.FAILED else failed
    return _malformed(end)


def dead_lettered(end: TaskResult) -> TaskResult:
    """The end of a task that has no attempt left, each having taken down what ran it: nobody tries it again by itself.

    The error keeps its words, which say what happened; the hint says what can be done with a dead letter.
    """
    assert end.error is not None
    hint = (
        f"{end.error.hint} When the cause is gone, `farcall tasks retry {end.task_id}` runs it again as a new task; "
        f"`farcall tasks discard {end.task_id}` forgets its arguments."
    )
    error = dataclasses.replace(end.error, code=TaskDeadLettered.code, hint=hint.lstrip())
    # The forwarder says so, whoever reported the last attempt: that is one place for the rule.
    return msgspec.structs.replace(end, state=TaskState.DEAD_LETTERED, reporter=Reporter.FORWARDER, error=error)


def check_blob(result: TaskResult, *, owner_id: str) -> TaskResult:
    """The result, or a failure if it names a blob that is not the task owner's: agents may not give those away."""
    ref = result.result_ref
    return result if ref is None or ref.blob_key == blob_key(owner_id, ref.sha256) else _malformed(result)


def _malformed(end: TaskResult, what: str = "an end of the task that the protocol does not allow") -> TaskResult:
    error = ErrorRecord(
        code="RESULT_MALFORMED",
        message=f"The endpoint reported {what}.",
        hint="Upgrade the endpoint's software, then run the task again.",
        fault=Fault.PEER,
        attempt=end.attempt,
        endpoint_id=end.endpoint_id,
    )
    return msgspec.structs.replace(end, state=TaskState.FAILED, result=None, result_ref=None, error=error)


def recorded_end(task: Task, *, endpoint_id: str) -> TaskResult:
    """The end that the database has, to be told to a queue that still leases the task."""
    return TaskResult(
        task_id=task.task_id,
        endpoint_id=endpoint_id,
        attempt=task.attempt,
        state=task.state,
        reporter=Reporter.FORWARDER if task.state is not TaskState.SUCCESS else Reporter.AGENT,
        result=task.result,
        result_ref=task.result_ref,
        error=task.error,
        task_group_id=task.task_group_id,
        owner_id=task.owner_id,
    )


def lost(task_id: str, *, endpoint_id: str, attempt: int, reason: str) -> TaskResult:
    """The end of a task that may have started and may not start again."""
    error = ErrorRecord(
        code=TaskLost.code,
        message=reason,
        hint="The function is marked idempotent=False, so Farcall did not start it again. Check what it did, "
        "then submit it anew if it should run.",
        fault=Fault.PEER,
        attempt=attempt,
        endpoint_id=endpoint_id,
    )
    return _declared(task_id, endpoint_id, attempt, TaskState.LOST, error)


def cancelled(task_id: str, *, endpoint_id: str, attempt: int) -> TaskResult:
    """The end of a task that was cancelled before its endpoint had it."""
    error = ErrorRecord(
        code=TaskCancelled.code,
        message="The task was cancelled before it reached its endpoint.",
        fault=Fault.CALLER,
        endpoint_id=endpoint_id,
    )
    return _declared(task_id, endpoint_id, attempt, TaskState.CANCELLED, error)


def unknown_function(task: QueuedTask, *, endpoint_id: str, attempt: int) -> TaskResult:
    """The end of a task whose function was deleted, or changed, before the task could run."""
    error = ErrorRecord(
        code="FUNCTION_UNKNOWN",
        message=f"The function {task.function_id} was deleted or replaced after the task had been submitted.",
        hint="Register the function again and submit the task with its new id.",
        fault=Fault.CALLER,
        endpoint_id=endpoint_id,
    )
    return _declared(task.task_id, endpoint_id, attempt, TaskState.FAILED, error)


def unknown_task(task: QueuedTask, *, endpoint_id: str, attempt: int) -> TaskResult:
    """The end of a task that is in the queue, and whose arguments are not in the database."""
    error = ErrorRecord(
        code=TaskUnknown.code,
        message="The arguments of the task are not in the database any more.",
        hint="Submit the task again.",
        fault=Fault.US,
        endpoint_id=endpoint_id,
    )
    return _declared(task.task_id, endpoint_id, attempt, TaskState.FAILED, error)


def end_reaped(leased: LeasedTask, *, endpoint_id: str) -> TaskResult:
    """The end of a task whose lease ran out for the last time."""
    task = leased.task
    if leased.cancel_requested:
        error = ErrorRecord(
            code=TaskCancelled.code,
            message="The task was cancelled while its endpoint was away.",
            fault=Fault.CALLER,
            attempt=leased.attempt,
            endpoint_id=endpoint_id,
        )
        return _declared(task.task_id, endpoint_id, leased.attempt, TaskState.CANCELLED, error)
    if not task.options.idempotent:
        reason = "The endpoint went away while it had the task; whether the task ran is not known."
        return lost(task.task_id, endpoint_id=endpoint_id, attempt=leased.attempt, reason=reason)
    error = ErrorRecord(
        code=TaskDeadLettered.code,
        message=f"The endpoint went away during each of {leased.attempt} attempts to run the task.",
        hint="See the endpoint's log.",
        fault=Fault.PEER,
        attempt=leased.attempt,
        endpoint_id=endpoint_id,
        reasons=("the endpoint went away while it had the task",) * min(leased.attempt, task.options.max_attempts),
    )
    return dead_lettered(_declared(task.task_id, endpoint_id, leased.attempt, TaskState.FAILED, error))


def _declared(task_id: str, endpoint_id: str, attempt: int, state: TaskState, error: ErrorRecord) -> TaskResult:
    return TaskResult(
        task_id=task_id, endpoint_id=endpoint_id, attempt=attempt, state=state, reporter=Reporter.FORWARDER, error=error
    )
