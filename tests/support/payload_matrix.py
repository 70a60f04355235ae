"""A program with classes, functions and values of many kinds. Another process reads, calls and answers.

Runs as the main module: ``python payload_matrix.py DIRECTORY [PYTHON]``. Prints one line of JSON for each case and each
of the two ways (the cloud's buffers, an engine's): name, way, and ``same``, or why it was refused or what differs.
"""

from __future__ import annotations

import abc
import array
import asyncio
import collections
import contextlib
import contextvars
import copy
import dataclasses
import datetime
import decimal
import enum
import fractions
import functools
import io
import ipaddress
import itertools
import json
import logging
import math
import numbers
import operator
import os
import pathlib
import pickle
import queue
import random
import re
import string
import struct
import subprocess
import sys
import tempfile
import threading
import types
import typing
import uuid
import weakref
import zoneinfo
from collections.abc import Callable, Iterator
from random import gauss
from typing import Any, Generic, NamedTuple, NewType, Protocol, TypedDict, TypeVar

import attrs
import msgspec
import pydantic
import wrapt

from farcall_common.errors import DeserializationError, SerializationError
from farcall_common.payload import Serializer
from farcall_common.payload.native import dump_call, load_native

# -- classes -----------------------------------------------------------------------------------------------------------

T = TypeVar("T")
UserId = NewType("UserId", int)


class Plain:
    def __init__(self, x: int) -> None:
        self.x = x

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plain) and self.x == other.x

    def double(self) -> int:
        return self.x * 2

    @classmethod
    def made(cls, x: int) -> Plain:
        return cls(x)

    @staticmethod
    def fixed() -> int:
        return 7

    def __hidden(self) -> int:
        return self.x + 5

    def reveal(self) -> Callable[[], int]:
        return self.__hidden


class Child(Plain):
    def double(self) -> int:
        return super().double() + 1


@dataclasses.dataclass
class Record:
    x: int
    tags: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True, order=True)
class Frozen:
    x: int


@dataclasses.dataclass(slots=True)
class Slotted:
    x: int
    y: int = 2


@dataclasses.dataclass(slots=True, frozen=True)
class FrozenSlotted:
    x: int


class Slots:
    __slots__ = ("__private", "x")

    def __init__(self, x: int) -> None:
        self.x = x
        self.__private = x + 1

    def __eq__(self, other: object) -> bool:
        return type(other) is Slots and other.x == self.x and other.__private == self.__private


class SlotsWithDict(Slots):
    def __init__(self, x: int) -> None:
        super().__init__(x)
        self.more = x

    def __eq__(self, other: object) -> bool:
        return type(other) is SlotsWithDict and other.x == self.x and vars(other) == vars(self)


class OneSlot:
    __slots__ = "x"

    def __init__(self, x: int) -> None:
        self.x = x

    def __eq__(self, other: object) -> bool:
        return type(other) is OneSlot and other.x == self.x


class Property:
    def __init__(self, x: int) -> None:
        self.x = x

    @functools.cached_property
    def slow(self) -> int:
        return self.x + 1

    @property
    def quick(self) -> int:
        return self.x

    def __eq__(self, other: object) -> bool:
        return type(other) is Property and self.slow == other.slow and self.quick == other.quick


class Guarded:
    """Has both kinds of locks."""

    def __init__(self, x: int) -> None:
        self.x, self.lock, self.again = x, threading.Lock(), threading.RLock()

    def __eq__(self, other: object) -> bool:
        if type(other) is not Guarded:
            return False
        with self.lock, self.again, self.again:
            return self.x == other.x


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


class Level(enum.IntEnum):
    LOW = 1


class Flags(enum.Flag):
    A = 1
    B = 2


class Point(NamedTuple):
    x: int
    y: int = 0


class Form(TypedDict):
    x: int


class Shape(abc.ABC):
    @abc.abstractmethod
    def area(self) -> int: ...


class Square(Shape):
    def __init__(self, x: int) -> None:
        self.x = x

    def area(self) -> int:
        return self.x**2

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Shape) and self.area() == other.area()


class Box(Generic[T]):
    def __init__(self, item: T) -> None:
        self.item = item

    def __eq__(self, other: object) -> bool:
        return type(other) is Box and self.item == other.item


class Sized(Protocol):
    def size(self) -> int: ...


class Meta(type):
    def __call__(cls, *args: Any) -> Any:
        made = super().__call__(*args)
        made.by_meta = True
        return made


class WithMeta(metaclass=Meta):
    def __init__(self, x: int) -> None:
        self.x = x

    def __eq__(self, other: object) -> bool:
        return type(other) is WithMeta and vars(self) == vars(other)


class Registered:
    known: typing.ClassVar[list[str]] = []

    def __init_subclass__(cls) -> None:
        Registered.known.append(cls.__name__)


class FromRegistered(Registered):
    def __eq__(self, other: object) -> bool:
        return type(self) is type(other)


class Failure(Exception):
    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code

    def __reduce__(self) -> Any:
        return Failure, (self.code, str(self))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Failure) and (self.code, str(self)) == (other.code, str(other))


class Text(str):
    __slots__ = ()


