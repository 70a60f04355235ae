"""Router: the ROUTER socket that all peers connect to. Only this module and its connection limiter use the socket."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from typing import Final

import zmq

from farcall_common.limits import HANDSHAKE_S, MAX_FRAME_BYTES, MAX_HEADER_BYTES
from farcall_common.store.model import PeerKey, PeerKind
from farcall_forwarder.adapters.connection_limiter import ConnectionLimiter
from farcall_forwarder.adapters.readiness import Readiness

ZAP_DOMAIN: Final = b"farcall"

_HIGH_WATER: Final = 1000
#: Few, because messages can be long. Messages for a slow peer wait in a backlog that counts bytes.
_SEND_HIGH_WATER: Final = 64
#: Connections that the kernel holds until they are accepted: when a forwarder dies, all its peers reconnect at once.
_BACKLOG: Final = 4096
_HEARTBEAT_MS: Final = 15_000
#: Bytes that CURVE adds to a frame: nonce, authenticator, flags.
_CURVE_BYTES: Final = 33
_LINGER_MS: Final = 1_000
#: Routing ids that the socket assigns: a zero byte and a random number. A peer with an id of its own choice could
#: impersonate one that has just disconnected.
_ROUTING_ID_BYTES: Final = 5


@dataclasses.dataclass(frozen=True, slots=True)
class Inbound:
    """A received message. ``peer`` is the owner of the connection's CURVE key."""

    routing_id: bytes
    peer: PeerKey
    frames: Sequence[bytes]


@dataclasses.dataclass(frozen=True, slots=True)
class SendFailure:
    """A send that failed: the peer has disconnected, or (``is_slow``) reads too slowly."""

    routing_id: bytes
    is_slow: bool


@dataclasses.dataclass(slots=True)
class _Backlog:
    """Messages that wait for one peer."""

    messages: deque[list[bytes]] = dataclasses.field(default_factory=deque)
    size_bytes: int = 0

    def add(self, frames: list[bytes]) -> None:
        self.messages.append(frames)
        self.size_bytes += sum(map(len, frames))

    def drop_first(self) -> None:
        self.size_bytes -= sum(map(len, self.messages.popleft()))


def pack_peer(peer: PeerKey) -> bytes:
    """A peer as the ZAP user id that marks each of its messages."""
    return f"{peer.kind}:{peer.subject}:{peer.public_key}".encode()


@lru_cache(maxsize=16384)
def _unpack_peer(user_id: str) -> PeerKey:
    kind, subject, public_key = user_id.split(":", 2)  # a Z85 key may have colons
    return PeerKey(public_key, PeerKind(kind), subject)


class Router:
    """A ROUTER socket with CURVE, and a backlog for each slow peer.

    :param port: 0 for any; see :attr:`port`.
    :param backlog_bytes: most bytes that may wait for one peer.
    :param max_connections: most connected peers.
    :param max_connections_of_source: of those, from one address.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        *,
        host: str,
        port: int,
        secret_key: bytes,
        backlog_bytes: int,
        max_connections: int,
        max_connections_of_source: int | None = None,
    ) -> None:
        socket = context.socket(zmq.ROUTER)
        socket.curve_server = True
        socket.curve_secretkey = secret_key
        socket.zap_domain = ZAP_DOMAIN
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        socket.router_mandatory = True
        socket.linger = _LINGER_MS
        socket.rcvhwm = _HIGH_WATER
        socket.sndhwm = _SEND_HIGH_WATER
        socket.maxmsgsize = max(MAX_FRAME_BYTES, MAX_HEADER_BYTES) + _CURVE_BYTES
        socket.handshake_ivl = round(1000 * HANDSHAKE_S)
        socket.setsockopt(zmq.BACKLOG, _BACKLOG)
        socket.heartbeat_ivl = _HEARTBEAT_MS
        socket.heartbeat_timeout = 3 * _HEARTBEAT_MS
        socket.ipv6 = ":" in host
        address = f"[{host}]" if ":" in host else host
        socket.bind(f"tcp://{address}:{port}")
        self.port = int(socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
        self.readiness = Readiness(socket)
        self.limiter = ConnectionLimiter(
            context, socket, limit=max_connections, limit_of_source=max_connections_of_source
        )
        #: Messages that were dropped because their sender chose its own routing id.
        self.dropped = 0
        self._socket = socket
        self._backlog_bytes = backlog_bytes
        self._backlogs: dict[bytes, _Backlog] = {}

    @property
    def has_backlog(self) -> bool:
        """Whether messages wait for a slow peer; call :meth:`retry` then."""
        return bool(self._backlogs)

    def receive(self, *, limit: int) -> list[Inbound]:
        """Receive up to ``limit`` messages. Never waits."""
        received: list[Inbound] = []
        while len(received) < limit:
            try:
                first = self._socket.recv(zmq.DONTWAIT, copy=False)
            except zmq.Again:
                break
            frames = self._socket.recv_multipart(zmq.DONTWAIT) if first.more else []
            routing_id = first.bytes
            if len(routing_id) != _ROUTING_ID_BYTES or routing_id[0]:
                self.dropped += 1
                continue
            if routing_id not in self.limiter.known:
                self.limiter.note_first_message(routing_id, int(first.get(zmq.SRCFD)))
            self.limiter.spoke.add(routing_id)
            received.append(Inbound(routing_id, _unpack_peer(str(first.get("User-Id"))), frames))
        return received

    def send(self, routing_id: bytes, frames: list[bytes]) -> SendFailure | None:
        """Send a message, or add it to the backlog of a slow peer. Never waits."""
        backlog = self._backlogs.get(routing_id)
        if backlog is None:
            try:
                self._socket.send_multipart([routing_id, *frames], zmq.DONTWAIT)
            except zmq.Again:
                backlog = self._backlogs[routing_id] = _Backlog()
            except zmq.ZMQError as error:
                return self._gone(routing_id, error)
            else:
                return None
        backlog.add(frames)
        if backlog.size_bytes <= self._backlog_bytes:
            return None
        self.drop(routing_id)
        return SendFailure(routing_id, is_slow=True)

    def retry(self) -> list[SendFailure]:
        """Send waiting messages, as far as peers take them."""
        failures: list[SendFailure] = []
        for routing_id, backlog in list(self._backlogs.items()):
            try:
                while backlog.messages:
                    self._socket.send_multipart([routing_id, *backlog.messages[0]], zmq.DONTWAIT)
                    backlog.drop_first()
            except zmq.Again:
                continue
            except zmq.ZMQError as error:
                failures.append(self._gone(routing_id, error))
            del self._backlogs[routing_id]
        return failures

    def drop(self, routing_id: bytes) -> None:
        """Drop the backlog of a peer."""
        self._backlogs.pop(routing_id, None)

    def _gone(self, routing_id: bytes, error: zmq.ZMQError) -> SendFailure:
        if error.errno != zmq.EHOSTUNREACH:
            raise error
        return SendFailure(routing_id, is_slow=False)

    def close(self) -> None:
        """Close the socket. Sent messages have another second to leave."""
        self.limiter.close()
        self.readiness.close()
        self._socket.close()
