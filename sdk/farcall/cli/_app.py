"""The ``farcall`` command line: its commands, and those of other packages."""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Mapping, Sequence
from typing import Annotated, Final

import typer

from farcall._version import __version__
from farcall.cli._connect import CommandEnvironment, connected
from farcall.cli._lazy import Deferred, LazyGroup
from farcall.cli._output import AsJson, show_json
from farcall_common.console import new_group, prepare_streams, versions
from farcall_common.errors import ConfigurationError
from farcall_common.exit_codes import EXIT_CODES, epilog, raise_on_sigterm

_PLUGINS: Final = "farcall.cli"

#: Each has the help of its module, repeated here so that the list of commands imports none of them.
COMMANDS: Final[Mapping[str, Deferred]] = {
    "run": Deferred("farcall.cli._run:run", "Run a Python function on an endpoint and show its result."),
    "map": Deferred("farcall.cli._run:map_", "Run a function once for each input."),
    "tasks": Deferred("farcall.cli._tasks:app", "Your tasks."),
    "groups": Deferred("farcall.cli._groups:app", "Tasks that were submitted together."),
    "functions": Deferred("farcall.cli._functions:app", "Your registered functions."),
    "containers": Deferred("farcall.cli._containers:app", "Environments for your tasks."),
    "endpoints": Deferred("farcall.cli._endpoints:app", "Endpoints that you may use."),
    "shared": Deferred("farcall.cli._sharing:shared", "Endpoints and functions that others share with you."),
    "teams": Deferred("farcall.cli._sharing:teams", "Teams, to share endpoints and functions with."),
    "tokens": Deferred("farcall.cli._tokens:tokens", "Tokens for programs, which permit some operations."),
    "accounts": Deferred("farcall.cli._tokens:accounts", "Your service accounts: identities for programs."),
    "audit": Deferred("farcall.cli._account:audit", "Audit log."),
    "qos": Deferred("farcall.cli._qos:app", "Latency targets."),
    "usage": Deferred("farcall.cli._usage:usage", "Show what tasks have used."),
    "login": Deferred("farcall.cli._account:login", "Log in, or store a token."),
    "logout": Deferred("farcall.cli._account:logout", "Delete the token, and revoke it if its provider supports that."),
    "whoami": Deferred("farcall.cli._account:whoami", "Show the address of the API, your identity, and your limits."),
    "config": Deferred("farcall.cli._config:app", "Settings in the configuration file."),
    "version": Deferred(
        "farcall.cli._app:version",
        "Show versions, for a bug report.",
    ),
}
#: In the place of commands of packages that are not installed.
_MISSING: Final[Mapping[str, Deferred]] = {
    name: Deferred(f"farcall.cli._app:{name}_is_missing", help_, accepts_any_arguments=True)
    for name, help_ in (
        ("local", "A cloud tier on this machine (needs farcall-local)."),
        ("cloud", "A cloud tier in your AWS account (needs farcall-infra)."),
        ("analytics", "Queries on large tables (needs farcall-analytics)."),
    )
}


class _Farcall(LazyGroup):
    """Our commands, then those of other packages, whose help is the summary of their package."""

    @functools.cached_property
    def plugins(self) -> Mapping[str, Deferred]:
        found = importlib.metadata.entry_points(group=_PLUGINS)
        return {each.name: Deferred(each.value, _summary(each)) for each in found}

    def names(self) -> Sequence[str]:
        return list({**COMMANDS, **_MISSING, **self.plugins})

    def find(self, name: str) -> Deferred | None:
        # Looking for plugins takes as long as one of these commands.
        return COMMANDS.get(name) or self.plugins.get(name) or _MISSING.get(name)


def _summary(plugin: importlib.metadata.EntryPoint) -> str:
    return "" if plugin.dist is None else plugin.dist.metadata["Summary"] or ""


app = new_group(
    "Call a Python function on any computer you may use.",
    cls=_Farcall,
    name="farcall",
    epilog=epilog(EXIT_CODES),
    pretty_exceptions_enable=False,
)


def _show_version(is_wanted: bool) -> None:
    if is_wanted:
        typer.echo(f"farcall {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    context: typer.Context,
    debug: Annotated[
        bool, typer.Option("--debug", envvar="FARCALL_DEBUG", help="Show where in Farcall an error comes from.")
    ] = False,
    version: Annotated[  # noqa: ARG001 - its callback exits
        bool, typer.Option("--version", "-V", is_eager=True, callback=_show_version, help="Show the version and exit.")
    ] = False,
) -> None:
    context.ensure_object(CommandEnvironment).debug = debug


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit with a code of the table in its help."""
    raise_on_sigterm()
    prepare_streams()
    app(args=None if arguments is None else list(arguments), prog_name="farcall")


def local_is_missing() -> None:
    """A cloud tier on this machine (needs farcall-local)."""
    raise _missing("local tier", "farcall-local")


def cloud_is_missing() -> None:
    """A cloud tier in your AWS account (needs farcall-infra)."""
    raise _missing("cloud tier's installer", "farcall-infra")


def analytics_is_missing() -> None:
    """Queries on large tables (needs farcall-analytics)."""
    raise _missing("package for queries", "farcall-analytics")


def _missing(what: str, package: str) -> ConfigurationError:
    return ConfigurationError(
        f"the {what} is not installed", hint=f"It is the package {package}: `pip install {package}`."
    )


def version(
    context: typer.Context,
    server: Annotated[bool, typer.Option("--server", help="Show the version of the API too.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show versions, for a bug report."""
    found: dict[str, object] = {"farcall": __version__, **versions()}
    if server:
        with connected(context) as client:
            found |= client.version_check()
    if as_json:
        show_json(found)
    else:
        for name, value in found.items():
            typer.echo(f"{name} {value}")
