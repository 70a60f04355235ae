"""Audit log in PostgreSQL: rows that are appended in the transaction of the change, and never change."""

from __future__ import annotations

import copy
import datetime as dt
import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, Self

import psycopg
from psycopg.rows import DictRow

from farcall_common.store.model import FORBIDDEN, AuditEntry, Quota, Quotable
from farcall_common.store.postgres import OF_PAYER, PAYER, PostgresDatabase, to_json

_ADD: Final = """
    INSERT INTO audit (at, identity_id, owner_id, action, object_id, detail)
    SELECT at, identity_id, owner_id, action, object_id, detail::json FROM unnest(
        %(at)s::timestamptz[], %(identity_id)s::text[], %(owner_id)s::text[], %(action)s::text[], %(object_id)s::text[],
        %(detail)s::text[]
    ) AS new (at, identity_id, owner_id, action, object_id, detail)
"""

#: For a statement with ``added`` rows: one entry about all of them, if there are any, with their number.
AUDIT_OF_BATCH: Final = """
    INSERT INTO audit (at, identity_id, owner_id, action, object_id, detail)
    SELECT %(audit_at)s::timestamptz, %(audit_identity_id)s::text, %(audit_owner_id)s::text, %(audit_action)s::text,
        %(audit_object_id)s::text, (%(audit_detail)s::jsonb || jsonb_build_object('tasks', count(*)))::json
    FROM added WHERE %(audit_identity_id)s::text IS NOT NULL HAVING count(*) > 0
"""

_ENTRY: Final = "audit_id, at, identity_id, owner_id, action, object_id, detail"
_WITHIN: Final = """
    (%(since)s::timestamptz IS NULL OR at >= %(since)s) AND (%(until)s::timestamptz IS NULL OR at < %(until)s)
    AND (%(after_at)s::timestamptz IS NULL OR (at, audit_id) > (%(after_at)s, %(after_id)s))
"""
#: Two disjoint halves, each by its own index.
_LIST: Final = f"""
    SELECT * FROM (
        (SELECT {_ENTRY} FROM audit
         WHERE identity_id = ANY(%(ids)s) AND (action <> '{FORBIDDEN}' OR owner_id = ANY(%(ids)s)) AND {_WITHIN}
         ORDER BY at, audit_id LIMIT %(limit)s)
        UNION ALL
        (SELECT {_ENTRY} FROM audit
         WHERE owner_id = ANY(%(ids)s) AND owner_id <> identity_id AND NOT identity_id = ANY(%(ids)s) AND {_WITHIN}
         ORDER BY at, audit_id LIMIT %(limit)s)
    ) AS entries ORDER BY at, audit_id LIMIT %(limit)s
"""  # noqa: S608 - put together from the constants above

_PURGE: Final = """
    DELETE FROM audit WHERE audit_id IN (SELECT audit_id FROM audit WHERE at < %(before)s LIMIT %(limit)s)
"""


#: The rows that count for an owner, by kind.
_OWNED: Final = {
    Quotable.ACCOUNT: "service_account WHERE owner_id = %(owner_id)s AND deleted_at IS NULL",
    Quotable.ALIAS: f"function_alias WHERE {OF_PAYER} AND name <> %(but)s",
    Quotable.CONTAINER: f"container WHERE {OF_PAYER}",
    Quotable.ENDPOINT: f"endpoint WHERE {OF_PAYER}",
    Quotable.FUNCTION: f"function JOIN function_version USING (function_id) WHERE {OF_PAYER}",
    Quotable.MEMBER: "team_member WHERE team_id = %(owner_id)s AND member <> %(but)s",
    Quotable.SHARE: "share WHERE object_id = %(owner_id)s AND grantee <> %(but)s",
    Quotable.TEAM: f"team WHERE {OF_PAYER}",
    Quotable.TOKEN: "api_token WHERE owner_id = %(owner_id)s AND revoked_at IS NULL AND expires_at > now()",
}
_LOCK_OWNER: Final = f"SELECT pg_advisory_xact_lock(hashtextextended(%(kind)s || {PAYER}, 0))"


def _check_quota(quota: Quota, connection: psycopg.Connection[DictRow]) -> None:
    """Count what the owner has, and keep others from adding to it until the transaction ends.

    :raises QuotaExceeded: if one more is too many.
    """
    values = {"kind": str(quota.kind), "owner_id": quota.owner_id, "but": quota.but}
    connection.execute(_LOCK_OWNER, values)
    # A separate statement sees what others committed before it got the lock; it reads no long values.
    size = "coalesce(sum(octet_length(body)), 0)" if quota.most_bytes else "0"
    counted = f"SELECT count(*) AS count, ({size})::bigint AS size FROM {_OWNED[quota.kind]}"  # noqa: S608 - of constants
    row = connection.execute(counted.encode(), values).fetchone()
    assert row is not None  # an aggregate has one
    quota.check(int(row["count"]), int(row["size"]))


def audit_parameters(entry: AuditEntry | None) -> dict[str, Any]:
    """The parameters of AUDIT_OF_BATCH; None appends nothing."""
    values = {**vars(entry), "detail": to_json(entry.detail)} if entry else {}
    names = ("at", "identity_id", "owner_id", "action", "object_id", "detail")
    return {f"audit_{name}": values.get(name) for name in names}


NO_AUDIT: Final = audit_parameters(None)


class PostgresPort:
    """A port of the records on psycopg 3: :class:`~farcall_common.store.ports.Audited`."""

    def __init__(self, database: PostgresDatabase) -> None:
        self._database = database

    def audited(self, *entries: AuditEntry, quota: Quota | None = None) -> Self:
        view = copy.copy(self)
        columns = _columns(entries)
        check = functools.partial(_check_quota, quota) if quota else None
        view._database = self._database.between(check, lambda connection: connection.execute(_ADD, columns))
        return view


class PostgresAudit(PostgresPort):
    """:class:`~farcall_common.store.ports.Audit` on psycopg 3."""

    def add_entries(self, entries: Sequence[AuditEntry]) -> None:
        if entries:
            self._database.run(_ADD, _columns(entries))

    def list_entries(
        self,
        identity_ids: Collection[str],
        *,
        since: dt.datetime | None = None,
        until: dt.datetime | None = None,
        after: tuple[dt.datetime, int] | None = None,
        limit: int = 100,
    ) -> Sequence[AuditEntry]:
        after_at, after_id = after or (None, None)
        parameters = {"since": since, "until": until, "after_at": after_at, "after_id": after_id, "limit": limit}
        rows = self._database.rows(_LIST, {**parameters, "ids": sorted(identity_ids)})
        return [AuditEntry(**row) for row in rows]

    def purge_entries(self, *, before: dt.datetime, limit: int) -> int:
        return self._database.run(_PURGE, {"before": before, "limit": limit})


def _columns(entries: Sequence[AuditEntry]) -> Mapping[str, Any]:
    names = ("at", "identity_id", "owner_id", "action", "object_id")
    columns: dict[str, Any] = {name: [getattr(entry, name) for entry in entries] for name in names}
    return {**columns, "detail": [to_json(entry.detail) for entry in entries]}
