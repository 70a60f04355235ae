"""Framing: several buffers in one, ``<length>\\n<buffer>`` repeated.

The length counts *characters* of the text, as Globus Compute counts it, not bytes. The two differ only for text beyond
ASCII (source code with an accent in a comment), so ASCII is split without decoding.

Binary buffers have another framing: ``b<length> <length>...\\n`` in bytes, and then the buffers, each at the next
multiple of :data:`ALIGNMENT_BYTES`, so that arrays may be used in place.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import AnyStr, Final

from farcall_common.errors import DeserializationError

Piece = bytes | memoryview
"""A part of a buffer: bytes, or a view of the caller's memory."""

ALIGNMENT_BYTES: Final = 64
"""The alignment of the widest vector instructions."""
FILES_PREFIX: Final = b"fl\n"
"""Prefix of a payload with a list of files in front; see :mod:`farcall_common.staged_files`."""
_BINARY: Final = b"b"
_MAX_HEAD_BYTES: Final = 1024

_MAX_LENGTH_DIGITS = 12
"""A longer length is invalid: it would be a terabyte."""
_DAMAGED: Final = "The payload was damaged in transit; submit the task again."


def pack(buffers: Iterable[bytes]) -> bytes:
    """Join buffers, each with its length in front.

    :raises UnicodeDecodeError: if a buffer is not UTF-8.
    """
    return b"".join([b"%d\n%b" % (_characters(buffer), buffer) for buffer in buffers])


def pack_binary(buffers: Sequence[Sequence[Piece]]) -> bytes:
    """Join buffers that may be binary. They are in pieces, each of which is copied once."""
    sizes = [sum(map(len, pieces)) for pieces in buffers]
    head = _BINARY + b" ".join([b"%d" % size for size in sizes]) + b"\n"
    return b"".join(join_aligned([(head,), *buffers]))


def is_text(packed: bytes) -> bool:
    """Whether this is the output of :func:`pack`, not of :func:`pack_binary`, behind a list of files or not."""
    at = packed.find(b"\n", len(FILES_PREFIX)) + 1 if packed.startswith(FILES_PREFIX) else 0
    return not packed.startswith(_BINARY, at)


def join_aligned(blocks: Iterable[Sequence[Piece]]) -> list[Piece]:
    """The pieces of blocks, with padding so that each block is aligned if the first is."""
    joined: list[Piece] = []
    at = 0
    for pieces in blocks:
        if gap := padding(at):
            joined.append(bytes(gap))
        joined += pieces
        at += gap + sum(map(len, pieces))
    return joined


def padding(at: int) -> int:
    """Number of bytes to the next aligned position."""
    return -at % ALIGNMENT_BYTES


def unpack(packed: Piece) -> list[Piece]:
    """The buffers of :func:`pack` (or Globus Compute's ``pack_buffers``) or :func:`pack_binary`; none for no bytes.
    Binary buffers are views.

    :raises DeserializationError: if the text is truncated, not UTF-8, or not packed.
    """
    if (found := _places(packed)) is not None:
        view = memoryview(packed)
        return [view[at : at + length] for at, length in found]
    packed = bytes(packed)
    if packed.isascii():
        return list(_split(packed, b"\n"))
    try:
        text = packed.decode()
    except UnicodeDecodeError as error:
        raise DeserializationError("The packed buffers are not UTF-8 text.") from error
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
                hint="The payload was truncated, or was not written by Farcall or Globus Compute.",
            )
        start = at + 1
        stop = start + int(digits)
        if stop > end:
            raise DeserializationError(
                f"Packed buffer {len(buffers) + 1} is truncated: it has {end - start} of {int(digits)} characters.",
                hint=_DAMAGED,
            )
        buffers.append(packed[start:stop])
        start = stop
    return buffers


def first_line(buffer: Piece) -> bytes:
    """The bytes before the first newline, or all; a large buffer is copied only as far as necessary."""
    size = 256
    while True:
        line, newline, _ = bytes(buffer[:size]).partition(b"\n")
        if newline or size >= len(buffer):
            return line
        size *= 4


def _places(packed: Piece) -> list[tuple[int, int]] | None:
    """Positions and lengths of the buffers of a binary packing; None for another packing.

    :raises DeserializationError: if it is damaged.
    """
    if bytes(packed[:1]) != _BINARY:
        return None
    head, _, _ = bytes(packed[1:_MAX_HEAD_BYTES]).partition(b"\n")
    lengths = head.split(b" ")
    if not all(length.isdigit() and len(length) <= _MAX_LENGTH_DIGITS for length in lengths):
        raise DeserializationError("The binary payload does not start with the lengths of its buffers.", hint=_DAMAGED)
    found: list[tuple[int, int]] = []
    at = len(_BINARY) + len(head) + 1
    for length in map(int, lengths):
        at += padding(at)
        found.append((at, length))
        at += length
    if at > len(packed):
        raise DeserializationError(
            f"The binary payload is truncated: it has {len(packed)} of {at} bytes.", hint=_DAMAGED
        )
    return found


def _characters(buffer: bytes) -> int:
    return len(buffer) if buffer.isascii() else len(buffer.decode())
