"""Authentication of connections: answers the ZeroMQ Authentication Protocol (RFC 27) without delaying other peers."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final

import zmq
from zmq.utils import z85

from farcall_common.errors import Unavailable
from farcall_common.store.model import PeerKey, PeerKind
from farcall_common.store.ports import Endpoints, Registry
from farcall_forwarder.adapters.readiness import Readiness
from farcall_forwarder.adapters.router import ZAP_DOMAIN, pack_peer

_ADDRESS: Final = "inproc://zeromq.zap.01"
_VERSION: Final = b"1.0"
_ALLOWED: Final = (b"200", b"OK")
_TRY_AGAIN: Final = (b"300", b"key store unavailable")
_REFUSED: Final = (b"400", b"unknown key")
_KEY_BYTES: Final = 32
#: Look-ups under way at once, and most keys in one of them.
_LOOKUPS: Final = 2
_LOOKUP_KEYS: Final = 64
#: Look-ups are repeated here, because a failed handshake costs the peer ten seconds.
_LOOKUP_TIMEOUT_S: Final = 8.0
_PAUSE_S: Final = 0.25
#: A refused key is looked up again only after this time; it may have been registered meanwhile.
_REFUSAL_S: Final = 1.0
_MAX_REFUSALS: Final = 10_000
#: Shortest period between two log lines about refused keys.
_LOG_EVERY_S: Final = 10.0

_logger = logging.getLogger(__name__)


def find_peers(queue: Registry, endpoints: Endpoints, public_keys: Sequence[str]) -> Mapping[str, PeerKey | None]:
    """Look up the owners of CURVE keys (Z85); None for an unknown key. Keys that cannot be looked up now are left out.
    Blocks.

    The queue has the recently admitted keys. The database has the keys of all endpoints, also while the queue is
    unavailable.
    """
    found: dict[str, PeerKey | None] = {}
    is_sure = True
    try:
        found.update(queue.find_peers(public_keys))
    except Unavailable:
        is_sure = False
    if unknown := [key for key in public_keys if key not in found]:
        try:
            owners = endpoints.find_endpoints_by_key(unknown)
        except Unavailable:
            return found
        for key in unknown:
            if key in owners:
                found[key] = PeerKey(key, PeerKind.AGENT, owners[key])
            elif is_sure:
                found[key] = None
    return found


@dataclasses.dataclass(frozen=True, slots=True)
class _Handshake:
    """A handshake that waits for the look-up of its key, until the monotonic second ``until``."""

    connection: bytes
    request_id: bytes
    public_key: str
    until: float


class Authenticator:
    """Answers the handshakes of all sockets of a context.

    Keys that arrive during a look-up form the next one.

    :param lookup: finds the owners of keys (Z85), as :func:`find_peers` does.
    :param clock: monotonic seconds.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        *,
        lookup: Callable[[Sequence[str]], Awaitable[Mapping[str, PeerKey | None]]],
        clock: Callable[[], float],
    ) -> None:
        self.refused = 0
        self._lookup = lookup
        self._clock = clock
        self._refusals: OrderedDict[str, float] = OrderedDict()
        self._log_at = clock()
        self._unlogged = 0
        self._waiting: deque[_Handshake] = deque()
        self._is_filled = asyncio.Event()
        self._socket = context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self._socket.bind(_ADDRESS)
        self._readiness = Readiness(self._socket)

    async def run(self) -> None:
        """Answer until cancelled."""
        async with asyncio.TaskGroup() as loops:
            loops.create_task(self._receive())
            for _ in range(_LOOKUPS):
                loops.create_task(self._look_up())

    async def _receive(self) -> None:
        while True:
            try:
                request = self._socket.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                await self._readiness.wait()
            else:
                self._handle_request(request)

    def _handle_request(self, request: list[bytes]) -> None:
        """Answer a handshake at once, or let it wait for the look-up of its key."""
        # The connection within the context and an empty frame come first, then the fields of RFC 27.
        connection, _, version, request_id, domain, _, _, mechanism, *credentials = request
        is_curve = (version, domain, mechanism) == (_VERSION, ZAP_DOMAIN, b"CURVE")
        if not is_curve or len(credentials) != 1 or len(credentials[0]) != _KEY_BYTES:
            self._answer(connection, request_id, _REFUSED)
            return
        now = self._clock()
        public_key = z85.encode(credentials[0]).decode()
        if self._refusals.get(public_key, now) > now:
            self._answer(connection, request_id, self._refuse(public_key))
        else:
            self._wait(_Handshake(connection, request_id, public_key, now + _LOOKUP_TIMEOUT_S))

    def _wait(self, handshake: _Handshake) -> None:
        self._waiting.append(handshake)
        self._is_filled.set()

    async def _look_up(self) -> None:
        while True:
            await self._is_filled.wait()
            while self._waiting:
                batch = [self._waiting.popleft() for _ in range(min(_LOOKUP_KEYS, len(self._waiting)))]
                found = await self._lookup([handshake.public_key for handshake in batch])
                for handshake in batch:
                    self._decide(handshake, found)
            self._is_filled.clear()

    def _decide(self, handshake: _Handshake, found: Mapping[str, PeerKey | None]) -> None:
        public_key, now = handshake.public_key, self._clock()
        if peer := found.get(public_key):
            self._refusals.pop(public_key, None)
            self._answer(handshake.connection, handshake.request_id, _ALLOWED, pack_peer(peer))
        elif public_key in found:
            self._refusals[public_key] = now + _REFUSAL_S
            self._refusals.move_to_end(public_key)
            if len(self._refusals) > _MAX_REFUSALS:
                self._refusals.popitem(last=False)
            self._answer(handshake.connection, handshake.request_id, self._refuse(public_key))
        elif now >= handshake.until:
            _logger.warning("a peer cannot be looked up: a store does not answer", extra={"public_key": public_key})
            self._answer(handshake.connection, handshake.request_id, _TRY_AGAIN)
        else:  # A store does not report when it is available again, so that only time can pass.
            asyncio.get_running_loop().call_later(_PAUSE_S, self._wait, handshake)

    def _answer(self, connection: bytes, request_id: bytes, status: tuple[bytes, bytes], user_id: bytes = b"") -> None:
        self._socket.send_multipart([connection, b"", _VERSION, request_id, *status, user_id, b""])
        self._readiness.poke()

    def _refuse(self, public_key: str) -> tuple[bytes, bytes]:
        self.refused += 1
        self._unlogged += 1
        if self._clock() >= self._log_at:
            _logger.warning("refused unknown keys", extra={"refused": self._unlogged, "public_key": public_key})
            self._log_at, self._unlogged = self._clock() + _LOG_EVERY_S, 0
        return _REFUSED

    def close(self) -> None:
        """Close the socket, after :meth:`run` has ended."""
        self._readiness.close()
        self._socket.close()
