"""Values between calls: what they take of the node's memory and disk. Pure: no I/O."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from farcall_endpoint.host.shared_memory import Bytes, Frame, SharedBytes, copy_of

INLINE_BYTES: Final = 64 * 1024
"""Values up to this size are in packets, and in memory whatever the budget."""


class GraphSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a node for the graphs that run there.

    :param memory_bytes: maximum memory of the values of all graphs.
    :param disk_bytes: maximum disk space of values that exceed this memory.
    :param files: maximum number of open files with values: each large value is in a file.
    :param node: host name of the node.
    """

    memory_bytes: int = 2**30
    disk_bytes: int = 16 * 2**30
    files: int = 400
    node: str = ""


class Memory:
    """The budget of a node for values, or the part of one submitter in it.

    A worker writes a value to a file on disk if it is larger than its room in memory. A submitter other than the owner
    may have as much as is left for all (dynamic thresholds: A. K. Choudhury, E. L. Hahne, IEEE/ACM Transactions on
    Networking 6(2), 1998): one of them gets half of the budget, and something is left for the next one at all times.

    :param writers: maximum number of calls that write a value concurrently. Each has an equal part of the memory that
        is left, so that together they do not exceed it.
    :param whole: the budget of the node, if this is a part of it.
    """

    def __init__(self, settings: GraphSettings, *, writers: int, whole: Memory | None = None) -> None:
        self._settings = settings
        self._writers = max(1, writers)
        self._whole = whole
        self.used_bytes = 0
        self.used_disk_bytes = 0
        self._in_files: dict[int, int] = {}  # bytes of values in each file
        self._on_disk: set[int] = set()  # which of these are on disk

    def part(self) -> Memory:
        """The part of a submitter that is not the owner, who has nothing in it yet."""
        return Memory(self._settings, writers=self._writers, whole=self)

    @property
    def room_bytes(self) -> int:
        """How large the next value in memory may be."""
        left = self._left(self._settings.memory_bytes, (self._whole or self).used_bytes, self.used_bytes)
        if left <= 0:
            return 0
        # The last quarter is for small values: each on disk would take a file.
        return max(INLINE_BYTES, (left - self._settings.memory_bytes // 4) // self._writers)

    @property
    def most_bytes(self) -> int:
        """How large the next value may be."""
        disk_bytes = self._left(self._settings.disk_bytes, (self._whole or self).used_disk_bytes, self.used_disk_bytes)
        return max(self.room_bytes, disk_bytes)

    @property
    def rooms(self) -> tuple[int, int]:
        """Both."""
        return self.room_bytes, self.most_bytes

    @property
    def has_files(self) -> bool:
        """Whether one more value may stay in the file that its worker has written."""
        return self._left(self._settings.files, len((self._whole or self)._in_files), len(self._in_files)) > 0

    def _left(self, most: int, used_by_all: int, used: int) -> int:
        left = most - used_by_all
        return left if self._whole is None else (left - used + 1) // 2

    def accepts(self, size_bytes: int, *, on_disk: bool) -> bool:
        """Whether there is still room for a value, as there was when its call was sent. In memory, values of calls that
        were sent ahead may exceed the budget."""
        if self._whole is not None and not self._whole.accepts(size_bytes, on_disk=on_disk):
            return False
        if on_disk:
            return self.used_disk_bytes + size_bytes <= self._settings.disk_bytes and self.has_files
        return self.used_bytes + size_bytes <= 2 * self._settings.memory_bytes

    def add(self, parts: Sequence[Frame], *, on_disk: bool = False) -> None:
        """A value is kept; or once more, in another value."""
        if self._whole is not None:
            self._whole.add(parts, on_disk=on_disk)
        for part in parts:
            size = len(part)
            if isinstance(part, SharedBytes):
                file = id(part.memory)
                if on_disk:
                    self._on_disk.add(file)
                self._in_files[file] = self._in_files.get(file, 0) + size
                if file in self._on_disk:
                    self.used_disk_bytes += size
                    continue
            self.used_bytes += size

    def remove(self, part: Frame) -> None:
        """A part of a value is not kept any more."""
        if self._whole is not None:
            self._whole.remove(part)
        size = len(part)
        if isinstance(part, SharedBytes):
            file = id(part.memory)
            is_on_disk = file in self._on_disk
            self._in_files[file] -= size
            if not self._in_files[file]:
                del self._in_files[file]
                self._on_disk.discard(file)
            if is_on_disk:
                self.used_disk_bytes -= size
                return
        self.used_bytes -= size


def read(frame: Frame) -> Bytes:
    """A copy of what a task has written, in this process. Nothing is mapped: a worker could let its file shrink.

    :raises ValueError: if it cannot be read.
    """
    try:
        return copy_of(frame)
    except OSError as error:
        raise ValueError(f"a value that cannot be read: {error}") from error
