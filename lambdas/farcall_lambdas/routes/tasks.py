"""Task routes: read, explain, cancel, retry, discard."""

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

import msgspec
from aws_lambda_powertools import Logger
from aws_lambda_powertools.event_handler.openapi.params import Query

from farcall_common.errors import ErrorRecord, Fault, ResultTooLarge, TaskUnknown
from farcall_common.store.model import QueueState, Task
from farcall_common.wire.messages import OutputText, OutputWanted
from farcall_common.wire.states import TaskState
from farcall_lambdas.logs import SERVICE
from farcall_lambdas.models.endpoints import CancelEndpointTasks, EndpointTaskEntry, EndpointTasks
from farcall_lambdas.models.fields import Cursor, Id, IdBeginning, Instant, decode_cursor, encode_cursor, instant
from farcall_lambdas.models.qos import InfeasibleShape, QosShape
from farcall_lambdas.models.tasks import (
    BatchOutput,
    BatchStatus,
    CancelAnswer,
    CancelBatchAnswer,
    CancelEndpointTasksAnswer,
    DiscardAnswer,
    FoundIds,
    OutputAnswer,
    OutputBatchAnswer,
    ProgressShape,
    ResultRefShape,
    Retry,
    RetryAnswer,
    StageShape,
    StagingShape,
    StreamShape,
    TaskAnswer,
    TaskBatchAnswer,
    TaskEntry,
    TaskEvents,
    TaskEventShape,
    TaskGroupAnswer,
    TaskGroupEntry,
    TaskIds,
    TaskList,
    WhyAnswer,
    WhyEndpoint,
)
from farcall_lambdas.routes.call import Call, CurrentCall, new_router
from farcall_lambdas.routes.endpoints import endpoint_details, environment_entry
from farcall_lambdas.services.cancel import Cancellation
from farcall_lambdas.services.limits import ENTRIES_PER_TOKEN
from farcall_lambdas.services.output import NO_ANSWER, Output
from farcall_lambdas.services.results import TaskView
from farcall_lambdas.services.why import Situation, Why, environment_states, infeasible_target

logger = Logger(service=SERVICE, child=True)

router = new_router()

#: Unknown tasks in one answer to a client of Globus Compute, which gets an entry for each and asks for the rest again.
_UNKNOWN_SHOWN: Final = 1_000

#: What a request for output counts for in addition if an endpoint does not answer.
_UNANSWERED_TOKENS: Final = 10

_UNREADABLE: Final = ErrorRecord(
    code="RESULT_MALFORMED",
    message="The record of the task cannot be shown.",
    hint="Upgrade the endpoint's software, then run the task again.",
    fault=Fault.PEER,
)


@router.get("/v2/tasks/<task_id>", summary="Get a task", tags=["tasks"])
def get_task(task_id: Id, call: CurrentCall) -> TaskAnswer:
    return task_answer(call.services.results.get(call.identity, task_id, takes_refs=call.takes_refs), call)


@router.post("/v2/batch_status", summary="Get many tasks", tags=["tasks"])
def get_task_batch(body: BatchStatus, call: CurrentCall) -> TaskBatchAnswer:
    call.count(len(body.task_ids))
    views = call.services.results.get_many(call.identity, body.task_ids, takes_refs=call.takes_refs)
    unknown = [task_id for task_id, view in views.items() if view is None]
    results = {task_id: task_answer(view, call) for task_id, view in views.items() if view is not None}
    if call.is_globus_client:  # it knows no other form
        results |= {task_id: _unknown(task_id) for task_id in unknown[:_UNKNOWN_SHOWN]}
        unknown = []
    return TaskBatchAnswer(results=results, unknown=unknown or None)


