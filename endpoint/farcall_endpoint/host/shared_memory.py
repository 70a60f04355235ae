"""Shared memory bodies: large user bytes in memory files (``memfd_create``) or in files of the spool.

They are written once and mapped by the worker that reads them. Agent and managers pass on the descriptor. What they
read themselves they copy: a task can still write to the file, and a mapping of some files fails or kills the reader."""

from __future__ import annotations

import array
import bisect
import contextlib
import fcntl
import itertools
import mmap
import os
import socket
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

_MAX_DESCRIPTORS: Final = 64
_FD_BYTES: Final = array.array("i").itemsize
ALIGNMENT_BYTES: Final = 64
"""Large parts begin at its multiples: what is in them may be used where it is."""
_COPIED_BYTES: Final = 16 * 1024
"""Number of bytes whose copy takes as long as mapping a file."""
ANCILLARY_BYTES: Final = socket.CMSG_SPACE(_MAX_DESCRIPTORS * _FD_BYTES)


def open_unnamed(directory: str, flags: int) -> int:
    """A descriptor of a new file without a name, with these flags.

    :raises OSError: if there can be none.
    """
    with contextlib.suppress(OSError):  # not every file system has unnamed files
        return os.open(directory, os.O_TMPFILE | flags | os.O_CLOEXEC, 0o600)
    name = f"{directory}/farcall-{os.urandom(8).hex()}"
    descriptor = os.open(name, os.O_CREAT | os.O_EXCL | flags | os.O_CLOEXEC, 0o600)
    os.unlink(name)  # noqa: PTH108 - the name never was a Path
    return descriptor


