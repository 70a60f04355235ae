"""The records in PostgreSQL. A batch is one statement: its columns travel as arrays and are unnested by the server."""

# ruff: noqa: S608 - statements are put together from the constants in this file and in task_rows, never from values

from __future__ import annotations

import dataclasses
import datetime as dt
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec
import psycopg
from psycopg.rows import DictRow

from farcall_common.errors import Conflict, EndpointUnknown
from farcall_common.store import task_rows, transitions
from farcall_common.store.audit_postgres import PostgresAudit, audit_parameters
from farcall_common.store.catalogue_postgres import NEWEST_FUNCTION, PostgresCatalogue
from farcall_common.store.model import (
    AuditEntry,
    Endpoint,
    Function,
    OpenTask,
    Presence,
    SpoolMark,
    Task,
    TaskEvent,
    TaskGroup,
    TaskResult,
)
from farcall_common.store.postgres import ConnectionString, Database, to_json
from farcall_common.wire.states import TaskState

#: Columns by name: a later release may have added some.
_COLUMNS: Final = ", ".join(field.name for field in dataclasses.fields(Endpoint) if field.name != "silent_s")
_ENDPOINT: Final = f"SELECT {_COLUMNS}, extract(epoch FROM now() - seen_at)::float8 AS silent_s FROM endpoint"

# Rows are locked in the order of their ids, so that two batches that share some never wait for each other in a circle.

_LOCK_TASKS: Final = """
    SELECT task_id, state, attempt, endpoint_id, owner_id, task_group_id, finished_at FROM task
    WHERE task_id = ANY(%(ids)s) ORDER BY task_id FOR NO KEY UPDATE
"""

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

#: Rows as JSON, so that one statement can find some of several tables.
_LOOK_UP: Final = f"""
    SELECT
        (SELECT row_to_json(endpoint) FROM endpoint WHERE endpoint_id = %(endpoint)s) AS endpoint,
        (SELECT json_agg(found) FROM ({NEWEST_FUNCTION} WHERE function_id = ANY(%(functions)s)) AS found) AS functions,
        (SELECT array_agg(task_id) FROM task WHERE task_id = ANY(%(tasks)b::text[])) AS tasks
"""

_BUSY: Final = """
    SELECT endpoint_id FROM unnest(%(ids)s::text[]) AS wanted (endpoint_id)
    WHERE EXISTS (SELECT FROM task WHERE task.endpoint_id = wanted.endpoint_id AND finished_at IS NULL)
"""

#: One look at the index ``task_open`` for each endpoint, however many open tasks it has.
_ENDPOINTS_WITH_OPEN_TASKS: Final = """
    WITH RECURSIVE busy AS (
        (SELECT endpoint_id FROM task WHERE finished_at IS NULL ORDER BY endpoint_id LIMIT 1)
        UNION ALL
        SELECT (
            SELECT task.endpoint_id FROM task WHERE finished_at IS NULL AND task.endpoint_id > busy.endpoint_id
            ORDER BY task.endpoint_id LIMIT 1
        ) FROM busy WHERE busy.endpoint_id IS NOT NULL
    )
    SELECT endpoint_id FROM busy WHERE endpoint_id IS NOT NULL
"""

#: By the index ``task_open_added``.
_OPEN_IDS: Final = """
    SELECT task_id, endpoint_id, added_in::text AS added_in, state, attempt, submitted_at FROM task
    WHERE finished_at IS NULL AND (added_in, task_id) > (%(added_in)s::text::xid8, %(task_id)s)
    ORDER BY task.added_in, task_id LIMIT %(limit)s
"""

_TAKE_TURN: Final = """
    INSERT INTO turn (name, until) VALUES (%(name)s, now() + %(ttl_s)s * interval '1 second')
    ON CONFLICT (name) DO UPDATE SET until = excluded.until WHERE turn.until < now()
"""


