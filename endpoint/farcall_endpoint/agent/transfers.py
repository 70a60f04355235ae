"""User bytes between the endpoint and the blob store, over pre-signed URLs."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from typing import Final

import httpx

__all__ = ["TransferFailed", "Transfers"]

_TRIES: Final = 4
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
        data = self._request("GET", url).content
        if len(data) != size_bytes or hashlib.sha256(data).hexdigest() != sha256:
            raise TransferFailed("what came is not what was uploaded (length or SHA-256 differ)", retryable=False)
        return data

    def upload(self, url: str, data: bytes, *, headers: Mapping[str, str]) -> None:
        """Put bytes where a URL points.

        :raises TransferFailed: if the store does not take them.
        """
        self._request("PUT", url, content=data, headers=headers)

    def _request(
        self, method: str, url: str, *, content: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> httpx.Response:
        reason = ""
        for attempt in range(_TRIES):
            if attempt:
                self._pause(0.2 * 2**attempt)
            try:
                response = self._client.request(method, url, content=content, headers=headers)
            except httpx.InvalidURL as error:
                raise TransferFailed(str(error), retryable=False) from error
            except (httpx.ConnectError, httpx.ConnectTimeout, httpx.ProxyError) as error:
                reason = f"{type(error).__name__}: {error}"
                if attempt + 1 >= self._connect_tries:
                    raise TransferFailed(reason, retryable=True, is_unreachable=True) from error
                continue
            except httpx.HTTPError as error:
                reason = f"{type(error).__name__}: {error}"
                continue
            if response.is_success:
                return response
            reason = f"HTTP {response.status_code}"
            if response.status_code < 500 and response.status_code != 429:
                # Most likely the URL has expired: a new one may work, this one never will.
                raise TransferFailed(reason, retryable=True)
        raise TransferFailed(reason, retryable=True)
