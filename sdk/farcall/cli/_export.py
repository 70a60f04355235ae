"""What the exports of the command line share: since when, and in which form."""

from __future__ import annotations

import csv
import datetime as dt
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Final

import msgspec
import typer

from farcall.cli._output import show_line
from farcall_common.errors import InvalidRequest

_UNITS: Final = {"m": "minutes", "h": "hours", "d": "days", "w": "weeks"}

_WHEN: Final = "A date like 2026-11-01, a time like 2026-11-01T09:30, or so long ago, like 30m, 12h, 7d, 4w."
Since = Annotated[str | None, typer.Option(metavar="WHEN", help=f"Only from then on. {_WHEN}")]
Until = Annotated[str | None, typer.Option(metavar="WHEN", help="Only before then.")]
AsLines = Annotated[bool, typer.Option("--json/--csv", help="A JSON object a line, or CSV with a heading.")]


def moment(text: str | None, *, now: dt.datetime | None = None) -> dt.datetime | None:
    """An instant as people write it; local time unless it says otherwise.

    :raises InvalidRequest: for anything else.
    """
    if text is None:
        return None
    ago = re.fullmatch(r"([0-9]{1,6})([mhdw])", text)
    try:
        if ago is not None:
            return (now or dt.datetime.now(dt.UTC)) - dt.timedelta(**{_UNITS[ago[2]]: int(ago[1])})
        return dt.datetime.fromisoformat(text).astimezone(dt.UTC)
    except (ValueError, OverflowError) as error:
        raise InvalidRequest(f"{text!r} is no time", hint=_WHEN) from error


def write(rows: Iterable[Mapping[str, Any]], columns: Sequence[str], *, as_json: bool) -> None:
    """Write rows as they come. In CSV an object is JSON in its cell."""
    if as_json:
        for row in rows:
            show_line(row)
        return
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([_cell(row.get(name)) for name in columns] for row in rows)
    sys.stdout.flush()


def _cell(value: Any) -> Any:
    return msgspec.json.encode(value).decode() if isinstance(value, dict | list) else value