class Numbers(list[int]):
    def __init__(self, *items: int) -> None:
        super().__init__(items)
        self.note = "n"


class Context:
    def __enter__(self) -> int:
        return 3

    def __exit__(self, *_: object) -> None: ...

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other)


class Struct(msgspec.Struct, tag="s", rename="camel", order=True):
    first_x: int
    items: list[int] = msgspec.field(default_factory=list)
    z: int = 3

    def total(self) -> int:
        return self.first_x + sum(self.items) + self.z


class SubStruct(Struct, kw_only=True):
    more: str


class Model(pydantic.BaseModel):
    x: int
    inner: list[int] = []


class GenericModel(pydantic.BaseModel, Generic[T]):
    value: T


@attrs.define
class Defined:
    x: int
    items: list[int] = attrs.field(factory=list)


@attrs.frozen
class FrozenDefined:
    x: int


class Once:
    """May be pickled once, together with what travels by value."""

    def __init__(self, x: int) -> None:
        self.x, self.used = x, False

    def __reduce__(self) -> Any:
        if self.used:
            raise RuntimeError("pickled twice")
        self.used = True
        return Once, (self.x,)

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.x == other.x


class Singleton:
    def __reduce__(self) -> str:
        return "THE_ONE"


THE_ONE = Singleton()


class ExitsAtPickle:
    def __reduce__(self) -> Any:
        sys.exit(3)


class Counter:
    def __init__(self) -> None:
        self.count = 0

    def __call__(self, x: int) -> int:
        self.count += x
        return self.count


#: Name, and how an instance is made.
CLASSES: dict[str, Callable[[], Any]] = {
    "plain": lambda: Plain(1),
    "child": lambda: Child(1),
    "dataclass": lambda: Record(1, ["a"]),
    "frozen dataclass": lambda: Frozen(1),
    "dataclass with slots": lambda: Slotted(1),
    "frozen dataclass with slots": lambda: FrozenSlotted(1),
    "slots": lambda: Slots(1),
    "slots and dict": lambda: SlotsWithDict(1),
    "one slot": lambda: OneSlot(1),
    "cached property": lambda: Property(1),
    "locks": lambda: Guarded(1),
    "enum": lambda: Colour.RED,
    "integer enum": lambda: Level.LOW,
    "flags": lambda: Flags.A | Flags.B,
    "named tuple": lambda: Point(1),
    "typed dict": lambda: Form(x=1),
    "abstract": lambda: Square(2),
    "generic": lambda: Box[int](1),
    "metaclass": lambda: WithMeta(1),
    "registered subclass": lambda: FromRegistered(),
    "exception": lambda: Failure(1, "text"),
    "text": lambda: Text("x"),
    "list": lambda: Numbers(1, 2),
    "context manager": lambda: Context(),
    "msgspec": lambda: Struct(1, [2]),
    "msgspec with keywords": lambda: SubStruct(1, more="x"),
    "pydantic": lambda: Model(x=1),
    "pydantic generic": lambda: GenericModel[int](value=1),
    "attrs": lambda: Defined(1),
    "frozen attrs": lambda: FrozenDefined(1),
    "pickled once": lambda: Once(1),
}


def examine(value: Any, kind: type) -> tuple[Any, ...]:
    """What a program asks of an instance of its class."""
    try:
        if isinstance(value, Exception):
            raise value
        caught = False
    except Failure:
        caught = True
    match value:
        case Plain() | Record() | Slotted() | Slots() | Struct() | Failure():
            matched = True
        case _:
            matched = False
    return (
        type(value) is kind,
        isinstance(value, kind),
        type(value) in (Plain, Record, Slotted, Slots, Colour, Struct, Once, GenericModel[int]),
        value == value,
        caught,
        matched,
        hasattr(value, "__dict__"),
        type(value).__qualname__,
    )


def with_instance(value: Any, kind: type) -> Any:
    return value, examine(value, kind)


# -- functions ---------------------------------------------------------------------------------------------------------

FACTOR = 3
ROW = [0, 0]
GRID = [ROW, ROW]
FIRST = SECOND = []  # type: ignore[var-annotated]
TABLE = {"a": [1]}
LOCK = threading.Lock()
AGAIN = threading.RLock()
LOG = logging.getLogger("matrix")
HANDLER = logging.StreamHandler(sys.stderr)
THE_MODULE = math
PATTERN = re.compile("a+")
NOW = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
SEEDED = random.Random(1)
VARIABLE: contextvars.ContextVar[int] = contextvars.ContextVar("VARIABLE", default=1)


def scaled(x: int) -> int:
    return x * FACTOR


def defaults(x: int, y: int = 2, *rest: int, key: str = "k", **more: int) -> Any:
    return x, y, rest, key, more


def mutable_default(x: int, seen: list[int] = []) -> list[int]:  # noqa: B006
    seen.append(x)
    return [seen.pop(), len(seen)]


def outer(x: int) -> int:
    def inner(y: int) -> int:
        return y * FACTOR

    return inner(x)


def adder(n: int) -> Callable[[int], int]:
    return lambda x: x + n + FACTOR


def recursive(n: int) -> int:
    return 1 if n < 2 else n * recursive(n - 1)


