"""Strategies for data: arguments and results, as text or as bytes.

A pickle that may hold byte code is written as a line of JSON, then the pickle in base64. The line has ``python`` when
byte code is in it: only the same minor version can run that, and another one may crash on it, so it is checked before
anything is loaded; ``classes`` names some of the classes in it. It may have ``sources`` and ``modules`` (see
:class:`~farcall_common.payload.by_value.ByValue`). Unknown keys are ignored.

Large values are bytes (PEP 574, pickle protocol 5): a line of JSON, the pickle, and the contents of arrays as they lie
in memory, each at a multiple of 64 bytes. The line gives their ``sizes`` in bytes, and the keys above. Only data that
travels through the blob store is written so, and only for a reader that knows strategy ``f3``. An array is copied once
when it is written, so that it may be changed afterwards, and not at all when it is read: it uses the memory that the
buffer is in, and keeps it.
"""

from __future__ import annotations

import base64
import binascii
import ctypes
import dataclasses
import io
import json
import pickle
import sys
import textwrap
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final

import msgspec

from farcall_common.errors import DeserializationError
from farcall_common.json_calls import JSON_PREFIX
from farcall_common.limits import MAX_INLINE_BYTES
from farcall_common.payload.arrays import array_pieces
from farcall_common.payload.dill_format import dill_dumps, dill_loads
from farcall_common.payload.framing import Piece, first_line, join_aligned, padding
from farcall_common.payload.native import NATIVE_PREFIX, dump_native, is_plain
from farcall_common.payload.pickler import Pickler, dumps_by_reference
from farcall_common.payload.pickling import PROTOCOL, THIS_PYTHON
from farcall_common.payload.pools import teach_pools
from farcall_common.payload.source import remember_lines
from farcall_common.payload.strategy import Combination, Strategy
from farcall_common.plain_text import plain

if TYPE_CHECKING:
    from farcall_common.payload.by_value import ByValue

_MAX_LOSSLESS_NODES = 1000
"""Beyond this, checking every node costs more than JSON saves; pickle takes over."""
_MAX_LOSSLESS_INT = 2**63 - 1
_MAX_NAMES_CHARACTERS = 200
_MAX_FLOAT = sys.float_info.max
_ALIGNMENT_BYTES: Final = 16
"""The largest alignment that processors require; every allocator provides it."""
FILE_KEY: Final = "__farcall_file__"
"""In JSON, the only key of an object that stands for a :class:`~farcall_common.file_arguments.File`."""
_FILE_METHOD: Final = "__farcall_json__"
_encode = msgspec.json.Encoder(enc_hook=lambda value: {FILE_KEY: value.__farcall_json__()}).encode
_decode = msgspec.json.Decoder().decode


@dataclasses.dataclass(frozen=True)
class JSONData(Strategy):
    """JSON: readable, and loading it runs no code.

    In Globus Compute, JSON turns tuples into lists and every key into a string. With ``lossless``, such values are
    refused, so that a value equals the written one, in type too.
    """

    prefix: ClassVar[bytes] = JSON_PREFIX
    for_code: ClassVar[bool] = False
    runs_code: ClassVar[bool] = False

    lossless: bool = False

    def dump(self, value: object) -> bytes:
        if not self.lossless:
            return json.dumps(value).encode()
        _check_lossless(value)
        return _encode(value)

    def load(self, text: bytes) -> object:
        try:
            value = _decode(text)
        except msgspec.DecodeError:  # Python's own JSON has more numbers than the standard
            value = json.loads(text.decode())
        return _with_files(value) if FILE_KEY.encode() in text else value


@dataclasses.dataclass(frozen=True)
class PickleDataBase64(Strategy):
    """Standard pickle, for values whose classes the worker can import. Others are refused."""

    prefix: ClassVar[bytes] = b"f0\n"
    for_code: ClassVar[bool] = False

    def dump(self, value: object) -> bytes:
        return self.written(dumps_by_reference(value))

    @staticmethod
    def written(pickled: bytes) -> bytes:
        """The text of a pickle."""
        return binascii.b2a_base64(pickled, newline=False)

    def load(self, text: bytes) -> object:
        return pickle.loads(binascii.a2b_base64(text, strict_mode=True))


