"""``farcall login``, ``logout`` and ``whoami``."""

from __future__ import annotations

import enum
import os
import sys
from collections.abc import Callable, Mapping
from typing import Annotated, Final

import typer

from farcall._settings import Settings, read_stored
from farcall.cli._configfile import config_path, store
from farcall.cli._connect import connected
from farcall.cli._output import AsJson, show_fields, show_json
from farcall_common.errors import ConfigurationError

__all__ = ["Provider", "login", "logout", "whoami"]


class Provider(enum.StrEnum):
    """Who says who somebody is."""

    DEV = "dev"
    GLOBUS = "globus"


def login(
    context: typer.Context,
    api_url: Annotated[
        str | None, typer.Option("--api-url", metavar="URL", help="Address of the API, if not configured yet.")
    ] = None,
    provider: Annotated[
        Provider, typer.Option(help="How: dev takes a token that you were given; globus needs another package.")
    ] = Provider.DEV,
    check: Annotated[bool, typer.Option("--check/--no-check", help="Ask the API whether it knows the token.")] = True,
    as_json: AsJson = False,
) -> None:
    """Store a token, asked for without showing it, or read from standard input in a pipe."""
    url = api_url or os.environ.get("FARCALL_API_URL") or read_stored(config_path()).get("api_url")
    token = _TOKENS[provider]()
    settings = Settings.resolve(url, token, environ={"FARCALL_HOME": str(config_path().parent)})
    if check:
        with connected(context, api_url=settings.api_url, token=settings.token) as client:
            client.get_endpoints(role="owner")
    path = store({"api_url": settings.api_url, "token": settings.token})
    if as_json:
        show_json({"api_url": settings.api_url, "path": str(path), "checked": check})
    else:
        typer.echo(f"Logged in at {settings.api_url}; the token is in {path}.", err=True)
    if os.environ.get("FARCALL_TOKEN") not in (None, "", settings.token):
        typer.echo("FARCALL_TOKEN is set to another token, and goes before this one.", err=True)


def logout(as_json: AsJson = False) -> None:
    """Take the token out of the configuration file. It stays valid until its provider ends it."""
    was_stored = "token" in read_stored(config_path())
    if was_stored:
        store({"token": None})
    if as_json:
        show_json({"path": str(config_path()), "was_logged_in": was_stored})
    else:
        typer.echo("Logged out." if was_stored else "Nobody was logged in.", err=True)
    if os.environ.get("FARCALL_TOKEN"):
        typer.echo("FARCALL_TOKEN is still set.", err=True)


def whoami(context: typer.Context, as_json: AsJson = False) -> None:
    """Show which API is called, whose token is used, and whether the API knows it."""
    settings = Settings.resolve()
    source = "FARCALL_TOKEN" if os.environ.get("FARCALL_TOKEN") else str(config_path())
    with connected(context) as client:
        owned = client.get_endpoints(role="owner")
    # The API tells an identity only with what it owns.
    identity_id = owned[0]["owner"] if owned else None
    fields = {"api_url": settings.api_url, "token_from": source, "identity_id": identity_id, "endpoints": len(owned)}
    if as_json:
        show_json(fields)
    else:
        show_fields({name.replace("_", " "): value for name, value in fields.items()})


def _given_token() -> str:
    if sys.stdin.isatty():
        token: str = typer.prompt("Token", hide_input=True, err=True)
    else:
        token = sys.stdin.readline()
    if not token.strip():
        raise ConfigurationError("no token was given", hint="`farcall login < FILE` reads it from a file.")
    return token.strip()


def _globus_token() -> str:
    raise ConfigurationError(
        "this command line cannot log in with Globus by itself: it does not bring globus-sdk",
        hint="Log in with globus_sdk.UserApp and pass its authorizer to farcall.Client, "
        "or give an access token to `farcall login`.",
    )


#: Where a token comes from: a provider that can log in is one function more.
_TOKENS: Final[Mapping[Provider, Callable[[], str]]] = {Provider.DEV: _given_token, Provider.GLOBUS: _globus_token}
