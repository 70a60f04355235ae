"""Shared memory bodies: large user bytes in memory files (``memfd_create``) or in files of the spool.

They are written once and mapped where they are read; processes in between pass on the descriptor only."""

from __future__ import annotations

import array
import fcntl
import mmap
import os
import socket
from collections.abc import Iterable, Sequence
from typing import Any, Final

_MAX_DESCRIPTORS: Final = 64
_FD_BYTES: Final = array.array("i").itemsize
ANCILLARY_BYTES: Final = socket.CMSG_SPACE(_MAX_DESCRIPTORS * _FD_BYTES)


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
        for part in parts:
            view = memoryview(part)
            while view:
                view = view[os.write(memory.descriptor, view) :]
        fcntl.fcntl(memory.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        return memory

    @property
    def is_sealed(self) -> bool:
        """Whether it is a memory file that cannot shrink: a reader of one that does is killed (SIGBUS)."""
        try:
            return bool(fcntl.fcntl(self.descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)
        except OSError:  # another kind of file
            return False

    def view(self) -> memoryview:
        """Its bytes, mapped for as long as the view lives. The mapping is private: writes change a copy."""
        return memoryview(mmap.mmap(self.descriptor, 0, flags=mmap.MAP_PRIVATE))


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
        return self.memory.view()[self.start : self.start + self.size]

    def read(self, offset: int, size: int) -> bytes:
        """A copy of some bytes. Unlike access to a view, it raises an error if the file's disk fails.

        :raises OSError: if they cannot be read, or no longer exist.
        """
        data = os.pread(self.memory.descriptor, min(size, self.size - offset), self.start + offset)
        if not data:
            raise OSError(f"the file has lost its bytes at {offset}")
        return data


Bytes = bytes | memoryview
"""User bytes: small ones as bytes, large ones as views."""
Frame = Bytes | SharedBytes
"""The same, in a process that only passes them on."""


def bytes_of(frame: Frame) -> Bytes:
    """The bytes of a frame, mapped if they are in shared memory."""
    return frame.view() if isinstance(frame, SharedBytes) else frame


def piece_of(frame: Frame, start: int, size: int) -> bytes:
    """Up to ``size`` bytes of a frame, at least one.

    :raises OSError: if a file cannot be read.
    """
    return frame.read(start, size) if isinstance(frame, SharedBytes) else bytes(frame[start : start + size])


def ancillary(memories: Sequence[MemoryFile]) -> list[tuple[int, int, Any]]:
    """The ancillary data with which ``sendmsg`` passes memory files to the other end."""
    if not memories:
        return []
    return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [memory.descriptor for memory in memories]))]


def descriptors_of(received: Sequence[tuple[int, int, bytes]]) -> list[MemoryFile]:
    """The memory files in the ancillary data of ``recvmsg``."""
    memories: list[MemoryFile] = []
    for _, _, data in received:
        descriptors = array.array("i", data[: len(data) - len(data) % _FD_BYTES])
        memories += [MemoryFile(descriptor) for descriptor in descriptors]
    return memories
