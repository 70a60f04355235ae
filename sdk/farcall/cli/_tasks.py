"""``farcall tasks``."""

from __future__ import annotations

import dataclasses
import itertools
import os
import shutil
import sys
import time
from collections.abc import Mapping
from typing import Annotated, Any, Final

import typer

from farcall._client import connection_of, info_of
from farcall._details import BY_SERVICE, listed
from farcall._task_output import STREAMS, OutputCursor
from farcall.cli._arguments import all_last_of, completes, last_of, remember
from farcall.cli._connect import command_environment, connected
from farcall.cli._output import (
    AsJson,
    AsLines,
    FullIds,
    Since,
    Until,
    moment,
    show_json,
    show_line,
    show_output,
    show_text,
    shown_ids,
    write,
)
from farcall_common import graphs
from farcall_common.console import cut_off, duration, instant, new_group, show_fields, show_table
from farcall_common.errors import InvalidRequest, TaskUnknown
from farcall_common.exit_codes import FAILED
from farcall_common.plain_text import plain
from farcall_common.progress import PROGRESS, read_progress
from farcall_common.staging import FILES, STAGING, StagedFile, read_staging, shown_size
from farcall_common.wire import TERMINAL_STATES, TaskState

app = new_group("Your tasks.")

_EXPORTED: Final = (
    "task_id",
    "status",
    "task_group_id",
    "endpoint_id",
    "function_id",
    "function_version",
    "attempt",
    "submitted_at",
    "finished_at",
    "retry_of",
    "owner_id",
    "error",
)

#: Those of `tasks show` that its JSON has, with what the worker reported.
_KEPT_FIELDS: Final = (
    "task",
    "state",
    "task group",
    "endpoint",
    "function",
    "environment",
    "target",
    "attempt",
    "retry of",
)

#: Details of a task that are not shown as fields.
_NOT_FIELDS: Final = frozenset({"task_transitions", PROGRESS, STAGING, FILES, *graphs.DETAILS})

#: Seconds between two looks at tasks; with many of them a tenth of a second for each.
_WATCH_S: Final = 1.0
_WATCH_EACH_S: Final = 0.1
_ENDED: Final = frozenset(map(str, TERMINAL_STATES))

State = Annotated[TaskState | None, typer.Option(help="Only tasks in this state, like running or failed.")]
OnEndpoint = Annotated[
    str | None,
    typer.Option(
        "--endpoint",
        "-e",
        metavar="NAME|ID",
        help="Only tasks of this endpoint.",
        autocompletion=completes("endpoints"),
    ),
]
TaskId = Annotated[
    str,
    typer.Argument(
        metavar="TASK",
        help="Its id, the first digits of it, or @last: that of your last `farcall run` or `map`.",
        autocompletion=completes("tasks"),
    ),
]
TaskIds = Annotated[list[str], typer.Argument(metavar="TASK...", autocompletion=completes("tasks"))]
#: Ids begin with the time of the submit: 13 characters are a millisecond.
_ID_CHARS: Final = 13


@app.command("ls")
def list_(
    context: typer.Context,
    state: State = None,
    endpoint: OnEndpoint = None,
    limit: Annotated[int, typer.Option(min=1, help="How many at most.")] = 50,
    full_ids: FullIds = False,
    as_json: AsJson = False,
) -> None:
    """List tasks, newest first: how long ago they were submitted, and how long they waited and ran.

    With --state dead-lettered, tasks that crashed the worker in each attempt, until you discard them; with --endpoint
    too, also those of other users, if you own the endpoint.
    """
    with connected(context) as client:
        found = client.iter_tasks(state=state and str(state), endpoint_id=endpoint, page=min(limit, 1000))
        tasks = list(itertools.islice(found, limit))
        if not as_json:
            tasks = [connection_of(client).sealer.shown(task) for task in tasks]
    remember("tasks", (task["task_id"] for task in tasks))
    if as_json:
        show_json(tasks)
        return
    ids = shown_ids((task["task_id"] for task in tasks), full=full_ids, least=_ID_CHARS)
    others = shown_ids((task[key] for task in tasks for key in ("function_id", "endpoint_id")), full=full_ids)
    now = time.time()
    rows = [
        (
            ids[task["task_id"]],
            task.get("function_name") or others[task["function_id"]],
            task.get("endpoint_name") or others[task["endpoint_id"]],
            task["status"],
            duration(max(0.0, now - task["submitted_at"])) if task["submitted_at"] else "",
            *map(duration, _waited_and_ran(task, now)),
            (task.get("error") or {}).get("message", "").partition("\n")[0],
        )
        for task in tasks
    ]
    columns = ("task", "function", "endpoint", "state", "age", "waited", "ran", "error")
    show_table(columns, rows, empty="You have no such tasks.", cut=True)


