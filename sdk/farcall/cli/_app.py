"""The ``farcall`` command: its own commands, and those that other packages add."""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Mapping, Sequence
from typing import Annotated, Final

import typer

from farcall._version import __version__
from farcall.cli._connect import Surroundings, connected
from farcall.cli._lazy import Deferred, LazyGroup
from farcall.cli._output import AsJson, show_json
from farcall_common.errors import ConfigurationError
from farcall_common.exit_codes import EXIT_CODES, epilog
from farcall_common.interruption import raise_on_sigterm

_PLUGINS: Final = "farcall.cli"

#: The help of each is that of its module, said here so that the list of commands needs none of them.
COMMANDS: Final[Mapping[str, Deferred]] = {
    "run": Deferred("farcall.cli._run:run", "Run a Python function on an endpoint and show what it returns."),
    "map": Deferred("farcall.cli._run:map_", "Run a function once for each input."),
    "tasks": Deferred("farcall.cli._tasks:app", "Your tasks."),
    "groups": Deferred("farcall.cli._groups:app", "Tasks that were submitted together."),
    "functions": Deferred("farcall.cli._functions:app", "Your registered functions."),
    "containers": Deferred("farcall.cli._containers:app", "Environments for your tasks."),
    "endpoints": Deferred("farcall.cli._endpoints:app", "Endpoints that you may use."),
    "audit": Deferred("farcall.cli._account:audit", "Who did what, and when."),
    "login": Deferred("farcall.cli._account:login", "Log in, or store a token."),
    "logout": Deferred("farcall.cli._account:logout", "Forget the token, and have its provider end it, if it can."),
    "whoami": Deferred(
        "farcall.cli._account:whoami", "Show which API is called, whose token is used, and the limits in force."
    ),
    "config": Deferred("farcall.cli._config:app", "Settings in the configuration file."),
    "version": Deferred("farcall.cli._app:version", "Show versions."),
}
_NO_LOCAL: Final = Deferred(
    "farcall.cli._app:local_is_missing", "A cloud tier on this machine (needs farcall-local).", takes_anything=True
)


class _Farcall(LazyGroup):
    """Commands of ours, then those of other packages, whose line of help is the summary of their package."""

    @functools.cached_property
    def plugins(self) -> Mapping[str, Deferred]:
        found = importlib.metadata.entry_points(group=_PLUGINS)
        return {each.name: Deferred(each.value, _summary(each)) for each in found}

    def names(self) -> Sequence[str]:
        return list({**COMMANDS, "local": _NO_LOCAL, **self.plugins})

    def find(self, name: str) -> Deferred | None:
        # Looking for plugins takes as long as a command of ours does: not for those.
        return COMMANDS.get(name) or self.plugins.get(name) or {"local": _NO_LOCAL}.get(name)


def _summary(plugin: importlib.metadata.EntryPoint) -> str:
    return "" if plugin.dist is None else plugin.dist.metadata["Summary"] or ""


app = typer.Typer(
    name="farcall",
    cls=_Farcall,
    help="Call a Python function on any computer you may use.",
    epilog=epilog(EXIT_CODES),
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


@app.callback()
def _root(
    context: typer.Context,
    debug: Annotated[
        bool, typer.Option("--debug", envvar="FARCALL_DEBUG", help="Show where in Farcall an error comes from.")
    ] = False,
) -> None:
    context.ensure_object(Surroundings).debug = debug


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit with a code of the table in its help."""
    raise_on_sigterm()
    app(args=None if arguments is None else list(arguments), prog_name="farcall")


def local_is_missing() -> None:
    """A cloud tier on this machine (needs farcall-local)."""
    raise ConfigurationError(
        "the local tier is not installed", hint="It is the package farcall-local: `pip install farcall-local`."
    )


def version(
    context: typer.Context,
    server: Annotated[bool, typer.Option("--server", help="Ask the API for its version too.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show versions."""
    versions: dict[str, object] = {"farcall": __version__}
    if server:
        with connected(context) as client:
            versions |= client.version_check()
    if as_json:
        show_json(versions)
    else:
        for name, value in versions.items():
            typer.echo(f"{name} {value}")
