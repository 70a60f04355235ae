"""OpenID Connect login: with a device code, with a browser on this machine, or as a client.

RFC 8628 (devices), RFC 7636 and RFC 8252 (a code for a program on one's own machine, with PKCE), RFC 6749 (the rest).
"""

from __future__ import annotations

import base64
import hashlib
import secrets
import time
import webbrowser
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any, Final
from urllib.parse import parse_qs, urlencode, urlsplit

import httpx
import typer

from farcall_common.addresses import check_address
from farcall_common.errors import ConfigurationError, Unauthenticated, Unavailable
from farcall_common.http_client import http_client
from farcall_common.login import Login, client_form, request_token

Json = Mapping[str, Any]

#: Addresses in the discovery document that receive secrets or that the user logs in at.
_SECRET_ENDPOINTS: Final = frozenset(
    {"authorization_endpoint", "device_authorization_endpoint", "revocation_endpoint", "token_endpoint"}
)
_TIMEOUT_S: Final = 20.0
_DEVICE: Final = "urn:ietf:params:oauth:grant-type:device_code"
_INTERVAL_S: Final = 5.0
_SLOWER_S: Final = 5.0
#: Time for the user to log in, unless the provider sets it.
_LOGIN_TIMEOUT_S: Final = 300.0


def discovered(issuer: str) -> Json:
    """The discovery document of an issuer.

    :raises ConfigurationError: if there is none, or if it is not at a safe address.
    :raises Unavailable: if it cannot be reached.
    """
    check_address(issuer, what="the issuer")
    address = f"{issuer.rstrip('/')}/.well-known/openid-configuration"
    hint = "--issuer is the address that the tokens' claim `iss` has."
    try:
        with http_client(timeout=_TIMEOUT_S) as client:
            answer = client.get(address)
        document = answer.json() if answer.is_success else None
    except (httpx.InvalidURL, httpx.UnsupportedProtocol, ValueError) as error:
        raise ConfigurationError(f"{issuer} is not an issuer: {error}", hint=hint) from error
    except httpx.TransportError as error:
        raise Unavailable(f"{address} cannot be reached: {error}") from error
    if not isinstance(document, dict) or document.get("issuer") != issuer or "token_endpoint" not in document:
        raise ConfigurationError(f"{address} does not describe the issuer {issuer}", hint=hint)
    for name in _SECRET_ENDPOINTS & document.keys():
        check_address(str(document[name]), what=f"{name} of {issuer}")
    return document


def tokens_of_client(login: Login, secret: str) -> Json:
    """Log in as a client with a secret, for unattended programs."""
    return request_token(login.token_url, client_form(login), client_id=login.client_id, secret=secret)


def tokens_by_device(login: Login, provider: Json) -> Json:
    """Show a code, which the user enters in any browser, and wait for that.

    :raises Unauthenticated: if it is refused, or takes too long.
    """
    wanted = {"client_id": login.client_id, "scope": login.scope, "audience": login.audience}
    try:
        with http_client(timeout=_TIMEOUT_S) as client:
            data = {name: value for name, value in wanted.items() if value}
            answer = client.post(provider["device_authorization_endpoint"], data=data)
        codes = answer.json()
        device, code, address = codes["device_code"], codes["user_code"], codes["verification_uri"]
        interval_s = float(codes.get("interval", _INTERVAL_S))
        timeout_s = float(codes.get("expires_in", _LOGIN_TIMEOUT_S))
    except httpx.TransportError as error:
        raise Unavailable(f"the provider cannot be reached: {error}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise Unauthenticated("the provider issued no device code", hint="Try --browser.") from error
    typer.echo(f"Open {codes.get('verification_uri_complete') or address} and confirm the code {code}.", err=True)
    give_up_at = time.monotonic() + timeout_s
    form = {"grant_type": _DEVICE, "device_code": device}
    while time.monotonic() < give_up_at:
        time.sleep(interval_s)
        try:
            return request_token(login.token_url, form, client_id=login.client_id)
        except Unauthenticated as error:
            match str(error.__cause__):
                case "authorization_pending":
                    pass
                case "slow_down":
                    interval_s += min(_SLOWER_S, interval_s)
                case _:
                    raise
    raise Unauthenticated("the code was not confirmed in time", hint="Run the command again.")


def tokens_by_browser(login: Login, provider: Json, *, timeout_s: float = _LOGIN_TIMEOUT_S) -> Json:
    """Open a browser on this machine, which is redirected here with a code.

    :raises Unauthenticated: if the login is refused, or takes too long.
    """
    if "authorization_endpoint" not in provider:
        raise Unauthenticated("the provider does not support logins with a browser", hint="Omit --browser.")
    verifier, state = secrets.token_urlsafe(48), secrets.token_urlsafe(16)
    challenge = base64.urlsafe_b64encode(hashlib.sha256(verifier.encode()).digest()).rstrip(b"=").decode()
    with _Listener(("127.0.0.1", 0), _Answer) as listener:
        redirect_uri = f"http://127.0.0.1:{listener.server_address[1]}/"
        query = {
            "response_type": "code",
            "client_id": login.client_id,
            "redirect_uri": redirect_uri,
            "scope": login.scope,
            "audience": login.audience,
            "state": state,
            "code_challenge": challenge,
            "code_challenge_method": "S256",
        }
        given = {name: value for name, value in query.items() if value}
        address = f"{provider['authorization_endpoint']}?{urlencode(given)}"
        typer.echo(f"Open {address} in a browser on this machine, if it does not open automatically.", err=True)
        webbrowser.open(address)
        found = listener.wait(timeout_s)
    if "code" not in found or not secrets.compare_digest(found.get("state", ""), state):
        raise Unauthenticated(f"the login was not completed: {found.get('error', 'no answer')}")
    form = {
        "grant_type": "authorization_code",
        "code": found["code"],
        "redirect_uri": redirect_uri,
        "code_verifier": verifier,
    }
    return request_token(login.token_url, form, client_id=login.client_id)


class _Listener(HTTPServer):
    """Waits for the browser's redirect."""

    found: dict[str, str]

    def wait(self, timeout_s: float) -> dict[str, str]:
        """The query of the redirect; empty if there was none."""
        self.found = {}
        give_up_at = time.monotonic() + timeout_s
        while not self.found and (left_s := give_up_at - time.monotonic()) > 0:
            self.timeout = left_s
            self.handle_request()
        return self.found


class _Answer(BaseHTTPRequestHandler):
    #: Of one connection: one that sends nothing must not block the browser for long.
    timeout = 5

    def do_GET(self) -> None:
        query = {name: values[-1] for name, values in parse_qs(urlsplit(self.path).query).items()}
        is_it = urlsplit(self.path).path == "/" and bool({"code", "error"} & query.keys())
        text = "Done. You may close this page." if is_it else "There is nothing here."
        self.send_response(200 if is_it else 404)
        self.send_header("content-type", "text/plain; charset=utf-8")
        self.end_headers()
        self.wfile.write(text.encode())
        if is_it:
            assert isinstance(self.server, _Listener)
            self.server.found = query

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - as in the base class
        """The code in the address is a secret."""
