"""Pickling by value: byte code that exists only on this machine, with the globals that it refers to (cloudpickle).

cloudpickle alone sends by value what is in ``__main__``; here modules in the folder of a script too (see ``pickling``),
without registering anything in cloudpickle's process-wide table.

The writer names each module whose code is in the pickle, with the SHA-256 of its source and the other local modules
that this source imports. A reader that has the same source of all of them uses its own module instead of the copy
(ADR 0039). A client that reads a result uses its own classes even if their source differs, as pickle does when it sends
classes by name.

This module takes tens of milliseconds to import, and is imported when the first such value appears.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import hashlib
import importlib
import inspect
import io
import itertools
import linecache
import operator
import os
import pickle
import sys
import types
import typing
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import CellType, CodeType, FunctionType, MemberDescriptorType, ModuleType
from typing import Any, Final, NamedTuple, TypeGuard, cast

from cloudpickle import cloudpickle  # type: ignore[import-untyped]

from farcall_common.payload import arrived_classes
from farcall_common.payload.pickling import (
    EMPTY,
    MAIN,
    THIS_PYTHON,
    USES_MAIN,
    attribute,
    cell_contents,
    codes_in,
    global_names,
    is_registered_by_user,
    own_attributes,
    travels_by_value,
    uses_main_module,
)
from farcall_common.payload.snapshot import Snapshot

_MAX_SOURCE_CHARACTERS = 64 * 1024
_CLASSES_NAMED = 3
_MODULE_MACHINERY = frozenset({"__builtins__", "__cached__", "__loader__", "__spec__"})
#: Our keys in cloudpickle's field for extensions, which its own reader ignores.
_NAME = "farcall_name"
_MEMBERS = "farcall_members"


@dataclasses.dataclass(frozen=True)
class ByValue:
    """A pickle, and a description of the byte code in it.

    ``python`` is the version of the byte code in it; None when it has only references: then any reads it. ``sources``
    are the lines of the functions that travel, for readable tracebacks: file name, number of the first line, text.
    ``names`` are the classes whose byte code is in it, the first few, for messages. ``modules`` are those whose code is
    in it (see :func:`describe_modules`); None when there is no such code.
    """

    pickled: bytes
    python: str | None
    sources: list[tuple[str, int, str]]
    modules: Mapping[str, Sequence[str]] | None
    names: Sequence[str] = ()


def load_by_value(
    pickled: bytes | memoryview,
    modules: Mapping[str, Sequence[str]],
    *,
    own_classes: bool,
    buffers: Iterable[pickle.PickleBuffer | memoryview] = (),
) -> object:
    """The value of a pickle with code in it, with the reader's own modules and classes where they apply.

    :param modules: what :class:`ByValue` has.
    :param own_classes: as :class:`ReaderModules` has it.
    :raises Exception: what unpickling raises.
    """
    reader = ReaderModules(modules, own_classes=own_classes)
    with arrived_classes.keeping() if own_classes else contextlib.nullcontext():
        value: object = _ByValueUnpickler(io.BytesIO(pickled), reader, buffers).load()
    return value


class CodeReducer:
    """Reduces what the other side cannot import, for one pickle, and remembers what a reader must know of it.

    :param named: whether classes are written with the name under which a reader may have its own, for readers of other
        releases too. Else the reader has this module.
    """

    def __init__(self, is_local: Callable[[str], bool], *, named: bool) -> None:
        self._is_local = is_local
        self._named = named
        self._versions = _Versions()
        self.globals_ref: dict[int, dict[str, Any]] = {}  # for cloudpickle's methods: one namespace for each module
        self.codes: list[CodeType] = []
        self.modules: set[str] = set()
        self.classes: dict[str, None] = {}
        self._cells: dict[int, CellType] = {}

    _function_getnewargs = cloudpickle.Pickler._function_getnewargs
    _reduced_function = cloudpickle.Pickler._dynamic_function_reduce

    @property
    def _set_state(self) -> Callable[..., Any]:
        """What gives classes and modules their attributes, where they are read."""
        set_state: Callable[..., Any] = cloudpickle._class_setstate if self._named else set_class_state
        return set_state

    def described(self, pickled: bytes) -> ByValue:
        """The finished pickle, with what a reader must know of it."""
        return ByValue(
            pickled,
            THIS_PYTHON if self.codes else None,
            _source_blocks(self.codes),
            describe_modules(self.modules) if self.modules else None,
            [*self.classes][:_CLASSES_NAMED],
        )

    def function(self, function: FunctionType) -> Any:
        if function.__code__ is _SINGLE_DISPATCH:
            registered = [(kind, each) for kind, each in vars(function)["registry"].items() if kind is not object]
            first = vars(function)["__wrapped__"]
            own = own_attributes(function)
            register = functools.partial(_register_all_of, own) if own else register_all
            return functools.singledispatch, (first,), registered, None, None, register
        if self._is_sent(name := function.__globals__.get("__name__")):
            self.modules.add(name)
        if uses_main_module(function.__code__):
            raise pickle.PicklingError(f"{function.__qualname__} {USES_MAIN}")
        reduced = self._reduced_function(function)
        used = reduced[2][1]["__globals__"]  # without names in bodies of classes, and in texts
        names = sorted(global_names(function.__code__).difference(used))
        used |= {name: function.__globals__[name] for name in names if name in function.__globals__}
        if not (cells := function.__closure__):
            return reduced
        # cloudpickle gives each function cells of its own; functions that share a variable keep sharing it. A cell is
        # written empty, and its contents after the function: they may refer to it.
        make, (*args, _), (attributes, parts), *rest = reduced
        self._cells.update((id(cell), cell) for cell in cells)
        return make, (*args, cells), (attributes, {**parts, "__closure__": tuple(map(_Contents, cells))}), *rest

    def module(self, module: ModuleType) -> Any:
        self.modules.add(module.__name__)
        # The contents go in as state, after the module is known to the pickler: modules may import each other.
        contents = {name: item for name, item in vars(module).items() if name not in _MODULE_MACHINERY}
        return cloudpickle.dynamic_subimport, (module.__name__, {}), (contents, {}), None, None, self._set_state

    def class_(self, cls: Any) -> Any:
        generic = vars(cls).get("__pydantic_generic_metadata__")
        if isinstance(generic, dict) and generic.get("origin") is not None:
            return operator.getitem, (generic["origin"], tuple(generic["args"]))
        self._check_keywords(cls)
        version = self._versions.of(cls)
        make, args, state, *_ = cloudpickle._dynamic_class_reduce(cls)
        self.modules.add(str(cls.__module__))
        self.classes[str(cls.__qualname__)] = None
        if make is cloudpickle._make_skeleton_class:
            kind, name, bases, settings, *others = args
            if type(cls).__module__.partition(".")[0] == "msgspec":
                kind, settings = _parts_of_struct(cls, settings)
            elif "__slots__" in vars(cls) and typing.NamedTuple not in bases:  # which has no slots, and makes them
                settings = {**settings, "__slots__": _slots(cls)}
            if "__slots__" in vars(cls):  # made with the class
                own = {key: value for key, value in state[0].items() if not isinstance(value, MemberDescriptorType)}
                own.pop("__slots__", None)
                state = (own, state[1])
            args = (kind, name, bases, settings, *others)
        more: dict[str, Any] = {arrived_classes.VERSION: version} if version else {}
        extra: dict[str, Any] = {}
        if make is cloudpickle._make_skeleton_enum:
            extra[_MEMBERS] = _described_members(cls)
            more |= {arrived_classes.MEMBERS: own} if (own := _attributes_of_members(cls)) else {}
            state = ({name: each for name, each in state[0].items() if name not in cls.__members__}, {})
        if self._named and (name := importable_name(cls)) is not None:
            extra[_NAME] = name
        args = (*args[:-1], extra or None)
        state = (state[0], more)
        return make if self._named else _READERS[make], args, state, None, None, self._set_state

    def _check_keywords(self, cls: type) -> None:
        """Refuse a class that the other side cannot make: what it imports wants keywords of the class statement, which
        no class remembers."""
        metaclass: type = type(cls)
        for name, classes in (("__init_subclass__", cls.__mro__[1:]), ("__new__", metaclass.__mro__)):
            found = next((item for each in classes if (item := vars(each).get(name)) is not None), None)
            function = getattr(found, "__func__", found)
            if (
                isinstance(function, FunctionType)
                and function.__code__.co_kwonlyargcount
                and not self._is_local(function.__module__)
            ):
                keywords = inspect.getfullargspec(function)
                missing = [each for each in keywords.kwonlyargs if each not in (keywords.kwonlydefaults or ())]
                if missing:
                    raise pickle.PicklingError(
                        f"the class {cls.__qualname__} was made with the keyword {missing[0]!r}, whose value is not "
                        "known any more: define the class in a module that farcall.include sends"
                    )

    def library_type(self, name: str) -> Any:
        """A type that has a name in the module ``types`` only."""
        return cloudpickle._builtin_type, (name,)

    def named_type(self, kind: Any) -> Any:
        reduced = _reduced_type(kind)
        if hasattr(kind, "__value__"):  # an alias, whose module cannot be set
            return reduced
        return *reduced, (None, {"__module__": kind.__module__})

    def cached(self, function: Any) -> Any:
        """An empty cache of the same kind, around the function: ``lru_cache(maxsize, typed)(function)``."""
        maxsize, typed = function.cache_parameters().values()
        make = functools.partial(functools.lru_cache, maxsize)
        return functools.reduce, (operator.call, (make, typed, function.__wrapped__)), own_attributes(function) or None

    def other(self, obj: Any) -> Any:
        """Reduce code objects, cells, properties and the like, with cloudpickle."""
        if isinstance(obj, CodeType):
            self.codes.append(obj)
        if isinstance(obj, CellType):
            contents = EMPTY if id(obj) in self._cells else cell_contents(obj)
            return cloudpickle._make_empty_cell, (), None if contents is EMPTY else (None, {"cell_contents": contents})
        return cloudpickle.Pickler._dispatch_table[type(obj)](obj)

    def _is_sent(self, module_name: object) -> TypeGuard[str]:
        return isinstance(module_name, str) and self._is_local(module_name)


#: What ``functools.singledispatch`` returns has this code.
_SINGLE_DISPATCH: Final = cast(FunctionType, functools.singledispatch(len)).__code__


def register_all(function: Any, registered: Iterable[tuple[type, Callable[..., Any]]]) -> None:
    """Give a function of ``functools.singledispatch`` its functions for types."""
    for kind, each in registered:
        function.register(kind, each)


def _register_all_of(
    attributes: Mapping[str, Any], function: Any, registered: Iterable[tuple[type, Callable[..., Any]]]
) -> None:
    register_all(function, registered)
    vars(function).update(attributes)


def _slots(cls: type) -> Any:
    """The slots of a class as it was written with: its instances have no dict elsewhere either."""
    slots = vars(cls)["__slots__"]
    if isinstance(slots, str | tuple | list | dict):
        return slots
    return tuple(name for name, item in vars(cls).items() if isinstance(item, MemberDescriptorType))


class _Contents:
    """A cell with the contents of another one."""

    def __init__(self, cell: CellType) -> None:
        self._cell = cell

    def __reduce__(self) -> tuple[Any, ...]:
        contents = cell_contents(self._cell)
        return cloudpickle._make_cell, () if contents is EMPTY else (contents,)


class _Made:
    """A value that the reader makes by a call."""

    def __init__(self, make: Callable[..., Any], **settings: Any) -> None:
        self._make = functools.partial(make, **settings)

    def __reduce__(self) -> tuple[Any, ...]:
        return self._make, ()


_STRUCT_OPTIONS: Final = (
    *("frozen", "eq", "order", "array_like", "gc", "repr_omit_defaults", "omit_defaults", "forbid_unknown_fields"),
    *("weakref", "dict", "cache_hash", "tag", "tag_field"),
)


def _parts_of_struct(cls: Any, settings: Mapping[str, Any]) -> tuple[Callable[..., Any], dict[str, Any]]:
    """What makes a ``msgspec.Struct``: the metaclass with its options, and the names in the body of the class. The
    metaclass needs the fields at once."""
    msgspec = sys.modules["msgspec"]  # a task's, which may not be the worker's own
    own = [name for name in cls.__struct_fields__ if name in inspect.get_annotations(cls)]
    options = {name: getattr(cls.__struct_config__, name) for name in _STRUCT_OPTIONS}
    options["kw_only"] = bool(own) and not set(own) & {*cls.__match_args__}
    encoded = dict(zip(cls.__struct_fields__, cls.__struct_encode_fields__, strict=True))
    defaults = dict(zip(reversed(cls.__struct_fields__), reversed(cls.__struct_defaults__), strict=False))
    body: dict[str, Any] = {**settings, "__annotations__": dict.fromkeys(own, object)}
    for name in own:
        default = defaults.get(name, msgspec.NODEFAULT)
        has_factory = (type(default).__module__, type(default).__name__) == (type(cls).__module__, "Factory")
        default = {"default_factory": default.factory} if has_factory else {"default": default}
        body[name] = _Made(msgspec.field, name=encoded[name], **default)
    metaclass: Callable[..., Any] = type(cls)
    return functools.partial(metaclass, **options), body


def _reduced_type(obj: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    if isinstance(obj, typing.TypeVar):
        return cloudpickle._make_typevar, cloudpickle._decompose_typevar(obj)
    if isinstance(obj, typing.ParamSpec):
        variance = {"covariant": obj.__covariant__, "contravariant": obj.__contravariant__}
        return functools.partial(typing.ParamSpec, obj.__name__, bound=obj.__bound__, **variance), ()
    if isinstance(obj, typing.NewType):
        return typing.NewType, (obj.__name__, obj.__supertype__)
    if isinstance(obj, typing.TypeVarTuple):
        return typing.TypeVarTuple, (obj.__name__,)
    alias: Callable[..., Any] = type(obj)
    return functools.partial(alias, obj.__name__, obj.__value__, type_params=obj.__type_params__), ()


class _Versions:
    """Versions of the states of classes, for one pickle: random text, empty for the first state that was sent.

    A class has the version that it arrived with, or what it uses is compared with what it used.
    """

    def __init__(self) -> None:
        self._current: list[arrived_classes.Sent] = []

    def of(self, cls: type) -> str:
        if arrived_classes.has_arrived(cls):
            return arrived_classes.version_of(cls)
        sent = arrived_classes.sent
        known = sent.get(cls)
        if known is None or not self._is_current(cls, known):
            if known is not None:
                _numbers[cls] = os.urandom(8).hex()
            while len(sent) >= _MAX_SENT:
                sent.pop(next(iter(sent)), None)
            sent[cls] = found = arrived_classes.Sent(next(_order), Snapshot(cls))
            self._current.append(found)
        return _numbers.get(cls, "")

    def _is_current(self, cls: type, known: arrived_classes.Sent) -> bool:
        # What a class uses has not changed since a snapshot of the class if the class has not.
        if any(each.order < known.order and each.snapshot.covers(cls) for each in self._current):
            return True
        if known.snapshot.is_comparable and not known.snapshot.is_current():
            return False
        self._current.append(known)
        return True


_set_function_state = cloudpickle._function_setstate


def make_class(
    kind: Any, name: str, bases: Any, settings: dict[str, Any], tracker_id: str | None, extra: object
) -> type:
    """The class that has this number in this process, or a new one."""
    if (known := _known_class(tracker_id)) is not None:
        return known
    with _without_hooks(bases):
        made: type = cloudpickle._make_skeleton_class(_without_own_code(kind), name, bases, settings, tracker_id, extra)
    arrived_classes.add(made)
    return made


def make_enum(
    bases: Any, name: str, qualified: str, members: Any, module: str, tracker_id: str | None, extra: object
) -> type:
    """The enum that has this number in this process, or a new one."""
    if (known := _known_class(tracker_id)) is not None:
        return known
    described = extra.get(_MEMBERS) if isinstance(extra, dict) else None
    with _without_hooks(bases):
        if described is None:  # by an earlier release
            made: type = cloudpickle._make_skeleton_enum(bases, name, qualified, members, module, tracker_id, extra)
        else:
            made = _made_enum(bases, name, *described)
            made.__module__, made.__qualname__ = module, qualified
            made = cloudpickle._lookup_class_or_track(tracker_id, made)
    arrived_classes.add(made)
    return made


@contextlib.contextmanager
def _without_hooks(bases: Any) -> Iterator[None]:
    """Make a class without telling base classes that arrived by value: the program did that, and what they noted of it
    is in their state."""
    owners = {owner for base in types.resolve_bases(bases) for owner in base.__mro__ if _has_hook(owner)}
    hooks = {owner: vars(owner)["__init_subclass__"] for owner in owners}
    for owner in hooks:
        type.__delattr__(owner, "__init_subclass__")
    try:
        yield
    finally:
        for owner, hook in hooks.items():
            type.__setattr__(owner, "__init_subclass__", hook)


def _has_hook(cls: type) -> bool:
    return "__init_subclass__" in vars(cls) and arrived_classes.has_arrived(cls)


def _without_own_code(metaclass: Any) -> Any:
    """What makes a class of a metaclass. The code of a metaclass that arrived by value has run in the program."""
    if not arrived_classes.has_arrived(metaclass):
        return metaclass
    known = _first_of_here(metaclass)

    def make(name: str, bases: tuple[Any, ...], names: dict[str, Any]) -> type:
        made: type = known.__new__(metaclass, name, bases, names)
        known.__init__(made, name, bases, names)
        return made

    return make


def _first_of_here(metaclass: Any) -> Any:
    return next(each for each in metaclass.__mro__ if not arrived_classes.has_arrived(each))


@dataclasses.dataclass(frozen=True)
class _Member:
    """A member of an enum: arguments of the type that it is an instance of, and its value, which may be a function."""

    args: tuple[Any, ...]
    value: object


def _described_members(cls: Any) -> tuple[dict[str, _Member], object]:
    """All members of an enum with their aliases, and what the enum does with other flags."""
    base = _base_of_members(cls)
    members = {}
    for name, member in cls.__members__.items():
        if base is object:
            args: tuple[Any, ...] = ()
        elif hasattr(base, "__getnewargs__"):
            args = base.__getnewargs__(member)
        else:
            args = base.__reduce__(member)[1]
        members[name] = _Member(args, member._value_)
    return members, getattr(cls, "_boundary_", None)


def _base_of_members(cls: type) -> Any:
    """The type in C that makes the members of an enum."""
    return next(each for each in cls.__mro__ if isinstance(vars(each).get("__new__"), types.BuiltinFunctionType))


#: Attributes of members that enums set themselves.
_OF_ENUMS: Final = frozenset({"__objclass__", "_inverted_", "_name_", "_sort_order_", "_value_"})


def _attributes_of_members(cls: Any) -> dict[str, dict[str, Any]]:
    own = {
        name: {key: value for key, value in vars(member).items() if key not in _OF_ENUMS}
        for name, member in cls.__members__.items()
    }
    return {name: attributes for name, attributes in own.items() if attributes}


def _made_enum(bases: tuple[Any, ...], name: str, members: Mapping[str, _Member], boundary: object) -> Any:
    """An enum with these members, without a call of its methods: their attributes follow."""
    metaclass = _first_of_here(type(bases[-1]))
    names = metaclass.__prepare__(name, bases)
    for each, value in {"__new__": _new_member, "__init__": _nothing, **members}.items():
        names[each] = value
    options = {} if boundary is None else {"boundary": boundary}
    made = metaclass.__new__(type(bases[-1]), name, bases, names, **options)
    type.__delattr__(made, "__init__")
    return made


def _new_member(cls: Any, member: Any) -> Any:
    if isinstance(member, tuple):  # an enum of tuples puts its values into tuples
        (member,) = member
    made = _base_of_members(cls).__new__(cls, *member.args)
    made._value_ = member.value
    return made


def _nothing(*_: object) -> None:
    pass


def _known_class(tracker_id: str | None) -> type | None:
    known = cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID.get(tracker_id)
    return known if isinstance(known, type) else None


def set_class_state(created: Any, state: tuple[dict[str, Any], dict[str, Any]]) -> None:
    """Give a class or module its attributes; the program's own classes stay as they are."""
    if isinstance(created, type):
        arrived_classes.set_state(arrived_classes.State(created, *state))
    else:
        vars(created).update(state[0])


