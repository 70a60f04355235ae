"""The one socket that all peers connect to. This module makes it, and nobody else but its door touches it."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from typing import Final

import zmq

from farcall_common.limits import HANDSHAKE_S, MAX_FRAME_BYTES, MAX_HEADER_BYTES
from farcall_common.store.model import PeerKey, PeerKind
from farcall_forwarder.adapters.door import Door
from farcall_forwarder.adapters.readiness import Readiness

__all__ = ["ZAP_DOMAIN", "Inbound", "Router", "Trouble", "pack_peer"]

ZAP_DOMAIN: Final = b"farcall"

_HIGH_WATER: Final = 1000
#: Few, because messages can be long; what a slow peer leaves waits in our own backlog, which counts bytes.
_SEND_HIGH_WATER: Final = 64
#: Connections that the kernel holds until they are looked at: when a forwarder dies, all its peers come at once.
_BACKLOG: Final = 4096
_HEARTBEAT_MS: Final = 15_000
#: What CURVE adds to a frame: nonce, authenticator, flags.
_CURVE_BYTES: Final = 33
_LINGER_MS: Final = 1_000
#: Routing ids that the socket makes itself: a zero byte and a random number. A peer that brings its own could pose as
#: one that has just left.
_ROUTING_ID_BYTES: Final = 5


@dataclasses.dataclass(frozen=True, slots=True)
class Inbound:
    """A message as it came in. ``peer`` is whom the CURVE key of the connection belongs to."""

    routing_id: bytes
    peer: PeerKey
    frames: Sequence[bytes]


@dataclasses.dataclass(frozen=True, slots=True)
class Trouble:
    """A peer that could not be sent to: it is gone, or (``is_behind``) reads too slowly."""

    routing_id: bytes
    is_behind: bool


@dataclasses.dataclass(slots=True)
class _Backlog:
    """What waits for one peer."""

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
    """A ROUTER socket with CURVE, and what waits for peers that read slowly.

    :param port: 0 for any; see :attr:`port`.
    :param backlog_bytes: how much may wait for one peer.
    :param max_connections: how many peers may be connected.
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
        self.door = Door(context, socket, limit=max_connections, limit_of_source=max_connections_of_source)
        #: Messages that were dropped because their sender chose its own routing id.
        self.dropped = 0
        self._socket = socket
        self._backlog_bytes = backlog_bytes
        self._backlogs: dict[bytes, _Backlog] = {}

    @property
    def has_backlog(self) -> bool:
        """Whether something waits for a slow peer; :meth:`retry` then."""
        return bool(self._backlogs)

    def receive(self, *, limit: int) -> list[Inbound]:
        """What has come in, up to ``limit`` messages. Never waits."""
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
            if routing_id not in self.door.known:
                self.door.heard(routing_id, int(first.get(zmq.SRCFD)))
            self.door.spoke.add(routing_id)
            received.append(Inbound(routing_id, _unpack_peer(str(first.get("User-Id"))), frames))
        return received

    def send(self, routing_id: bytes, frames: list[bytes]) -> Trouble | None:
        """Send, or keep for later when the peer reads slowly. Never waits."""
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
        return Trouble(routing_id, is_behind=True)

    def retry(self) -> list[Trouble]:
        """Send what waits, as far as peers take it."""
        troubles: list[Trouble] = []
        for routing_id, backlog in list(self._backlogs.items()):
            try:
                while backlog.messages:
                    self._socket.send_multipart([routing_id, *backlog.messages[0]], zmq.DONTWAIT)
                    backlog.drop_first()
            except zmq.Again:
                continue
            except zmq.ZMQError as error:
                troubles.append(self._gone(routing_id, error))
            del self._backlogs[routing_id]
        return troubles

    def drop(self, routing_id: bytes) -> None:
        """Forget what waits for a peer."""
        self._backlogs.pop(routing_id, None)

    def _gone(self, routing_id: bytes, error: zmq.ZMQError) -> Trouble:
        if error.errno != zmq.EHOSTUNREACH:
            raise error
        return Trouble(routing_id, is_behind=False)

    def close(self) -> None:
        """Close the socket; what was sent still has a second to leave."""
        self.door.close()
        self.readiness.close()
        self._socket.close()
