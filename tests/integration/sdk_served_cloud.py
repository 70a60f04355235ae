"""A fake cloud behind a real port, for programs that run in processes of their own."""

from __future__ import annotations

import http.server
import threading
from typing import Any

import httpx

from farcall.testing import FakeCloud


class serving:  # noqa: N801 - reads as the verb it is
    """A fake cloud behind a real port."""

    def __init__(self, cloud: FakeCloud) -> None:
        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            timeout = 10

            def answer(self) -> None:
                content = self.rfile.read(int(self.headers.get("content-length", 0)))
                url, headers = f"https://farcall.test{self.path}", dict(self.headers.items())
                request = httpx.Request(self.command, url, headers=headers, content=content)
                response = cloud.transport.handle_request(request)
                self.send_response(response.status_code)
                self.send_header("content-length", str(len(response.content)))
                self.end_headers()
                self.wfile.write(response.content)

            do_GET = do_POST = do_DELETE = answer  # noqa: N815 - the base class calls them so

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - as in the base class
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})

    def __enter__(self) -> str:
        self._thread.start()
        return f"http://127.0.0.1:{self._server.server_port}"

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
