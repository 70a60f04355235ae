"""Strategies for functions."""

from __future__ import annotations

import base64
import binascii
import dataclasses
import inspect
import pickle
import re
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from farcall_common.errors import DeserializationError
from farcall_common.payload.data import dump_with_code, load_with_code
from farcall_common.payload.dill_format import dill_dumps, dill_loads, dill_source
from farcall_common.payload.pickler import dumps_by_reference
from farcall_common.payload.pickling import THIS_PYTHON, plain_function
from farcall_common.payload.source import function_from_source, self_contained_source, source_of
from farcall_common.payload.strategy import Combination, Strategy


@dataclasses.dataclass(frozen=True)
class CloudPickleCode(Strategy):
    """Byte code with the globals and local modules that it refers to; a name for functions that the worker can import.

    Source lines are included for tracebacks.
    """

    prefix: ClassVar[bytes] = b"f2\n"
    for_code: ClassVar[bool] = True

    def dump(self, value: object) -> bytes:
        return dump_with_code(value, with_sources=True)

    def load(self, text: bytes, *, own_classes: bool = False) -> object:
        return load_with_code(text, own_classes=own_classes)


@dataclasses.dataclass(frozen=True)
class DillCode(Strategy):
    """Byte code by dill; Globus Compute's default. Carries no Python version, though it is bound to one."""

    prefix: ClassVar[bytes] = b"01\n"
    for_code: ClassVar[bool] = True

    def dump(self, value: object) -> bytes:
        return base64.encodebytes(dill_dumps(plain_function(value)))

    def load(self, text: bytes) -> object:
        pickled = binascii.a2b_base64(text)
        try:
            return dill_loads(pickled)
        except (SystemError, TypeError, ValueError) as error:  # what byte code of another version raises
            raise DeserializationError(
                f"This is byte code of another version; this side runs Python {THIS_PYTHON}: {error}.",
                hint="Register the function with the Python version of the endpoint, or as source text.",
            ) from error


@dataclasses.dataclass(frozen=True)
class PickleCode(Strategy):
    """A name, which the worker imports."""

    prefix: ClassVar[bytes] = b"02\n"
    for_code: ClassVar[bool] = True

    def dump(self, value: object) -> bytes:
        return base64.encodebytes(dumps_by_reference(value))

    def load(self, text: bytes) -> object:
        return pickle.loads(binascii.a2b_base64(text))


@dataclasses.dataclass(frozen=True)
class _PureSource(Strategy):
    """``name:text``, without pickle.

    In Globus Compute, the text is the function as in its file, without the names that it refers to. With
    ``self_contained``, their definitions are written in front of it, and functions that cannot be sent as text are
    refused (see :func:`~farcall_common.payload.source.self_contained_source`).
    """

    for_code: ClassVar[bool] = True

    self_contained: bool = False

    def dump(self, value: object) -> bytes:
        read = self._read_source
        source = self_contained_source(value, read) if self.self_contained else source_of(value, read)
        name: str = value.__name__  # type: ignore[attr-defined]  # objects with source have a name
        return f"{name}:{source}".encode()

    def load(self, text: bytes) -> object:
        name, _, source = text.decode().partition(":")
        return function_from_source(name, source)

    @abstractmethod
    def _read_source(self, function: Any) -> str: ...


@dataclasses.dataclass(frozen=True)
class PureSourceTextInspect(_PureSource):
    """The text that :func:`inspect.getsource` finds: files and notebooks."""

    prefix: ClassVar[bytes] = b"st\n"

    def _read_source(self, function: Any) -> str:
        return inspect.getsource(function)


@dataclasses.dataclass(frozen=True)
class PureSourceDill(_PureSource):
    """The text that dill finds, also of functions typed into an interpreter."""

    prefix: ClassVar[bytes] = b"sd\n"

    def _read_source(self, function: Any) -> str:
        return dill_source(function)


@dataclasses.dataclass(frozen=True)
class _DilledSource(Strategy):
    """A pair of name and source text, by dill. Globus Compute still writes it, as deprecated."""

    for_code: ClassVar[bool] = True

    def dump(self, value: object) -> bytes:
        name: str = value.__name__  # type: ignore[attr-defined]  # objects with source have a name
        return base64.encodebytes(dill_dumps((name, source_of(value, self._read_source))))

    def load(self, text: bytes) -> object:
        pair = dill_loads(binascii.a2b_base64(text))
        match pair:
            case (str(name), str(source)):
                return function_from_source(name, source)
        raise DeserializationError(f"Expected a name and a source text, found a {type(pair).__name__}.")

    @abstractmethod
    def _read_source(self, function: Any) -> str: ...


@dataclasses.dataclass(frozen=True)
class DillCodeTextInspect(_DilledSource):
    """The text that :func:`inspect.getsource` finds."""

    prefix: ClassVar[bytes] = b"03\n"

    def _read_source(self, function: Any) -> str:
        return inspect.getsource(function)


@dataclasses.dataclass(frozen=True)
class DillCodeSource(_DilledSource):
    """The text that dill finds."""

    prefix: ClassVar[bytes] = b"04\n"

    def _read_source(self, function: Any) -> str:
        return dill_source(function)


@dataclasses.dataclass(frozen=True)
class CombinedCode(Combination):
    """Chunks between colons: ``04\\n:…:01\\n:…``.

    The source texts contain colons themselves, so the text is split at the ids.
    """

    prefix: ClassVar[bytes] = b"10\n"
    for_code: ClassVar[bool] = True
    parts: ClassVar[Sequence[Strategy]] = (
        DillCodeSource(),
        DillCode(),
        DillCodeTextInspect(),
        PureSourceDill(),
        PureSourceTextInspect(),
    )
    _HEAD: ClassVar[re.Pattern[bytes]] = re.compile(rb"(?:^|:)(04\n|01\n|03\n|sd\n|st\n):")

    def join(self, buffers: Sequence[bytes]) -> bytes:
        return b":".join(chunk for buffer in buffers for chunk in (buffer[:3], buffer[3:]))

    def split(self, text: bytes) -> list[bytes]:
        _, *chunks = self._HEAD.split(text)
        return [prefix + chunk for prefix, chunk in zip(chunks[::2], chunks[1::2], strict=True)]


@dataclasses.dataclass(frozen=True)
class AllCodeStrategies(Combination):
    """Source text if it is enough, and byte code."""

    prefix: ClassVar[bytes] = b"12\n"
    for_code: ClassVar[bool] = True
    parts: ClassVar[Sequence[Strategy]] = (
        PureSourceTextInspect(self_contained=True),
        PureSourceDill(self_contained=True),
        DillCode(),
    )
