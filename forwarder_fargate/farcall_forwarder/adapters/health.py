"""Health checks over HTTP: each path has its report; the answer is 200 if the report is positive, else 503."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from typing import Any, Final

_TIMEOUT_S: Final = 5.0
_MAX_HEAD_BYTES: Final = 8192

#: A report: whether the answer is 200, and the JSON of the answer.
Report = tuple[bool, Mapping[str, Any]]


class HealthServer:
    """Answers one request per connection.

    :param reports: a function for each path, which makes its report.
    """

    def __init__(self, reports: Mapping[str, Callable[[], Report]]) -> None:
        self._reports = reports
        self._server: asyncio.Server | None = None

    async def start(self, host: str, port: int) -> int:
        """Listen; returns the port."""
        self._server = await asyncio.start_server(self._serve, host, port, limit=_MAX_HEAD_BYTES)
        bound: int = self._server.sockets[0].getsockname()[1]
        return bound

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(self._answer(head))
                await writer.drain()
        except (TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionError):
            pass  # The caller has disconnected, or sent no valid request.
        finally:
            writer.close()

    def _answer(self, head: bytes) -> bytes:
        method, _, rest = head.partition(b" ")
        path = rest.partition(b" ")[0].partition(b"?")[0].decode("latin-1")
        if (report := self._reports.get(path)) is None:
            return _response(404, "Not Found", {"error": f"expected one of: {', '.join(self._reports)}"})
        if method not in (b"GET", b"HEAD"):
            return _response(405, "Method Not Allowed", {"error": "only GET and HEAD"})
        is_positive, body = report()
        answer = _response(200, "OK", body) if is_positive else _response(503, "Service Unavailable", body)
        return answer if method == b"GET" else answer.partition(b"\r\n\r\n")[0] + b"\r\n\r\n"

    async def close(self) -> None:
        if self._server:
            self._server.close()
            await self._server.wait_closed()


def _response(code: int, reason: str, report: Mapping[str, Any]) -> bytes:
    body = json.dumps(report).encode()
    head = (
        f"HTTP/1.1 {code} {reason}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body
