"""Function table of an engine: functions are serialised once, sent once to each manager, called by their hash."""

from __future__ import annotations

import dataclasses
import hashlib
import types
from collections.abc import Callable
from typing import Any, Final

from farcall_common.errors import SerializationError
from farcall_common.payload import Serializer

_REMEMBERED: Final = 1024

_serializer: Final = Serializer()


@dataclasses.dataclass(frozen=True, slots=True)
class Function:
    """A function that can travel."""

    name: str
    body: bytes
    hash: str


class FunctionTable:
    """A plain function is known by its identity: what it closes over is taken at its first use. Anything that carries
    state (a partial, a bound method, an instance) is serialised at each use."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Callable[..., Any], Function]] = {}

    def get(self, function: Callable[..., Any]) -> Function:
        """What travels for a function.

        :raises SerializationError: if it cannot.
        """
        known = self._known.get(id(function))
        if known is not None and known[0] is function:
            return known[1]
        if not callable(function):
            raise SerializationError(f"A {type(function).__name__} cannot be called.", hint="Pass the function itself.")
        body = _serializer.pack_function(function)
        name = getattr(function, "__name__", None)
        made = Function(
            name if isinstance(name, str) else type(function).__name__, body, hashlib.sha256(body).hexdigest()
        )
        if isinstance(function, types.FunctionType | types.BuiltinFunctionType):
            while len(self._known) >= _REMEMBERED:
                self._known.pop(next(iter(self._known)), None)
            self._known[id(function)] = (function, made)  # holding the function keeps its identity its own
        return made
