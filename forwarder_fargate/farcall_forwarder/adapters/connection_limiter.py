"""Connection limits: closes silent, surplus and endless connections of the ROUTER socket.

libzmq ends a connection that does not finish its handshake in time, but has no limit on their number: when the process
has no file descriptor left, its I/O thread spins on the connection that it cannot accept, and no new connection to a
store can be made. So when there are too many connections, the oldest silent ones are closed: a real peer sends a
message within a moment, and gets through a flood of connections that only wait.

An address is known once a peer with a known key has sent a message from it. Silent connections from other addresses
have at most half of the places, and are closed before those from known addresses. So known peers can reconnect, however
large the flood.

A silent peer with a known key costs little except its place. A peer that begins a message of many frames and never ends
it can use up all memory: libzmq keeps the frames, and its limits apply to one frame or to complete messages. ZeroMQ has
no call to close either connection. But it reports the descriptor of each connection and of each message, and the kernel
counts the bytes received.
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

_MONITOR: Final = "inproc://connection-limiter"
#: Time from accept to the first message; an agent sends Hello as soon as its handshake has succeeded.
_FIRST_MESSAGE_S: Final = HANDSHAKE_S + FIRST_MESSAGE_S
_PERIOD_S: Final = 1.0
#: Period of the measurement of received bytes, which takes about 10 ms for 4,000 connections.
_MEASURE_S: Final = 2.0
#: Offset of tcpi_bytes_received, of 8 bytes, in the kernel's tcp_info (linux/tcp.h).
_RECEIVED_AT: Final = 128
_LOG_EVERY_S: Final = 10.0
#: Share of the connections that may be silent ones from unknown addresses: one in this many.
_UNKNOWN_SHARE: Final = 2
#: Known addresses that are remembered, per permitted connection.
_ADDRESSES: Final = 4
#: Descriptors for other uses: stores, health checks, and connections that are accepted before another is closed.
_RESERVE: Final = 2048

_logger = logging.getLogger(__name__)


def allow_connections(wanted: int) -> int:
    """Raise this process' descriptor limit for so many connections. Returns how many the machine permits."""
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


