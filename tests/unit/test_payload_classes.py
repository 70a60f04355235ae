"""Classes by value: one identity in each process, and on the worker the state that a class had when it was sent."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
from cloudpickle import cloudpickle  # type: ignore[import-untyped]

from farcall_common.payload import Serializer, arrived_classes
from farcall_common.payload.functions import FunctionTable
from farcall_common.payload.native import dump_native, load_native

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

    for statement in ("", change, undo, change):
        exec(statement, names)
        item = names["Item"]()
        for name, args in (("one", ()), ("two", ()), ("of_instance", (item,)), ("one", ())):
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
