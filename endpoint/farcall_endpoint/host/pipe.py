"""Pipe between an agent and a manager on the same machine: a Unix socket, and shared memory for large frames.

A ZeroMQ socket has a thread behind it on either side, so a message costs four wake-ups; this costs two, and a large
body is written once. Sending never blocks: messages that the socket does not accept now are
kept, and sent by :meth:`Pipe.flush`.

A packet is the number of its frames, their lengths, and the frames. Large ones are in memory files
instead: their lengths are negative, and their places follow the lengths.
"""

from __future__ import annotations

import collections
import errno
import math
import resource
import select
import socket
import struct
import time
from collections.abc import Sequence
from typing import Final

from farcall_endpoint.host.shared_memory import (
    ALIGNMENT_BYTES,
    ANCILLARY_BYTES,
    Bytes,
    Frame,
    MemoryFile,
    SharedBytes,
    ancillary,
    bytes_of,
    copy_of,
    descriptors_of,
)

_MAX_INLINE_BYTES: Final = 64 * 1024
"""A packet must fit into the socket's send buffer together with a few others (Linux: 208 KiB unless changed)."""
_MAX_FRAME_BYTES: Final = 16 * 1024
_MAX_FRAMES: Final = 8192
_MAX_PASSED_ON: Final = 60
_COUNT: Final = struct.Struct("<I")
_PLACE: Final = struct.Struct("<IQ")
"""Place of a frame: the number of its memory file in the packet, and the byte at which it begins."""
_LEAD_BYTES: Final = _COUNT.size + (8 + _PLACE.size) * _MAX_FRAMES
_FULL: Final = frozenset({errno.ETOOMANYREFS, errno.ENOBUFS, errno.ENOMEM, errno.EMFILE})
"""Temporary errors: for example, too many descriptors of this account are in transit."""
_PAUSE_S: Final = 0.01
_CLOEXEC: Final = int(socket.MSG_CMSG_CLOEXEC)  # a plain number: enums are slow to combine


class Pipe:
    """One end. Owned by one thread."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._socket = end
        self._buffer = memoryview(bytearray(_LEAD_BYTES + _MAX_INLINE_BYTES))
        self._waiting: collections.deque[tuple[bytes, list[MemoryFile]]] = collections.deque()

    def fileno(self) -> int:
        """Readable if there is a message or the other end is closed; writable if :meth:`flush` can send more."""
        return self._socket.fileno()

    @property
    def has_unread(self) -> bool:
        """Always False: the descriptor is readable then."""
        return False

    @property
    def is_congested(self) -> bool:
        """Whether something waits to be sent."""
        return bool(self._waiting)

    def send(self, frames: Sequence[Frame]) -> None:
        """Send a message, now or with a later :meth:`flush`. Ignored if the other end is closed.

        :raises OSError: if its large frames cannot be written to memory; nothing was sent then.
        """
        self._waiting.append(_pack(frames))
        if len(self._waiting) == 1:
            self.flush()

    def flush(self) -> None:
        """Send waiting messages, as many as the socket accepts."""
        while self._waiting:
            packet, memories = self._waiting[0]
            try:
                self._socket.sendmsg([packet], ancillary(memories))
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in _FULL:
                    time.sleep(_PAUSE_S)
                    return
                # else closed: the reading side notices
            self._waiting.popleft()

    def receive(self) -> list[Bytes] | None:
        """The next message; None if the other end is closed. Large frames are views of shared memory.

        :raises BlockingIOError: if there is none now.
        :raises ValueError: for a packet that is none.
        """
        frames = self.receive_shared()
        if frames is None:
            return None
        return [bytes_of(frame) for frame in frames]

    def receive_shared(self) -> list[Frame] | None:
        """Receive a packet like :meth:`receive`, for a caller that passes large frames on without reading them."""
        try:
            size, received, _, _ = self._socket.recvmsg_into([self._buffer], ANCILLARY_BYTES, _CLOEXEC)
        except ConnectionResetError:
            return None
        if size == 0:
            return None
        memories = descriptors_of(received)
        try:
            return _unpack(self._buffer[:size], memories)
        except (struct.error, IndexError) as error:
            raise ValueError(f"a packet is malformed: {error}") from error

    def close(self, *, linger_s: float = 0.0) -> None:
        """Close the socket, after waiting messages were sent or ``linger_s`` has passed."""
        deadline = time.monotonic() + linger_s
        poll = select.poll()
        if self._waiting:
            poll.register(self._socket, select.POLLOUT)
        while self._waiting and (left_s := deadline - time.monotonic()) > 0:
            poll.poll(left_s * 1000)
            self.flush()
        self._waiting.clear()
        self._socket.close()


def pipe_pair() -> tuple[Pipe, socket.socket]:
    """One end to use here, and the socket of the other, for a child process to be given."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return Pipe(here), there


def _pack(frames: Sequence[Frame]) -> tuple[bytes, list[MemoryFile]]:
    lengths: list[int] = []
    inline: list[Bytes] = []
    places: list[bytes] = []
    passed_on: list[MemoryFile | None] = []
    outside: list[Bytes] = []
    own = [(0, outside)]
    outside_at, room = 0, _MAX_INLINE_BYTES
    for frame in frames:
        length = len(frame)
        if isinstance(frame, SharedBytes):
            if len(passed_on) < _MAX_PASSED_ON:
                passed_on.append(frame.memory)
                lengths.append(-length)
                places.append(_PLACE.pack(len(passed_on), frame.start))
                continue
            frame = copy_of(frame)
        if length <= _MAX_FRAME_BYTES and length <= room:
            room -= length
            inline.append(frame)
            lengths.append(length)
        else:
            gap = -outside_at % ALIGNMENT_BYTES
            if outside and outside_at + gap + length > most_file_bytes() and len(passed_on) < _MAX_PASSED_ON:
                passed_on.append(None)  # in its place there is another file
                outside, outside_at, gap = [], 0, 0
                own.append((len(passed_on), outside))
            outside += [bytes(gap), frame]
            lengths.append(-length)
            places.append(_PLACE.pack(own[-1][0], outside_at + gap))
            outside_at += gap + length
    packet = b"".join((struct.pack(f"<I{len(lengths)}q", len(lengths), *lengths), *places, *inline))
    if not places:
        return packet, []
    memories = [None, *passed_on]
    for number, parts in own:
        memories[number] = MemoryFile.of(parts)
    return packet, [memory for memory in memories if memory is not None]


def most_file_bytes() -> float:
    """The limit of this process for the size of a file (``ulimit -f``)."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    return math.inf if limit == resource.RLIM_INFINITY else limit


def _unpack(packet: memoryview, memories: Sequence[MemoryFile]) -> list[Frame]:
    (count,) = _COUNT.unpack_from(packet)
    lengths = struct.unpack_from(f"<{count}q", packet, _COUNT.size)
    place_at = _COUNT.size + 8 * count
    at = place_at + _PLACE.size * sum(length < 0 for length in lengths)
    frames: list[Frame] = []
    for length in lengths:
        if length >= 0:
            frames.append(bytes(packet[at : at + length]))
            at += length
        else:
            number, start = _PLACE.unpack_from(packet, place_at)
            place_at += _PLACE.size
            frames.append(SharedBytes(memories[number], start, -length))
    return frames
