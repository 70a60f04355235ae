"""The one module that makes ZeroMQ sockets and CURVE keys, so that no socket is made without its limits."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Final

import zmq

__all__ = [
    "Bytes",
    "CurveKeys",
    "agent_socket",
    "fleet_socket",
    "forwarder_socket",
    "new_curve_keys",
    "receive_frames",
    "send_frames",
]

Bytes = bytes | memoryview
"""User bytes on their way: small ones as bytes, large ones as views of where they are already."""

_MORE: Final = int(zmq.SNDMORE)  # a plain number: enums are slow to combine
_COPY_BYTES: Final = 64 * 1024
_HANDSHAKE_MS: Final = 10_000
_CONNECT_MS: Final = 5_000
_MAX_MESSAGE_BYTES: Final = 32 * 1024 * 1024


@dataclasses.dataclass(frozen=True)
class CurveKeys:
    """A CURVE key pair in Z85."""

    public: str
    secret: str = dataclasses.field(repr=False)


def new_curve_keys() -> CurveKeys:
    """A fresh key pair."""
    public, secret = zmq.curve_keypair()
    return CurveKeys(public.decode(), secret.decode())


def forwarder_socket(context: zmq.Context[zmq.Socket[bytes]], *, server_key: str, keys: CurveKeys) -> zmq.Socket[bytes]:
    """A DEALER for one connection to a forwarder, not yet connected: its owner decides about trying again."""
    socket = context.socket(zmq.DEALER)
    socket.linger = 0
    socket.sndhwm = 0  # bounded by the credit that the agent gives
    socket.rcvhwm = 0
    socket.setsockopt(zmq.MAXMSGSIZE, _MAX_MESSAGE_BYTES)
    socket.setsockopt(zmq.RECONNECT_IVL, -1)
    socket.setsockopt(zmq.CONNECT_TIMEOUT, _CONNECT_MS)
    socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.IPV6, 1)
    socket.curve_publickey = keys.public.encode()
    socket.curve_secretkey = keys.secret.encode()
    socket.curve_serverkey = server_key.encode()
    return socket


def fleet_socket(context: zmq.Context[zmq.Socket[bytes]]) -> zmq.Socket[bytes]:
    """The agent's ROUTER for its managers; not yet bound."""
    socket = context.socket(zmq.ROUTER)
    socket.linger = 0
    socket.sndhwm = 0  # bounded by slots and prefetch
    socket.rcvhwm = 0
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    return socket


def agent_socket(context: zmq.Context[zmq.Socket[bytes]], *, address: str, manager_id: str) -> zmq.Socket[bytes]:
    """A manager's DEALER to its agent."""
    socket = context.socket(zmq.DEALER)
    socket.linger = 0
    socket.sndhwm = 0
    socket.rcvhwm = 0
    socket.setsockopt(zmq.RECONNECT_IVL, 5)
    socket.setsockopt(zmq.ROUTING_ID, manager_id.encode())
    socket.connect(address)
    return socket


def send_frames(socket: zmq.Socket[bytes], frames: Sequence[Bytes]) -> None:
    """Send a message whose frames are many and small, or few and large; faster than ``send_multipart`` for both.

    :raises zmq.ZMQError: as ``send`` does.
    """
    last = len(frames) - 1
    for index, frame in enumerate(frames):
        socket.send(frame, _MORE if index < last else 0, copy=len(frame) < _COPY_BYTES)


def receive_frames(socket: zmq.Socket[bytes]) -> list[Bytes]:
    """The next message, without waiting for it; large frames are not copied.

    :raises zmq.Again: if there is none.
    """
    frames = socket.recv_multipart(zmq.NOBLOCK, copy=False)
    return [frame.bytes if len(frame) < _COPY_BYTES else frame.buffer for frame in frames]
