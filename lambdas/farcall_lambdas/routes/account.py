"""Routes about the caller: who that is, and its task groups."""

from typing import Annotated

from aws_lambda_powertools.event_handler.openapi.params import Query

from farcall_lambdas.models.account import GroupEntry, GroupList, WhoAmI
from farcall_lambdas.models.fields import Id
from farcall_lambdas.routes.call import CurrentCall, new_router

router = new_router()


@router.get("/v3/whoami", summary="Who you are, and the limits in force for you", tags=["account"])
def whoami(call: CurrentCall) -> WhoAmI:
    identity = call.identity
    return WhoAmI(
        identity_id=identity.identity_id,
        username=identity.username,
        linked=sorted(identity.identity_set - {identity.identity_id}),
        provider=identity.provider,
        limits=call.services.account.limits(identity),
    )


@router.get("/v3/groups", summary="List your task groups, newest first", tags=["tasks"])
def list_groups(
    call: CurrentCall,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    before: Annotated[Id | None, Query()] = None,
) -> GroupList:
    groups = call.services.account.groups(call.identity, before=before, limit=limit)
    entries = [
        GroupEntry(
            task_group_id=group.task_group_id,
            created_at=group.created_at.timestamp(),
            tasks=sum(group.states.values()),
            states={state.value: count for state, count in group.states.items()},
        )
        for group in groups
    ]
    return GroupList(groups=entries, next=entries[-1].task_group_id if len(entries) == limit else None)
