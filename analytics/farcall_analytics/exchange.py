"""Exchange: format of the blocks that partitioning tasks write and combining tasks read.

Any attempt of a task may write; the first one that commits counts, and all others find out what it wrote. So a retry
and a speculative copy neither double nor lose a row, even if their rows are in another order. A commit is a block that
is created once:

- *combined*: the one block with all partitions, which begins with their offsets and checksums;
- *pairs* (one block for each task that reads): a small block that names the attempt, behind the others.

Each partition has a checksum, which its readers compare: a damaged block counts as one that is gone.
"""

from __future__ import annotations

import itertools
import math
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import msgspec

from farcall_common.errors import ObjectGone
from farcall_common.objects.blocks import Blocks, Part
from farcall_common.payload import Piece

_MAGIC: Final = b"FCX2"
_HEAD: Final = struct.Struct("<4sI")
_OFFSET: Final = struct.Struct("<Q")
_CHECK: Final = struct.Struct("<I")
"""CRC-32."""


class Written(msgspec.Struct, frozen=True):
    """Partitions that the committed attempt of a task has written, in one combined block, or in many (pairs).

    :param name: name of the combined block, or prefix of the names of pairs.
    :param offsets: start and end of each partition in the combined block; for pairs, the running sums of their sizes.
    :param first: number of the first partition.
    :param storage: number of the storage that has the blocks.
    :param per_block: partitions in each block of pairs but the last one.
    :param checks: the CRC-32 of each partition, 4 bytes each.
    """

    name: str
    offsets: tuple[int, ...]
    is_combined: bool = True
    first: int = 0
    storage: int = 0
    per_block: int = 1
    checks: bytes = b""

    @property
    def size(self) -> int:
        """Bytes of all partitions."""
        return self.offsets[-1] - self.offsets[0]

    def has(self, partition: int) -> bool:
        """Whether a partition is among them."""
        return self.first <= partition < self.first + len(self.offsets) - 1

    def parts(self, first: int, last: int) -> Iterator[tuple[Part, list[int], bytes]]:
        """Find the partitions from ``first`` on and before ``last``: parts of blocks, and in each the sizes and
        the checksums of its partitions, which follow one another."""
        start, end = first - self.first, last - self.first
        count = len(self.offsets) - 1
        step = count if self.is_combined else self.per_block
        while start < end:
            number, until = start // step, min(end, (start // step + 1) * step)
            sizes = [after - before for before, after in itertools.pairwise(self.offsets[start : until + 1])]
            checks = self.checks[start * _CHECK.size : until * _CHECK.size]
            if self.is_combined:
                yield Part(self.name, self.offsets[start], self.offsets[until]), sizes, checks
            else:
                begin = self.offsets[number * step]
                is_whole = start == number * step and until == min(count, (number + 1) * step)
                where = () if is_whole else (self.offsets[start] - begin, self.offsets[until] - begin)
                yield Part(f"{self.name}{number}", *where), sizes, checks
            start = until

    def within(self, first: int, last: int) -> Iterator[Written]:
        """The partitions from ``first`` on and before ``last`` alone: for those who read no others."""
        for part, sizes, checks in self.parts(first, last):
            offsets = tuple(itertools.accumulate(sizes, initial=part.start))
            yield Written(part.name, offsets, first=first, storage=self.storage, checks=checks)
            first += len(sizes)


def divided(part: Part, data: memoryview, sizes: Sequence[int], checks: bytes) -> Iterator[memoryview]:
    """The partitions in a part of a block.

    :raises ObjectGone: if they are not those that were written.
    """
    end = 0
    for size, (check,) in zip(sizes, _CHECK.iter_unpack(checks), strict=True):
        start, end = end, end + size
        if zlib.crc32(data[start:end]) != check:
            raise _damaged(part.name, f"the {size:,} bytes from {part.start + start:,} on")
        yield data[start:end]


