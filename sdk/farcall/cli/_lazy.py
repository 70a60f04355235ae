"""Lazy command group: imports the module of a command when the command is called."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import sys
import traceback
from collections.abc import Iterator, Sequence
from typing import Any, Final

import typer
from typer.core import TyperCommand

from farcall.cli._connect import command_environment
from farcall.cli._output import internal, show_error
from farcall_common.console import Command, Commands
from farcall_common.errors import ErrorRecord, FarcallError, Fault
from farcall_common.exit_codes import BROKEN_PIPE, exit_code, exit_status
from farcall_common.standard_streams import drop_output, output_error

_USAGE_ERROR: Final = "COMMAND_LINE"


@dataclasses.dataclass(frozen=True)
class Deferred:
    """A command or group that is imported when it is called: ``place`` is MODULE:NAME of a function or a Typer."""

    place: str
    help: str
    accepts_any_arguments: bool = False

    def load(self, name: str) -> Any:
        module, _, attribute = self.place.partition(":")
        found = getattr(importlib.import_module(module), attribute)
        if isinstance(found, typer.Typer):
            group = typer.main.get_group(found)
            group.name = name
            return group
        alone = typer.Typer(add_completion=False)
        anything = {"allow_extra_args": True, "ignore_unknown_options": True} if self.accepts_any_arguments else None
        alone.command(name, cls=Command, context_settings=anything)(found)
        return typer.main.get_command(alone)


class LazyGroup(Commands):
    """The root of the command line. It reports errors of commands and maps them to exit codes."""

    def names(self) -> Sequence[str]:
        """The names of the commands, in the order of the help text."""
        raise NotImplementedError

    def find(self, name: str) -> Deferred | None:
        """The command with this name."""
        raise NotImplementedError

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002 - as in the base class
        return list(self.names())

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ARG002 - as in the base class
        """A placeholder with the line of help, which is enough for listings."""
        found = self.find(cmd_name)
        return None if found is None else TyperCommand(cmd_name, callback=None, help=found.help)

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name, stand_in, rest = super().resolve_command(ctx, args)
        found = None if name is None else self.find(name)
        return name, stand_in if found is None else found.load(str(name)), rest

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.meta[__name__] = _wants_json(args)
        with _reporting_errors(ctx):
            return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        with _reporting_errors(ctx):
            answer = super().invoke(ctx)
            sys.stdout.flush()  # a closed pipe raises here and not while the interpreter exits
            return answer


@contextlib.contextmanager
def _reporting_errors(context: Any) -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        drop_output()
        raise typer.Exit(BROKEN_PIPE) from None
    except SystemExit as exit_:
        if isinstance(exit_.__context__, BrokenPipeError):  # rich exits so in that case
            raise typer.Exit(BROKEN_PIPE) from None
        raise
    except KeyboardInterrupt as interruption:
        raise typer.Exit(exit_status(interruption)) from None
    except Exception as error:
        if isinstance(error, typer.Abort) and isinstance(error.__context__, KeyboardInterrupt):
            raise typer.Exit(exit_status(error.__context__)) from None  # at a prompt
        if type(error).__module__.startswith(("typer.", "click.")):
            _show_usage_error(error, as_json=context.meta[__name__])
            raise  # --help, or a prompt that was answered with no
        if command_environment(context).debug:
            traceback.print_exception(error)
        if full := output_error(error):
            drop_output()
        known = full or (error if isinstance(error, FarcallError) else internal(error))
        try:
            show_error(known, as_json=context.meta[__name__])
        except OSError:  # standard error is full, too
            drop_output()
        raise typer.Exit(exit_code(known)) from None


def _show_usage_error(error: Any, *, as_json: bool) -> None:
    """:raises typer.Exit: if the error is a usage error."""
    if not hasattr(error, "format_message") or type(error).__name__ == "NoArgsIsHelpError":
        return
    context = getattr(error, "ctx", None)
    hint = f"Run `{context.command_path} --help` to see the commands and options." if context else ""
    message = error.format_message()
    if alike := getattr(error, "possibilities", None):
        message = f"{error.message}. Did you mean {' or '.join(sorted(alike))}?"
    known = FarcallError("", record=ErrorRecord(_USAGE_ERROR, message, hint, Fault.CALLER))
    show_error(known, as_json=as_json)
    raise typer.Exit(error.exit_code) from None


def _wants_json(arguments: Sequence[str]) -> bool:
    options = arguments[: arguments.index("--")] if "--" in arguments else arguments
    return "--json" in options
