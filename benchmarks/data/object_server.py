"""Object server: ``python -m benchmarks.data.object_server DIRECTORY`` serves a directory as buckets of objects, as far
as reading them needs S3's protocol. It prints its address, and ends with its standard input.

moto reads a whole object for each part of it.
"""

from __future__ import annotations

import os
import sys
import threading
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    root: Path

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Nothing."""

    def _answer(self, *, with_body: bool) -> None:
        path = self.root / unquote(urlsplit(self.path).path).lstrip("/")
        if not path.is_file():
            self.send_response(404)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        state = path.stat()
        first, last = 0, state.st_size - 1
        if given := self.headers.get("Range"):
            begin, _, end = given.removeprefix("bytes=").partition("-")
            first, last = int(begin), min(last, int(end or last))
        self.send_response(206 if given else 200)
        if given:
            self.send_header("Content-Range", f"bytes {first}-{last}/{state.st_size}")
        self.send_header("Content-Length", str(last - first + 1))
        self.send_header("ETag", f'"{state.st_mtime_ns:x}-{state.st_size:x}"')
        self.send_header("Last-Modified", formatdate(state.st_mtime, usegmt=True))
        self.send_header("Accept-Ranges", "bytes")
        self.end_headers()
        if not with_body:
            return
        self.wfile.flush()
        with path.open("rb") as file:
            while first <= last:
                first += os.sendfile(self.connection.fileno(), file.fileno(), first, last - first + 1)


def main() -> None:
    """Serve until standard input ends."""
    handler = type("_Served", (_Handler,), {"root": Path(sys.argv[1])})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(f"http://127.0.0.1:{server.server_address[1]}", flush=True)
    sys.stdin.read()
    server.shutdown()


if __name__ == "__main__":
    main()
