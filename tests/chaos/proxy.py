"""Faulty network between an endpoint or a client and the local tier: slow, silent, cut, or with changed answers."""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, NamedTuple, Self

import httpx

_LOOPBACK = "127.0.0.1"
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: closing a connection sends RST
_CHUNK_BYTES = 65536
_HOP_BY_HOP = {"host", "connection", "content-length", "transfer-encoding", "accept-encoding"}


class Answer(NamedTuple):
    """An HTTP answer with some headers; ``length`` is the declared one, if it is another. ``wait_s`` lies between
    pieces of 16 bytes of the first KiB. An answer that is ``lost`` is not sent."""

    status: int
    body: bytes
    headers: Mapping[str, str]
    length: int | None = None
    wait_s: float = 0.0
    lost: bool = False


Change = Callable[[Answer], Answer]


def _status(status: int, body: bytes = b"<html>Bad Gateway</html>") -> Change:
    return lambda answer: Answer(status, body, answer.headers)


def _later(status: int) -> Change:
    return lambda answer: Answer(status, b"", {"retry-after": "99999999"})


class _Earlier:
    """Sends the answer to the request before, also if that was to another address."""

    def __init__(self) -> None:
        self._last: Answer | None = None

    def __call__(self, answer: Answer) -> Answer:
        last, self._last = self._last, answer
        return last or answer