def even(n: int) -> bool:
    return n == 0 or odd(n - 1)


def odd(n: int) -> bool:
    return n != 0 and even(n - 1)


@functools.cache
def fibonacci(n: int) -> int:
    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)


@functools.lru_cache(maxsize=3)
def area(x: int) -> int:
    return x * 2


@functools.singledispatch
def described(x: object) -> str:
    return "object"


@described.register
def _(x: int) -> str:
    return "int"


@described.register(list)
def _(x: list[Any]) -> list[str]:
    return [described(each) for each in x]


@described.register
def _(x: Plain) -> str:
    return "plain"


def doubling(function: Callable[..., int]) -> Callable[..., int]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> int:
        return 2 * function(*args, **kwargs)

    return wrapper


@doubling
def decorated(x: int) -> int:
    return x + 1


@wrapt.decorator
def twice(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    return 2 * wrapped(*args, **kwargs)


@twice
def by_wrapt(x: int) -> int:
    return x + 1


def calls_by_wrapt(x: int) -> int:
    return by_wrapt(x)


@pydantic.validate_call
def validated(x: int) -> int:
    return x + 1


class Decorator:
    def __init__(self, function: Callable[..., int]) -> None:
        self.function = function

    def __call__(self, x: int) -> int:
        return self.function(x) * 10


@Decorator
def by_class(x: int) -> int:
    return x + 1


@contextlib.contextmanager
def managed() -> Iterator[int]:
    yield 5


def uses_managed() -> int:
    with managed() as value:
        return value


def numbers_up_to(n: int) -> Iterator[int]:
    yield from range(n)


def shared_rows() -> int:
    GRID[0][0] = 5
    return GRID[1][0]


def shared_names() -> int:
    FIRST.append(1)
    return len(SECOND)


def table() -> Any:
    return TABLE


def locked(x: int) -> int:
    with LOCK:
        return x


def locked_again(x: int) -> int:
    with AGAIN, AGAIN:
        return x


def knows(value: object) -> bool:
    with LOCK:
        return isinstance(value, Plain)


def catches(code: int) -> str:
    with AGAIN:
        try:
            raise Failure(code, "x")
        except Failure as error:
            return f"caught {error.code}"


def logs(x: int) -> int:
    LOG.addHandler(HANDLER)
    LOG.removeHandler(HANDLER)
    return x


def by_module(x: float) -> float:
    return THE_MODULE.sqrt(x)


def matches(text: str) -> bool:
    return PATTERN.match(text) is not None


def year() -> int:
    return NOW.year


def draws_differ(_: int) -> bool:
    return gauss(0, 1) != gauss(0, 1)


def seeded() -> float:
    return copy.deepcopy(SEEDED).random()


def walrus(x: int) -> Any:
    return [y := x + 1, y**2]


def matching(value: Any) -> str:
    match value:
        case {"x": int(x)}:
            return f"x={x}"
        case [first, *_]:
            return f"first={first}"
        case Colour.RED:
            return "red"
        case _:
            return "other"


def annotated(x: Plain, ids: list[UserId] | None = None) -> Box[int]:
    return Box(x.x)


def makes_class() -> Any:
    class Local:
        x = 3

    return Local.x


def comprehension(n: int) -> Any:
    return {x: [-y for y in range(x)] for x in range(n)}


def raises_inside(x: int) -> str:
    try:
        return str(1 // x)
    except ZeroDivisionError as error:
        return type(error).__name__


def star(*args: int, **kwargs: int) -> Any:
    return args, sorted(kwargs.items())


def positional(x: int, /, *, y: int) -> int:
    return x - y


def with_attributes(x: int) -> int:
    return x + int(with_attributes.offset)  # type: ignore[attr-defined]


with_attributes.offset = 4  # type: ignore[attr-defined]


def apply(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


def pooled(n: int) -> Any:
    import multiprocessing

    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.map(scaled, range(n))


def pooled_elsewhere(n: int) -> Any:
    import multiprocessing

    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.map(scaled, range(n))


def pooled_objects(n: int) -> Any:
    import multiprocessing

    with multiprocessing.get_context("fork").Pool(1) as pool:
        return [each.x for each in pool.map(Plain, range(n))]


def pooled_state(n: int) -> Any:
    import multiprocessing

    with multiprocessing.get_context("fork").Pool(1) as pool:
        return [type(each) is Counted for each in pool.map(counted, range(n))], Counted.count


class Counted:
    count = 0


def counted(_: int) -> Counted:
    Counted.count += 1
    return Counted()


def threads(n: int) -> Any:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(scaled, range(n)))


def runs_coroutine(x: int) -> int:
    async def inner() -> int:
        await asyncio.sleep(0)
        return scaled(x)

    return asyncio.run(inner())


def returns_function(n: int) -> Callable[[int], int]:
    return adder(n)


def returns_class() -> Any:
    return Plain


def context_value() -> int:
    return VARIABLE.get()


if sys.version_info >= (3, 12):
    exec(
        "type Pair = tuple[int, int]\n"
        "class Paired[U]:\n"
        "    pair: Pair\n"
        "    def __init__(self, pair: Pair, item: U): self.pair = pair\n"
        "def paired(x): return Paired(x, 1).pair\n"
        "def first[U](items: list[U]) -> U: return items[0]\n"
        "def alias(): return Pair.__value__\n"
    )

#: Name: the function, its arguments.
CALLS: dict[str, tuple[Any, ...]] = {
    "constant": (scaled, 2),
    "defaults": (defaults, 1),
    "rest": (defaults, 1, 2, 3),
    "mutable default": (mutable_default, 1),
    "nested": (outer, 2),
    "closure": (adder(10), 1),
    "lambda": (lambda x: x + FACTOR, 1),
    "lambda as a default": (lambda x, f=scaled: f(x), 1),
    "recursive": (recursive, 5),
    "mutually recursive": (even, 10),
    "cache": (fibonacci, 10),
    "lru_cache": (area, 2),
    "cache as an argument": (apply, area, 2),
    "recursive cache as an argument": (apply, fibonacci, 10),
    "partial of a cache": (functools.partial(apply, area), 2),
    "singledispatch": (described, 1),
    "singledispatch of a class": (described, Plain(1)),
    "singledispatch as an argument": (apply, described, [1, "x", Plain(1)]),
    "wraps": (decorated, 1),
    "wrapt": (by_wrapt, 1),
    "helper of wrapt": (calls_by_wrapt, 1),
    "partial of wrapt": (functools.partial(by_wrapt, 1),),
    "wrapt as an argument": (apply, by_wrapt, 1),
    "validate_call": (validated, "1"),
    "validate_call as an argument": (apply, validated, "1"),
    "decorator of a class": (by_class, 1),
    "context manager": (uses_managed,),
    "generator inside": (lambda: list(numbers_up_to(3)),),
    "shared rows": (shared_rows,),
    "shared names": (shared_names,),
    "table": (table,),
    "lock": (locked, 1),
    "reentrant lock": (locked_again, 1),
    "lock and a class": (knows, Plain(1)),
    "lock and an exception": (catches, 2),
    "handler": (logs, 1),
    "module": (by_module, 4.0),
    "module as an argument": (lambda m: m.sqrt(4), math),
    "pattern": (matches, "aa"),
    "time": (year,),
    "global generator": (draws_differ, 1),
    "seeded generator": (seeded,),
    "method of the global generator": (lambda f: 0 <= f() < 1, random.random),
    "walrus": (walrus, 1),
    "match": (matching, {"x": 1}),
    "match of an enum": (matching, Colour.RED),
    "annotations": (annotated, Plain(4)),
    "local class": (makes_class,),
    "comprehension": (comprehension, 3),
    "error inside": (raises_inside, 0),
    "star": (star, 1, 2),
    "partial": (functools.partial(positional, 5, y=2),),
    "partial method": (functools.partial(Plain.double, Plain(2)),),
    "attributes": (with_attributes, 1),
    "bound method": (Plain(4).double,),
    "bound method of a child": (Child(4).double,),
    "private method": (Plain(4).reveal(),),
    "class method": (Plain.made, 3),
    "static method": (Plain.fixed,),
    "class": (Plain, 3),
    "callable": (Counter(), 3),
    "built in": (abs, -3),
    "operator": (operator.add, 1, 2),
    "item getter": (operator.itemgetter(1), [1, 2]),
    "method caller": (operator.methodcaller("double"), Plain(2)),
    "method of a type": (str.upper, "x"),
    "method of a value": ("x,y".split, ","),
    "installed": (json.dumps, {"a": 1}),
    "forked pool": (pooled, 3),
    "spawned pool": (pooled_elsewhere, 3),
    "forked pool of objects": (pooled_objects, 3),
    "forked pool that changes a class": (pooled_state, 3),
    "threads": (threads, 3),
    "coroutine inside": (runs_coroutine, 2),
    "function as an argument": (apply, scaled, 2),
    "closure as an argument": (apply, adder(1), 2),
    "class as an argument": (apply, Plain, 2),
    "composed": (functools.reduce, operator.add, [1, 2, 3]),
    "context variable": (context_value,),
    "returned class": (returns_class,),
}
if sys.version_info >= (3, 12):
    CALLS |= {"type alias": (paired, (1, 2)), "type parameter": (first, [1, 2]), "alias": (alias,)}  # type: ignore[name-defined]  # noqa: F821

# -- values ------------------------------------------------------------------------------------------------------------

_cycle: list[Any] = [1]
_cycle.append(_cycle)
_shared = [1]

#: Name: how it is made. Compared by type and ``repr``, by ``LOOKS`` where that says nothing.
VALUES: dict[str, Callable[[], Any]] = {
    **{f"number {value!r}": functools.partial(copy.copy, value) for value in (0, -1, 2**70, 10**400, 1.5, -0.0, 1e308)},
    **{f"number {value!r}": functools.partial(copy.copy, value) for value in (math.inf, math.nan, 2j, True, None)},
    "ellipsis": lambda: ...,
    "not implemented": lambda: NotImplemented,
    "text": lambda: "Grüße \U0001f600",
    "NUL": lambda: "a\x00b",
    "surrogate": lambda: "\ud800",
    "long text": lambda: "x" * 70_000,
    "bytes": lambda: bytes(range(256)),
    "long bytes": lambda: bytes(70_000),
    "bytearray": lambda: bytearray(b"ab"),
    "memoryview": lambda: memoryview(b"ab"),
    "memoryview of a bytearray": lambda: memoryview(bytearray(b"ab")),
    "memoryview of numbers": lambda: memoryview(array.array("i", [1, 2])),
    "array": lambda: array.array("d", [1.5]),
    "list": lambda: [1, [2, []]],
    "tuple": lambda: (1, (2,)),
    "set": lambda: {1},
    "frozenset": lambda: frozenset({1}),
    "dict": lambda: {"b": 1, "a": {}},
    "keys of many types": lambda: {1: 1, "1": 2, None: 3, (1,): 4},
    "cycle": lambda: _cycle,
    "shared": lambda: [_shared, _shared],
    "deep": lambda: json.loads("[" * 150 + "]" * 150),
    "keys": lambda: {"a": 1}.keys(),
    "values": lambda: {"a": 1}.values(),
    "items": lambda: {"a": 1}.items(),
    "mapping proxy": lambda: types.MappingProxyType({"a": 1}),
    "range": lambda: range(1, 9, 2),
    "slice": lambda: slice(1, 2),
    "counter": lambda: collections.Counter("aab"),
    "ordered": lambda: collections.OrderedDict(b=1, a=2),
    "default dict": lambda: collections.defaultdict(list, a=[1]),
    "default dict of a lambda": lambda: collections.defaultdict(lambda: 3, a=1),
    "deque": lambda: collections.deque([1], maxlen=3),
    "chain map": lambda: collections.ChainMap({"a": 1}, {}),
    "user dict": lambda: collections.UserDict(a=1),
    "user list": lambda: collections.UserList([1]),
    "named tuple made here": lambda: typing.cast(Any, collections.namedtuple("Made", "a b"))(1, 2),
    "namespace": lambda: types.SimpleNamespace(a=1),
    "fraction": lambda: fractions.Fraction(1, 3),
    "decimal": lambda: decimal.Decimal("1.10"),
    "decimal context": lambda: decimal.Context(prec=5),
    "date": lambda: datetime.date(2026, 1, 1),
    "time": lambda: datetime.time(1, 2),
    "datetime": lambda: datetime.datetime(2026, 1, 1, fold=1),  # noqa: DTZ001
    "aware datetime": lambda: NOW,
    "zone": lambda: zoneinfo.ZoneInfo("UTC"),
    "offset": lambda: datetime.timezone(datetime.timedelta(hours=1), "X"),
    "timedelta": lambda: datetime.timedelta(1, 2, 3),
    "uuid": lambda: uuid.UUID(int=1),
    "address": lambda: ipaddress.ip_address("::1"),
    "network": lambda: ipaddress.ip_network("10.0.0.0/8"),
    "path": lambda: pathlib.Path("/a/b"),
    "pure path": lambda: pathlib.PurePosixPath("a"),
    "windows path": lambda: pathlib.PureWindowsPath("c:/a"),
    "class of a path": lambda: pathlib.PurePosixPath,
    "pattern": lambda: re.compile("a+", re.IGNORECASE),
    "match": lambda: re.match("a", "a"),
    "template": lambda: string.Template("$a"),
    "struct": lambda: struct.Struct("<i"),
    "logger": lambda: logging.getLogger("matrix.x"),
    "root logger": lambda: logging.getLogger(),
    "log record": lambda: logging.LogRecord("n", 10, "p", 1, "m", (), None),
    "handler": lambda: logging.StreamHandler(sys.stderr),
    "file handler": lambda: logging.FileHandler(os.devnull),
    "formatter": lambda: logging.Formatter("%(message)s"),
    "stdout": lambda: sys.stdout,
    "stderr": lambda: sys.stderr,
    "stdin": lambda: sys.stdin,
    "string io": lambda: io.StringIO("abc"),
    "bytes io": lambda: io.BytesIO(b"abc"),
    "text file": lambda: pathlib.Path(__file__).open(encoding="utf-8"),  # noqa: SIM115
    "binary file": lambda: pathlib.Path(__file__).open("rb"),  # noqa: SIM115
    "temporary file": lambda: tempfile.TemporaryFile(),  # noqa: SIM115
    "weak reference": lambda: weakref.ref(THE_ONE),
    "weak set": lambda: weakref.WeakSet([THE_ONE]),
    "weak dict": lambda: weakref.WeakValueDictionary(a=THE_ONE),
    "weak method": lambda: weakref.WeakMethod(HANDLER.flush),
    "lock": threading.Lock,
    "held lock": lambda: _held(threading.Lock()),
    "reentrant lock": threading.RLock,
    "condition": threading.Condition,
    "event": threading.Event,
    "semaphore": threading.Semaphore,
    "barrier": lambda: threading.Barrier(2),
    "thread": lambda: threading.Thread(),
    "thread local": threading.local,
    "queue": queue.Queue,
    "simple queue": queue.SimpleQueue,
    "context variable": lambda: VARIABLE,
    "generator": lambda: (x for x in "a"),
    "coroutine function": lambda: asyncio.sleep,
    "list iterator": lambda: iter([1, 2]),
    "count": lambda: itertools.count(3),
    "zip": lambda: zip("a", "b", strict=False),
    "enumerate": lambda: enumerate("a"),
    "map": lambda: map(str, [1]),
    "built-in function": lambda: len,
    "built-in type": lambda: int,
    "type of functions": lambda: types.FunctionType,
    "type of None": lambda: type(None),
    "type of iterators": lambda: type(iter([])),
    "generic alias": lambda: list[int],
    "union": lambda: int | None,
    "typing alias": lambda: list[int],
    "any": lambda: typing.Any,
    "type variable": lambda: T,
    "new type": lambda: UserId,
    "protocol": lambda: Sized,
    "abstract class": lambda: Shape,
    "generic class": lambda: Box[int],
    "number tower": lambda: numbers.Integral,
    "module": lambda: math,
    "package": lambda: os.path,
    "main module": lambda: sys.modules["__main__"],
    "module made here": lambda: types.ModuleType("made_here"),
    "function": lambda: scaled,
    "code": lambda: scaled.__code__,
    "frame": lambda: sys._getframe(),
    "property": lambda: Plain.__dict__["double"],
    "partial": lambda: functools.partial(pow, 2),
    "item getter": lambda: operator.itemgetter(1, 2),
    "attribute getter": lambda: operator.attrgetter("a.b"),
    "error": lambda: ValueError("x", 1),
    "error with a cause": lambda: _caused(),
    "error group": lambda: ExceptionGroup("g", [ValueError(1)]),
    "system error": lambda: FileNotFoundError(2, "No such file", "name"),
    "unicode error": lambda: UnicodeDecodeError("utf-8", b"x", 0, 1, "r"),
    "generator of random numbers": lambda: random.Random(5),
    "system generator": lambda: random.SystemRandom(),
    "flags of the library": lambda: re.IGNORECASE | re.MULTILINE,
    "signal": lambda: __import__("signal").SIGINT,
    "status": lambda: __import__("http").HTTPStatus.OK,
    "environment": lambda: os.environ,
    "singleton": lambda: THE_ONE,
    "exits at pickle": ExitsAtPickle,
    "parser": lambda: __import__("argparse").ArgumentParser("p"),
    "signature": lambda: __import__("inspect").signature(defaults),
    "sentinel in a dict": lambda: {"a": Colour.RED, "b": Frozen(1), "c": UserId(3)},
    "connection": lambda: __import__("sqlite3").connect(":memory:"),
    "socket": lambda: __import__("socket").socket(),
    "process": lambda: subprocess.Popen,
    "context": contextvars.copy_context,
    "task factory": asyncio.Event,
}


def _held(lock: Any) -> Any:
    lock.acquire()
    return lock


def _caused() -> Exception:
    error = ValueError("x")
    error.add_note("note")
    return error


def data_values() -> dict[str, Callable[[], Any]]:
    """Values of numpy, pandas, polars and pyarrow, as far as they are installed."""
    found: dict[str, Callable[[], Any]] = {}
    with contextlib.suppress(ImportError):
        import numpy as np

        kinds = "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 complex64 complex128"
        found |= {f"numpy {kind}": functools.partial(np.ones, 3, kind) for kind in kinds.split()}
        found |= {f"numpy scalar {kind}": functools.partial(np.ones(1, kind).__getitem__, 0) for kind in kinds.split()}
        found |= {
            "numpy empty": lambda: np.empty((0, 3)),
            "numpy nothing": lambda: np.array(3.5),
            "numpy Fortran": lambda: np.asfortranarray(np.arange(6.0).reshape(2, 3)),
            "numpy strided": lambda: np.arange(10)[::3],
            "numpy big-endian": lambda: np.arange(3, dtype=">i4"),
            "numpy text": lambda: np.array(["a", "bc"]),
            "numpy bytes": lambda: np.array([b"a"]),
            "numpy objects": lambda: np.array([1, "a", None], dtype=object),
            "numpy of a class": lambda: np.array([Frozen(1)], dtype=object),
            "numpy times": lambda: np.array(["2026-01-01"], "datetime64[D]"),
            "numpy structured": lambda: np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]),
            "numpy record": lambda: np.rec.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]),
            "numpy masked": lambda: np.ma.masked_array([1, 2], [True, False]),
            "numpy matrix": lambda: np.asmatrix([[1, 2]]),
            "numpy large": lambda: np.arange(20_000.0),
            "numpy read-only": lambda: _read_only(np.arange(3)),
            "numpy dtype": lambda: np.dtype("f8"),
            "numpy type": lambda: np.float64,
            "numpy ufunc": lambda: np.sin,
            "numpy function": lambda: np.linalg.norm,
            "numpy generator": lambda: np.random.default_rng(1),
            "numpy polynomial": lambda: np.polynomial.Polynomial([1, 2]),
            "numpy NaT": lambda: np.datetime64("NaT", "D"),
        }
    with contextlib.suppress(ImportError):
        import pandas as pd

        found |= {
            "pandas frame": lambda: pd.DataFrame({"a": [1, 2], "b": ["x", None]}),
            "pandas empty": pd.DataFrame,
            "pandas series": lambda: pd.Series([1.5], name="s"),
            "pandas index": lambda: pd.Index(["a"]),
            "pandas multi index": lambda: pd.MultiIndex.from_tuples([(1, "a")]),
            "pandas range": lambda: pd.RangeIndex(3),
            "pandas category": lambda: pd.Series(["a", "b"], dtype="category"),
            "pandas nullable": lambda: pd.array([1, None], dtype="Int64"),
            "pandas text": lambda: pd.Series(["a"], dtype="string"),
            "pandas zone": lambda: pd.Series(pd.to_datetime(["2026-01-01"]).tz_localize("UTC")),
            "pandas timestamp": lambda: pd.Timestamp("2026-01-01", tz="UTC"),
            "pandas timedelta": lambda: pd.Timedelta("1D"),
            "pandas period": lambda: pd.period_range("2026-01", periods=2, freq="M"),
            "pandas interval": lambda: pd.interval_range(0, 2),
            "pandas NA": lambda: pd.NA,
            "pandas NaT": lambda: pd.NaT,
            "pandas sparse": lambda: pd.arrays.SparseArray([0, 1]),
            "pandas large": lambda: pd.DataFrame({"a": range(20_000)}),
        }
    with contextlib.suppress(ImportError):
        import polars as pl

        found |= {
            "polars frame": lambda: pl.DataFrame({"a": [1, 2], "b": ["x", None]}),
            "polars series": lambda: pl.Series("s", [1.5]),
            "polars empty": pl.DataFrame,
            "polars lazy": lambda: pl.LazyFrame({"a": [1]}).select(pl.col("a") + 1),
            "polars expression": lambda: pl.col("a") + 1,
            "polars category": lambda: pl.Series(["a"], dtype=pl.Categorical),
            "polars lists": lambda: pl.DataFrame({"a": [[1], []]}),
            "polars structs": lambda: pl.DataFrame({"a": [{"x": 1}]}),
            "polars type": lambda: pl.Int64,
            "polars zone": lambda: pl.Series([NOW]),
        }
    with contextlib.suppress(ImportError):
        import pyarrow as pa

        found |= {
            "arrow table": lambda: pa.table({"a": [1, 2]}),
            "arrow batch": lambda: pa.record_batch({"a": [1]}),
            "arrow array": lambda: pa.array([1, None]),
            "arrow chunks": lambda: pa.chunked_array([[1], [2]]),
            "arrow dictionary": lambda: pa.array(["a", "a"]).dictionary_encode(),
            "arrow nested": lambda: pa.array([{"x": [1]}]),
            "arrow schema": lambda: pa.schema([("a", pa.int8())]),
            "arrow type": lambda: pa.list_(pa.int8()),
            "arrow scalar": lambda: pa.scalar(1),
            "arrow buffer": lambda: pa.py_buffer(b"ab"),
            "arrow large": lambda: pa.table({"a": range(20_000)}),
            "arrow zone": lambda: pa.array([NOW]),
            "arrow decimals": lambda: pa.array([decimal.Decimal("1.10")]),
        }
    return found


