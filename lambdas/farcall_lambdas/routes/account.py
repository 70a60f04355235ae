"""Account routes: identity and limits of the caller, task groups, audit log."""

from typing import Annotated

from aws_lambda_powertools.event_handler.openapi.params import Query

from farcall_lambdas.identity import Identity
from farcall_lambdas.models.account import AuditEntryShape, AuditList, GroupEntry, GroupList, TokenShape, WhoAmI
from farcall_lambdas.models.fields import Id, Instant, NumberCursor, decode_cursor, encode_cursor, instant
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
        token=_token(identity),
    )


def _token(identity: Identity) -> TokenShape | None:
    grant = identity.grant
    if grant is None:
        return None
    return TokenShape(
        token_id=identity.token_id,
        name=grant.name,
        scopes=sorted(grant.scopes),
        endpoints=None if grant.endpoints is None else sorted(grant.endpoints),
        functions=None if grant.functions is None else sorted(grant.functions),
    )


@router.get("/v3/groups", summary="List your task groups, newest first", tags=["tasks"])
def list_groups(
    call: CurrentCall,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    before: Annotated[Id | None, Query()] = None,
) -> GroupList:
    groups = call.services.results.groups(call.identity, before=before, limit=limit)
    call.count(len(groups))
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


@router.get("/v3/audit", summary="What you did, and what others did to yours, oldest first", tags=["account"])
def list_audit(
    call: CurrentCall,
    since: Annotated[Instant | None, Query()] = None,
    until: Annotated[Instant | None, Query()] = None,
    after: Annotated[NumberCursor | None, Query()] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 1000,
) -> AuditList:
    place = decode_cursor(after)
    entries, may_have_more = call.services.account.changes(
        call.identity,
        since=instant(since),
        until=instant(until),
        after=place and (place[0], int(place[1])),
        limit=limit,
    )
    call.count(len(entries))
    shown = [
        AuditEntryShape(
            at=each.at.timestamp(),
            identity_id=each.identity_id,
            action=each.action,
            object_id=each.object_id,
            owner_id=each.owner_id,
            detail=dict(each.detail),
        )
        for each in entries
    ]
    following = encode_cursor(entries[-1].at, entries[-1].audit_id) if may_have_more else None
    return AuditList(entries=shown, next=following)