_READERS: Final = {cloudpickle._make_skeleton_class: make_class, cloudpickle._make_skeleton_enum: make_enum}


class _ByValueUnpickler(pickle.Unpickler):
    """Uses the reader's own classes, functions and modules instead of copies."""

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
        if (own := self._own_class(settings.get("__module__"), rest[-1])) is not None:
            return own
        return self._remembered(make_class(kind, name, bases, settings, *rest), rest[-1])

    def _make_enum(self, bases: Any, name: str, qualified: str, members: Any, module: str, *rest: Any) -> object:
        if (own := self._own_class(module, rest[-1])) is not None:
            return own
        return self._remembered(make_enum(bases, name, qualified, members, module, *rest), rest[-1])

    def _own_class(self, module_name: object, extra: object) -> object:
        name = extra.get(_NAME) if isinstance(extra, dict) else None
        if not isinstance(module_name, str) or not isinstance(name, str):
            return None
        return self._kept(self._reader.class_(module_name, name))

    def _remembered(self, created: type, extra: object) -> type:
        if isinstance(extra, dict) and isinstance(name := extra.get(_NAME), str):
            remember_importable_name(created, name)
        return created

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

    def _set_class_state(self, created: object, state: tuple[dict[str, Any], dict[str, Any]]) -> None:
        if id(created) not in self._own:
            set_class_state(created, state)

    def _kept(self, own: Any) -> Any:
        """Protect the reader's own object from the state of the copy."""
        if own is not None:
            self._own[id(own)] = own
        return own


