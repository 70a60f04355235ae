"""Globus Auth login through globus-sdk, which ``farcall[globus]`` and ``farcall-endpoint[globus]`` install."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import typer

from farcall_common.errors import ConfigurationError, Unauthenticated, Unavailable
from farcall_common.login import Login

try:
    import globus_sdk as globus_sdk  # for others, who need not say that it is missing
    from globus_sdk.gare import GlobusAuthorizationParameters
    from globus_sdk.login_flows import (
        CommandLineLoginFlowEOFError,
        CommandLineLoginFlowManager,
        LocalServerLoginError,
        LocalServerLoginFlowManager,
    )
except ModuleNotFoundError as error:
    if not (error.name or "").startswith("globus_sdk"):
        raise
    raise ConfigurationError(
        "logging in with Globus needs globus-sdk, which is not installed",
        hint="pip install 'farcall[globus]'; for an endpoint: pip install 'farcall-endpoint[globus]'",
    ) from error


class _OnStandardError(CommandLineLoginFlowManager):
    """Prompts on standard error, because standard output may be a pipe."""

    def print_authorize_url(self, authorize_url: str) -> None:
        typer.echo(f"Open {authorize_url} and log in.", err=True)

    def prompt_for_code(self) -> str:
        return str(typer.prompt("Code", err=True)).strip()


class _WithBrowser(LocalServerLoginFlowManager):
    """Closes its socket, which the library leaves to the garbage collector."""

    @contextlib.contextmanager
    def background_local_server(self) -> Iterator[Any]:
        with super().background_local_server() as server:
            yield server
        server.server_close()


def globus_urls() -> tuple[str, str]:
    """Addresses at which Globus Auth issues and revokes tokens."""
    base = globus_sdk.AuthClient().base_url.rstrip("/")
    return f"{base}/v2/oauth2/token", f"{base}/v2/oauth2/token/revoke"


def globus_tokens(login: Login, secret: str | None, *, browser: bool) -> Mapping[str, Any]:
    """Tokens for one scope: of a client with a secret, or of a user, who logs in with a browser on any machine.

    :raises Unauthenticated: if Globus Auth refuses.
    :raises Unavailable: if it cannot be reached.
    """
    try:
        if secret is not None:
            client = globus_sdk.ConfidentialAppAuthClient(login.client_id, secret)
            return dict(client.oauth2_client_credentials_tokens(requested_scopes=login.scope).data)
        native = globus_sdk.NativeAppAuthClient(login.client_id, app_name="farcall")
        flow = _WithBrowser if browser else _OnStandardError
        manager = flow(native, request_refresh_tokens=True)
        return dict(manager.run_login_flow(GlobusAuthorizationParameters(required_scopes=[login.scope])).data)
    except globus_sdk.AuthAPIError as error:
        if error.http_status >= 500:
            raise Unavailable(f"Globus Auth answered {error.http_status}.") from error
        raise Unauthenticated(f"Globus Auth issued no token: {error.message}", hint="Is the code complete?") from error
    except globus_sdk.NetworkError as error:
        raise Unavailable(f"Globus Auth cannot be reached: {error}") from error
    except (LocalServerLoginError, CommandLineLoginFlowEOFError) as error:
        raise Unauthenticated(f"the login was not completed: {error}", hint="Log in without --browser.") from error
