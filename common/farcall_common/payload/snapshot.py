"""Snapshot of a function: what it uses, compared before each call, so that the function is sent again after a change.

Parts that cannot change in place (code, numbers, text, imported classes) are compared by identity, which takes about a
microsecond for a small function. Other values (lists, dictionaries, arrays, instances) are pickled into a hash.
"""

from __future__ import annotations

import abc
import functools
import hashlib
import itertools
import logging
import operator
import pickle
import sys
import threading
import types
from collections.abc import Callable
from types import CodeType, FunctionType, ModuleType
from typing import Any, Final

from farcall_common.payload.pickling import (
    EMPTY,
    PROTOCOL,
    cell_contents,
    global_names,
    is_decorated,
    is_importable,
    own_attributes,
    travels_by_value,
)

_logger = logging.getLogger(__name__)

#: Data may have functions that use data, and so on; each pass looks one step further.
_MAX_PASSES: Final = 20
#: Attributes of classes and modules that Python sets, and that say nothing of what they do.
_MACHINERY: Final = frozenset(
    {
        "__annotations_cache__",
        "__builtins__",
        "__cached__",
        "__dict__",
        "__loader__",
        "__slotnames__",
        "__spec__",
        "__static_attributes__",
        "__weakref__",
        "_abc_impl",
    }
)
_CACHED: Final = type(functools.cache(lambda: None))
#: Values without parts.
_ATOMS: Final = frozenset(
    {type(None), bool, int, float, complex, str, bytes, type(...), type(NotImplemented), CodeType}
)
#: What pickle refuses, and has no parts: compared by identity.
_OPAQUE: Final = frozenset(
    {
        CodeType,
        type(threading.Lock()),
        type(threading.RLock()),
        types.ClassMethodDescriptorType,
        types.GetSetDescriptorType,
        types.MemberDescriptorType,
        types.MethodDescriptorType,
        types.WrapperDescriptorType,
    }
)
_WITHOUT_PARTS: Final = _ATOMS | _OPAQUE
#: Parts that data may have inside.
_FOUND: Final = (type, FunctionType, ModuleType)
#: Reads the parts of something now.
_Read = Callable[[], tuple[object, ...]]


class Snapshot:
    """Compares what a function uses with what it used. Take it before the function is serialized: then no change is
    missed.

    Code that other machines import counts as unchanged. A value that cannot be pickled counts as changed, and so does
    one whose class has a reduce method of its own: the object may permit only one call of it.
    """

    __slots__ = ("_data", "_digest", "_parts", "_plain", "_seen", "_todo")

    def __init__(self, function: object) -> None:
        #: Functions without closure, keyword defaults and attributes, which are most of them: their code, defaults,
        #: docstring, and how to get their globals. Compared without a call for each.
        self._plain: list[tuple[Any, object, object, object, Any, tuple[str, ...], tuple[object, ...]]] = []
        self._parts: list[tuple[_Read, tuple[object, ...]]] = []
        self._data: list[object] = []
        self._seen: dict[int, object] = {}  # while an object is held, its id() is unique
        self._todo: list[object] = [function]
        self._digest: bytes | None = None
        try:
            self._digest = self._take()
        except (Exception, SystemExit):  # what reduce methods and attributes of users' objects raise
            _logger.debug("a function cannot be compared, and is serialized for each call", exc_info=True)
        self._todo.clear()

    @property
    def is_comparable(self) -> bool:
        """Whether a change can be told from no change."""
        return self._digest is not None

    def covers(self, value: object) -> bool:
        """Whether a value is a part of it."""
        return id(value) in self._seen

    def is_current(self) -> bool:
        """Whether everything is as it was."""
        if self._digest is None:
            return False
        for function, code, defaults, doc, get, names, values in self._plain:
            if function.__code__ is not code or function.__defaults__ is not defaults or function.__doc__ is not doc:
                return False
            if function.__kwdefaults__ or function.__dict__:
                return False
            if names and not all(map(operator.is_, map(get, names, itertools.repeat(EMPTY)), values)):
                return False
        for read, values in self._parts:
            now = read()
            if len(now) != len(values) or not all(map(operator.is_, now, values)):
                return False
        try:
            return not self._data or self._digest == _digest(self._data, _no_visit)
        except (Exception, SystemExit):  # noqa: BLE001 - what reduce methods of users' objects raise
            return False

    def _take(self) -> bytes:
        """Find everything that the function uses, and return the hash of the data among it."""
        digest = b""
        for _ in range(_MAX_PASSES):
            while self._todo:
                self._visit(self._todo.pop())
            if self._data:
                digest = _digest(self._data, self._find)
            if not self._todo:
                return digest
        raise ValueError("reduce methods return other functions each time")

    def _find(self, value: object) -> None:
        """Visit later what is found inside of data: it may refer to more data."""
        if type(value) in _WITHOUT_PARTS:
            self._seen[id(value)] = value
        elif id(value) not in self._seen:
            self._todo.append(value)

    def _visit(self, value: Any) -> None:
        kind = type(value)
        if kind in _WITHOUT_PARTS or id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if kind is FunctionType:
            if not is_importable(value):
                self._watch_function(value)
        elif issubclass(kind, type):
            if not is_importable(value):
                self._watch(functools.partial(_class_parts, value))
        elif issubclass(kind, ModuleType):
            if value.__name__ != "__main__" and travels_by_value(value.__name__):
                self._watch(functools.partial(_contents, value))
        elif kind is _CACHED:
            self._watch(functools.partial(_cached_parts, value))
        elif (inner := _inner(value)) is not None:
            self._todo += inner
        else:
            self._data.append(value)

    def _watch_function(self, function: FunctionType) -> None:
        names = tuple(sorted(global_names(function.__code__)))
        if function.__closure__ or function.__kwdefaults__ or function.__dict__:
            self._watch(functools.partial(_function_parts, function, names))
            return
        defaults, get = function.__defaults__, function.__globals__.get
        values = tuple(get(name, EMPTY) for name in names)
        self._plain.append((function, function.__code__, defaults, function.__doc__, get, names, values))
        self._todo += (*(defaults or ()), *values)

    def _watch(self, read: _Read) -> None:
        values = read()
        self._parts.append((read, values))
        self._todo += values


