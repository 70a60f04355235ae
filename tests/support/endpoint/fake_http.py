"""Scripted REST API and blob store, as far as an endpoint uses them."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Callable
from typing import Any, Final

ENDPOINT_ID: Final = "11111111-2222-4333-8444-555555555555"


class FakeHttp:
    """Serves on loopback until closed.

    ``connect`` answers a connect request's body. ``blobs`` are the stored bytes by key. While ``failing`` is set, every
    request is answered with that status; ``down`` closes connections without an answer.
    """

    def __init__(self, connect: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        self.blobs: dict[str, bytes] = {}
        self.failing: int | None = None
        self.failing_blobs: int | None = None
        self.requests: list[str] = []
        self.makes_credentials = True
        self.credentials: list[str] = []
        self.connect = connect
        fake = self

        class Handler(_Handler):
            owner = fake

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()

    @property
    def url(self) -> str:
        """Where it is."""
        return f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Handler(http.server.BaseHTTPRequestHandler):
    owner: FakeHttp
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = json.loads(self._body() or b"{}")
        self.owner.requests.append(f"POST {self.path}")
        if self.owner.failing is not None:
            self._answer(self.owner.failing, {})
        elif self.path == "/v3/endpoints":
            self._answer(200, {"endpoint_id": ENDPOINT_ID})
        elif self.path == f"/v3/endpoints/{ENDPOINT_ID}/credential" and self.owner.makes_credentials:
            self.owner.credentials.append(f"farcall-endpoint.{len(self.owner.credentials):08}.signature")
            self._answer(200, {"endpoint_id": ENDPOINT_ID, "credential": self.owner.credentials[-1]})
        elif self.path == f"/v3/endpoints/{ENDPOINT_ID}/connect":
            answer = self.owner.connect(body)
            self._answer(int(answer.pop("http_status_code", 200)), answer)
        else:
            self._answer(404, {"code": "ENDPOINT_UNKNOWN", "message": f"no {self.path}", "fault": "caller"})

    def do_DELETE(self) -> None:
        self.owner.requests.append(f"DELETE {self.path}")
        self._answer(200, {})

    def do_PUT(self) -> None:
        body = self._body()
        self.owner.requests.append(f"PUT {self.path}")
        if self.owner.failing_blobs is not None:
            self._answer(self.owner.failing_blobs, {})
            return
        self.owner.blobs[self.path.removeprefix("/blobs/")] = body
        self._answer(200, {})

    def do_GET(self) -> None:
        data = self.owner.blobs.get(self.path.removeprefix("/blobs/"))
        if data is None:
            self._answer(404, {})
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _answer(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: object) -> None:
        """Silence."""
