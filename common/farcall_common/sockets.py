"""ZeroMQ client sockets: a DEALER with CURVE for one connection to a forwarder, for clients, agents and tools.

A connection is never restored: a peer that lost one opens another socket and begins a new session. The socket's monitor
reports the loss (:data:`CONNECTION_LOST`), and the owner closes the socket.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import zmq

from farcall_common.limits import HANDSHAKE_S, MAX_FRAME_BYTES

KEY_REFUSED: Final = "the forwarder does not know this key"
#: Monitor events after which a socket has no connection, each with its meaning.
CONNECTION_LOST: Final[Mapping[int, str]] = {
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: KEY_REFUSED,
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "the handshake failed; is the other side a forwarder with the expected key?",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "the connection was closed during the handshake",
    zmq.EVENT_DISCONNECTED: "the connection was closed",
    zmq.EVENT_CLOSED: "the forwarder cannot be reached",
}

#: A day: longer than an owner takes to close a socket that lost its connection. It must not be -1 ("never"): libzmq
#: then takes the pipe away while a message is read from it, and ends the process (``Assertion failed: !_more``).
RECONNECT_MS: Final = 24 * 60 * 60 * 1000
_CONNECT_MS: Final = 5_000
#: Twice what the protocol permits: a frame over its limit is read, and reported as malformed; a larger one, with what
#: CURVE adds, ends the connection.
_MAX_MESSAGE_BYTES: Final = 2 * MAX_FRAME_BYTES


def client_socket(
    context: zmq.Context[zmq.Socket[bytes]],
    *,
    server_key: str,
    public_key: str,
    secret_key: str,
    linger_ms: int = 0,
    high_water_mark: int = 0,
) -> zmq.Socket[bytes]:
    """A DEALER for one connection to a forwarder, not yet connected. Keys are in Z85.

    :param linger_ms: how long a message that was sent may wait for the network after the socket was closed.
    :param high_water_mark: how many messages may wait in each direction; 0 if the protocol bounds them, as credit does
        for an agent.
    :raises zmq.ZMQError: if a key is invalid.
    """
    socket = context.socket(zmq.DEALER)
    socket.linger = linger_ms
    socket.sndhwm = socket.rcvhwm = high_water_mark
    socket.maxmsgsize = _MAX_MESSAGE_BYTES
    socket.reconnect_ivl = RECONNECT_MS
    socket.connect_timeout = _CONNECT_MS
    socket.handshake_ivl = round(1000 * HANDSHAKE_S)
    socket.tcp_keepalive = 1
    socket.ipv6 = True
    try:
        socket.curve_publickey = public_key.encode()
        socket.curve_secretkey = secret_key.encode()
        socket.curve_serverkey = server_key.encode()
    except BaseException:
        socket.close()
        raise
    return socket
