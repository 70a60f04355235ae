"""Pickler: one pass over a value, by reference what the other side can import, by value what it must (ADR 0097).

Each object is reduced once, so a value that may be pickled only once can be sent. Objects for which pickle has no
answer, or the wrong one on another machine, have a reducer here. Objects whose meaning is bound to this process are
refused: open files, weak references, locks that are held, conditions.

Code and the few kinds of objects that cloudpickle knows are in :mod:`.by_value`, which is imported when the first of
them appears.
"""

from __future__ import annotations

import _thread
import abc
import collections
import copyreg
import dataclasses
import functools
import gc
import importlib
import io
import operator
import os
import pickle
import sys
import threading
import types
import typing
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, Final, cast

from farcall_common.payload.pickling import (
    MAIN,
    PROTOCOL,
    attribute,
    is_importable,
    is_registered_by_user,
    place_of,
    plain_function,
    travels_by_value,
)

if TYPE_CHECKING:
    from farcall_common.payload.by_value import CodeReducer

_HEAP_TYPE: Final = 1 << 9
"""The flag of classes that are not compiled into an extension module."""


class Pickler(pickle.Pickler):
    """Pickles a value in one pass. ``code_reducer`` is None as long as nothing in it travels by value."""

    code_reducer: CodeReducer | None = None
    #: Whether code of a module travels by value, by the module's name.
    is_local: Callable[[str], bool] = staticmethod(travels_by_value)
    #: Whether a reader may have classes of its own, which it uses instead (ADR 0039).
    reader_has_classes: ClassVar[bool] = True

    def reducer_override(self, obj: Any, /) -> Any:
        reduce = _reducer_of(type(obj))  # type: ignore[arg-type]  # types are hashable
        return NotImplemented if reduce is None else reduce(self, obj)

    def by_value(self, obj: Any) -> CodeReducer:  # noqa: ARG002 - subclasses say in an error what it is
        """The reducer of code, for an object that the other side cannot import.

        :raises pickle.PicklingError: if this pickler writes references only.
        """
        if self.code_reducer is None:
            # Here, not at the top: cloudpickle takes 20 ms of every command's start, and most calls do not need it.
            from farcall_common.payload.by_value import CodeReducer

            self.code_reducer = CodeReducer(self.is_local, named=self.reader_has_classes)
        return self.code_reducer

    def can_import(self, obj: Any) -> bool:
        """Whether the other side finds the same object under its module and name."""
        return is_importable(obj, self.is_local)


class ReferencePickler(Pickler):
    """Refuses what must travel by value."""

    def by_value(self, obj: Any) -> CodeReducer:
        """Refuse the object."""
        module, name = getattr(obj, "__module__", None), getattr(obj, "__qualname__", None)
        what = f"{module}.{name}" if module and name else f"a {type(obj).__name__}"
        raise pickle.PicklingError(f"{what} cannot be imported on another machine")


_path_of_workers: frozenset[Path] | None = None


def set_path_of_workers(path: Iterable[str]) -> None:
    """Say where workers of this process find modules: modules of other folders travel to them by value."""
    global _path_of_workers
    _path_of_workers = frozenset(Path(entry).resolve() for entry in path)


@functools.cache
def _is_found_in(path: frozenset[Path], module_name: str) -> bool:
    name = module_name.partition(".")[0]
    place = place_of(sys.modules.get(name))
    if place is None or not travels_by_value(name):
        return True
    folder = Path(place).parent
    return (folder.parent if Path(place).name == "__init__.py" else folder).resolve() in path


def _is_of_this_process(module_name: str) -> bool:
    return (
        module_name in MAIN
        or module_name not in sys.modules
        or is_registered_by_user(module_name)
        or (_path_of_workers is not None and not _is_found_in(_path_of_workers, module_name))
    )


class NativePickler(Pickler):
    """For processes of the same files: only the program itself travels by value, and modules that workers do not find.
    Other modules travel by reference."""

    is_local = staticmethod(_is_of_this_process)
    reader_has_classes = False


def dumps_by_reference(value: object) -> bytes:
    """Pickle a value whose classes and functions a worker can import.

    :raises pickle.PicklingError: if a class or function must travel by value, or cannot be pickled.
    :raises Exception: any error of the value's reduce methods.
    """
    file = io.BytesIO()
    ReferencePickler(file, PROTOCOL).dump(value)
    return file.getvalue()


