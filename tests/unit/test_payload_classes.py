"""Classes by value: one identity in each process, and on the worker the state that a class had when it was sent."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import ModuleType
from typing import Any

import pytest
from cloudpickle import cloudpickle  # type: ignore[import-untyped]

from farcall_common.errors import SerializationError
from farcall_common.payload import Serializer, arrived_classes
from farcall_common.payload.functions import FunctionTable
from farcall_common.payload.native import dump_native, load_native
from farcall_common.payload.pickling import INCLUDED_MARK

CLIENT, WORKER = Serializer(own_classes=True), Serializer()
#: For each way of a value: what writes it, what reads it on a worker, and what reads it on a client.
WAYS: dict[str, tuple[Callable[[Any], bytes], Callable[[bytes], Any], Callable[[bytes], Any]]] = {
    "cloud": (WORKER.serialize, WORKER.deserialize, CLIENT.deserialize),
    "engine": (dump_native, load_native, load_native),
}
every_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)

Elsewhere = Callable[[], AbstractContextManager[None]]


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> Elsewhere:
    """What is read inside of this context is read as in another process, always the same one."""
    there: Any = weakref.WeakValueDictionary()

    @contextmanager
    def context() -> Iterator[None]:
        with monkeypatch.context() as patch:
            patch.setattr(cloudpickle, "_DYNAMIC_CLASS_TRACKER_BY_ID", there)
            yield

    return context


def program(text: str) -> dict[str, Any]:
    """The names of a program."""
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(text, names)
    return names


STATES = """
RATE = 1
class Item:
    value = 1
    opt = 1
    def method(self):
        return 1
    def rate(self):
        return RATE
def of_instance(item):
    return item.value, item.method(), item.rate(), hasattr(item, "opt")
def one():
    return of_instance(Item())
def two():
    return of_instance(Item())
class Later:
    def read(self):
        return of_instance(Item())
def three():
    return Later().read()
"""
CHANGES = [
    ("Item.value = 2", "Item.value = 1"),
    ("Item.first = Item.method; Item.method = lambda self: 2", "Item.method = Item.first; del Item.first"),
    ("RATE = 2", "RATE = 1"),
    ("del Item.opt", "Item.opt = 1"),
]


@every_way
@pytest.mark.parametrize(("change", "undo"), CHANGES)
def test_a_call_sees_the_state_of_its_class_at_submit(
    elsewhere: Elsewhere, way: tuple[Any, Any, Any], change: str, undo: str
) -> None:
    write, read, _ = way
    names, table = program(STATES), FunctionTable()
    functions: dict[str, tuple[Any, Any]] = {}

    def call(name: str, *args: Any) -> Any:
        sent, arguments = table.get(names[name]), write(args)
        with elsewhere():
            if sent.hash in functions:
                function, states = functions[sent.hash]
                arrived_classes.restore(states)
            else:
                with arrived_classes.collected() as states:
                    function = WORKER.unpack_function(sent.body)
                functions[sent.hash] = function, states
            return function(*read(arguments))

    for statement, called in (
        ("", ["one", "two", "of_instance"]),
        (change, ["three"]),  # sends another class, which uses it, for the first time
        (undo, ["one", "three", "two", "of_instance"]),
        (change, ["of_instance", "one", "two", "three", "one"]),
    ):
        exec(statement, names)
        for name in called:
            args = (names["Item"](),) if name == "of_instance" else ()
            assert call(name, *args) == names[name](*args)


@every_way
def test_a_class_that_changes_stays_the_same_class_on_the_worker(
    elsewhere: Elsewhere, way: tuple[Any, Any, Any]
) -> None:
    write, read, _ = way
    names = program(STATES)
    buffer = write(names["Item"]())
    with elsewhere():
        first = read(buffer)
        assert type(first) is not names["Item"]
    names["Item"].value = 2
    buffer = write([names["Item"](), names["Item"]])
    with elsewhere():
        second, cls = read(buffer)
    assert type(second) is type(first) is cls
    assert first.value == 2


@every_way
def test_reading_a_result_leaves_the_classes_of_the_program_as_they_are(
    elsewhere: Elsewhere, way: tuple[Any, Any, Any]
) -> None:
    write, read, read_result = way
    names = program("def make():\n    class Item: value = 0\n    return Item\nItem = make()")
    item = names["Item"]
    sent = write(item())
    with elsewhere():
        there = read(sent)
        type(there).value = type(there).more = 7
        back = write(there)
    item.value = 5
    result = read_result(back)
    assert type(result) is item
    assert (item.value, hasattr(item, "more")) == (5, False)


def test_a_class_that_cannot_be_compared_has_one_version() -> None:
    class Odd:
        def __reduce__(self) -> Any:
            return Odd, ()

    names = program("class Item:\n    def method(self): return odd")
    names["odd"] = Odd()
    assert WORKER.serialize(names["Item"]) == WORKER.serialize(names["Item"])


KINDS = """
import abc, dataclasses, datetime, enum
class Planet(enum.Enum):
    EARTH = (1, 2)
    HOME = (1, 2)
    MARS = (3, 4)
    def __init__(self, mass, radius):
        self.mass, self.radius = mass, radius
