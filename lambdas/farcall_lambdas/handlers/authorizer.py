"""TOKEN authorizer function of the API. It runs outside the VPC and needs no store."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping
from typing import Any

from aws_lambda_powertools import Logger
from aws_lambda_powertools.utilities.typing import LambdaContext

from farcall_common.errors import Unauthenticated, UserNotAllowed
from farcall_lambdas.auth import provider_from_settings
from farcall_lambdas.identity import Authorizer, Identity
from farcall_lambdas.issued_credentials import IssuedCredentials, ProviderWithCredentials
from farcall_lambdas.logs import SERVICE, configure, log_ids
from farcall_lambdas.settings import AuthSettings
from farcall_lambdas.signed_caller import CallerKey

logger = Logger(service=SERVICE, child=True)


def handle(event: Mapping[str, Any], context: LambdaContext) -> dict[str, Any]:
    """The policy for a token. Any error but "Unauthorized" makes API Gateway answer that the authorizer failed."""
    log_ids(function_request_id=context.aws_request_id)
    try:
        identity = _authorizer().identify(event.get("authorizationToken"))
    except Unauthenticated:
        # API Gateway answers 401 to exactly this text, and 500 to any other.
        raise PermissionError("Unauthorized") from None
    except UserNotAllowed as error:
        logger.warning("user refused", reason=error.record.message)
        return refusal(error, event["methodArn"])
    except Exception:
        logger.exception("cannot verify a token")  # the metric AuthorizerFailures counts these lines
        raise
    return policy(identity, event["methodArn"], key=_key())


def policy(identity: Identity, method_arn: str, *, key: CallerKey) -> dict[str, Any]:
    """The answer of a TOKEN authorizer: the caller may call the API; the identity, signed, is its context.

    API Gateway caches the answer by token alone, so it allows the whole stage and never only the path at hand.
    """
    return _answer("Allow", identity.identity_id, key.sign(identity.to_context()), method_arn)


def refusal(error: UserNotAllowed, method_arn: str) -> dict[str, Any]:
    """The answer for a valid token whose user may not use the deployment. API Gateway answers 403, with the context's
    ``refusal`` inside a text of JSON."""
    return _answer("Deny", "refused", {"refusal": json.dumps(error.record.message)[1:-1]}, method_arn)


def _answer(effect: str, principal_id: str, context: dict[str, str], method_arn: str) -> dict[str, Any]:
    stage_arn = "/".join(method_arn.split("/")[:2])
    return {
        "principalId": principal_id,
        "policyDocument": {
            "Version": "2012-10-17",
            "Statement": [{"Action": "execute-api:Invoke", "Effect": effect, "Resource": f"{stage_arn}/*"}],
        },
        "context": context,
    }


@functools.cache
def _authorizer() -> Authorizer:
    configure(os.environ.get("FARCALL_LOG_LEVEL", "INFO"))
    settings = AuthSettings.from_environment(os.environ)
    credentials = IssuedCredentials(_key())
    return Authorizer(ProviderWithCredentials(provider_from_settings(settings), credentials, allowed=settings.allowed))


@functools.cache
def _key() -> CallerKey:
    return CallerKey.from_environment(os.environ)
