"""``farcall login``, ``logout``, ``whoami`` and ``audit``."""

from __future__ import annotations

import collections
import enum
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from farcall._settings import Settings
from farcall.cli._connect import connected
from farcall.cli._output import AsJson, AsLines, FullIds, Since, Until, moment, show_json, shown_ids, write
from farcall_common.console import instant, new_group, show_fields, show_table
from farcall_common.credentials import (
    LOGIN_FILE,
    config_path,
    find_home,
    from_environment,
    known_home,
    read_settings,
    write_settings,
)
from farcall_common.errors import ConfigurationError

if TYPE_CHECKING:
    from farcall_common.login import Login

audit = new_group("Audit log.")

_AUDIT_COLUMNS: Final = ("at", "identity_id", "action", "object_id", "owner_id", "detail")


class Provider(enum.StrEnum):
    """Identity provider."""

    DEV = "dev"
    GLOBUS = "globus"
    OIDC = "oidc"


def login(
    context: typer.Context,
    api_url: Annotated[
        str | None, typer.Option("--api-url", metavar="URL", help="Address of the API, if not configured yet.")
    ] = None,
    provider: Annotated[
        Provider | None,
        typer.Option(help="dev: enter a token. globus, oidc: log in to get one. Default with --issuer: oidc."),
    ] = None,
    issuer: Annotated[
        str | None, typer.Option(envvar="FARCALL_LOGIN_ISSUER", metavar="URL", help="The OpenID Connect issuer.")
    ] = None,
    client_id: Annotated[
        str | None, typer.Option(metavar="ID", help="The provider's client; else FARCALL_CLIENT_ID.")
    ] = None,
    scope: Annotated[
        str | None, typer.Option(envvar="FARCALL_LOGIN_SCOPE", metavar="SCOPE", help="Scope of the token.")
    ] = None,
    audience: Annotated[
        str,
        typer.Option(
            envvar="FARCALL_LOGIN_AUDIENCE", metavar="NAME", help="Audience of the token, for providers that need it."
        ),
    ] = "",
    browser: Annotated[bool, typer.Option("--browser", help="Log in with a browser on this machine.")] = False,
    check: Annotated[bool, typer.Option("--check/--no-check", help="Verify the token with the API.")] = True,
    as_json: AsJson = False,
) -> None:
    """Log in, or store a token.

    With --issuer or --provider globus, the token comes from that provider and is renewed automatically. If
    FARCALL_CLIENT_SECRET is set, the client logs in without a prompt; GLOBUS_COMPUTE_CLIENT_ID and _SECRET work too.
    A token of your own is read from a prompt without echo, or from standard input.
    """
    chosen = provider or (Provider.OIDC if issuer else Provider.DEV)
    if chosen is Provider.DEV:
        got, token = None, _given_token()
    else:
        got = _log_in(_address(api_url), chosen, issuer, client_id, scope, audience, browser=browser)
        token = got.access_token
    settings = Settings.resolve(api_url, token)
    if check:
        with connected(context, api_url=settings.api_url, token=settings.token) as client:
            client.whoami()
    path = _keep(settings, got)
    if as_json:
        show_json({"api_url": settings.api_url, "path": str(path), "checked": check})
    else:
        typer.echo(f"Logged in at {settings.api_url}; the token is in {path}.", err=True)
    if from_environment("token", os.environ) not in (None, settings.token):
        typer.echo("FARCALL_TOKEN is set to another token, which takes precedence.", err=True)


def logout(as_json: AsJson = False) -> None:
    """Delete the token, and revoke it if its provider supports that. A token that you were given stays valid."""
    home, path = find_home(os.environ), _login_path()
    has_token, revoked = "token" in read_settings(home), False
    was_stored = has_token or path.exists()
    if path.exists():
        from farcall_common.login import client_from, forget, read, revoke

        kept = read(path)
        client_id, secret = client_from(os.environ)
        revoked = kept is not None and revoke(kept, secret=secret if kept.client_id == client_id else None)
        forget(path)
    if has_token:
        write_settings(home, {"token": None})
    if as_json:
        show_json({"path": str(config_path(home)), "was_logged_in": was_stored, "revoked": revoked})
    else:
        typer.echo("Logged out." if was_stored else "There was no login.", err=True)
    if from_environment("token", os.environ):
        typer.echo("FARCALL_TOKEN is still set.", err=True)


def whoami(context: typer.Context, as_json: AsJson = False) -> None:
    """Show the address of the API, your identity, and your limits."""
    settings = Settings.resolve()
    given = from_environment("token", os.environ)
    source = "FARCALL_TOKEN" if given else str(settings.login or config_path(known_home(os.environ)))
    with connected(context) as client:
        who = client.whoami()
    fields: dict[str, Any] = {"api_url": settings.api_url, "token_from": source, **who}
    if as_json:
        show_json(fields)
        return
    fields["linked"] = ", ".join(who["linked"])
    if token := fields.pop("token", None):
        fields["token"] = f"{token['name']}: {', '.join(token['scopes'])}"
    limits = fields.pop("limits")
    fields |= {name: _shown(value) for name, value in limits.items()}
    show_fields({name.replace("_", " "): value for name, value in fields.items()})


