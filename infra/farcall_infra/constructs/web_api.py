"""The REST API: one regional API Gateway in front of one function, with a token authorizer.

The function routes requests itself, so the gateway has only two routes: the root and everything below it. The gateway's
own responses (no token, throttled, too large, function unavailable) have the same JSON shape as the function's.
"""

from __future__ import annotations

import json

import aws_cdk as cdk
from aws_cdk import aws_apigateway as apigateway
from aws_cdk import aws_lambda as lambda_
from constructs import Construct

from farcall_common.errors import (
    FarcallError,
    Fault,
    InvalidRequest,
    LimitExceeded,
    RequestTooLarge,
    Unauthenticated,
    Unavailable,
    UserNotAllowed,
)
from farcall_common.http_errors import status_of
from farcall_infra.constructs.nag_suppressions import suppress
from farcall_infra.profiles import ApiSize

STAGE = "api"
#: TLS 1.2 and 1.3 with forward secrecy.
_TLS = "SecurityPolicy_TLS13_1_2_PFS_PQ_2025_09"
_BEARER = "[Bb][Ee][Aa][Rr][Ee][Rr] +"


class WebApi(Construct):
    """API Gateway, its stage and its authorizer; ``url`` and ``api_id`` identify ``api``.

    The gateway itself answers 401 to an Authorization header whose token does not match the expression
    ``token_pattern``, without calling the function or the identity provider, which may throttle us.
    """

    def __init__(
        self,
        scope: Construct,
        construct_id: str,
        *,
        size: ApiSize,
        handler: lambda_.Alias,
        authorizer: lambda_.Alias,
        token_pattern: str,
    ) -> None:
        super().__init__(scope, construct_id)
        token_authorizer = apigateway.TokenAuthorizer(
            self,
            "Authorizer",
            handler=authorizer,
            identity_source=apigateway.IdentitySource.header("Authorization"),
            results_cache_ttl=cdk.Duration.seconds(size.authorizer_cache_s),
            validation_regex=f"^{_BEARER}{token_pattern}$",
        )
        api = apigateway.RestApi(
            self,
            "Rest",
            rest_api_name=cdk.Stack.of(self).stack_name,
            description="Farcall",
            endpoint_types=[apigateway.EndpointType.REGIONAL],
            cloud_watch_role=False,
            deploy_options=apigateway.StageOptions(
                stage_name=STAGE,
                throttling_rate_limit=size.throttle_rate_per_s,
                throttling_burst_limit=size.throttle_burst,
            ),
            default_integration=apigateway.LambdaIntegration(handler, allow_test_invoke=False),
            default_method_options=apigateway.MethodOptions(
                authorizer=token_authorizer, authorization_type=apigateway.AuthorizationType.CUSTOM
            ),
        )
        rest_api = api.node.default_child
        assert isinstance(rest_api, apigateway.CfnRestApi)
        # Of the gateway's own address, too: its default admits TLS 1.0. The mode is what an enhanced policy needs, and
        # changes nothing for a client that names the host.
        rest_api.security_policy = _TLS
        rest_api.endpoint_access_mode = "BASIC"
        api.root.add_proxy(any_method=True)  # and the root itself
        _accept_findings(api)
        for response, error, message in _GATEWAY_ANSWERS:
            status = status_of(error)
            api.add_gateway_response(
                response.response_type,
                type=response,
                status_code=str(status),
                templates={"application/json": _error_body(error, status, message)},
            )
        self.api = api
        self.url = api.url
        self.api_id = api.rest_api_id


def _accept_findings(api: apigateway.RestApi) -> None:
    suppress(
        api,
        "APIG2",
        "The function validates every request against its models, which the OpenAPI document is made from, and "
        "answers in the API's own error shape. A second copy of them in the gateway would have to be kept in sync.",
    )
    for rule in ("APIG1", "APIG6"):
        suppress(
            api,
            rule,
            "Logs of a REST API need a role that is set once per account and region, so several deployments and other "
            "APIs would overwrite it. The function logs its requests, and the gateway's metrics count the others.",
        )
    suppress(
        api,
        "APIG3",
        "A web ACL costs at least six dollars a month. Every request needs a token before it reaches our code, and "
        "the stage is throttled. A web ACL can be attached to the stage without a change here.",
    )
    suppress(
        api,
        "COG4",
        "Users come from Globus Auth or another issuer, not from Cognito. Every method has a Lambda authorizer, and a "
        "test checks that.",
    )


#: The gateway's own message; it comes with quotes.
_MESSAGE = "$context.error.messageString"
#: The authorizer's message, as the inside of a text of JSON.
_REFUSAL = "$context.authorizer.refusal"
#: Of each response: the error, whose status it gets, and the message.
_GATEWAY_ANSWERS: tuple[tuple[apigateway.ResponseType, type[FarcallError], str], ...] = (
    (apigateway.ResponseType.UNAUTHORIZED, Unauthenticated, _MESSAGE),
    (apigateway.ResponseType.ACCESS_DENIED, UserNotAllowed, _REFUSAL),
    (apigateway.ResponseType.WAF_FILTERED, UserNotAllowed, _MESSAGE),
    (apigateway.ResponseType.REQUEST_TOO_LARGE, RequestTooLarge, _MESSAGE),
    (apigateway.ResponseType.THROTTLED, LimitExceeded, _MESSAGE),
    (apigateway.ResponseType.QUOTA_EXCEEDED, LimitExceeded, _MESSAGE),
    (apigateway.ResponseType.DEFAULT_4_XX, InvalidRequest, _MESSAGE),
    (apigateway.ResponseType.DEFAULT_5_XX, Unavailable, _MESSAGE),
)


def _error_body(error: type[FarcallError], status: int, message: str) -> str:
    """The body of the gateway's own response. The gateway fills in ``$context…``."""
    body = {
        "status": "Failed",
        "code": error.code,
        "message": message,
        "hint": error.default_hint,
        "fault": str(Fault(error.fault)),
        "retryable": error.retryable,
        "http_status_code": status,
        "reason": message,
        "error_args": [],
    }
    return json.dumps(body).replace(f'"{_MESSAGE}"', _MESSAGE)
