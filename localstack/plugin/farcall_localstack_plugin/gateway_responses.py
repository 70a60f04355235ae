"""Gateway responses: API Gateway's own answers, without the integration, in the format of the API's templates.

LocalStack's core stores the templates but answers in its own format.
"""

from __future__ import annotations

import json
from typing import Any

from localstack.http import Response
from localstack.services.apigateway.next_gen.execute_api.gateway_response import (
    BaseGatewayException,
    get_gateway_response_or_default,
)
from localstack.services.apigateway.next_gen.execute_api.handlers.gateway_exception import GatewayExceptionHandler

_CONTENT_TYPE = "application/json"


def use_templates() -> None:
    """Make the gateway fill in the JSON templates of its API's gateway responses."""
    plain = GatewayExceptionHandler.create_exception_response

    def create_exception_response(
        handler: GatewayExceptionHandler, exception: BaseGatewayException, context: Any
    ) -> Response:
        response: Response = plain(handler, exception, context)
        answer = get_gateway_response_or_default(exception.type, context.deployment.rest_api.gateway_responses)
        if template := (answer.get("responseTemplates") or {}).get(_CONTENT_TYPE):
            message = str(exception.message or "")
            response.set_response(
                template.replace("$context.error.messageString", json.dumps(message)).replace(
                    "$context.error.message", message
                )
            )
        return response

    setattr(GatewayExceptionHandler, "create_exception_response", create_exception_response)  # noqa: B010 - a patch
