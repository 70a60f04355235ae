"""Strategies for data: arguments and results."""

from __future__ import annotations

import base64
import binascii
import dataclasses
import json
import pickle
from collections.abc import Sequence
from typing import Any, ClassVar

from farcall_common.payload import bytecode, dilling
from farcall_common.payload.pickling import dumps_by_reference
from farcall_common.payload.strategy import Combination, Strategy

__all__ = ["AllDataStrategies", "CloudPickleDataBase64", "DillDataBase64", "JSONData", "PickleDataBase64"]

_MAX_LOSSLESS_NODES = 1000
"""Beyond this, looking at every node costs more than JSON is worth; pickle takes over."""
_MAX_LOSSLESS_INT_BITS = 63


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
        if self.lossless:
            _check_lossless(value)
        return json.dumps(value).encode()

    def load(self, text: bytes) -> object:
        return json.loads(text.decode())


@dataclasses.dataclass(frozen=True)
class PickleDataBase64(Strategy):
    """Standard pickle, for values whose classes the worker can import; other values are refused."""

    prefix: ClassVar[bytes] = b"f0\n"
    for_code: ClassVar[bool] = False

    def dump(self, value: object) -> bytes:
        return binascii.b2a_base64(dumps_by_reference(value), newline=False)

    def load(self, text: bytes) -> object:
        return pickle.loads(binascii.a2b_base64(text, strict_mode=True))


@dataclasses.dataclass(frozen=True)
class CloudPickleDataBase64(Strategy):
    """Pickle that takes classes and functions of scripts and notebooks along; then bound to one Python version."""

    prefix: ClassVar[bytes] = b"f1\n"
    for_code: ClassVar[bool] = False

    def dump(self, value: object) -> bytes:
        return bytecode.dump(value, with_sources=False)

    def load(self, text: bytes) -> object:
        return bytecode.load(text)


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
    seen = 0
    while nodes:
        node = nodes.pop()
        seen += 1
        if seen > _MAX_LOSSLESS_NODES:
            raise ValueError("too large to be checked")
        kind = type(node)
        if node is None or kind is bool or kind is float:
            continue
        if kind is int:
            if node.bit_length() > _MAX_LOSSLESS_INT_BITS:
                raise ValueError("an integer that other readers of JSON would round")
        elif kind is str:
            node.encode()  # two lone surrogates would come back as one character
        elif kind is list or kind is dict:
            if id(node) in containers:
                raise ValueError("a container that appears twice")
            containers.add(id(node))
            nodes.extend(node)
            if kind is dict:
                if not all(type(key) is str for key in node):
                    raise TypeError("a key that is not a string")
                nodes.extend(node.values())
        else:
            raise TypeError(f"a {kind.__name__}")
