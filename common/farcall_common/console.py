"""Shared parts of the command lines: groups of commands, versions, tables.

On a terminal a table has headings and colors; in a pipe it is a line for each row, with tabs between the cells. Each
package with a command line depends on typer and rich; rich, which takes a while to import, is imported by a table.
"""

from __future__ import annotations

import datetime as dt
import importlib.metadata
import io
import itertools
import math
import platform
import re
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import typer
from typer.core import TyperCommand, TyperGroup

from farcall_common.errors import did_you_mean
from farcall_common.plain_text import plain
from farcall_common.standard_streams import replace_missing_streams

#: Commands with two usual names; the other one than a group has is accepted, too.
_OTHER_NAMES: Final = {"ls": "list", "list": "ls", "delete": "rm", "remove": "rm"}

_PACKAGES: Final = ("farcall", "farcall-common", "farcall-endpoint", "farcall-local", "farcall-infra")

_NEGATIVE_NUMBER: Final = re.compile(r"-(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")

#: Colors of states.
_STYLES: Final[Mapping[str, str]] = {
    "success": "green",
    "online": "green",
    "Running": "green",
    "failed": "red",
    "lost": "red",
    "dead-lettered": "red",
    "Disconnected": "red",
    "running": "cyan",
    "cancelled": "yellow",
    "offline": "yellow",
    "Stopped": "yellow",
    "Initialized": "yellow",
}

#: The longest cell that is never broken: the length of a UUID.
_ID_CHARS: Final = 36
#: Between two columns.
_GAP_CHARS: Final = 2
#: A broken column is at least this wide. So is one that is cut off; with less room it is left out.
_LEAST_CHARS: Final = 12


# -- commands ----------------------------------------------------------------------------------------------------------


class Commands(TyperGroup):
    """A group of commands. Without arguments it shows its help; ``help COMMAND`` is ``COMMAND --help``; ``ls`` and
    ``list`` are one command, and so are ``rm``, ``delete`` and ``remove``; an unknown command is answered with those
    that are spelled alike."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _without_flag_types(super().get_params(ctx))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return super().get_command(ctx, cmd_name) or super().get_command(ctx, _OTHER_NAMES.get(cmd_name, ""))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args and self.no_args_is_help and not ctx.resilient_parsing:
            typer.echo(ctx.get_help())
            ctx.exit()
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name = args[0]
        if not ctx.resilient_parsing and self.get_command(ctx, name) is None:
            if name == "help" and len(args) == 1:
                typer.echo(ctx.get_help())
                ctx.exit()
            if name == "help":
                return self.resolve_command(ctx, [*args[1:], "--help"])
            if not name.startswith("-"):
                ctx.fail(f"No such command {name!r}. {did_you_mean(name, self.list_commands(ctx)) or ''}".rstrip())
        found, command, rest = super().resolve_command(ctx, args)
        if command is not None:
            _without_flag_types(command.get_params(ctx))
        return found, command, rest


class Command(TyperCommand):
    """A command whose arguments may be negative numbers."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _without_flag_types(super().get_params(ctx))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        end = args.index("--") if "--" in args else len(args)
        if any(map(_NEGATIVE_NUMBER.fullmatch, args[:end])):
            valued = {name for each in self.params for name in each.opts if not getattr(each, "is_flag", True)}
            args = _options_first(args[:end], valued) + args[end:][1:]
        return super().parse_args(ctx, args)


def new_group(help_: str, *, cls: type[Commands] = Commands, **settings: Any) -> typer.Typer:
    """A group of commands, to be filled; ``settings`` are those of :class:`typer.Typer`."""
    names = {"help_option_names": ["-h", "--help"]}
    return typer.Typer(cls=cls, help=help_, no_args_is_help=True, context_settings=names, **settings)


def check_number(value: float | None) -> float | None:
    """The value of an option, for its callback.

    :raises typer.BadParameter: for NaN, which no comparison with a limit refuses.
    """
    if value is not None and math.isnan(value):
        raise typer.BadParameter("Expected a number.")
    return value


def prepare_streams() -> None:
    """Write characters that the encoding of the terminal does not have as escapes (``\\u017d``), and nothing to a
    stream that is closed."""
    replace_missing_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # tests have others
            stream.reconfigure(errors="backslashreplace")


def versions() -> dict[str, str]:
    """Versions for a bug report: of Farcall's packages that are installed here, of Python and of the platform."""
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found | {"python": platform.python_version(), "platform": platform.platform()}