def _source_blocks(codes: list[CodeType]) -> list[tuple[str, int, str]]:
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


# -- modules and classes of the reader ---------------------------------------------------------------------------------


class _Source(NamedTuple):
    """The source of a module in memory: its SHA-256, and the modules that it names in imports."""

    digest: str
    imports: frozenset[str]


#: Source of each module, with modification time and size of its file; None if it cannot be read from the file.
_sources: weakref.WeakKeyDictionary[ModuleType, tuple[tuple[int, int], _Source | None]] = weakref.WeakKeyDictionary()
#: Names of classes that were received by value, for readers that can import them.
_names: weakref.WeakKeyDictionary[type, str] = weakref.WeakKeyDictionary()
_MAX_SENT: Final = 1024
_order: Final = itertools.count()
#: Versions of the states of classes that changed since they were first sent.
_numbers: weakref.WeakKeyDictionary[type, str] = weakref.WeakKeyDictionary()


def describe_modules(names: Iterable[str]) -> dict[str, list[str]]:
    """The modules of these names, and the local ones that they import: SHA-256 of the source, and names of imports.

    A module whose source is not on disk, or was edited since it was imported, is left out: its code travels by value.
    """
    described: dict[str, list[str]] = {}
    todo = list(names)
    while todo:
        name = todo.pop()
        module = sys.modules.get(name)
        if name in described or name in MAIN or module is None or is_registered_by_user(name):
            continue
        source = _source_in_memory(module)
        if source is not None:
            needs = sorted(need for need in source.imports if need in sys.modules and travels_by_value(need))
            described[name] = [source.digest, *needs]
            todo += needs
    return described


