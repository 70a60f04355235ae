"""``farcall config``."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Annotated, Final

import typer

from farcall._sealing import default_mode
from farcall._settings import Settings
from farcall._trust import trusted_endpoints
from farcall.cli._connect import connected
from farcall.cli._output import AsJson, show_json, show_text
from farcall_common.console import new_group, show_table
from farcall_common.credentials import (
    VARIABLES,
    config_path,
    find_home,
    from_environment,
    read_settings,
    write_settings,
)
from farcall_common.errors import (
    ConfigurationError,
    EndpointUnknown,
    FarcallError,
    did_you_mean,
    error_from_record,
)

app = new_group("Settings in the configuration file.")

#: Settings and their meanings.
_KEYS: Final[Mapping[str, str]] = {
    "api_url": "address of the API",
    "token": "your API token",
    "endpoint": "default endpoint: a name or an id",
    "trust": "ids of endpoints of others whose pickled results are read",
    "sealed": "whether calls are sealed: off, offered or required",
}


def _names(incomplete: str) -> list[str]:
    return [name for name in _KEYS if name.startswith(incomplete)]


Name = Annotated[str, typer.Argument(metavar="NAME", help=" or ".join(_KEYS), autocompletion=_names)]


@app.command("list")
def list_(as_json: AsJson = False) -> None:
    """List the settings, and where they come from. A token is not shown."""
    stored = read_settings(find_home(os.environ))
    rows = []
    for name, meaning in _KEYS.items():
        value, source = stored.get(name), "config.toml" if name in stored else None
        if given := from_environment(name, os.environ):
            value, source = given, VARIABLES[name]
        shown = "(set)" if name == "token" and value else value
        rows.append({"name": name, "value": shown, "source": source, "meaning": meaning})
    if as_json:
        show_json(rows)
    else:
        show_table(("name", "value", "from", "meaning"), [tuple(row.values()) for row in rows])


@app.command()
def get(name: Name, as_json: AsJson = False) -> None:
    """Show a setting of the file."""
    _check(name)
    value = read_settings(find_home(os.environ)).get(name)
    if value is None:
        raise ConfigurationError(f"{name} is not set", hint=f"`farcall config set {name} VALUE` sets it.")
    if as_json:
        show_json({"name": name, "value": value})
    else:
        typer.echo(value)


@app.command("set")
def set_(
    context: typer.Context,
    name: Name,
    value: Annotated[
        str,
        typer.Argument(help="Its value. Set a token with `farcall login`, which keeps it out of the shell's history."),
    ],
    check: Annotated[
        bool, typer.Option("--check/--no-check", help="Ask the API whether there is such an endpoint.")
    ] = True,
    as_json: AsJson = False,
) -> None:
    """Set a setting. A value that cannot be right is refused."""
    _check(name)
    _check_value(context, name, value, with_api=check)
    path = write_settings(find_home(os.environ), {name: value})
    if as_json:
        show_json({"name": name, "path": str(path)})


@app.command()
def unset(name: Name, as_json: AsJson = False) -> None:
    """Remove a setting."""
    _check(name)
    path = write_settings(find_home(os.environ), {name: None})
    if as_json:
        show_json({"name": name, "path": str(path)})


@app.command()
def path(as_json: AsJson = False) -> None:
    """Show where the file is."""
    where = str(config_path(find_home(os.environ)))
    if as_json:
        show_json({"path": where})
    else:
        typer.echo(where)


def _check(name: str) -> None:
    if name not in _KEYS:
        hint = did_you_mean(name, _KEYS) or f"There are {', '.join(_KEYS)}."
        raise ConfigurationError(f"there is no setting {name!r}", hint=hint)


def _check_value(context: typer.Context, name: str, value: str, *, with_api: bool) -> None:
    """:raises FarcallError: if the value cannot be right."""
    if name == "api_url":
        Settings.resolve(value, "-")
    elif name == "sealed":
        default_mode(value)
    elif name == "trust":
        trusted_endpoints(value)
    elif name == "endpoint" and with_api and (problem := _problem_with_endpoint(context, value)):
        record = dataclasses.replace(problem.record, hint=f"{problem.hint} With --no-check it is set all the same.")
        raise error_from_record(record)


def _problem_with_endpoint(context: typer.Context, name: str) -> FarcallError | None:
    try:
        with connected(context) as client:
            try:
                client.get_endpoint(name)
            except (EndpointUnknown, ConfigurationError) as error:  # there is none, or there are several
                return error
    except FarcallError as error:
        show_text(f"The endpoint was not checked: {error.record.message}", err=True)
    return None