@dataclasses.dataclass(frozen=True)
class CloudPickleDataBase64(Strategy):
    """Pickle that includes classes and functions of scripts and notebooks; then bound to one Python version."""

    prefix: ClassVar[bytes] = b"f1\n"
    for_code: ClassVar[bool] = False

    def dump(self, value: object) -> bytes:
        return dump_with_code(value, with_sources=False)

    def load(self, text: bytes, *, own_classes: bool = False) -> object:
        return load_with_code(text, own_classes=own_classes)


@dataclasses.dataclass(frozen=True)
class PickledData(CloudPickleDataBase64):
    """The same, but values without such code are written as :class:`PickleDataBase64`. Not in the table of strategies:
    both kinds of buffers are."""

    also_writes: ClassVar[Sequence[bytes]] = (PickleDataBase64.prefix,)

    @property
    def name(self) -> str:
        return CloudPickleDataBase64.__name__

    def write(self, value: object) -> Sequence[Piece]:
        """Write the buffer of a value after one pass over it."""
        pickled, by_value = _pickled(value)
        if by_value is None:
            return PickleDataBase64.prefix, PickleDataBase64.written(pickled)
        return self.prefix, _text_with_code(by_value, with_sources=False)


@dataclasses.dataclass(frozen=True)
class DillDataBase64(Strategy):
    """dill; Globus Compute's default."""

    prefix: ClassVar[bytes] = b"00\n"
    for_code: ClassVar[bool] = False

    def dump(self, value: object) -> bytes:
        return base64.encodebytes(dill_dumps(value))

    def load(self, text: bytes) -> object:
        return dill_loads(binascii.a2b_base64(text))


@dataclasses.dataclass(frozen=True)
class AllDataStrategies(Combination):
    """JSON for values that it does not change, and dill."""

    prefix: ClassVar[bytes] = b"13\n"
    for_code: ClassVar[bool] = False
    parts: ClassVar[Sequence[Strategy]] = (JSONData(lossless=True), DillDataBase64())


def _check_lossless(value: object) -> None:
    nodes: list[Any] = [value]
    containers: set[int] = set()
    for node in nodes:  # the list grows
        kind = type(node)
        if kind is str or node is None or kind is bool:
            continue
        if kind is int:
            if not -_MAX_LOSSLESS_INT <= node <= _MAX_LOSSLESS_INT:
                raise ValueError("an integer that other readers of JSON would round")
        elif kind is float:
            if not -_MAX_FLOAT <= node <= _MAX_FLOAT:
                raise ValueError("a number that JSON does not have")
        elif kind is list or kind is dict:
            if id(node) in containers:
                raise ValueError("a container that appears twice")
            containers.add(id(node))
            if kind is list:
                nodes += node
            else:
                if FILE_KEY in node:
                    raise ValueError("a key that stands for a file")
                for key in node:
                    if type(key) is not str:
                        raise TypeError("a key that is not a string")
                nodes += node.values()
            if len(nodes) > _MAX_LOSSLESS_NODES:
                raise ValueError("too large to be checked")
        elif not hasattr(kind, _FILE_METHOD):
            raise TypeError(f"a {kind.__name__}")


class _Writers(threading.local):
    """Endpoints that may have written what this thread reads. None: it does not read a result."""

    endpoint_ids: Collection[str] | None = None


writers: Final = _Writers()


def _with_files(value: object) -> object:
    """A value from JSON with the files in it."""
    # Here, not at the top: most programs have no files.
    from farcall_common.file_arguments import File

    if type(value) is list:
        return [_with_files(each) for each in value]
    if type(value) is not dict:
        return value
    if value.keys() == {FILE_KEY}:
        return File.__farcall_load__(value[FILE_KEY], writers.endpoint_ids)
    return {key: _with_files(each) for key, each in value.items()}


# -- pickles with byte code --------------------------------------------------------------------------------------------


