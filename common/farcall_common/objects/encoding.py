"""Format of an object: a head of 64 bytes, and then a value as workers of one endpoint give it to one another.

::

    head    magic (8)  version (4)  checksum of the head (4)  start (8)  size (8)  zeros
    value   size bytes from start on, a multiple of 64: an array, or a pickle and behind it the contents of its arrays,
            each aligned to 64 bytes (see farcall_common.payload.data.edge_pieces)

Between the two there may be a gap. The head is checked before anything is read; a pickle has the rights of its reader,
so only the submitter's own tasks may write where he reads.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from typing import Any, Final

from farcall_common.errors import ObjectDamaged
from farcall_common.payload import DATA_STRATEGIES, Piece, Serializer

HEAD_BYTES: Final = 64
_MAGIC: Final = b"farcall\0"
_VERSION: Final = 1
_HEAD: Final = struct.Struct("<8sIIQQ")
_values: Final = Serializer(allowed=DATA_STRATEGIES)


def encode(value: object) -> list[Piece]:
    """An object in pieces: its head, and those of its value, which are views of arrays in it.

    :raises SerializationError: if it cannot be written.
    """
    pieces = _values.edge_pieces(value)
    return [head(HEAD_BYTES, sum(map(len, pieces))), *pieces]


def head(start: int, size: int) -> bytes:
    """The head of an object whose value is there."""
    checksum = zlib.crc32(_HEAD.pack(_MAGIC, _VERSION, 0, start, size))
    return _HEAD.pack(_MAGIC, _VERSION, checksum, start, size).ljust(HEAD_BYTES, b"\0")


def decode(data: memoryview, *, size: int) -> Any:
    """The value of an object. Its arrays use the memory of ``data`` if that is writable.

    :param size: that the value should have, in bytes.
    :raises ObjectDamaged: if this is no object, or not all of one, or another one.
    :raises DeserializationError: if the value cannot be read here.
    """
    start = _start(data, size)
    return _values.deserialize(data[start : start + size])


def is_head(pieces: Sequence[Piece]) -> bool:
    """Whether pieces are those of :func:`encode`."""
    return len(pieces) > 1 and len(pieces[0]) == HEAD_BYTES and bytes(pieces[0][: len(_MAGIC)]) == _MAGIC


def _start(data: memoryview, expected: int) -> int:
    if len(data) < HEAD_BYTES:
        raise ObjectDamaged(f"The object has {len(data)} bytes, less than its head.")
    magic, version, checksum, start, size = _HEAD.unpack_from(data)
    if magic != _MAGIC:
        raise ObjectDamaged("The object does not begin as one that Farcall has written.")
    if version != _VERSION:
        raise ObjectDamaged(f"The object has format {version}, of another release.", hint="Upgrade farcall here.")
    if zlib.crc32(_HEAD.pack(magic, version, 0, start, size)) != checksum:
        raise ObjectDamaged("The head of the object is damaged.")
    if start < HEAD_BYTES or start % HEAD_BYTES or start + size != len(data):
        raise ObjectDamaged(f"The object has {len(data)} bytes, and should have {start + size}.")
    if size != expected:
        raise ObjectDamaged(f"The value of the object has {size} bytes, and that of its reference {expected}.")
    return int(start)
