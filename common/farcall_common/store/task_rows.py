"""Task rows: tasks, events and results as rows of PostgreSQL, and the batch statements that write them."""

# ruff: noqa: S608 - statements are put together from the column names in this file

from __future__ import annotations

import datetime as dt
import functools
import operator
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from typing import Any, Final

import msgspec

from farcall_common.errors import ErrorRecord
from farcall_common.graphs import STAGE_CALLS, STAGE_RUN_S
from farcall_common.retries import EARLIER_RUN_S
from farcall_common.store import transitions
from farcall_common.store.audit_postgres import AUDIT_OF_BATCH
from farcall_common.store.model import BlobRef, Task, TaskEvent, TaskGroup, TaskResult
from farcall_common.store.postgres import to_json
from farcall_common.task_options import TaskOptions
from farcall_common.wire.states import Reporter, TaskState

_TASK_COLUMNS: Final = Task.__struct_fields__
WHOLE_TASK: Final = f"SELECT {', '.join(_TASK_COLUMNS)} FROM task"
LIGHT_TASK: Final = WHOLE_TASK.replace(" payload,", " NULL AS payload,").replace(" result,", " NULL AS result,")
_HAS_CALLEES: Final = """strpos(options::text, '"callees":[[') > 0"""
#: Columns of tasks in answers: each of very many may name a thousand functions, and none of them is shown.
_SHOWN_OPTIONS: Final = f"""CASE WHEN {_HAS_CALLEES} THEN coalesce(
        (SELECT json_object_agg(key, value) FROM json_each(options) WHERE key <> 'callees'), '{{}}'::json
    ) ELSE options END AS options"""
