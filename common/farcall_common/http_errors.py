"""HTTP errors: the status of an error, and the error of an HTTP response.

No I/O, and no HTTP library: callers pass status, headers and body.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from farcall_common.errors import (
    BlobUnknown,
    ConfigurationError,
    Conflict,
    ErrorRecord,
    FarcallError,
    Forbidden,
    InvalidRequest,
    LimitExceeded,
    NotFound,
    PayloadTooLarge,
    ProtocolError,
    QueueDataLost,
    RateLimited,
    RequestTooLarge,
    Unauthenticated,
    Unavailable,
    error_from_record,
)

#: The status of an error is that of its nearest ancestor here.
_STATUS: Final[Mapping[type[FarcallError], int]] = {
    InvalidRequest: 400,
    Unauthenticated: 401,
    Forbidden: 403,
    NotFound: 404,
    Conflict: 409,
    PayloadTooLarge: 413,
    LimitExceeded: 429,
    QueueDataLost: 503,
    Unavailable: 503,
    FarcallError: 500,
}
#: The class of a record with an unknown code, by HTTP status.
_BY_STATUS: Final[Mapping[int, type[FarcallError]]] = {status: cls for cls, status in _STATUS.items()}

#: Header with a request's id, which its client chose and the API's answer repeats.
REQUEST_ID: Final = "x-farcall-request-id"

_WRONG_ADDRESS: Final = "Check that this is the address of a Farcall API (FARCALL_API_URL). A proxy may have answered."
_REFUSED_BY_OTHERS: Final = (
    "The refusal is not from Farcall's API: check the address, this machine's clock, proxies and firewalls."
)
_PROXY_LOGIN: Final = "Put the proxy's user and password into HTTPS_PROXY, or exempt the address with NO_PROXY."

#: Class and hint of an answer without a record, by status; without a hint it is the class's own.
_FOREIGN: Final[Mapping[int, tuple[type[FarcallError], str | None]]] = {
    401: (Unauthenticated, None),
    403: (Forbidden, _REFUSED_BY_OTHERS),
    407: (ConfigurationError, _PROXY_LOGIN),
    408: (Unavailable, None),
    413: (RequestTooLarge, None),
    425: (Unavailable, None),
    429: (RateLimited, None),
}
#: Codes of an object store that are more precise than their status.
_OBJECT_STORE: Final[Mapping[str, type[FarcallError]]] = {"NoSuchKey": BlobUnknown, "RequestTimeout": Unavailable}

_MAX_DETAIL_CHARACTERS: Final = 200
_MAX_RETRY_AFTER_S: Final = 3600.0
_SEARCHED_BYTES: Final = 4096


def status_of(cls: type[FarcallError]) -> int:
    """The HTTP status of an error class."""
    return next(_STATUS[each] for each in cls.__mro__ if each in _STATUS)


def is_answer_to(request_id: str, headers: Mapping[str, str]) -> bool:
    """Whether a response may be the answer to a request. A cache or a proxy may send the answer to another request.

    Gateways repeat no id.
    """
    return _header(headers, REQUEST_ID) in ("", request_id)


def error_from_response(status: int, headers: Mapping[str, str], body: bytes, *, request: str) -> FarcallError:
    """The error of a response other than a success.

    =====================  ==========================  ===========================================================
    response               error                       reason
    =====================  ==========================  ===========================================================
    Farcall's own record   the class of its code       message, hint, fault, ``retryable`` and ``retry_after_s``
                                                       are those of the record
    ... with a new code    the class of the status     the API is newer than this side
    401                    Unauthenticated             API Gateway accepts no token of the request: log in
    403                    Forbidden, hint differs     a gateway, firewall or object store refuses, not an owner
    407                    ConfigurationError          a proxy requires a password
    408, 425               Unavailable, retryable      too slow or too early
    413                    RequestTooLarge             the request as a whole is too large
    429                    RateLimited, retryable      API Gateway or a proxy limits requests
    500 and above          Unavailable, retryable      a gateway, a proxy or the service is unavailable
    ``NoSuchKey`` (XML)    BlobUnknown                 the object store has no such object
    ``RequestTimeout``     Unavailable, retryable      the object store got a body too slowly (status 400)
    other (404, 3xx, ...)  ProtocolError               not Farcall's API: a program that deletes on NotFound must not
                                                       act on it
    =====================  ==========================  ===========================================================

    ``Retry-After`` in seconds is used if the body has no ``retry_after_s``; as a date it is ignored, because that
    needs a clock. Both count up to an hour.

    ``is_foreign`` is set in the error of an answer that has neither a record nor an object store's code.

    :param request: method and address, for the message; without a query, which may contain signatures.
    """
    retry_after_s = _retry_after_s(headers)
    answer = _json_object(body)
    record = _record(answer)
    if record is not None:
        body_s = record.retry_after_s
        record = dataclasses.replace(record, retry_after_s=retry_after_s if body_s is None else _bounded(body_s))
        return error_from_record(
            record, default=_BY_STATUS.get(status, InvalidRequest if status < 500 else FarcallError)
        )
    code = _object_store_code(body)
    unknown = (Unavailable, None) if status >= 500 else (ProtocolError, "" if code else _WRONG_ADDRESS)
    cls, hint = (_OBJECT_STORE[code], None) if code in _OBJECT_STORE else _FOREIGN.get(status, unknown)
    detail = code or _text(answer.get("message") or answer.get("Message")) or _location(headers)
    message = f"{request} answered with HTTP {status}" + (f" ({detail})" if detail else "")
    error = cls(message, hint=hint, retry_after_s=retry_after_s)
    error.is_foreign = not code
    return error


def _json_object(body: bytes) -> Mapping[str, Any]:
    try:
        return msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return {}


def _record(answer: Mapping[str, Any]) -> ErrorRecord | None:
    """Farcall's own record. Other services answer with ``code`` and ``message`` too; their codes are numbers or
    not in upper case."""
    code, wait_s = answer.get("code"), answer.get("retry_after_s")
    if not isinstance(code, str) or not code.isupper() or not isinstance(wait_s, float | int | None):
        return None
    try:
        return ErrorRecord.from_json(answer)
    except (KeyError, ValueError, TypeError):
        return None


def _header(headers: Mapping[str, str], name: str) -> str:
    return next((value for key, value in headers.items() if key.lower() == name), "")


def _retry_after_s(headers: Mapping[str, str]) -> float | None:
    try:
        return _bounded(float(_header(headers, "retry-after")))
    except ValueError:
        return None


def _bounded(wait_s: float) -> float | None:
    """A wait that a client may follow: any server can name any number."""
    return min(max(0.0, wait_s), _MAX_RETRY_AFTER_S) if math.isfinite(wait_s) else None


def _object_store_code(body: bytes) -> str:
    """The code in an object store's XML; empty if there is none."""
    code, end, _ = body[:_SEARCHED_BYTES].partition(b"<Code>")[2].partition(b"</Code>")
    return _text(code.decode("ascii", "replace")) if end else ""


def _location(headers: Mapping[str, str]) -> str:
    """The target of a redirect, without its query."""
    location = _header(headers, "location").partition("?")[0]
    return _text(f"redirect to {location}") if location else ""


def _text(value: Any) -> str:
    return " ".join(value.split())[:_MAX_DETAIL_CHARACTERS] if isinstance(value, str) else ""
