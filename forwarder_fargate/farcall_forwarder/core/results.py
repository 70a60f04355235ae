"""Results of tasks: agents' reports, made safe to record, and results that the forwarder declares itself."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Final

import msgspec

from farcall_common.environments import Environment
from farcall_common.errors import (
    EndpointIncompatible,
    ErrorRecord,
    Fault,
    TaskCancelled,
    TaskDeadLettered,
    TaskLost,
    TaskUnknown,
)
from farcall_common.store.model import BlobRef, LeasedTask, QueuedTask, Task, TaskResult
from farcall_common.wire import Reporter, ResultSpec, TaskState
from farcall_forwarder.core.leases import Lease
from farcall_forwarder.core.untrusted import clean_details, clean_error, clean_time

#: Forwarders never give larger numbers to attempts.
MAX_ATTEMPTS: Final = 1_000_000
_AGENT_FAILURES: Final = frozenset({TaskState.FAILED, TaskState.CANCELLED, TaskState.LOST})
_SHA256: Final = re.compile(r"[0-9a-f]{64}")


def is_sha256(text: str) -> bool:
    """Whether text is a SHA-256 in hex."""
    return _SHA256.fullmatch(text) is not None


def blob_key(owner_id: str, sha256: str) -> str:
    """The key of an owner's blob with this hash. The owner's id in front separates tenants."""
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
    """Convert an agent's report to a result that may be recorded.

    An unusable report (no terminal state, a success without a result, or a result too large to travel inline) ends the
    task as failed: if the forwarder refused it, the agent would repeat it for ever.
    """
    timings = dict(lease.timings) if lease else {}
    timings["returned_at"] = returned_at
    for name, at in (("started_at", spec.started_at), ("ended_at", spec.ended_at)):
        if (known := clean_time(at, now=returned_at)) is not None:
            timings[name] = known
    blob = spec.result_blob
    is_inline = spec.state is TaskState.SUCCESS and spec.result is not None and blob is None
    result = TaskResult(
        task_id=spec.task_id,
        endpoint_id=endpoint_id,
        attempt=min(spec.attempt, lease.attempt) if lease else spec.attempt,
        state=spec.state,
        reporter=Reporter.AGENT,
        result=frames[spec.result] if is_inline and spec.result is not None else None,
        details=clean_details(spec.details, now=returned_at) if spec.details else {},
        timings=timings,
        task_group_id=lease.task_group_id if lease else "",
        owner_id=lease.owner_id if lease else "",
    )
    if result.result is not None:
        size_bytes = len(result.result)
        too_large = f"a result of {size_bytes:,} bytes inline, where only {max_inline_bytes:,} are allowed"
        return result if size_bytes <= max_inline_bytes else _malformed(result, too_large)
    if spec.state is TaskState.SUCCESS and spec.result is None and blob is not None and is_sha256(blob.sha256):
        result = msgspec.structs.replace(result, result_ref=BlobRef(blob.blob_key, blob.size_bytes, blob.sha256))
        return check_blob(result, owner_id=lease.owner_id) if lease else result
    if spec.state in _AGENT_FAILURES and spec.error is not None:
        error = clean_error(spec.error, endpoint_id=endpoint_id, attempt=spec.attempt)
        failed = msgspec.structs.replace(result, error=error)
        return dead_lettered(failed) if spec.exhausted and spec.state is TaskState.FAILED else failed
    return _malformed(result)


def dead_lettered(result: TaskResult) -> TaskResult:
    """The result of a task without attempts left, each of which killed the worker, manager or endpoint that ran it.

    The error keeps its message. The hint says how to retry or discard the dead letter.
    """
    assert result.error is not None
    again = f"`farcall tasks retry {result.task_id}` runs it again as a new task"
    if result.error.sealed is not None:
        again = "submit the sealed call again: it runs as this task only"
    hint = (
        f"{result.error.hint} When the cause is gone, {again}; `farcall tasks discard {result.task_id}` forgets its "
        "arguments."
    )
    error = dataclasses.replace(result.error, code=TaskDeadLettered.code, hint=hint.lstrip())
    # The reporter is the forwarder for every dead letter: it alone applies this rule.
    return msgspec.structs.replace(result, state=TaskState.DEAD_LETTERED, reporter=Reporter.FORWARDER, error=error)


def check_blob(result: TaskResult, *, owner_id: str) -> TaskResult:
    """The result, or a failure if its blob is not the task owner's: agents may not give away blobs of others."""
    ref = result.result_ref
    return result if ref is None or ref.blob_key == blob_key(owner_id, ref.sha256) else _malformed(result)