def _without_flag_types(parameters: list[Any]) -> list[Any]:
    """Parameters whose flags are shown without a type: there is nothing to type."""
    for each in parameters:
        if getattr(each, "is_flag", False) and each.metavar is None:
            each.metavar = ""
    return parameters


def _options_first(arguments: Sequence[str], valued: Iterable[str]) -> list[str]:
    """The same arguments, options first, then ``--`` and the others, so that a number with a sign is not an option."""
    options, others = list[str](), list[str]()
    rest = iter(arguments)
    for each in rest:
        if each == "-" or not each.startswith("-") or _NEGATIVE_NUMBER.fullmatch(each):
            others.append(each)
        else:
            options += [each, *(itertools.islice(rest, 1) if each in valued else ())]
    return [*options, "--", *others]


# -- tables ------------------------------------------------------------------------------------------------------------


def show_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    empty: str = "",
    title: str = "",
    cut: bool = False,
) -> None:
    """Write rows under headings; in a pipe, lines with tabs between the cells, without title and headings.

    Ids and other short cells are never broken, also where the terminal is too narrow for the row.

    :param cut: whether the last column is cut off at the edge of the terminal, instead of broken into lines.
    """
    lines = [["" if cell is None else plain(str(cell)) for cell in row] for row in rows]
    if not sys.stdout.isatty():
        for line in lines:
            typer.echo("\t".join(" ".join(cell.split()) for cell in line))
        return
    if not lines:
        typer.secho(empty, dim=True)
        return
    from rich.cells import cell_len
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    width = shutil.get_terminal_size().columns
    needed = [
        max(cell_len(line) for cell in column for line in cell.split("\n"))
        for column in zip(columns, *lines, strict=True)
    ]
    if cut:
        needed[-1] = min(needed[-1], width - sum(needed[:-1]) - _GAP_CHARS * (len(needed) - 1))
        if needed[-1] < _LEAST_CHARS:
            cut, columns, needed, lines = False, columns[:-1], needed[:-1], [line[:-1] for line in lines]
        else:
            lines = [[*line[:-1], cut_off(" ".join(line[-1].split()), needed[-1])] for line in lines]
    table = Table(box=None, pad_edge=False, header_style="bold", show_header=any(columns))
    for number, (name, chars) in enumerate(zip(columns, needed, strict=True), start=1):
        table.add_column(name, no_wrap=chars <= _ID_CHARS or (cut and number == len(needed)), overflow="fold")
    for line in lines:
        table.add_row(*(Text(cell, style=_STYLES.get(cell, "")) for cell in line))
    least = sum(chars if chars <= _ID_CHARS else _LEAST_CHARS for chars in needed) + _GAP_CHARS * (len(needed) - 1)
    console = Console(highlight=False, width=max(width, least), height=len(lines))  # both, or a dumb terminal has 80
    if title:
        console.print(Text(title, style="bold"))
    console.print(table)


def cut_off(line: str, most_cells: int) -> str:
    """A line that takes at most so many cells of a terminal: characters of East Asian scripts take two."""
    from rich.cells import cell_len, set_cell_size

    return line if cell_len(line) <= most_cells else f"{set_cell_size(line, max(0, most_cells - 1)).rstrip()}…"


def show_fields(fields: Mapping[str, object]) -> None:
    """Write names and values, one a line; empty ones are left out, and the items of lists and mappings follow each
    other."""
    show_table(("", ""), [(name, _items(value)) for name, value in fields.items() if value not in (None, "", {}, [])])


def _items(value: object) -> object:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {item}" for name, item in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else value


def instant(at: float | None) -> str:
    """Epoch seconds as local time."""
    return "" if at is None else dt.datetime.fromtimestamp(at).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def duration(seconds: float | None) -> str:
    """Seconds as people write them, with two digits or more; empty for None."""
    if seconds is None:
        return ""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, hours, days = int(seconds // 60), int(seconds // 3600), int(seconds // 86_400)
    if hours == 0:
        return f"{minutes} min {seconds % 60:.0f} s" if minutes < 10 else f"{minutes} min"
    return f"{hours} h {minutes % 60} min" if days == 0 else f"{days} d {hours % 24} h"


def short_ids(ids: Iterable[str], *, least: int = 8) -> dict[str, str]:
    """The shortest beginning of each id that no other one has, by id; of ``least`` characters or more."""
    known = sorted(set(ids))
    lengths = dict.fromkeys(known, least)
    for one, other in itertools.pairwise(known):
        common = next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), len(other))
        for each in (one, other):
            lengths[each] = max(lengths[each], common + 1)
    return {each: each[:length].removesuffix("-") for each, length in lengths.items()}
