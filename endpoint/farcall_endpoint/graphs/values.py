"""Values between calls: what they take of the node's memory and disk. Pure: no I/O."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from farcall_endpoint.shared_memory import Frame, SharedBytes

INLINE_BYTES: Final = 64 * 1024
"""Values up to this size are in packets, and in memory whatever the budget."""


class GraphSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a node for the graphs that run there.

    :param edge_memory_bytes: what values of all graphs may occupy of its memory.
    :param edge_disk_bytes: what those beyond that may occupy of its disk.
    :param node: its host name.
    """

    edge_memory_bytes: int = 2**30
    edge_disk_bytes: int = 16 * 2**30
    node: str = ""


class Memory:
    """The budget of a node for values.

    A value is on disk if it is larger than its call was told that there is room for; a manager does not look at it
    again. So what is counted is the size of each value, and the room for the next one is what is left.

    :param writers: how many calls may write a value at a time. Each is told of an equal part of the memory that is
        left, so that together they do not exceed it.
    """

    def __init__(self, settings: GraphSettings, *, writers: int) -> None:
        self._memory_bytes = settings.edge_memory_bytes
        self._most_bytes = settings.edge_memory_bytes + settings.edge_disk_bytes
        self._writers = max(1, writers)
        self.used_bytes = 0

    @property
    def room_bytes(self) -> int:
        """How much of the next value may be in memory."""
        return max(INLINE_BYTES, (self._memory_bytes - self.used_bytes) // self._writers)

    @property
    def left_bytes(self) -> int:
        """How large the next value may be."""
        return max(0, self._most_bytes - self.used_bytes)

    def add(self, parts: Iterable[Frame]) -> None:
        """A value is kept."""
        self.used_bytes += sum(map(len, parts))

    def remove(self, parts: Iterable[Frame]) -> None:
        """Parts of values are not kept any more."""
        self.used_bytes -= sum(map(len, parts))


def parts_of(result: Frame, sizes: Sequence[int], *, spread: bool) -> Sequence[Frame]:
    """The buffers of a value in what a worker has sent; without sizes, a value that is not spread is in one."""
    if len(sizes) == 1 or not (sizes or spread):
        return (result,)
    parts: list[Frame] = []
    start = 0
    for size in sizes:
        if isinstance(result, SharedBytes):
            parts.append(SharedBytes(result.memory, result.start + start, size))
        else:
            parts.append(result[start : start + size])
        start += size
    return parts