# -- reducers ----------------------------------------------------------------------------------------------------------

_Reducer = Callable[[Pickler, Any], Any]


class _Module:
    """A module by its name."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __reduce__(self) -> tuple[Any, ...]:
        return importlib.import_module, (self._name,)


def _attribute_of(module_name: str, name: str) -> tuple[Any, ...]:
    return getattr, (_Module(module_name), name)


def _class(pickler: Pickler, cls: Any) -> Any:
    if cls.__module__ == "pathlib._local":  # a module of Python 3.13 only
        return _attribute_of("pathlib", cls.__qualname__)
    name = cls.__name__
    if cls in _UNNAMED_TYPES:
        if pickler.code_reducer is not None:  # the reader has cloudpickle: less work for it
            return pickler.code_reducer.library_type(_UNNAMED_TYPES[cls])
        return _attribute_of("types", _UNNAMED_TYPES[cls])
    if (
        cls.__module__ == "_wrappers" and attribute(sys.modules.get("wrapt"), name) is cls
    ):  # not what its module is called
        return _attribute_of("wrapt", name)
    if not cls.__flags__ & _HEAP_TYPE:
        return NotImplemented
    return NotImplemented if pickler.can_import(cls) else pickler.by_value(cls).class_(cls)


#: Types such as that of functions, which have a name in ``types`` only.
_UNNAMED_TYPES: Final = {
    kind: name
    for name, kind in vars(types).items()
    if isinstance(kind, type) and attribute(sys.modules.get(kind.__module__), kind.__qualname__) is not kind
}


def _function(pickler: Pickler, function: FunctionType) -> Any:
    return NotImplemented if pickler.can_import(function) else pickler.by_value(function).function(function)


def _method(_: Pickler, method: MethodType) -> Any:
    """By its name, if the object has this method under it; else from its function."""
    owner, function = cast(Any, method.__self__), cast(Any, method.__func__)
    name = getattr(function, "__name__", None)
    found = _found_by_class(owner, name)
    if found is not None and getattr(found, "__func__", found) is function:
        return getattr, (owner, name)
    return MethodType, (function, owner)


def _found_by_class(owner: Any, name: object) -> Any:
    """Find a name in the class of an object, or in a class itself; None if the object has an attribute of that name."""
    is_class = isinstance(owner, type)
    if not isinstance(name, str) or (not is_class and name in getattr(owner, "__dict__", ())):
        return None
    classes = owner.__mro__ if is_class else type(owner).__mro__
    return next((found for cls in classes if (found := vars(cls).get(name)) is not None), None)


def _module(pickler: Pickler, module: ModuleType) -> Any:
    name = module.__name__
    if name in MAIN:
        raise pickle.PicklingError("the main module of a program cannot be sent; send what the function needs of it")
    if sys.modules.get(name) is module and not pickler.is_local(name):
        return importlib.import_module, (name,)
    return pickler.by_value(module).module(module)


def _decorated(pickler: Pickler, function: Any) -> Any:
    if pickler.is_local(function.__module__):
        pickler.by_value(function)
        return operator.itemgetter(0), ((plain_function(function),),)
    return NotImplemented


def _named_type(pickler: Pickler, kind: Any) -> Any:
    module = getattr(kind, "__module__", None)
    if isinstance(module, str) and attribute(sys.modules.get(module), kind.__name__) is kind:  # noqa: SIM102
        if not pickler.is_local(module):
            return NotImplemented
    return pickler.by_value(kind).named_type(kind)


def _cached(pickler: Pickler, function: Any) -> Any:
    return NotImplemented if pickler.can_import(function) else pickler.by_value(function).cached(function)


def _of_cloudpickle(pickler: Pickler, obj: Any) -> Any:
    return pickler.by_value(obj).other(obj)


def _lock(lock: Any) -> Any:
    if lock.locked():
        raise pickle.PicklingError("a lock that is held cannot be sent")
    return _thread.allocate_lock, ()


def _reentrant_lock(lock: Any) -> Any:
    if not lock.acquire(blocking=False):
        raise pickle.PicklingError("a lock that another thread holds cannot be sent")
    lock.release()
    return type(lock), ()


def reduced_lock(obj: object) -> Any:
    """The reduction of a lock for any pickler; NotImplemented for another object."""
    reduce = _LOCKS.get(type(obj))
    return NotImplemented if reduce is None else reduce(obj)


def _condition(_: Pickler, condition: object) -> Any:
    raise pickle.PicklingError(
        f"a {type(condition).__name__} of threads (or an Event, Semaphore or Queue with one) cannot be sent: "
        "threads of another machine would wait for it for ever"
    )


def _cached_property(_: Pickler, obj: Any) -> Any:
    """Without its lock, which Python 3.11 has."""
    state = {name: value for name, value in vars(obj).items() if name not in ("func", "lock")}
    return type(obj), (obj.func,), state


def _stream(_: Pickler, file: object) -> Any:
    """By name, if it is where this process writes to."""
    for name in ("stdout", "stderr"):
        if file is getattr(sys, name):
            return _attribute_of("sys", name)
    return NotImplemented  # refused by pickle, as other open files


def _memory(_: Pickler, view: memoryview) -> Any:
    if view.format != "B" or view.ndim != 1:
        return NotImplemented
    whole = type(view.obj) is (bytes if view.readonly else bytearray) and len(view) == len(view.obj)
    if whole and view.strides == (1,):
        return memoryview, (view.obj,)
    return memoryview, ((bytes if view.readonly else bytearray)(view),)


def _marker_of_dataclasses(name: str, _: Pickler, __: object) -> Any:
    """By name: they are compared by identity."""
    return _attribute_of("dataclasses", name)


def _parser(_: Pickler, part: Any) -> Any:
    """A parser or an argument of ``argparse``, which compares its attributes with one certain text by identity."""
    suppress = sys.modules["argparse"].SUPPRESS
    make, args, state, *rest = part.__reduce_ex__(PROTOCOL)
    return make, args, {name: _Suppress() if value is suppress else value for name, value in state.items()}, *rest


class _Suppress:
    def __reduce__(self) -> tuple[Any, ...]:
        return _attribute_of("argparse", "SUPPRESS")


def _wrapped_by_wrapt(pickler: Pickler, wrapper: Any) -> Any:
    """A function with a decorator of wrapt, as the object that it is; its class answers as if it were the function."""
    if pickler.can_import(wrapper):
        return wrapper.__qualname__
    if type(wrapper) is not sys.modules["wrapt"].FunctionWrapper or wrapper._self_enabled is not None:
        raise pickle.PicklingError(f"a {type(wrapper).__name__} of wrapt cannot be sent")
    # Attributes of the wrapper itself: it answers a question for its attributes with those of the function.
    dicts = [each for each in gc.get_referents(wrapper) if type(each) is dict]
    own = {name: getattr(wrapper, name) for each in dicts for name in each if str(name).startswith("_self_")}
    return type(wrapper), (wrapper.__wrapped__, wrapper._self_wrapper), (None, own) if own else None


def _bound_by_wrapt(_: Pickler, method: Any) -> Any:
    """A bound method with a decorator of wrapt, by its name."""
    owner = method._self_instance if method._self_instance is not None else getattr(method, "__self__", None)
    if owner is None or _found_by_class(owner, method.__name__) is not method._self_parent:
        raise pickle.PicklingError(f"a {type(method).__name__} of wrapt cannot be sent")
    return getattr, (owner, method.__name__)


def _pydantic_config(_: Pickler, config: Any) -> Any:
    """Whole, not by its attributes: an empty one asks itself for each of them for ever."""
    return type(config), (config.config_dict,)


def _pydantic_names(_: Pickler, names: object) -> Any:
    """Without the module's variables: they were needed when the validator was made."""
    return type(names), ()


