"""Account: limits and quotas of the caller, and the audit log."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
from collections.abc import Sequence
from typing import Final

from aws_lambda_powertools import Logger

from farcall_common.errors import Forbidden, Unavailable
from farcall_common.store.model import FORBIDDEN, AuditEntry
from farcall_lambdas.identity import Identity
from farcall_lambdas.logs import SERVICE
from farcall_lambdas.models.account import Limits, Quota
from farcall_lambdas.services.base import SOURCE_IP, Service

logger = Logger(service=SERVICE, child=True)

#: Refusals of one caller at objects of one owner that are audited in an hour.
_REFUSALS_AUDITED: Final = 10


class AccountService(Service):
    """Limits, quotas and audit entries of the caller."""

    def limits(self, identity: Identity) -> Limits:
        """The limits of the caller, and how much of each quota is used."""
        owner_id, settings, stores = identity.identity_id, self._settings, self._stores
        functions, endpoints, containers = settings.max_functions, settings.max_endpoints, settings.max_containers
        return Limits(
            functions=Quota(used=stores.functions.count_functions(owner_id, limit=functions), limit=functions),
            endpoints=Quota(used=stores.endpoints.count_endpoints(owner_id, limit=endpoints), limit=endpoints),
            containers=Quota(used=stores.functions.count_containers(owner_id, limit=containers), limit=containers),
            max_payload_bytes=settings.max_payload_bytes,
            max_inline_bytes=settings.max_inline_bytes,
            max_request_bytes=settings.max_request_bytes,
            max_tasks_per_request=settings.max_tasks_per_request,
            max_queue_depth=settings.max_queue_depth,
            rate_per_s=settings.rate_per_s,
            rate_burst=settings.rate_burst,
            retention_days=settings.retention_days,
        )

    def changes(
        self,
        identity: Identity,
        *,
        since: dt.datetime | None,
        until: dt.datetime | None,
        after: tuple[dt.datetime, int] | None,
        limit: int,
    ) -> tuple[Sequence[AuditEntry], bool]:
        """Audit entries of changes by the caller and the caller's service accounts, and by others to objects of the
        caller, from ``since`` to before ``until`` and after ``after``, oldest first, as many as fit an answer; and
        whether there may be more. The addresses of others are left out: only the operator may read them."""
        accounts = {each.account_id for each in self._stores.tokens.list_accounts(identity.identity_set)}
        found = self._stores.audit.list_entries(
            identity.identity_set | accounts, since=since, until=until, after=after, limit=limit
        )
        shown = self._fitting(
            [each if identity.owns(each.identity_id) else _without_address(each) for each in found],
            shown=lambda each: dict(each.detail),
        )
        return shown, len(found) == limit or len(shown) < len(found)

    def note_refusal(self, identity: Identity, refusal: Forbidden, *, route: str) -> None:
        """Log a refusal, and audit it for the owner of the object, if it has one: a few in an hour of each caller, so
        that no caller fills the audit. The log has all."""
        logger.warning(
            "request forbidden",
            code=refusal.code,
            identity_id=identity.identity_id,
            source_ip=identity.source_ip,
            route=route,
            object_id=refusal.object_id,
            owner_id=refusal.owner_id,
        )
        if not refusal.owner_id:
            return
        done = self._entry(
            identity, FORBIDDEN, refusal.object_id, owner_id=refusal.owner_id, code=refusal.code, route=route
        )
        bucket = f"refusals:{refusal.owner_id}:{identity.payer_id}"
        with contextlib.suppress(Unavailable):  # the answer is the refusal in any case
            taken = self._stores.queue.take_tokens(
                bucket, 1, rate_per_s=_REFUSALS_AUDITED / 3600, burst=_REFUSALS_AUDITED
            )
            if taken.tokens:
                self._stores.audit.add_entries([done])


def _without_address(entry: AuditEntry) -> AuditEntry:
    detail = {name: value for name, value in entry.detail.items() if name != SOURCE_IP}
    return dataclasses.replace(entry, detail=detail)
