"""Bodies of packets: small parts inline, and large ones as descriptors of memory files.

Parts may be bytes or in memory files, in any mix. Those in memory files are passed on by their descriptors. Bytes are
inline while they fit into the packet; else they are joined in one memory file. So are the smallest of the parts in
memory files, when there are more of them than a packet takes. Behind the header of a packet with descriptors is a
table of segments (the number of the descriptor or :data:`_INLINE`, first byte, length), and then the inline bytes.
"""

from __future__ import annotations

import heapq
import struct
from collections.abc import Sequence
from typing import Final

from farcall_endpoint.host.shared_memory import (
    ALIGNMENT_BYTES,
    Body,
    Bytes,
    Frame,
    FrameList,
    MemoryFile,
    SharedBytes,
    copy_of,
    cut,
)

_MOST_FILES: Final = 60
_MOST_SEGMENTS: Final = 1000
"""Maximum number of segments in files that are passed on. Their table must fit into a packet."""
_MOST_BYTES: Final = 2**53
"""Maximum size of a body, and of its end offset in a file. Larger numbers exceed the size of any file."""
_COUNT: Final = struct.Struct("<I")
_SEGMENT: Final = struct.Struct("<iQQ")
_INLINE: Final = -1
_JOINED: Final = 0


def pack(body: Sequence[Frame], *, inline: bool) -> tuple[list[Bytes], list[MemoryFile]]:
    """Return the bytes after the header of a packet, and the files whose descriptors go with the packet.

    :param inline: whether the body's bytes fit into the packet.
    """
    passed_on = _passed_on(body)
    own: list[Bytes] = []
    own_bytes = 0
    segments: list[list[int]] = []
    numbers: dict[int, int] = {}
    memories: list[MemoryFile] = []
    own_number = (
        _INLINE if inline and len(passed_on) == sum(isinstance(part, SharedBytes) for part in body) else _JOINED
    )
    first = own_number + 1  # number of the first file that is passed on
    for index, part in enumerate(body):
        size = len(part)
        if size == 0:
            continue
        if index in passed_on and isinstance(part, SharedBytes):
            number = numbers.setdefault(id(part.memory), first + len(memories))
            if number == first + len(memories):
                memories.append(part.memory)
            start = part.start
        else:
            number = own_number
            if segments and segments[-1][0] != number and (gap := -own_bytes % ALIGNMENT_BYTES):
                own.append(bytes(gap))
                own_bytes += gap
            start = own_bytes
            own.append(copy_of(part))
            own_bytes += size
        if segments and segments[-1][0] == number and segments[-1][1] + segments[-1][2] == start:
            segments[-1][2] += size
        else:
            segments.append([number, start, size])
    table: list[Bytes] = [_COUNT.pack(len(segments)), *[_SEGMENT.pack(*segment) for segment in segments]]
    if own_number == _INLINE:
        return [*table, *own], memories
    return table, [MemoryFile.of(own), *memories]


def unpack(packet: memoryview, memories: Sequence[MemoryFile]) -> Body:
    """Return the body of a packet with descriptors, from the bytes after its header.

    :raises ValueError: if the bytes contradict each other.
    """
    try:
        (count,) = _COUNT.unpack_from(packet)
        inline_at = _COUNT.size + count * _SEGMENT.size
        frames: list[Frame] = []
        total = 0
        for number, start, size in _SEGMENT.iter_unpack(packet[_COUNT.size : inline_at]):
            total += size
            if max(start + size, total) > _MOST_BYTES:
                raise ValueError(f"a segment of {size} bytes at {start}")
            if number == _INLINE:
                frames.append(bytes(packet[inline_at + start :][:size]))
            else:
                frames.append(SharedBytes(memories[number], start, size))
            if len(frames[-1]) != size or number < _INLINE:
                raise ValueError(f"a segment of {size} bytes is incomplete")
    except (struct.error, IndexError) as error:
        raise ValueError(f"its table of segments cannot be read: {error}") from error
    if len(frames) != count:
        raise ValueError(f"{len(frames)} segments instead of {count}")
    return frames[0] if count == 1 else FrameList(frames)


def ranges_of(body: Body) -> list[SharedBytes]:
    """Return, for each file of a body, the range from the file's start to the last byte that belongs to the body."""
    if isinstance(body, SharedBytes):
        return [body]
    files: dict[int, SharedBytes] = {}
    for frame in body.frames if isinstance(body, FrameList) else ():
        if isinstance(frame, SharedBytes):
            end = frame.start + frame.size
            if (known := files.get(id(frame.memory))) is None or known.size < end:
                files[id(frame.memory)] = SharedBytes(frame.memory, 0, end)
    return list(files.values())


def rest_of(body: Body, start: int) -> Body:
    """Return a body without its first ``start`` bytes.

    :raises ValueError: if it has fewer.
    """
    if not isinstance(body, FrameList):
        return cut(body, [len(body) - start], start)[0]
    frames: list[Frame] = []
    for frame in body.frames:
        if start < len(frame):
            frames += cut(frame, [len(frame) - start], start)
        start = max(0, start - len(frame))
    return frames[0] if len(frames) == 1 else FrameList(frames)


def _passed_on(body: Sequence[Frame]) -> set[int]:
    """Which parts are passed on by their descriptors: all in memory files, or the largest."""
    sizes = {index: part.size for index, part in enumerate(body) if isinstance(part, SharedBytes)}
    files: dict[int, list[int]] = {}
    for index in (
        sizes if len(sizes) <= _MOST_SEGMENTS else heapq.nlargest(_MOST_SEGMENTS, sizes, key=sizes.__getitem__)
    ):
        part = body[index]
        assert isinstance(part, SharedBytes)
        files.setdefault(id(part.memory), []).append(index)
    chosen = list(files.values())
    if len(chosen) >= _MOST_FILES:  # one is left for the joined bytes
        chosen = heapq.nlargest(_MOST_FILES - 1, chosen, key=lambda parts: sum(sizes[index] for index in parts))
    return {index for parts in chosen for index in parts}
