"""Several buffers in one: ``<length>\\n<buffer>``, repeated.

The length counts *characters* of the text, as Globus Compute counts it, not bytes. The two differ only for text beyond
ASCII (source code with an accent in a comment), so ASCII is taken apart without decoding it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import AnyStr

from farcall_common.errors import DeserializationError

__all__ = ["pack", "unpack"]

_MAX_LENGTH_DIGITS = 12
"""A longer length can only be garbage: it would mean a terabyte."""


def pack(buffers: Iterable[bytes]) -> bytes:
    """Put buffers one after the other, each with its length in front.

    :raises UnicodeDecodeError: if a buffer is not UTF-8.
    """
    return b"".join([b"%d\n%b" % (_characters(buffer), buffer) for buffer in buffers])


def unpack(packed: bytes) -> list[bytes]:
    """Take apart what :func:`pack` (or Globus Compute's ``pack_buffers``) put together; nothing gives no buffers.

    :raises DeserializationError: if the text is cut off, is not UTF-8, or was never packed.
    """
    if packed.isascii():
        return _split(packed, b"\n")
    try:
        text = packed.decode()
    except UnicodeDecodeError as error:
        raise DeserializationError("Packed buffers must be UTF-8 text, and these are not.") from error
    return [buffer.encode() for buffer in _split(text, "\n")]


def _split(packed: AnyStr, newline: AnyStr) -> list[AnyStr]:
    buffers: list[AnyStr] = []
    start, end = 0, len(packed)
    while start < end:
        at = packed.find(newline, start, start + _MAX_LENGTH_DIGITS + 1)
        digits = packed[start:at]
        if at < 0 or not (digits.isdigit() and digits.isascii()):
            raise DeserializationError(
                f"Packed buffer {len(buffers) + 1} does not start with its length.",
                hint="The payload was cut off, or it was not made by Farcall or Globus Compute.",
            )
        start = at + 1
        stop = start + int(digits)
        if stop > end:
            raise DeserializationError(
                f"Packed buffer {len(buffers) + 1} is cut off: it should have {int(digits)} characters "
                f"and has {end - start}.",
                hint="The payload was damaged on its way; submit the task again.",
            )
        buffers.append(packed[start:stop])
        start = stop
    return buffers


def _characters(buffer: bytes) -> int:
    return len(buffer) if buffer.isascii() else len(buffer.decode())
