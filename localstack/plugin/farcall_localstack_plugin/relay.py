"""TCP relay program: accept connections on a free loopback port and forward each to one of the targets, in turn.

::

    python -m farcall_localstack_plugin.relay TARGETS READY [CERTIFICATE]

``TARGETS`` is a JSON file: ``ports`` for new connections; ``cuts``, a list that grows by each port whose connections
have to end; and ``idle_s``, the seconds without data after which a connection ends (null for any number). The relay
follows its changes, and writes its own port to ``READY``. With a ``CERTIFICATE`` (a PEM file with its key) it adds TLS
to a PostgreSQL server, and refuses connections without TLS.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import ssl
import sys
import time
from pathlib import Path
from typing import Any

from farcall_localstack_plugin.files import write_whole

_HOST = "127.0.0.1"
_CHUNK_BYTES = 256 * 1024
_LOOK_S = 0.1
#: PostgreSQL's SSLRequest message (a length and a code), and the server's positive answer.
_SSL_REQUEST = (8).to_bytes(4, "big") + (80877103).to_bytes(4, "big")
_YES = b"S"

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Relay:
    """Forwards bytes in both directions, and closes both connections when either side ends."""

    def __init__(self, targets: Path, *, tls: ssl.SSLContext | None = None) -> None:
        self._file = targets
        self._tls = tls
        self._turns = itertools.count()
        self._targets = self._read()
        #: Connections by the port of their target.
        self._joined: dict[int, set[asyncio.Task[None]]] = {}

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Handle one connection until it ends."""
        try:
            if self._tls is not None and not await _secure(reader, writer, self._tls):
                return
            found = await self._connect()
            if found is not None:
                port, target = found
                joined = asyncio.create_task(_join((reader, writer), target, idle_s=self._targets["idle_s"]))
                self._joined.setdefault(port, set()).add(joined)
                joined.add_done_callback(self._joined[port].discard)
                await asyncio.wait([joined])
        finally:
            writer.close()

    async def follow(self) -> None:
        """Cut connections as the file of targets says, until cancelled."""
        done = 0
        while True:
            version = self._version()
            self._targets = self._read()
            cuts = self._targets["cuts"]
            for port in cuts[done:]:
                for joined in self._joined.get(port, ()):
                    joined.cancel()
            done = len(cuts)
            while self._version() == version:
                await asyncio.sleep(_LOOK_S)

    def _read(self) -> dict[str, Any]:
        targets: dict[str, Any] = json.loads(self._file.read_text(encoding="utf-8"))
        return targets

    def _version(self) -> tuple[int, int]:
        """Changes with each new contents of the file, which is replaced as a whole."""
        status = self._file.stat()
        return status.st_ino, status.st_mtime_ns

    async def _connect(self) -> tuple[int, Connection] | None:
        """A connection to the next target, or to the one after that if it does not listen any more."""
        ports = self._read()["ports"]
        turn = next(self._turns)
        for offset in range(len(ports)):
            port = ports[(turn + offset) % len(ports)]
            with contextlib.suppress(OSError):
                return port, await asyncio.open_connection(_HOST, port)
        return None


async def _secure(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, tls: ssl.SSLContext) -> bool:
    """Negotiate TLS as PostgreSQL does. Returns whether the client requests it and accepts our certificate."""
    with contextlib.suppress(asyncio.IncompleteReadError, OSError):  # including errors of TLS
        if await reader.readexactly(len(_SSL_REQUEST)) == _SSL_REQUEST:
            writer.write(_YES)
            await writer.start_tls(tls)
            return True
    return False


class _Activity:
    """Time of the last byte in either direction."""

    def __init__(self) -> None:
        self.at = time.monotonic()

    async def wait_idle(self, idle_s: float) -> None:
        """Wait until there was no byte for that long."""
        while (left_s := self.at + idle_s - time.monotonic()) > 0:
            await asyncio.sleep(left_s)


async def _join(one: Connection, other: Connection, *, idle_s: float | None) -> None:
    """Copy in both directions until either side ends or both are idle, then close both, as a load balancer that lost
    its target. If cancelled, reset both."""
    activity = _Activity()
    tasks = [
        asyncio.create_task(_copy(one[0], other[1], activity)),
        asyncio.create_task(_copy(other[0], one[1], activity)),
    ]
    if idle_s is not None:
        tasks.append(asyncio.create_task(activity.wait_idle(idle_s)))
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    except asyncio.CancelledError:
        for _, writer in (one, other):
            writer.transport.abort()
        raise
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        other[1].close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, activity: _Activity) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(_CHUNK_BYTES):
            activity.at = time.monotonic()
            writer.write(data)
            await writer.drain()


async def main(targets: Path, ready: Path, certificate: Path | None) -> None:
    tls = None
    if certificate is not None:
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(certificate)
    relay = Relay(targets, tls=tls)
    server = await asyncio.start_server(relay.accept, _HOST, 0, limit=_CHUNK_BYTES)
    write_whole(ready, str(server.sockets[0].getsockname()[1]))
    async with server:
        await relay.follow()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]) if sys.argv[3:] else None))
