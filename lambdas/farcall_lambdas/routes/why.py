"""The route that explains a task."""

from farcall_common.store.model import QueueState
from farcall_lambdas.models.fields import Id
from farcall_lambdas.models.why import WhyAnswer, WhyEndpoint
from farcall_lambdas.routes.call import CurrentCall, new_router
from farcall_lambdas.routes.endpoints import endpoint_details
from farcall_lambdas.services.why import Situation, Why

router = new_router()


@router.get("/v3/tasks/<task_id>/why", summary="Why a task is where it is", tags=["tasks"])
def get_why(task_id: Id, call: CurrentCall) -> WhyAnswer:
    return _answer(call.services.why.why(call.identity, task_id))


def _answer(why: Why) -> WhyAnswer:
    situation = why.situation
    position = situation.position
    queued = position is not None and position.state is QueueState.QUEUED
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
        endpoint=_endpoint(situation),
    )


def _endpoint(situation: Situation) -> WhyEndpoint | None:
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
    )
