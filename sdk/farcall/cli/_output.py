"""Command output: text for people, JSON and CSV for programs, and errors."""

from __future__ import annotations

import csv
import datetime as dt
import json
import math
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Final

import msgspec
import typer

from farcall._task_info import Why
from farcall._task_output import OutputPart
from farcall.cli._connect import above, end_line
from farcall_common.console import short_ids
from farcall_common.errors import ErrorRecord, FarcallError, InvalidRequest
from farcall_common.plain_text import escaped, plain

FullIds = Annotated[bool, typer.Option("--full-ids", help="Show whole ids, also on a terminal.")]
AsJson = Annotated[bool, typer.Option("--json", help="Write JSON for programs.")]


def show_json(value: Any) -> None:
    """Write a value as JSON; values of other types are written as text."""
    typer.echo(msgspec.json.format(_encoded(value), indent=2))


def shown_ids(ids: Iterable[str], *, full: bool = False, least: int = 8) -> Mapping[str, str]:
    """Each id as a table shows it: shortened on a terminal, whole in a pipe, for programs."""
    known = list(ids)
    return {each: each for each in known} if full or not sys.stdout.isatty() else short_ids(known, least=least)


def show_text(text: str, *, err: bool = False, nl: bool = True) -> None:
    """Write text of other people: without control characters if it is read on a terminal."""
    is_terminal = (sys.stderr if err else sys.stdout).isatty()
    typer.echo(plain(text) if is_terminal else text, err=err, nl=nl)


def show_line(value: Any, *, err: bool = False) -> None:
    """Write a value as one line of JSON, now."""
    typer.echo(_encoded(value), err=err)
    sys.stdout.flush()


def show_output(part: OutputPart, *, as_json: bool = False, label: str = "", err: bool = False) -> None:
    """Write what a task has printed: standard error to standard error, standard output too with ``err``, each line
    behind ``label``."""
    if as_json:
        line = {"task_id": part.task_id, "stream": part.stream, "text": part.text}
        typer.echo(_encoded({"output": line} if err else line), err=err)
        return
    text = f"{part.remarks}{part.text}"
    if label:
        text = "".join(f"{label}{line}" for line in text.splitlines(keepends=True))
    show_text(text, err=err or part.stream == "stderr", nl=bool(label) and not text.endswith("\n"))


def show_value(value: object) -> None:
    """Write the value of a function: text as it is, anything else as its repr."""
    if isinstance(value, str):
        show_text(value)
    elif sys.stdout.isatty():
        from rich.pretty import pprint

        pprint(value)
    else:
        show_text(repr(value))


_NOT_ASCII: Final = re.compile(r"[^\x00-\x7f]+")


def _encoded(value: Any) -> str:
    """JSON, with escapes for control characters that JSON does not demand to be escaped, and for all but ASCII if the
    output is not in UTF-8."""
    try:
        text = msgspec.json.encode(value, enc_hook=str).decode()
    except (TypeError, ValueError, OverflowError):  # an integer of more than 64 bits, above all
        text = json.dumps(_plain(value), default=lambda each: msgspec.to_builtins(each, enc_hook=str))
    if (sys.stdout.encoding or "utf-8").lower().startswith("utf"):
        return escaped(text)
    return _NOT_ASCII.sub(lambda found: json.dumps(found[0])[1:-1], escaped(text))


def _plain(value: Any) -> Any:
    """A form that the standard library's encoder accepts."""
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def internal(error: Exception) -> FarcallError:
    """An unexpected exception as an error that can be shown."""
    message = f"{type(error).__name__}: {error}"
    record = ErrorRecord(FarcallError.code, message, "This is a bug in Farcall; `farcall --debug ...` shows where.")
    return FarcallError(message, record=record)


def show_delay(why: Why) -> None:
    """Write what holds a task up to standard error, above the status line or the progress bar."""
    with above():
        show_text(f"Waiting: {why}", err=True)


def show_error(error: FarcallError, *, as_json: bool) -> None:
    """Write an error to standard error: the remote traceback, if there is one, then one line."""
    end_line()
    if as_json:
        show_line({"error": error.record.to_json()}, err=True)
        return
    for note in getattr(error, "__notes__", ()):
        typer.echo(plain(note), err=True)
    typer.secho("Error:", fg="red", err=True, nl=False)
    typer.echo(f" {' '.join(str(error).split())}", err=True)


_UNITS: Final = {"m": "minutes", "h": "hours", "d": "days", "w": "weeks"}

_WHEN: Final = "A date like 2026-11-01, a time like 2026-11-01T09:30, or an age like 30m, 12h, 7d, 4w."
Since = Annotated[str | None, typer.Option(metavar="WHEN", help=f"Only from then on. {_WHEN}")]
Until = Annotated[str | None, typer.Option(metavar="WHEN", help="Only before then.")]
AsLines = Annotated[bool, typer.Option("--json/--csv", help="A JSON object a line, or CSV with a heading.")]


def moment(text: str | None, *, now: dt.datetime | None = None, ahead: bool = False) -> dt.datetime | None:
    """An instant in ISO 8601 or relative form, an age or with ``ahead`` the time until then; local time unless it has
    an offset.

    :raises InvalidRequest: for anything else.
    """
    if text is None:
        return None
    relative = re.fullmatch(r"([0-9]{1,6})([mhdw])", text)
    try:
        if relative is not None:
            distance = dt.timedelta(**{_UNITS[relative[2]]: int(relative[1])})
            return (now or dt.datetime.now(dt.UTC)) + (distance if ahead else -distance)
        return dt.datetime.fromisoformat(text).astimezone(dt.UTC)
    except (ValueError, OverflowError) as error:
        raise InvalidRequest(f"{text!r} is not a time", hint=_WHEN) from error


def write(rows: Iterable[Mapping[str, Any]], columns: Sequence[str], *, as_json: bool) -> None:
    """Write rows one by one. In CSV an object is JSON in its cell, and a text that a spreadsheet would calculate has an
    apostrophe in front."""
    if as_json:
        for row in rows:
            show_line(row)
        return
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([_cell(row.get(name)) for name in columns] for row in rows)
    sys.stdout.flush()


def _cell(value: Any) -> Any:
    if isinstance(value, dict | list):
        return _encoded(value)
    if not isinstance(value, str):
        return value
    return f"'{plain(value)}" if value.startswith(("=", "+", "-", "@", "\t", "\r")) else plain(value)
