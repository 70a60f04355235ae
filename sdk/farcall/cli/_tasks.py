"""``farcall tasks``."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import typer

from farcall._client import Client
from farcall.cli._output import AsJson, instant, show_fields, show_json, show_table, stderr

__all__ = ["app"]

app = typer.Typer(help="Your tasks.", no_args_is_help=True)

TaskId = Annotated[str, typer.Argument(metavar="TASK")]


@app.command("ls")
def list_(
    state: Annotated[str | None, typer.Option(help="Only tasks in this state, like running or failed.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="How many at most.")] = 50,
    as_json: AsJson = False,
) -> None:
    """List tasks, newest first."""
    with Client() as client:
        tasks = client.get_tasks(state=state, limit=limit)
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
def show(task_id: TaskId, as_json: AsJson = False) -> None:
    """Show a task, and what it returned or raised."""
    with Client() as client:
        task = client.get_task(task_id)
    error = None if task.pending or task.exception is None else task.exception
    fields: dict[str, Any] = {
        "task": task.task_id,
        "state": task.state,
        "task group": task.task_group_id,
        "endpoint": task.endpoint_id,
        "function": task.function_id,
        "attempt": task.attempt,
        "finished": instant(task.finished_at),
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
        typer.echo(f"\n{note}")


@app.command()
def events(task_id: TaskId, as_json: AsJson = False) -> None:
    """Show what happened to a task, in order."""
    with Client() as client:
        history = client.get_task_events(task_id)
    if as_json:
        show_json(history)
        return
    rows = [(instant(e["at"]), e["state"], e["reporter"], e["attempt"], e["detail"] or "") for e in history]
    show_table(("at", "state", "reported by", "attempt", "detail"), rows, empty="Nothing yet.")


@app.command()
def why(task_id: TaskId, as_json: AsJson = False) -> None:
    """Say why a task is where it is: its place in the queue, and how its endpoint is."""
    with Client() as client:
        answer = client.why(task_id)
    if as_json:
        show_json(dataclasses.asdict(answer))
        return
    typer.echo(answer.text)
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
def cancel(
    task_ids: Annotated[list[str], typer.Argument(metavar="TASK...")],
    as_json: AsJson = False,
) -> None:
    """Cancel tasks, waiting or running."""
    with Client() as client:
        outcomes = client.cancel_many(task_ids)
    if as_json:
        show_json(outcomes)
    else:
        show_table(("task", "outcome"), [(id_, each["outcome"]) for id_, each in outcomes.items()], empty="")
    if any(each["outcome"] == "unknown" for each in outcomes.values()):
        stderr().print("Some of these are no tasks of yours.", style="yellow")
        raise typer.Exit(2)


def _duration(task: dict[str, Any]) -> str:
    if task["submitted_at"] is None or task["finished_at"] is None:
        return ""
    return f"{task['finished_at'] - task['submitted_at']:.3f} s"
