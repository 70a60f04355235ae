"""Parts of functions and values by name, for errors: which variable is too large, and which value cannot be sent."""

from __future__ import annotations

import functools
import itertools
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from farcall_common.payload.pickling import cell_contents, global_names, is_importable, plain_function

#: Parts of one value that are looked at, and how deep.
_MOST: Final = 1000
_DEEPEST: Final = 10


def failing_part(value: object, fails: Callable[[object], bool]) -> str:
    """The innermost part that fails by itself, as ``global 'job', attribute 'lock' (RLock)``; empty if none does."""
    path: list[str] = []
    for _ in range(_DEEPEST):
        found = next(((name, part) for name, part in itertools.islice(parts_of(value), _MOST) if fails(part)), None)
        if found is None:
            break
        path.append(found[0])
        value = found[1]
    return f"{', '.join(path)} ({_kind(value)})" if path else ""


def largest_part(value: object, size_of: Callable[[object], int]) -> str:
    """The innermost part with at least half of the bytes of a value, and its size; empty if none has."""
    path: list[str] = []
    size = size_of(value)
    for _ in range(_DEEPEST):
        sizes = [(size_of(part), name, part) for name, part in itertools.islice(parts_of(value), _MOST)]
        bytes_, name, part = max(sizes, key=lambda each: each[0], default=(0, "", None))
        if bytes_ < size / 2:
            break
        path.append(name)
        size, value = bytes_, part
    return f"{', '.join(path)} ({_kind(value)})" if path else ""


def named_arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The arguments of a call, as messages call them."""
    yield from ((f"argument {number}", value) for number, value in enumerate(args, start=1))
    yield from ((f"argument {name!r}", value) for name, value in kwargs.items())


def parts_of(value: Any) -> Iterator[tuple[str, object]]:
    """Return what a value that is sent with its code refers to, each with its name."""
    value = plain_function(value)
    kind = type(value)
    if kind is types.FunctionType:
        if not is_importable(value):
            yield from _parts_of_function(value)
    elif kind is functools.partial:
        yield "its function", value.func
        yield from named_arguments(value.args, value.keywords)
    elif kind is types.MethodType:
        yield "its object", value.__self__
        yield "its function", value.__func__
    elif kind is dict:
        yield from ((f"key {_shown(key)}", each) for key, each in value.items())
    elif kind in (list, tuple, set, frozenset):
        yield from ((f"item {number}", each) for number, each in enumerate(value))
    elif issubclass(kind, type):
        if not is_importable(value):
            yield from _attributes(value)
    elif hasattr(value, "__dict__"):
        yield from _attributes(value)
        yield f"class {kind.__qualname__!r}", kind


def _parts_of_function(function: types.FunctionType) -> Iterator[tuple[str, object]]:
    namespace = function.__globals__
    yield from ((f"global {name!r}", namespace[name]) for name in global_names(function.__code__) if name in namespace)
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    yield from ((f"variable {name!r} of the function around it", cell_contents(cell)) for name, cell in cells)
    count = function.__code__.co_argcount
    defaults = function.__defaults__ or ()
    names = function.__code__.co_varnames[count - len(defaults) : count]
    named = [*zip(names, defaults, strict=True), *(function.__kwdefaults__ or {}).items()]
    yield from ((f"default of {name!r}", each) for name, each in named)
    yield from _attributes(function)


def _attributes(value: object) -> Iterator[tuple[str, object]]:
    for name, each in [*vars(value).items()]:
        if type(each) not in (types.GetSetDescriptorType, types.MemberDescriptorType):
            yield f"attribute {name!r}", each


def _kind(value: object) -> str:
    return type(value).__qualname__


def _shown(key: object) -> str:
    return repr(key) if isinstance(key, str | int) else _kind(key)
