"""The agent's socket to a forwarder, and what happens to it underneath."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from typing import Final

import zmq
from zmq.utils.monitor import recv_monitor_message

from farcall_common.sockets import CONNECTION_LOST, client_socket
from farcall_common.wire import Envelope, decode, encode
from farcall_endpoint.agent.connection import Address
from farcall_endpoint.transport import CurveKeys, send_frames

_logger = logging.getLogger(__name__)

SHAKEN: Final = "handshake succeeded"
_FATES: Final[Mapping[int, str]] = {zmq.EVENT_HANDSHAKE_SUCCEEDED: SHAKEN, **CONNECTION_LOST}
_MOST_PER_TURN: Final = 64


class Uplink:
    """At most one socket at a time, with a monitor beside it."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys: CurveKeys, poller: zmq.Poller) -> None:
        self._context = context
        self._keys = keys
        self._poller = poller
        self._socket: zmq.Socket[bytes] | None = None
        self._monitor: zmq.Socket[bytes] | None = None

    @property
    def sockets(self) -> tuple[zmq.Socket[bytes], ...]:
        """What the poller may find readable."""
        return () if self._socket is None or self._monitor is None else (self._socket, self._monitor)

    def dial(self, to: Address) -> None:
        """Open a socket to a forwarder.

        :raises zmq.ZMQError: if the address or the key cannot be one.
        """
        self._socket = client_socket(
            self._context, server_key=to.server_key, public_key=self._keys.public, secret_key=self._keys.secret
        )
        self._monitor = self._socket.get_monitor_socket(sum(_FATES))
        self._monitor.linger = 0
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        self._socket.connect(to.address)

    def close(self, *, linger_ms: int = 0) -> None:
        """Close the socket, if there is one; what was sent before gets ``linger_ms`` to leave."""
        if self._socket is None or self._monitor is None:
            return
        self._poller.unregister(self._socket)
        self._poller.unregister(self._monitor)
        self._socket.disable_monitor()
        self._monitor.close()
        self._socket.close(linger=linger_ms)
        self._socket = self._monitor = None

    def send(self, envelope: Envelope) -> None:
        """Send; never blocks. Lost if the connection has ended, which :meth:`fates` is about to tell."""
        assert self._socket is not None
        with contextlib.suppress(zmq.Again):  # a socket that has lost its one connection takes nothing any more
            send_frames(self._socket, encode(envelope), flags=int(zmq.NOBLOCK))

    def receive(self) -> Iterator[Envelope]:
        """What has come in, up to a limit that leaves others their turn.

        :raises ProtocolError: if something came that cannot be read.
        """
        for _ in range(_MOST_PER_TURN):
            if self._socket is None:
                return
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            yield decode(frames)

    def fates(self) -> Iterator[str]:
        """What happened to the connection: SHAKEN, KEY_REFUSED, or another reason for its end."""
        while self._monitor is not None:
            try:
                event = recv_monitor_message(self._monitor, zmq.NOBLOCK)
            except zmq.Again:
                return
            fate = _FATES.get(event["event"])
            if fate is not None:
                _logger.debug("forwarder %s: %s", event["endpoint"].decode(), fate)
                yield fate
