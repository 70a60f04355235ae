"""User bytes between the endpoint and the blob store, over pre-signed URLs."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Final

import httpx

from farcall_common.backoff import Backoff
from farcall_endpoint.shared_memory import Frame, piece_of

_TRIES: Final = 4
_FIRST_WAIT_S: Final = 0.4
_LONGEST_WAIT_S: Final = 1.6
_PIECE_BYTES: Final = 256 * 1024
_MOST_ANSWER_BYTES: Final = 1024 * 1024
_TIMEOUT: Final = httpx.Timeout(30.0, connect=5.0)


class TransferFailed(Exception):
    """A transfer did not work. ``retryable`` with a fresh URL; ``is_unreachable`` if no connection could be made."""

    def __init__(self, reason: str, *, retryable: bool, is_unreachable: bool = False) -> None:
        super().__init__(reason)
        self.retryable = retryable
        self.is_unreachable = is_unreachable


class Transfers:
    """May be used from several threads.

    :param pause: waits a number of seconds between tries.
    :param connect_tries: how often in a row no connection may come about.
    """

    def __init__(
        self,
        *,
        transport: httpx.BaseTransport | None = None,
        pause: Callable[[float], None] = time.sleep,
        connect_tries: int = _TRIES,
    ) -> None:
        self._connect_tries = connect_tries
        self._client = httpx.Client(timeout=_TIMEOUT, transport=transport, follow_redirects=True)
        self._pause = pause

    def close(self) -> None:
        """Give back the connections."""
        self._client.close()

    def download(self, url: str, *, sha256: str, size_bytes: int) -> bytes:
        """The bytes behind a URL.

        :raises TransferFailed: if they cannot be had, or are not what was promised.
        """
        data = self._request("GET", url, most_bytes=size_bytes)
        if len(data) != size_bytes or hashlib.sha256(data).hexdigest() != sha256:
            raise TransferFailed("what came is not what was uploaded (length or SHA-256 differ)", retryable=False)
        return data

    def upload(self, url: str, data: Frame, *, headers: Mapping[str, str]) -> None:
        """Put bytes where a URL points.

        :raises TransferFailed: if the store does not take them.
        """
        self._request("PUT", url, content=data, headers=headers)

    def _request(
        self,
        method: str,
        url: str,
        *,
        content: Frame | None = None,
        headers: Mapping[str, str] | None = None,
        most_bytes: int = _MOST_ANSWER_BYTES,
    ) -> bytes:
        reason = ""
        backoff = Backoff(first_s=_FIRST_WAIT_S, most_s=_LONGEST_WAIT_S)
        for attempt in range(_TRIES):
            if attempt:
                self._pause(backoff.next_s())
            try:
                response, body = self._once(method, url, content=content, headers=headers, most_bytes=most_bytes)
            except httpx.InvalidURL as error:
                raise TransferFailed(str(error), retryable=False) from error
            except (httpx.ConnectError, httpx.ConnectTimeout, httpx.ProxyError) as error:
                reason = f"{type(error).__name__}: {error}"
                if attempt + 1 >= self._connect_tries:
                    raise TransferFailed(reason, retryable=True, is_unreachable=True) from error
                continue
            except (httpx.HTTPError, OSError) as error:  # OSError: of a file that is sent
                reason = f"{type(error).__name__}: {error}"
                continue
            if response.is_success:
                return body
            reason = f"HTTP {response.status_code}"
            if response.status_code < 500 and response.status_code != 429:
                # Most likely the URL has expired: a new one may work, this one never will.
                raise TransferFailed(reason, retryable=True)
        raise TransferFailed(reason, retryable=True)

    def _once(
        self, method: str, url: str, *, content: Frame | None, headers: Mapping[str, str] | None, most_bytes: int
    ) -> tuple[httpx.Response, bytes]:
        """One attempt, and the body of its answer: as it was stored, whatever encoding the answer claims, and no more
        than a piece beyond ``most_bytes``."""
        sent, pieces = httpx.Headers(headers), None
        if content is not None:
            sent["content-length"] = str(len(content))
            pieces = _in_pieces(content)
        with self._client.stream(method, url, content=pieces, headers=sent) as response:
            response.headers.pop("content-encoding", None)
            received = []
            for piece in response.iter_bytes():
                received.append(piece)
                most_bytes -= len(piece)
                if most_bytes < 0:
                    break
            return response, b"".join(received)


def _in_pieces(content: Frame) -> Iterator[bytes]:
    """A body bit by bit: the layers below copy what the socket has not taken yet, again and again."""
    start = 0
    while start < len(content):
        yield (piece := piece_of(content, start, _PIECE_BYTES))
        start += len(piece)