def _read_only(value: Any) -> Any:
    value.flags.writeable = False
    return value


def look(value: Any, name: str) -> Any:
    """What a program sees of a value, as plain data."""
    seen = LOOKS[name](value) if name in LOOKS else repr(value)
    return type(value).__module__, type(value).__qualname__, re.sub(" at 0x[0-9a-f]+", "", str(seen))


LOOKS: dict[str, Callable[[Any], Any]] = {
    "memoryview": lambda v: (v.tobytes(), v.readonly),
    "memoryview of a bytearray": lambda v: (v.tobytes(), v.readonly),
    "match": lambda v: v.group(),
    "template": lambda v: v.template,
    "struct": lambda v: v.format,
    "formatter": lambda v: v._fmt,
    "handler": lambda v: (v.acquire(), v.release(), v.level, v.stream is sys.stderr),
    "stdout": lambda v: v is sys.stdout,
    "stderr": lambda v: v is sys.stderr,
    "string io": lambda v: v.getvalue(),
    "bytes io": lambda v: v.getvalue(),
    "lock": lambda v: (v.acquire(timeout=5), v.release()),
    "reentrant lock": lambda v: (v.acquire(timeout=5), v.acquire(timeout=5), v.release(), v.release()),
    "default dict of a lambda": lambda v: (v["a"], v["b"]),
    "decimal context": lambda v: v.prec,
    "shared": lambda v: v[0] is v[1],
    "cycle": lambda v: v[1] is v,
    "new type": lambda v: (v.__name__, v.__supertype__),
    "generator of random numbers": lambda v: copy.deepcopy(v).random(),
    "system generator": lambda v: 0 <= v.random() < 1,
    "function": lambda v: v(2),
    "property": lambda v: v(Plain(1)),
    "code": lambda v: v.co_name,
    "error with a cause": lambda v: (repr(v), v.__notes__),
    "list iterator": lambda v: list(copy.copy(v)),
    "environment": lambda v: type(v),
    "parser": lambda v: v.prog,
    "numpy generator": lambda v: copy.deepcopy(v).random(),
    "numpy read-only": lambda v: (v, v.dtype),
    "arrow buffer": lambda v: v.to_pybytes(),
    "numpy of a class": lambda v: isinstance(v[0], Frozen),
    "protocol": lambda v: v.__name__,
    "abstract class": lambda v: isinstance(Square(1), v),
    "polars lazy": lambda v: v.collect(),
    "polars expression": lambda v: v.meta.root_names(),
    "task factory": lambda v: v.is_set(),
}


