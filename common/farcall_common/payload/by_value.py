"""Pickling of code that exists only on this machine: byte code with the globals it refers to (cloudpickle).

cloudpickle alone sends by value what is in ``__main__``; here modules beside a script travel too (see ``origin``),
without registering anything in cloudpickle's process-wide table. This module costs tens of milliseconds to import, and
is imported when the first such value appears.
"""

from __future__ import annotations

import dataclasses
import io
import linecache
import pickle
from collections.abc import Callable
from types import CodeType, FunctionType, ModuleType
from typing import Any

import cloudpickle  # type: ignore[import-untyped]

from farcall_common.payload.foreign import THIS_PYTHON
from farcall_common.payload.origin import travels_by_value
from farcall_common.payload.pickling import PROTOCOL

__all__ = ["ByValue", "dump_by_value"]

_MAX_SOURCE_CHARACTERS = 64 * 1024
_MODULE_MACHINERY = frozenset({"__builtins__", "__cached__", "__loader__", "__spec__"})


@dataclasses.dataclass(frozen=True)
class ByValue:
    """A pickle, and what is worth knowing about the byte code in it.

    ``python`` is the version of the byte code in it; None when it has only references: then any reads it. ``sources``
    are the lines of the functions that travel, for readable tracebacks: file name, number of the first line, text.
    """

    pickled: bytes
    python: str | None
    sources: list[tuple[str, int, str]]


def dump_by_value(value: object, *, buffer_callback: Callable[[pickle.PickleBuffer], bool] | None = None) -> ByValue:
    """Pickle a value together with the code that a worker cannot import.

    :param buffer_callback: as pickle's own.
    :raises pickle.PicklingError: if something in it cannot be pickled.
    :raises Exception: what the reduce methods of the value raise.
    """
    file = io.BytesIO()
    pickler = _ByValuePickler(file, PROTOCOL, buffer_callback)
    pickler.dump(value)
    return ByValue(file.getvalue(), THIS_PYTHON if pickler.codes else None, _sources(pickler.codes))


class _ByValuePickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    def __init__(
        self, file: io.BytesIO, protocol: int, buffer_callback: Callable[[pickle.PickleBuffer], bool] | None
    ) -> None:
        super().__init__(file, protocol=protocol, buffer_callback=buffer_callback)
        self.codes: list[CodeType] = []

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, CodeType):
            self.codes.append(obj)
        reduction = super().reducer_override(obj)
        if reduction is not NotImplemented:
            return reduction
        if isinstance(obj, FunctionType) and _is_local(obj.__module__):
            return self._dynamic_function_reduce(obj)
        if isinstance(obj, type) and _is_local(obj.__module__):
            return cloudpickle.cloudpickle._dynamic_class_reduce(obj)
        if isinstance(obj, ModuleType) and obj.__name__ != "__main__" and _is_local(obj.__name__):
            # The contents go in as state, after the module is known to the pickler: modules may import each other.
            contents = {name: item for name, item in vars(obj).items() if name not in _MODULE_MACHINERY}
            return ModuleType, (obj.__name__,), contents
        return reduction


def _is_local(module_name: object) -> bool:
    return isinstance(module_name, str) and travels_by_value(module_name)


def _sources(codes: list[CodeType]) -> list[tuple[str, int, str]]:
    blocks: list[tuple[str, int, str]] = []
    sent: set[tuple[str, int]] = set()
    room = _MAX_SOURCE_CHARACTERS
    for code in codes:  # an enclosing function is pickled before the functions inside it
        first, last = code.co_firstlineno, _last_line(code)
        if (code.co_filename, first) in sent:
            continue
        text = "".join(linecache.getlines(code.co_filename)[first - 1 : last])
        if text and len(text) <= room:
            room -= len(text)
            blocks.append((code.co_filename, first, text))
            sent.update((code.co_filename, line) for line in range(first, last + 1))
    return blocks


def _last_line(code: CodeType) -> int:
    own = [line for _, _, line in code.co_lines() if line is not None]
    return max([*own, *(_last_line(inner) for inner in code.co_consts if isinstance(inner, CodeType))], default=0)
