"""Array buffers, between workers of one endpoint: an array of numbers as it lies in memory, behind a short head.

Pickle takes several times as long for the same, on both sides, which a value of a kilobyte notices.
"""

from __future__ import annotations

import pickle
import struct
import sys
from collections.abc import Sequence
from typing import Any, Final, Literal

import msgspec

from farcall_common.payload.framing import Piece, padding

ARRAY_PREFIX: Final = b"a1\n"
"""Prefix of an array buffer; no other buffer has it."""
_HEAD: Final = struct.Struct("<3sB")
"""The prefix, and the length of what follows: type, shape and order of the elements in MessagePack."""
_MOST_HEAD_BYTES: Final = 255
_NUMBERS: Final = "biufc"
_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(tuple[str, tuple[int, ...], Literal["C", "F"]]).decode


def array_pieces(value: Any) -> Sequence[Piece] | None:
    """The buffer of an array in pieces, the elements not copied; None for any other value, and for arrays that are not
    plain numbers in a row."""
    if type(value).__name__ != "ndarray":
        return None
    numpy = sys.modules.get("numpy")
    if numpy is None or type(value) is not numpy.ndarray:
        return None
    dtype, flags = value.dtype, value.flags
    order = "C" if flags.c_contiguous else "F" if flags.f_contiguous else ""
    if not (order and dtype.kind in _NUMBERS and value.size):
        return None
    head = _encode((dtype.str, value.shape, order))
    if len(head) > _MOST_HEAD_BYTES:
        return None
    lead = _HEAD.pack(ARRAY_PREFIX, len(head)) + head
    return lead + bytes(padding(len(lead))), pickle.PickleBuffer(value).raw()


def load_array(buffer: Piece) -> Any:
    """The array in a buffer: in its memory if that is writable, else in a copy.

    :raises Exception: if it is damaged, or there is no numpy here.
    """
    import numpy  # type: ignore[import-not-found,unused-ignore]  # here: workers do without it until a task needs it

    _, size = _HEAD.unpack_from(buffer)
    end = _HEAD.size + size
    dtype, shape, order = _decode(buffer[_HEAD.size : end])
    if dtype[1:2] not in _NUMBERS:
        raise ValueError(f"an array of {dtype}")
    content = memoryview(buffer)[end + padding(end) :]
    return numpy.ndarray(shape, dtype, bytearray(content) if content.readonly else content, order=order)