def from_global(name: str) -> Any:
    return look(THE_VALUE, name)


THE_VALUE: Any = None


def returned(value: Any) -> Any:
    return value


# -- the two processes -------------------------------------------------------------------------------------------------

WORKER = """
import pickle, sys

from farcall_common.payload import Serializer
from farcall_common.payload.native import dump_native, load_call
from farcall_common.errors import SerializationError

serializer = Serializer()


def answered(function, call, way):
    try:
        run = serializer.unpack_function(function)
        args, kwargs = load_call(call) if way == "engine" else serializer.unpack_call(call)
        result = run(*args, **kwargs)
    except BaseException as error:
        return "failed", f"{type(error).__name__}: {error}"
    try:
        return "done", dump_native(result) if way == "engine" else serializer.serialize(result)
    except SerializationError as error:
        return "refused", str(error)


if __name__ == "__main__":
    with open("tasks", "rb") as file:
        tasks = pickle.load(file)
    answers = [answered(*task) for task in tasks]
    with open("answers", "wb") as file:
        pickle.dump(answers, file)
"""


def compare(value: Any, plain: Any) -> bool:
    """Whether a result is what the plain call returned."""
    if isinstance(value, tuple) and isinstance(plain, tuple) and len(value) == len(plain):
        return type(value) is type(plain) and all(map(compare, value, plain))
    return type(value) is type(plain) and bool(value is plain or value == plain)