class Coordinate(bytes, enum.Enum):
    def __new__(cls, value, label):
        member = bytes.__new__(cls, [value])
        member._value_, member.label = value, label
        return member
    X = (0, "x")
    Y = (1, "y")
class Call(enum.Enum):
    F = enum.member(lambda self: 3)
    G = enum.nonmember(5)
class Bits(enum.Flag, boundary=enum.KEEP):
    R, W, RW = 1, 2, 3
class Numbers(enum.IntEnum):
    ONE, UN = 1, 1
class Pair(tuple, enum.Enum):
    A = (1, 2)
class Day(datetime.date, enum.Enum):
    FIRST = (2026, 1, 2)
@dataclasses.dataclass
class Size:
    x: int
class Sizes(Size, enum.Enum):
    SMALL = 1
class Word(str, enum.Enum):
    A = "a"
    __str__ = lambda self: "other"
Word.A.next = Planet.MARS

KNOWN = []
class Plugin:
    def __init_subclass__(cls, *, tag, **rest):
        super().__init_subclass__(**rest)
        KNOWN.append(tag)
class One(Plugin, tag="one"): pass
MADE = []
class Meta(abc.ABCMeta):
    def __new__(cls, name, bases, names, *, tag, **rest):
        MADE.append(tag)
        return super().__new__(cls, name, bases, names)
    def __init__(cls, name, bases, names, **_):
        super().__init__(name, bases, names)
class Made(metaclass=Meta, tag="made"):
    @abc.abstractmethod
    def method(self): ...
class KindMeta(enum.EnumMeta):
    def __new__(cls, name, bases, names, **rest):
        MADE.append(name)
        return super().__new__(cls, name, bases, names, **rest)
class Kind(enum.Enum, metaclass=KindMeta):
    A = 1

def enums():
    members = [each for kind in (Planet, Coordinate, Call, Bits, Numbers, Pair, Day, Sizes, Word, Kind)
               for each in kind.__members__.items()]
    seen = [(name, repr(each.value)[:9], each.name, type(each)(each.value) is each) for name, each in members]
    more = (Planet.MARS.radius, Planet.HOME is Planet.EARTH, Coordinate.Y.label, bytes(Coordinate.Y), Call.F.value(0))
    more += (Call.G, Bits.R | Bits.W is Bits.RW, repr(Bits(8)), repr(~Bits.R), Numbers.UN + 1, Pair.A[1], Day.FIRST.day)
    return seen, more, Sizes.SMALL.x, str(Word.A), Word.A == "a", Word.A.next is Planet.MARS, list(Planet)
def subclasses():
    try:
        Made()
    except TypeError as error:
        text = str(error)
    class Two(Plugin, tag="two"): pass
    result = KNOWN[:], MADE[:], text, [each.__name__ for each in Plugin.__subclasses__()], isinstance(One(), Plugin)
    KNOWN.remove("two")
    return result
"""


@pytest.mark.parametrize("name", ["enums", "subclasses"])
def test_classes_are_made_without_a_call_of_their_code(elsewhere: Elsewhere, name: str) -> None:
    function = program(KINDS)[name]
    body = WORKER.pack_function(function)
    with elsewhere():
        assert repr(WORKER.unpack_function(body)()) == repr(function())


@every_way
def test_members_of_enums_return_as_those_of_the_program(elsewhere: Elsewhere, way: tuple[Any, Any, Any]) -> None:
    write, read, read_result = way
    names = program(KINDS)
    members = [*names["Planet"], *names["Coordinate"], *names["Word"]]
    buffer = write(members)
    with elsewhere():
        back = write(read(buffer))
    assert all(found is own for found, own in zip(read_result(back), members, strict=True))


@every_way
def test_a_class_that_the_other_side_cannot_make_is_refused(
    way: tuple[Any, Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    write, _, _ = way
    library: Any = ModuleType("library")
    monkeypatch.setitem(sys.modules, "library", library)
    setattr(library, INCLUDED_MARK, "")
    exec("class Base:\n    def __init_subclass__(cls, *, tag): pass", vars(library))
    with pytest.raises(SerializationError, match="the keyword 'tag'"):
        write(program("import library\nclass One(library.Base, tag=1): pass")["One"]())
