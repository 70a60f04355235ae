"""Functions whose globals, helpers, classes, closures or defaults changed: the next call runs the new state."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest

from farcall._functions import FunctionTable as Handles
from farcall_common.payload import Serializer
from farcall_common.payload.functions import FunctionTable
from farcall_common.payload.snapshot import Snapshot

CELL = """
import abc, functools, math
RATE = 1
TABLE = {"rates": [1]}
LOCK = __import__("threading").Lock()

def helper(x):
    return x * RATE

def one(x):
    return x

class Item:
    base = 1
    def __init__(self):
        self.value = 1
    @property
    def doubled(self):
        return 2 * self.base
    @staticmethod
    def fixed():
        return 1

item = Item()
chosen = [one]
part = functools.partial(one, 1)

def uses_global():
    return RATE
def uses_data():
    return TABLE["rates"][0]
def uses_helper():
    return helper(1)
def uses_class():
    return Item.base
def uses_property():
    return Item().doubled
def uses_static():
    return Item.fixed()
def uses_instance():
    return item.value
def uses_function_in_data():
    return chosen[0](1)
def uses_partial():
    return part()
def uses_default(x=1):
    return x
def uses_mutable_default(x=[1]):
    return x[0]
def uses_keyword_default(*, x=1):
    return x
def uses_attribute():
    return uses_attribute.value
uses_attribute.value = 1
def uses_inner():
    return [RATE for _ in range(1)][0]
def around():
    value = 1
    def uses_closure():
        return value
    def change():
        nonlocal value
        value = 2
    return uses_closure, change
uses_closure, change_closure = around()
def uses_doc():
    return helper.__doc__
def uses_class_doc():
    return Item.__doc__
@functools.cache
def cached():
    return 1
cached.value = 1
def uses_attribute_of_cache():
    return cached.value
class Abstract(abc.ABC):
    pass
def uses_abstract_class():
    return isinstance(item, Abstract)
def uses_lock():
    with LOCK:
        return 1
"""


@pytest.fixture
def cell() -> dict[str, Any]:
    """The names of a notebook after a cell was run."""
    names: dict[str, Any] = {"__name__": "__main__"}
    _run(names, CELL)
    return names


def _run(cell: dict[str, Any], text: str) -> None:
    exec(compile(text, "<cell>", "exec"), cell)


CHANGES = [
    ("uses_global", "RATE = 2"),
    ("uses_inner", "RATE = 2"),
    ("uses_data", "TABLE['rates'][0] = 2"),
    ("uses_helper", "RATE = 2"),
    ("uses_helper", "def helper(x): return 2 * x"),
    ("uses_class", "Item.base = 2"),
    ("uses_class", "class Item: base = 2"),
    ("uses_property", "Item.base = 1.0 * 1; Item.doubled = property(lambda self: 3 * self.base)"),
    ("uses_static", "Item.fixed = staticmethod(lambda: 2)"),
    ("uses_instance", "item.value = 2"),
    ("uses_function_in_data", "chosen[0] = lambda x: 2 * x"),
    ("uses_function_in_data", "one.__code__ = (lambda x: 2 * x).__code__"),
    ("uses_partial", "one.__defaults__ = (5,)"),
    ("uses_default", "uses_default.__defaults__ = (2,)"),
    ("uses_mutable_default", "uses_mutable_default.__defaults__[0][0] = 2"),
    ("uses_keyword_default", "uses_keyword_default.__kwdefaults__['x'] = 2"),
    ("uses_attribute", "uses_attribute.value = 2"),
    ("uses_closure", "change_closure()"),
    ("uses_doc", "helper.__doc__ = 'other'"),
    ("uses_class_doc", "Item.__doc__ = 'other'"),
    ("uses_attribute_of_cache", "cached.value = 2"),
    ("uses_abstract_class", "Abstract.register(Item)"),
    ("uses_global", "uses_global.__code__ = (lambda: 2).__code__"),
]


@pytest.mark.parametrize(("name", "change"), CHANGES)
def test_function_is_sent_again_when_what_it_uses_has_changed(cell: dict[str, Any], name: str, change: str) -> None:
    function: Callable[[], Any] = cell[name]
    handles, functions = Handles(), FunctionTable()
    handle, sent = handles.handle(function), functions.get(function)
    assert handles.handle(function) is handle
    assert functions.get(function) is sent
    _run(cell, change)
    assert handles.handle(function).key != handle.key
    changed = functions.get(function)
    assert changed.hash != sent.hash
    assert handles.handle(function) is handles.handle(function)
    assert functions.get(function) is changed
    there: Any = Serializer().unpack_function(changed.body)
    assert there() == function()  # the same answer as the plain call


def test_function_that_has_not_changed_is_serialized_once(cell: dict[str, Any]) -> None:
    names = [name for name, _ in CHANGES]
    snapshots = [Snapshot(cell[name]) for name in names]
    _run(cell, "UNRELATED = 1\nrates = RATE")
    assert all(snapshot.is_current() for snapshot in snapshots)


def test_function_is_found_by_its_bytes_when_a_change_is_undone(cell: dict[str, Any]) -> None:
    handles = Handles()
    first = handles.handle(cell["uses_data"])
    _run(cell, "TABLE = {'rates': [2]}")
    assert handles.handle(cell["uses_data"]) is not first
    _run(cell, "TABLE = {'rates': [1]}")
    assert handles.handle(cell["uses_data"]) is first


def test_bound_method_of_a_builtin_has_the_state_of_its_object() -> None:
    numbers, functions = [1], FunctionTable()
    first = functions.get(numbers.__len__)
    numbers.append(2)
    assert functions.get(numbers.__len__).hash != first.hash


def test_value_that_cannot_be_compared_counts_as_changed(cell: dict[str, Any]) -> None:
    class Once:
        used = False

        def __reduce__(self) -> Any:
            if self.used:
                raise RuntimeError("pickled twice")
            self.used = True
            return Once, ()

    class Fresh:
        def __reduce__(self) -> Any:
            return (lambda: lambda: None)(), ()

    value: Any
    for value in (Once(), Fresh(), iter([]).__class__):
        cell["RATE"] = value
        assert Snapshot(cell["uses_global"]).is_current() is isinstance(value, type)


def test_locks_and_cached_functions_are_parts(cell: dict[str, Any]) -> None:
    snapshot = Snapshot(cell["uses_lock"])
    assert snapshot.is_current()
    cell["LOCK"] = threading.Lock()
    assert not snapshot.is_current()
    cell["RATE"] = [threading.Lock()]
    assert Snapshot(cell["uses_global"]).is_current()
    cell["helper"] = functools.cache(cell["one"])
    snapshot = Snapshot(cell["uses_helper"])
    assert snapshot.is_current()
    _run(cell, "one.__code__ = (lambda x: 2 * x).__code__")
    assert not snapshot.is_current()


class Once:
    """Can be pickled once, as values with an owner."""

    calls = 0

    def __reduce__(self) -> tuple[type, tuple[()]]:
        Once.calls += 1
        return Once, ()


@pytest.mark.parametrize("get", [FunctionTable().get, Handles(Serializer()).handle])
def test_reduce_methods_are_called_only_to_send_the_function(get: Callable[..., Any]) -> None:
    once = Once()

    def uses_once() -> object:
        return once

    Once.calls = 0
    get(uses_once)
    assert Once.calls == 1
