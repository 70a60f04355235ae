"""The pipe between a manager and one worker: packets over a Unix socket, large bodies in shared memory beside them.

A ``SOCK_SEQPACKET`` socket keeps packets whole, and the kernel hands each packet to exactly one reader. The manager
keeps a copy of the worker's end, so it can take packets back that the worker has not read yet (:meth:`Channel.recall`):
whatever it gets back was certainly not started, and whatever it does not get back was certainly read. That makes it
safe to queue tasks in the socket, which saves a short task the wait for a round trip.

A packet is a header in MessagePack behind its length; then the body, or, when that would be too large for a packet,
the descriptor of a memory file (``memfd_create``) that holds it.
"""

from __future__ import annotations

import array
import os
import socket
import struct
from collections.abc import Sequence
from typing import Any, Final

import msgspec

__all__ = ["Channel", "Done", "Missing", "Packet", "Ready", "Run", "socket_pair"]

#: A packet must fit into the socket's send buffer together with a few others (Linux: 208 KiB unless changed).
_MAX_PACKET_BYTES: Final = 64 * 1024
_MAX_HEADER_BYTES: Final = 1024 * 1024
_LENGTH: Final = struct.Struct("<I")
_FD_BYTES: Final = array.array("i").itemsize
_ANCILLARY_BYTES: Final = socket.CMSG_SPACE(_FD_BYTES)
_BLOCKING: Final = int(socket.MSG_CMSG_CLOEXEC)  # plain numbers: enums are slow to combine
_NOT_BLOCKING: Final = int(socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT)


class Run(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Run a task. The body is the function's code (``function_bytes`` of it; 0: sent before) and then the payload.

    ``forget``: drop all functions that were sent before this one.
    """

    task_id: str
    attempt: int
    function_hash: str
    function_bytes: int = 0
    forget: bool = False
    result_serializers: tuple[str, ...] = ()


class Ready(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The worker has started and waits for its first task."""

    pid: int


class Done(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A task ended. The body is the result; ``error`` (an ErrorRecord in its JSON form) says that there is none."""

    task_id: str
    started_at: float
    ended_at: float
    error: dict[str, Any] | None = None


class Missing(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The worker never got the function of this task: the packet with its code was recalled. Nothing was started."""

    task_id: str


Packet = Run | Ready | Done | Missing

_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final[msgspec.msgpack.Decoder[Packet]] = msgspec.msgpack.Decoder(Packet)


class Channel:
    """One end. Blocks or not as its socket does; owned by one thread."""

    def __init__(self, end: socket.socket) -> None:
        self.socket = end
        self._buffer = bytearray(_MAX_PACKET_BYTES + _LENGTH.size + _MAX_HEADER_BYTES)

    def fileno(self) -> int:
        """For selectors."""
        return self.socket.fileno()

    def close(self) -> None:
        """Let the other end see that nobody is here any more."""
        self.socket.close()

    def send(self, packet: Packet, body: Sequence[bytes] = ()) -> None:
        """Send a packet and the joined parts of its body.

        :raises BlockingIOError: if the socket does not block and is full; nothing was sent then.
        :raises OSError: if the other end is gone.
        """
        header = _encoder.encode(packet)
        size = sum(map(len, body))
        if len(header) + size <= _MAX_PACKET_BYTES:
            self.socket.sendmsg([_LENGTH.pack(len(header)), header, *body])
            return
        memory = os.memfd_create("farcall", os.MFD_CLOEXEC)
        try:
            for part in body:
                _write_all(memory, part)
            descriptors = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [memory]))]
            self.socket.sendmsg([_LENGTH.pack(len(header)), header], descriptors)
        finally:
            os.close(memory)

    def receive(self) -> tuple[Packet, bytes] | None:
        """The next packet and its body; None when the other end is gone.

        :raises BlockingIOError: if the socket does not block and is empty.
        """
        try:
            return self._take(self.socket)
        except ConnectionResetError:
            return None

    def recall(self, other_end: socket.socket) -> list[tuple[Packet, bytes]]:
        """Take back what the other end has not read, oldest first. ``other_end`` is a copy of its socket."""
        taken: list[tuple[Packet, bytes]] = []
        while True:
            try:
                packet = self._take(other_end, _NOT_BLOCKING)
            except (BlockingIOError, ConnectionResetError):
                return taken
            if packet is None:
                return taken
            taken.append(packet)

    def _take(self, end: socket.socket, flags: int = _BLOCKING) -> tuple[Packet, bytes] | None:
        size, ancillary, _, _ = end.recvmsg_into([self._buffer], _ANCILLARY_BYTES, flags)
        if size == 0:
            return None
        view = memoryview(self._buffer)
        body_at = _LENGTH.size + _LENGTH.unpack_from(view)[0]
        packet = _decoder.decode(view[_LENGTH.size : body_at])
        for _, _, data in ancillary:
            return packet, _read_all(array.array("i", data[:_FD_BYTES])[0])
        return packet, bytes(view[body_at:size])


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Two connected ends: the manager's (which does not block) and the worker's."""
    manager_end, worker_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    manager_end.setblocking(False)
    return manager_end, worker_end


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _read_all(descriptor: int) -> bytes:
    with open(descriptor, "rb", buffering=0) as file:  # closes the descriptor
        file.seek(0)
        return file.read()
