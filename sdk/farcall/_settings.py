"""Client settings: the address of the API, and the credentials."""

from __future__ import annotations

from typing import Protocol

from farcall_common.credentials import Credentials
from farcall_common.errors import Unauthenticated


class Settings(Credentials):
    """What a client must know: the API to call, and the token to call it with. The repr leaves out the token.

    :param login: the file of a login at this API, whose token is used and renewed instead of ``token``.
    """


class Authorizer(Protocol):
    """What makes the header of each request: every ``globus_sdk`` authorizer is one."""

    def get_authorization_header(self) -> str | None:
        """The value of the header ``Authorization``."""

    def handle_missing_authorization(self) -> bool:
        """The last header was refused. Whether asking for another one can help."""


def bearer_token(authorizer: Authorizer) -> str:
    """The token that an authorizer gives now.

    :raises Unauthenticated: if it gives none.
    """
    scheme, _, token = (authorizer.get_authorization_header() or "").partition(" ")
    if scheme.lower() != "bearer" or not token:
        raise Unauthenticated("the authorizer gives no bearer token", hint="Log in with it first.")
    return token
