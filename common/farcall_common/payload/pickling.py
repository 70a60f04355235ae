"""Pickle that refuses what it would only seem to send.

Plain pickle writes a class of ``__main__`` as its name, and the worker's ``__main__`` is another one. The pickler here
refuses such values at once, so that the next strategy can send them by value.
"""

from __future__ import annotations

import io
import pickle
from types import FunctionType
from typing import Any

from farcall_common.payload.origin import travels_by_value

PROTOCOL = 5
"""Written out, so that a newer Python on the client keeps writing what an older worker can read."""


class ReferencePickler(pickle.Pickler):
    """Refuses classes and functions that must travel by value."""

    def reducer_override(self, obj: object, /) -> Any:
        if isinstance(obj, (type, FunctionType)):
            module: object = obj.__module__  # a class can set it to anything
            if isinstance(module, str) and travels_by_value(module):
                raise pickle.PicklingError(f"{module}.{obj.__qualname__} cannot be imported on another machine")
        return NotImplemented


def dumps_by_reference(value: object) -> bytes:
    """Pickle a value whose classes and functions a worker can import.

    :raises pickle.PicklingError: if a class or function must travel by value, or cannot be pickled.
    :raises Exception: what the reduce methods of the value raise.
    """
    file = io.BytesIO()
    ReferencePickler(file, PROTOCOL).dump(value)
    return file.getvalue()
