"""dill, imported when it is first needed: it costs every process that imports it 100 ms."""

from __future__ import annotations

from types import ModuleType
from typing import Any

__all__ = ["dumps", "get_source", "loads"]


def _dill() -> ModuleType:
    import dill
    import dill.source

    module: ModuleType = dill
    return module


def dumps(value: object) -> bytes:
    """dill's pickle of a value; of a function's globals, those that it refers to.

    :raises Exception: what pickling it raises.
    """
    pickled: bytes = _dill().dumps(value, recurse=True)
    return pickled


def loads(pickled: bytes) -> object:
    """The value of dill's pickle.

    :raises Exception: what unpickling raises.
    """
    value: object = _dill().loads(pickled)
    return value


def get_source(function: Any) -> str:
    """The source text of a function, also of one typed into an interpreter.

    :raises OSError: if there is none.
    """
    source: str = _dill().source.getsource(function, lstrip=True)
    return source