_MOST_MARKERS: Final = 100_000
_markers: Final[dict[str, object]] = {}
_keys_of_markers: Final[dict[int, str]] = {}


def marker(key: str) -> object:
    """The bare ``object()`` with this key: one in each process."""
    known = _markers.get(key)
    if known is None:
        known = object()
        if len(_markers) < _MOST_MARKERS:
            known = _markers.setdefault(key, known)
            _keys_of_markers[id(known)] = key
    return known


def _marker(_: Pickler, obj: object) -> Any:
    """A bare ``object()`` by a key: programs compare such objects by identity only, and a function and its arguments
    travel apart."""
    key = _keys_of_markers.get(id(obj))
    if key is None:
        if len(_markers) >= _MOST_MARKERS:
            return NotImplemented
        key = _keys_of_markers.setdefault(id(obj), os.urandom(16).hex())
        _markers[key] = obj
    return marker, (key,)


def _global_generator(name: str, _: Pickler, generator: Any) -> Any:
    """By name, if it is the generator of the module: tasks must not draw the same numbers."""
    is_global = attribute(sys.modules.get(type(generator).__module__), name) is generator
    return name if is_global else NotImplemented


def _by_own_method(pickler: Pickler, obj: Any) -> Any:
    """Call the object's own reduce method. Refuse a name in a module that the other side lacks."""
    if type(obj) in copyreg.dispatch_table:
        return NotImplemented
    reduced = obj.__reduce_ex__(PROTOCOL)
    if isinstance(reduced, str):
        module: str = pickle.whichmodule(obj, reduced)  # type: ignore[attr-defined]  # of pickle's Python part
        if pickler.is_local(module):
            raise pickle.PicklingError(
                f"{module}.{reduced}, a {type(obj).__name__}, is sent by its name, which another machine cannot import"
            )
    return reduced


