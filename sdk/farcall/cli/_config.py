"""``farcall config``."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from farcall._settings import read_stored
from farcall.cli._configfile import KEYS, config_path, store
from farcall.cli._output import AsJson, show_json, show_table
from farcall_common.errors import ConfigurationError

__all__ = ["app"]

app = typer.Typer(help="Settings in the configuration file.", no_args_is_help=True)

_ENVIRONMENT = {"api_url": "FARCALL_API_URL", "token": "FARCALL_TOKEN", "endpoint": "FARCALL_ENDPOINT"}


def _names(incomplete: str) -> list[str]:
    return [name for name in KEYS if name.startswith(incomplete)]


Name = Annotated[str, typer.Argument(metavar="NAME", help=" or ".join(KEYS), autocompletion=_names)]


@app.command("list")
def list_(as_json: AsJson = False) -> None:
    """List the settings, and where they come from. A token is not shown."""
    stored = read_stored(config_path())
    rows = []
    for name, meaning in KEYS.items():
        value, source = stored.get(name), "config.toml" if name in stored else None
        if os.environ.get(_ENVIRONMENT[name]):
            value, source = os.environ[_ENVIRONMENT[name]], _ENVIRONMENT[name]
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
    value = read_stored(config_path()).get(name)
    if value is None:
        raise ConfigurationError(f"{name} is not set", hint=f"`farcall config set {name} VALUE` sets it.")
    if as_json:
        show_json({"name": name, "value": value})
    else:
        typer.echo(value)


@app.command("set")
def set_(
    name: Name,
    value: Annotated[str, typer.Argument(help="Its value. Set a token by `farcall login`, which leaves no history.")],
    as_json: AsJson = False,
) -> None:
    """Set a setting."""
    _check(name)
    path = store({name: value})
    if as_json:
        show_json({"name": name, "path": str(path)})


@app.command()
def unset(name: Name, as_json: AsJson = False) -> None:
    """Take a setting away."""
    _check(name)
    path = store({name: None})
    if as_json:
        show_json({"name": name, "path": str(path)})


@app.command()
def path(as_json: AsJson = False) -> None:
    """Show where the file is."""
    if as_json:
        show_json({"path": str(config_path())})
    else:
        typer.echo(str(config_path()))


def _check(name: str) -> None:
    if name not in KEYS:
        raise ConfigurationError(f"there is no setting {name!r}", hint=f"There are {', '.join(KEYS)}.")