class PostgresRecords(PostgresCatalogue, PostgresAudit):
    """:class:`~farcall_common.store.ports.Records` on psycopg 3.

    :param conninfo: a libpq connection string or URL, or where one comes from.
    :param min_connections: kept open while idle.
    :param max_connections: lent at once; further callers wait up to ``timeout_s`` seconds, then get Unavailable.
    """

    def __init__(
        self,
        conninfo: str | ConnectionString,
        *,
        min_connections: int = 1,
        max_connections: int = 4,
        timeout_s: float = 10.0,
    ) -> None:
        self._database = Database(
            conninfo, min_connections=min_connections, max_connections=max_connections, timeout_s=timeout_s
        )

    def ping(self) -> None:
        self._database.rows("SELECT 1", {})

    def close(self) -> None:
        self._database.close()

    def measure_database(self) -> int:
        [row] = self._database.rows("SELECT pg_database_size(current_database()) AS bytes", {})
        return int(row["bytes"])

    # endpoints and keys

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
        values = {**changes, "metadata": to_json(changes.get("metadata")), "id": endpoint_id}
        assignments = ", ".join(f"{name} = %({name})s" for name in changes)
        # With nothing to change, what follows in the same transaction still does.
        self._database.run(f"UPDATE endpoint SET {assignments or 'name = name'} WHERE endpoint_id = %(id)s", values)

    def get_endpoint(self, endpoint_id: str) -> Endpoint | None:
        rows = self._database.rows(f"{_ENDPOINT} WHERE endpoint_id = %(id)s", {"id": endpoint_id})
        return _endpoint(rows[0]) if rows else None

    def list_endpoints(self, owner_id: str, *, role: str = "owner", limit: int = 1000) -> Sequence[Endpoint]:
        usable = """
            OR public OR EXISTS (
                SELECT FROM access_grant WHERE identity_id = %(owner_id)s AND object_id = endpoint_id
            )
        """
        rows = self._database.rows(
            f"""
            SELECT endpoint_id, owner_id, name, display_name, created_at
            FROM endpoint WHERE owner_id = %(owner_id)s {usable if role == "any" else ""}
            ORDER BY created_at DESC, endpoint_id DESC LIMIT %(limit)s
            """,
            {"owner_id": owner_id, "limit": limit},
        )
        return [Endpoint(**row) for row in rows]

    def count_endpoints(self, owner_id: str, *, limit: int) -> int:
        return self._count("endpoint", owner_id, limit)

    def delete_endpoint(self, endpoint_id: str) -> bool:
        return self._database.run("DELETE FROM endpoint WHERE endpoint_id = %(id)s", {"id": endpoint_id}) > 0

    def set_presence(self, presences: Sequence[Presence]) -> None:
        latest = {presence.endpoint_id: presence for presence in presences}.values()
        rows = [{**vars(presence), "status": to_json(presence.status)} for presence in latest]
        if rows:
            self._database.run(_SET_PRESENCE, task_rows.columns_of(rows))

    def add_endpoint_key(self, endpoint_id: str, public_key: str, *, at: dt.datetime) -> None:
        with self._database.connection() as connection:
            try:
                added = connection.execute(
                    """
                    INSERT INTO endpoint_key (public_key, endpoint_id, added_at) VALUES (%(key)s, %(id)s, %(at)s)
                    ON CONFLICT (public_key) DO UPDATE SET public_key = excluded.public_key
                        WHERE endpoint_key.endpoint_id = excluded.endpoint_id
                    """,
                    {"key": public_key, "id": endpoint_id, "at": at},
                )
            except psycopg.errors.ForeignKeyViolation as error:
                raise EndpointUnknown(f"there is no endpoint {endpoint_id}") from error
        if added.rowcount == 0:
            raise Conflict("the key speaks for another endpoint")

    def list_endpoint_keys(self, endpoint_id: str) -> Sequence[str]:
        query = "SELECT public_key FROM endpoint_key WHERE endpoint_id = %(id)s"
        return [row["public_key"] for row in self._database.rows(query, {"id": endpoint_id})]

    def find_endpoint_by_key(self, public_key: str) -> str | None:
        return self.find_endpoints_by_key([public_key]).get(public_key)

    def find_endpoints_by_key(self, public_keys: Sequence[str]) -> Mapping[str, str]:
        query = "SELECT public_key, endpoint_id FROM endpoint_key WHERE public_key = ANY(%(keys)s)"
        rows = self._database.rows(query, {"keys": list(public_keys)})
        return {row["public_key"]: row["endpoint_id"] for row in rows}

    # grants

    def has_grant(self, identity_id: str, object_id: str) -> bool:
        query = "SELECT 1 FROM access_grant WHERE identity_id = %(identity_id)s AND object_id = %(object_id)s"
        return bool(self._database.rows(query, {"identity_id": identity_id, "object_id": object_id}, by_keys=True))

    def add_grant(self, identity_id: str, object_id: str) -> None:
        self._database.run(
            "INSERT INTO access_grant (identity_id, object_id) VALUES (%(i)s, %(o)s) ON CONFLICT DO NOTHING",
            {"i": identity_id, "o": object_id},
        )

    # tasks

    def add_tasks(
        self,
        tasks: Sequence[Task],
        *,
        remembered: Mapping[str, Task] | None = None,
        audit: AuditEntry | None = None,
    ) -> Mapping[str, Task]:
        if not tasks:
            return {}
        now = dt.datetime.now(dt.UTC)
        # Sorted for the same reason as _LOCK_TASKS.
        ordered = sorted(tasks, key=lambda task: task.task_id)
        written = [transitions.as_received(task, remembered, now=now) for task in ordered]
        statement, parameters = task_rows.add_tasks(written)
        rows = self._database.rows(statement, {**parameters, **audit_parameters(audit)}, by_keys=True)
        added = {row["task_id"] for row in rows}
        known = [task.task_id for task in written if task.task_id not in added]
        return self.get_tasks(known) if known else {}

    def look_up(
        self, endpoint_id: str, function_ids: Sequence[str], task_ids: Sequence[str]
    ) -> tuple[Endpoint | None, Mapping[str, Function], Mapping[str, Task]]:
        wanted = {"endpoint": endpoint_id, "functions": list(function_ids), "tasks": list(task_ids)}
        [row] = self._database.rows(_LOOK_UP, wanted, by_keys=True)
        functions = [msgspec.convert({**function, "body": b""}, Function) for function in row["functions"] or ()]
        return (
            _endpoint(row["endpoint"]) if row["endpoint"] else None,
            {function.function_id: function for function in functions},
            self.get_tasks(row["tasks"]) if row["tasks"] else {},
        )

    def find_memoized(self, owner_id: str, memo_keys: Sequence[str]) -> Mapping[str, Task]:
        # One look at the index for each key, however many tasks share it.
        tasks = self._tasks(task_rows.MEMOIZED, {"owner_id": owner_id, "keys": list(memo_keys)})
        return {task.memo_key: task for task in tasks if task.memo_key is not None}

    def get_tasks(self, task_ids: Sequence[str], *, with_bodies: bool = True) -> Mapping[str, Task]:
        query = task_rows.WHOLE_TASK if with_bodies else task_rows.LIGHT_TASK
        tasks = self._tasks(f"{query} WHERE task_id = ANY(%(ids)b::text[])", {"ids": list(task_ids)}, by_keys=True)
        return {task.task_id: task for task in tasks}

    def list_tasks(
        self,
        owner_id: str | None = None,
        *,
        endpoint_id: str | None = None,
        state: TaskState | None = None,
        since: dt.datetime | None = None,
        until: dt.datetime | None = None,
        before: tuple[dt.datetime, str] | None = None,
        limit: int = 100,
    ) -> Sequence[Task]:
        before_at, before_id = before or (None, None)
        return self._tasks(
            task_rows.list_of_tasks(state),
            {
                "owner_id": owner_id,
                "endpoint_id": endpoint_id,
                "state": None if state is None else str(state),
                "since": since,
                "until": until,
                "before_at": before_at,
                "before_id": before_id,
                "limit": limit,
            },
        )

    def discard_tasks(self, task_ids: Sequence[str]) -> Sequence[str]:
        rows = self._database.rows(task_rows.DISCARD, {"ids": sorted(task_ids)})
        return [row["task_id"] for row in rows]

    def get_group(
        self, task_group_id: str, *, owner_ids: Collection[str] | None = None, limit: int | None = None
    ) -> Sequence[Task]:
        owners = None if owner_ids is None else list(owner_ids)
        return self._tasks(task_rows.GROUP, {"id": task_group_id, "owners": owners, "limit": limit})

    def list_groups(self, owner_id: str, *, before: str | None = None, limit: int = 100) -> Sequence[TaskGroup]:
        rows = self._database.rows(task_rows.GROUPS, {"owner_id": owner_id, "before": before, "limit": limit})
        return [task_rows.group_from_row(row) for row in rows]

    def list_open_tasks(self, endpoint_id: str, *, after: str = "", limit: int = 1000) -> Sequence[Task]:
        return self._tasks(
            f"""{task_rows.WHOLE_TASK}
            WHERE endpoint_id = %(endpoint_id)s AND task_id > %(after)s AND finished_at IS NULL
            ORDER BY task_id LIMIT %(limit)s
            """,
            {"endpoint_id": endpoint_id, "after": after, "limit": limit},
        )

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
            self._database.run(_MARK_SPOOLS, {**task_rows.columns_of(rows), "is_claim": is_claim})

    def find_busy_endpoints(self, endpoint_ids: Sequence[str]) -> frozenset[str]:
        return frozenset(row["endpoint_id"] for row in self._database.rows(_BUSY, {"ids": list(endpoint_ids)}))

    def list_endpoints_with_open_tasks(self) -> Sequence[str]:
        return [row["endpoint_id"] for row in self._database.rows(_ENDPOINTS_WITH_OPEN_TASKS, {}, by_keys=True)]

    def list_open_ids(self, *, after: tuple[int, str] = (0, ""), limit: int = 1000) -> Sequence[OpenTask]:
        added_in, task_id = after
        parameters = {"added_in": str(added_in), "task_id": task_id, "limit": limit}
        rows = self._database.rows(_OPEN_IDS, parameters, by_keys=True)
        return [
            OpenTask(
                **{**row, "added_in": int(row["added_in"]), "state": task_rows.state_of(row["state"], is_over=False)}
            )
            for row in rows
        ]

    def first_unfinished_transaction(self) -> int:
        [row] = self._database.rows("SELECT pg_snapshot_xmin(pg_current_snapshot())::text AS number", {})
        return int(row["number"])

    def take_turn(self, name: str, *, ttl_s: float) -> bool:
        return self._database.run(_TAKE_TURN, {"name": name, "ttl_s": ttl_s}) > 0

    def end_turn(self, name: str) -> None:
        self._database.run("DELETE FROM turn WHERE name = %(name)s", {"name": name})

    def record_transitions(self, events: Sequence[TaskEvent]) -> Sequence[str]:
        transitions.check_transitions(events)
        # Pipelined, a transaction is two round trips: begin and lock, write and commit.
        with self._database.connection() as connection, connection.pipeline(), connection.transaction():
            before = _lock_tasks(connection, {event.task_id for event in events})
            after = transitions.apply_events(before, events)
            changes = [{"task_id": id_, "state": str(s.state), "attempt": s.attempt} for id_, s in after.items()]
            _write(connection, task_rows.MOVE_TASKS, changes)
            _write(connection, task_rows.ADD_EVENTS, [task_rows.event_row(e) for e in events if e.task_id in before])
        return [task_id for task_id, progress in after.items() if progress.attempt > before[task_id].attempt]

    def record_results(self, results: Sequence[TaskResult], *, at: dt.datetime) -> Mapping[str, TaskResult]:
        transitions.check_results(results)
        # Of a task only one endpoint's report can count, and of those the first.
        reported: dict[tuple[str, str], TaskResult] = {}
        for result in results:
            reported.setdefault((result.task_id, result.endpoint_id), result)
        ended = self._database.rows(task_rows.END_TASKS, task_rows.end_columns(list(reported.values()), at=at))
        return {
            row["task_id"]: transitions.completed(
                reported[row["task_id"], row["endpoint_id"]],
                task_group_id=row["task_group_id"],
                owner_id=row["owner_id"],
            )
            for row in ended
        }

    def list_events(self, task_id: str) -> Sequence[TaskEvent]:
        rows = self._database.rows(task_rows.EVENTS, {"id": task_id})
        return [task_rows.event_from_row(row) for row in rows]

    def purge_tasks(self, *, ended_before: dt.datetime, limit: int) -> int:
        [row] = self._database.rows(task_rows.PURGE, {"ended_before": ended_before, "limit": limit})
        return int(row["count"])

    def _tasks(self, query: str, parameters: Mapping[str, Any], *, by_keys: bool = False) -> list[Task]:
        return [task_rows.task_from_row(row) for row in self._database.rows(query, parameters, by_keys=by_keys)]


def _lock_tasks(
    connection: psycopg.Connection[DictRow], task_ids: Iterable[str]
) -> dict[str, transitions.TaskProgress]:
    return {
        row["task_id"]: transitions.TaskProgress(
            task_rows.state_of(row["state"], is_over=row["finished_at"] is not None),
            row["attempt"],
            row["endpoint_id"],
            row["owner_id"],
            row["task_group_id"],
        )
        for row in connection.execute(_LOCK_TASKS, {"ids": list(task_ids)})
    }


def _write(connection: psycopg.Connection[DictRow], statement: str, rows: Sequence[Mapping[str, Any]]) -> None:
    if rows:
        connection.execute(statement.encode(), task_rows.columns_of(rows))


def _endpoint(row: Mapping[str, Any]) -> Endpoint:
    # What a later release wrote beside it is left out.
    return msgspec.convert(row, Endpoint)