@app.command()
def show(context: typer.Context, task_id: TaskId, as_json: AsJson = False) -> None:
    """Show a task, and its result or error; its progress, its files, and of a graph its stages, also while it runs."""
    with connected(context) as client:
        task = info_of(client, last_of("tasks", task_id))
    error = None if task.pending or task.exception is None else task.exception
    details = {name: value for name, value in task.details.items() if name not in _NOT_FIELDS}
    times = task.timings
    fields: dict[str, Any] = {
        "task": task.task_id,
        "state": task.state,
        "task group": task.task_group_id,
        "endpoint": task.endpoint_id,
        "function": task.function_id,
        "environment": task.environment,
        "target": task.target,
        "attempt": task.attempt,
        "submitted": instant(times.get("submitted_at")),
        "started": instant(times.get("started_at")),
        "finished": instant(task.finished_at),
        "ran": duration(times["ended_at"] - times["started_at"]) if {"started_at", "ended_at"} <= times.keys() else "",
        "retry of": task.retry_of,
        "progress": str(task.progress) if task.progress else "",
        "staging": str(task.staging) if task.staging else "",
        "result": None if task.pending or task.exception else repr(task.value),
        "error": error,
    }
    said = [name for name, value in fields.items() if value and task.is_by_service(name)]
    for name, value in details.items():
        label, shown_value = _field(name, value)
        if label not in fields:
            fields[label] = shown_value
            said += [label] if task.is_by_service(name) else []
    fields["error"] = fields.pop("error")
    if said:
        fields[BY_SERVICE] = listed(said)
    if as_json:
        record = getattr(error, "record", None)
        shown = {name.replace(" ", "_"): fields[name] for name in _KEPT_FIELDS} | dict(task.details)
        shown |= {"timings": task.timings, "finished": task.finished_at, "error": record and record.to_json()}
        shown |= {"by_service": task.by_service} if task.by_service else {}
        show_json(shown | {"result": task.value})
        return
    show_fields(fields)
    if task.stages:
        show_text("")
        columns, *rows = task.stages.rows
        show_table(columns, rows, cut=True)
        if task.stages.by_service:
            show_text(f"({BY_SERVICE})")
    if task.files:
        show_text("")
        show_table(("file", "mode", "size", "from"), map(_about_file, task.files), cut=True)
    for note in getattr(error, "__notes__", ()):
        show_text(f"\n{note}")


def _about_file(file: StagedFile) -> tuple[str, ...]:
    return plain(file.url), file.mode, shown_size(file.size_bytes), "cache" if file.cached else ""


@app.command()
def watch(context: typer.Context, task_ids: TaskIds, as_json: AsJson = False) -> None:
    """Show the state and the progress of tasks until all of them have ended, or their files that move: a line for each.

    A terminal shows the lines again each second. A pipe, or with --json standard output, gets a line for each change.
    The exit code is 1 if a task did not succeed. The tasks continue when the command is interrupted.
    """
    with connected(context, doing=None) as client:
        connection = connection_of(client)
        wanted = dict.fromkeys(connection.ids.task(each) for each in all_last_of("tasks", task_ids))
        display = _Watched(shown_ids(wanted, least=_ID_CHARS), as_json=as_json)
        found: dict[str, Mapping[str, Any]] = {}
        while True:
            left = [id_ for id_ in wanted if _state(found.get(id_)) not in _ENDED]
            found |= {id_: connection.sealer.shown(connection.api.get_task(id_)) for id_ in left}
            display.show(found)
            count = sum(_state(task) not in _ENDED for task in found.values())
            if not count:
                break
            command_environment(context).pause(max(_WATCH_S, count * _WATCH_EACH_S))
    if any(_state(task) != str(TaskState.SUCCESS) for task in found.values()):
        raise typer.Exit(FAILED)


