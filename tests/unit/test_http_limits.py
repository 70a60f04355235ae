"""Limits of HTTP connections: endless requests, unread answers, headers, number of connections."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import uvicorn

from farcall_common.http_limits import LimitedHttp

WITHIN_S = 60.0
HEAD = b"GET / HTTP/1.1\r\nHost: here\r\n"


class Hasty(LimitedHttp):
    request_s = 0.3
    stalled_s = 0.3


class Crowded(LimitedHttp):
    max_connections = 3


class Brief(LimitedHttp):
    request_s = 3600.0
    max_head_bytes = 1000


async def answer(scope: Any, receive: Callable[[], Any], send: Callable[[Any], Any]) -> None:
    body = b""
    while (message := await receive())["type"] == "http.request":
        body += message["body"]
        if not message["more_body"]:
            break
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


async def answer_at_length(scope: Any, receive: Callable[[], Any], send: Callable[[Any], Any]) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for _ in range(10_000):
        await send({"type": "http.response.body", "body": bytes(100_000), "more_body": True})
    await send({"type": "http.response.body", "body": b""})


def served(
    talk: Callable[[int], Coroutine[Any, Any, None]], protocol: type[LimitedHttp] = Hasty, app: Any = answer
) -> None:
    """Run a conversation with a server that has its port."""

    async def both() -> None:
        config = uvicorn.Config(app, http=protocol, ws="none", lifespan="off", log_config=None)
        server = uvicorn.Server(config)
        server.config.load()
        server.lifespan = config.lifespan_class(config)
        loop = asyncio.get_running_loop()
        listener = await loop.create_server(
            lambda: protocol(config=config, server_state=server.server_state, app_state={}), "127.0.0.1", 0
        )
        async with listener, asyncio.timeout(WITHIN_S):
            await talk(listener.sockets[0].getsockname()[1])

    asyncio.run(both())


async def drip(port: int, data: bytes) -> bytes:
    """What the server says to one that sends a byte now and then, until it hangs up."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)

    async def send() -> None:
        for byte in data:
            writer.write(bytes([byte]))
            await asyncio.sleep(0.01)  # this is what a slow sender does

    sending = asyncio.create_task(send())
    try:
        return await reader.read()
    except ConnectionError:
        return b""
    finally:
        sending.cancel()
        writer.close()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        HEAD * 5,
        HEAD + b"X-Padding: " + b"x" * 500,
        b"POST / HTTP/1.1\r\nHost: here\r\nContent-Length: 500\r\n\r\n" + b"x" * 100,
    ],
    ids=["nothing", "head", "header", "body"],
)
def test_slow_sender_is_disconnected(data: bytes) -> None:
    async def talk(port: int) -> None:
        assert await drip(port, data) == b""

    served(talk)


def test_active_connection_is_served_while_idle_ones_are_closed() -> None:
    async def talk(port: int) -> None:
        lazy = [asyncio.open_connection("127.0.0.1", port) for _ in range(200)]
        kept = [await connection for connection in lazy]
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(4):  # together longer than one request may take
            writer.write(HEAD + b"\r\n")
            assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200")
            await asyncio.sleep(Hasty.request_s / 2)
        writer.close()
        assert [await early.read() for early, _ in kept] == [b""] * 200
        for _, late in kept:
            late.close()

    served(talk)


def test_client_that_does_not_read_is_disconnected() -> None:
    async def talk(port: int) -> None:
        with socket.create_connection(("127.0.0.1", port)) as lazy:
            lazy.setblocking(False)
            lazy.sendall(HEAD + b"\r\n")
            loop = asyncio.get_running_loop()
            while (await loop.sock_recv(lazy, 1)) and not ended.is_set():
                await asyncio.wait([asyncio.ensure_future(ended.wait())], timeout=Hasty.stalled_s)

    ended = asyncio.Event()

    async def app(scope: Any, receive: Callable[[], Any], send: Callable[[Any], Any]) -> None:
        await receive()
        sending = asyncio.ensure_future(answer_at_length(scope, receive, send))
        assert (await receive())["type"] == "http.disconnect"
        ended.set()
        await sending

    served(talk, app=app)
    assert ended.is_set()


def test_connections_are_bounded() -> None:
    async def talk(port: int) -> None:
        kept = [await asyncio.open_connection("127.0.0.1", port) for _ in range(Crowded.max_connections)]
        for reader, writer in kept:
            writer.write(HEAD + b"\r\n")
            await reader.readuntil(b"ok")
        assert await drip(port, HEAD + b"\r\n") == b"", "one too many"
        kept.pop()[1].close()
        while not (await drip(port, HEAD + b"\r\n")).startswith(b"HTTP/1.1 200"):
            pass  # the server has not seen the end of the other one yet
        for _, writer in kept:
            writer.close()

    served(talk, Crowded)


def test_idle_connections_are_closed_for_new_ones() -> None:
    async def talk(port: int) -> None:
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(Crowded.max_connections)]
        assert (await drip(port, HEAD + b"\r\n")).startswith(b"HTTP/1.1 200")
        reader, _ = silent[0]
        assert await reader.read() == b"", "the oldest one was ended"
        for _, writer in silent:
            writer.close()

    served(talk, Crowded)


CHUNKED = b"POST / HTTP/1.1\r\nHost: here\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    "start",
    [HEAD + b"X: ", CHUNKED + b"0\r\nX: ", CHUNKED + b"1\r\nx\r\n0\r\nX: ", CHUNKED + b"1;x="],
    ids=["headers", "trailers", "trailers behind a body", "extensions of a chunk"],
)
def test_header_size_is_bounded_on_every_request(start: bytes) -> None:
    async def talk(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        with contextlib.suppress(ConnectionError):
            writer.write(start)
            while not reader.at_eof():  # what comes in one piece with a body does not count
                writer.write(b"x" * 300)
                await writer.drain()
                await asyncio.sleep(0.001)
            assert await reader.read() == b""
        writer.close()

    served(talk, Brief)


def test_bodies_and_many_requests_do_not_count_as_headers() -> None:
    async def talk(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        chunks = b"".join(b"64\r\n" + bytes(100) + b"\r\n" for _ in range(50))
        for _ in range(20):
            for request in (HEAD + b"X: " + b"x" * 200 + b"\r\n\r\n", CHUNKED + chunks + b"0\r\n\r\n"):
                writer.write(request)
                assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200")
        writer.close()

    served(talk, Brief)
