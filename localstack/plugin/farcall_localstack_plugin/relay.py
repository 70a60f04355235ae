"""TCP relay program: accept connections on a free loopback port and forward each to one of the targets, in turn.

::

    python -m farcall_localstack_plugin.relay TARGETS READY [CERTIFICATE]

``TARGETS`` is a file with a JSON list of loopback ports, read for each connection. The relay writes its own port to
``READY``. With a ``CERTIFICATE`` (a PEM file with its key) it adds TLS to a PostgreSQL server, and refuses connections
without TLS.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import ssl
import sys
from pathlib import Path

from farcall_localstack_plugin.files import write_whole

_HOST = "127.0.0.1"
_CHUNK_BYTES = 256 * 1024
#: PostgreSQL's SSLRequest message (a length and a code), and the server's positive answer.
_SSL_REQUEST = (8).to_bytes(4, "big") + (80877103).to_bytes(4, "big")
_YES = b"S"

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Relay:
    """Forwards bytes in both directions, and closes both connections when either side ends."""

    def __init__(self, targets: Path, *, tls: ssl.SSLContext | None = None) -> None:
        self._targets = targets
        self._tls = tls
        self._turns = itertools.count()

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Handle one connection until it ends."""
        try:
            if self._tls is not None and not await _secure(reader, writer, self._tls):
                return
            target = await self._connect()
            if target is not None:
                await _join((reader, writer), target)
        finally:
            writer.close()

    async def _connect(self) -> Connection | None:
        """A connection to the next target, or to the one after that if it does not listen any more."""
        ports = json.loads(self._targets.read_text(encoding="utf-8"))
        turn = next(self._turns)
        for offset in range(len(ports)):
            with contextlib.suppress(OSError):
                return await asyncio.open_connection(_HOST, ports[(turn + offset) % len(ports)])
        return None


async def _secure(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, tls: ssl.SSLContext) -> bool:
    """Negotiate TLS as PostgreSQL does. Returns whether the client requests it and accepts our certificate."""
    with contextlib.suppress(asyncio.IncompleteReadError, OSError):  # including errors of TLS
        if await reader.readexactly(len(_SSL_REQUEST)) == _SSL_REQUEST:
            writer.write(_YES)
            await writer.start_tls(tls)
            return True
    return False


async def _join(one: Connection, other: Connection) -> None:
    """Copy in both directions until either side ends, then close both, as a load balancer that lost its target."""
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


async def main(targets: Path, ready: Path, certificate: Path | None) -> None:
    tls = None
    if certificate is not None:
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(certificate)
    server = await asyncio.start_server(Relay(targets, tls=tls).accept, _HOST, 0, limit=_CHUNK_BYTES)
    write_whole(ready, str(server.sockets[0].getsockname()[1]))
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]) if sys.argv[3:] else None))
