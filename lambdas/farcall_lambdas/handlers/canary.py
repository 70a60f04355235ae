"""Canary function, run by a schedule, outside of the VPC."""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import Mapping
from typing import Any, Final

import boto3
from aws_lambda_powertools import Logger
from aws_lambda_powertools.utilities.typing import LambdaContext
from botocore.config import Config

from farcall_common.errors import ConfigurationError, FarcallError
from farcall_common.http_errors import error_from_response
from farcall_lambdas.canary import NAME, Ask, Canary
from farcall_lambdas.identity import Identity
from farcall_lambdas.logs import SERVICE, configure, log_ids
from farcall_lambdas.proxy_event import proxy_event
from farcall_lambdas.signed_caller import CANARY_ID, CallerKey

logger = Logger(service=SERVICE, child=True)

#: Seconds that a signed request is valid.
_VALID_S: Final = 60.0


def handle(event: Mapping[str, Any], context: LambdaContext) -> dict[str, float]:  # noqa: ARG001  # Lambda's signature
    """One round; its log line becomes a metric, and a failure an error of the function."""
    log_ids(function_request_id=context.aws_request_id)
    try:
        took = _canary().run()
    except FarcallError as error:
        logger.error("canary failed", code=error.record.code, reason=str(error), notes=getattr(error, "__notes__", []))
        raise
    logger.info("canary", extra=took)
    return took


@functools.cache
def _canary() -> Canary:
    configure(os.environ.get("FARCALL_LOG_LEVEL", "INFO"))
    function = os.environ.get("FARCALL_API_FUNCTION")
    if not function:
        raise ConfigurationError("FARCALL_API_FUNCTION is not set.")
    return Canary(_invoker(function))


def _invoker(function: str) -> Ask:
    """Calls the API's function as API Gateway does. No token is needed: the API accepts our key for our identity."""
    key = CallerKey.from_environment(os.environ)
    client = boto3.client("lambda", config=Config(read_timeout=30, retries={"total_max_attempts": 2}))

    def ask(method: str, path: str, body: dict[str, Any] | None) -> Any:
        text = None if body is None else json.dumps(body)
        caller = Identity(CANARY_ID, NAME, expires_at=time.time() + _VALID_S)
        event = proxy_event(method, path, text, caller=caller, key=key)
        answer = json.load(client.invoke(FunctionName=function, Payload=json.dumps(event).encode())["Payload"])
        status = int(answer.get("statusCode", 500))  # a function that failed answers with something else
        content = str(answer.get("body", ""))
        if status >= 400:
            headers = {name: values[-1] for name, values in answer.get("multiValueHeaders", {}).items()}
            request = f"{method} {path.partition('?')[0]}"
            raise error_from_response(status, headers, content.encode(), request=request)
        return json.loads(content)

    return ask