def dump_with_code(value: object, *, with_sources: bool) -> bytes:
    """Pickle a value with the code that the worker cannot import.

    :raises Exception: what pickling it raises.
    """
    pickled, by_value = _pickled(value)
    if by_value is None:
        return b"{}\n" + binascii.b2a_base64(pickled, newline=False)
    return _text_with_code(by_value, with_sources=with_sources)


def _pickled(value: object) -> tuple[bytes, ByValue | None]:
    """A pickle, and its description if it has code."""
    file = io.BytesIO()
    pickler = Pickler(file, PROTOCOL)
    pickler.dump(value)
    pickled = file.getvalue()
    return pickled, None if pickler.code_reducer is None else pickler.code_reducer.described(pickled)


def _text_with_code(dumped: ByValue, *, with_sources: bool) -> bytes:
    """The text of a pickle."""
    head = _head_of(dumped)
    if with_sources and dumped.sources:
        head["sources"] = dumped.sources
    return b"%b\n%b" % (json.dumps(head).encode(), binascii.b2a_base64(dumped.pickled, newline=False))


def _head_of(dumped: ByValue) -> dict[str, Any]:
    """The facts that a reader needs before it loads a pickle."""
    head: dict[str, Any] = {"python": dumped.python} if dumped.python else {}
    if dumped.python and dumped.names:
        head["classes"] = dumped.names
    if dumped.modules is not None:
        head["modules"] = dumped.modules
    return head


def _check_python(head: Mapping[str, Any]) -> None:
    """Check that this Python may load a pickle with this head.

    :raises DeserializationError: if there is byte code of another version.
    """
    python = head.get("python", THIS_PYTHON)
    if python != THIS_PYTHON:
        raise DeserializationError(
            f"This is byte code of Python {python}{named_classes(head)}; this side runs Python {THIS_PYTHON}.",
            hint=f"Use Python {python} on both sides. Or {WITHOUT_BYTE_CODE}.",
        )


#: How functions and values travel between versions of Python.
WITHOUT_BYTE_CODE: Final = (
    "move classes of the program to a module and call farcall.include with its name, and write functions with def, "
    "without closures and decorators"
)


def named_classes(head: Mapping[str, Any]) -> str:
    """The classes in a pickle with this head, in brackets; empty if there are none."""
    names = plain(", ".join(map(str, head.get("classes", ()))))  # the other side wrote them
    return f" (the class {textwrap.shorten(names, _MAX_NAMES_CHARACTERS, placeholder=' ...')})" if names else ""


def load_with_code(text: bytes, *, own_classes: bool = False) -> object:
    """The value of a text that :func:`dump_with_code` wrote.

    :param own_classes: whether the reader's classes are taken even if their source differs.
    :raises DeserializationError: if it has the byte code of another Python version.
    :raises Exception: what unpickling raises.
    """
    line, _, pickled = text.partition(b"\n")
    head = json.loads(line)
    _check_python(head)
    for filename, line_number, lines in head.get("sources", ()):
        remember_lines(filename, line_number, lines)
    return _unpickle(binascii.a2b_base64(pickled, strict_mode=True), head, own_classes=own_classes)


def _unpickle(
    pickled: bytes | memoryview, head: Mapping[str, Any], *, own_classes: bool, buffers: Iterable[memoryview] = ()
) -> object:
    """The value of a pickle with this head."""
    modules = head.get("modules")
    if modules is None:
        return pickle.loads(pickled, buffers=buffers)
    teach_pools()
    # Here, not at the top: as in dump_with_code.
    from farcall_common.payload.by_value import load_by_value

    return load_by_value(pickled, modules, own_classes=own_classes, buffers=buffers)


