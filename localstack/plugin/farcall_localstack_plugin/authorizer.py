"""Token authorizers for REST APIs, which LocalStack's core stores but never calls.

As in API Gateway: read the header that the authorizer names, refuse a request without it or with a value that does not
match the authorizer's expression (401), get a policy from the function (cached per token), refuse requests that the
policy does not allow (403), and pass principal and context to the integration.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import json
import re
import threading
import time
from typing import Any

from localstack.aws.connect import connect_to
from localstack.services.apigateway.next_gen.execute_api.gateway_response import (
    AccessDeniedError,
    AuthorizerConfigurationError,
    AuthorizerFailureError,
    UnauthorizedError,
)

from farcall_localstack_plugin.providers import function_arn


@dataclasses.dataclass(frozen=True)
class _Decision:
    """The function's answer for a token, valid until ``expires_at`` (monotonic seconds)."""

    principal_id: str
    statements: list[dict[str, Any]]
    context: dict[str, str]
    expires_at: float

    def allows(self, method_arn: str) -> bool:
        """Whether the policy allows the method: an explicit deny wins, and the default is deny."""
        effects = {
            statement["Effect"] for statement in self.statements if _matches(statement.get("Resource", []), method_arn)
        }
        return effects == {"Allow"}


class TokenAuthorizer:
    """A handler in the gateway's chain."""

    def __init__(self) -> None:
        self._decisions: dict[tuple[str, str], _Decision] = {}
        self._lock = threading.Lock()

    def __call__(self, chain: object, context: Any, response: object) -> None:  # noqa: ARG002 - a handler's signature
        method = context.resource_method
        if method.get("authorizationType") != "CUSTOM":
            return
        authorizer = context.deployment.rest_api.authorizers.get(method.get("authorizerId"))
        if authorizer is None or authorizer.get("type") != "TOKEN":
            raise AuthorizerConfigurationError
        header = authorizer["identitySource"].removeprefix("method.request.header.")
        token = context.invocation_request["headers"].get(header)
        if not token or not re.fullmatch(authorizer.get("identityValidationExpression") or ".*", token):
            raise UnauthorizedError("Unauthorized")
        request = context.invocation_request
        method_arn = (
            f"arn:aws:execute-api:{context.region}:{context.account_id}:"
            f"{context.api_id}/{context.stage}/{request['http_method']}{request['path']}"
        )
        decision = self._decide(authorizer, token, method_arn, region=context.region)
        # First, because the response of a refusal may refer to it.
        context.context_variables["authorizer"] = {"principalId": decision.principal_id, **decision.context}
        if not decision.allows(method_arn):
            raise AccessDeniedError("User is not authorized to access this resource")

    def _decide(self, authorizer: dict[str, Any], token: str, method_arn: str, *, region: str) -> _Decision:
        key = (authorizer["id"], token)
        now = time.monotonic()
        with self._lock:
            cached = self._decisions.get(key)
        if cached is not None and now < cached.expires_at:
            return cached
        answer = _call(authorizer, token, method_arn, region=region)
        decision = _Decision(
            principal_id=answer["principalId"],
            statements=answer["policyDocument"]["Statement"],
            context={name: _text(value) for name, value in (answer.get("context") or {}).items()},
            expires_at=now + int(authorizer["authorizerResultTtlInSeconds"]),
        )
        with self._lock:
            self._decisions[key] = decision
        return decision


def _call(authorizer: dict[str, Any], token: str, method_arn: str, *, region: str) -> dict[str, Any]:
    event = {"type": "TOKEN", "authorizationToken": token, "methodArn": method_arn}
    invoked = connect_to(region_name=region).lambda_.invoke(
        FunctionName=function_arn(authorizer["authorizerUri"]), Payload=json.dumps(event).encode()
    )
    answer: dict[str, Any] = json.loads(invoked["Payload"].read())
    if "FunctionError" in invoked:
        # By convention an authorizer refuses a token by raising an error with exactly this message.
        if answer.get("errorMessage") == "Unauthorized":
            raise UnauthorizedError("Unauthorized")
        raise AuthorizerFailureError("Internal server error")
    return answer


def _matches(patterns: str | list[str], method_arn: str) -> bool:
    return any(
        fnmatch.fnmatchcase(method_arn, pattern) for pattern in ([patterns] if isinstance(patterns, str) else patterns)
    )


def _text(value: object) -> str:
    """API Gateway passes every value of the context as text."""
    return value if isinstance(value, str) else json.dumps(value)
