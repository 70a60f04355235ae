"""Authentication: identifies the caller by a bearer token, in front of the API."""

from __future__ import annotations

from typing import Any

from farcall_common.errors import Unauthenticated
from farcall_lambdas.identity import Identity, IdentityProvider


class Authorizer:
    """Authenticates the Authorization header with the identity provider."""

    def __init__(self, provider: IdentityProvider) -> None:
        self._provider = provider

    def identify(self, authorization: str | None) -> Identity:
        """The identity behind ``Bearer <token>``.

        :raises Unauthenticated: without a token, or with one that is not accepted.
        :raises Unavailable: when the provider is unavailable.
        """
        scheme, _, token = (authorization or "").strip().partition(" ")
        token = token.strip()
        if scheme.lower() != "bearer" or not token:
            raise Unauthenticated("The request has no bearer token.")
        return self._provider.authenticate(token)


def policy(identity: Identity, method_arn: str) -> dict[str, Any]:
    """The answer of a TOKEN authorizer: the caller may call the API; the identity is its context.

    API Gateway caches the answer by token alone, so it allows the whole stage and never only the path at hand.
    """
    stage_arn = "/".join(method_arn.split("/")[:2])
    return {
        "principalId": identity.identity_id,
        "policyDocument": {
            "Version": "2012-10-17",
            "Statement": [{"Action": "execute-api:Invoke", "Effect": "Allow", "Resource": f"{stage_arn}/*"}],
        },
        "context": identity.to_context(),
    }
