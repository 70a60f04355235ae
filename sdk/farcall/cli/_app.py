"""The ``farcall`` command: its own commands, those of other packages, and the way out for errors."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from farcall._version import __version__
from farcall.cli import _endpoints, _functions, _tasks
from farcall.cli._output import EXIT_CODES, AsJson, exit_code, show_error, show_json
from farcall.cli._run import run
from farcall_common.errors import ConfigurationError, FarcallError

__all__ = ["main"]

_PLUGINS = "farcall.cli"
_HELP_FLAGS = frozenset({"--help", "--install-completion", "--show-completion"})


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit with a code of ``EXIT_CODES``."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        _application(arguments)(args=arguments)
    except FarcallError as error:
        show_error(error, as_json="--json" in arguments)
        sys.exit(exit_code(error))


def _application(arguments: Sequence[str]) -> typer.Typer:
    app = typer.Typer(
        name="farcall",
        help="Call a Python function on any computer you may use.",
        epilog=EXIT_CODES,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
    )
    app.command()(run)
    app.add_typer(_tasks.app, name="tasks")
    app.add_typer(_functions.app, name="functions")
    app.add_typer(_endpoints.app, name="endpoints")
    app.command()(version)
    plugins = {plugin.name: plugin for plugin in importlib.metadata.entry_points(group=_PLUGINS)}
    # Loading a plugin may take as long as everything else: only the one that is called, or all for the help text.
    wanted = plugins if not arguments or _HELP_FLAGS & {arguments[0]} else {arguments[0]} & plugins.keys()
    for name in wanted:
        app.add_typer(plugins[name].load(), name=name)
    if "local" not in plugins:
        anything = {"allow_extra_args": True, "ignore_unknown_options": True}
        described = "A cloud tier on this machine (needs another package)."
        app.command("local", help=described, context_settings=anything)(_local_is_missing)
    return app


def version(
    server: Annotated[bool, typer.Option("--server", help="Ask the API for its version too.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show versions."""
    versions: dict[str, object] = {"farcall": __version__}
    if server:
        from farcall._client import Client

        with Client() as client:
            versions |= client.version_check()
    if as_json:
        show_json(versions)
    else:
        for name, value in versions.items():
            typer.echo(f"{name} {value}")


def _local_is_missing() -> None:
    raise ConfigurationError(
        "the local tier is not installed", hint="It is the package farcall-local: `pip install farcall-local`."
    )