# -- pickles with arrays -----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class PickleOutOfBand(Strategy):
    """Pickle followed by the contents of arrays, for values above 64 KiB. Smaller values travel with their task and are
    written as text: by reference if the worker can import everything, else by value."""

    prefix: ClassVar[bytes] = b"f3\n"
    for_code: ClassVar[bool] = False
    also_writes: ClassVar[Sequence[bytes]] = (CloudPickleDataBase64.prefix, PickleDataBase64.prefix)

    def write(self, value: object) -> Sequence[Piece]:
        pickled, contents, by_value = _dumped(value)
        if contents or sum(map(len, pickled)) > MAX_INLINE_BYTES:
            return _joined(pickled, contents, by_value)
        if by_value:
            return CloudPickleDataBase64.prefix, _text_with_code(by_value, with_sources=False)
        return PickleDataBase64.prefix, PickleDataBase64.written(b"".join(pickled))

    def dump(self, value: object) -> bytes:
        return b"".join(_joined(*_dumped(value)))[len(self.prefix) :]

    def load(self, text: Piece, *, own_classes: bool = False) -> object:
        view = memoryview(text)
        line = first_line(view)
        head = json.loads(line)
        _check_python(head)
        at = len(self.prefix) + len(line) + 1
        parts: list[memoryview] = []
        for size in head["sizes"]:
            at += padding(at)
            parts.append(view[at - len(self.prefix) :][:size])
            at += size
        if at - len(self.prefix) > len(view):
            raise DeserializationError(f"The value is truncated: it has {len(view)} of {at} bytes.")
        buffers = [_usable(part) for part in parts[1:]]
        return _unpickle(parts[0], head, own_classes=own_classes, buffers=buffers)


@dataclasses.dataclass(frozen=True)
class EdgeData(PickleOutOfBand):
    """What workers write for one another, see :func:`edge_pieces`. Not in the table of strategies."""

    @property
    def name(self) -> str:
        return PickleOutOfBand.__name__

    def write(self, value: object) -> Sequence[Piece]:
        """Write the buffer of a value for a worker of the same endpoint."""
        return edge_pieces(value)


class _Pieces(list[bytes]):
    """A file for pickle that keeps large bytes objects without a copy."""

    write = list.append


def edge_pieces(value: object) -> Sequence[Piece]:
    """The buffer of a value for a worker of the same endpoint, in pieces: of an array (:mod:`.arrays`), plain pickle
    (:mod:`.native`), or ``f3`` if it has large arrays, or code without which it cannot be read.

    :raises Exception: what pickling raises.
    """
    if is_plain(value):
        return (dump_native(value),)
    if (array := array_pieces(value)) is not None:
        return array
    pickled, contents, by_value = _dumped(value)
    return _joined(pickled, contents, by_value) if contents or by_value else (NATIVE_PREFIX, *pickled)


def _dumped(value: object) -> tuple[Sequence[bytes], Sequence[memoryview], ByValue | None]:
    """A pickle in pieces, the contents outside of it, and its description if it has code."""
    pickled, contents = _Pieces(), list[memoryview]()
    pickler = Pickler(pickled, PROTOCOL, buffer_callback=_keeper(contents))
    pickler.dump(value)
    if pickler.code_reducer is None:
        return pickled, contents, None
    dumped = pickler.code_reducer.described(b"".join(pickled))
    return (dumped.pickled,), contents, dumped


def _joined(pickled: Sequence[bytes], contents: Sequence[memoryview], by_value: ByValue | None) -> list[Piece]:
    head: dict[str, Any] = {"sizes": [sum(map(len, pickled)), *map(len, contents)]}
    if by_value:
        head |= _head_of(by_value)
    line = json.dumps(head).encode() + b"\n"
    return join_aligned([(PickleOutOfBand.prefix, line), pickled, *[(content,) for content in contents]])


def _keeper(contents: list[memoryview]) -> Callable[[pickle.PickleBuffer], bool]:
    """The buffer callback of pickle: whether pickle writes a content itself."""

    def keep(buffer: pickle.PickleBuffer) -> bool:
        content = buffer.raw()
        if len(content) < MAX_INLINE_BYTES:  # pickle gives a file larger ones as they are, without a length
            return True
        contents.append(content)
        return False

    return keep


def _usable(content: memoryview) -> memoryview:
    """The content in place if it is writable and aligned, else a copy."""
    if content.readonly or not content or ctypes.addressof(ctypes.c_char.from_buffer(content)) % _ALIGNMENT_BYTES:
        return memoryview(bytearray(content))
    return content
