"""Direct edges: values that go from one worker directly to another, without the manager.

Two workers are connected by a Unix socket pair that the manager made, and by a ledger (:mod:`.arenas`). A message is a
:class:`Value` in MessagePack behind its length, then the value: its bytes if it is small, else its place in an arena
of the sender. The descriptor of an arena goes with the first value in it.

A sender never waits. What cannot be sent (the other worker is gone, or does not read) is reported to the manager,
which has the value anyway, and sends it as it sends all others. A receiver waits for its values and for the manager at
once: the manager may want the call back.

What arrives was written by the process of a task, as everything else in a socket of a worker; the submitter is the
same.
"""

from __future__ import annotations

import os
import select
import socket
import struct
from collections.abc import Collection, Iterable, Sequence
from typing import Final

import msgspec

from farcall_endpoint.contracts.manager_worker import ITSELF, MANAGER, Delivery
from farcall_endpoint.host.shared_memory import ANCILLARY_BYTES, MemoryFile, SharedBytes, ancillary, descriptors_of
from farcall_endpoint.worker.arenas import Arenas, Borrowed, Ledger, Piece, Place, Placed, new_ledger

INLINE_BYTES: Final = 32 * 1024
"""A larger value goes into an arena. A packet must fit into the socket's send buffer together with a few others."""
_MAX_HEADER_BYTES: Final = 4096
_MOST_EARLY: Final = 256
"""Maximum number of values that arrive before a call waits for them. A socket has room for fewer such orders."""
_LENGTH: Final = struct.Struct("<I")
_FLAGS: Final = int(socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)  # plain numbers: enums are slow to combine
_RECEIVE_FLAGS: Final = int(socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC)

Outgoing = bytes | Placed
Incoming = bytes | memoryview
Key = tuple[str, int]
"""Id of a call, and number of its input."""