_LOCKS: Final[dict[type, Callable[[Any], Any]]] = {_thread.LockType: _lock, _thread.RLock: _reentrant_lock}
_CACHED: Final = type(functools.cache(len))
_ORDERED: Final = collections.OrderedDict[Any, Any]()
_REDUCERS: Final[dict[type, _Reducer]] = {
    object: _marker,
    FunctionType: _function,
    MethodType: _method,
    ModuleType: _module,
    _CACHED: _cached,
    functools.cached_property: _cached_property,
    **dict.fromkeys(_LOCKS, lambda _, lock: reduced_lock(lock)),
    memoryview: _memory,
    **{
        type(getattr(dataclasses, name)): functools.partial(_marker_of_dataclasses, name)
        for name in ("KW_ONLY", "MISSING", "_HAS_DEFAULT_FACTORY")
    },
    **dict.fromkeys((typing.TypeVar, typing.ParamSpec, typing.TypeVarTuple, typing.NewType), _named_type),
    **dict.fromkeys(
        (
            *(types.CodeType, types.CellType, types.GetSetDescriptorType, types.MappingProxyType),
            *(property, classmethod, staticmethod, dataclasses._FIELD_BASE),  # type: ignore[attr-defined]
            *(abc.abstractclassmethod, abc.abstractstaticmethod, abc.abstractproperty),
            *(type({}.keys()), type({}.values()), type({}.items())),
            *(type(_ORDERED.keys()), type(_ORDERED.values()), type(_ORDERED.items())),
        ),
        _of_cloudpickle,
    ),
}
_REDUCERS_BY_NAME: Final[dict[tuple[str, str], _Reducer]] = {
    ("random", "Random"): functools.partial(_global_generator, "_inst"),
    ("numpy.random.mtrand", "RandomState"): functools.partial(_global_generator, "_rand"),
    ("typing", "TypeAliasType"): _named_type,
    ("typing_extensions", "TypeAliasType"): _named_type,
    ("pydantic._internal._config", "ConfigWrapper"): _pydantic_config,
    ("pydantic._internal._namespace_utils", "NsResolver"): _pydantic_names,
}
"""For types by module and name, which are not imported for this."""


@functools.lru_cache(maxsize=512)
def _reducer_of(kind: type) -> _Reducer | None:
    """The reducer for objects of exactly this type; None if pickle needs none."""
    if (known := _REDUCERS.get(kind)) is not None:
        return known
    if issubclass(kind, type):
        return _class
    if getattr(kind, "farcall_decorated", None) is True:
        return _decorated
    if issubclass(kind, threading.Condition):
        return _condition
    if (argparse := sys.modules.get("argparse")) is not None:  # noqa: SIM102
        if issubclass(kind, argparse.Action | argparse._ActionsContainer):
            return _parser
    if issubclass(kind, io.TextIOBase):
        return _stream
    if (known := _REDUCERS_BY_NAME.get((kind.__module__, kind.__qualname__))) is not None:
        return known
    if (wrapt := sys.modules.get("wrapt")) is not None:
        if issubclass(kind, wrapt.FunctionWrapper):
            return _wrapped_by_wrapt
        if issubclass(kind, wrapt.BoundFunctionWrapper):
            return _bound_by_wrapt
    if kind.__reduce_ex__ is object.__reduce_ex__ and kind.__reduce__ is object.__reduce__:
        return None
    return _by_own_method
