"""Errors as HTTP answers: one table from error class to status, one shape for all of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Final

from aws_lambda_powertools import Logger
from aws_lambda_powertools.event_handler import Response, content_types
from aws_lambda_powertools.event_handler.exceptions import NotFoundError
from aws_lambda_powertools.event_handler.openapi.exceptions import (
    RequestUnsupportedContentType,
    RequestValidationError,
)

from farcall_common.errors import (
    Conflict,
    ErrorRecord,
    FarcallError,
    Forbidden,
    InvalidRequest,
    LimitExceeded,
    NotFound,
    PayloadTooLarge,
    QueueDataLost,
    Unauthenticated,
    Unavailable,
)
from farcall_lambdas.logs import SERVICE
from farcall_lambdas.models.errors import ErrorAnswer

__all__ = ["STATUS", "error_response", "status_of"]

logger = Logger(service=SERVICE, child=True)

#: The status of an error is that of its nearest ancestor here. What is not the caller's doing and not here is a 500.
STATUS: Final[Mapping[type[Exception], int]] = {
    InvalidRequest: 400,
    Unauthenticated: 401,
    Forbidden: 403,
    NotFound: 404,
    NotFoundError: 404,
    Conflict: 409,
    PayloadTooLarge: 413,
    RequestUnsupportedContentType: 415,
    RequestValidationError: 422,
    LimitExceeded: 429,
    QueueDataLost: 503,
    Unavailable: 503,
    Exception: 500,
}

#: Of the place in a request that is wrong, so many characters are told.
_PLACE_CHARACTERS: Final = 200


def status_of(error: Exception) -> int:
    """The HTTP status of an error."""
    return next(STATUS[cls] for cls in type(error).__mro__ if cls in STATUS)


def error_response(error: Exception, *, request_id: str) -> Response[str]:
    """The answer to a request that failed with ``error``. What is our fault is logged and not shown."""
    status = status_of(error)
    if status == 500:
        logger.error("request failed", exc_info=error, request_id=request_id)
        record = ErrorRecord(
            code="INTERNAL",
            message=f"Something went wrong on our side (request {request_id}).",
            hint="Try again; if it stays, give the request id to whoever runs this service.",
            retryable=True,
        )
    else:
        record = _without_cause(_record(error), error.__cause__, request_id=request_id)
    answer = ErrorAnswer(
        code=record.code,
        message=record.message,
        hint=record.hint,
        fault=record.fault.value,
        retryable=record.retryable,
        retry_after_s=record.retry_after_s,
        http_status_code=status,
        reason=record.message,
        request_id=request_id,
    )
    headers: dict[str, str | list[str]] = {}
    if record.retry_after_s is not None:
        headers["Retry-After"] = f"{max(1, round(record.retry_after_s))}"
    return Response(status, content_type=content_types.APPLICATION_JSON, body=answer.model_dump_json(), headers=headers)


def _without_cause(record: ErrorRecord, cause: BaseException | None, *, request_id: str) -> ErrorRecord:
    """The record without the words of a driver: addresses and rows of tables are for the log."""
    said = f": {cause}"
    if cause is None or not record.message.endswith(said):
        return record
    logger.warning("request refused", reason=record.message, request_id=request_id)
    return dataclasses.replace(record, message=f"{record.message.removesuffix(said)}.")


def _record(error: Exception) -> ErrorRecord:
    if isinstance(error, FarcallError):
        return error.record
    if isinstance(error, RequestValidationError):
        return InvalidRequest(_validation_message(error)).record
    if isinstance(error, RequestUnsupportedContentType):
        return InvalidRequest("The body must be JSON.", hint="Send Content-Type: application/json.").record
    return NotFound("There is no such route.", hint="Check the method and the path.").record


def _validation_message(error: RequestValidationError) -> str:
    """Where the request is wrong, and how; never the value, which may be a payload. A place can have a key in it that
    the caller made up, of any length."""
    problems = [f"{'.'.join(map(str, each['loc']))[:_PLACE_CHARACTERS]}: {each['msg']}" for each in error.errors()]
    shown = "; ".join(problems[:5])
    return shown if len(problems) <= 5 else f"{shown}; and {len(problems) - 5} more"
