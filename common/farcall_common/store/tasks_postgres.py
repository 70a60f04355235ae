"""Tasks in PostgreSQL. A batch is one statement: its columns travel as arrays and are unnested by the server."""

# ruff: noqa: S608 - statements are put together from the constants in this file and in task_rows, never from values

from __future__ import annotations

import datetime as dt
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final, Literal

import msgspec
import psycopg
from psycopg.rows import DictRow

from farcall_common.errors import EndpointUnknown
from farcall_common.graphs import DETAILS_OF_USAGE
from farcall_common.store import task_rows, transitions
from farcall_common.store.audit_postgres import PostgresPort, audit_parameters
from farcall_common.store.endpoints_postgres import endpoint_from_row
from farcall_common.store.functions_postgres import NEWEST_FUNCTION, VERSION_WITHOUT_BODY
from farcall_common.store.model import (
    AuditEntry,
    Endpoint,
    Function,
    OpenTask,
    Task,
    TaskEvent,
    TaskGroup,
    TaskResult,
)
from farcall_common.store.postgres import columns_of
from farcall_common.wire.states import Reporter, TaskState

# Rows are locked in the order of their ids, so that two batches that share some never deadlock.

_LOCK_TASKS: Final = """
    SELECT task_id, state, attempt, endpoint_id, owner_id, task_group_id, finished_at FROM task
    WHERE task_id = ANY(%(ids)s) ORDER BY task_id FOR NO KEY UPDATE
"""

_COUNT_REPORTED: Final = f"""
    SELECT task_id, attempt, count(*) AS count FROM task_event
    WHERE task_id = ANY(%(ids)s) AND reporter = '{Reporter.AGENT}' GROUP BY task_id, attempt
"""

#: Rows as JSON, so that one statement can read several tables.
_READ_FOR_SUBMIT: Final = f"""
    SELECT
        (SELECT row_to_json(endpoint) FROM endpoint WHERE endpoint_id = %(endpoint)s) AS endpoint,
        (SELECT json_agg(found) FROM ({NEWEST_FUNCTION} WHERE function_id = ANY(%(functions)s)) AS found) AS functions,
        (SELECT array_agg(task_id) FROM task WHERE task_id = ANY(%(tasks)b::text[])) AS tasks
"""
#: With certain versions of functions, which few submits name.
_READ_VERSIONS_FOR_SUBMIT: Final = f"""{_READ_FOR_SUBMIT},
        (SELECT json_agg(found) FROM (
            {VERSION_WITHOUT_BODY} JOIN unnest(%(ids)s::text[], %(numbers)s::integer[]) AS wanted (id, number)
                ON f.function_id = wanted.id AND v.version = wanted.number
        ) AS found) AS versions
"""

