"""The route that tells who did what."""

from typing import Annotated

from aws_lambda_powertools.event_handler.openapi.params import Query

from farcall_lambdas import cursor
from farcall_lambdas.models.audit import AuditEntryShape, AuditList
from farcall_lambdas.models.fields import Instant, NumberCursor
from farcall_lambdas.routes.call import CurrentCall, new_router

router = new_router()


@router.get("/v3/audit", summary="What you did, and what others did to yours, oldest first", tags=["account"])
def list_audit(
    call: CurrentCall,
    since: Annotated[Instant | None, Query()] = None,
    until: Annotated[Instant | None, Query()] = None,
    after: Annotated[NumberCursor | None, Query()] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 1000,
) -> AuditList:
    place = cursor.decode(after)
    entries = call.services.audit.since(
        call.identity,
        since=cursor.instant(since),
        until=cursor.instant(until),
        after=place and (place[0], int(place[1])),
        limit=limit,
    )
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
    is_full = len(entries) == limit
    return AuditList(entries=shown, next=cursor.encode(entries[-1].at, entries[-1].audit_id) if is_full else None)
