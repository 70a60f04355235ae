"""Logins: access tokens of ``farcall login``, their file, and their renewal.

The file, ``$FARCALL_HOME/login.json``, is used and renewed by every process of its owner: clients, and endpoints that
run for months. It is changed under a lock, because many providers accept a refresh token only once.

Token requests follow RFC 6749, sections 4.4 and 6; revocation follows RFC 7009.
"""

from __future__ import annotations

import dataclasses
import os
import threading
import time
import weakref
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any, Final

import httpx
import msgspec

from farcall_common.addresses import check_address
from farcall_common.credentials import CLIENT_VARIABLES
from farcall_common.errors import ConfigurationError, FarcallError, Unauthenticated, Unavailable
from farcall_common.files import write_private
from farcall_common.http_client import http_client
from farcall_common.private import locked

_TIMEOUT_S: Final = 20.0
#: A token that expires within this time is renewed before it is used.
_MARGIN_S: Final = 60.0
#: Too slow, too early, too many: no refusal of the login.
_RETRYABLE: Final = (408, 425, 429)
_LOG_IN: Final = "Log in again with `farcall login`."

_kept: weakref.WeakSet[KeptLogin] = weakref.WeakSet()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Login:
    """A login at one deployment. Tokens are left out of the repr.

    ``expires_at`` is in epoch seconds, None if the provider does not give it. A login without ``refresh_token`` is
    that of a client, renewed with the client's secret, which is not stored; or it ends with its token.
    """

    api_url: str
    provider: str
    client_id: str
    scope: str
    token_url: str
    revoke_url: str = ""
    audience: str = ""
    access_token: str = dataclasses.field(default="", repr=False)
    refresh_token: str | None = dataclasses.field(default=None, repr=False)
    expires_at: float | None = None

    def with_tokens(self, answer: Mapping[str, Any], *, now: float) -> Login:
        """The login after a provider's answer. The refresh token stays unless the answer has a new one."""
        lifetime_s = answer.get("expires_in")
        return dataclasses.replace(
            self,
            access_token=str(answer["access_token"]),
            refresh_token=answer.get("refresh_token") or self.refresh_token,
            expires_at=None if lifetime_s is None else now + float(lifetime_s),
        )


def keep(path: Path, login: Login) -> None:
    """Write a login where only its owner may read it.

    :raises ConfigurationError: if that is not possible.
    """
    try:
        write_private(path, msgspec.json.format(msgspec.json.encode(login)) + b"\n")
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be written: {error.strerror}") from error


