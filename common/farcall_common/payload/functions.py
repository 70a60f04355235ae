"""Functions by their hash: serialised once, and sent once to each process that calls them."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import types
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from farcall_common.coroutines import is_generator_function
from farcall_common.errors import SerializationError
from farcall_common.payload import shipped_modules
from farcall_common.payload.parts import failing_part
from farcall_common.payload.serializer import Serializer
from farcall_common.payload.snapshot import Snapshot

_MAX_KNOWN_FUNCTIONS: Final = 1024

_serializer: Final = Serializer()


#: For each module, whether it is a package, and its text.
Sources = Mapping[str, tuple[bool, str]]


class Included(NamedTuple):
    """The modules that travel with functions, and what identifies them."""

    sources: Sources
    digest: str

    @property
    def top_level(self) -> list[str]:
        """The names of packages and of modules outside of packages."""
        return [name for name in self.sources if "." not in name]

    def with_function(self, buffer: bytes) -> bytes:
        """The buffer of a function, with the modules: source text, which every worker reads."""
        call = f"function = function_with_modules({buffer!r}, {self.sources!r}, {self.digest!r})"
        return f"st\nfunction:{loader_text()}\n\n{call}\n".encode()


def check_callable(function: object, *, is_stage: bool = False) -> None:
    """Classes of what is mistaken for a function say in the hint what to do.

    :param is_stage: whether the function is a stage of a graph, whose value may be a generator.
    :raises SerializationError: for what cannot be called, and for generator functions that are no stage.
    """
    if not callable(function):
        hint = getattr(type(function), "farcall_hint_if_called", "Pass the function itself.")
        raise SerializationError(f"A {type(function).__name__} cannot be called.", hint=hint)
    if not is_stage and is_generator_function(function):
        name = getattr(function, "__name__", type(function).__name__)
        raise SerializationError(
            f"{name} is a generator function: a call of it returns a generator, which cannot be sent.",
            hint="Return a list, or submit a function that iterates over the generator and returns what you need.",
        )


def function_buffer(function: Callable[..., Any], serializer: Serializer, *, is_stage: bool = False) -> bytes:
    """The buffer of a function.

    :param is_stage: as of :func:`check_callable`.
    :raises SerializationError: if it cannot be sent; the message names the variable that cannot.
    """
    check_callable(function, is_stage=is_stage)
    try:
        return serializer.serialize_function(function)
    except SerializationError as error:
        part = failing_part(function, functools.partial(_fails, serializer))
        if not part:
            raise
        name = getattr(function, "__name__", type(function).__name__)
        raise SerializationError(f"{part} of {name}: {error.record.message}", hint=error.hint) from error


def _fails(serializer: Serializer, value: object) -> bool:
    try:
        serializer.serialize_function(value) if callable(value) else serializer.serialize(value)
    except Exception:  # noqa: BLE001 - reduce methods are user code
        return True
    return False


@functools.cache
def loader_text() -> str:
    """The source text of the loader of modules."""
    return inspect.getsource(shipped_modules)


@dataclasses.dataclass(frozen=True, slots=True)
class Function:
    """A serialised function. ``hash`` is the SHA-256 of its body in hex."""

    name: str
    body: bytes
    hash: str


class FunctionTable:
    """Serialised functions of a process.

    A plain function is serialised again when something that it uses has changed (see :class:`Snapshot`). Anything that
    carries state (a partial, a bound method, an instance) is serialised at each use.

    :param included: modules that travel with each of them.
    """

    def __init__(self, included: Included | None = None) -> None:
        self._included = included
        self._known: dict[int, tuple[Callable[..., Any], Function, Snapshot]] = {}

    def get(self, function: Callable[..., Any], *, is_stage: bool = False) -> Function:
        """What travels for a function.

        :param is_stage: as of :func:`check_callable`.
        :raises SerializationError: if it cannot.
        """
        known = self._known.get(id(function))
        if known is not None and known[0] is function and known[2].is_current():
            return known[1]
        snapshot = Snapshot(function) if type(function) in (types.FunctionType, types.BuiltinFunctionType) else None
        buffer = function_buffer(function, _serializer, is_stage=is_stage)
        body = _serializer.pack([buffer if self._included is None else self._included.with_function(buffer)])
        name = getattr(function, "__name__", None)
        made = Function(
            name if isinstance(name, str) else type(function).__name__, body, hashlib.sha256(body).hexdigest()
        )
        if snapshot is not None:
            while len(self._known) >= _MAX_KNOWN_FUNCTIONS:
                self._known.pop(next(iter(self._known)), None)
            self._known[id(function)] = (function, made, snapshot)  # holding the function keeps its identity its own
        return made