def write_combined(blocks: Blocks, name: str, partitions: Sequence[Sequence[Piece]]) -> Written:
    """Write all partitions of a task into one block, and commit them.

    :param name: of the task.
    """
    offsets = _offsets(partitions, _head_size(len(partitions)))
    own = Written(name, offsets, checks=_checks(partitions))
    head = _HEAD.pack(_MAGIC, len(partitions)) + b"".join(map(_OFFSET.pack, offsets)) + own.checks
    if blocks.create(name, [*checked([head]), *itertools.chain.from_iterable(partitions)]):
        return own
    return read_combined(blocks, name, len(partitions))


def read_combined(blocks: Blocks, name: str, count: int) -> Written:
    """Read the head of a combined block with ``count`` partitions.

    :raises ObjectGone: if there is no such block, or its head is damaged.
    :raises ValueError: if the block has another format or number of partitions.
    """
    read = blocks.read(Part(name, 0, _head_size(count)))
    if _HEAD.unpack_from(read, _CHECK.size) != (_MAGIC, count):
        raise ValueError(f"{name}: expected a block with {count} partitions")
    head = unchecked(read, name)[_HEAD.size :]
    size = _OFFSET.size * (count + 1)
    offsets = tuple(offset for (offset,) in _OFFSET.iter_unpack(head[:size]))
    return Written(name, offsets, checks=bytes(head[size:]))


def _head_size(count: int) -> int:
    return _CHECK.size + _HEAD.size + _OFFSET.size * (count + 1) + _CHECK.size * count


def write_pairs(
    blocks: Blocks, name: str, attempt: str, partitions: Sequence[Sequence[Piece]], *, per_block: int = 1
) -> Written:
    """Write the partitions of a task into so many blocks, and commit them.

    :param name: of the task. ``attempt``: differs from that of each other attempt.
    """
    own = Written(
        f"{name}/{attempt}/",
        _offsets(partitions, 0),
        is_combined=False,
        per_block=per_block,
        checks=_checks(partitions),
    )
    count = math.ceil(len(partitions) / per_block)
    groups = (partitions[number * per_block : (number + 1) * per_block] for number in range(count))
    blocks.create_all(
        [(f"{own.name}{number}", list(itertools.chain.from_iterable(group))) for number, group in enumerate(groups)]
    )
    if blocks.create(f"{name}/committed", checked([msgspec.msgpack.encode(own)])):
        return own
    winner = read_pairs(blocks, name)
    if winner != own:  # it is this one if the answer to a first request was lost
        blocks.delete([f"{own.name}{number}" for number in range(count)])
    return winner


def read_pairs(blocks: Blocks, name: str) -> Written:
    """The pairs that a task has committed.

    :raises ObjectGone: if there are none, or what names them is damaged.
    """
    commit = f"{name}/committed"
    return msgspec.msgpack.decode(unchecked(blocks.read(Part(commit)), commit), type=Written)


def checked(pieces: Sequence[Piece]) -> list[Piece]:
    """Bytes with their checksum before them."""
    return [_CHECK.pack(_crc32(pieces)), *pieces]


def unchecked(data: memoryview, name: str) -> memoryview:
    """The bytes behind their checksum.

    :param name: of the block that has them.
    :raises ObjectGone: if they are not those that were written.
    """
    found = data[_CHECK.size :]
    if len(data) < _CHECK.size or _CHECK.unpack_from(data) != (zlib.crc32(found),):
        raise _damaged(name, "its first bytes")
    return found


def _damaged(name: str, where: str) -> ObjectGone:
    return ObjectGone(f"The block {name} is damaged: {where} are not those that were written.")


def _crc32(pieces: Iterable[Piece]) -> int:
    found = 0
    for piece in pieces:
        found = zlib.crc32(piece, found)
    return found


def _checks(partitions: Sequence[Sequence[Piece]]) -> bytes:
    return b"".join(_CHECK.pack(_crc32(pieces)) for pieces in partitions)


def _offsets(partitions: Sequence[Sequence[Piece]], start: int) -> tuple[int, ...]:
    return tuple(itertools.accumulate((sum(map(len, pieces)) for pieces in partitions), initial=start))