@router.post("/v3/batch_output", summary="Read output of tasks, running or not", tags=["tasks"])
def get_output(body: BatchOutput, call: CurrentCall) -> OutputBatchAnswer:
    """Takes up to 3 s. Output stays at the endpoint, for a day after the end of a task; see ``output_bytes`` of a
    submit."""
    # An answer has 512 KiB at most, which pass through agents and a forwarder; ten tasks are one token.
    call.count(ENTRIES_PER_TOKEN // 10 * len(body.tasks))
    wanted = [OutputWanted(**dict(each)) for each in body.tasks]
    found = call.services.output.read(call.identity, wanted)
    if any(output is not None and output.reason == NO_ANSWER for output in found.values()):
        call.count(_UNANSWERED_TOKENS * ENTRIES_PER_TOKEN)  # it has kept a process of the API busy for seconds
    unknown = [task_id for task_id, output in found.items() if output is None]
    results = {task_id: _output(output) for task_id, output in found.items() if output is not None}
    return OutputBatchAnswer(results=results, unknown=unknown or None)


@router.get("/v2/taskgroup/<task_group_id>", summary="List your tasks of a group", tags=["tasks"])
def get_task_group(task_group_id: Id, call: CurrentCall) -> TaskGroupAnswer:
    tasks = call.services.results.group(call.identity, task_group_id)
    call.count(len(tasks))
    return TaskGroupAnswer(
        taskgroup_id=task_group_id,
        tasks=[TaskGroupEntry(id=task.task_id, created_at=_globus_time(task)) for task in tasks],
    )


@router.get("/v3/tasks", summary="List your tasks, newest first", tags=["tasks"])
def list_tasks(
    call: CurrentCall,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    state: Annotated[TaskState | None, Query()] = None,
    endpoint_id: Annotated[Id | None, Query()] = None,
    since: Annotated[Instant | None, Query()] = None,
    until: Annotated[Instant | None, Query()] = None,
    before: Annotated[Cursor | None, Query()] = None,
) -> TaskList:
    """``dead-lettered`` lists those that were not discarded; with ``endpoint_id``, the endpoint's owner sees those of
    all users."""
    tasks, names, may_have_more = call.services.results.newest(
        call.identity,
        state=state,
        endpoint_id=endpoint_id,
        since=instant(since),
        until=instant(until),
        before=decode_cursor(before),
        limit=limit,
    )
    call.count(len(tasks))
    last = tasks[-1] if may_have_more else None
    next_page = encode_cursor(last.submitted_at, last.task_id) if last and last.submitted_at else None
    return TaskList(tasks=[_entry(task, call, names) for task in tasks], next=next_page)


@router.get("/v3/ids", summary="Find ids of your tasks or groups by their first digits", tags=["tasks"])
def find_ids(
    call: CurrentCall, beginning: Annotated[IdBeginning, Query()], kind: Annotated[Literal["task", "group"], Query()]
) -> FoundIds:
    return FoundIds(ids=list(call.services.results.find_ids(call.identity, kind, beginning)))


@router.get("/v3/tasks/<task_id>/events", summary="The history of a task", tags=["tasks"])
def get_task_events(
    task_id: Id,
    call: CurrentCall,
    limit: Annotated[int, Query(ge=1, le=1000)] = 1000,
    after: Annotated[int, Query(ge=0, lt=2**31)] = 0,
) -> TaskEvents:
    found, following = call.services.results.events(call.identity, task_id, after=after, limit=limit)
    call.count(len(found))
    events = [
        TaskEventShape(
            state=event.state.value,
            reporter=event.reporter.value,
            at=event.at.timestamp(),
            attempt=event.attempt,
            detail=dict(event.detail),
        )
        for event in found
    ]
    return TaskEvents(task_id=task_id, events=events, next=following)


@router.get("/v3/tasks/<task_id>/why", summary="Why a task is where it is", tags=["tasks"])
def get_why(task_id: Id, call: CurrentCall) -> WhyAnswer:
    return _why_answer(call.services.why.why(call.identity, task_id))


@router.post("/v3/tasks/<task_id>/cancel", summary="Cancel a task", tags=["tasks"])
def cancel_task(task_id: Id, call: CurrentCall) -> CancelAnswer:
    return _cancelled(task_id, call.services.cancel.cancel(call.identity, task_id))


@router.post("/v3/tasks/cancel", summary="Cancel many tasks", tags=["tasks"])
def cancel_tasks(body: TaskIds, call: CurrentCall) -> CancelBatchAnswer:
    call.count(len(body.task_ids))
    cancelled = call.services.cancel.cancel_all(call.identity, body.task_ids)
    return CancelBatchAnswer(results={task_id: _cancelled(task_id, each) for task_id, each in cancelled.items()})


@router.get("/v3/endpoints/<endpoint_id>/tasks", summary="List open tasks of an endpoint of yours", tags=["endpoints"])
def list_endpoint_tasks(
    endpoint_id: Id,
    call: CurrentCall,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    submitter: Annotated[Id | None, Query()] = None,
    function_id: Annotated[Id | None, Query()] = None,
    after: Annotated[Id | None, Query()] = None,
) -> EndpointTasks:
    tasks = call.services.endpoints.open_tasks(
        call.identity, endpoint_id, submitter=submitter, function_id=function_id, after=after, limit=limit
    )
    call.count(len(tasks))
    now = call.services.endpoints.now()
    entries = [
        EndpointTaskEntry(
            task_id=task.task_id,
            submitter=task.owner_id,
            function_id=task.function_id,
            function_version=task.function_version,
            status=task.state.value,
            age_s=max(0.0, (now - task.submitted_at).total_seconds()) if task.submitted_at else 0.0,
        )
        for task in tasks
    ]
    return EndpointTasks(tasks=entries, next=tasks[-1].task_id if len(tasks) == limit else None)


@router.post(
    "/v3/endpoints/<endpoint_id>/tasks/cancel", summary="Cancel tasks of an endpoint of yours", tags=["endpoints"]
)
def cancel_endpoint_tasks(endpoint_id: Id, body: CancelEndpointTasks, call: CurrentCall) -> CancelEndpointTasksAnswer:
    call.count(len(body.task_ids or ()))
    cancelled, following = call.services.endpoints.cancel_tasks(call.identity, endpoint_id, body)
    if body.task_ids is None:
        call.count(len(cancelled))
    return CancelEndpointTasksAnswer(
        results={task_id: _cancelled(task_id, each) for task_id, each in cancelled.items()}, next=following
    )


@router.post("/v3/tasks/<task_id>/retry", summary="Run a finished task again, as a new task", tags=["tasks"])
def retry_task(task_id: Id, body: Retry, call: CurrentCall) -> RetryAnswer:
    submitted = call.services.retry.retry(call.identity, task_id, as_task_id=body.task_id)
    [[new_id]] = submitted.tasks.values()
    return RetryAnswer(task_id=new_id, retry_of=task_id, task_group_id=submitted.task_group_id)


@router.post("/v3/tasks/<task_id>/discard", summary="Discard a dead letter and its arguments", tags=["tasks"])
def discard_task(task_id: Id, call: CurrentCall) -> DiscardAnswer:
    call.services.retry.discard(call.identity, task_id)
    return DiscardAnswer(task_id=task_id)


def task_answer(view: TaskView, call: Call) -> TaskAnswer:
    """A task as an answer shows it. One that cannot be shown has an error, so that the other tasks of the answer are
    shown: its endpoint reported what it has."""
    try:
        return _task_answer(view, call)
    except (TypeError, ValueError) as error:  # pydantic's are values' errors, too
        task_id = view.task.task_id
        logger.error("a task cannot be shown", task_id=task_id, exc_info=error)
        return _failed(task_id, _UNREADABLE)


def _task_answer(view: TaskView, call: Call) -> TaskAnswer:
    task = view.task
    error = task.error
    # Globus Compute's client reads results and exceptions only: other reasons become exceptions.
    otherwise = view.reason if call.is_globus_client else None
    return TaskAnswer(
        task_id=task.task_id,
        status=_status(task.state, call),
        result=view.result,
        result_ref=_result_ref(view),
        exception=_exception(error) if error else otherwise,
        completion_t=f"{task.finished_at.timestamp()}" if task.finished_at else None,
        reason=view.reason,
        details=_details(task, call),
        error=error.to_json() if error else None,
        task_group_id=task.task_group_id,
        endpoint_id=task.endpoint_id,
        function_id=task.function_id,
        function_version=task.function_version,
        attempt=task.attempt,
        timings=dict(task.timings),
        result_serializers=list(task.options.result_serializers) or None,
        retry_of=task.retry_of,
        environment=task.options.environment.label if task.options.environment else None,
        stages=[StageShape(**msgspec.structs.asdict(each)) for each in view.stages] or None,
        progress=ProgressShape(**vars(view.progress)) if view.progress else None,
        staging=StagingShape(**view.staging.to_json()) if view.staging else None,
        qos=QosShape.of(task.options.qos),
    )


def _output(output: Output) -> OutputAnswer:
    piece = output.piece
    return OutputAnswer(
        status=output.task.state.value,
        attempt=piece.attempt,
        stdout=_stream(piece.stdout),
        stderr=_stream(piece.stderr),
        complete=piece.complete,
        source=output.source,
        reason=output.reason,
        sealed=piece.sealed or None,
    )


def _stream(text: OutputText) -> StreamShape:
    return StreamShape.model_validate({"from": text.start, "next": text.next, "text": text.text})


def _exception(error: ErrorRecord) -> str:
    """An error as text. Programs for Globus Compute look for the name of its exception in it."""
    if error.code == ResultTooLarge.code:
        return f"MaxResultSizeExceeded: {error.message}"
    return error.traceback or error.message


def _status(state: TaskState, call: Call) -> str:
    """A Globus client waits without end for a task in a final state that is not among its own."""
    if call.is_globus_client and state.is_terminal and state is not TaskState.SUCCESS:
        return TaskState.FAILED.value
    return state.value


def _result_ref(view: TaskView) -> ResultRefShape | None:
    ref = view.result_ref
    if ref is None or view.url is None:
        return None
    return ResultRefShape(blob_key=ref.blob_key, size_bytes=ref.size_bytes, sha256=ref.sha256, url=view.url)


def _details(task: Task, call: Call) -> dict[str, Any]:
    """Details from the worker's report, with Globus Compute's transitions. Its clients warn if versions differ."""
    stages = {"execution-start": "started_at", "execution-end": "ended_at"}
    transitions = {name: task.timings[stage] for name, stage in stages.items() if stage in task.timings}
    if not task.details and not transitions:
        return {}
    workers = call.workers_of(task.endpoint_id) if call.is_globus_client else {}
    reported = task.details.get("task_transitions")
    reported = reported if isinstance(reported, dict) else {}
    return {**workers, **task.details, "task_transitions": {**reported, **transitions}}


def _unknown(task_id: str) -> TaskAnswer:
    return _failed(task_id, TaskUnknown(f"There is no task {task_id}.").record)


def _failed(task_id: str, error: ErrorRecord) -> TaskAnswer:
    return TaskAnswer(task_id=task_id, status=TaskState.FAILED.value, reason=error.message, error=error.to_json())


def _entry(task: Task, call: Call, names: Mapping[str, str]) -> TaskEntry:
    is_own = call.identity.owns(task.owner_id)
    return TaskEntry(
        task_id=task.task_id,
        status=task.state.value,
        task_group_id=task.task_group_id,
        endpoint_id=task.endpoint_id,
        function_id=task.function_id,
        function_version=task.function_version,
        attempt=task.attempt,
        submitted_at=task.submitted_at.timestamp() if task.submitted_at else None,
        finished_at=task.finished_at.timestamp() if task.finished_at else None,
        # The exception itself is for the client that waits for the task, and large for a list.
        error=dataclasses.replace(task.error, exception_data=None).to_json() if task.error else None,
        retry_of=task.retry_of,
        owner_id=None if is_own else task.owner_id,
        function_name=names.get(task.function_id) if is_own else None,
        endpoint_name=names.get(task.endpoint_id) if is_own else None,
        timings=dict(task.timings) or None,
    )


def _cancelled(task_id: str, cancellation: Cancellation) -> CancelAnswer:
    return CancelAnswer(
        task_id=task_id,
        outcome=cancellation.outcome,
        status=cancellation.state.value if cancellation.state else None,
    )


def _globus_time(task: Task) -> str:
    """UTC without a time zone, in microseconds: Globus Compute's form."""
    return task.submitted_at.strftime("%Y-%m-%dT%H:%M:%S.%f") if task.submitted_at else ""


def _why_answer(why: Why) -> WhyAnswer:
    situation = why.situation
    position = situation.position
    queued = position is not None and position.state is QueueState.QUEUED
    infeasible = infeasible_target(situation)
    return WhyAnswer(
        task_id=situation.task.task_id,
        reason=why.reason.value,
        text=why.text,
        state=situation.task.state.value,
        state_since=situation.since.timestamp(),
        state_age_s=max(0.0, (situation.now - situation.since).total_seconds()),
        expires_at=situation.expires_at.timestamp() if situation.may_expire else None,
        attempt=situation.task.attempt,
        queue_position=position.ahead if position and queued else None,
        queue_depth=position.depth if position else None,
        queue_submitters=position.submitters if position else None,
        endpoint=_why_endpoint(situation),
        qos=QosShape.of(situation.task.options.qos),
        infeasible=None if infeasible is None else InfeasibleShape(reason=infeasible.reason, fix=infeasible.fix),
    )


def _why_endpoint(situation: Situation) -> WhyEndpoint | None:
    endpoint = situation.endpoint
    if endpoint is None:
        return None
    return WhyEndpoint(
        endpoint_id=endpoint.endpoint_id,
        name=endpoint.name,
        status="online" if situation.online else "offline",
        seen_at=endpoint.seen_at.timestamp() if endpoint.seen_at else None,
        details=endpoint_details(endpoint),
        problem=endpoint.status.problem,
        reported_at=endpoint.status.reported_at,
        age_s=endpoint.status.age_s(now=situation.now.timestamp()),
        environments=[environment_entry(each, is_whole=True) for each in environment_states(situation)] or None,
    )
