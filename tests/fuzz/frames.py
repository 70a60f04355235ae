"""Frames with their lengths in front, so that the fuzzer can change one without breaking all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

_LENGTH_BYTES: Final = 2


def pack(frames: Sequence[bytes]) -> bytes:
    """Frames as one string."""
    return b"".join(len(frame).to_bytes(_LENGTH_BYTES, "big") + frame for frame in frames)


def unpack(data: bytes) -> Iterator[bytes]:
    """The frames in a string."""
    at = 0
    while at < len(data):
        length = int.from_bytes(data[at : at + _LENGTH_BYTES], "big")
        at += _LENGTH_BYTES
        yield data[at : at + length]
        at += length
