"""What an identity has, and may have."""

from __future__ import annotations

from collections.abc import Sequence

from farcall_common.store.model import TaskGroup
from farcall_common.store.ports import Records
from farcall_lambdas.identity import Identity
from farcall_lambdas.models.account import Limits, Quota
from farcall_lambdas.settings import ApiSettings


class AccountService:
    """The caller's own standing."""

    def __init__(self, records: Records, settings: ApiSettings) -> None:
        self._records = records
        self._settings = settings

    def limits(self, identity: Identity) -> Limits:
        """The limits in force, and how much of each quota is used up."""
        owner_id, settings, records = identity.identity_id, self._settings, self._records
        functions, endpoints, containers = settings.max_functions, settings.max_endpoints, settings.max_containers
        return Limits(
            functions=Quota(used=records.functions.count_functions(owner_id, limit=functions), limit=functions),
            endpoints=Quota(used=records.endpoints.count_endpoints(owner_id, limit=endpoints), limit=endpoints),
            containers=Quota(used=records.functions.count_containers(owner_id, limit=containers), limit=containers),
            max_payload_bytes=settings.max_payload_bytes,
            max_inline_bytes=settings.max_inline_bytes,
            max_request_bytes=settings.max_request_bytes,
            max_tasks_per_request=settings.max_tasks_per_request,
            max_queue_depth=settings.max_queue_depth,
            rate_per_s=settings.rate_per_s,
            rate_burst=settings.rate_burst,
            retention_days=settings.retention_days,
        )

    def groups(self, identity: Identity, *, before: str | None, limit: int) -> Sequence[TaskGroup]:
        """The caller's task groups, newest first, older than the group ``before``."""
        return self._records.tasks.list_groups(identity.identity_id, before=before, limit=limit)
