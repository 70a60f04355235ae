"""``farcall groups``: tasks that were submitted together."""

from __future__ import annotations

import collections
import contextlib
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final

import typer

from farcall._client import Client, connection_of
from farcall._delays import DELAY_S
from farcall._task_info import Why
from farcall.cli._arguments import completes, last_of, remember
from farcall.cli._connect import bar, connected
from farcall.cli._output import AsJson, FullIds, show_delay, show_error, show_json, show_line, show_text, shown_ids
from farcall_common.backoff import Backoff
from farcall_common.console import check_number, instant, new_group, show_table
from farcall_common.errors import FarcallError, TaskPending
from farcall_common.exit_codes import FAILED
from farcall_common.wire import TERMINAL_STATES

app = new_group("Tasks that were submitted together.")

_FIRST_POLL_S: Final = 0.1
_LONGEST_POLL_S: Final = 2.0
_ENDED: Final = frozenset(map(str, TERMINAL_STATES))

GroupId = Annotated[
    str,
    typer.Argument(
        metavar="GROUP",
        help="Its id, the first digits of it, or @last: that of your last `farcall run` or `map`.",
        autocompletion=completes("groups"),
    ),
]


@app.command("ls")
def list_(
    context: typer.Context,
    limit: Annotated[int, typer.Option(min=1, help="How many at most.")] = 50,
    full_ids: FullIds = False,
    as_json: AsJson = False,
) -> None:
    """List groups, newest first, with how many tasks are in which state."""
    with connected(context) as client:
        groups = client.get_task_groups(limit=limit)
    remember("groups", (each["task_group_id"] for each in groups))
    if as_json:
        show_json(groups)
        return
    ids = shown_ids((each["task_group_id"] for each in groups), full=full_ids)
    rows = [
        (ids[each["task_group_id"]], instant(each["created_at"]), each["tasks"], _counts(each["states"]))
        for each in groups
    ]
    show_table(("group", "submitted", "tasks", "states"), rows, empty="You have no tasks.")


@app.command()
def show(context: typer.Context, group_id: GroupId, full_ids: FullIds = False, as_json: AsJson = False) -> None:
    """Show the tasks of a group in the order of their submission."""
    with connected(context) as client:
        group_id = _whole(client, group_id)
        ids = client.get_task_group(group_id)
        sealer = connection_of(client).sealer
        found = {id_: sealer.shown(task) for id_, task in connection_of(client).api.all_status(ids).items()}
    remember("tasks", ids)
    if as_json:
        tasks = [{"task_id": id_, "status": found[id_]["status"], "attempt": _attempt(found[id_])} for id_ in ids]
        show_json({"task_group_id": group_id, "tasks": tasks})
        return
    shown = shown_ids(ids, full=full_ids)
    rows = [(shown[id_], found[id_]["status"], _attempt(found[id_]), _message(found[id_])) for id_ in ids]
    show_table(("task", "state", "attempt", "error"), rows, cut=True)


@app.command()
def wait(
    context: typer.Context,
    group_id: GroupId,
    timeout: Annotated[
        float | None, typer.Option(callback=check_number, metavar="SECONDS", help="Wait at most this long.")
    ] = None,
    results: Annotated[
        bool, typer.Option("--results", help="Then write the result of each task, as `farcall map` does.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Wait until all tasks of a group have ended. They continue if the wait is interrupted or times out."""
    with connected(context, doing=None) as client:
        group_id = _whole(client, group_id)
        ids = client.get_task_group(group_id)
        states = _wait(client, ids, timeout)
        if results:
            _show_results(client, ids, as_json=as_json)
    counts = dict(collections.Counter(states.values()))
    if as_json and not results:
        show_json({"task_group_id": group_id, "tasks": len(ids), "states": counts})
    elif not results:
        typer.echo(_counts(counts))
    if set(counts) != {"success"}:
        raise typer.Exit(FAILED)


@app.command()
def cancel(context: typer.Context, group_id: GroupId, as_json: AsJson = False) -> None:
    """Cancel the tasks of a group that have not ended."""
    with connected(context) as client:
        found = client.cancel_group(_whole(client, group_id))
    counts = collections.Counter(each["outcome"] for each in found.values())
    show_json({"task_group_id": group_id, "outcomes": counts}) if as_json else show_text(_counts(counts))


def _whole(client: Client, group: str) -> str:
    return connection_of(client).ids.group(last_of("groups", group))


def _wait(client: Client, ids: Sequence[str], timeout_s: float | None) -> dict[str, str]:
    """The states in which tasks ended.

    :raises TaskPending: if they have not after ``timeout_s`` seconds.
    """
    give_up_at = None if timeout_s is None else time.monotonic() + timeout_s
    ended: dict[str, str] = {}
    polling = Backoff(first_s=_FIRST_POLL_S, most_s=_LONGEST_POLL_S)
    ask_at: float | None = time.monotonic() + DELAY_S
    with bar("waiting", len(ids)) as update:
        while True:
            found = connection_of(client).api.all_status([id_ for id_ in ids if id_ not in ended])
            fresh = {id_: task["status"] for id_, task in found.items() if task["status"] in _ENDED}
            ended |= fresh
            update(len(ended))
            if len(ended) == len(ids):
                return ended
            if fresh:
                polling.reset()
            if ask_at and time.monotonic() >= ask_at:
                ask_at = None
                if (why := _why_first(client, ids, ended)) and why.is_blocked:
                    show_delay(why)
            delay_s = polling.next_s()
            if give_up_at is not None and time.monotonic() + delay_s > give_up_at:
                why = _why_first(client, ids, ended)
                reason = f". {why}".removesuffix(".") if why else ""
                raise TaskPending(f"{len(ids) - len(ended)} tasks have not ended after {timeout_s:g} s{reason}")
            time.sleep(delay_s)


def _why_first(client: Client, ids: Sequence[str], ended: Mapping[str, str]) -> Why | None:
    """Why the first task that has not ended waits; None if the API does not answer."""
    with contextlib.suppress(FarcallError):
        return client.why(next(id_ for id_ in ids if id_ not in ended))
    return None


def _show_results(client: Client, ids: Sequence[str], *, as_json: bool) -> None:
    infos = client.get_batch_result(ids)
    for index, (task_id, info) in enumerate(infos.items()):
        error = info.exception
        record = error.record if isinstance(error, FarcallError) else None
        if not as_json:
            show_line(info.value)
            if isinstance(error, FarcallError):
                show_error(error, as_json=False)
        elif record is None:
            show_line({"index": index, "task_id": task_id, "result": info.value})
        else:
            show_line({"index": index, "task_id": task_id, "error": record.to_json()})


def _attempt(task: dict[str, Any]) -> int:
    return int(task.get("attempt") or 0)


def _message(task: dict[str, Any]) -> str:
    return str((task.get("error") or {}).get("message", "")).partition("\n")[0]


def _counts(states: dict[str, int]) -> str:
    return ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
