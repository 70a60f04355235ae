"""Usage: what tasks have used, for their submitters, for owners of endpoints and for administrators."""

from __future__ import annotations

import datetime as dt
from collections.abc import Collection, Sequence
from typing import Any, Final, Literal

from farcall_common.errors import Forbidden
from farcall_common.store.model import Usage, UsageBy
from farcall_lambdas.identity import Identity
from farcall_lambdas.services.base import Service

#: Whose usage: of tasks of the caller, of all tasks on endpoints of the caller, of all tasks.
UsageOf = Literal["mine", "endpoints", "all"]

_DAY: Final = dt.timedelta(days=1)


class UsageService(Service):
    """Sums of usage that the caller may see."""

    def read(
        self,
        identity: Identity,
        by: Collection[UsageBy],
        *,
        of: UsageOf,
        since: dt.date | None,
        until: dt.date | None,
        endpoint_id: str | None,
        after: int,
        limit: int,
    ) -> Sequence[Usage]:
        """Sums from the day ``since`` (the first of this month) to before the day ``until`` (tomorrow), in UTC.

        :raises Forbidden: for all tasks, if the caller is no administrator.
        """
        if of == "all" and not identity.is_admin:
            raise Forbidden(
                "Only administrators of the deployment see the usage of all tasks.",
                hint="Ask for that of your own tasks (mine), or of your endpoints (endpoints).",
            )
        whose: dict[str, Any] = {
            "mine": {"owner_ids": identity.identity_set},
            "endpoints": {"endpoint_owner_ids": identity.identity_set},
            "all": {},
        }[of]
        today = self._now().date()
        return self._stores.usage.read_usage(
            by,
            since=since or today.replace(day=1),
            until=until or today + _DAY,
            endpoint_id=endpoint_id,
            after=after,
            limit=limit,
            **whose,
        )
