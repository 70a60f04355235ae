"""``farcall tasks``."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Annotated, Any, Final

import typer

from farcall._client import connection_of
from farcall._task_output import STREAMS, OutputCursor
from farcall.cli._arguments import completes, remember
from farcall.cli._connect import connected
from farcall.cli._output import (
    AsJson,
    AsLines,
    Since,
    Until,
    instant,
    moment,
    show_fields,
    show_json,
    show_output,
    show_table,
    show_text,
    write,
)
from farcall_common.errors import TaskUnknown
from farcall_common.wire import TaskState

app = typer.Typer(help="Your tasks.", no_args_is_help=True)

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

State = Annotated[TaskState | None, typer.Option(help="Only tasks in this state, like running or failed.")]
OnEndpoint = Annotated[
    str | None, typer.Option(metavar="ID", help="Only tasks of this endpoint.", autocompletion=completes("endpoints"))
]
TaskId = Annotated[str, typer.Argument(metavar="TASK", autocompletion=completes("tasks"))]


@app.command("ls")
def list_(
    context: typer.Context,
    state: State = None,
    endpoint: OnEndpoint = None,
    limit: Annotated[int, typer.Option(min=1, help="How many at most.")] = 50,
    as_json: AsJson = False,
) -> None:
    """List tasks, newest first.

    With --state dead-lettered, tasks that ended the worker in each attempt, until they are discarded; with --endpoint
    too, those of all users, if the endpoint is yours.
    """
    with connected(context) as client:
        found = client.iter_tasks(state=state and str(state), endpoint_id=endpoint, page=min(limit, 1000))
        tasks = list(itertools.islice(found, limit))
    remember("tasks", (task["task_id"] for task in tasks))
    if as_json:
        show_json(tasks)
        return
    rows = [
        (
            task["task_id"],
            task["status"],
            instant(task["submitted_at"]),
            _duration(task),
            task["attempt"],
            task["endpoint_id"],
            (task.get("error") or {}).get("message", "").partition("\n")[0],
        )
        for task in tasks
    ]
    show_table(
        ("task", "state", "submitted", "took", "attempt", "endpoint", "error"), rows, empty="You have no such tasks."
    )


@app.command()
def show(context: typer.Context, task_id: TaskId, as_json: AsJson = False) -> None:
    """Show a task, and its result or error."""
    with connected(context) as client:
        task = client.get_batch_result([task_id])[task_id]
    if task.state is None:
        raise TaskUnknown(f"there is no task {task_id}")
    error = None if task.pending or task.exception is None else task.exception
    fields: dict[str, Any] = {
        "task": task.task_id,
        "state": task.state,
        "task group": task.task_group_id,
        "endpoint": task.endpoint_id,
        "function": task.function_id,
        "attempt": task.attempt,
        "finished": instant(task.finished_at),
        "retry of": task.retry_of,
        "result": None if task.exception else repr(task.value),
        **{name.replace("_", " "): value for name, value in task.details.items()},
        "error": error,
    }
    if as_json:
        record = getattr(error, "record", None)
        shown = {name.replace(" ", "_"): value for name, value in fields.items()}
        shown |= {"timings": task.timings, "finished": task.finished_at, "error": record and record.to_json()}
        show_json(shown | {"result": task.value})
        return
    show_fields(fields)
    for note in getattr(error, "__notes__", ()):
        show_text(f"\n{note}")


@app.command()
def events(context: typer.Context, task_id: TaskId, as_json: AsJson = False) -> None:
    """Show the events of a task, in order."""
    with connected(context) as client:
        history = client.get_task_events(task_id)
    if as_json:
        show_json(history)
        return
    rows = [(instant(e["at"]), e["state"], e["reporter"], e["attempt"], e["detail"] or "") for e in history]
    show_table(("at", "state", "reported by", "attempt", "detail"), rows, empty="Nothing yet.")


@app.command()
def why(context: typer.Context, task_id: TaskId, as_json: AsJson = False) -> None:
    """Show why a task is in its state: its position in the queue, and the state of its endpoint."""
    with connected(context) as client:
        answer = client.why(task_id)
    if as_json:
        show_json(dataclasses.asdict(answer))
        return
    show_text(answer.text)
    online = {True: "online", False: "offline", None: None}[answer.endpoint_online]
    idle = None if answer.total_workers is None else f"{answer.idle_workers} of {answer.total_workers} idle"
    show_fields(
        {
            "reason": answer.reason,
            "state": f"{answer.state}, for {answer.state_age_s:.0f} s",
            "attempt": answer.attempt or None,
            "tasks in front": answer.queue_position,
            "endpoint": " ".join(filter(None, (answer.endpoint_name, answer.endpoint_id, online))),
            "last seen": instant(answer.endpoint_seen_at),
            "workers": idle,
            "problem": answer.problem,
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
    cursor = OutputCursor(task_id)
    with connected(context, doing=None) as client:
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
        show_json({"task_id": task_id, "status": cursor.state, **tails, "reason": cursor.reason})
    elif not seen and not as_json:
        why = _NO_OUTPUT.get(cursor.reason or "", "It has printed nothing.")
        typer.echo(f"No output of this task; it is {cursor.state}. {why.format(task_id)}", err=True)


#: Explanations of the reasons in :class:`TaskOutput`.
_NO_OUTPUT: Final = {
    "NOT_STARTED": "`farcall tasks why {}` says what it waits for.",
    "ENDPOINT_OFFLINE": "The output is at its endpoint, which is offline.",
    "NOT_KEPT": "It printed nothing, it ended over a day ago, or it was submitted with output_bytes=0.",
    "ENDPOINT_TOO_OLD": "The version of its endpoint keeps no output.",
    "NO_ANSWER": "Its endpoint has not answered; try again.",
    "SEALED": "Its call is sealed: the output can be read when it has ended.",
}


@app.command()
def cancel(
    context: typer.Context,
    task_ids: Annotated[list[str], typer.Argument(metavar="TASK...", autocompletion=completes("tasks"))],
    as_json: AsJson = False,
) -> None:
    """Cancel tasks, waiting or running."""
    with connected(context) as client:
        outcomes = client.cancel_many(task_ids)
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
    task_ids: Annotated[list[str], typer.Argument(metavar="TASK...", autocompletion=completes("tasks"))],
    as_json: AsJson = False,
) -> None:
    """Run tasks that have ended again: the same function, arguments, endpoint and options, as new tasks.

    The API keeps the arguments for as long as the task, except for those of a dead letter that was discarded.
    """
    with connected(context) as client:
        again = {task_id: client.retry(task_id) for task_id in dict.fromkeys(task_ids)}
    remember("tasks", again.values())
    if as_json:
        show_json(again)
    else:
        show_table(("task", "again as"), list(again.items()))


@app.command()
def discard(
    context: typer.Context,
    task_ids: Annotated[list[str], typer.Argument(metavar="TASK...", autocompletion=completes("tasks"))],
    as_json: AsJson = False,
) -> None:
    """Discard dead letters: they are not listed any more, and their arguments are deleted.

    A dead letter is a task that ended its worker, or the endpoint, in each attempt.
    """
    with connected(context) as client:
        for task_id in dict.fromkeys(task_ids):
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


def _duration(task: dict[str, Any]) -> str:
    if task["submitted_at"] is None or task["finished_at"] is None:
        return ""
    return f"{task['finished_at'] - task['submitted_at']:.3f} s"
