"""What the command line writes: tables for people, JSON for programs, and one block for every error."""

from __future__ import annotations

import datetime as dt
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Final

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from farcall_common.errors import (
    FarcallError,
    Forbidden,
    LimitExceeded,
    TaskCancelled,
    TaskFailed,
    TaskLost,
    TaskPending,
    Unauthenticated,
    Unavailable,
)

__all__ = [
    "EXIT_CODES",
    "AsJson",
    "exit_code",
    "instant",
    "show_error",
    "show_fields",
    "show_json",
    "show_table",
    "show_value",
    "stderr",
]

AsJson = Annotated[bool, typer.Option("--json", help="Write JSON for programs.")]

#: What ``farcall --help`` says of exit codes.
EXIT_CODES: Final = """Exit codes: 0 done · 1 the task failed, was lost or was cancelled · 2 the call is wrong ·
3 the service cannot be reached or is busy · 4 not allowed · 5 the task has not ended yet · 130 interrupted"""

_WRONG: Final = 2
_CODES: Final[Sequence[tuple[type[FarcallError], int]]] = (
    (TaskPending, 5),
    (TaskFailed, 1),
    (TaskLost, 1),
    (TaskCancelled, 1),
    (Unauthenticated, 4),
    (Forbidden, 4),
    (Unavailable, 3),
    (LimitExceeded, 3),
)


@functools.cache
def _stdout() -> Console:
    return Console(highlight=False)


@functools.cache
def stderr() -> Console:
    """The console for everything that is not the answer."""
    return Console(stderr=True, highlight=False)


def exit_code(error: FarcallError) -> int:
    """The exit code that tells of an error."""
    return next((code for cls, code in _CODES if isinstance(error, cls)), _WRONG)


def show_error(error: FarcallError, *, as_json: bool) -> None:
    """Write an error to standard error: what happened on the worker, then code, message and hint."""
    if as_json:
        typer.echo(msgspec.json.encode({"error": error.record.to_json()}).decode(), err=True)
        return
    console = stderr()
    for note in getattr(error, "__notes__", ()):
        console.print(Text(note), soft_wrap=True)
    head = Text.assemble(("✗ ", "red"), (error.record.code, "bold red"), f"  {error.record.message}")
    console.print(head, soft_wrap=True)
    if error.hint:
        console.print(Text.assemble(("  hint: ", "cyan"), error.hint), soft_wrap=True)


def show_json(value: Any) -> None:
    """Write a value as JSON; what JSON does not have is written as text."""
    typer.echo(msgspec.json.format(msgspec.json.encode(value, enc_hook=str).decode(), indent=2))


def show_value(value: object) -> None:
    """Write what a function returned: text as it is, anything else as Python shows it."""
    if isinstance(value, str):
        typer.echo(value)
    elif _stdout().is_terminal:
        from rich.pretty import pprint

        pprint(value, console=_stdout())
    else:
        typer.echo(repr(value))


def show_table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, empty: str) -> None:
    """Write rows under headings; in a pipe, plain lines with tabs between the cells."""
    lines = [["" if cell is None else str(cell) for cell in row] for row in rows]
    if not _stdout().is_terminal:
        for line in lines:
            typer.echo("\t".join(line))
    elif not lines:
        _stdout().print(empty, style="dim")
    else:
        table = Table(*columns, box=None, pad_edge=False, header_style="bold", show_header=any(columns))
        for line in lines:
            table.add_row(*map(Text, line))
        _stdout().print(table)


def show_fields(fields: Mapping[str, object]) -> None:
    """Write names and values, one a line; empty ones are left out."""
    show_table(("", ""), [(name, value) for name, value in fields.items() if value not in (None, "", {}, [])], empty="")


def instant(at: float | None) -> str:
    """Epoch seconds as local time."""
    return "" if at is None else dt.datetime.fromtimestamp(at).astimezone().strftime("%Y-%m-%d %H:%M:%S")
