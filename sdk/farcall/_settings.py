"""Client settings: the address of the API, and the credentials."""

from __future__ import annotations

from typing import Protocol

from farcall_common.credentials import Credentials
from farcall_common.errors import Unauthenticated


class Settings(Credentials):
    """Settings of a client: the address of the API, and the token. The repr leaves out the token.

    :param login: file of a login at this API; its token is used and renewed instead of ``token``.
    """


class Authorizer(Protocol):
    """Provides the credentials of each request, as every ``globus_sdk`` authorizer does."""

    def get_authorization_header(self) -> str | None:
        """The value of the header ``Authorization``."""

    def handle_missing_authorization(self) -> bool:
        """The last header was refused. Returns whether a new one may be accepted."""


def bearer_token(authorizer: Authorizer) -> str:
    """The current token of an authorizer.

    :raises Unauthenticated: if it has none.
    """
    scheme, _, token = (authorizer.get_authorization_header() or "").partition(" ")
    if scheme.lower() != "bearer" or not token:
        raise Unauthenticated("the authorizer has no bearer token", hint="Log in with it first.")
    return token
