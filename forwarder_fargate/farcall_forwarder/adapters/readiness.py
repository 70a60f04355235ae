"""Socket readiness: asyncio waits for a ZeroMQ socket by its file descriptor."""

from __future__ import annotations

import asyncio

import zmq


class Readiness:
    """Signals that a socket may have become readable.

    A socket's file descriptor is edge-triggered, and any call on the socket may consume the edge. So: receive until
    nothing is left, then wait; and call :meth:`poke` after every send.
    """

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._descriptor = int(socket.getsockopt(zmq.FD))
        self._changed = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._descriptor, self._changed.set)

    async def wait(self) -> None:
        """Wait until the socket may have changed since the last wait."""
        await self._changed.wait()
        self._changed.clear()

    def poke(self) -> None:
        """Make the next wait return at once."""
        self._changed.set()

    def close(self) -> None:
        """Stop watching. To be called before the socket is closed."""
        self._loop.remove_reader(self._descriptor)
