"""Endpoints in PostgreSQL: registration, presence, keys, spools, withdrawn rights."""

# ruff: noqa: S608 - statements are put together from the constants in this file, never from values

from __future__ import annotations

import dataclasses
import datetime as dt
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

import msgspec

from farcall_common.errors import Conflict, EndpointUnknown
from farcall_common.qos_report import QosReport
from farcall_common.store.audit_postgres import PostgresPort
from farcall_common.store.model import Endpoint, EndpointKey, Presence, RunningLimit, SpoolMark, Withdrawal
from farcall_common.store.postgres import columns_of, to_json

#: Columns by name: a later release may have added some.
_COLUMNS: Final = ", ".join(field.name for field in dataclasses.fields(Endpoint) if field.name != "silent_s")
_ENDPOINT: Final = f"SELECT {_COLUMNS}, extract(epoch FROM now() - seen_at)::float8 AS silent_s FROM endpoint"

_JSON: Final = frozenset({"metadata", "worker_share"})

# Rows are locked in the order of their ids, so that two batches that share some never deadlock.

_SET_PRESENCE: Final = """
    WITH there AS (
        SELECT endpoint_id FROM endpoint WHERE endpoint_id = ANY(%(endpoint_id)s)
        ORDER BY endpoint_id FOR NO KEY UPDATE
    )
    UPDATE endpoint SET online = new.online, status = new.status, seen_at = now()
    FROM there JOIN unnest(%(endpoint_id)s::text[], %(online)s::boolean[], %(status)s::text[]::json[])
                    AS new (endpoint_id, online, status) USING (endpoint_id)
    WHERE endpoint.endpoint_id = there.endpoint_id
"""

#: Apart from the endpoint, of which each submit reads the whole row.
_SET_QOS: Final = """
    INSERT INTO endpoint_qos (endpoint_id, report)
    SELECT endpoint_id, new.report FROM endpoint JOIN unnest(%(endpoint_id)s::text[], %(report)s::text[]::json[])
        AS new (endpoint_id, report) USING (endpoint_id)
    ORDER BY endpoint_id
    ON CONFLICT (endpoint_id) DO UPDATE SET report = excluded.report
"""

_MARK_SPOOLS: Final = """
    WITH there AS (
        SELECT endpoint_id FROM endpoint WHERE endpoint_id = ANY(%(endpoint_id)s)
        ORDER BY endpoint_id FOR NO KEY UPDATE
    )
    UPDATE endpoint SET spool_id = new.spool_id, spool_generation = new.generation
    FROM there JOIN unnest(%(endpoint_id)s::text[], %(spool_id)s::text[], %(generation)s::bigint[])
                    AS new (endpoint_id, spool_id, generation) USING (endpoint_id)
    WHERE endpoint.endpoint_id = there.endpoint_id
        AND CASE WHEN endpoint.spool_id = new.spool_id THEN endpoint.spool_generation < new.generation
                 ELSE %(is_claim)s END
"""

_LOCK_ENDPOINT: Final = "SELECT endpoint_id FROM endpoint WHERE endpoint_id = %(id)s FOR NO KEY UPDATE"

_DELETE_OLD_KEYS: Final = """
    DELETE FROM endpoint_key WHERE public_key IN (
        SELECT public_key FROM endpoint_key WHERE endpoint_id = %(id)s AND revoked_at IS NULL
        ORDER BY public_key = %(key)s DESC, added_at DESC, public_key OFFSET %(most)s
    ) RETURNING public_key
"""

#: Revoked keys that an endpoint remembers.
_MAX_REVOKED: Final = 100
_FORGET_REVOKED: Final = """
    DELETE FROM endpoint_key WHERE public_key IN (
        SELECT public_key FROM endpoint_key WHERE endpoint_id = %(id)s AND revoked_at IS NOT NULL
        ORDER BY revoked_at DESC, public_key OFFSET %(most)s
    )
"""


