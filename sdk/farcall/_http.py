"""HTTP client for the API and for blobs: one connection pool per process, retries, errors mapped to ours."""

from __future__ import annotations

import functools
import logging
import math
import os
import random
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple

import httpx
import msgspec

from farcall._pacing import FOREIGN_RETRY_S, OutageTimer
from farcall._settings import Authorizer, Settings, bearer_token
from farcall_common.backoff import Backoff
from farcall_common.errors import (
    ConfigurationError,
    ErrorRecord,
    FarcallError,
    Fault,
    InvalidRequest,
    ProtocolError,
    Unauthenticated,
    Unavailable,
)
from farcall_common.finite import check_seconds, is_finite
from farcall_common.http_client import http_client
from farcall_common.http_errors import REQUEST_ID, error_from_response, is_answer_to

_logger = logging.getLogger(__name__)
#: A generator of our own: programs seed the module's.
_random = random.SystemRandom()
# httpx logs every address at INFO, the signatures of pre-signed ones included: not unless the program enables it.
if logging.getLogger("httpx").level == logging.NOTSET:
    logging.getLogger("httpx").setLevel(logging.WARNING)

#: An internal error of the API is retried a few times, but not for an hour.
_INTERNAL_RETRY_S: Final = 15.0
#: Longest back-off, and the longest Retry-After that counts unless Farcall sent it, in seconds.
_LONGEST_WAIT_S: Final = 10.0
_UNREACHABLE_HINT: Final = (
    "Is the API up? `farcall local status` shows a local tier; FARCALL_API_URL names the address."
)
_ANSWERED_BY_OTHERS: Final = (
    "A proxy or a login page may have answered, or the address is not that of a Farcall API (FARCALL_API_URL)."
)
_PIECE_BYTES: Final = 256 * 1024

_instances: weakref.WeakSet[Http] = weakref.WeakSet()
#: Pools that a forked child inherited. They are kept, unused: closing them could end the parent's TLS sessions.
_inherited: list[httpx.Client | None] = []


def _new_backoff() -> Backoff:
    return Backoff(first_s=0.1, most_s=_LONGEST_WAIT_S, jitter=_random.random)


class _Request(NamedTuple):
    """``headers`` returns those of an attempt; ``read`` reads a success, and raises ProtocolError or
    msgspec.DecodeError for one that is not of the service that was called; ``has_new_token`` is false where a new token
    is possible after a refusal. The API's answer repeats ``request_id``. Refusals by others than
    Farcall that ``raises`` names are not repeated."""

    method: str
    url: str
    content: bytes | None
    query: Mapping[str, str | int] | None
    headers: Callable[[], Mapping[str, str]]
    read: Callable[[httpx.Response], Any]
    is_api: bool = True
    request_id: str = ""
    has_new_token: bool = True
    raises: tuple[type[FarcallError], ...] = ()

    @property
    def shown(self) -> str:
        """Method and address, without a query, which may contain signatures."""
        return f"{self.method} {self.url.partition('?')[0]}"


