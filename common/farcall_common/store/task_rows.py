"""Tasks, their events and their ends as rows of PostgreSQL, and the batch statements that write them."""

# ruff: noqa: S608 - statements are put together from the column names in this file

from __future__ import annotations

import dataclasses
import datetime as dt
from collections.abc import Mapping, Sequence
from typing import Any, Final

from farcall_common.errors import ErrorRecord
from farcall_common.store import moves
from farcall_common.store.model import BlobRef, Task, TaskEvent, TaskResult
from farcall_common.store.postgres import to_json
from farcall_common.wire.states import Reporter, TaskState

__all__ = [
    "ADD_EVENTS",
    "ADD_TASKS",
    "END_TASKS",
    "EVENTS",
    "LIGHT_TASK",
    "MEMOIZED",
    "MOVE_TASKS",
    "PURGE",
    "WHOLE_TASK",
    "columns_of",
    "end_row",
    "event_from_row",
    "event_row",
    "new_task_columns",
    "task_from_row",
]

_TASK_COLUMNS: Final = [field.name for field in dataclasses.fields(Task)]
WHOLE_TASK: Final = f"SELECT {', '.join(_TASK_COLUMNS)} FROM task"
LIGHT_TASK: Final = WHOLE_TASK.replace(" payload,", " NULL AS payload,").replace(" result,", " NULL AS result,")

#: The columns that a new task comes with; the others have defaults.
_NEW_TASK: Final = {
    "task_id": "text",
    "task_group_id": "text",
    "owner_id": "text",
    "endpoint_id": "text",
    "function_id": "text",
    "function_hash": "text",
    "payload": "bytea",
    "payload_ref": "json",
    "container_id": "text",
    "idempotent": "boolean",
    "max_attempts": "integer",
    "walltime_s": "double precision",
    "result_serializers": "json",
    "resource_specification": "json",
    "state": "text",
    "result": "bytea",
    "result_ref": "json",
    "details": "json",
    "submitted_at": "timestamptz",
    "finished_at": "timestamptz",
    "timings": "jsonb",
    "memo_key": "text",
}
_NEW_TASK_JSON: Final = [name for name, kind in _NEW_TASK.items() if kind.startswith("json")]
_MOVE: Final = {"task_id": "text", "state": "text", "attempt": "integer"}
_EVENT: Final = {**_MOVE, "reporter": "text", "at": "timestamptz", "detail": "json"}
_END: Final = {
    **_EVENT,
    "result": "bytea",
    "result_ref": "json",
    "error": "json",
    "details": "json",
    "timings": "jsonb",
}


def _unnest(columns: Mapping[str, str]) -> str:
    """A FROM item with a row per array element: ``unnest(%(task_id)s::text[], …) AS new (task_id, …)``.

    JSON travels as text, which the driver writes best.
    """
    arrays = (
        f"%({name})b::text[]::{kind}[]" if kind.startswith("json") else f"%({name})b::{kind}[]"
        for name, kind in columns.items()
    )
    return f"unnest({', '.join(arrays)}) AS new ({', '.join(columns)})"


def columns_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Rows turned into the arrays that a batch statement unnests. There must be a row."""
    return {name: [row[name] for row in rows] for name in rows[0]}


ADD_TASKS: Final = f"""
    WITH added AS (
        INSERT INTO task ({", ".join(_NEW_TASK)})
        SELECT {", ".join(_NEW_TASK)} FROM {_unnest(_NEW_TASK)}
        ON CONFLICT (task_id) DO NOTHING
        RETURNING task_id, task_group_id, owner_id, state, submitted_at, finished_at
    ), groups AS (
        INSERT INTO task_group (task_group_id, owner_id, created_at)
        SELECT DISTINCT ON (task_group_id) task_group_id, owner_id, submitted_at FROM added
        ON CONFLICT (task_group_id) DO NOTHING
    )
    INSERT INTO task_event (task_id, state, reporter, at, attempt)
    SELECT task_id, '{TaskState.RECEIVED}', '{Reporter.API}', submitted_at, 0 FROM added
    UNION ALL
    SELECT task_id, state, '{Reporter.API}', finished_at, 0 FROM added WHERE finished_at IS NOT NULL
    RETURNING task_id