class MemoryFile:
    """Owns a descriptor, and closes it when it is garbage-collected."""

    __slots__ = ("descriptor",)

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def __del__(self) -> None:
        os.close(self.descriptor)

    @classmethod
    def of(cls, parts: Iterable[bytes | memoryview]) -> MemoryFile:
        """A new file with the concatenated parts, which cannot shrink."""
        memory = cls(os.memfd_create("farcall", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
        memory._write(parts)
        fcntl.fcntl(memory.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        return memory

    @classmethod
    def on_disk(cls, parts: Iterable[bytes | memoryview], directory: str) -> MemoryFile:
        """The same in a file without a name.

        :raises OSError: if the disk is full, for example.
        """
        file = cls(open_unnamed(directory, os.O_RDWR))
        file._write(parts)
        return file

    def _write(self, parts: Iterable[bytes | memoryview]) -> None:
        for part in parts:
            view = memoryview(part)
            while view:
                view = view[os.write(self.descriptor, view) :]

    def shared(self) -> None:
        """Its descriptor is about to go to another process, or it is mapped."""

    @property
    def is_sealed(self) -> bool:
        """Whether it is a memory file that can be read and cannot shrink: a reader of one that does is killed
        (SIGBUS)."""
        try:
            is_readable = fcntl.fcntl(self.descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDWR
            return is_readable and bool(fcntl.fcntl(self.descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)
        except OSError:  # another kind of file
            return False

    def view(self, start: int, end: int) -> memoryview:
        """Some of its bytes, mapped for as long as the view lives. The mapping is private: writes change a copy.

        :raises OSError: if the file cannot be mapped.
        :raises ValueError: if it ends before.
        """
        if start == end:  # to map no bytes is to map all
            return memoryview(b"")
        self.shared()
        first = start - start % mmap.ALLOCATIONGRANULARITY
        mapped = mmap.mmap(self.descriptor, end - first, flags=mmap.MAP_PRIVATE, offset=first)
        return memoryview(mapped)[start - first :]


class LentFile(MemoryFile):
    """A memory file that its writer reuses when this process has freed it.

    :param returned: called at its end; with True if others may still have it, because it was passed on or mapped.
    """

    __slots__ = ("_is_shared", "_returned")

    def __init__(self, descriptor: int, returned: Callable[[bool], object]) -> None:
        super().__init__(descriptor)
        self._returned = returned
        self._is_shared = False

    def __del__(self) -> None:
        super().__del__()
        self._returned(self._is_shared)

    def shared(self) -> None:
        """It cannot be returned any more."""
        self._is_shared = True


class SharedBytes:
    """A range of bytes in a memory file, for a process that passes them on."""

    __slots__ = ("memory", "size", "start")

    def __init__(self, memory: MemoryFile, start: int, size: int) -> None:
        self.memory = memory
        self.start = start
        self.size = size

    def __len__(self) -> int:
        return self.size

    @property
    def is_complete(self) -> bool:
        """Whether the file is long enough."""
        return self.start + self.size <= os.fstat(self.memory.descriptor).st_size > 0

    def view(self) -> memoryview:
        """The bytes themselves."""
        return self.memory.view(self.start, self.start + self.size)

    def read(self, offset: int, size: int) -> bytes:
        """A copy of some bytes. Unlike access to a view, it raises an error if the file's disk fails.

        :raises OSError: if they cannot be read, or no longer exist.
        """
        data = os.pread(self.memory.descriptor, min(size, self.size - offset), self.start + offset)
        if not data:
            raise OSError(f"the file has lost its bytes at {offset}")
        return data


class FrameList:
    """Frames in a row, as one body: a part of it is a slice of one of them. The slices of a body are :data:`Bytes`."""

    __slots__ = ("_ends", "_views", "frames")

    def __init__(self, frames: Sequence[Frame]) -> None:
        self.frames = frames
        self._ends = list(itertools.accumulate(map(len, frames)))
        self._views: dict[int, memoryview] = {}

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, part: slice) -> Bytes:
        start, stop, _ = part.indices(len(self))
        frame = self.frame(start, max(0, stop - start))
        if not isinstance(frame, SharedBytes):
            return frame
        if frame.size <= _COPIED_BYTES:
            return frame.read(0, frame.size)
        memory = frame.memory
        view = self._views.get(id(memory))  # each file is mapped once
        if view is None:
            view = self._views[id(memory)] = memory.view(0, self._end_in(memory))
        return view[frame.start : frame.start + frame.size]

    def _end_in(self, memory: MemoryFile) -> int:
        """Return the end of the last frame in a file."""
        ranges = (each for each in self.frames if isinstance(each, SharedBytes) and each.memory is memory)
        return max(each.start + each.size for each in ranges)

    def frame(self, start: int, size: int) -> Frame:
        """A part that is in one of the frames. Nothing large is read.

        :raises ValueError: if it is in several, or beyond the last.
        """
        number = bisect.bisect_right(self._ends, start)
        if size == 0:
            return b""
        if number == len(self._ends) or start + size > self._ends[number]:
            raise ValueError(f"bytes {start} to {start + size} are not in one frame of a body of {len(self)}")
        frame = self.frames[number]
        at = start - self._ends[number] + len(frame)
        return (
            SharedBytes(frame.memory, frame.start + at, size) if isinstance(frame, SharedBytes) else frame[at:][:size]
        )


Bytes = bytes | memoryview
"""User bytes: small ones as bytes, large ones as views."""
Frame = Bytes | SharedBytes
"""User bytes in a process that only passes them on."""
Body = Frame | FrameList
"""Content of a packet."""


def bytes_of(frame: Frame) -> Bytes:
    """The bytes of a frame, mapped if they are in shared memory."""
    return frame.view() if isinstance(frame, SharedBytes) else frame


def copy_of(frame: Frame) -> Bytes:
    """Return the bytes of a frame, copied if they are in shared memory, so that they cannot change any more.

    :raises OSError: if they cannot be read.
    """
    if not isinstance(frame, SharedBytes):
        return frame
    pieces: list[bytes] = []
    at = 0
    while at < frame.size:
        pieces.append(frame.read(at, frame.size - at))
        at += len(pieces[-1])
    return b"".join(pieces)


def cut(body: Body, sizes: Sequence[int], start: int = 0) -> list[Frame]:
    """The parts of a body with these sizes, from ``start`` on. Nothing large is read.

    :raises ValueError: if it ends before, or has a part in several frames.
    """
    if any(size < 0 for size in sizes) or start + sum(sizes) > len(body):
        raise ValueError(f"parts of {sum(sizes)} bytes, in a body of {len(body)}")
    parts: list[Frame] = []
    for size in sizes:
        if size == 0:
            parts.append(b"")
        elif isinstance(body, FrameList):
            parts.append(body.frame(start, size))
        elif isinstance(body, SharedBytes):
            parts.append(SharedBytes(body.memory, body.start + start, size))
        else:
            parts.append(body[start : start + size])
        start += size
    return parts


def piece_of(frame: Frame, start: int, size: int) -> bytes:
    """Up to ``size`` bytes of a frame, at least one.

    :raises OSError: if a file cannot be read.
    """
    return frame.read(start, size) if isinstance(frame, SharedBytes) else bytes(frame[start : start + size])


def ancillary(memories: Sequence[MemoryFile]) -> list[tuple[int, int, Any]]:
    """The ancillary data with which ``sendmsg`` passes memory files to the other end."""
    if not memories:
        return []
    for memory in memories:
        memory.shared()
    return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [memory.descriptor for memory in memories]))]


def descriptors_of(received: Sequence[tuple[int, int, bytes]]) -> list[MemoryFile]:
    """The memory files in the ancillary data of ``recvmsg``."""
    memories: list[MemoryFile] = []
    for _, _, data in received:
        descriptors = array.array("i", data[: len(data) - len(data) % _FD_BYTES])
        memories += [MemoryFile(descriptor) for descriptor in descriptors]
    return memories