def importable_name(cls: type) -> str | None:
    """The qualified name of a class that can be imported from its module; else None."""
    if (name := _names.get(cls)) is not None:
        return name
    name = cls.__qualname__
    return name if attribute(sys.modules.get(cls.__module__), name) is cls else None


def remember_importable_name(cls: type, name: str) -> None:
    """Remember the name of a class that was received by value, in case it is sent again."""
    _names[cls] = name


class ReaderModules:
    """The reader's own modules and classes, for one pickle.

    :param described: what :func:`describe_modules` said where the pickle was written.
    :param own_classes: whether the reader's classes are taken even if their source differs.
    """

    def __init__(self, described: Mapping[str, Sequence[str]], *, own_classes: bool) -> None:
        self._described = described
        self._own_classes = own_classes
        self._same: Collection[str] | None = None

    def module(self, name: str) -> ModuleType | None:
        """The module of this name, if it has the same source as where the pickle was written."""
        if name not in self._described:
            return None
        if self._same is None:
            self._same = _with_same_source(self._described)
        if name not in self._same:
            return None
        module = _imported(name)  # the import may have run other code than its source
        return module if module is not None and _has_digest(module, self._described[name][0]) else None

    def class_(self, module_name: str, qualified_name: str) -> type | None:
        """The reader's own class of this name, if it applies."""
        module = _imported(module_name) if self._own_classes else self.module(module_name)
        found = attribute(module, qualified_name)
        return found if isinstance(found, type) else None


