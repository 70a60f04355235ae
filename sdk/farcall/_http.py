"""HTTP client for the API and for blobs: one connection pool per process, retries, errors mapped to ours."""

from __future__ import annotations

import logging
import os
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import httpx
import msgspec

from farcall._pacing import OutageTimer
from farcall._settings import Authorizer, Settings, bearer_token
from farcall_common.backoff import Backoff
from farcall_common.errors import (
    ConfigurationError,
    ErrorRecord,
    FarcallError,
    Fault,
    ProtocolError,
    Unauthenticated,
    Unavailable,
)
from farcall_common.http_errors import error_from_response

_logger = logging.getLogger(__name__)
#: A generator of our own: programs seed the module's.
_random = random.SystemRandom()
# httpx logs every address at INFO, the signatures of pre-signed ones included: not unless the program enables it.
if logging.getLogger("httpx").level == logging.NOTSET:
    logging.getLogger("httpx").setLevel(logging.WARNING)

#: An internal error of the API is retried a few times, but not for an hour.
_INTERNAL_RETRY_S: Final = 15.0
_UNREACHABLE_HINT: Final = (
    "Is the API up? `farcall local status` shows a local tier; FARCALL_API_URL names the address."
)
_PIECE_BYTES: Final = 256 * 1024
#: Environment proxies are for other machines: a tier on this machine is reached directly.
_DIRECT: Final = ("all://localhost", "all://127.0.0.1", "all://[::1]")

_instances: weakref.WeakSet[Http] = weakref.WeakSet()
#: Pools that a forked child inherited. They are kept, unused: closing them could end the parent's TLS sessions.
_inherited: list[httpx.Client | None] = []


def _new_backoff() -> Backoff:
    return Backoff(first_s=0.1, most_s=10.0, jitter=_random.random)


