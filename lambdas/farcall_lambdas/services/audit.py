"""Audit log: entries for the changes of services, and reading them."""

from __future__ import annotations

import dataclasses
import datetime as dt
from collections.abc import Sequence
from typing import Final

from farcall_common.store.model import AuditEntry
from farcall_common.store.ports import Records
from farcall_lambdas.identity import Identity

_ADDRESS: Final = "source_ip"


def entry(
    identity: Identity, action: str, object_id: str, *, at: float, owner_id: str = "", **detail: object
) -> AuditEntry:
    """The audit entry of a change by the caller at ``at`` (epoch seconds). ``owner_id`` is the owner of the object, by
    default the caller."""
    now = dt.datetime.fromtimestamp(at, dt.UTC)
    if identity.source_ip:
        detail[_ADDRESS] = identity.source_ip
    return AuditEntry(now, identity.identity_id, action, object_id, owner_id or identity.identity_id, detail)


class AuditService:
    """Changes by the caller, and changes by others to objects of the caller."""

    def __init__(self, records: Records) -> None:
        self._records = records

    def since(
        self,
        identity: Identity,
        *,
        since: dt.datetime | None,
        until: dt.datetime | None,
        after: tuple[dt.datetime, int] | None,
        limit: int,
    ) -> Sequence[AuditEntry]:
        """Entries from ``since`` to before ``until`` and after ``after``, oldest first. The addresses of
        others are left out: only the operator may read them."""
        found = self._records.audit.list_entries(
            identity.identity_set, since=since, until=until, after=after, limit=limit
        )
        return [each if identity.owns(each.identity_id) else _without_address(each) for each in found]


def _without_address(entry: AuditEntry) -> AuditEntry:
    detail = {name: value for name, value in entry.detail.items() if name != _ADDRESS}
    return dataclasses.replace(entry, detail=detail)