def _malformed(result: TaskResult, problem: str = "a result that the protocol does not allow") -> TaskResult:
    error = ErrorRecord(
        code="RESULT_MALFORMED",
        message=f"The endpoint reported {problem}.",
        hint="Upgrade the endpoint's software, then run the task again.",
        fault=Fault.PEER,
        attempt=result.attempt,
        endpoint_id=result.endpoint_id,
    )
    return msgspec.structs.replace(result, state=TaskState.FAILED, result=None, result_ref=None, error=error)


def recorded_result(task: Task, *, endpoint_id: str) -> TaskResult:
    """The result that the database has, for a queue that still leases the task."""
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
    """The result of a task that may have started and may not start again."""
    error = ErrorRecord(
        code=TaskLost.code,
        message=reason,
        hint="The function is marked idempotent=False, so Farcall did not start it again. Check what it did, "
        "then submit it again if it should run.",
        fault=Fault.PEER,
        attempt=attempt,
        endpoint_id=endpoint_id,
    )
    return _declared(task_id, endpoint_id, attempt, TaskState.LOST, error)


def cancelled(task_id: str, *, endpoint_id: str, attempt: int) -> TaskResult:
    """The result of a task that was cancelled before it reached its endpoint."""
    error = ErrorRecord(
        code=TaskCancelled.code,
        message="The task was cancelled before it reached its endpoint.",
        fault=Fault.CALLER,
        endpoint_id=endpoint_id,
    )
    return _declared(task_id, endpoint_id, attempt, TaskState.CANCELLED, error)


def unknown_function(task: QueuedTask, function_id: str, *, endpoint_id: str, attempt: int) -> TaskResult:
    """The result of a task of which a function, its own or one that it calls, was deleted or changed before it could
    run."""
    error = ErrorRecord(
        code="FUNCTION_UNKNOWN",
        message=f"The function {function_id} was deleted or replaced after the task had been submitted.",
        hint="Register the function again and submit the task with its new id.",
        fault=Fault.CALLER,
        endpoint_id=endpoint_id,
    )
    return _declared(task.task_id, endpoint_id, attempt, TaskState.FAILED, error)


def cannot_contain(task: QueuedTask, environment: Environment, *, endpoint_id: str, attempt: int) -> TaskResult:
    """The result of a task with an environment, of its own or of a function that it calls, of a technology that the
    agent does not report: it would run it outside, or not at all."""
    error = ErrorRecord(
        code=EndpointIncompatible.code,
        message=f"The task requires environment {environment.label} ({environment.type}), and its endpoint does not "
        f"run {environment.type} any more.",
        hint="Submit it to another endpoint, or without the environment.",
        fault=Fault.PEER,
        endpoint_id=endpoint_id,
    )
    return _declared(task.task_id, endpoint_id, attempt, TaskState.FAILED, error)


def unknown_task(task: QueuedTask, *, endpoint_id: str, attempt: int) -> TaskResult:
    """The result of a queued task whose arguments are not in the database."""
    error = ErrorRecord(
        code=TaskUnknown.code,
        message="The arguments of the task are not in the database any more.",
        hint="Submit the task again.",
        fault=Fault.US,
        endpoint_id=endpoint_id,
    )
    return _declared(task.task_id, endpoint_id, attempt, TaskState.FAILED, error)


def reaped_result(leased: LeasedTask, *, endpoint_id: str) -> TaskResult:
    """The result of a task whose last lease expired."""
    task = leased.task
    if leased.cancel_requested:
        error = ErrorRecord(
            code=TaskCancelled.code,
            message="The task was cancelled while its endpoint was disconnected.",
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
        reasons=("the endpoint disconnected while it had the task",) * min(leased.attempt, task.options.max_attempts),
    )
    return dead_lettered(_declared(task.task_id, endpoint_id, leased.attempt, TaskState.FAILED, error))


def _declared(task_id: str, endpoint_id: str, attempt: int, state: TaskState, error: ErrorRecord) -> TaskResult:
    return TaskResult(
        task_id=task_id, endpoint_id=endpoint_id, attempt=attempt, state=state, reporter=Reporter.FORWARDER, error=error
    )