"""

MEMOIZED: Final = f"""
    SELECT {", ".join(f"found.{name}" for name in _TASK_COLUMNS)}
    FROM unnest(%(keys)b::text[]) AS wanted (memo_key) CROSS JOIN LATERAL (
        SELECT * FROM task
        WHERE owner_id = %(owner_id)s AND memo_key = wanted.memo_key AND finished_at IS NOT NULL
            AND state = '{TaskState.SUCCESS}'
        ORDER BY finished_at DESC LIMIT 1
    ) AS found
"""

ADD_EVENTS: Final = f"INSERT INTO task_event ({', '.join(_EVENT)}) SELECT * FROM {_unnest(_EVENT)}"

EVENTS: Final = f"SELECT {', '.join(_EVENT)} FROM task_event WHERE task_id = %(id)s ORDER BY event_id"

MOVE_TASKS: Final = f"""
    UPDATE task SET state = new.state, attempt = new.attempt
    FROM {_unnest(_MOVE)} WHERE task.task_id = new.task_id
"""

END_TASKS: Final = f"""
    WITH ended AS (
        UPDATE task SET
            state = new.state, attempt = greatest(task.attempt, new.attempt), finished_at = new.at,
            result = new.result, result_ref = new.result_ref, error = new.error,
            details = coalesce(new.details, task.details), timings = task.timings || new.timings
        FROM {_unnest(_END)} WHERE task.task_id = new.task_id
        RETURNING new.task_id, new.state, new.attempt, new.reporter, new.at, new.detail
    )
    INSERT INTO task_event ({", ".join(_EVENT)}) SELECT {", ".join(_EVENT)} FROM ended
"""


#: Found by the index ``task_ended``. All parts see the tables as they were before: a group is empty when it has no task
#: but those that go.
PURGE: Final = """
    WITH old AS (
        SELECT task_id FROM task
        WHERE finished_at IS NOT NULL AND finished_at AT TIME ZONE 'UTC' < %(ended_before)s AT TIME ZONE 'UTC'
        ORDER BY finished_at AT TIME ZONE 'UTC' LIMIT %(limit)s FOR UPDATE SKIP LOCKED
    ), gone AS (
        DELETE FROM task USING old WHERE task.task_id = old.task_id RETURNING task.task_id, task.task_group_id
    ), events AS (
        DELETE FROM task_event USING gone WHERE task_event.task_id = gone.task_id
    ), groups AS (
        DELETE FROM task_group WHERE task_group_id IN (SELECT task_group_id FROM gone) AND NOT EXISTS (
            SELECT FROM task WHERE task.task_group_id = task_group.task_group_id
                AND task.task_id NOT IN (SELECT task_id FROM gone)
        )
    )
    SELECT count(*) FROM gone
"""


def new_task_columns(tasks: Sequence[Task]) -> dict[str, list[Any]]:
    """The arrays of ADD_TASKS. Made column by column: a submit has many tasks, and most of its time is spent here."""
    columns = {name: [getattr(task, name) for task in tasks] for name in _NEW_TASK}
    columns["state"] = [str(state) for state in columns["state"]]
    for name in _NEW_TASK_JSON:
        columns[name] = [to_json(value) for value in columns[name]]
    return columns


def end_row(result: TaskResult, *, at: dt.datetime) -> dict[str, Any]:
    """A row of END_TASKS: the task's end and the event that it leaves."""
    return event_row(moves.end_event(result, at=at)) | {
        "result": result.result,
        "result_ref": to_json(result.result_ref),
        "error": to_json(result.error and result.error.to_json()),
        "details": to_json(result.details or None),
        "timings": to_json({**result.timings, "recorded_at": at.timestamp()}),
    }


def event_row(event: TaskEvent) -> dict[str, Any]:
    """A row of ADD_EVENTS."""
    return {**vars(event), "state": str(event.state), "reporter": str(event.reporter), "detail": to_json(event.detail)}


def event_from_row(row: Mapping[str, Any]) -> TaskEvent:
    """An event as it was appended."""
    return TaskEvent(**{**row, "state": TaskState(row["state"]), "reporter": Reporter(row["reporter"])})


def task_from_row(row: Mapping[str, Any]) -> Task:
    """A task as the table has it."""
    return Task(
        **{
            **row,
            "payload_ref": row["payload_ref"] and BlobRef(**row["payload_ref"]),
            "result_ref": row["result_ref"] and BlobRef(**row["result_ref"]),
            "result_serializers": tuple(row["result_serializers"]),
            "error": row["error"] and ErrorRecord.from_json(row["error"]),
            "state": TaskState(row["state"]),
        }
    )