def _function_parts(function: FunctionType, names: tuple[str, ...]) -> tuple[object, ...]:
    attributes, defaults = function.__dict__, function.__kwdefaults__
    return (
        function.__code__,
        function.__doc__,
        *(function.__defaults__ or ()),
        *(defaults.values() if defaults else ()),
        *map(function.__globals__.get, names, itertools.repeat(EMPTY)),
        *(map(cell_contents, function.__closure__) if function.__closure__ else ()),
        *((*attributes, *attributes.values()) if attributes else ()),
    )


def _class_parts(cls: type) -> tuple[object, ...]:
    registered = abc._get_dump(cls)[0] if isinstance(cls, abc.ABCMeta) else ()  # type: ignore[attr-defined]
    return (type(cls), *cls.__bases__, *_contents(cls), *[each() for each in registered])


def _cached_parts(function: Any) -> tuple[object, ...]:
    attributes = own_attributes(function)
    return (function.__wrapped__, *attributes, *attributes.values())


def _contents(namespace: object) -> tuple[object, ...]:
    attributes = vars(namespace)
    names = [name for name in [*attributes] if name not in _MACHINERY]
    return (*names, *map(attributes.get, names))


def _inner(value: Any) -> tuple[object, ...] | None:
    """The parts of what wraps others and does not change; None for other values."""
    kind = type(value)  # not isinstance(): proxies pretend to be other classes
    if kind in (staticmethod, classmethod):
        return (value.__func__,)
    if kind is property:
        return value.fget, value.fset, value.fdel
    if kind is functools.cached_property:
        return (value.func,)
    if kind is types.MethodType:
        return value.__func__, value.__self__
    if kind is types.BuiltinFunctionType and (value.__self__ is None or type(value.__self__) is ModuleType):
        return ()
    return (value.__wrapped__,) if kind is _CACHED or is_decorated(value) else None


def _no_visit(_: object) -> None:
    pass


def _digest(data: list[object], visit: Callable[[object], object]) -> bytes:
    """The hash of values.

    :param visit: called with functions, classes and other parts inside, of which only the identity is hashed.
    :raises Exception: if one of them cannot be pickled.
    """
    found = hashlib.sha256()
    _Hasher(found.update, visit).dump(data)
    return found.digest()


def _pair(*parts: object) -> tuple[object, ...]:
    return parts


class _File:
    def __init__(self, write: Callable[[Any], object]) -> None:
        self.write = write


class _Hasher(pickle.Pickler):
    def __init__(self, update: Callable[[Any], object], visit: Callable[[object], object]) -> None:
        super().__init__(_File(update), PROTOCOL, buffer_callback=lambda buffer: update(buffer.raw()))
        self._visit = visit

    def reducer_override(self, obj: Any, /) -> Any:
        kind = type(obj)
        if kind is types.MappingProxyType:
            return dict, (dict(obj),)
        if kind is types.BuiltinFunctionType:  # by name, as id() below
            return NotImplemented
        if kind is types.MethodType:  # a new object at each access
            return _pair, (obj.__func__, obj.__self__)
        if issubclass(kind, _FOUND) or kind in _OPAQUE or _inner(obj) is not None:
            self._visit(obj)
            return id, (id(obj),)
        if _has_own_reduce(kind):  # type: ignore[arg-type]  # types are hashable
            raise pickle.PicklingError(f"a {kind.__qualname__} is pickled by code of its own")
        return NotImplemented


@functools.lru_cache(maxsize=512)
def _has_own_reduce(kind: type) -> bool:
    """Whether objects are pickled by Python code that is not of the standard library."""
    methods: list[Any] = [kind.__reduce_ex__, kind.__reduce__]
    return any(
        type(method) is FunctionType and str(method.__module__).partition(".")[0] not in sys.stdlib_module_names
        for method in methods
    )
