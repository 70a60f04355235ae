"""HTTP requests that never come to their end, at the server of the local tier."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import uvicorn

from farcall_lambdas.patience import PromptHttp

WITHIN_S = 60.0
HEAD = b"GET / HTTP/1.1\r\nHost: here\r\n"


class Hasty(PromptHttp):
    request_s = 0.3


async def answer(scope: Any, receive: Callable[[], Any], send: Callable[[Any], Any]) -> None:
    body = b""
    while (message := await receive())["type"] == "http.request":
        body += message["body"]
        if not message["more_body"]:
            break
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


def served(talk: Callable[[int], Coroutine[Any, Any, None]]) -> None:
    """Run a conversation with a server that has its port."""

    async def both() -> None:
        config = uvicorn.Config(answer, http=Hasty, ws="none", lifespan="off", log_config=None)
        server = uvicorn.Server(config)
        server.config.load()
        server.lifespan = config.lifespan_class(config)
        loop = asyncio.get_running_loop()
        listener = await loop.create_server(
            lambda: Hasty(config=config, server_state=server.server_state, app_state={}), "127.0.0.1", 0
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
def test_who_takes_too_long_is_hung_up_on(data: bytes) -> None:
    async def talk(port: int) -> None:
        assert await drip(port, data) == b""

    served(talk)


def test_others_are_served_meanwhile_and_again_on_the_same_connection() -> None:
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