class Value(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The header of a message: a value is input ``number`` of a call. ``place``: in an arena; None: behind the
    header."""

    task_id: str
    number: int
    place: Place | None = None


_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(Value).decode
_MALFORMED: Final = (msgspec.MsgspecError, struct.error, ValueError, OverflowError, RecursionError)


class Edge:
    """A connection to another worker. Owned by one thread.

    :param end: this worker's socket, which this object closes.
    :param first: which end of the ledger this is.
    :raises ValueError: if the ledger is none.
    """

    def __init__(self, end: socket.socket, ledger: MemoryFile, *, first: bool) -> None:
        self.ledger = Ledger(ledger, first=first)
        self._socket = end
        self._borrowed = Borrowed(self.ledger.own)
        self._sent: dict[int, int] = {}  # by slot: the arena whose descriptor the other worker has
        self._buffer = bytearray(_LENGTH.size + _MAX_HEADER_BYTES + INLINE_BYTES)
        self._view = memoryview(self._buffer)

    def fileno(self) -> int:
        """For selectors."""
        return self._socket.fileno()

    def close(self) -> None:
        """Close the connection; the other end notices."""
        self._socket.close()

    def send(self, key: Key, value: Outgoing) -> bool:
        """Send a value, without waiting. Whether it was sent: not if the other worker is gone, or does not read."""
        try:
            if isinstance(value, bytes):
                header = _encode(Value(*key))
                self._socket.send(b"".join((_LENGTH.pack(len(header)), header, value)), _FLAGS)
                return True
            place = value.place
            header = _encode(Value(*key, place))
            message = [_LENGTH.pack(len(header)), header]
            if self._sent.get(place.slot) == place.arena:
                self._socket.send(b"".join(message), _FLAGS)
                return True
            self._socket.sendmsg(message, ancillary([value.arena.memory]), _FLAGS)
        except OSError:
            return False
        if place.slot >= 0:
            self._sent[place.slot] = place.arena
        return True

    def receive(self) -> tuple[Key, Incoming] | None:
        """The next value; None when the other worker is gone, or has sent what is no message.

        :raises BlockingIOError: if there is none now.
        """
        into = [self._buffer]
        try:
            size, received, _, _ = self._socket.recvmsg_into(into, ANCILLARY_BYTES, _RECEIVE_FLAGS)
        except ConnectionResetError:  # it has ended before it read everything; what it sent is still here
            size, received, _, _ = self._socket.recvmsg_into(into, ANCILLARY_BYTES, _RECEIVE_FLAGS)
        if size == 0:
            return None
        memories = descriptors_of(received) if received else ()
        try:
            end = _LENGTH.size + _LENGTH.unpack_from(self._buffer)[0]
            value = _decode(self._view[_LENGTH.size : end])
            key = (value.task_id, value.number)
            if value.place is None:
                return key, bytes(self._view[end:size])
            return key, self._borrowed.view(value.place, memories[0] if memories else None)
        except _MALFORMED:
            return None


class Edges:
    """The direct edges of a worker, and the values that have arrived. Owned by one thread.

    :param manager: what becomes readable when the manager says something.
    """

    def __init__(self, manager: int) -> None:
        self.arenas = Arenas()
        self.has_buffers = False
        """Whether the running task has asked for one."""
        self._manager = manager
        self._manager_ledger: Ledger | None = None
        self._for_manager: Placed | None = None
        self._own: tuple[Ledger, Borrowed] | None = None  # of values that stay here
        self._edges: dict[int, Edge] = {}
        self._by_descriptor: dict[int, int] = {}
        self._arrived: dict[Key, Incoming] = {}
        self._poll = select.poll()
        self._poll.register(manager, select.POLLIN)

    def add(self, number: int, edge: Edge) -> None:
        """A connection that the manager made."""
        self.remove(number)
        self._edges[number] = edge
        self._by_descriptor[edge.fileno()] = number
        self._poll.register(edge.fileno(), select.POLLIN)

    def remove(self, number: int) -> None:
        """The other worker is gone, or its connection cannot be used any more."""
        edge = self._edges.pop(number, None)
        if edge is None:
            return
        del self._by_descriptor[edge.fileno()]
        self._poll.unregister(edge.fileno())
        self.arenas.lost(edge.ledger)
        edge.close()

    def connect(self, number: int, memories: Sequence[MemoryFile], *, first: bool) -> None:
        """The same, from the descriptors of a :class:`~farcall_endpoint.contracts.manager_worker.Peer`."""
        if number == MANAGER:
            [ledger] = memories
            self._manager_ledger = Ledger(ledger, first=first)
            return
        end, ledger = memories
        self.add(number, Edge(socket.socket(fileno=os.dup(end.descriptor)), ledger, first=first))

    def buffer(self, size: int) -> memoryview:
        """Memory for a value of the running task; ordinary memory for one that is sent in its message.

        :raises ValueError: if there is no room of that size.
        """
        if size < 0:
            raise ValueError(f"a buffer of {size} bytes")
        if size <= INLINE_BYTES:
            return memoryview(bytearray(size))
        self.has_buffers = True
        try:
            return self.arenas.buffer(size)
        except (OSError, OverflowError, ValueError) as error:
            raise ValueError(f"There is no room for a buffer of {size} bytes: {error}.") from error

    def outgoing(self, pieces: Sequence[Piece]) -> Outgoing:
        """A value to send. If it is in place, the caller drops it and its pieces, and then calls
        :meth:`~Arenas.settle`."""
        if sum(map(len, pieces)) <= INLINE_BYTES:
            return b"".join(pieces)
        return self.arenas.place(pieces)

    def deliver(self, value: Outgoing, deliveries: Iterable[Delivery]) -> list[int]:
        """Send a value over connections. Returns the positions of deliveries that failed."""
        failed: list[int] = []
        for position, each in enumerate(deliveries):
            if each.peer == ITSELF:
                self._arrived[each.task_id, each.number] = value if isinstance(value, bytes) else self._stays(value)
                continue
            edge = self._edges.get(each.peer)
            if edge is None or not edge.send((each.task_id, each.number), value):
                failed.append(position)
            elif isinstance(value, Placed):
                self.arenas.lend(value, edge.ledger)
        return failed

    def _stays(self, value: Placed) -> memoryview:
        """A value for a later call of this worker, which reads it where it is, as other workers do."""
        try:
            if self._own is None:
                memory = new_ledger()
                self._own = Ledger(memory, first=True), Borrowed(Ledger(memory, first=False).own)
            ledger, borrowed = self._own
            view = borrowed.view(value.place, value.arena.memory)
        except OSError:  # no room for open files or mappings
            return value.copy()
        self.arenas.lend(value, ledger)
        return view

    def for_manager(self, value: Placed) -> tuple[SharedBytes, tuple[int, int] | None]:
        """A value for the manager, and its arena if that is returned: then call :meth:`lent_to_manager` when it was
        sent."""
        arena = value.arena
        if self._manager_ledger is None or arena.slot < 0:
            arena.is_reusable = False
            return SharedBytes(arena.memory, value.start, value.size), None
        self._for_manager = value
        return SharedBytes(arena.memory, value.start, value.size), (arena.number, arena.slot)

    def lent_to_manager(self) -> None:
        """The last value of :meth:`for_manager` was sent."""
        assert self._for_manager is not None
        assert self._manager_ledger is not None
        self.arenas.lend(self._for_manager, self._manager_ledger)

    def end_task(self) -> None:
        """The task has ended, and its values were sent."""
        self._for_manager = None
        self.has_buffers = False
        self.arenas.end_task()

    def wait(self, keys: Collection[Key]) -> list[Incoming] | None:
        """The values of these inputs, when all are there; None if the manager says something first."""
        arrived = self._arrived
        while not all(key in arrived for key in keys):
            for descriptor, _ in self._poll.poll():
                if descriptor == self._manager:
                    self.receive()
                    if all(key in arrived for key in keys):
                        break
                    return None
                self._receive(self._by_descriptor[descriptor])
        return [arrived.pop(key) for key in keys]

    def receive(self) -> None:
        """Take all values that have arrived."""
        for number in tuple(self._edges):
            while number in self._edges and self._receive(number):
                pass

    def forget(self) -> None:
        """Drop the values that no call has taken: the manager has taken those calls back."""
        self._arrived.clear()

    def _receive(self, number: int) -> bool:
        """Take one value of a connection; whether there was one."""
        try:
            received = self._edges[number].receive()
        except BlockingIOError:
            return False
        if received is None:
            self.remove(number)
            return False
        key, value = received
        self._arrived[key] = value
        if len(self._arrived) > _MOST_EARLY:
            del self._arrived[next(iter(self._arrived))]
        return True


def edge_pair() -> tuple[tuple[socket.socket, MemoryFile], tuple[socket.socket, MemoryFile]]:
    """What makes two workers' ends of a connection; the first is the one with ``first``."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ledger = new_ledger()
    return (here, ledger), (there, ledger)