SHOWN_TASK: Final = WHOLE_TASK.replace(" payload,", " NULL AS payload,").replace(" options,", f" {_SHOWN_OPTIONS},")
#: Columns of a list of tasks, and of a long one: details and errors may be as large as a message, and options may name
#: a thousand functions.
_WITH_OPTIONS: Final = LIGHT_TASK.replace(" details,", " '{}'::json AS details,")
_LISTED_TASK: Final = _WITH_OPTIONS.replace(" options,", " '{}'::json AS options,")
SHORT_TASK: Final = _LISTED_TASK.replace(" error,", " NULL AS error,")
_SHORT_WITH_OPTIONS: Final = _WITH_OPTIONS.replace(" error,", " NULL AS error,")
GROUP: Final = f"""
    {SHORT_TASK}
    WHERE task_group_id = %(id)s AND (%(owners)s::text[] IS NULL OR owner_id = ANY(%(owners)s))
    ORDER BY submitted_at, task_id LIMIT %(limit)s
"""

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
    "options": "json",
    "state": "text",
    "result": "bytea",
    "result_ref": "json",
    "details": "json",
    "submitted_at": "timestamptz",
    "finished_at": "timestamptz",
    "timings": "jsonb",
    "memo_key": "text",
    "traceparent": "text",
    "function_version": "integer",
    "retry_of": "text",
    "quota_key": "text",
}
_new_values: Final = operator.attrgetter(*_NEW_TASK)
#: The columns that are never looked at for whether all new tasks have the same: the one cannot, the other is long.
_OF_EACH_TASK: Final = frozenset({"task_id", "payload"})
_TRANSITION: Final = {"task_id": "text", "state": "text", "attempt": "integer"}
_EVENT: Final = {**_TRANSITION, "reporter": "text", "at": "timestamptz", "detail": "json"}
_RESULT: Final = {
    **_TRANSITION,
    "endpoint_id": "text",
    "reporter": "text",
    "detail": "json",
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


_ADD_TASKS: Final = f"""
    WITH added AS (
        INSERT INTO task ({", ".join(_NEW_TASK)}) SELECT {{values}} FROM {{rows}}
        WHERE %(required_endpoint)b::text IS NULL
            OR EXISTS (SELECT FROM endpoint WHERE endpoint.endpoint_id = %(required_endpoint)b::text)
        ON CONFLICT (task_id) DO NOTHING
        RETURNING task_id, task_group_id, owner_id, state, submitted_at, finished_at
    ), groups AS (
        INSERT INTO task_group (task_group_id, owner_id, created_at)
        SELECT DISTINCT ON (task_group_id) task_group_id, owner_id, submitted_at FROM added
        ON CONFLICT (task_group_id) DO NOTHING
    ), audited AS ({AUDIT_OF_BATCH}), ended AS (
        INSERT INTO task_event (task_id, state, reporter, at, attempt)
        SELECT task_id, state, '{Reporter.API}', finished_at, 0 FROM added WHERE finished_at IS NOT NULL
    )
    SELECT task_id FROM added
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

#: That a task was received is in its own row, and needs no other. Releases before this one have added one all the same.
EVENTS: Final = f"""
    SELECT {", ".join(_EVENT)} FROM (
        SELECT 0 AS event_id, task_id, '{TaskState.RECEIVED}' AS state, 0 AS attempt, '{Reporter.API}' AS reporter,
            submitted_at AS at, '{{}}'::json AS detail
        FROM task WHERE task_id = %(id)s AND NOT EXISTS (
            SELECT FROM task_event WHERE task_id = %(id)s AND state = '{TaskState.RECEIVED}'
        )
        UNION ALL
        SELECT event_id, {", ".join(_EVENT)} FROM task_event WHERE task_id = %(id)s
    ) AS events ORDER BY event_id LIMIT %(limit)s OFFSET %(after)s
"""

#: A page by the index ``task_group_of_owner``, then the tasks of each group on it. A group may have tasks of others.
GROUPS: Final = """
    SELECT page.task_group_id, page.created_at, json_object_agg(state, count) AS states
    FROM (
        SELECT task_group_id, created_at FROM task_group
        WHERE owner_id = %(owner_id)s AND (
            %(before)s::text IS NULL OR (created_at, task_group_id) < (
                SELECT created_at, task_group_id FROM task_group
                WHERE task_group_id = %(before)s AND owner_id = %(owner_id)s
            )
        )
        ORDER BY created_at DESC, task_group_id DESC LIMIT %(limit)s
    ) AS page CROSS JOIN LATERAL (
        SELECT state, count(*) FROM task
        WHERE task_group_id = page.task_group_id AND owner_id = %(owner_id)s GROUP BY state
    ) AS counted
    GROUP BY page.task_group_id, page.created_at ORDER BY page.created_at DESC, page.task_group_id DESC
"""

MOVE_TASKS: Final = f"""
    UPDATE task SET state = new.state, attempt = new.attempt
    FROM {_unnest(_TRANSITION)} WHERE task.task_id = new.task_id
"""

#: Seconds of an attempt by its worker's clock.
_TIMED_S: Final = "(timings -> 'ended_at')::float8 - (timings -> 'started_at')::float8"

#: Those of a task whose worker was stopped or died, from the agent's report that it runs. Of a lost task they are not
#: known.
_STOPPED_S: Final = f"""CASE WHEN state <> '{TaskState.LOST}' THEN extract(epoch FROM at - (
        SELECT max(running.at) FROM task_event AS running
        WHERE running.task_id = ended.task_id AND running.state = '{TaskState.RUNNING}'
    ))::float8 END"""

#: Whole nodes that a task of MPI ranks has; NULL for others.
_NODES: Final = """coalesce((options ->> 'num_nodes')::float8,
    ceil((options ->> 'num_ranks')::float8 / (options ->> 'ranks_per_node')::float8))"""


#: Of the runs before the last one, which raised and were retried.
_EARLIER_S: Final = f"coalesce((new.details ->> '{EARLIER_RUN_S}')::float8, 0)"


#: Of a graph, and of a task that made calls: calls that ran, and the seconds of all together.
_STAGES: Final = f"coalesce((new.details ->> '{STAGE_CALLS}')::bigint, 0)"
_STAGES_S: Final = f"(new.details ->> '{STAGE_RUN_S}')::float8"


def _end_tasks(run_s: str, *, earlier_s: str = "0", stages: str = "0", stages_s: str = "NULL::float8") -> str:
    """The statement that ends tasks, with the seconds that one ran: no more than since its submit, whatever clocks say.
    Calls run beside each other, and beside the task that makes them: no more than that for it and for each call.

    Every open state permits every end, so that whether a task is open decides. Rows are locked in the order of their
    ids, so that two batches that share some never wait for each other in a circle.
    """
    return f"""
    WITH open AS (
        SELECT task_id FROM task WHERE task_id = ANY(%(task_id)b) AND finished_at IS NULL
        ORDER BY task_id FOR NO KEY UPDATE
    ), ended AS (
        UPDATE task SET
            state = new.state, attempt = greatest(task.attempt, new.attempt), finished_at = %(at)b,
            result = new.result, result_ref = new.result_ref, error = new.error,
            details = coalesce(new.details, task.details), timings = task.timings || new.timings
        FROM open JOIN {_unnest(_RESULT)} USING (task_id)
        WHERE task.task_id = open.task_id AND task.endpoint_id = new.endpoint_id
        RETURNING task.task_id, new.state, new.attempt, new.reporter, task.finished_at AS at, new.detail,
            task.task_group_id, task.owner_id, task.endpoint_id, task.submitted_at, task.function_id, task.timings,
            task.options, {earlier_s} AS earlier_s, {stages} AS stages, {stages_s} AS stages_s
    ), spent AS (
        SELECT (at AT TIME ZONE 'UTC')::date AS day, owner_id, function_id, ended.endpoint_id, state, share, stages,
            greatest(0, least(
                extract(epoch FROM at - submitted_at)::float8 * (1 + stages),
                coalesce(stages_s, {run_s}) + earlier_s
            )) AS wall_s,
            {_NODES} AS nodes
        FROM ended LEFT JOIN (
            SELECT endpoint_id, worker_share AS share FROM endpoint
            WHERE endpoint_id = ANY(%(endpoint_id)b) OFFSET 0
        ) AS shares ON shares.endpoint_id = ended.endpoint_id
    ), parts AS (
        INSERT INTO usage_part (
            day, owner_id, function_id, endpoint_id, account, tasks, failed, wall_s, core_s, gpu_s, stages
        )
        SELECT day, owner_id, function_id, endpoint_id, coalesce(share ->> 'account', ''), count(*),
            count(*) FILTER (WHERE state NOT IN ('{TaskState.SUCCESS}', '{TaskState.CANCELLED}')), sum(wall_s),
            sum(wall_s * coalesce(nodes * (share ->> 'node_cores')::float8, (share ->> 'cores')::float8, 1)),
            sum(wall_s * coalesce(nodes * (share ->> 'node_gpus')::float8, (share ->> 'gpus')::float8, 0)),
            sum(stages)
        FROM spent GROUP BY day, owner_id, function_id, endpoint_id, coalesce(share ->> 'account', '')
    ), letters AS (
        INSERT INTO dead_letter (task_id, owner_id, endpoint_id, submitted_at)
        SELECT task_id, owner_id, endpoint_id, submitted_at FROM ended WHERE state = '{TaskState.DEAD_LETTERED}'
    ), events AS (
        INSERT INTO task_event ({", ".join(_EVENT)}) SELECT {", ".join(_EVENT)} FROM ended
    )
    SELECT task_id, endpoint_id, task_group_id, owner_id FROM ended
"""


#: For results with the times of their worker and no retry or graph, which is most: the plan is made each time, and half
#: as long for these.
END_TIMED_TASKS: Final = _end_tasks(_TIMED_S)
END_TASKS: Final = _end_tasks(
    f"coalesce({_TIMED_S}, {_STOPPED_S}, 0)", earlier_s=_EARLIER_S, stages=_STAGES, stages_s=_STAGES_S
)

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
    ), letters AS (
        DELETE FROM dead_letter USING gone WHERE dead_letter.task_id = gone.task_id
    ), groups AS (
        DELETE FROM task_group WHERE task_group_id IN (SELECT task_group_id FROM gone) AND NOT EXISTS (
            SELECT FROM task WHERE task.task_group_id = task_group.task_group_id
                AND task.task_id NOT IN (SELECT task_id FROM gone)
        )
    )
    SELECT count(*) FROM gone
"""


#: That a task is not of a function, but may call it; by the index ``task_open_callees``. Options are searched as text,
#: which takes no time for those of other tasks when they are added.
CALLS_FUNCTION: Final = f"""{_HAS_CALLEES} AND function_id <> %(function_id)s
    AND strpos(options::text, '["' || %(function_id)s || '","') > 0"""


def open_tasks(conditions: Sequence[str], *, with_options: bool) -> str:
    """The statement that finds a page of the open tasks with all of these."""
    columns = _SHORT_WITH_OPTIONS if with_options else SHORT_TASK
    return f"""{columns} WHERE {" AND ".join(conditions)} AND task_id > %(after)s AND finished_at IS NULL
        ORDER BY task_id LIMIT %(limit)s
    """


DISCARD: Final = """
    WITH discarded AS (DELETE FROM dead_letter WHERE task_id = ANY(%(ids)s) RETURNING task_id)
    UPDATE task SET payload = NULL, payload_ref = NULL FROM discarded WHERE task.task_id = discarded.task_id
    RETURNING task.task_id
"""

#: Rows that a search for ids looks at: they may all be of others.
_LOOKED_AT: Final = 10_000


def find_ids(kind: str) -> str:
    """The statement that finds ids by their beginning. ``g`` is after every digit."""
    table, key = {"task": ("task", "task_id"), "group": ("task_group", "task_group_id")}[kind]
    return f"""
        SELECT count(*) < {_LOOKED_AT} AS is_all,
            (array_agg(id ORDER BY id DESC) FILTER (WHERE owner_id = ANY(%(owners)s)))[:%(limit)s] AS ids
        FROM (
            SELECT {key} AS id, owner_id FROM {table} WHERE {key} >= %(beginning)s AND {key} < %(beginning)s || 'g'
            ORDER BY {key} DESC LIMIT {_LOOKED_AT}
        ) AS looked_at
    """


NAMES: Final = """
    SELECT function_id AS id, name FROM function WHERE function_id = ANY(%(ids)s)
    UNION ALL SELECT endpoint_id, name FROM endpoint WHERE endpoint_id = ANY(%(ids)s)
"""

_LIST: Final = """
    (%(owner_id)s::text IS NULL OR {of}.owner_id = %(owner_id)s)
    AND (%(endpoint_id)s::text IS NULL OR {of}.endpoint_id = %(endpoint_id)s)
    AND (%(since)s::timestamptz IS NULL OR {of}.submitted_at >= %(since)s)
    AND (%(until)s::timestamptz IS NULL OR {of}.submitted_at < %(until)s)
    AND (%(before_at)s::timestamptz IS NULL OR {of}.submitted_at <= %(before_at)s)
    AND (%(before_at)s::timestamptz IS NULL OR ({of}.submitted_at, {of}.task_id) < (%(before_at)s, %(before_id)s))
    {state}
    ORDER BY {of}.submitted_at DESC, {of}.task_id DESC LIMIT %(limit)s
"""
_BY_STATE: Final = f"{_LISTED_TASK} WHERE {_LIST.format(of='task', state='AND state = %(state)s')}"
_OF_ANY_STATE: Final = f"{_LISTED_TASK} WHERE {_LIST.format(of='task', state='')}"
_DEAD_LETTERS: Final = f"""
    {_LISTED_TASK}
    WHERE task_id IN (SELECT task_id FROM dead_letter WHERE {_LIST.format(of="dead_letter", state="")})
    ORDER BY submitted_at DESC, task_id DESC
"""


def list_of_tasks(state: TaskState | None) -> str:
    """The statement that lists tasks in a state, newest first."""
    if state is TaskState.DEAD_LETTERED:
        return _DEAD_LETTERS
    return _OF_ANY_STATE if state is None else _BY_STATE


def add_tasks(tasks: Sequence[Task]) -> tuple[str, dict[str, Any]]:
    """The statement that adds tasks, and its parameters. There must be a task.

    Tasks of one submit have most in common, and writing arrays takes most of the time of a submit: what is the same in
    all of them travels once.
    """
    parameters: dict[str, Any] = {}
    shared = set()
    for (name, kind), column in zip(_NEW_TASK.items(), zip(*map(_new_values, tasks), strict=True), strict=True):
        values, is_json = list(column), kind.startswith("json")
        if name not in _OF_EACH_TASK and (_are_one(values) if is_json else values.count(values[0]) == len(values)):
            shared.add(name)
            values = values[:1]
        if is_json:
            values = [to_json(value) for value in values]
        elif name == "state":
            values = [str(state) for state in values]
        parameters[name] = values[0] if name in shared else values
    return _add_tasks(frozenset(shared)), parameters


def _are_one(values: Sequence[Any]) -> bool:
    """Whether all are written alike. Equal ones need not be: 1 equals True, and other JSON is made of it."""
    if len(set(map(id, values))) == 1:
        return True
    first = values[0]
    return not first and all(value == first for value in values)


@functools.lru_cache(maxsize=64)
def _add_tasks(shared: Set[str]) -> str:
    values = ", ".join(f"{_cast(name, kind)} AS {name}" if name in shared else name for name, kind in _NEW_TASK.items())
    return _ADD_TASKS.format(
        values=values, rows=_unnest({name: kind for name, kind in _NEW_TASK.items() if name not in shared})
    )


def _cast(name: str, kind: str) -> str:
    return f"%({name})b::text::{kind}" if kind.startswith("json") else f"%({name})b::{kind}"


def end_columns(results: Sequence[TaskResult], *, at: dt.datetime) -> dict[str, Any]:
    """The parameters of END_TASKS. Made column by column, because every task passes here."""
    recorded_at = at.timestamp()
    return {
        "at": at,
        "task_id": [result.task_id for result in results],
        "endpoint_id": [result.endpoint_id for result in results],
        "state": [str(result.state) for result in results],
        "attempt": [result.attempt for result in results],
        "reporter": [str(result.reporter) for result in results],
        "detail": [to_json(transitions.result_detail(result)) for result in results],
        "result": [result.result for result in results],
        "result_ref": [to_json(result.result_ref) for result in results],
        "error": [result.error and to_json(result.error.to_json()) for result in results],
        "details": [to_json(result.details or None) for result in results],
        "timings": [to_json({**result.timings, "recorded_at": recorded_at}) for result in results],
    }


def event_row(event: TaskEvent) -> dict[str, Any]:
    """A row of ADD_EVENTS."""
    row = msgspec.structs.asdict(event)
    return {**row, "state": str(event.state), "reporter": str(event.reporter), "detail": to_json(event.detail)}


def event_from_row(row: Mapping[str, Any]) -> TaskEvent:
    """An event as it was appended."""
    state = state_of(row["state"], is_over="code" in row["detail"])
    return TaskEvent(**{**row, "state": state, "reporter": _reporter_of(row["reporter"])})


def group_from_row(row: Mapping[str, Any]) -> TaskGroup:
    """A task group as the statement GROUPS counts it."""
    states: Counter[TaskState] = Counter()
    for state, count in row["states"].items():
        states[state_of(state, is_over=True)] += count
    return TaskGroup(row["task_group_id"], row["created_at"], dict(states))


def task_from_row(row: Mapping[str, Any]) -> Task:
    """A task as the table has it."""
    return Task(
        **{
            **row,
            "payload_ref": _blob_ref(row["payload_ref"]),
            "result_ref": _blob_ref(row["result_ref"]),
            "options": msgspec.convert(row["options"], TaskOptions),
            "error": row["error"] and ErrorRecord.from_json(row["error"]),
            "state": state_of(row["state"], is_over=row["finished_at"] is not None),
        }
    )


def state_of(text: str, *, is_over: bool) -> TaskState:
    """A state as this release knows it. One that a later release added is ``failed`` for a finished task, whose error
    has the details, and ``running`` for another, which no transition here takes back."""
    try:
        return TaskState(text)
    except ValueError:
        return TaskState.FAILED if is_over else TaskState.RUNNING


def _reporter_of(text: str) -> Reporter:
    """A reporter as this release knows it. One that a later release added counts as a forwarder: where one of those
    sent a task to is never overlooked."""
    try:
        return Reporter(text)
    except ValueError:
        return Reporter.FORWARDER


def _blob_ref(value: Mapping[str, Any] | None) -> BlobRef | None:
    # Its fields by name: a later release may have added some.
    return BlobRef(value["blob_key"], value["size_bytes"], value["sha256"]) if value else None
