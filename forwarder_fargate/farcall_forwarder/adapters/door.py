"""How many connections a forwarder has, and that none of them stays without a word.

libzmq ends a connection that does not finish its handshake in time, but counts none: when the process has no descriptor
left, its I/O thread spins on the one that it cannot accept, and no store can be connected to anew. So whoever has said
nothing yet makes room when there are too many, the oldest first: a peer greets within a moment, and so gets through a
crowd of others that only wait.

An address that a peer with a known key has spoken from is known. Silent connections from other addresses have half of
the places at most, and make room before those from known ones. So whoever was here gets in again, whatever the crowd.

A peer whose key is known and who then says nothing costs little, except its place. One that begins a message of many
frames and never ends it costs all memory there is: libzmq keeps the frames, and its limits are for one frame or for
whole messages. ZeroMQ offers no way to send either away; but it tells the descriptor of each connection, and of each
message, and the kernel knows how much came in.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import socket
import sys
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

import zmq
from zmq.utils.monitor import parse_monitor_message

from farcall_common.limits import FIRST_MESSAGE_S, HANDSHAKE_S, MAX_ENVELOPE_BYTES
from farcall_forwarder.adapters.readiness import Readiness

__all__ = ["Door", "allow_connections"]

_MONITOR: Final = "inproc://door"
#: From being accepted to the first message; an agent greets as soon as its handshake has succeeded.
_GREETING_S: Final = HANDSHAKE_S + FIRST_MESSAGE_S
_PERIOD_S: Final = 1.0
#: Asking the kernel about 4,000 connections takes about 10 ms.
_MEASURE_S: Final = 2.0
#: Where the kernel's tcp_info (linux/tcp.h) has tcpi_bytes_received, of 8 bytes.
_RECEIVED_AT: Final = 128
_LOG_EVERY_S: Final = 10.0
#: Of all connections, how many may be silent ones from addresses that no peer has spoken from: an N-th.
_STRANGERS: Final = 2
#: Addresses that are remembered, for each connection that there may be.
_ADDRESSES: Final = 4
#: Descriptors beside those of connections: stores, health checks, and who comes before another could be cut.
_RESERVE: Final = 2048

_logger = logging.getLogger(__name__)


def allow_connections(wanted: int) -> int:
    """Let this process have so many connections, as far as the machine permits. Returns how many it may have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return wanted
    needed = wanted + _RESERVE
    if soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    allowed = min(wanted, max(soft - _RESERVE, soft // 2))
    if allowed < wanted:
        _logger.warning("the machine permits fewer connections", extra={"wanted": wanted, "allowed": allowed})
    return allowed


class Door:
    """Watches the connections of a bound socket, in the event loop that uses the socket.

    :param limit: connections, with or without a key that we know.
    :param limit_of_source: of those, connections from one address; None for as many.
    :param clock: monotonic seconds.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        watched: zmq.Socket[bytes],
        *,
        limit: int,
        limit_of_source: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._watched = watched
        self._port = int(watched.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
        self._limit = limit
        self._limit_of_source = limit if limit_of_source is None else limit_of_source
        #: Connections by the address that they come from.
        self._sources: dict[str, set[int]] = {}
        self._source_of: dict[int, str] = {}
        self._limit_of_strangers = max(1, limit // _STRANGERS)
        #: Silent connections from addresses that are not known, oldest first.
        self._strangers: dict[int, None] = {}
        #: Addresses that a peer has spoken from; the latest last.
        self._known_addresses: OrderedDict[str, None] = OrderedDict()
        self._clock = clock
        self._log_at = clock()
        #: Connections that have said nothing, by descriptor, with the time at which they were accepted; oldest first.
        self._silent: dict[int, float] = {}
        self._speaking: dict[int, bytes] = {}
        #: Routing ids whose first message has been noticed.
        self.known: set[bytes] = set()
        #: Routing ids that have completed a message lately. The others' connections, with what had come in by then.
        self.spoke: set[bytes] = set()
        self._unfinished: dict[int, int] = {}
        self._measure_at = clock()
        #: Connections that were cut because they said nothing for too long, while there were too many, and because they
        #: did not come to an end.
        self.silenced = self.crowded_out = self.endless = 0
        watched.monitor(_MONITOR, zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self._monitor = context.socket(zmq.PAIR)
        self._monitor.linger = 0
        self._monitor.rcvhwm = 0  # the I/O thread must never wait for us
        self._monitor.connect(_MONITOR)
        self._readiness = Readiness(self._monitor)

    @property
    def connections(self) -> int:
        """How many there are now."""
        return len(self._silent) + len(self._speaking)

    async def run(self) -> None:
        """Keep the door until cancelled."""
        while True:
            self._look()
            now = self._clock()
            while (oldest := next(iter(self._silent.items()), None)) and now >= oldest[1] + _GREETING_S:
                self.silenced += 1
                self._cut(oldest[0])
            if now >= self._measure_at:
                self._measure_at = now + _MEASURE_S
                self._cut_endless()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_PERIOD_S):
                    await self._readiness.wait()

    def heard(self, routing_id: bytes, descriptor: int) -> None:
        """The first message of a connection came in."""
        self._look()  # so that it counts for this connection, and not for a former one with the same descriptor
        if self._silent.pop(descriptor, None) is not None:
            self._speaking[descriptor] = routing_id
            self.known.add(routing_id)
            self._welcome_address(self._source_of.get(descriptor))

    def _look(self) -> None:
        """Take in who came and who went."""
        while True:
            try:
                event = parse_monitor_message(self._monitor.recv_multipart(zmq.DONTWAIT))
            except zmq.Again:
                return
            descriptor = event["value"]
            if event["event"] == zmq.EVENT_ACCEPTED:
                self._silent[descriptor] = self._clock()
                source = self._note_source(descriptor)
                if len(source) > self._limit_of_source:
                    # The oldest of them that has said nothing: at least the new one has not.
                    self._make_room(next(each for each in self._silent if each in source))
                elif len(self._strangers) > self._limit_of_strangers:
                    self._make_room(next(iter(self._strangers)))
                elif self.connections > self._limit:
                    self._make_room(next(iter(self._strangers or self._silent)))
            else:
                self._forget_source(descriptor)
                self._silent.pop(descriptor, None)
                self._strangers.pop(descriptor, None)
                self._unfinished.pop(descriptor, None)
                if routing_id := self._speaking.pop(descriptor, None):
                    self.known.discard(routing_id)

    def _note_source(self, descriptor: int) -> set[int]:
        """The connections that come from where this one does, with it."""
        self._forget_source(descriptor)
        self._strangers.pop(descriptor, None)
        address = _peer_address(descriptor)
        if address not in self._known_addresses:
            self._strangers[descriptor] = None
        if not address:
            return {descriptor}
        self._source_of[descriptor] = address
        of_source = self._sources.setdefault(address, set())
        of_source.add(descriptor)
        return of_source

    def _welcome_address(self, address: str | None) -> None:
        """A peer that may speak has done so: from there, others may come as well."""
        if address is None:
            return
        self._known_addresses[address] = None
        self._known_addresses.move_to_end(address)
        if len(self._known_addresses) > _ADDRESSES * self._limit:
            self._known_addresses.popitem(last=False)
        for descriptor in self._sources.get(address, ()):
            self._strangers.pop(descriptor, None)

    def _forget_source(self, descriptor: int) -> None:
        address = self._source_of.pop(descriptor, None)
        if address is None:
            return
        self._sources[address].discard(descriptor)
        if not self._sources[address]:
            del self._sources[address]

    def _make_room(self, descriptor: int) -> None:
        self.crowded_out += 1
        self._cut(descriptor)
        if self._clock() >= self._log_at:
            self._log_at = self._clock() + _LOG_EVERY_S
            _logger.warning("too many connections", extra={"limit": self._limit, "crowded_out": self.crowded_out})

    def _cut_endless(self) -> None:
        spoke, self.spoke = self.spoke, set()
        for descriptor in [*self._silent, *self._speaking]:
            received_bytes = _received_bytes(descriptor)
            if self._speaking.get(descriptor) in spoke:
                self._unfinished[descriptor] = received_bytes
            elif received_bytes - self._unfinished.get(descriptor, 0) > MAX_ENVELOPE_BYTES:
                _logger.warning("a message without an end", extra={"received_bytes": received_bytes})
                self.endless += 1
                self._cut(descriptor)

    def _cut(self, descriptor: int) -> None:
        """End a connection. libzmq finds it ended by the other side."""
        self._silent.pop(descriptor, None)
        self._strangers.pop(descriptor, None)
        self._forget_source(descriptor)
        # Should the descriptor be another connection's by now, that one is made anew, if it was to this port at all.
        with contextlib.suppress(OSError), socket.fromfd(descriptor, socket.AF_INET, socket.SOCK_STREAM) as connection:
            name = connection.getsockname()
            if isinstance(name, tuple) and name[1] == self._port:
                connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Stop watching; before the socket is closed."""
        self._readiness.close()
        self._watched.disable_monitor()
        self._monitor.close()


def _peer_address(descriptor: int) -> str:
    """Where a connection comes from; empty if it is closed by now."""
    try:
        with socket.fromfd(descriptor, socket.AF_INET, socket.SOCK_STREAM) as connection:
            name = connection.getpeername()
    except OSError:
        return ""
    return str(name[0]) if isinstance(name, tuple) else ""


def _received_bytes(descriptor: int) -> int:
    """How much the kernel has taken in on a connection; 0 where it does not say, or if that was closed meanwhile."""
    if not hasattr(socket, "TCP_INFO"):
        return 0
    try:
        connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM, fileno=descriptor)
    except OSError:
        return 0
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RECEIVED_AT + 8)
    except OSError:
        return 0
    finally:
        connection.detach()
    return int.from_bytes(info[_RECEIVED_AT:], sys.byteorder)
