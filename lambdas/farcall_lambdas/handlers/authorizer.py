"""TOKEN authorizer function of the API. It runs outside the VPC and needs no store."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from typing import Any

from aws_lambda_powertools.utilities.typing import LambdaContext

from farcall_common.errors import Unauthenticated
from farcall_lambdas.auth import provider_from_settings
from farcall_lambdas.identity import Authorizer, Identity
from farcall_lambdas.logs import configure
from farcall_lambdas.settings import AuthSettings


def handle(event: Mapping[str, Any], context: LambdaContext) -> dict[str, Any]:  # noqa: ARG001  # Lambda's signature
    """The policy for a token. Any error but "Unauthorized" makes API Gateway answer that the authorizer failed."""
    try:
        identity = _authorizer().identify(event.get("authorizationToken"))
    except Unauthenticated:
        # API Gateway answers 401 to exactly this text, and 500 to any other.
        raise PermissionError("Unauthorized") from None
    return policy(identity, event["methodArn"])


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


@functools.cache
def _authorizer() -> Authorizer:
    configure(os.environ.get("FARCALL_LOG_LEVEL", "INFO"))
    return Authorizer(provider_from_settings(AuthSettings.from_environment(os.environ)))
