"""Usage route."""

import datetime as dt
from typing import Annotated

from aws_lambda_powertools.event_handler.openapi.params import Query
from pydantic import Field

from farcall_common.store.model import UsageBy
from farcall_lambdas.models.fields import Day, Id
from farcall_lambdas.models.usage import UsageEntry, UsageList
from farcall_lambdas.routes.call import CurrentCall, new_router
from farcall_lambdas.services.usage import UsageOf

router = new_router()

_BY = "|".join(UsageBy)


@router.get("/v3/usage", summary="What tasks have used, summed", tags=["account"])
def list_usage(
    call: CurrentCall,
    by: Annotated[str, Field(pattern=f"^({_BY})(,({_BY})){{0,4}}$"), Query()] = "day",
    of: Annotated[UsageOf, Query()] = "mine",
    since: Annotated[Day | None, Query()] = None,
    until: Annotated[Day | None, Query()] = None,
    endpoint_id: Annotated[Id | None, Query()] = None,
    after: Annotated[int, Query(ge=0, lt=2**31)] = 0,
    limit: Annotated[int, Query(ge=1, le=1000)] = 1000,
) -> UsageList:
    """``by`` has some of day, identity, endpoint, function and account, separated by commas. ``of`` is ``mine`` (your
    tasks), ``endpoints`` (those of all users on endpoints of yours), or ``all`` (administrators). From the day
    ``since`` (default: the first of this month) to before the day ``until``, in UTC."""
    found = call.services.usage.read(
        call.identity,
        {UsageBy(each) for each in by.split(",")},
        of=of,
        since=_date(since),
        until=_date(until),
        endpoint_id=endpoint_id,
        after=after,
        limit=limit,
    )
    call.count(len(found))
    entries = [
        UsageEntry(
            day=each.day.isoformat() if each.day else None,
            identity_id=each.owner_id,
            endpoint_id=each.endpoint_id,
            function_id=each.function_id,
            account=each.account,
            tasks=each.tasks,
            failed=each.failed,
            stages=each.stages,
            wall_s=each.wall_s,
            core_s=each.core_s,
            gpu_s=each.gpu_s,
        )
        for each in found
    ]
    return UsageList(usage=entries, next=after + limit if len(entries) == limit else None)


def _date(day: str | None) -> dt.date | None:
    return None if day is None else dt.date.fromisoformat(day)
