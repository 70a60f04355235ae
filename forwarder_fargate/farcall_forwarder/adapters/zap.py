"""Who may connect: the ZeroMQ Authentication Protocol (RFC 27), answered without holding up other peers."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Final

import zmq
from zmq.utils import z85

from farcall_common.errors import Unavailable
from farcall_common.store.model import PeerKey, PeerKind
from farcall_common.store.ports import Queue, Records
from farcall_forwarder.adapters.readiness import Readiness
from farcall_forwarder.adapters.router import ZAP_DOMAIN, pack_peer

__all__ = ["Authenticator", "find_peer"]

_ADDRESS: Final = "inproc://zeromq.zap.01"
_VERSION: Final = b"1.0"
_ALLOWED: Final = (b"200", b"OK")
_TRY_AGAIN: Final = (b"300", b"the store of keys is away")
_REFUSED: Final = (b"400", b"unknown key")
_KEY_BYTES: Final = 32
#: We try again before a peer has to: a handshake that fails costs it ten seconds.
_PATIENCE_S: Final = 8.0
_PAUSE_S: Final = 0.25
#: A refused key is not looked up again for this long; it may have been registered meanwhile.
_REFUSAL_S: Final = 1.0
_MAX_REFUSALS: Final = 10_000
#: The log says at most this often that somebody was refused.
_LOG_EVERY_S: Final = 10.0

_logger = logging.getLogger(__name__)


def find_peer(queue: Queue, records: Records, public_key: str) -> PeerKey | None:
    """Whom a CURVE key (Z85) speaks for. Blocks.

    The queue knows who was admitted lately; the database knows the keys of all endpoints, also when the queue is away.

    :raises Unavailable: when that cannot be told now.
    """
    missed: Unavailable | None = None
    try:
        if peer := queue.find_peer(public_key):
            return peer
    except Unavailable as error:
        missed = error
    if endpoint_id := records.find_endpoint_by_key(public_key):
        return PeerKey(public_key, PeerKind.AGENT, endpoint_id)
    if missed:
        raise missed
    return None


class Authenticator:
    """Answers the handshakes of all sockets of a context.

    :param lookup: finds the owner of a key (Z85), or None. May raise Unavailable: the peer then tries again.
    :param clock: monotonic seconds.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        *,
        lookup: Callable[[str], Awaitable[PeerKey | None]],
        clock: Callable[[], float],
    ) -> None:
        self.refused = 0
        self._lookup = lookup
        self._clock = clock
        self._refusals: OrderedDict[str, float] = OrderedDict()
        self._log_at = clock()
        self._unlogged = 0
        self._socket = context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self._socket.bind(_ADDRESS)
        self._readiness = Readiness(self._socket)

    async def run(self) -> None:
        """Answer until cancelled."""
        async with asyncio.TaskGroup() as lookups:
            while True:
                try:
                    request = self._socket.recv_multipart(zmq.DONTWAIT)
                except zmq.Again:
                    await self._readiness.wait()
                else:
                    lookups.create_task(self._answer(request))

    async def _answer(self, request: list[bytes]) -> None:
        # The connection within the context and an empty frame come first, then what RFC 27 says.
        connection, _, version, request_id, domain, _, _, mechanism, *credentials = request
        user_id = b""
        is_curve = (version, domain, mechanism) == (_VERSION, ZAP_DOMAIN, b"CURVE")
        if not is_curve or len(credentials) != 1 or len(credentials[0]) != _KEY_BYTES:
            code, text = _REFUSED
        else:
            code, text, user_id = await self._judge(z85.encode(credentials[0]).decode())
        self._socket.send_multipart([connection, b"", _VERSION, request_id, code, text, user_id, b""])
        self._readiness.poke()

    async def _judge(self, public_key: str) -> tuple[bytes, bytes, bytes]:
        now = self._clock()
        if self._refusals.get(public_key, now) > now:
            return *self._refuse(public_key), b""
        try:
            peer = await self._find(public_key, until=now + _PATIENCE_S)
        except Unavailable as error:
            _logger.warning("a peer cannot be looked up: %s", error)
            return *_TRY_AGAIN, b""
        if peer is None:
            self._refusals[public_key] = now + _REFUSAL_S
            self._refusals.move_to_end(public_key)
            if len(self._refusals) > _MAX_REFUSALS:
                self._refusals.popitem(last=False)
            return *self._refuse(public_key), b""
        self._refusals.pop(public_key, None)
        return *_ALLOWED, pack_peer(peer)

    async def _find(self, public_key: str, *, until: float) -> PeerKey | None:
        while True:
            try:
                return await self._lookup(public_key)
            except Unavailable:
                if self._clock() >= until:
                    raise
            # Nothing to wait for but time: a store does not say when it is back.
            await asyncio.sleep(_PAUSE_S)

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
