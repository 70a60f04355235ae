"""What the command line writes: tables for people, lines with tabs for a pipe, JSON for programs."""

from __future__ import annotations

import datetime as dt
import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Final

import msgspec
import typer

AsJson = Annotated[bool, typer.Option("--json", help="Write JSON for programs.")]

#: How states look on a terminal.
_STYLES: Final[Mapping[str, str]] = {
    "success": "green",
    "online": "green",
    "failed": "red",
    "lost": "red",
    "dead-lettered": "red",
    "running": "cyan",
    "cancelled": "yellow",
    "offline": "yellow",
}


def show_json(value: Any) -> None:
    """Write a value as JSON; what JSON does not have is written as text."""
    typer.echo(msgspec.json.format(_encoded(value), indent=2))


def show_line(value: Any) -> None:
    """Write a value as one line of JSON, now."""
    typer.echo(_encoded(value))
    sys.stdout.flush()


def show_value(value: object) -> None:
    """Write what a function returned: text as it is, anything else as Python shows it."""
    if isinstance(value, str):
        typer.echo(value)
    elif sys.stdout.isatty():
        from rich.pretty import pprint

        pprint(value)
    else:
        typer.echo(repr(value))


def show_table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, empty: str = "") -> None:
    """Write rows under headings; in a pipe, plain lines with tabs between the cells."""
    lines = [["" if cell is None else str(cell) for cell in row] for row in rows]
    if not sys.stdout.isatty():
        for line in lines:
            typer.echo("\t".join(" ".join(cell.split()) for cell in line))
        return
    if not lines:
        typer.secho(empty, dim=True)
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(*columns, box=None, pad_edge=False, header_style="bold", show_header=any(columns))
    for column in table.columns:
        column.overflow = "fold"  # an id that was cut is good for nothing
    for line in lines:
        table.add_row(*(Text(cell, style=_STYLES.get(cell, "")) for cell in line))
    Console(highlight=False).print(table)


def show_fields(fields: Mapping[str, object]) -> None:
    """Write names and values, one a line; empty ones are left out."""
    show_table(("", ""), [(name, value) for name, value in fields.items() if value not in (None, "", {}, [])])


def instant(at: float | None) -> str:
    """Epoch seconds as local time."""
    return "" if at is None else dt.datetime.fromtimestamp(at).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def _encoded(value: Any) -> str:
    try:
        return msgspec.json.encode(value, enc_hook=str).decode()
    except (TypeError, ValueError, OverflowError):  # an integer of more than 64 bits, above all
        return json.dumps(_plain(value), default=lambda each: msgspec.to_builtins(each, enc_hook=str))


def _plain(value: Any) -> Any:
    """What the standard library's encoder takes where it is more particular."""
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