class _Watched:
    """Lines about tasks: on a terminal with room for all of them in place, else one for each change.

    :param ids: as a terminal shows them.
    """

    def __init__(self, ids: Mapping[str, str], *, as_json: bool) -> None:
        self._ids = ids
        self._as_json = as_json
        can_redraw = sys.stdout.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")
        self._in_place = not as_json and can_redraw and len(ids) < shutil.get_terminal_size().lines
        self._lines: dict[str, str] = {}

    def show(self, tasks: Mapping[str, Mapping[str, Any]]) -> None:
        """Show how the tasks are now."""
        if self._in_place:
            if self._lines:
                typer.echo(f"\x1b[{len(self._lines)}A", nl=False)
            columns = shutil.get_terminal_size().columns  # now: a window may change
            for task_id, task in tasks.items():
                self._lines[task_id] = cut_off("  ".join(self._cells(task_id, task)).rstrip(), columns - 1)
                typer.echo(f"\r\x1b[K{self._lines[task_id]}")
            return
        for task_id, task in tasks.items():
            line = "\t".join(self._cells(task_id, task))
            if self._lines.get(task_id) == line:
                continue
            self._lines[task_id] = line
            if self._as_json:
                progress, staging = read_progress(task.get(PROGRESS)), read_staging(task.get(STAGING))
                shown: dict[str, Any] = {"task_id": task_id, "status": _state(task)}
                shown |= {} if progress is None else {PROGRESS: progress.to_json()}
                show_line(shown | ({} if staging is None else {STAGING: staging.to_json()}))
            else:
                typer.echo(line)

    def _cells(self, task_id: str, task: Mapping[str, Any]) -> tuple[str, str, str]:
        progress = read_staging(task.get(STAGING)) or read_progress(task.get(PROGRESS))
        return self._ids[task_id], f"{_state(task):<8}" if self._in_place else _state(task), str(progress or "")


def _state(task: Mapping[str, Any] | None) -> str:
    """The state in an answer about a task; empty without one."""
    return "" if task is None else str(task["status"])


@app.command()
def events(context: typer.Context, task_id: TaskId, as_json: AsJson = False) -> None:
    """Show the events of a task, in order."""
    with connected(context) as client:
        history = client.get_task_events(last_of("tasks", task_id))
    if as_json:
        show_json(history)
        return
    rows = [(instant(e["at"]), e["state"], e["reporter"], e["attempt"], e["detail"] or "") for e in history]
    show_table(("at", "state", "reported by", "attempt", "detail"), rows, empty="Nothing yet.")


@app.command()
def why(context: typer.Context, task_id: TaskId, as_json: AsJson = False) -> None:
    """Show why a task is in its state: its position in the queue, and the state of its endpoint."""
    with connected(context) as client:
        answer = client.why(last_of("tasks", task_id))
    if as_json:
        show_json(dataclasses.asdict(answer))
        return
    show_text(answer.text)
    online = {True: "online", False: "offline", None: None}[answer.endpoint_online]
    show_fields(
        {
            "reason": answer.reason,
            "state": f"{answer.state}, for {answer.state_age_s:.0f} s",
            "attempt": answer.attempt or None,
            "tasks in front": answer.queue_position,
            "endpoint": " ".join(filter(None, (answer.endpoint_name, answer.endpoint_id, online))),
            "last seen": instant(answer.endpoint_seen_at),
            "workers": answer.workers,
            "problem": answer.problem,
            "target": answer.target,
            "target cannot be met": answer.infeasible,
        }
    )


