"""Large bodies in memory files (``memfd_create``), or in files of the spool: written once, read where they are, and
handed on as a descriptor by processes in between, which need not look at them."""

from __future__ import annotations

import array
import mmap
import os
import socket
from collections.abc import Iterable, Sequence
from typing import Any, Final

_MAX_DESCRIPTORS: Final = 64
_FD_BYTES: Final = array.array("i").itemsize
ANCILLARY_BYTES: Final = socket.CMSG_SPACE(_MAX_DESCRIPTORS * _FD_BYTES)


class MemoryFile:
    """Owns a descriptor, and closes it when nothing refers to it any more."""

    __slots__ = ("descriptor",)

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def __del__(self) -> None:
        os.close(self.descriptor)

    @classmethod
    def of(cls, parts: Iterable[bytes | memoryview]) -> MemoryFile:
        """A new file that holds the parts, one behind the other."""
        memory = cls(os.memfd_create("farcall", os.MFD_CLOEXEC))
        for part in parts:
            view = memoryview(part)
            while view:
                view = view[os.write(memory.descriptor, view) :]
        return memory

    def view(self) -> memoryview:
        """Its bytes, which live for as long as the view does. Who writes into it changes a copy of his own."""
        return memoryview(mmap.mmap(self.descriptor, 0, flags=mmap.MAP_PRIVATE))


class SharedBytes:
    """Bytes in a memory file, for a process that hands them on."""

    __slots__ = ("memory", "size", "start")

    def __init__(self, memory: MemoryFile, start: int, size: int) -> None:
        self.memory = memory
        self.start = start
        self.size = size

    def __len__(self) -> int:
        return self.size

    @property
    def is_there(self) -> bool:
        """Whether the file is as long as it has to be."""
        return self.start + self.size <= os.fstat(self.memory.descriptor).st_size > 0

    def view(self) -> memoryview:
        """The bytes themselves."""
        return self.memory.view()[self.start : self.start + self.size]

    def read(self, offset: int, size: int) -> bytes:
        """A copy of some of them. Unlike a look at a view, it fails with an error if a file's disk does.

        :raises OSError: if they cannot be read, or are not there any more.
        """
        data = os.pread(self.memory.descriptor, min(size, self.size - offset), self.start + offset)
        if not data:
            raise OSError(f"the file has lost what was at byte {offset}")
        return data


Bytes = bytes | memoryview
"""User bytes on their way: small ones as bytes, large ones as views of where they are already."""
Frame = Bytes | SharedBytes
"""The same, in a process that only hands them on."""


def seen(frame: Frame) -> Bytes:
    """A frame to look into."""
    return frame.view() if isinstance(frame, SharedBytes) else frame


def piece_of(frame: Frame, start: int, size: int) -> bytes:
    """At most so many bytes of a frame, and one at least.

    :raises OSError: if those of a file cannot be read.
    """
    return frame.read(start, size) if isinstance(frame, SharedBytes) else bytes(frame[start : start + size])


def ancillary(memories: Sequence[MemoryFile]) -> list[tuple[int, int, Any]]:
    """What makes ``sendmsg`` hand memory files to the other end."""
    if not memories:
        return []
    return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [memory.descriptor for memory in memories]))]


def descriptors_of(received: Sequence[tuple[int, int, bytes]]) -> list[MemoryFile]:
    """The memory files that ``recvmsg`` has received."""
    memories: list[MemoryFile] = []
    for _, _, data in received:
        descriptors = array.array("i", data[: len(data) - len(data) % _FD_BYTES])
        memories += [MemoryFile(descriptor) for descriptor in descriptors]
    return memories