def _with_same_source(described: Mapping[str, Sequence[str]]) -> set[str]:
    """The modules that have the same source here, as all modules that they import."""
    same = {name for name, (digest, *_) in described.items() if _is_here(name, digest)}
    while different := {name for name in same if not same.issuperset(described[name][1:])}:
        same -= different
    return same


def _is_here(name: str, digest: str) -> bool:
    module = sys.modules.get(name)
    if module is not None:
        return _has_digest(module, digest)
    spec = _find_spec(name)
    if spec is None or not spec.has_location or not spec.origin:
        return False
    try:
        return _digest(Path(spec.origin).read_bytes()) == digest
    except OSError:
        return False


def _has_digest(module: ModuleType, digest: str) -> bool:
    source = _source_in_memory(module)
    return source is not None and source.digest == digest


def _find_spec(name: str) -> ModuleSpec | None:
    """The spec of a module, without importing its parents as ``importlib.util.find_spec`` does."""
    parent, _, _ = name.rpartition(".")
    places = None
    if parent:
        above = getattr(sys.modules.get(parent), "__spec__", None) or _find_spec(parent)
        places = None if above is None else above.submodule_search_locations
        if places is None:
            return None
    try:
        return PathFinder.find_spec(name, places)
    except (ImportError, ValueError):
        return None


