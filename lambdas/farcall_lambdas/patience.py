"""HTTP of the local tier: a request has to be here within a time. uvicorn only ends connections that idle between two
requests; one that sends a request byte by byte, or none, would be waited for for ever. API Gateway does this in AWS."""

from __future__ import annotations

import asyncio
from typing import ClassVar

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

__all__ = ["PromptHttp"]


class PromptHttp(HttpToolsProtocol):
    """One connection. Ends without an answer when a request, body included, takes too long to come."""

    #: Seconds for a whole request; as long as API Gateway gives itself for the whole exchange.
    request_s: ClassVar[float] = 30.0
    _too_late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_request()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._await_request()

    def on_message_complete(self) -> None:
        self._stop_waiting()
        super().on_message_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def _await_request(self) -> None:
        if self._too_late is None:
            self._too_late = self.loop.call_later(self.request_s, self.transport.abort)

    def _stop_waiting(self) -> None:
        if self._too_late is not None:
            self._too_late.cancel()
            self._too_late = None
