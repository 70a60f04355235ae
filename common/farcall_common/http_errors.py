"""HTTP statuses and errors: the status that an error is answered with, and the error that an answer stands for.

No I/O, and no HTTP library: whoever has a response passes its status, headers and body.
"""

from __future__ import annotations

import dataclasses
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
#: The class of a record whose code is not known here, by the status that came with it.
_BY_STATUS: Final[Mapping[int, type[FarcallError]]] = {status: cls for cls, status in _STATUS.items()}

_WRONG_ADDRESS: Final = "Is this the address of a Farcall API (FARCALL_API_URL)? A proxy on the way may have answered."
_REFUSED_ON_THE_WAY: Final = (
    "The refusal is not from Farcall's API: check the address, this machine's clock, and proxies and firewalls on the"
    " way."
)
_PROXY_LOGIN: Final = "Put the proxy's user and password into HTTPS_PROXY, or exempt the address with NO_PROXY."

#: Class and hint of an answer without a record, by status; without a hint it is the class's own.
_FOREIGN: Final[Mapping[int, tuple[type[FarcallError], str | None]]] = {
    401: (Unauthenticated, None),
    403: (Forbidden, _REFUSED_ON_THE_WAY),
    407: (ConfigurationError, _PROXY_LOGIN),
    408: (Unavailable, None),
    413: (RequestTooLarge, None),
    425: (Unavailable, None),
    429: (RateLimited, None),
}
#: Codes of an object store that say more than their status.
_OBJECT_STORE: Final[Mapping[str, type[FarcallError]]] = {"NoSuchKey": BlobUnknown, "RequestTimeout": Unavailable}

_MAX_SAID_CHARACTERS: Final = 200
_SEARCHED_BYTES: Final = 4096


def status_of(cls: type[FarcallError]) -> int:
    """The HTTP status of an error class."""
    return next(_STATUS[each] for each in cls.__mro__ if each in _STATUS)


def error_from_response(status: int, headers: Mapping[str, str], body: bytes, *, request: str) -> FarcallError:
    """The error that an answer other than a success stands for.

    =====================  ==========================  ===========================================================
    what came              error                       why
    =====================  ==========================  ===========================================================
    Farcall's own record   the class of its code       message, hint, fault, ``retryable`` and ``retry_after_s``
                                                       are those of the record
    ... with a new code    the class of the status     the API is newer than this side
    401                    Unauthenticated             API Gateway got no token that it accepts: log in
    403                    Forbidden, hint differs     a gateway, firewall or object store refuses, not an owner
    407                    ConfigurationError          a proxy asks for a password
    408, 425               Unavailable, retryable      too slow or too early
    413                    RequestTooLarge             the request as a whole is too large
    429                    RateLimited, retryable      API Gateway or a proxy limits requests
    500 and above          Unavailable, retryable      a gateway, a proxy, or what is behind it is away
    ``NoSuchKey`` (XML)    BlobUnknown                 the object store has no such object
    ``RequestTimeout``     Unavailable, retryable      the object store got a body too slowly (status 400)
    other (404, 3xx, ...)  ProtocolError               not Farcall's API. It cannot know which functions, tasks and
                                                       endpoints exist: a program that deletes on NotFound must not
                                                       believe it
    =====================  ==========================  ===========================================================

    ``Retry-After`` in seconds counts where the body does not say how long to wait; as a date it is ignored, since that
    takes a clock.

    :param request: method and address, for the message; without a query, which may have signatures in it.
    """
    retry_after_s = _retry_after_s(headers)
    answer = _json_object(body)
    record = _record(answer)
    if record is not None:
        if record.retry_after_s is None:
            record = dataclasses.replace(record, retry_after_s=retry_after_s)
        return error_from_record(
            record, default=_BY_STATUS.get(status, InvalidRequest if status < 500 else FarcallError)
        )
    code = _object_store_code(body)
    unknown = (Unavailable, None) if status >= 500 else (ProtocolError, "" if code else _WRONG_ADDRESS)
    cls, hint = (_OBJECT_STORE[code], None) if code in _OBJECT_STORE else _FOREIGN.get(status, unknown)
    said = code or _text(answer.get("message") or answer.get("Message")) or _location(headers)
    message = f"{request} answered with HTTP {status}" + (f" ({said})" if said else "")
    return cls(message, hint=hint, retry_after_s=retry_after_s)


def _json_object(body: bytes) -> Mapping[str, Any]:
    try:
        return msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError):
        return {}


def _record(answer: Mapping[str, Any]) -> ErrorRecord | None:
    """Farcall's own record. Other services answer with ``code`` and ``message`` too; their codes are numbers or are
    written in another way."""
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
        return max(0.0, float(_header(headers, "retry-after")))
    except ValueError:
        return None


def _object_store_code(body: bytes) -> str:
    """The code in an object store's XML; empty if there is none."""
    code, end, _ = body[:_SEARCHED_BYTES].partition(b"<Code>")[2].partition(b"</Code>")
    return _text(code.decode("ascii", "replace")) if end else ""


def _location(headers: Mapping[str, str]) -> str:
    """Where a redirect leads, without its query."""
    location = _header(headers, "location").partition("?")[0]
    return _text(f"redirect to {location}") if location else ""


def _text(said: Any) -> str:
    return " ".join(said.split())[:_MAX_SAID_CHARACTERS] if isinstance(said, str) else ""