class Http:
    """Requests with retries. May be used from any thread, and in a forked child.

    :param timeout_s: how long one attempt may wait for the network, in seconds.
    :param retry_timeout_s: how long a request is tried again before its last error is raised, in seconds.
    :param backoff: makes the back-off of one request.
    :param authorizer: provides the credentials of each request, instead of the settings' token.
    :param transport: replaces the network, for tests.
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
        self.settings = settings
        self.retry_timeout_s = retry_timeout_s
        self._timeout = httpx.Timeout(timeout_s, connect=min(timeout_s, 10.0))
        self._backoff = backoff
        self._transport = transport
        self._authorizer = authorizer
        self._clock = clock
        self._never = threading.Event()
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
        retry_timeout_s: float | None = None,
        stop: threading.Event | None = None,
    ) -> Any:
        """Call the API. ``body`` is encoded as JSON unless it is bytes; the answer's JSON is returned.

        Network failures and retryable answers are repeated, after the delay that the API requests or a random back-off,
        until ``retry_timeout_s`` (the client's, unless given) is over or ``stop`` is set.

        :raises FarcallError: the API's own error, or Unavailable when it cannot be reached.
        """
        content = body if isinstance(body, bytes | None) else msgspec.json.encode(body)
        url = self.settings.api_url + path

        def request() -> httpx.Response:
            headers = self._headers()
            return self._request(
                method, url, content=content, query=query, headers=headers, retry_timeout_s=retry_timeout_s, stop=stop
            )

        try:
            response = request()
        except Unauthenticated:
            if self._authorizer is None or not self._authorizer.handle_missing_authorization():
                raise
            response = request()
        if not response.content:
            return None
        try:
            return msgspec.json.decode(response.content)
        except msgspec.DecodeError as error:
            raise ProtocolError(f"{method} {path} did not answer with JSON", hint=_UNREACHABLE_HINT) from error

    def put(self, url: str, data: bytes, *, headers: Mapping[str, str]) -> None:
        """Upload to a pre-signed address. The token is not sent: that address is another party's."""
        self._request("PUT", url, content=data, headers=headers)

    def get(self, url: str, *, most_bytes: int) -> bytearray:
        """Download from a pre-signed address, into memory that is used for nothing else. The bytes are those that were
        stored, whatever encoding the answer declares; not more than about ``most_bytes`` are read."""
        received = bytearray()
        self._request("GET", url, content=None, headers={}, received=received, most_bytes=most_bytes)
        return received

    def _headers(self) -> dict[str, str]:
        token = self.settings.token if self._authorizer is None else bearer_token(self._authorizer)
        return {
            "authorization": f"Bearer {token}",
            "content-type": "application/json",
            "x-farcall-accept": "blob-ref",
        }

    def close(self) -> None:
        """Close the connections. May be called twice; the object can be used again."""
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()

    def _request(
        self,
        method: str,
        url: str,
        *,
        content: bytes | None,
        headers: Mapping[str, str],
        query: Mapping[str, str | int] | None = None,
        retry_timeout_s: float | None = None,
        stop: threading.Event | None = None,
        received: bytearray | None = None,
        most_bytes: int = 0,
    ) -> httpx.Response:
        retry_timeout_s = self.retry_timeout_s if retry_timeout_s is None else retry_timeout_s
        outage = OutageTimer(now=self._clock())
        backoff = self._backoff()
        while True:
            try:
                return self._once(
                    method, url, content=content, headers=headers, query=query, received=received, most_bytes=most_bytes
                )
            except FarcallError as error:
                delay_s = max(error.record.retry_after_s or 0.0, backoff.next_s())
                broken = error.record.code == FarcallError.code
                most_s = min(retry_timeout_s, _INTERNAL_RETRY_S) if broken else retry_timeout_s
                if not error.record.retryable or outage.failed(now=self._clock()) + delay_s > most_s:
                    raise
                _logger.debug("%s %s: %s; retrying in %.2f s", method, url.partition("?")[0], error, delay_s)
                if (stop or self._never).wait(delay_s):
                    raise

    def _once(
        self,
        method: str,
        url: str,
        *,
        content: bytes | None,
        headers: Mapping[str, str],
        query: Mapping[str, str | int] | None,
        received: bytearray | None,
        most_bytes: int,
    ) -> httpx.Response:
        """One attempt. The body of a success goes into ``received``, if that is given."""
        sent = httpx.Headers(headers)
        pieces: bytes | Iterator[bytes] | None = content
        if content is not None and len(content) > _PIECE_BYTES:
            sent["content-length"] = str(len(content))
            pieces = _in_pieces(content)
        try:
            with self._client().stream(method, url, content=pieces, headers=sent, params=query) as response:
                if received is None or not response.is_success:
                    response.read()
                else:
                    received.clear()
                    response.headers.pop("content-encoding", None)
                    for chunk in response.iter_bytes():
                        received += chunk
                        if len(received) > most_bytes:
                            break
        except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
            raise ConfigurationError(f"not a valid address: {error}") from error
        except httpx.TransportError as error:
            address = url.partition("?")[0]
            message = f"{method} {address}: {str(error) or type(error).__name__}"
            raise Unavailable(
                message,
                record=ErrorRecord(Unavailable.code, message, _UNREACHABLE_HINT, Fault.NETWORK, retryable=True),
            ) from error
        if response.is_success:
            return response
        request = f"{method} {url.partition('?')[0]}"
        raise error_from_response(response.status_code, response.headers, response.content, request=request)

    def _client(self) -> httpx.Client:
        pool = self._pool
        if pool is not None:
            return pool
        with self._lock:
            if self._pool is None:
                self._pool = httpx.Client(
                    timeout=self._timeout,
                    transport=self._transport,
                    mounts=None if self._transport else dict.fromkeys(_DIRECT),
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


def _in_pieces(content: bytes) -> Iterator[bytes]:
    """A large body in pieces: the layers below would copy the unsent rest again and again."""
    for start in range(0, len(content), _PIECE_BYTES):
        yield content[start : start + _PIECE_BYTES]
