"""Mutations of seeds, the same in each run: what the gate has in place of a fuzzer."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Final

_NUMBERS: Final = (
    b"\x00",
    b"\x7f",
    b"\x80",
    b"\xc0",
    b"\xdd\xff\xff\xff\xff",
    b"\xcf" + b"\xff" * 8,
    b"\xd3\x80" + bytes(7),
)
"""MessagePack of extreme values: numbers, a nil, and an array of four billion items."""
_MOST_CHANGES: Final = 4


def mutated(seeds: Sequence[bytes], *, count: int, seed: int) -> Iterator[bytes]:
    """Yield ``count`` mutated seeds. The first byte, which says how a seed is sent, changes seldom."""
    choices = random.Random(seed)
    for _ in range(count):
        data = bytearray(choices.choice(seeds))
        for _ in range(choices.randint(1, _MOST_CHANGES)):
            at = choices.randrange(0 if choices.random() < 0.1 else 1, len(data) + 1)
            match choices.randrange(6):
                case 0:
                    data[at : at + 1] = bytes([choices.randrange(256)])
                case 1:
                    data[at : at + 1] = choices.choice(_NUMBERS)
                case 2:
                    del data[at : at + choices.randint(1, 8)]
                case 3:
                    data[at:at] = choices.randbytes(choices.randint(1, 8))
                case 4:
                    data[at:at] = data[choices.randrange(len(data)) :][: choices.randint(1, 64)] if data else b""
                case _:
                    other = choices.choice(seeds)
                    data[at:] = other[choices.randrange(len(other)) :]
            if not data:
                data = bytearray(b"\0")
        yield bytes(data)