def _given_token() -> str:
    if sys.stdin.isatty():
        token: str = typer.prompt("Token", hide_input=True, err=True)
    else:
        token = sys.stdin.readline()
    if not token.strip():
        raise ConfigurationError("the token is empty", hint="`farcall login < FILE` reads it from a file.")
    return token.strip()


def _log_in(
    api_url: str,
    provider: Provider,
    issuer: str | None,
    client_id: str | None,
    scope: str | None,
    audience: str,
    *,
    browser: bool,
) -> Login:
    """A login with tokens from a provider.

    :raises ConfigurationError: if an option is missing.
    :raises Unauthenticated, Unavailable: if the provider issues no token.
    """
    import time

    from farcall.cli import _oidc
    from farcall_common.login import Login, client_from

    if provider is Provider.OIDC and not issuer:
        raise ConfigurationError("the issuer is missing", hint="Pass --issuer, or set FARCALL_LOGIN_ISSUER.")
    known_id, secret = client_from(os.environ)
    chosen_id = client_id or known_id
    if chosen_id is None:
        raise ConfigurationError("the client id is missing", hint="Pass --client-id, or set FARCALL_CLIENT_ID.")
    secret = secret if chosen_id == known_id else None
    found: Mapping[str, Any] = {}
    if provider is Provider.GLOBUS:
        from farcall_common.globus import globus_tokens, globus_urls

        scope = scope or os.environ.get("FARCALL_GLOBUS_SCOPE")
        if not scope:
            raise ConfigurationError(
                "the scope of the deployment is missing", hint="Pass --scope; the operator of the deployment has it."
            )
        token_url, revoke_url = globus_urls()
    else:
        found = _oidc.discovered(issuer or "")
        token_url, revoke_url = found["token_endpoint"], found.get("revocation_endpoint", "")
        scope = scope or ("" if secret else "openid offline_access")
    wanted = Login(
        api_url=api_url,
        provider=provider.value,
        client_id=chosen_id,
        scope=scope,
        token_url=token_url,
        revoke_url=revoke_url,
        audience=audience,
    )
    if provider is Provider.GLOBUS:
        answer = globus_tokens(wanted, secret, browser=browser)
    elif secret is not None:
        answer = _oidc.tokens_of_client(wanted, secret)
    elif browser or "device_authorization_endpoint" not in found:
        answer = _oidc.tokens_by_browser(wanted, found)
    else:
        answer = _oidc.tokens_by_device(wanted, found)
    return wanted.with_tokens(answer, now=time.time())


def _keep(settings: Settings, got: Login | None) -> Path:
    """Store a login or a token, and delete the other. Returns the path."""
    from farcall_common.login import forget, keep

    home = find_home(os.environ)
    if got is None:
        path = write_settings(home, {"api_url": settings.api_url, "token": settings.token})
        forget(_login_path())
        return path
    write_settings(home, {"api_url": settings.api_url, "token": None})
    keep(_login_path(), got)
    return _login_path()


def _login_path() -> Path:
    return find_home(os.environ) / LOGIN_FILE


def _address(url: str | None) -> str:
    """:raises ConfigurationError: if it is missing; before the user logs in."""
    return Settings.resolve(url, "-").api_url


def _shown(value: Any) -> Any:
    return f"{value['used']} of {value['limit']}" if isinstance(value, dict) else value


@audit.command("ls")
def list_(
    context: typer.Context,
    since: Annotated[str, typer.Option(metavar="WHEN", help="Only from then on, like 12h or 2026-11-01.")] = "7d",
    limit: Annotated[int, typer.Option(min=1, help="How many at most, the last ones.")] = 50,
    full_ids: FullIds = False,
    as_json: AsJson = False,
) -> None:
    """List what you did, and what others did to your objects, in the last seven days; the newest last."""
    with connected(context) as client:
        found = collections.deque(client.iter_audit(since=moment(since)), maxlen=limit)
    if as_json:
        show_json(list(found))
        return
    ids = shown_ids((each[key] for each in found for key in ("identity_id", "object_id")), full=full_ids)
    rows = [
        (
            instant(each["at"]),
            each["action"],
            ids[each["object_id"]],
            ids[each["identity_id"]],
            ", ".join(f"{name} {value}" for name, value in each["detail"].items()),
        )
        for each in found
    ]
    show_table(("at", "action", "object", "by", "detail"), rows, empty="Nothing was done.", cut=True)


@audit.command()
def export(context: typer.Context, since: Since = None, until: Until = None, as_json: AsLines = True) -> None:
    """Write your actions, and actions of others on your objects, oldest first: a JSON object a line, or CSV.

    Functions, containers, endpoints and their keys that were registered, changed or deleted; batches that were
    submitted; tasks that were cancelled, retried or discarded. Instants are epoch seconds.
    """
    first, last = moment(since), moment(until)
    with connected(context, doing=None) as client:
        write(client.iter_audit(since=first, until=last), _AUDIT_COLUMNS, as_json=as_json)
