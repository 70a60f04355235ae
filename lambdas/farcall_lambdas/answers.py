"""Error answers: errors as HTTP statuses and one JSON shape."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

from aws_lambda_powertools import Logger
from aws_lambda_powertools.event_handler import Response, content_types
from aws_lambda_powertools.event_handler.exceptions import NotFoundError
from aws_lambda_powertools.event_handler.openapi.exceptions import (
    RequestUnsupportedContentType,
    RequestValidationError,
)
from pydantic import Field

from farcall_common import http_errors
from farcall_common.errors import ActionUnknown, ErrorRecord, FarcallError, InvalidRequest, NotFound
from farcall_lambdas.logs import SERVICE
from farcall_lambdas.models.fields import Maybe, Shape

logger = Logger(service=SERVICE, child=True)

#: Seconds to wait before the next try, if a part of the service is unavailable and the error does not say.
_RETRY_AFTER_S: Final = 2.0

#: The statuses of Powertools' errors.
_POWERTOOLS: Final[Mapping[type[Exception], int]] = {
    NotFoundError: 404,
    RequestUnsupportedContentType: 415,
    RequestValidationError: 422,
}

#: Characters of the location of a validation error that a message shows.
_OF_VALIDATORS: Final = "Value error, "
_LOCATION_CHARACTERS: Final = 200


class ErrorAnswer(Shape):
    """What went wrong. ``code`` is for programs, ``message`` and ``hint`` for people; the rest is Globus Compute's."""

    code: str
    message: str
    hint: str = ""
    fault: str
    retryable: bool
    retry_after_s: Maybe[float] = None
    status: str = "Failed"
    http_status_code: int
    reason: str
    error_args: list[Any] = Field(default_factory=list)
    request_id: str


#: Paths whose errors have the shape of Globus Flows' interface.
_ACTIONS: Final = "/actions"

#: Its codes by status: the names of the exceptions of ``globus-action-provider-tools``.
_ACTION_CODES: Final[Mapping[int, str]] = {
    400: "BadActionRequest",
    401: "UnauthorizedRequest",
    403: "UnauthorizedRequest",
    404: "BadActionRequest",
    409: "ActionConflict",
    413: "BadActionRequest",
    415: "BadActionRequest",
    422: "RequestValidationError",
}
_ACTION_UNKNOWN: Final = "ActionNotFound"
_ACTION_FAILED: Final = "ActionProviderError"


class ActionErrorAnswer(Shape):
    """What went wrong with an action, as Globus Flows shows it; ``error`` is what other routes answer."""

    code: str
    description: str
    error: ErrorAnswer


def status_of(error: Exception) -> int:
    """The HTTP status of an error."""
    if isinstance(error, FarcallError):
        return http_errors.status_of(type(error))
    return next((status for cls, status in _POWERTOOLS.items() if isinstance(error, cls)), 500)


def error_response(error: Exception, *, request_id: str, path: str = "") -> Response[str]:
    """The answer to a request for ``path`` that failed with ``error``. Internal errors are logged and not shown."""
    status = status_of(error)
    if status == 500:
        logger.error("request failed", exc_info=error)
        record = ErrorRecord(
            code="INTERNAL",
            message=f"Internal error (request {request_id}).",
            hint="Try again. If the error persists, report the request id to the operator of this service.",
            retryable=True,
        )
    else:
        record = _without_cause(_record(error), error.__cause__)
    if status == 503 and record.retry_after_s is None:
        record = dataclasses.replace(record, retry_after_s=_RETRY_AFTER_S)
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
    body: Shape = answer
    if is_of_actions(path):
        is_unknown = record.code == ActionUnknown.code
        code = _ACTION_UNKNOWN if is_unknown else _ACTION_CODES.get(status, _ACTION_FAILED)
        body = ActionErrorAnswer(code=code, description=f"{record.message} {record.hint}".rstrip(), error=answer)
    return Response(status, content_type=content_types.APPLICATION_JSON, body=body.model_dump_json(), headers=headers)


def is_of_actions(path: str) -> bool:
    """Whether a path is one of the routes for Globus Flows."""
    return path == _ACTIONS or path.startswith(f"{_ACTIONS}/")


def _without_cause(record: ErrorRecord, cause: BaseException | None) -> ErrorRecord:
    """The record without the driver's message: addresses and rows of tables are for the log."""
    suffix = f": {cause}"
    if cause is None or not record.message.endswith(suffix):
        return record
    logger.warning("request refused", reason=record.message)
    return dataclasses.replace(record, message=f"{record.message.removesuffix(suffix)}.")


def _record(error: Exception) -> ErrorRecord:
    if isinstance(error, FarcallError):
        return error.record
    if isinstance(error, RequestValidationError):
        return InvalidRequest(_validation_message(error)).record
    if isinstance(error, RequestUnsupportedContentType):
        return InvalidRequest("The body must be JSON.", hint="Send Content-Type: application/json.").record
    return NotFound("Unknown route.", hint="Check the method and the path.").record


def _problem(found: Mapping[str, Any]) -> str:
    place = ".".join(map(str, found["loc"]))[:_LOCATION_CHARACTERS]
    text: str = found["msg"].removeprefix(_OF_VALIDATORS)
    # What a validator of the whole body says names its field.
    return text if place == "body" and found["type"] == "value_error" else f"{place}: {text}"


def _validation_message(error: RequestValidationError) -> str:
    """Locations and problems, without values, which may be payloads. A location may contain a key of any length that
    the caller chose."""
    problems = [_problem(each) for each in error.errors()]
    shown = "; ".join(problems[:5])
    return shown if len(problems) <= 5 else f"{shown}; and {len(problems) - 5} more"