class Http:
    """Requests with retries. May be used from any thread, and in a forked child.

    :param timeout_s: how long one attempt may wait for the network, in seconds.
    :param retry_timeout_s: how long a request is tried again before its last error is raised, in seconds.
    :param backoff: makes the back-off of one request.
    :param authorizer: provides the credentials of each request, instead of the settings' token.
    :param transport: replaces the network, for tests.
    :raises ValueError: for a time that is negative or NaN.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        timeout_s: float,
        retry_timeout_s: float,
        backoff: Callable[[], Backoff] = _new_backoff,
        authorizer: Authorizer | None = None,
        transport: httpx.BaseTransport | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        check_seconds(timeout_s=timeout_s, retry_timeout_s=retry_timeout_s)
        self.settings = settings
        self.retry_timeout_s = retry_timeout_s
        self._timeout = httpx.Timeout(timeout_s, connect=min(timeout_s, 10.0))
        self._backoff = backoff
        self._transport = transport
        self._authorizer = authorizer
        self._clock = clock
        self._never = threading.Event()
        #: Whether the API has ever answered: an answer that does not fit was changed on its way then.
        self._was_answered = False
        self._lock = threading.Lock()
        self._pool: httpx.Client | None = None
        _instances.add(self)

    def call(
        self,
        method: str,
        path: str,
        *,
        body: Any = None,
        query: Mapping[str, str | int] | None = None,
        answer: Any = Any,
        check: Callable[[Any], object] | None = None,
        raises: tuple[type[FarcallError], ...] = (),
        retry_timeout_s: float | None = None,
        stop: threading.Event | None = None,
    ) -> Any:
        """Call the API. ``body`` is encoded as JSON unless it is bytes; the answer's JSON is returned.

        Network failures, retryable answers, and answers that do not fit are repeated, after the delay that the API
        requests or a random back-off, until ``retry_timeout_s`` (the client's, unless given) is over or ``stop`` is
        set. Refusals by others than Farcall are repeated for half a minute. A client that has had no answer of the API
        yet raises them at once: its address may be wrong.

        :param answer: the type as which the JSON is read; unless it is given, there may be no answer.
        :param check: raises an exception for an answer that does not fit: ProtocolError, or as reading it would.
        :param raises: refusals by others than Farcall that are raised at once.
        :raises FarcallError: the API's own error, or Unavailable when it cannot be reached.
        :raises InvalidRequest: for a body with a number that JSON does not have.
        """

        def read(response: httpx.Response) -> Any:
            content = response.read()
            if not content and answer is Any:
                return None
            found = msgspec.json.decode(content, type=answer)
            if check is not None:
                try:
                    check(found)
                except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
                    raise ProtocolError(f"it cannot be read: {error!r}") from error
            self._was_answered = True
            return found

        content = body if isinstance(body, bytes | None) else msgspec.json.encode(body)
        if content is not None and b"null" in content and not is_finite(body):
            raise InvalidRequest("NaN and infinity cannot be sent: JSON has neither", hint="Send null or a text.")
        url = self.settings.api_url + path
        request_id = uuid.uuid4().hex
        headers = functools.partial(self._headers, request_id)
        request = _Request(method, url, content, query, headers, read, request_id=request_id, raises=raises)
        _logger.debug("%s: request %s", request.shown, request_id)
        if self._authorizer is not None:
            try:
                renewable = request._replace(has_new_token=False)
                return self._repeated(renewable, retry_timeout_s=retry_timeout_s, stop=stop)
            except Unauthenticated:
                if not self._authorizer.handle_missing_authorization():
                    raise
        return self._repeated(request, retry_timeout_s=retry_timeout_s, stop=stop)

    def put(
        self,
        url: str,
        data: bytes,
        *,
        headers: Mapping[str, str],
        retry_timeout_s: float | None = None,
        stop: threading.Event | None = None,
    ) -> None:
        """Upload to a pre-signed address. The token is not sent: that address is another party's."""

        def read(response: httpx.Response) -> None:
            if response.read() and not response.content.startswith(b"<?xml"):
                raise ProtocolError("the answer is not that of an object store, which is empty or XML")

        request = _Request("PUT", url, data, None, lambda: headers, read, is_api=False)
        self._repeated(request, retry_timeout_s=retry_timeout_s, stop=stop)

    def get(
        self,
        url: str,
        *,
        most_bytes: int,
        check: Callable[[bytearray], None] | None = None,
        retry_timeout_s: float | None = None,
        stop: threading.Event | None = None,
    ) -> bytearray:
        """Download from a pre-signed address, into memory that is used for nothing else. The bytes are those that were
        stored, whatever encoding the answer declares; not more than about ``most_bytes`` are read.

        :param check: raises ProtocolError for bytes that are not those that were stored.
        """

        def read(response: httpx.Response) -> bytearray:
            received = bytearray()
            response.headers.pop("content-encoding", None)
            for chunk in response.iter_bytes():
                received += chunk
                if len(received) > most_bytes:
                    break
            if check is not None:
                check(received)
            return received

        request = _Request("GET", url, None, None, dict, read, is_api=False)
        found: bytearray = self._repeated(request, retry_timeout_s=retry_timeout_s, stop=stop)
        return found

    def _headers(self, request_id: str) -> dict[str, str]:
        token = self.settings.token if self._authorizer is None else bearer_token(self._authorizer)
        return {
            "authorization": f"Bearer {token}",
            "content-type": "application/json",
            "x-farcall-accept": "blob-ref",
            REQUEST_ID: request_id,
        }

    def close(self) -> None:
        """Close the connections. May be called twice; the object can be used again."""
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()

    def _repeated(self, request: _Request, *, retry_timeout_s: float | None, stop: threading.Event | None) -> Any:
        """Send a request until it succeeds, and return what its ``read`` returns."""
        retry_timeout_s = self.retry_timeout_s if retry_timeout_s is None else retry_timeout_s
        outage, brief = OutageTimer(now=self._clock()), OutageTimer(now=self._clock())
        backoff = self._backoff()
        while True:
            try:
                return self._once(request)
            except FarcallError as error:
                now = self._clock()
                requested_s, outage_s = error.record.retry_after_s or 0.0, outage.failed(now=now)
                if error.is_foreign:  # any server can name any time, and a task that was accepted runs meanwhile
                    requested_s = min(requested_s, _LONGEST_WAIT_S, retry_timeout_s - outage_s)
                delay_s = max(requested_s, backoff.next_s())
                if (most_s := self._most_s(error, request)) is None:
                    raise
                # An error that is tolerated for a short time only counts from where it began.
                brief_s = brief.failed(now=now) if most_s < retry_timeout_s else 0.0
                if not brief_s:
                    brief.reset(now=now)
                if outage_s + delay_s > retry_timeout_s or brief_s + delay_s > most_s:
                    raise
                _logger.debug("%s: %s; retrying in %.2f s", request.shown, error, delay_s)
                if (stop or self._never).wait(delay_s):
                    raise

    def _most_s(self, error: FarcallError, request: _Request) -> float | None:
        """How long an error may last before it is raised, in seconds; None: it is raised at once."""
        if error.record.retryable:
            return _INTERNAL_RETRY_S if error.record.code == FarcallError.code else math.inf
        if not error.is_foreign:
            return None
        is_unfit = error.record.fault is Fault.NETWORK
        if not request.is_api:  # other refusals take another address
            return FOREIGN_RETRY_S if is_unfit else None
        if not self._was_answered:  # the address may be wrong; but a call may have been accepted
            return FOREIGN_RETRY_S if is_unfit and request.method != "GET" else None
        if isinstance(error, ProtocolError):
            return math.inf
        is_final = isinstance(error, request.raises) or (
            isinstance(error, Unauthenticated) and not request.has_new_token
        )
        return None if is_final else FOREIGN_RETRY_S

    def _once(self, request: _Request) -> Any:
        """One attempt."""
        content = request.content
        sent = httpx.Headers(request.headers())
        pieces: bytes | Iterator[bytes] | None = content
        if content is not None and len(content) > _PIECE_BYTES:
            sent["content-length"] = str(len(content))
            pieces = _in_pieces(content)
        try:
            with self._client().stream(
                request.method, request.url, content=pieces, headers=sent, params=request.query
            ) as response:
                if request.is_api and not is_answer_to(request.request_id, response.headers):
                    raise ProtocolError("it is the answer to another request")
                if response.is_success:
                    return request.read(response)
                response.read()
        except (ProtocolError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise _unfit(request, error) from error
        except httpx.InvalidURL as error:
            raise ConfigurationError(f"not a valid address: {error}") from error
        except httpx.UnsupportedProtocol as error:
            raise ConfigurationError(str(error)) from error
        except httpx.RequestError as error:
            message = f"{request.shown}: {str(error) or type(error).__name__}"
            raise Unavailable(
                message,
                record=ErrorRecord(Unavailable.code, message, _UNREACHABLE_HINT, Fault.NETWORK, retryable=True),
            ) from error
        raise error_from_response(response.status_code, response.headers, response.content, request=request.shown)

    def _client(self) -> httpx.Client:
        pool = self._pool
        if pool is not None:
            return pool
        with self._lock:
            if self._pool is None:
                self._pool = http_client(
                    timeout=self._timeout,
                    transport=self._transport,
                    limits=httpx.Limits(max_connections=32, max_keepalive_connections=8, keepalive_expiry=30.0),
                )
            return self._pool

    def _after_fork(self) -> None:
        _inherited.append(self._pool)
        self._pool = None
        self._lock = threading.Lock()
        self._never = threading.Event()


def _after_fork() -> None:
    for http in list(_instances):
        http._after_fork()


if hasattr(os, "register_at_fork"):  # not on Windows, where nothing forks
    os.register_at_fork(after_in_child=_after_fork)


def _unfit(request: _Request, error: Exception) -> ProtocolError:
    """The error of an answer that was cut or replaced, or comes from another service."""
    reason = error.record.message if isinstance(error, ProtocolError) else str(error)
    message = f"{request.shown} did not answer as expected: {reason}"
    found = ProtocolError(
        message, record=ErrorRecord(ProtocolError.code, message, _ANSWERED_BY_OTHERS, Fault.NETWORK, retryable=False)
    )
    found.is_foreign = True
    return found


def _in_pieces(content: bytes) -> Iterator[bytes]:
    """A large body in pieces: the layers below would copy the unsent rest again and again."""
    for start in range(0, len(content), _PIECE_BYTES):
        yield content[start : start + _PIECE_BYTES]
