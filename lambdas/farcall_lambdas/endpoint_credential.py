"""Credentials of endpoints: tokens that can connect the agent of one endpoint, and nothing else.

A credential is ``farcall-endpoint.<claims>.<signature>``: the identity of the endpoint's owner, as an authorizer's
context, with the endpoint's id and a random ``credential_id``. Authorizer and API share the key that signs it. The
authorizer verifies the signature, and that the owner may still use the deployment; the API compares ``credential_id``
with the one that the endpoint has now.
"""

from __future__ import annotations

import base64
import dataclasses
import json
from typing import Final

from farcall_common.errors import Unauthenticated
from farcall_lambdas.allowed_users import AllowedUsers
from farcall_lambdas.identity import Identity, IdentityProvider
from farcall_lambdas.signed_caller import CallerKey

_PREFIX: Final = "farcall-endpoint."
_SIGNATURE: Final = "signature"


class EndpointCredentials:
    """Signs and reads credentials, with a key that is made from the one that signs callers."""

    def __init__(self, key: CallerKey) -> None:
        self._key = key.derived("endpoint credential")

    def issue(self, owner: Identity, *, endpoint_id: str, credential_id: str) -> str:
        """A credential of an endpoint. It does not expire.

        :raises Unavailable: if the key cannot be read.
        """
        identity = dataclasses.replace(
            owner, endpoint_id=endpoint_id, credential_id=credential_id, is_admin=False, expires_at=None
        )
        claims = identity.to_context()
        text = base64.urlsafe_b64encode(json.dumps(claims).encode()).decode().rstrip("=")
        return f"{_PREFIX}{text}.{self._key.sign(claims)[_SIGNATURE]}"

    def read(self, credential: str) -> Identity:
        """The identity in a credential.

        :raises Unauthenticated: if it was not signed with the key.
        :raises Unavailable: if the key cannot be read.
        """
        text, _, signature = credential.removeprefix(_PREFIX).partition(".")
        try:
            claims = json.loads(base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True))
        except (ValueError, RecursionError):
            claims = None
        if not isinstance(claims, dict) or not self._key.has_signed({**claims, _SIGNATURE: signature}):
            raise Unauthenticated("The endpoint's credential is not accepted.")
        return Identity.from_context(claims)


class ProviderWithCredentials:
    """An identity provider that also accepts credentials of endpoints whose owners may use the deployment."""

    def __init__(self, provider: IdentityProvider, credentials: EndpointCredentials, *, allowed: AllowedUsers) -> None:
        self._provider = provider
        self._credentials = credentials
        self._allowed = allowed

    def authenticate(self, token: str) -> Identity:
        if not token.startswith(_PREFIX):
            return self._provider.authenticate(token)
        owner = self._allowed.require_again(self._credentials.read(token))
        return dataclasses.replace(owner, is_admin=False)
