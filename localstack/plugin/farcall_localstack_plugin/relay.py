"""A program: accept TCP connections on a free loopback port and hand each on to one of the targets, in turn.

::

    python -m farcall_localstack_plugin.relay TARGETS READY

``TARGETS`` is a file with a JSON list of loopback ports, read anew for each connection. The port that we listen on is
written to ``READY``.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import sys
from pathlib import Path

_HOST = "127.0.0.1"
_CHUNK_BYTES = 256 * 1024

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Relay:
    """Passes bytes through both ways, and the end of either side on to the other."""

    def __init__(self, targets: Path) -> None:
        self._targets = targets
        self._turns = itertools.count()

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, from its first byte to its last."""
        try:
            target = await self._connect()
            if target is not None:
                await _join((reader, writer), target)
        finally:
            writer.close()

    async def _connect(self) -> Connection | None:
        """A connection to a target: the next one's turn, or the one after that if it does not listen any more."""
        ports = json.loads(self._targets.read_text(encoding="utf-8"))
        turn = next(self._turns)
        for offset in range(len(ports)):
            with contextlib.suppress(OSError):
                return await asyncio.open_connection(_HOST, ports[(turn + offset) % len(ports)])
        return None


async def _join(one: Connection, other: Connection) -> None:
    """Copy both ways until either side ends; then both do, as with a balancer that has lost its target."""
    copies = [
        asyncio.create_task(_copy(one[0], other[1])),
        asyncio.create_task(_copy(other[0], one[1])),
    ]
    try:
        await asyncio.wait(copies, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for copy in copies:
            copy.cancel()
        await asyncio.gather(*copies, return_exceptions=True)
        other[1].close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(_CHUNK_BYTES):
            writer.write(data)
            await writer.drain()


async def main(targets: Path, ready: Path) -> None:
    server = await asyncio.start_server(Relay(targets).accept, _HOST, 0, limit=_CHUNK_BYTES)
    fresh = ready.with_suffix(".tmp")
    fresh.write_text(str(server.sockets[0].getsockname()[1]), encoding="utf-8")
    fresh.replace(ready)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), Path(sys.argv[2])))
