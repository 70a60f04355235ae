"""State transitions of tasks: the effect of reports on the records. Shared by the adapter and its fake."""

from __future__ import annotations

import dataclasses
import datetime as dt
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from farcall_common.errors import EndpointDeleted, ErrorRecord, InvalidRequest, TaskCancelled
from farcall_common.graphs import STAGE_CALLS
from farcall_common.limits import MAX_TRANSITIONS
from farcall_common.store.model import Task, TaskEvent, TaskResult
from farcall_common.wire.states import LEGAL_TRANSITIONS, REPORTERS, Reporter, TaskState


@dataclasses.dataclass(frozen=True)
class TaskProgress:
    """The fields of a task's record that decide whether a report still counts."""

    state: TaskState
    attempt: int
    endpoint_id: str
    owner_id: str
    task_group_id: str


def as_received(task: Task, memoized: Mapping[str, Task] | None, *, now: dt.datetime) -> Task:
    """The record of a new task: without progress and result, unless its result is memoized.

    It is submitted ``now`` by default. A task with a memoized result is not memoized itself: repeated calls do not
    enlarge the index.
    """
    source = (memoized or {}).get(task.task_id)
    if source is None and _is_fresh(task):
        return task  # The usual case: copying every task of a batch is a third of what a submit costs.
    at = task.submitted_at or now
    fresh = msgspec.structs.replace(
        task,
        state=TaskState.RECEIVED,
        attempt=0,
        result=None,
        result_ref=None,
        error=None,
        submitted_at=at,
        finished_at=None,
    )
    if source is None:
        return fresh
    return msgspec.structs.replace(
        fresh,
        state=TaskState.SUCCESS,
        result=source.result,
        result_ref=source.result_ref,
        details={
            **source.details,
            "memoized_from": source.task_id,
            "memoized_endpoint_id": source.endpoint_id,
        },
        finished_at=at,
        timings={**task.timings, "recorded_at": at.timestamp()},
        memo_key=None,
    )


def _is_fresh(task: Task) -> bool:
    """Whether a task has no field that its record would reset."""
    return (
        task.submitted_at is not None
        and task.state is TaskState.RECEIVED
        and task.attempt == 0
        and task.result is None
        and task.result_ref is None
        and task.error is None
        and task.finished_at is None
    )


def check_transitions(events: Iterable[TaskEvent]) -> None:
    """Raise InvalidRequest for a terminal state (those come as results), or one that its reporter may not report."""
    for event in events:
        if event.state.is_terminal or event.reporter not in REPORTERS[event.state]:
            raise InvalidRequest(f"the {event.reporter} may not move a task to {event.state}")


def within_limit(events: Iterable[TaskEvent], reported: Mapping[tuple[str, int], int]) -> list[TaskEvent]:
    """The events without an agent's reports over MAX_TRANSITIONS of one attempt of a task. ``reported`` counts those
    that are recorded, by task id and attempt."""
    counts = Counter(reported)
    kept = []
    for event in events:
        if event.reporter is Reporter.AGENT:
            counts[event.task_id, event.attempt] += 1
            if counts[event.task_id, event.attempt] > MAX_TRANSITIONS:
                continue
        kept.append(event)
    return kept


def check_results(results: Iterable[TaskResult]) -> None:
    """Raise InvalidRequest for a state that is not terminal, or one that its reporter may not report."""
    for result in results:
        if not result.state.is_terminal or result.reporter not in REPORTERS[result.state]:
            raise InvalidRequest(f"the {result.reporter} may not end a task as {result.state}")


def apply_events(known: Mapping[str, TaskProgress], events: Sequence[TaskEvent]) -> dict[str, TaskProgress]:
    """The new progress of each task that the events change, applied in order.

    The attempt only rises, and only while the task is open. A report of an earlier attempt moves nothing; attempt 0
    is a report about the task rather than about one of its attempts.
    """
    changed: dict[str, TaskProgress] = {}
    for event in events:
        progress = changed.get(event.task_id) or known.get(event.task_id)
        if progress is None or progress.state.is_terminal or 0 < event.attempt < progress.attempt:
            continue
        state = event.state if event.state in LEGAL_TRANSITIONS[progress.state] else progress.state
        attempt = max(event.attempt, progress.attempt)
        if (state, attempt) != (progress.state, progress.attempt):
            changed[event.task_id] = dataclasses.replace(progress, state=state, attempt=attempt)
    return changed


def first_results(known: Mapping[str, TaskProgress], results: Sequence[TaskResult]) -> dict[str, TaskResult]:
    """The results that end their task, completed with its group and owner; later and foreign ones are left out."""
    first: dict[str, TaskResult] = {}
    for result in results:
        progress = known.get(result.task_id)
        if (
            progress is not None
            and result.task_id not in first
            and result.endpoint_id == progress.endpoint_id
            and result.state in LEGAL_TRANSITIONS[progress.state]
        ):
            first[result.task_id] = completed(result, task_group_id=progress.task_group_id, owner_id=progress.owner_id)
    return first


def completed(result: TaskResult, *, task_group_id: str, owner_id: str) -> TaskResult:
    """A result with the group and the owner of its task, which its reporter usually knows."""
    if (result.task_group_id, result.owner_id) == (task_group_id, owner_id):
        return result
    return msgspec.structs.replace(result, task_group_id=task_group_id, owner_id=owner_id)


def cancelled_before_dispatch(task_id: str, endpoint_id: str, error: ErrorRecord | None = None) -> TaskResult:
    """The result of a task that was removed from the queue before it was dispatched; ``error`` says why, unless its
    owner cancelled it."""
    error = error or TaskCancelled("the task was cancelled before it started", hint="").record
    return TaskResult(task_id, endpoint_id, 0, TaskState.CANCELLED, Reporter.API, error=error)


def endpoint_deleted(task_id: str, endpoint_id: str, *, reporter: Reporter) -> TaskResult:
    """The result of an open task whose endpoint was deleted."""
    error = EndpointDeleted("the endpoint of the task was deleted")
    return TaskResult(task_id, endpoint_id, 0, TaskState.CANCELLED, reporter, error=error.record)


def result_event(result: TaskResult, *, at: dt.datetime) -> TaskEvent:
    """The event of a task's result."""
    return TaskEvent(
        result.task_id, result.state, result.reporter, at, attempt=result.attempt, detail=result_detail(result)
    )


def result_detail(result: TaskResult) -> Mapping[str, object]:
    """The detail of that event."""
    error = result.error
    detail: dict[str, object] = {"code": error.code} if error else {}
    if error and error.reasons:
        detail["reasons"] = list(error.reasons)
    if STAGE_CALLS in result.details:
        detail[STAGE_CALLS] = result.details[STAGE_CALLS]
    return detail