def read(path: Path) -> Login | None:
    """The stored login, if there is one.

    :raises ConfigurationError: if the file is invalid.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=Login)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigurationError(f"{path} cannot be read: {error}", hint="Delete it, and log in again.") from error


def forget(path: Path) -> None:
    """Delete a stored login."""
    path.unlink(missing_ok=True)


class Bearer(httpx.Auth):
    """Authentication with a fixed token."""

    def __init__(self, token: str) -> None:
        self._token = token

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        request.headers["authorization"] = f"Bearer {self._token}"
        yield request


class KeptLogin(httpx.Auth):
    """Authentication with the token of a stored login, which is renewed in time. Thread-safe and fork-safe.

    It is an authentication for httpx, and has the methods of a ``globus_sdk`` authorizer.
    """

    def __init__(self, path: Path, *, environ: Mapping[str, str], clock: Callable[[], float] = time.time) -> None:
        self._path = path
        self._environ = environ
        self._clock = clock
        self._lock = threading.Lock()
        self._login: Login | None = None
        _kept.add(self)

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        request.headers["authorization"] = self.get_authorization_header()
        response = yield request
        if response.status_code == httpx.codes.UNAUTHORIZED and self.handle_missing_authorization():
            request.headers["authorization"] = self.get_authorization_header()
            yield request

    def get_authorization_header(self) -> str:
        """The value of the header ``Authorization``.

        :raises Unauthenticated: if the login was deleted, or the provider refuses to renew the token.
        :raises Unavailable: if the provider cannot be reached.
        """
        with self._lock:
            login = self._login
            if login is None or self._ends_soon(login):
                login = self._login = self._current(refused=None)
            return f"Bearer {login.access_token}"

    def handle_missing_authorization(self) -> bool:
        """The API refused the last token: renew it. Returns whether there is a new one."""
        with self._lock:
            if self._login is None:
                return False
            try:
                self._login = self._current(refused=self._login.access_token)
            except FarcallError:
                return False
            return True

    def _current(self, *, refused: str | None) -> Login:
        """The stored login, renewed unless another process has done that meanwhile."""
        with locked(self._path):
            login = read(self._path)
            if login is None:
                raise Unauthenticated("You are not logged in any more.", hint=_LOG_IN)
            if login.access_token != refused and not self._ends_soon(login):
                return login
            try:
                answer = self._renew(login)
            except Unavailable:
                if refused is None and login.expires_at is not None and self._clock() < login.expires_at:
                    return login  # The token is still valid; the next request tries again.
                raise
            renewed = login.with_tokens(answer, now=self._clock())
            keep(self._path, renewed)
            return renewed

    def _renew(self, login: Login) -> Mapping[str, Any]:
        client_id, secret = client_from(self._environ)
        if login.refresh_token is not None:
            form = {"grant_type": "refresh_token", "refresh_token": login.refresh_token}
            known_secret = secret if client_id == login.client_id else None
            return request_token(login.token_url, form, client_id=login.client_id, secret=known_secret)
        if secret is None or client_id != login.client_id:
            raise Unauthenticated("The login has expired.", hint=f"Its token cannot be renewed. {_LOG_IN}")
        return request_token(login.token_url, client_form(login), client_id=client_id, secret=secret)

    def _ends_soon(self, login: Login) -> bool:
        return login.expires_at is not None and login.expires_at - _MARGIN_S <= self._clock()


def _after_fork() -> None:
    for login in list(_kept):
        login._lock = threading.Lock()  # another thread of the parent process may hold it


if hasattr(os, "register_at_fork"):  # not on Windows, where nothing forks
    os.register_at_fork(after_in_child=_after_fork)


def client_from(environ: Mapping[str, str]) -> tuple[str | None, str | None]:
    """Id and secret of a client from the environment; the secret may be missing."""
    for id_name, secret_name in CLIENT_VARIABLES:
        if environ.get(id_name):
            return environ[id_name], environ.get(secret_name) or None
    return None, None


def client_form(login: Login) -> dict[str, str]:
    """The form of a client's token request."""
    form = {"grant_type": "client_credentials", "scope": login.scope, "audience": login.audience}
    return {name: value for name, value in form.items() if value}


def request_token(
    token_url: str, form: Mapping[str, str], *, client_id: str, secret: str | None = None
) -> Mapping[str, Any]:
    """Request a token from a provider; its answer has an ``access_token``.

    :raises ConfigurationError: if the address is invalid or not safe.
    :raises Unauthenticated: if the provider refuses. ``__cause__`` has the error code of the answer, as a ValueError.
    :raises Unavailable: if it cannot be reached, limits requests, or its answer is invalid.
    """
    answer = _post(token_url, form, client_id=client_id, secret=secret)
    try:
        body = answer.json()
    except ValueError:
        body = None
    if not isinstance(body, dict) or answer.status_code >= 500 or answer.status_code in _RETRYABLE:
        raise Unavailable(f"{token_url} answered {answer.status_code}.")
    if not answer.is_success or not isinstance(body.get("access_token"), str):
        code = str(body.get("error", answer.status_code))
        reason = str(body.get("error_description") or code)
        raise Unauthenticated(f"The provider refused a token: {reason}.", hint=_LOG_IN) from ValueError(code)
    return body


def revoke(login: Login, *, secret: str | None = None) -> bool:
    """Revoke the tokens of a login at the provider. Returns whether it confirmed that."""
    tokens = [token for token in (login.refresh_token, login.access_token) if token]
    if not login.revoke_url:
        return False
    try:
        answers = [
            _post(login.revoke_url, {"token": token}, client_id=login.client_id, secret=secret) for token in tokens
        ]
    except Unavailable:
        return False
    return all(answer.is_success for answer in answers)


def _post(url: str, form: Mapping[str, str], *, client_id: str, secret: str | None) -> httpx.Response:
    check_address(url, what="the provider's address")
    auth = None if secret is None else httpx.BasicAuth(client_id, secret)
    data = dict(form) if auth else {**form, "client_id": client_id}
    try:
        with http_client(auth=auth, timeout=_TIMEOUT_S, headers={"accept": "application/json"}) as client:
            return client.post(url, data=data)
    except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
        raise ConfigurationError(f"{url!r} is not a valid provider address: {error}") from error
    except httpx.TransportError as error:
        raise Unavailable(f"{url} cannot be reached: {error}") from error