class ConnectionLimiter:
    """Limits the connections of a bound socket, in the event loop that uses the socket.

    :param limit: most connections, with known or unknown keys.
    :param limit_of_source: most connections from one address; None for the same limit.
    :param clock: monotonic seconds.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        monitored: zmq.Socket[bytes],
        *,
        limit: int,
        limit_of_source: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._monitored = monitored
        self._port = int(monitored.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
        self._limit = limit
        self._limit_of_source = limit if limit_of_source is None else limit_of_source
        #: Connections by their source address.
        self._sources: dict[str, set[int]] = {}
        self._source_of: dict[int, str] = {}
        self._limit_of_unknown = max(1, limit // _UNKNOWN_SHARE)
        #: Silent connections from unknown addresses, oldest first.
        self._unknown: dict[int, None] = {}
        #: Addresses that a known peer has sent a message from; the latest last.
        self._known_addresses: OrderedDict[str, None] = OrderedDict()
        self._clock = clock
        self._log_at = clock()
        #: Connections without a message, by descriptor, with the time at which they were accepted; oldest first.
        self._silent: dict[int, float] = {}
        self._speaking: dict[int, bytes] = {}
        #: Routing ids whose first message was noted.
        self.known: set[bytes] = set()
        #: Routing ids that have completed a message recently; and bytes received by then, by connection.
        self.spoke: set[bytes] = set()
        self._unfinished: dict[int, int] = {}
        self._measure_at = clock()
        #: Numbers of closed connections: silent for too long, one too many, and with a message that does not end.
        self.silenced = self.evicted = self.endless = 0
        monitored.monitor(_MONITOR, zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self._monitor = context.socket(zmq.PAIR)
        self._monitor.linger = 0
        self._monitor.rcvhwm = 0  # the I/O thread must never wait for this one
        self._monitor.connect(_MONITOR)
        self._readiness = Readiness(self._monitor)

    @property
    def connections(self) -> int:
        """Number of connections now."""
        return len(self._silent) + len(self._speaking)

    async def run(self) -> None:
        """Enforce the limits until cancelled."""
        while True:
            self._read_events()
            now = self._clock()
            while (oldest := next(iter(self._silent.items()), None)) and now >= oldest[1] + _FIRST_MESSAGE_S:
                self.silenced += 1
                self._close_connection(oldest[0])
            if now >= self._measure_at:
                self._measure_at = now + _MEASURE_S
                self._close_endless()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_PERIOD_S):
                    await self._readiness.wait()

    def note_first_message(self, routing_id: bytes, descriptor: int) -> None:
        """Note the first message of a connection."""
        self._read_events()  # so that it counts for this connection, not for an earlier one with the same descriptor
        if self._silent.pop(descriptor, None) is not None:
            self._speaking[descriptor] = routing_id
            self.known.add(routing_id)
            self._note_known_address(self._source_of.get(descriptor))

    def _read_events(self) -> None:
        """Process the socket monitor's events: accepted and closed connections."""
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
                    # The oldest silent one of this address: at least the new connection is silent.
                    self._make_room(next(each for each in self._silent if each in source))
                elif len(self._unknown) > self._limit_of_unknown:
                    self._make_room(next(iter(self._unknown)))
                elif self.connections > self._limit:
                    self._make_room(next(iter(self._unknown or self._silent)))
            else:
                self._forget_source(descriptor)
                self._silent.pop(descriptor, None)
                self._unknown.pop(descriptor, None)
                self._unfinished.pop(descriptor, None)
                if routing_id := self._speaking.pop(descriptor, None):
                    self.known.discard(routing_id)

    def _note_source(self, descriptor: int) -> set[int]:
        """Note the source address of a connection; returns all connections of that address."""
        self._forget_source(descriptor)
        self._unknown.pop(descriptor, None)
        address = _peer_address(descriptor)
        if address not in self._known_addresses:
            self._unknown[descriptor] = None
        if not address:
            return {descriptor}
        self._source_of[descriptor] = address
        of_source = self._sources.setdefault(address, set())
        of_source.add(descriptor)
        return of_source

    def _note_known_address(self, address: str | None) -> None:
        """Note an address as known: an authenticated peer has sent a message from it."""
        if address is None:
            return
        self._known_addresses[address] = None
        self._known_addresses.move_to_end(address)
        if len(self._known_addresses) > _ADDRESSES * self._limit:
            self._known_addresses.popitem(last=False)
        for descriptor in self._sources.get(address, ()):
            self._unknown.pop(descriptor, None)

    def _forget_source(self, descriptor: int) -> None:
        address = self._source_of.pop(descriptor, None)
        if address is None:
            return
        self._sources[address].discard(descriptor)
        if not self._sources[address]:
            del self._sources[address]

    def _make_room(self, descriptor: int) -> None:
        self.evicted += 1
        self._close_connection(descriptor)
        if self._clock() >= self._log_at:
            self._log_at = self._clock() + _LOG_EVERY_S
            _logger.warning("too many connections", extra={"limit": self._limit, "evicted": self.evicted})

    def _close_endless(self) -> None:
        spoke, self.spoke = self.spoke, set()
        for descriptor in [*self._silent, *self._speaking]:
            received_bytes = _received_bytes(descriptor)
            if self._speaking.get(descriptor) in spoke:
                self._unfinished[descriptor] = received_bytes
            elif received_bytes - self._unfinished.get(descriptor, 0) > MAX_ENVELOPE_BYTES:
                _logger.warning("a message without an end", extra={"received_bytes": received_bytes})
                self.endless += 1
                self._close_connection(descriptor)

    def _close_connection(self, descriptor: int) -> None:
        """Shut a connection down. To libzmq it looks closed by the other side."""
        self._silent.pop(descriptor, None)
        self._unknown.pop(descriptor, None)
        self._forget_source(descriptor)
        # If the descriptor belongs to another connection by now, that one reconnects, if it was to this port at all.
        with contextlib.suppress(OSError), socket.fromfd(descriptor, socket.AF_INET, socket.SOCK_STREAM) as connection:
            name = connection.getsockname()
            if isinstance(name, tuple) and name[1] == self._port:
                connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Stop monitoring. To be called before the socket is closed."""
        self._readiness.close()
        self._monitored.disable_monitor()
        self._monitor.close()


def _peer_address(descriptor: int) -> str:
    """Source address of a connection; empty if it is closed by now."""
    try:
        with socket.fromfd(descriptor, socket.AF_INET, socket.SOCK_STREAM) as connection:
            name = connection.getpeername()
    except OSError:
        return ""
    return str(name[0]) if isinstance(name, tuple) else ""


def _received_bytes(descriptor: int) -> int:
    """Bytes that the kernel has received on a connection; 0 if it does not report them, or the connection is closed."""
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
