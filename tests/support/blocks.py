"""A storage of blocks inside another one, for tests that let it fail."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from farcall_common.objects.blocks import Blocks, Part
from farcall_common.payload import Piece


class WrappedBlocks(Blocks):
    """Does what the inner storage does."""

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks

    def create(self, name: str, pieces: Sequence[Piece]) -> bool:
        return self._blocks.create(name, pieces)

    def read(self, part: Part) -> memoryview:
        return self._blocks.read(part)

    def names(self, prefix: str) -> Iterator[str]:
        return self._blocks.names(prefix)

    def delete(self, names: Sequence[str]) -> None:
        self._blocks.delete(names)

    def close(self) -> None:
        self._blocks.close()