class PostgresEndpoints(PostgresPort):
    """:class:`~farcall_common.store.ports.Endpoints` on psycopg 3."""

    def put_endpoint(self, endpoint: Endpoint) -> None:
        allowed = None if endpoint.allowed_functions is None else list(endpoint.allowed_functions)
        self._database.run(
            """
            INSERT INTO endpoint (endpoint_id, owner_id, name, display_name, description, public, multi_user,
                                  allowed_functions, metadata, created_at)
            VALUES (%(endpoint_id)s, %(owner_id)s, %(name)s, %(display_name)s, %(description)s, %(public)s,
                    %(multi_user)s, %(allowed_functions)s, %(metadata)s, coalesce(%(created_at)s, now()))
            ON CONFLICT (endpoint_id) DO UPDATE SET
                name = excluded.name, display_name = excluded.display_name, description = excluded.description,
                public = excluded.public, multi_user = excluded.multi_user,
                allowed_functions = excluded.allowed_functions, metadata = excluded.metadata
            """,
            {**vars(endpoint), "allowed_functions": allowed, "metadata": to_json(endpoint.metadata)},
        )

    def change_endpoint(self, endpoint_id: str, changes: Mapping[str, object]) -> None:
        values = {name: to_json(value) if name in _JSON else value for name, value in changes.items()}
        values["id"] = endpoint_id
        assignments = ", ".join(f"{name} = %({name})s" for name in changes)
        # With nothing to change, what follows in the same transaction still does.
        self._database.run(f"UPDATE endpoint SET {assignments or 'name = name'} WHERE endpoint_id = %(id)s", values)

    def get_endpoint(self, endpoint_id: str) -> Endpoint | None:
        rows = self._database.rows(f"{_ENDPOINT} WHERE endpoint_id = %(id)s", {"id": endpoint_id})
        return endpoint_from_row(rows[0]) if rows else None

    def list_endpoints(
        self, owner_id: str, *, shared: Collection[str] | None = None, limit: int = 1000
    ) -> Sequence[Endpoint]:
        rows = self._database.rows(
            f"""
            SELECT endpoint_id, owner_id, name, display_name, created_at, online,
                extract(epoch FROM now() - seen_at)::float8 AS silent_s
            FROM endpoint WHERE owner_id = %(owner_id)s
                {"" if shared is None else "OR public OR endpoint_id = ANY(%(shared)s)"}
            ORDER BY created_at DESC, endpoint_id DESC LIMIT %(limit)s
            """,
            {"owner_id": owner_id, "shared": sorted(shared or ()), "limit": limit},
        )
        return [Endpoint(**row) for row in rows]

    def count_endpoints(self, owner_id: str, *, limit: int) -> int:
        return self._database.count("endpoint", owner_id, limit)

    def delete_endpoint(self, endpoint_id: str) -> bool:
        query = """
            WITH shares AS (DELETE FROM share WHERE object_id = %(id)s)
            DELETE FROM endpoint WHERE endpoint_id = %(id)s
        """
        return self._database.run(query, {"id": endpoint_id}) > 0

    def set_presence(self, presences: Sequence[Presence]) -> None:
        latest = {presence.endpoint_id: presence for presence in presences}.values()
        rows = [
            {"endpoint_id": each.endpoint_id, "online": each.online, "status": to_json(each.status)} for each in latest
        ]
        reports = [{"endpoint_id": each.endpoint_id, "report": to_json(each.qos)} for each in latest if each.qos]
        if not rows:
            return
        with self._database.connection() as connection, connection.transaction():
            connection.execute(_SET_PRESENCE.encode(), columns_of(rows))
            if reports:
                connection.execute(_SET_QOS.encode(), columns_of(reports))

    def get_qos_report(self, endpoint_id: str) -> QosReport | None:
        rows = self._database.rows("SELECT report FROM endpoint_qos WHERE endpoint_id = %(id)s", {"id": endpoint_id})
        return msgspec.convert(rows[0]["report"], QosReport) if rows else None

    # keys

    def add_endpoint_key(self, endpoint_id: str, public_key: str, *, at: dt.datetime, most: int = 2) -> Sequence[str]:
        parameters = {"key": public_key, "id": endpoint_id, "at": at, "most": most}
        with self._database.connection() as connection:
            if not connection.execute(_LOCK_ENDPOINT, parameters).fetchone():
                raise EndpointUnknown(f"there is no endpoint {endpoint_id}")
            added = connection.execute(
                """
                INSERT INTO endpoint_key (public_key, endpoint_id, added_at) VALUES (%(key)s, %(id)s, %(at)s)
                ON CONFLICT (public_key) DO UPDATE SET public_key = excluded.public_key
                    WHERE endpoint_key.endpoint_id = excluded.endpoint_id AND endpoint_key.revoked_at IS NULL
                """,
                parameters,
            )
            if added.rowcount == 0:
                raise Conflict("the key belongs to another endpoint, or was revoked")
            deleted = connection.execute(_DELETE_OLD_KEYS.encode(), parameters).fetchall()
        return [row["public_key"] for row in deleted]

    def list_endpoint_keys(self, endpoint_id: str) -> Sequence[EndpointKey]:
        query = """
            SELECT public_key, added_at FROM endpoint_key WHERE endpoint_id = %(id)s AND revoked_at IS NULL
            ORDER BY added_at, public_key
        """
        return [EndpointKey(**row) for row in self._database.rows(query, {"id": endpoint_id})]

    def revoke_endpoint_key(self, endpoint_id: str, public_key: str, *, at: dt.datetime) -> bool:
        parameters = {"key": public_key, "id": endpoint_id, "at": at, "most": _MAX_REVOKED}
        with self._database.connection() as connection:
            revoked = connection.execute(
                """
                UPDATE endpoint_key SET revoked_at = %(at)s
                WHERE public_key = %(key)s AND endpoint_id = %(id)s AND revoked_at IS NULL
                """,
                parameters,
            )
            connection.execute(_FORGET_REVOKED.encode(), parameters)
        return revoked.rowcount > 0

    def find_endpoints_by_key(self, public_keys: Sequence[str]) -> Mapping[str, str]:
        query = """
            SELECT public_key, endpoint_id FROM endpoint_key WHERE public_key = ANY(%(keys)s) AND revoked_at IS NULL
        """
        rows = self._database.rows(query, {"keys": list(public_keys)})
        return {row["public_key"]: row["endpoint_id"] for row in rows}

    # spools

    def find_spools(self, endpoint_ids: Sequence[str]) -> Mapping[str, SpoolMark]:
        query = "SELECT endpoint_id, spool_id, spool_generation FROM endpoint WHERE endpoint_id = ANY(%(ids)s)"
        rows = self._database.rows(query, {"ids": list(endpoint_ids)})
        return {row["endpoint_id"]: SpoolMark(row["spool_id"], row["spool_generation"]) for row in rows}

    def claim_spools(self, marks: Mapping[str, SpoolMark]) -> None:
        self._mark_spools(marks, is_claim=True)

    def raise_spools(self, marks: Mapping[str, SpoolMark]) -> None:
        self._mark_spools(marks, is_claim=False)

    def _mark_spools(self, marks: Mapping[str, SpoolMark], *, is_claim: bool) -> None:
        rows = [{"endpoint_id": endpoint_id, **vars(mark)} for endpoint_id, mark in marks.items()]
        if rows:
            self._database.run(_MARK_SPOOLS, {**columns_of(rows), "is_claim": is_claim})

    def find_restricted(self, endpoint_ids: Sequence[str]) -> frozenset[str]:
        query = "SELECT endpoint_id FROM endpoint WHERE endpoint_id = ANY(%(ids)s) AND allowed_functions IS NOT NULL"
        return frozenset(row["endpoint_id"] for row in self._database.rows(query, {"ids": list(endpoint_ids)}))

    # withdrawn rights

    def put_withdrawal(self, withdrawal: Withdrawal) -> None:
        self._database.run(
            """
            INSERT INTO withdrawal (object_id, identity_id, owner_ids, at, cancels_tasks, ends_sessions)
            VALUES (%(object_id)s, %(identity_id)s, %(owner_ids)s, %(at)s, %(cancels_tasks)s, %(ends_sessions)s)
            ON CONFLICT (object_id) DO UPDATE SET
                identity_id = excluded.identity_id, owner_ids = excluded.owner_ids, at = excluded.at,
                cancels_tasks = withdrawal.cancels_tasks OR excluded.cancels_tasks,
                ends_sessions = withdrawal.ends_sessions OR excluded.ends_sessions
            """,
            {**vars(withdrawal), "owner_ids": list(withdrawal.owner_ids)},
        )

    def list_withdrawals(self, *, limit: int = 100) -> Sequence[Withdrawal]:
        query = """
            SELECT object_id, identity_id, owner_ids, at, cancels_tasks, ends_sessions FROM withdrawal
            ORDER BY row_number() OVER (PARTITION BY identity_id ORDER BY at, object_id), at, object_id LIMIT %(limit)s
        """
        return [Withdrawal(**row) for row in self._database.rows(query, {"limit": limit})]

    def note_ended_sessions(self, withdrawal: Withdrawal) -> None:
        query = "UPDATE withdrawal SET ends_sessions = false WHERE object_id = %(object_id)s AND at = %(at)s"
        self._database.run(query, {"object_id": withdrawal.object_id, "at": withdrawal.at})

    def delete_withdrawal(self, withdrawal: Withdrawal) -> None:
        query = "DELETE FROM withdrawal WHERE object_id = %(object_id)s AND at = %(at)s"
        self._database.run(query, {"object_id": withdrawal.object_id, "at": withdrawal.at})

    # limits of submitters in the queue

    def put_running_limit(self, endpoint_id: str, owner_id: str, limit: RunningLimit) -> None:
        parameters = {**vars(limit), "endpoint_id": endpoint_id, "owner_id": owner_id}
        if limit == RunningLimit():
            self._database.run(
                "DELETE FROM running_limit WHERE endpoint_id = %(endpoint_id)s AND owner_id = %(owner_id)s", parameters
            )
            return
        self._database.run(
            """
            INSERT INTO running_limit (endpoint_id, owner_id, max_running, weight)
            SELECT endpoint_id, %(owner_id)s, %(max_running)s, %(weight)s FROM endpoint
            WHERE endpoint_id = %(endpoint_id)s
            ON CONFLICT (endpoint_id, owner_id) DO UPDATE SET
                max_running = excluded.max_running, weight = excluded.weight
            """,
            parameters,
        )

    def find_running_limits(self, endpoint_ids: Sequence[str]) -> Mapping[str, Mapping[str, RunningLimit]]:
        rows = self._database.rows(
            "SELECT endpoint_id, owner_id, max_running, weight FROM running_limit WHERE endpoint_id = ANY(%(ids)s)",
            {"ids": list(endpoint_ids)},
        )
        found: dict[str, dict[str, RunningLimit]] = {endpoint_id: {} for endpoint_id in endpoint_ids}
        for row in rows:
            found[row["endpoint_id"]][row["owner_id"]] = RunningLimit(row["max_running"], row["weight"])
        return found


def endpoint_from_row(row: Mapping[str, Any]) -> Endpoint:
    """An endpoint as the table has it; columns of a later release are left out."""
    return msgspec.convert(row, Endpoint)
