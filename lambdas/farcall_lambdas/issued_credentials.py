"""Credentials that the deployment issues: those of endpoints, which connect the agent of one endpoint and do nothing
else, and tokens, which permit some operations.

A credential is ``farcall-endpoint.<claims>.<signature>``, a token ``farcall-token.<claims>.<signature>``: an identity,
as an authorizer's context, with the endpoint's id and a random ``credential_id``, or with the token's id. Authorizer
and API share the key that signs them. The authorizer verifies the signature, and that the person behind it may still
use the deployment; the API compares ``credential_id`` with the one that the endpoint has now, and reads the token's
record.
"""

from __future__ import annotations

import base64
import dataclasses
import json
from collections.abc import Callable
from typing import Final

from farcall_common.errors import Unauthenticated
from farcall_lambdas.allowed_users import AllowedUsers
from farcall_lambdas.identity import Identity, IdentityProvider
from farcall_lambdas.signed_caller import CallerKey

_SIGNATURE: Final = "signature"


@dataclasses.dataclass(frozen=True)
class _Kind:
    """A kind of credential, with a key of its own: a credential of one kind is none of another."""

    prefix: str
    key: CallerKey
    refusal: str
    is_kind: Callable[[Identity], bool]

    def issue(self, identity: Identity) -> str:
        claims = identity.to_context()
        text = base64.urlsafe_b64encode(json.dumps(claims).encode()).decode().rstrip("=")
        return f"{self.prefix}{text}.{self.key.sign(claims)[_SIGNATURE]}"

    def read(self, credential: str) -> Identity:
        text, _, signature = credential.removeprefix(self.prefix).partition(".")
        try:
            claims = json.loads(base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True))
        except (ValueError, RecursionError):
            claims = None
        if isinstance(claims, dict) and self.key.has_signed({**claims, _SIGNATURE: signature}):
            identity = Identity.from_context(claims)
            if self.is_kind(identity):
                return identity
        raise Unauthenticated(self.refusal)


class IssuedCredentials:
    """Signs and reads credentials, with keys that are made from the one that signs callers."""

    def __init__(self, key: CallerKey) -> None:
        self._endpoint = _Kind(
            "farcall-endpoint.",
            key.derived("endpoint credential"),
            "The endpoint's credential is not accepted.",
            lambda identity: bool(identity.endpoint_id) and not identity.token_id,
        )
        self._token = _Kind(
            "farcall-token.",
            key.derived("token"),
            "The token is not accepted.",
            lambda identity: bool(identity.token_id),
        )

    def issue(self, owner: Identity, *, endpoint_id: str, credential_id: str) -> str:
        """A credential of an endpoint. It does not expire.

        :raises Unavailable: if the key cannot be read.
        """
        return self._endpoint.issue(
            dataclasses.replace(
                owner,
                endpoint_id=endpoint_id,
                credential_id=credential_id,
                token_id="",
                is_admin=False,
                expires_at=None,
            )
        )

    def issue_token(self, identity: Identity, *, token_id: str, expires_at: float) -> str:
        """A token of an identity until ``expires_at`` (epoch seconds); the same error."""
        return self._token.issue(
            dataclasses.replace(identity, token_id=token_id, is_admin=False, expires_at=expires_at)
        )

    def is_issued(self, text: str) -> bool:
        """Whether a bearer token claims to be of this deployment."""
        return text.startswith((self._endpoint.prefix, self._token.prefix))

    def read(self, credential: str) -> Identity:
        """The identity in a credential or a token.

        :raises Unauthenticated: if it was not signed with the key of its kind.
        :raises Unavailable: if the key cannot be read.
        """
        kind = self._token if credential.startswith(self._token.prefix) else self._endpoint
        return kind.read(credential)


class ProviderWithCredentials:
    """An identity provider that also accepts credentials and tokens of people who may use the deployment, and of their
    service accounts."""

    def __init__(self, provider: IdentityProvider, credentials: IssuedCredentials, *, allowed: AllowedUsers) -> None:
        self._provider = provider
        self._credentials = credentials
        self._allowed = allowed

    def authenticate(self, token: str) -> Identity:
        if not self._credentials.is_issued(token):
            return self._provider.authenticate(token)
        identity = self._credentials.read(token)
        if identity.creator is not None:
            self._allowed.require_again(identity.creator)
            return identity
        return dataclasses.replace(self._allowed.require_again(identity), is_admin=False)
