"""Strategies for data: arguments and results."""

from __future__ import annotations

import base64
import binascii
import dataclasses
import json
import pickle
import sys
from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec

from farcall_common.payload import bytecode, dilling
from farcall_common.payload.pickling import dumps_by_reference
from farcall_common.payload.strategy import Combination, Strategy

_MAX_LOSSLESS_NODES = 1000
"""Beyond this, looking at every node costs more than JSON is worth; pickle takes over."""
_MAX_LOSSLESS_INT = 2**63 - 1
_MAX_FLOAT = sys.float_info.max
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder().decode


@dataclasses.dataclass(frozen=True)
class JSONData(Strategy):
    """JSON: readable, and loading it runs no code.

    As Globus Compute writes it, JSON turns tuples into lists and every key into a string. With ``lossless``, such
    values are refused, so that what is read equals what was written, in type too.
    """

    prefix: ClassVar[bytes] = b"11\n"
    for_code: ClassVar[bool] = False

    lossless: bool = False

    def dump(self, value: object) -> bytes:
        if not self.lossless:
            return json.dumps(value).encode()
        _check_lossless(value)
        return _encode(value)

    def load(self, text: bytes) -> object:
        try:
            return _decode(text)
        except msgspec.DecodeError:  # Python's own JSON has more numbers than the standard
            return json.loads(text.decode())


@dataclasses.dataclass(frozen=True)
class PickleDataBase64(Strategy):
    """Standard pickle, for values whose classes the worker can import; other values are refused."""

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
    """Pickle that takes classes and functions of scripts and notebooks along; then bound to one Python version."""

    prefix: ClassVar[bytes] = b"f1\n"
    for_code: ClassVar[bool] = False

    def dump(self, value: object) -> bytes:
        return bytecode.dump(value, with_sources=False)

    def load(self, text: bytes, *, own_classes: bool = False) -> object:
        return bytecode.load(text, own_classes=own_classes)


@dataclasses.dataclass(frozen=True)
class DillDataBase64(Strategy):
    """dill; Globus Compute's default."""

    prefix: ClassVar[bytes] = b"00\n"
    for_code: ClassVar[bool] = False

    def dump(self, value: object) -> bytes:
        return base64.encodebytes(dilling.dumps(value))

    def load(self, text: bytes) -> object:
        return dilling.loads(binascii.a2b_base64(text))


@dataclasses.dataclass(frozen=True)
class AllDataStrategies(Combination):
    """JSON where nothing is lost by it, and dill."""

    prefix: ClassVar[bytes] = b"13\n"
    for_code: ClassVar[bool] = False
    parts: ClassVar[Sequence[Strategy]] = (JSONData(lossless=True), DillDataBase64())


def _check_lossless(value: object) -> None:
    nodes: list[Any] = [value]
    containers: set[int] = set()
    for node in nodes:  # which grows
        kind = type(node)
        if kind is str or node is None or kind is bool:
            continue
        if kind is int:
            if not -_MAX_LOSSLESS_INT <= node <= _MAX_LOSSLESS_INT:
                raise ValueError("an integer that other readers of JSON would round")
        elif kind is float:
            if not -_MAX_FLOAT <= node <= _MAX_FLOAT:
                raise ValueError("a number that JSON has not")
        elif kind is list or kind is dict:
            if id(node) in containers:
                raise ValueError("a container that appears twice")
            containers.add(id(node))
            if kind is list:
                nodes += node
            else:
                for key in node:
                    if type(key) is not str:
                        raise TypeError("a key that is not a string")
                nodes += node.values()
            if len(nodes) > _MAX_LOSSLESS_NODES:
                raise ValueError("too large to be checked")
        else:
            raise TypeError(f"a {kind.__name__}")
