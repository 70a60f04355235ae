"""Pickling of code that exists only on this machine: byte code with the globals it refers to (cloudpickle).

cloudpickle alone sends by value what is in ``__main__``; here modules beside a script travel too (see ``origin``),
without registering anything in cloudpickle's process-wide table. This module costs tens of milliseconds to import, and
is imported when the first such value appears.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import linecache
import pickle
import sys
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import CodeType, FunctionType, ModuleType
from typing import Any, TypeGuard

from cloudpickle import cloudpickle  # type: ignore[import-untyped]

from farcall_common.payload.foreign import THIS_PYTHON
from farcall_common.payload.importable import (
    ReaderModules,
    attribute,
    describe_modules,
    importable_name,
    remember_importable_name,
)
from farcall_common.payload.origin import travels_by_value
from farcall_common.payload.pickling import PROTOCOL

_MAX_SOURCE_CHARACTERS = 64 * 1024
_MODULE_MACHINERY = frozenset({"__builtins__", "__cached__", "__loader__", "__spec__"})
_SKELETONS = (cloudpickle._make_skeleton_class, cloudpickle._make_skeleton_enum)
#: The key in cloudpickle's own place for additions, which its reader ignores.
_NAME = "farcall_name"


@dataclasses.dataclass(frozen=True)
class ByValue:
    """A pickle, and what is worth knowing about the byte code in it.

    ``python`` is the version of the byte code in it; None when it has only references: then any reads it. ``sources``
    are the lines of the functions that travel, for readable tracebacks: file name, number of the first line, text.
    ``modules`` are those whose code is in it (see :func:`~farcall_common.payload.importable.describe_modules`); None
    when there is no such code.
    """

    pickled: bytes
    python: str | None
    sources: list[tuple[str, int, str]]
    modules: Mapping[str, Sequence[str]] | None


def dump_by_value(value: object, *, buffer_callback: Callable[[pickle.PickleBuffer], bool] | None = None) -> ByValue:
    """Pickle a value together with the code that a worker cannot import.

    :param buffer_callback: as pickle's own.
    :raises pickle.PicklingError: if something in it cannot be pickled.
    :raises Exception: what the reduce methods of the value raise.
    """
    file = io.BytesIO()
    pickler = _ByValuePickler(file, PROTOCOL, buffer_callback)
    pickler.dump(value)
    return ByValue(
        file.getvalue(),
        THIS_PYTHON if pickler.codes else None,
        _sources(pickler.codes),
        describe_modules(pickler.modules) if pickler.modules else None,
    )


def load_by_value(
    pickled: bytes | memoryview,
    modules: Mapping[str, Sequence[str]],
    *,
    own_classes: bool,
    buffers: Iterable[pickle.PickleBuffer | memoryview] = (),
) -> object:
    """The value of a pickle with code in it, with the reader's own modules and classes where they are to be taken.

    :param modules: what :class:`ByValue` has.
    :param own_classes: as :class:`~farcall_common.payload.importable.ReaderModules` has it.
    :raises Exception: what unpickling raises.
    """
    value: object = _ByValueUnpickler(
        io.BytesIO(pickled), ReaderModules(modules, own_classes=own_classes), buffers
    ).load()
    return value


class _ByValuePickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    def __init__(
        self, file: io.BytesIO, protocol: int, buffer_callback: Callable[[pickle.PickleBuffer], bool] | None
    ) -> None:
        super().__init__(file, protocol=protocol, buffer_callback=buffer_callback)
        self.codes: list[CodeType] = []
        self.modules: set[str] = set()

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, CodeType):
            self.codes.append(obj)
        if isinstance(obj, ModuleType) and obj.__name__ != "__main__" and _is_local(obj.__name__):
            self.modules.add(obj.__name__)
            # The contents go in as state, after the module is known to the pickler: modules may import each other.
            contents = {name: item for name, item in vars(obj).items() if name not in _MODULE_MACHINERY}
            return cloudpickle.dynamic_subimport, (obj.__name__, {}), (contents, {}), None, None, _set_class_state
        if isinstance(obj, _NAMED_TYPES) and not _is_importable(obj):
            return _made_again(obj)
        reduction = super().reducer_override(obj)
        if reduction is NotImplemented:
            if isinstance(obj, FunctionType) and _is_local(obj.__module__):
                reduction = self._dynamic_function_reduce(obj)
            elif isinstance(obj, type) and _is_local(obj.__module__):
                reduction = cloudpickle._dynamic_class_reduce(obj)
            else:
                return reduction
        if isinstance(obj, FunctionType):
            if _is_local(name := obj.__globals__.get("__name__")):
                self.modules.add(name)
        elif reduction[0] in _SKELETONS:
            self.modules.add(str(obj.__module__))
            if (name := importable_name(obj)) is not None:
                make, args, *rest = reduction
                return make, (*args[:-1], {_NAME: name}), *rest
        return reduction


#: What annotations name: pickle sends these by name alone, from whatever module.
_NAMED_TYPES = (typing.TypeVar, typing.ParamSpec, typing.TypeVarTuple, typing.NewType)


def _is_importable(obj: Any) -> bool:
    name: str = obj.__module__
    return not _is_local(name) and attribute(sys.modules.get(name), obj.__name__) is obj


def _made_again(obj: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    if isinstance(obj, typing.TypeVar):
        return cloudpickle._make_typevar, cloudpickle._decompose_typevar(obj)
    if isinstance(obj, typing.ParamSpec):
        variance = {"covariant": obj.__covariant__, "contravariant": obj.__contravariant__}
        return functools.partial(typing.ParamSpec, obj.__name__, bound=obj.__bound__, **variance), ()
    if isinstance(obj, typing.NewType):
        return typing.NewType, (obj.__name__, obj.__supertype__)
    return typing.TypeVarTuple, (obj.__name__,)


_set_class_state = cloudpickle._class_setstate
_set_function_state = cloudpickle._function_setstate


class _ByValueUnpickler(pickle.Unpickler):
    """Puts the reader's own classes, functions and modules where cloudpickle makes copies."""

    def __init__(
        self, file: io.BytesIO, reader: ReaderModules, buffers: Iterable[pickle.PickleBuffer | memoryview]
    ) -> None:
        super().__init__(file, buffers=buffers)
        self._reader = reader
        self._own: dict[int, object] = {}
        self._replaced: Mapping[str, Callable[..., Any]] = {
            "_class_setstate": self._set_class_state,
            "_function_setstate": self._set_function_state,
            "_make_function": self._make_function,
            "_make_skeleton_class": self._make_class,
            "_make_skeleton_enum": self._make_enum,
            "dynamic_subimport": self._make_module,
        }

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if module_name == cloudpickle.__name__ and (replaced := self._replaced.get(global_name)) is not None:
            return replaced
        return super().find_class(module_name, global_name)

    def _make_class(self, kind: type, name: str, bases: Any, settings: dict[str, Any], *rest: Any) -> object:
        def make() -> Any:
            return cloudpickle._make_skeleton_class(kind, name, bases, settings, *rest)

        return self._own_class(settings.get("__module__"), rest[-1]) or self._remembered(make(), rest[-1])

    def _make_enum(self, bases: Any, name: str, qualified: str, members: Any, module: str, *rest: Any) -> object:
        def make() -> Any:
            return cloudpickle._make_skeleton_enum(bases, name, qualified, members, module, *rest)

        return self._own_class(module, rest[-1]) or self._remembered(make(), rest[-1])

    def _own_class(self, module_name: object, extra: object) -> object:
        name = extra.get(_NAME) if isinstance(extra, dict) else None
        if not isinstance(module_name, str) or not isinstance(name, str):
            return None
        return self._kept(self._reader.class_(module_name, name))

    def _remembered(self, made: type, extra: object) -> type:
        if isinstance(extra, dict) and isinstance(name := extra.get(_NAME), str):
            remember_importable_name(made, name)
        return made

    def _make_module(self, name: str, contents: dict[str, Any]) -> object:
        return self._kept(self._reader.module(name)) or cloudpickle.dynamic_subimport(name, contents)

    def _make_function(self, code: CodeType, names: dict[str, Any], *rest: Any) -> object:
        """The reader's own function, or one of this code that uses the variables of the reader's own module."""
        module = self._reader.module(str(names.get("__name__")))
        if module is None:
            return cloudpickle._make_function(code, names, *rest)
        found = attribute(module, code.co_qualname)
        if isinstance(found, FunctionType) and found.__code__ == code and not code.co_freevars:
            return self._kept(found)
        return FunctionType(code, vars(module), *rest)

    def _set_function_state(self, function: FunctionType, state: tuple[dict[str, Any], dict[str, Any]]) -> None:
        if id(function) in self._own:
            return
        if self._reader.module(str(function.__globals__.get("__name__"))) is not None:
            state[1]["__globals__"] = {}
        _set_function_state(function, state)

    def _set_class_state(self, made: object, state: object) -> None:
        if id(made) not in self._own:
            _set_class_state(made, state)

    def _kept(self, own: Any) -> Any:
        """Keep the state that comes with a copy away from the reader's own object."""
        if own is not None:
            self._own[id(own)] = own
        return own


def _is_local(module_name: object) -> TypeGuard[str]:
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
