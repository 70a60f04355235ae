"""Limits of HTTP connections at the servers of the local tier: time for a request and for reading its answer, size of
headers, number of connections. uvicorn only ends connections that idle between two requests. API Gateway and S3 do this
in AWS."""

from __future__ import annotations

import asyncio
from typing import ClassVar

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


class LimitedHttp(HttpToolsProtocol):
    """One connection. It ends without an answer when it exceeds a limit."""

    #: Seconds for a whole request; as long as API Gateway gives itself for the whole exchange.
    request_s: ClassVar[float] = 30.0
    #: Seconds in which a client has to read some of the answer.
    stalled_s: ClassVar[float] = 30.0
    max_head_bytes: ClassVar[int] = 64 * 1024
    #: Each takes a file descriptor, and a second one while it sends a file. One more ends the one that has been silent
    #: for the longest time, or is ended if all have sent a request.
    max_connections: ClassVar[int] = 400
    _too_late: asyncio.TimerHandle | None = None
    _stalled: asyncio.TimerHandle | None = None
    _head_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.max_connections and not self._end_oldest_silent():
            transport.abort()
            return
        self._await_request()

    def data_received(self, data: bytes) -> None:
        # Headers before a body, trailers behind it, extensions of its chunks: memory, which no application limits.
        self._head_bytes += len(data)
        super().data_received(data)
        if self._head_bytes > self.max_head_bytes:
            self.transport.abort()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._await_request()

    def on_body(self, body: bytes) -> None:
        self._head_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._head_bytes = 0
        _cancel(self._too_late)
        self._too_late = None
        super().on_message_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stalled = self.loop.call_later(self.stalled_s, self.transport.abort)

    def resume_writing(self) -> None:
        _cancel(self._stalled)
        self._stalled = None
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        _cancel(self._too_late)
        self._too_late = None
        _cancel(self._stalled)
        self._stalled = None
        super().connection_lost(exc)

    def _end_oldest_silent(self) -> bool:
        """End the connection that has been without a whole request for the longest time; False if there is none."""
        silent = {
            each: each._too_late.when()
            for each in self.connections
            if isinstance(each, LimitedHttp) and each._too_late is not None
        }
        if not silent:
            return False
        min(silent, key=silent.__getitem__).transport.abort()
        return True

    def _await_request(self) -> None:
        if self._too_late is None:
            self._too_late = self.loop.call_later(self.request_s, self.transport.abort)


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
