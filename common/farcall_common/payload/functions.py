"""Functions by their hash: serialised once, and sent once to each process that calls them."""

from __future__ import annotations

import dataclasses
import hashlib
import types
from collections.abc import Callable
from typing import Any, Final

from farcall_common.errors import SerializationError
from farcall_common.payload.serializer import Serializer

_MAX_KNOWN_FUNCTIONS: Final = 1024

_serializer: Final = Serializer()


@dataclasses.dataclass(frozen=True, slots=True)
class Function:
    """A serialised function. ``hash`` is the SHA-256 of its body in hex."""

    name: str
    body: bytes
    hash: str


class FunctionTable:
    """Serialised functions of a process.

    A plain function is known by its identity: what it closes over is taken at its first use. Anything that carries
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
            while len(self._known) >= _MAX_KNOWN_FUNCTIONS:
                self._known.pop(next(iter(self._known)), None)
            self._known[id(function)] = (function, made)  # holding the function keeps its identity its own
        return made
