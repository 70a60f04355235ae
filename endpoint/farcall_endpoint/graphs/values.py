"""Values between calls: what they take of the node's memory and disk. Pure: no I/O."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from farcall_endpoint.shared_memory import Frame, SharedBytes

INLINE_BYTES: Final = 64 * 1024
"""Values up to this size are in packets, and in memory whatever the budget."""


class GraphSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a node for the graphs that run there.

    :param memory_bytes: what values of all graphs may occupy of its memory.
    :param disk_bytes: what those beyond that may occupy of its disk.
    :param node: its host name.
    """

    memory_bytes: int = 2**30
    disk_bytes: int = 16 * 2**30
    node: str = ""


class Memory:
    """The budget of a node for values.

    A worker writes a value to a file on disk if it is larger than its room in memory.

    :param writers: how many calls may write a value at a time. Each is told of an equal part of the memory that is
        left, so that together they do not exceed it.
    """

    def __init__(self, settings: GraphSettings, *, writers: int) -> None:
        self._memory_bytes = settings.memory_bytes
        self._disk_bytes = settings.disk_bytes
        self._writers = max(1, writers)
        self.used_bytes = 0
        self.used_disk_bytes = 0
        self._on_disk: dict[int, int] = {}  # bytes of values in each of these files

    @property
    def room_bytes(self) -> int:
        """How large the next value in memory may be."""
        left = self._memory_bytes - self.used_bytes
        if left <= 0:
            return 0
        # The last quarter is for small values: each on disk would take a file.
        return max(INLINE_BYTES, (left - self._memory_bytes // 4) // self._writers)

    @property
    def most_bytes(self) -> int:
        """How large the next value may be."""
        return max(self.room_bytes, self._disk_bytes - self.used_disk_bytes)

    def accepts(self, size_bytes: int, *, on_disk: bool) -> bool:
        """Whether there is still room for a value whose call was told so when it was sent. In memory, those of calls
        that were sent ahead may exceed the budget."""
        if on_disk:
            return self.used_disk_bytes + size_bytes <= self._disk_bytes
        return self.used_bytes + size_bytes <= 2 * self._memory_bytes

    def add(self, parts: Sequence[Frame], *, on_disk: bool = False) -> None:
        """A value is kept; or once more, in another value."""
        known = self._on_disk
        if not (on_disk or known):
            self.used_bytes += sum(map(len, parts))
            return
        for part in parts:
            if isinstance(part, SharedBytes) and (on_disk or id(part.memory) in known):
                known[id(part.memory)] = known.get(id(part.memory), 0) + len(part)
                self.used_disk_bytes += len(part)
            else:
                self.used_bytes += len(part)

    def remove(self, part: Frame) -> None:
        """A part of a value is not kept any more."""
        size = len(part)
        if self._on_disk and isinstance(part, SharedBytes) and (left := self._on_disk.get(id(part.memory))):
            self.used_disk_bytes -= size
            if left == size:
                del self._on_disk[id(part.memory)]
            else:
                self._on_disk[id(part.memory)] = left - size
        else:
            self.used_bytes -= size