def _imported(name: str) -> ModuleType | None:
    """The module, or None if it cannot be imported here."""
    if (module := sys.modules.get(name)) is None and name not in MAIN:
        try:
            module = importlib.import_module(name)
        except (Exception, SystemExit):  # noqa: BLE001 - a module's own code may do anything
            return None
    return module


def _source_in_memory(module: ModuleType) -> _Source | None:
    file = getattr(module, "__file__", None)
    if not isinstance(file, str) or not file.endswith(".py"):
        return None
    try:
        status = Path(file).stat()
        stamp = (status.st_mtime_ns, status.st_size)
        known = _sources.get(module)
        if known is not None and known[0] == stamp:
            return known[1]
        text = Path(file).read_bytes()
        if known is not None:  # the file has changed: another text is not the source of the module in memory
            source = known[1] if known[1] is not None and known[1].digest == _digest(text) else None
        else:
            source = _examined(module, text)
    except (OSError, SyntaxError, ValueError):
        return None
    _sources[module] = stamp, source
    return source


def _examined(module: ModuleType, text: bytes) -> _Source | None:
    """The source of a module at its first check, unless its functions are from another text."""
    tree = ast.parse(text)
    written = set(codes_in(compile(tree, str(module.__file__), "exec", dont_inherit=True)))
    in_memory = {f.__code__ for f in _functions(module) if f.__code__.co_filename == module.__file__}
    if not _decorated_lines(tree).issuperset(code.co_firstlineno for code in in_memory - written):
        return None
    return _Source(_digest(text), frozenset(_imports(tree, module)))


def _decorated_lines(tree: ast.Module) -> set[int]:
    """The lines of decorated functions and classes: decorators such as typeguard's compile them again."""
    definitions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)]
    return {
        line
        for node in definitions
        for decorator in node.decorator_list
        for line in range(decorator.lineno, (node.end_lineno or node.lineno) + 1)
    }


def _functions(module: ModuleType) -> Iterator[FunctionType]:
    """The functions that a module defines, and those of its classes."""
    todo: list[object] = [*vars(module).values()]
    while todo:
        item = todo.pop()
        if isinstance(item, staticmethod | classmethod):
            item = item.__func__
        if isinstance(item, property):
            todo += [item.fget, item.fset, item.fdel]
        elif isinstance(item, FunctionType) and item.__globals__ is vars(module):
            yield item
        elif isinstance(item, type) and item.__module__ == module.__name__:
            todo += [each for each in vars(item).values() if each is not item]


def _imports(tree: ast.Module, module: ModuleType) -> Iterator[str]:
    package = getattr(module, "__package__", None) or ""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = ".".join(package.split(".")[: len(package.split(".")) - node.level + 1]) if node.level else ""
            base = ".".join(filter(None, (above, node.module)))
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def _digest(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()[:32]
