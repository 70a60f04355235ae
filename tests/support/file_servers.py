"""Servers of files for tests: a web server with faults, and a proxy."""

from __future__ import annotations

import collections
import contextlib
import http.client
import http.server
import socket
import ssl
import threading
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

Answer = tuple[int, Mapping[str, str], bytes | Iterator[bytes]]


class WebServer:
    """Answers from ``files``, by path: bytes, or a function of the method that makes an answer.

    :param certificate: a file with one and its key, for TLS.
    """

    def __init__(self, *, certificate: Path | None = None) -> None:
        self.files: dict[str, bytes | Callable[[str], Answer]] = {}
        #: How often each method and path was requested.
        self.requests: collections.Counter[tuple[str, str]] = collections.Counter()
        #: What was put, by path.
        self.stored: dict[str, bytes] = {}
        self._server = _serve(self._handler(), certificate)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _handler(self) -> type[http.server.BaseHTTPRequestHandler]:
        outer = self

        class Handler(_Handler):
            def do_GET(self) -> None:
                path = urllib.parse.urlsplit(self.path).path
                outer.requests[self.command, path] += 1
                found = outer.files.get(path)
                if found is None:
                    self.answer(404, {}, b"")
                elif isinstance(found, bytes):
                    self.answer(200, {"ETag": f'"{hash(found)}"'}, found)
                else:
                    self.answer(*found(self.command))

            do_HEAD = do_GET  # noqa: N815

            def do_PUT(self) -> None:
                path = urllib.parse.urlsplit(self.path).path
                body = self.rfile.read(int(self.headers["content-length"]))
                outer.requests[self.command, path] += 1
                found = outer.files.get(path)
                status, headers, answer = found("PUT") if callable(found) else (200, {"ETag": '"1"'}, b"")
                if status == 200:
                    outer.stored[path] = body
                self.answer(status, headers, answer)

        return Handler


class LargeObject:
    """A bucket with one object.

    :param body: yields the bytes of the object from one position to another.
    """

    def __init__(self, size_bytes: int, body: Callable[[int, int], Iterator[bytes]]) -> None:
        #: The ranges that were requested: their first and last byte.
        self.ranges: list[tuple[int, int]] = []
        outer = self

        class Handler(_Handler):
            def do_GET(self) -> None:
                headers = {"ETag": '"1"', "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT"}
                if self.command == "HEAD":
                    self.answer(200, {**headers, "Content-Length": str(size_bytes)}, b"")
                    return
                first, last = map(int, self.headers["range"].removeprefix("bytes=").split("-"))
                outer.ranges.append((first, last))
                headers["Content-Range"] = f"bytes {first}-{last}/{size_bytes}"
                self.answer(206, {**headers, "Content-Length": str(last + 1 - first)}, body(first, last + 1))

            do_HEAD = do_GET  # noqa: N815

        self._server = _serve(Handler)
        self.options = {
            "endpoint": f"http://127.0.0.1:{self._server.server_address[1]}",
            "access_key_id": "a",
            "secret_access_key": "b",
            "region": "x",
        }

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class Proxy:
    """Passes on requests for ``http://``, and connections for ``https://``, to one server, whatever their host is."""

    def __init__(self, server: WebServer) -> None:
        self.requested: list[str] = []
        port = urllib.parse.urlsplit(server.url).port
        assert port is not None
        outer = self

        class Handler(_Handler):
            def do_GET(self) -> None:
                outer.requested.append(self.path)
                target = urllib.parse.urlsplit(self.path)
                connection = http.client.HTTPConnection("127.0.0.1", port)
                connection.request(self.command, target.path, headers={"Host": target.netloc})
                response = connection.getresponse()
                body = response.read()
                headers = {
                    name: value for name, value in response.getheaders() if name.lower() in ("etag", "last-modified")
                }
                length = response.getheader("content-length") or "0"
                self.answer(response.status, {**headers, "Content-Length": length}, body)
                connection.close()

            do_HEAD = do_GET  # noqa: N815

            def do_CONNECT(self) -> None:
                outer.requested.append(self.path)
                self.send_response(200)
                self.end_headers()
                self.close_connection = True
                with socket.create_connection(("127.0.0.1", port)) as there:
                    back = threading.Thread(target=_copy, args=(there, self.connection), daemon=True)
                    back.start()
                    _copy(self.connection, there)
                    back.join()

        self._server = _serve(Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class FaultyProxy:
    """Passes requests on to one server, or lets them fail.

    :param url: of the server.
    :param fault: of a request, by its method and path: None, or ``busy`` (503), ``conflict`` (409), ``reset`` (the
        connection ends), ``lost`` (it ends after the request was passed on), ``cut`` (it ends within the answer), or
        ``hung`` (there is no answer).
    """

    def __init__(self, url: str, fault: Callable[[str, str], str | None]) -> None:
        self.fault = fault
        #: How often each fault was made, and how many requests had none.
        self.made: collections.Counter[str | None] = collections.Counter()
        self._closing = threading.Event()
        there = urllib.parse.urlsplit(url).netloc
        outer = self

        class Handler(_Handler):
            def do_GET(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"] or 0))
                fault = outer.fault(self.command, self.path)
                outer.made[fault] += 1
                if fault in ("busy", "conflict"):
                    status, code = (503, "SlowDown") if fault == "busy" else (409, "ConditionalRequestConflict")
                    self.answer(status, {}, f"<Error><Code>{code}</Code></Error>".encode())
                    return
                if fault == "hung":
                    outer._closing.wait()
                if fault in ("hung", "reset"):
                    self.end()
                    return
                status, headers, found = self.passed(body)
                if fault == "lost":
                    self.end()
                elif fault == "cut":
                    self.answer(status, {**headers, "Content-Length": str(len(found) + 1)}, found)
                    self.end()
                else:
                    self.answer(status, headers, found)

            do_HEAD = do_PUT = do_POST = do_DELETE = do_GET  # noqa: N815

            def passed(self, body: bytes) -> tuple[int, Mapping[str, str], bytes]:
                with contextlib.closing(http.client.HTTPConnection(there)) as connection:
                    connection.request(self.command, self.path, body, dict(self.headers))
                    response = connection.getresponse()
                    found = response.read()
                kept = {name: value for name, value in response.getheaders() if name.lower() not in _OF_CONNECTIONS}
                return response.status, kept, found

            def end(self) -> None:
                self.close_connection = True
                self.connection.shutdown(socket.SHUT_RDWR)

        self._server = _serve(Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        self._closing.set()
        self._server.shutdown()
        self._server.server_close()


_OF_CONNECTIONS = {"connection", "transfer-encoding", "date", "server"}
"""Headers that are not passed on."""


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def answer(self, status: int, headers: Mapping[str, str], body: bytes | Iterator[bytes]) -> None:
        self.send_response(status)
        if isinstance(body, bytes):
            headers = {"Content-Length": str(len(body)), **headers}
        else:
            self.close_connection = True
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        try:
            for chunk in [body] if isinstance(body, bytes) else body:
                self.wfile.write(chunk)
        except OSError:
            pass  # the client has stopped

    def log_message(self, *_: Any) -> None:
        pass


def _copy(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(2**16):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, *_: Any) -> None:
        pass  # a client that was killed


def _serve(
    handler: type[http.server.BaseHTTPRequestHandler], certificate: Path | None = None
) -> http.server.ThreadingHTTPServer:
    server = _Server(("127.0.0.1", 0), handler)
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    return server