@app.command()
def logs(
    context: typer.Context,
    task_id: TaskId,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Show new output until the task has ended.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show the last output of a task, running or ended: its standard output, and on standard error its standard error.

    Its endpoint keeps the last 16 KiB of each for a day. With --json --follow, each part is a line of JSON.
    """
    with connected(context, doing=None) as client:
        cursor = OutputCursor(connection_of(client).ids.task(last_of("tasks", task_id)))
        reader, seen = connection_of(client).output, False
        for parts in reader.follow(cursor) if follow else [reader.read([cursor])]:
            seen = seen or bool(parts)
            if follow or not as_json:
                for part in parts:
                    show_output(part, as_json=as_json)
    if not cursor.state:
        raise TaskUnknown(f"there is no task {task_id}")
    if as_json and not follow:
        texts = {part.stream: part.text for part in parts}
        tails = {f"{stream}_tail": texts.get(stream, "") for stream in STREAMS}
        show_json({"task_id": cursor.task_id, "status": cursor.state, **tails, "reason": cursor.reason})
    elif not seen and not as_json:
        why = _NO_OUTPUT.get(cursor.reason or "", "It has printed nothing.")
        typer.echo(f"No output of this task; it is {cursor.state}. {why.format(cursor.task_id)}", err=True)


#: Explanations of the reasons in :class:`TaskOutput`.
_NO_OUTPUT: Final = {
    "NOT_STARTED": "`farcall tasks why {}` says what it waits for.",
    "ENDPOINT_OFFLINE": "The output is at its endpoint, which is offline.",
    "NOT_KEPT": "It printed nothing, it ended over a day ago, or it was submitted with output_bytes=0.",
    "NO_ANSWER": "Its endpoint has not answered; try again.",
    "NOT_SEALED": "The call was sealed, and what the service shows as its output is not: it is left out.",
    "SEALED": "Its record is sealed: `future.stdout` and `Client.get_batch_result` open it.",
}


@app.command()
def cancel(
    context: typer.Context,
    task_ids: Annotated[list[str] | None, typer.Argument(metavar="TASK...", autocompletion=completes("tasks"))] = None,
    group: Annotated[
        str | None,
        typer.Option(metavar="GROUP", help="All tasks of this group.", autocompletion=completes("groups")),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Cancel tasks, waiting or running: those named, or those of a group."""
    if bool(task_ids) == (group is not None):
        raise InvalidRequest("which tasks to cancel is not clear", hint="Name tasks, or pass --group.")
    with connected(context) as client:
        if group is not None:
            outcomes = client.cancel_group(last_of("groups", group))
        else:
            outcomes = client.cancel_many(all_last_of("tasks", task_ids or ()))
    if as_json:
        show_json(outcomes)
    else:
        show_table(("task", "outcome"), [(id_, each["outcome"]) for id_, each in outcomes.items()])
    unknown = [id_ for id_, each in outcomes.items() if each["outcome"] == "unknown"]
    if unknown:
        raise TaskUnknown(f"no tasks of yours: {', '.join(unknown)}")


@app.command()
def retry(
    context: typer.Context,
    task_ids: TaskIds,
    as_json: AsJson = False,
) -> None:
    """Run tasks that have ended again: the same function, arguments, endpoint and options, as new tasks.

    The API keeps the arguments for as long as the task, except for those of a dead letter that was discarded.
    """
    with connected(context) as client:
        again = {task_id: client.retry(task_id) for task_id in dict.fromkeys(all_last_of("tasks", task_ids))}
    remember("tasks", again.values())
    if as_json:
        show_json(again)
    else:
        show_table(("task", "again as"), list(again.items()))


@app.command()
def discard(
    context: typer.Context,
    task_ids: TaskIds,
    as_json: AsJson = False,
) -> None:
    """Discard dead letters: they are not listed any more, and their arguments are deleted.

    A dead letter is a task that crashed its worker, or the endpoint, in each attempt.
    """
    with connected(context) as client:
        task_ids = [connection_of(client).ids.task(each) for each in dict.fromkeys(all_last_of("tasks", task_ids))]
        for task_id in task_ids:
            client.discard(task_id)
    if as_json:
        show_json({"discarded": task_ids})
    else:
        show_table(("discarded",), [(task_id,) for task_id in task_ids])


@app.command()
def export(
    context: typer.Context,
    since: Since = None,
    until: Until = None,
    state: State = None,
    endpoint: OnEndpoint = None,
    as_json: AsLines = True,
) -> None:
    """Write all of your tasks, newest first, however many: a JSON object a line, or CSV. Instants are epoch seconds."""
    first, last = moment(since), moment(until)
    with connected(context, doing=None) as client:
        tasks = client.iter_tasks(state=state and str(state), endpoint_id=endpoint, since=first, until=last)
        write(tasks, _EXPORTED, as_json=as_json)


def _field(name: str, value: Any) -> tuple[str, Any]:
    """A detail of a task as a field: seconds as a duration."""
    if name.endswith("_s") and isinstance(value, int | float):
        name, value = name.removesuffix("_s"), duration(value)
    return name.replace("_", " "), value


def _waited_and_ran(task: Mapping[str, Any], now: float) -> tuple[float | None, float | None]:
    """Seconds that a task waited before its last attempt started, and that this one ran; None if not known."""
    timings, submitted_at, finished_at = task.get("timings") or {}, task["submitted_at"], task["finished_at"]
    ran_s = timings["ended_at"] - timings["started_at"] if {"started_at", "ended_at"} <= timings.keys() else None
    if submitted_at is None or task["status"] == "running":
        return None, ran_s
    # Start and end are by the clock of the worker, which may be another: only their difference counts.
    return max(0.0, (finished_at or now) - submitted_at - (ran_s or 0.0)), ran_s
