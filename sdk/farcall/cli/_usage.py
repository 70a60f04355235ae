"""``farcall usage``."""

from __future__ import annotations

import datetime as dt
import re
from typing import Annotated, Final

import typer

from farcall.cli._connect import connected
from farcall.cli._output import show_line, write
from farcall_common.console import show_table
from farcall_common.errors import InvalidRequest

_KEYS: Final = {
    "day": "day",
    "identity": "identity_id",
    "endpoint": "endpoint_id",
    "function": "function_id",
    "account": "account",
}
_SUMS: Final = ("tasks", "failed", "wall_s", "core_s", "gpu_s", "stages")
_WHEN: Final = "A day like 2026-11-01 (UTC), or an age in days like 30d."


def usage(
    context: typer.Context,
    by: Annotated[
        str, typer.Option(metavar="LIST", help="Some of day, identity, endpoint, function, account; with commas.")
    ] = "day",
    of: Annotated[
        str, typer.Option(metavar="WHOSE", help="mine; endpoints: of all users of your endpoints; all: administrators.")
    ] = "mine",
    since: Annotated[
        str | None,
        typer.Option("--since", "--from", metavar="DAY", help=f"First day; the first of this month. {_WHEN}"),
    ] = None,
    until: Annotated[str | None, typer.Option(metavar="DAY", help="Only before this day.")] = None,
    endpoint: Annotated[str | None, typer.Option(metavar="NAME|ID", help="Only of this endpoint.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="A JSON object a line.")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="CSV with a heading.")] = False,
) -> None:
    """Show what tasks have used: how many ended and failed, and seconds of time, cores and accelerators.

    Seconds are those of the last attempt of each task, of a graph those of all its calls, and stages is how many calls
    of graphs ran. Tasks count on the day on which their end was recorded.
    """
    keys = [name for name in _KEYS if name in by.split(",")]
    columns = (*(_KEYS[name] for name in keys), *_SUMS)
    with connected(context, doing=None) as client:
        rows = client.iter_usage(by.split(","), of=of, since=_day(since), until=_day(until), endpoint_id=endpoint)
        if as_json:
            for row in rows:
                show_line(row)
        elif as_csv:
            write(rows, columns, as_json=False)
        else:
            shown = [[_shown(row.get(name)) for name in columns] for row in rows]
            show_table(columns, shown, empty="No task has ended.")


def _shown(value: object) -> object:
    return f"{value:.1f}" if isinstance(value, float) else value


def _day(text: str | None) -> dt.date | None:
    """:raises InvalidRequest: unless it is a day."""
    if text is None:
        return None
    ago = re.fullmatch(r"([0-9]{1,5})d", text)
    try:
        if ago is not None:
            return dt.datetime.now(dt.UTC).date() - dt.timedelta(days=int(ago[1]))
        return dt.date.fromisoformat(text)
    except (ValueError, OverflowError) as error:
        raise InvalidRequest(f"{text!r} is not a day", hint=_WHEN) from error