#: By the index ``task_open``.
_OPEN_IDS_OF: Final = """
    SELECT task_id FROM task WHERE endpoint_id = %(id)s AND finished_at IS NULL ORDER BY task_id LIMIT %(limit)s
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


class PostgresTasks(PostgresPort):
    """:class:`~farcall_common.store.ports.Tasks` on psycopg 3."""

    def add_tasks(
        self,
        tasks: Sequence[Task],
        *,
        memoized: Mapping[str, Task] | None = None,
        audit: AuditEntry | None = None,
        endpoint_id: str | None = None,
    ) -> Mapping[str, Task]:
        if not tasks:
            return {}
        now = dt.datetime.now(dt.UTC)
        # Sorted for the same reason as _LOCK_TASKS.
        ordered = sorted(tasks, key=lambda task: task.task_id)
        written = [transitions.as_received(task, memoized, now=now) for task in ordered]
        statement, parameters = task_rows.add_tasks(written)
        parameters |= {**audit_parameters(audit), "required_endpoint": endpoint_id}
        rows = self._database.rows(statement, parameters, by_keys=True)
        added = {row["task_id"] for row in rows}
        missing = [task.task_id for task in written if task.task_id not in added]
        known = self.get_tasks(missing) if missing else {}
        if endpoint_id is not None and len(known) < len(set(missing)):
            raise EndpointUnknown(f"there is no endpoint {endpoint_id}")
        return known

    def read_for_submit(
        self, endpoint_id: str, references: Sequence[str], task_ids: Sequence[str]
    ) -> tuple[Endpoint | None, Mapping[str, Function], Mapping[str, Task]]:
        newest = [reference for reference in references if "@" not in reference]
        wanted: dict[str, object] = {"endpoint": endpoint_id, "functions": newest, "tasks": list(task_ids)}
        query = _READ_FOR_SUBMIT
        if len(newest) < len(references):
            query = _READ_VERSIONS_FOR_SUBMIT
            versions = [reference.partition("@") for reference in references if "@" in reference]
            wanted |= {"ids": [each[0] for each in versions], "numbers": [int(each[2]) for each in versions]}
        [row] = self._database.rows(query, wanted, by_keys=True)
        found = {each["function_id"]: each for each in row["functions"] or ()}
        found |= {f"{each['function_id']}@{each['version']}": each for each in row.get("versions") or ()}
        return (
            endpoint_from_row(row["endpoint"]) if row["endpoint"] else None,
            {name: msgspec.convert({**function, "body": b""}, Function) for name, function in found.items()},
            self.get_tasks(row["tasks"]) if row["tasks"] else {},
        )

    def find_memoized(self, owner_id: str, memo_keys: Sequence[str]) -> Mapping[str, Task]:
        # One look at the index for each key, however many tasks share it.
        tasks = self._tasks(task_rows.MEMOIZED, {"owner_id": owner_id, "keys": list(memo_keys)})
        return {task.memo_key: task for task in tasks if task.memo_key is not None}

    def get_tasks(
        self, task_ids: Sequence[str], *, with_bodies: bool = True, for_answers: bool = False
    ) -> Mapping[str, Task]:
        query = task_rows.WHOLE_TASK if with_bodies else task_rows.LIGHT_TASK
        query = task_rows.SHOWN_TASK if for_answers else query
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

    def find_ids(
        self, kind: Literal["task", "group"], beginning: str, *, owner_ids: Collection[str], limit: int = 20
    ) -> tuple[Sequence[str], bool]:
        wanted = {"beginning": beginning, "owners": list(owner_ids), "limit": limit}
        [row] = self._database.rows(task_rows.find_ids(kind), wanted)
        return row["ids"] or [], row["is_all"]

    def names_of(self, ids: Collection[str]) -> Mapping[str, str]:
        rows = self._database.rows(task_rows.NAMES, {"ids": list(ids)})
        return {row["id"]: row["name"] for row in rows}

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

    # transitions and results

    def record_transitions(self, events: Sequence[TaskEvent]) -> Sequence[str]:
        transitions.check_transitions(events)
        # Pipelined, a transaction is two round trips: begin and lock, write and commit.
        with self._database.connection() as connection, connection.pipeline(), connection.transaction():
            before, reported = _lock_tasks(connection, {event.task_id for event in events})
            events = transitions.within_limit(events, reported)
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
        are_timed = all(
            each.timings.keys() >= {"started_at", "ended_at"} and DETAILS_OF_USAGE.isdisjoint(each.details)
            for each in reported.values()
        )
        statement = task_rows.END_TIMED_TASKS if are_timed else task_rows.END_TASKS
        ended = self._database.rows(statement, task_rows.end_columns(list(reported.values()), at=at))
        return {
            row["task_id"]: transitions.completed(
                reported[row["task_id"], row["endpoint_id"]],
                task_group_id=row["task_group_id"],
                owner_id=row["owner_id"],
            )
            for row in ended
        }

    def list_events(self, task_id: str, *, after: int = 0, limit: int | None = None) -> Sequence[TaskEvent]:
        rows = self._database.rows(task_rows.EVENTS, {"id": task_id, "after": after, "limit": limit})
        return [task_rows.event_from_row(row) for row in rows]

    # open and old tasks

    def list_open_tasks(self, endpoint_id: str, *, after: str = "", limit: int = 1000) -> Sequence[Task]:
        return self._tasks(
            f"""{task_rows.WHOLE_TASK}
            WHERE endpoint_id = %(endpoint_id)s AND task_id > %(after)s AND finished_at IS NULL
            ORDER BY task_id LIMIT %(limit)s
            """,
            {"endpoint_id": endpoint_id, "after": after, "limit": limit},
        )

    def find_open_tasks(
        self,
        *,
        endpoint_id: str | None = None,
        function_id: str | None = None,
        owner_id: str | None = None,
        after: str = "",
        limit: int = 1000,
        with_options: bool = False,
    ) -> Sequence[Task]:
        wanted = {"endpoint_id": endpoint_id, "owner_id": owner_id, "function_id": function_id}
        wanted = {name: value for name, value in wanted.items() if value is not None}
        conditions = [f"{name} = %({name})s" for name in wanted]
        query = task_rows.open_tasks(conditions, with_options=with_options)
        if function_id is not None:
            others = [*conditions[:-1], task_rows.CALLS_FUNCTION]
            callers = task_rows.open_tasks(others, with_options=with_options)
            query = f"SELECT * FROM (({query}) UNION ALL ({callers})) AS found ORDER BY task_id LIMIT %(limit)s"
        return self._tasks(query, {**wanted, "after": after, "limit": limit})

    def list_open_ids_of(self, endpoint_id: str, *, limit: int) -> Sequence[str]:
        rows = self._database.rows(_OPEN_IDS_OF, {"id": endpoint_id, "limit": limit})
        return [row["task_id"] for row in rows]

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

    def purge_tasks(self, *, ended_before: dt.datetime, limit: int) -> int:
        [row] = self._database.rows(task_rows.PURGE, {"ended_before": ended_before, "limit": limit})
        return int(row["count"])

    def _tasks(self, query: str, parameters: Mapping[str, Any], *, by_keys: bool = False) -> list[Task]:
        return [task_rows.task_from_row(row) for row in self._database.rows(query, parameters, by_keys=by_keys)]


def _lock_tasks(
    connection: psycopg.Connection[DictRow], task_ids: Iterable[str]
) -> tuple[dict[str, transitions.TaskProgress], dict[tuple[str, int], int]]:
    """Lock tasks. Returns their progress, and how many transitions of each attempt agents have reported."""
    parameters = {"ids": list(task_ids)}
    locked = connection.execute(_LOCK_TASKS, parameters)
    counted = connection.execute(_COUNT_REPORTED.encode(), parameters)  # on its way before an answer is read
    progress = {
        row["task_id"]: transitions.TaskProgress(
            task_rows.state_of(row["state"], is_over=row["finished_at"] is not None),
            row["attempt"],
            row["endpoint_id"],
            row["owner_id"],
            row["task_group_id"],
        )
        for row in locked
    }
    return progress, {(row["task_id"], row["attempt"]): row["count"] for row in counted}


def _write(connection: psycopg.Connection[DictRow], statement: str, rows: Sequence[Mapping[str, Any]]) -> None:
    if rows:
        connection.execute(statement.encode(), columns_of(rows))
