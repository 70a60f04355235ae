"""API Gateway's limits, which LocalStack's core does not have: size and time of a request, and the stage's throttle."""

from __future__ import annotations

import json
import time
from typing import Any

from localstack.aws.api.lambda_ import RequestTooLargeException
from localstack.services.apigateway.next_gen.execute_api.gateway_response import (
    IntegrationTimeoutError,
    RequestTooLargeError,
    ThrottledError,
)
from localstack.services.apigateway.next_gen.execute_api.integrations.aws import RestApiAwsProxyIntegration
from localstack.services.apigateway.resource_providers.aws_apigateway_stage import ApiGatewayStageProvider
from localstack.services.lambda_.invocation.lambda_service import LambdaService

from farcall_localstack_plugin.limits import GATEWAY_S, MAX_EVENT_BYTES, MAX_GATEWAY_BYTES, TokenBucket

#: The throttle of a stage for all its methods, by API and name of the stage.
_throttles: dict[tuple[str, str], TokenBucket] = {}


def check_request(chain: object, context: Any, response: object) -> None:  # noqa: ARG001 - a handler's signature
    """A handler in the gateway's chain, before the authorizer: requests without a valid token count, too."""
    throttle = _throttles.get((context.api_id, context.stage))
    if throttle is not None and not throttle.take():
        raise ThrottledError("Too Many Requests")
    if len(context.invocation_request["body"] or b"") > MAX_GATEWAY_BYTES:
        raise RequestTooLargeError("Request Too Long")


def patch() -> None:
    """Apply the limits to the core's classes."""
    _patch_events()
    _patch_time()
    _patch_stages()
    _patch_invoke()


def _patch_events() -> None:
    plain = RestApiAwsProxyIntegration.create_lambda_input_event

    def create_lambda_input_event(integration: RestApiAwsProxyIntegration, context: Any) -> Any:
        event = plain(integration, context)
        if len(json.dumps(event, ensure_ascii=False).encode()) > MAX_EVENT_BYTES:
            raise RequestTooLargeError("Request Too Long")
        return event

    setattr(RestApiAwsProxyIntegration, "create_lambda_input_event", create_lambda_input_event)  # noqa: B010 - a patch


def _patch_time() -> None:
    plain = RestApiAwsProxyIntegration.invoke

    def invoke(integration: RestApiAwsProxyIntegration, context: Any) -> Any:
        started = time.monotonic()
        answer = plain(integration, context)
        if time.monotonic() - started > GATEWAY_S:
            raise IntegrationTimeoutError("Endpoint request timed out")
        return answer

    setattr(RestApiAwsProxyIntegration, "invoke", invoke)  # noqa: B010 - a patch


def _patch_stages() -> None:
    """The core's stages have no settings of methods."""
    for name in ("create", "update"):
        plain = getattr(ApiGatewayStageProvider, name)

        def changed(provider: ApiGatewayStageProvider, request: Any, plain: Any = plain) -> Any:
            event = plain(provider, request)
            model = request.desired_state
            for settings in model.get("MethodSettings") or ():
                if "ThrottlingRateLimit" in settings:
                    rate, burst = float(settings["ThrottlingRateLimit"]), int(settings["ThrottlingBurstLimit"])
                    place = (model["RestApiId"], model["StageName"])
                    _throttles[place] = TokenBucket(rate, burst, clock=time.monotonic)
            return event

        setattr(ApiGatewayStageProvider, name, changed)


def _patch_invoke() -> None:
    plain = LambdaService.invoke

    def invoke(service: LambdaService, *args: Any, **kwargs: Any) -> Any:
        if len(kwargs.get("payload") or b"") > MAX_EVENT_BYTES:
            raise RequestTooLargeException(
                f"Request must be smaller than {MAX_EVENT_BYTES} bytes for the InvokeFunction operation"
            )
        return plain(service, *args, **kwargs)

    setattr(LambdaService, "invoke", invoke)  # noqa: B010 - a patch
