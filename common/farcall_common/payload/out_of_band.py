"""Large values as bytes: pickle, and behind it the contents of arrays as they lie in memory (PEP 574, protocol 5).

A buffer is a line of JSON, the pickle and the contents, each at a multiple of 64 bytes. The line gives their ``sizes``
in bytes, and what :mod:`~farcall_common.payload.bytecode` says of code in the pickle. That is no text, so only what
travels through the blob store may be written so, and only for a reader that has said that it knows strategy ``f3``.

An array is copied once when it is written, so that it may be changed afterwards, and not at all when it is read: it
uses the memory that the buffer is in, and keeps it.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import pickle
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final

from farcall_common.errors import DeserializationError
from farcall_common.limits import MAX_INLINE_BYTES
from farcall_common.payload import bytecode
from farcall_common.payload.data import CloudPickleDataBase64, PickleDataBase64
from farcall_common.payload.framing import Piece, first_line, join_aligned, padding
from farcall_common.payload.pickling import PROTOCOL, ReferencePickler
from farcall_common.payload.strategy import Strategy

if TYPE_CHECKING:
    from farcall_common.payload.by_value import ByValue

_ALIGNMENT_BYTES: Final = 16
"""What no processor asks more of, and every allocator gives."""


@dataclasses.dataclass(frozen=True)
class PickleOutOfBand(Strategy):
    """Pickle with the contents of arrays behind it, of values above 64 KiB. Smaller ones travel with their task, and
    are written as the strategies do that write pickles as text: by reference where the worker can import everything,
    else by value."""

    prefix: ClassVar[bytes] = b"f3\n"
    for_code: ClassVar[bool] = False

    def write(self, value: object) -> Sequence[Piece]:
        pickled, contents, by_value = _dumped(value)
        if contents or sum(map(len, pickled)) > MAX_INLINE_BYTES:
            return _joined(pickled, contents, by_value)
        if by_value:
            return CloudPickleDataBase64.prefix, bytecode.written(by_value, with_sources=False)
        return PickleDataBase64.prefix, PickleDataBase64.written(b"".join(pickled))

    def dump(self, value: object) -> bytes:
        return b"".join(_joined(*_dumped(value)))[len(self.prefix) :]

    def load(self, text: Piece, *, own_classes: bool = False) -> object:
        view = memoryview(text)
        line = first_line(view)
        head = json.loads(line)
        bytecode.check(head)
        at = len(self.prefix) + len(line) + 1
        parts: list[memoryview] = []
        for size in head["sizes"]:
            at += padding(at)
            parts.append(view[at - len(self.prefix) :][:size])
            at += size
        if at - len(self.prefix) > len(view):
            raise DeserializationError(f"The value is cut off: {at} bytes are wanted, and {len(view)} there.")
        buffers = [_usable(part) for part in parts[1:]]
        return bytecode.unpickle(parts[0], head, own_classes=own_classes, buffers=buffers)


class _Pieces(list[bytes]):
    """A file that pickle writes into: large bytes as the very object, in no buffer of its own."""

    write = list.append


def _dumped(value: object) -> tuple[Sequence[bytes], Sequence[memoryview], ByValue | None]:
    """A pickle in pieces, the contents that are not in it, and what else is known of it if it carries code."""
    pickled, contents = _Pieces(), list[memoryview]()
    try:
        ReferencePickler(pickled, PROTOCOL, buffer_callback=_keeper(contents)).dump(value)
    except Exception:  # noqa: BLE001 - whatever pickle refuses may still travel by value
        # Here, not at the top: cloudpickle costs every command-line start 20 ms, and most calls do not need it.
        from farcall_common.payload.by_value import dump_by_value

        contents.clear()
        dumped = dump_by_value(value, buffer_callback=_keeper(contents))
        return (dumped.pickled,), contents, dumped
    return pickled, contents, None


def _joined(pickled: Sequence[bytes], contents: Sequence[memoryview], by_value: ByValue | None) -> list[Piece]:
    head: dict[str, Any] = {"sizes": [sum(map(len, pickled)), *map(len, contents)]}
    if by_value:
        head |= bytecode.head_of(by_value)
    line = json.dumps(head).encode() + b"\n"
    return join_aligned([(PickleOutOfBand.prefix, line), pickled, *[(content,) for content in contents]])


def _keeper(contents: list[memoryview]) -> Callable[[pickle.PickleBuffer], bool]:
    """What pickle asks about each content: whether it shall write it itself."""

    def keep(buffer: pickle.PickleBuffer) -> bool:
        content = buffer.raw()
        if len(content) <= MAX_INLINE_BYTES:
            return True
        contents.append(content)
        return False

    return keep


def _usable(content: memoryview) -> memoryview:
    """The content where it is, if it may be changed and lies well there; else a copy that may and does."""
    if content.readonly or not content or ctypes.addressof(ctypes.c_char.from_buffer(content)) % _ALIGNMENT_BYTES:
        return memoryview(bytearray(content))
    return content