def cases() -> Iterator[tuple[str, Callable[[], tuple[Any, ...]], Callable[[Any, Any], bool]]]:
    """Name of the case, what makes function and arguments, and what compares the results."""
    for name, make in CLASSES.items():
        yield f"class: {name}", functools.partial(_class_case, make), compare
    for name, call in CALLS.items():
        yield f"call: {name}", functools.partial(tuple, call), compare
    for name, make in {**VALUES, **data_values()}.items():
        yield f"global: {name}", functools.partial(_global_case, make, name), compare
        yield f"argument: {name}", functools.partial(_argument_case, make, name), compare
        yield f"result: {name}", functools.partial(_result_case, make), functools.partial(_looks_same, name)


def _class_case(make: Callable[[], Any]) -> tuple[Any, ...]:
    value = make()
    return with_instance, value, type(value)


def _global_case(make: Callable[[], Any], name: str) -> tuple[Any, ...]:
    global THE_VALUE
    THE_VALUE = make()
    return from_global, name


def _argument_case(make: Callable[[], Any], name: str) -> tuple[Any, ...]:
    return look, make(), name


def _result_case(make: Callable[[], Any]) -> tuple[Any, ...]:
    return returned, make()


def _looks_same(name: str, value: Any, plain: Any) -> bool:
    return bool(look(value, name) == look(plain, name))


