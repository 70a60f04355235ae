"""Submit routes: tasks, and uploads of large payloads."""

from typing import Final

from farcall_common.errors import FarcallError, Forbidden, TargetInfeasible
from farcall_common.qos_report import InfeasibleTarget
from farcall_common.wire.ids import new_id
from farcall_lambdas.answers import status_of
from farcall_lambdas.models.fields import Id
from farcall_lambdas.models.tasks import (
    BlobGranted,
    RequestBlob,
    Submit,
    SubmitAnswer,
    SubmitV2,
    SubmitV2Answer,
    SubmitV2Result,
    SubmitWarning,
    TaskAnswer,
)
from farcall_lambdas.routes.call import Call, CurrentCall, new_router, no_result_queue
from farcall_lambdas.routes.tasks import task_answer
from farcall_lambdas.services.limits import check_count
from farcall_lambdas.services.submit import Submitted

router = new_router()

#: Characters of the reason why a task is refused: each task of a request has one.
_REASON_CHARACTERS: Final = 300


@router.post("/v3/endpoints/<endpoint_id>/submit", summary="Submit tasks to an endpoint", tags=["tasks"])
def submit(endpoint_id: Id, body: Submit, call: CurrentCall) -> SubmitAnswer:
    if body.create_queue and call.is_globus_client:
        raise no_result_queue()  # its Executor would wait for results at a queue, and fail after its tasks have run
    call.count(sum(map(len, body.tasks.values())))
    submitted = call.services.submit.submit(call.identity, endpoint_id, body)
    results = _results(submitted, call)
    return SubmitAnswer(
        request_id=call.request_id,
        task_group_id=submitted.task_group_id,
        endpoint_id=endpoint_id,
        tasks={function_id: list(task_ids) for function_id, task_ids in submitted.tasks.items()},
        results=results or None,
        results_left_out=len(submitted.memoized) - len(results) or None,
        warnings=[_warning(reference, target) for reference, target in submitted.infeasible.items()] or None,
    )


@router.post("/v2/submit", summary="Submit tasks to several endpoints (older form)", tags=["tasks"])
def submit_v2(body: SubmitV2, call: CurrentCall) -> SubmitV2Answer:
    """Tasks of one function for one endpoint are accepted or refused together; each task says which. They count as one
    request."""
    call.count(len(body.tasks))
    check_count(len(body.tasks), call.settings)
    group_id = body.task_group_id or new_id()
    parts: dict[tuple[str, str], list[int]] = {}
    for position, (function_id, endpoint_id, _) in enumerate(body.tasks):
        parts.setdefault((function_id, endpoint_id), []).append(position)
    results: dict[int, SubmitV2Result] = {}
    for (function_id, endpoint_id), positions in parts.items():
        payloads = [body.tasks[position][2] for position in positions]
        outcome = _submit_part(call, body, group_id, function_id, endpoint_id, payloads, counts=bool(results))
        results |= zip(positions, outcome, strict=True)
    accepted = all(result.task_uuid for result in results.values())
    return SubmitV2Answer(
        response="success" if accepted else "batch",
        task_group_id=group_id,
        results=[results[position] for position in range(len(body.tasks))],
    )


@router.post("/v3/blobs", summary="Request the upload of a large payload", tags=["blobs"])
def grant_blob(body: RequestBlob, call: CurrentCall) -> BlobGranted:
    ref, url, headers = call.services.blobs.grant_upload(call.identity, size_bytes=body.size_bytes, sha256=body.sha256)
    return BlobGranted(blob_key=ref.blob_key, upload_url=url, headers=dict(headers))


def _results(submitted: Submitted, call: Call) -> dict[str, TaskAnswer]:
    views = call.services.results.views(submitted.memoized, takes_refs=call.takes_refs)
    return {task_id: task_answer(view, call) for task_id, view in views.items()}


def _warning(reference: str, target: InfeasibleTarget) -> SubmitWarning:
    return SubmitWarning(code=TargetInfeasible.code, function_id=reference, message=target.reason, hint=target.fix)


def _submit_part(
    call: Call, body: SubmitV2, group_id: str, function_id: str, endpoint_id: str, payloads: list[str], *, counts: bool
) -> list[SubmitV2Result]:
    shared = body.model_dump(exclude={"tasks", "task_group_id"})
    wanted = Submit.model_validate({**shared, "task_group_id": group_id, "tasks": {function_id: payloads}})
    try:
        if counts:
            call.services.admission.count(call.identity)
        submitted = call.services.submit.submit(call.identity, endpoint_id, wanted)
    except FarcallError as error:
        if isinstance(error, Forbidden):
            call.services.account.note_refusal(call.identity, error, route="POST /v2/submit")
        status = status_of(error)
        if status >= 500:
            raise
        reason = error.record.message[:_REASON_CHARACTERS]
        refused = SubmitV2Result(status="Failed", task_uuid=None, http_status_code=status, reason=reason)
        return [refused] * len(payloads)
    return [
        SubmitV2Result(status="success", task_uuid=task_id, http_status_code=200, reason=None)
        for task_id in submitted.tasks[function_id]
    ]
