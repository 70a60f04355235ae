"""Transfers of user bytes over pre-signed URLs, and the threads for blocking HTTP requests."""

from __future__ import annotations

import contextlib
import hashlib
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Final

import httpx

from farcall_common.backoff import Backoff
from farcall_common.http_client import http_client
from farcall_common.http_errors import error_from_response
from farcall_endpoint.agent.core.relay import TransferFailed
from farcall_endpoint.host.shared_memory import Frame, piece_of

_TRIES: Final = 4
_FIRST_WAIT_S: Final = 0.4
_LONGEST_WAIT_S: Final = 1.6
_PIECE_BYTES: Final = 256 * 1024
_MOST_ANSWER_BYTES: Final = 1024 * 1024
_TIMEOUT: Final = httpx.Timeout(30.0, connect=5.0)


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
        self._client = http_client(timeout=_TIMEOUT, transport=transport, follow_redirects=True, is_local_direct=False)
        self._pause = pause

    def close(self) -> None:
        """Close the connections."""
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
        """Upload bytes to a URL.

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
            except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
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
            request = f"{method} {url.partition('?')[0]}"
            refused = error_from_response(response.status_code, response.headers, body, request=request)
            reason = refused.record.message
            if not refused.record.retryable:
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
    """A body in pieces: the layers below copy what the socket has not taken yet, again and again."""
    start = 0
    while start < len(content):
        yield (piece := piece_of(content, start, _PIECE_BYTES))
        start += len(piece)


Job = Callable[[], Callable[[], None]]
"""Runs in a thread; what it returns then runs in the loop's thread."""

_THREADS: Final = 4


class Background:
    """Threads are daemons: an agent that ends does not wait for a server that does not answer."""

    def __init__(self, *, threads: int = _THREADS) -> None:
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._finished: queue.SimpleQueue[Callable[[], None] | BaseException] = queue.SimpleQueue()
        self._readable, self._writable = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._threads = [threading.Thread(target=self._work, daemon=True) for _ in range(threads)]
        for thread in self._threads:
            thread.start()

    def fileno(self) -> int:
        """Readable when :meth:`finish` has something to do."""
        return self._readable

    def submit(self, job: Job) -> None:
        """Run a job when a thread is free."""
        self._jobs.put(job)

    def wake(self) -> None:
        """Make the descriptor readable. May be called from anywhere, also from a signal handler."""
        with contextlib.suppress(BlockingIOError):  # full: it is readable already
            os.write(self._writable, b"!")

    def finish(self) -> None:
        """Run what finished jobs left to be done.

        :raises Exception: what a job raised; jobs handle what they expect, so that is a defect.
        """
        with contextlib.suppress(BlockingIOError):
            os.read(self._readable, 4096)
        while True:
            try:
                finished = self._finished.get_nowait()
            except queue.Empty:
                return
            if isinstance(finished, BaseException):
                raise finished
            finished()

    def close(self) -> None:
        """Let the threads end when they are done. The descriptor stays open for those that are not."""
        for _ in self._threads:
            self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                self._finished.put(job())
            except BaseException as error:  # noqa: BLE001 - raised again in the loop's thread
                self._finished.put(error)
            self.wake()