def main(directory: str, python: str = sys.executable) -> None:
    serializer = Serializer(own_classes=True)
    ways = ("cloud", "engine")
    tasks, open_cases, findings = [], [], []
    for name, make, same in cases():
        for way in ways:
            try:
                function, *args = make()
                body = serializer.pack_function(function)
                call = dump_call(tuple(args), {}) if way == "engine" else serializer.pack_call(args)
            except SerializationError as error:
                findings.append((name, way, "refused", str(error)))
                continue
            tasks.append((body, call, way))
            function, *args = make()  # the plain call may change them
            open_cases.append((name, way, same, copy_of_call(function, args)))
    base = pathlib.Path(directory)
    (base / "tasks").write_bytes(pickle.dumps(tasks))
    (base / "matrix_worker.py").write_text(WORKER, encoding="utf-8")
    subprocess.run([python, "-m", "matrix_worker"], cwd=base, check=True, timeout=200)
    answers = pickle.loads((base / "answers").read_bytes())
    for (name, way, same, (outcome, plain)), (answer, content) in zip(open_cases, answers, strict=True):
        if answer != "done":
            finding = "same" if (answer, content) == (outcome, plain) else answer
            findings.append((name, way, finding, "" if finding == "same" else f"{content} (plain: {plain})"))
            continue
        try:
            value = load_native(content) if way == "engine" else serializer.deserialize(content)
            finding, text = ("same", "") if same(value, plain) else ("different", f"{value!r} (plain: {plain!r})")
        except DeserializationError as error:
            finding, text = "unread", str(error)
        except Exception as error:  # noqa: BLE001 - of load_native and of the comparison
            finding, text = "unread", f"{type(error).__name__}: {error}"
        findings.append((name, way, finding, text))
    for line in findings:
        print(json.dumps(line))


def copy_of_call(function: Any, args: list[Any]) -> tuple[str, Any]:
    """The outcome of the plain call."""
    try:
        return "done", function(*args)
    except BaseException as error:  # noqa: BLE001 - compared with the worker's
        return "failed", f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    main(*sys.argv[1:])