#: What a proxy or a gateway may do to an answer of the API, or of the blob store.
CHANGES: dict[str, Change] = {
    **{f"status {status}": _status(status) for status in (302, 401, 403, 404, 407, 413, 429, 500, 502, 503, 504)},
    **{f"status {status} with Retry-After": _later(status) for status in (429, 503)},
    "gateway's 403": _status(403, b'{"message":"Forbidden"}'),
    "HTML": _status(200, b"<html>Log in to the network</html>"),
    **{f"JSON {text}": _status(200, text.encode()) for text in ("[]", "null", "{}", '"x"', '{"results":{}}')},
    "foreign JSON": _status(200, b'{"status":"success","tasks":{"a":["b"]},"results":{"a":{"task_id":"a"}}}'),
    "earlier": _Earlier(),
    "half": lambda answer: answer._replace(body=answer.body[: len(answer.body) // 2]),
    "nothing": lambda answer: answer._replace(body=b""),
    "cut": lambda answer: answer._replace(body=answer.body[: len(answer.body) // 2], length=len(answer.body)),
    "too long": lambda answer: answer._replace(length=max(0, len(answer.body) - 10)),
    "lost": lambda answer: answer._replace(lost=True),
    "slow": lambda answer: answer._replace(wait_s=0.01),
}


class _Proxy:
    """Forwards TCP connections to a port. All methods but ``start`` run in the thread of the event loop."""

    def __init__(self, target_port: int) -> None:
        self.port = 0
        self.latency_s = 0.0
        self._target_port = target_port
        self._passing = asyncio.Event()
        self._passing.set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._pumps: set[asyncio.Task[None]] = set()

    async def start(self) -> int:
        self._server = await asyncio.start_server(self._accept, _LOOPBACK, 0)
        self.port = int(self._server.sockets[0].getsockname()[1])
        return self.port

    def silence(self, is_silent: bool) -> None:
        """While silent, bytes are neither forwarded nor refused; they arrive later."""
        self._passing.clear() if is_silent else self._passing.set()

    def reset(self) -> None:
        """Reset all connections."""
        for writer in self._writers:
            raw: socket.socket = writer.get_extra_info("socket")
            with contextlib.suppress(OSError):
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            writer.transport.abort()

    async def close(self) -> None:
        self._server.close()
        self.reset()
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, back = await asyncio.open_connection(_LOOPBACK, self._target_port)
        except OSError:
            writer.transport.abort()
            return
        for source, sink in ((reader, back), (there, writer)):
            self._writers.add(sink)
            pump = asyncio.create_task(self._pump(source, sink))
            self._pumps.add(pump)
            pump.add_done_callback(self._pumps.discard)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            while chunk := await source.read(_CHUNK_BYTES):
                await self._passing.wait()
                if self.latency_s:
                    await asyncio.sleep(self.latency_s)
                sink.write(chunk)
                await sink.drain()
        except OSError:
            pass
        finally:
            self._writers.discard(sink)
            sink.close()


class Network:
    """The API at :attr:`api_url`, which names forwarders and the blob store by addresses of this network too.

    :param has_forwarders: whether the addresses of forwarders can be reached.
    """

    def __init__(self, api_url: str, *, has_forwarders: bool = True) -> None:
        self._has_forwarders = has_forwarders
        self._change: Change | None = None
        #: How many answers were changed since :meth:`change`.
        self.changed: int = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="network")
        self._thread.start()
        self._lock = threading.Lock()
        self._forwarders: dict[int, _Proxy] = {}
        # A kept connection may be closed by the API just when it is used, which would be a fault that no phase orders.
        self._http = httpx.Client(base_url=api_url, timeout=120.0, limits=httpx.Limits(max_keepalive_connections=0))
        network = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self) -> None:
                content = self.rfile.read(int(self.headers.get("content-length", 0)))
                headers = {name: value for name, value in self.headers.items() if name.lower() not in _HOP_BY_HOP}
                url = re.sub(r"^/at/(\d+)/", rf"http://{_LOOPBACK}:\1/", self.path)
                try:
                    found = network._http.request(self.command, url, headers=headers, content=content)
                except httpx.TransportError:
                    self.close_connection = True  # as the API's own connection was
                    return
                body = found.content
                if url == self.path:  # not of the blob store
                    body = re.sub(rb"tcp://127\.0\.0\.1:(\d+)", network._named, body)
                    body = re.sub(rb"http://127\.0\.0\.1:(\d+)", rb"%s/at/\1" % network.api_url.encode(), body)
                dropped = {*_HOP_BY_HOP, "content-encoding", "date", "server"}
                sent = {name: value for name, value in found.headers.items() if name.lower() not in dropped}
                answer = network._changed(Answer(found.status_code, body, sent))
                self.close_connection = answer.length is not None or answer.lost
                if answer.lost:
                    return
                self.send_response(answer.status)
                for name, value in answer.headers.items():
                    self.send_header(name, value)
                self.send_header("content-length", str(len(answer.body) if answer.length is None else answer.length))
                self.end_headers()
                with contextlib.suppress(OSError):
                    slow = answer.body[:1024] if answer.wait_s else b""
                    for start in range(0, len(slow), 16):
                        self.wfile.write(slow[start : start + 16])
                        time.sleep(answer.wait_s)
                    self.wfile.write(answer.body[len(slow) :])

            do_GET = do_POST = do_PUT = do_DELETE = do_PATCH = answer  # noqa: N815 - the base class calls them so

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - as in the base class
                pass

            def handle(self) -> None:
                with contextlib.suppress(OSError):
                    super().handle()

        self._server = http.server.ThreadingHTTPServer((_LOOPBACK, 0), Handler)
        self._server.daemon_threads = True
        self._serving = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})
        self._serving.start()
        self._api = _Proxy(self._server.server_port)
        self.api_url = f"http://{_LOOPBACK}:{self._run(self._api.start())}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for proxy in self._proxies():
            self._run(proxy.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._server.shutdown()
        self._server.server_close()
        self._serving.join()
        self._http.close()

    def silence(self, is_silent: bool, *, api: bool = True) -> None:
        """Begin or end a silence on the way to the forwarders, and to the API."""
        for proxy in self._proxies(api=api):
            self._loop.call_soon_threadsafe(proxy.silence, is_silent)

    def reset(self) -> None:
        """Reset all connections."""
        for proxy in self._proxies():
            self._loop.call_soon_threadsafe(proxy.reset)

    def change(self, change: Change | None) -> None:
        """Change answers from now on; None: no more."""
        self._change, self.changed = change, 0

    def _changed(self, answer: Answer) -> Answer:
        change = self._change
        if change is None:
            return answer
        self.changed += 1
        return change(answer)

    def delay(self, latency_s: float) -> None:
        """Delay each piece of what is sent."""
        for proxy in self._proxies():
            proxy.latency_s = latency_s

    def _proxies(self, *, api: bool = True) -> list[_Proxy]:
        with self._lock:
            return [*self._forwarders.values(), *([self._api] if api else [])]

    def _named(self, address: re.Match[bytes]) -> bytes:
        port = int(address[1])
        if not self._has_forwarders:
            return b"tcp://127.0.0.1:1"  # refuses connections
        with self._lock:
            if port not in self._forwarders:
                proxy = _Proxy(port)
                self._run(proxy.start())
                self._forwarders[port] = proxy
            return f"tcp://{_LOOPBACK}:{self._forwarders[port].port}".encode()

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30.0)
