"""Importable classes: whether a reader uses its own class or the sent one (ADR 0039)."""

from __future__ import annotations

import base64
import importlib
import os
import pickle
import subprocess
import sys
import typing
from collections.abc import Callable, Iterator
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import pytest

from farcall_common.errors import DeserializationError
from farcall_common.payload import (
    BINARY_DATA,
    CloudPickleCode,
    CloudPickleDataBase64,
    Serializer,
    parse_allowed,
)
from farcall_common.payload.pickling import travels_by_value
from tests.waiting import WAIT_S

LIBRARY = """
import enum
import mylib_core

SCALE = 2

class Result(mylib_core.Base):
    def __init__(self, value):
        self.value = value
    def scaled(self):
        return self.value * SCALE
    class Inner:
        pass

class Failure(Exception):
    pass

class Colour(enum.Enum):
    RED = 1

def make(value):
    return Result(value)

def adder(n):
    return lambda value: Result(value + n)
"""
GENERIC = """
import functools
from collections.abc import Callable
from typing import Generic, NewType, ParamSpec, TypeVar, TypeVarTuple

T = TypeVar("T", int, str)
P = ParamSpec("P")
Ts = TypeVarTuple("Ts")
Number = NewType("Number", int)

def passed(function: Callable[P, T]) -> Callable[P, T]:
    @functools.wraps(function)
    def inner(*args: P.args, **kwargs: P.kwargs) -> T:
        return function(*args, **kwargs)
    return inner

def of_type_variable(value: T) -> T:
    return value

def of_parameters(value: int) -> int:
    return passed(of_type_variable)(value)

def of_tuple(*values: *Ts) -> int:
    return values[0]

def of_new_type(value: Number) -> Number:
    return Number(value)

class Box(Generic[T]):
    def __init__(self, value: T) -> None:
        self.value = value
"""
CORE = "class Base:\n    pass\n"

worker = Serializer()
client = Serializer(own_classes=True)
Place = Callable[..., ModuleType]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """Go to a machine whose PYTHONPATH has these texts; answers its ``mylib``, where it has one."""
    made = 0

    def leave() -> None:
        for name in ("mylib", "mylib_core"):
            sys.modules.pop(name, None)

    def go(library: str | None = LIBRARY, core: str | None = CORE, *, imported: bool = True) -> Any:
        nonlocal made
        leave()
        made += 1
        path = tmp_path / str(made)
        path.mkdir()
        for name, text in (("mylib", library), ("mylib_core", core)):
            if text is not None:
                (path / f"{name}.py").write_text(text, encoding="utf-8")
        monkeypatch.setattr(sys, "path", [str(path), *(each for each in sys.path if str(tmp_path) not in each)])
        importlib.invalidate_caches()
        return importlib.import_module("mylib") if imported and library is not None else None

    yield go
    leave()


def sent(value: object) -> bytes:
    return worker.serialize(value, strategies=[CloudPickleDataBase64()])


@pytest.mark.parametrize("reader", [worker, client], ids=["worker", "client"])
@pytest.mark.parametrize("imported", [True, False])
def test_the_same_source_is_the_same_class(place: Place, reader: Serializer, imported: bool) -> None:
    there = place()
    buffer = sent([there.Result(3), there.Failure("no"), there.Colour.RED, there.Result.Inner()])
    here = place(imported=imported)
    found: Any = reader.deserialize(buffer)
    result, failure, colour, inner = found
    here = sys.modules["mylib"]
    assert (type(result), type(failure), type(inner)) == (here.Result, here.Failure, here.Result.Inner)
    assert colour is here.Colour.RED
    assert (result.value, result.scaled(), failure.args) == (3, 6, ("no",))


def test_same_source_is_the_same_class_for_large_values(place: Place) -> None:
    there = place()
    buffer = worker.serialize(there.Result(bytearray(200_000)), strategies=BINARY_DATA)
    assert buffer.startswith(b"f3\n")
    here = place()
    found: Any = worker.deserialize(buffer)
    assert type(found) is here.Result
    assert found.value == bytearray(200_000)


def test_functions_and_modules_of_the_same_source_are_the_readers(place: Place) -> None:
    there = place()
    theirs = [there.make, there.adder(1), lambda value, lib=there: lib.Result(value)]
    buffers = [worker.serialize_function(each, strategies=[CloudPickleCode()]) for each in theirs]
    here = place()
    functions: list[Any] = [worker.deserialize_function(buffer) for buffer in buffers]
    make, add, _ = functions
    assert make is here.make
    assert add.__globals__ is vars(here)
    assert add(2).value == 3
    assert [type(each(1)) for each in functions] == [here.Result] * 3
    assert (here.SCALE, here.make.__defaults__, here.Result.__doc__) == (2, None, None)  # nothing was overwritten


def test_an_edited_module_is_sent_by_value_and_returns_as_the_clients_class(place: Place) -> None:
    there = place(LIBRARY.replace("SCALE = 2", "SCALE = 5"))
    buffer = sent(there.Result(1))
    function = worker.serialize_function(there.make, strategies=[CloudPickleCode()])
    here = place()
    found: Any = worker.deserialize(buffer)
    assert type(found) is not here.Result
    assert found.scaled() == 5
    assert worker.deserialize_function(function)(1).scaled() == 5
    own: Any = client.deserialize(buffer)
    assert type(own) is here.Result
    assert own.scaled() == 2


def test_a_module_is_not_the_same_if_one_that_it_imports_differs(place: Place) -> None:
    there = place(core=CORE + "    edited = True\n")
    buffer = sent(there.Result(1))
    here = place()
    found: Any = worker.deserialize(buffer)
    assert type(found) is not here.Result
    assert found.edited


def test_module_edited_after_its_import_has_no_source_hash(place: Place) -> None:
    there = place()
    file = Path(str(there.__file__))
    file.write_text(LIBRARY.replace("self.value * SCALE", "self.value * SCALE * 10"), encoding="utf-8")
    buffer = sent(there.Result(1))
    here = place(file.read_text(encoding="utf-8"))
    found: Any = worker.deserialize(buffer)
    assert type(found) is not here.Result
    assert found.scaled() == 2


def test_a_stale_module_in_the_memory_of_a_worker_is_not_used(place: Place) -> None:
    new = LIBRARY.replace("SCALE = 2", "SCALE = 22")
    old_buffer = sent(place().Result(1))
    buffer = sent(place(new).Result(1))
    here = place()
    assert type(worker.deserialize(old_buffer)) is here.Result
    Path(str(here.__file__)).write_text(new, encoding="utf-8")  # only a constant differs: no function shows it
    found: Any = worker.deserialize(buffer)
    assert type(found) is not here.Result
    assert found.scaled() == 22


@pytest.mark.parametrize("text", [None, "raise RuntimeError('not here')\n", "raise SystemExit\n", "Result = None\n"])
def test_class_is_sent_by_value_to_readers_that_cannot_import_it(place: Place, text: str | None) -> None:
    buffer = sent(place().Result(1))
    place(text, imported=False)
    for reader in (worker, client):
        found: Any = reader.deserialize(buffer)
        assert found.scaled() == 2


@pytest.mark.parametrize("name", ["of_type_variable", "of_parameters", "of_tuple", "of_new_type", "Box"])
def test_type_variables_in_annotations_reach_readers_that_cannot_import_them(place: Place, name: str) -> None:
    buffer = sent(getattr(place(GENERIC), name))
    place(None, None)
    for reader in (worker, client):
        found: Any = reader.deserialize(buffer)
        assert found(3).value == 3 if name == "Box" else found(3) == 3
        again: Any = worker.deserialize(sent(found))
        assert again(3).value == 3 if name == "Box" else again(3) == 3


@pytest.mark.skipif(sys.version_info < (3, 12), reason="needs type parameters")
def test_type_parameters_round_trip(place: Place) -> None:
    function = "def same[T, **P, *Ts](value: T, f: Callable[P, T] | None = None, *rest: *Ts) -> T:\n    return value\n"
    buffer = sent(place(f"from collections.abc import Callable\n{function}").same)
    place(None, None)
    found: Any = worker.deserialize(buffer)
    assert found(3) == 3


def test_a_type_variable_of_a_package_is_that_of_the_package() -> None:
    assert worker.deserialize(sent([typing.AnyStr, typing.AnyStr])) == [typing.AnyStr, typing.AnyStr]


def test_class_recompiled_by_a_decorator_has_the_same_source(place: Place) -> None:
    """As typeguard does, which Parsl uses."""
    core = """
class Base:
    pass

def compiled_again(cls):
    for item in list(vars(cls).values()):
        if hasattr(item, "__code__"):
            item.__code__ = item.__code__.replace(co_consts=(*item.__code__.co_consts, "checked"))
    return cls
"""
    text = LIBRARY.replace("class Result", "@mylib_core.compiled_again\nclass Result")
    buffer = sent(place(text, core).Result(1))
    here = place(text, core)
    assert type(worker.deserialize(buffer)) is here.Result


def test_a_class_that_a_worker_forwards_returns_as_the_clients_class(place: Place) -> None:
    buffer = sent(place().Result(1))
    place(None, None)
    back = sent(worker.deserialize(buffer))
    here = place()
    assert type(client.deserialize(back)) is here.Result


def test_registered_module_is_sent_by_value(place: Place) -> None:
    there = place()
    cloudpickle.register_pickle_by_value(there)
    try:
        buffer = sent(there.Result(1))
    finally:
        cloudpickle.unregister_pickle_by_value(there)
    here = place()
    assert type(worker.deserialize(buffer)) is not here.Result


def test_extension_modules_travel_by_name_wherever_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("fast_here")
    module.__file__ = str(tmp_path / f"fast_here{EXTENSION_SUFFIXES[0]}")
    monkeypatch.setitem(sys.modules, "fast_here", module)
    assert not travels_by_value("fast_here")


def test_class_with_the_name_of_another_keeps_its_identity(place: Place) -> None:
    there = place()
    other = type("Result", (), {"__module__": "mylib", "other": True})
    buffer = sent(other())
    assert type(client.deserialize(buffer)) is other
    assert there.Result is not other


def test_earlier_releases_read_the_format(place: Place) -> None:
    there = place()
    head, pickled = CloudPickleDataBase64().dump([there.Result(1), there, there.make]).split(b"\n")
    assert b'"modules"' in head
    place(None, None)
    value, module, make = pickle.loads(base64.b64decode(pickled))
    assert (value.scaled(), module.SCALE, make(2).value) == (2, 2, 2)


def test_reader_without_pickle_imports_no_module(place: Place) -> None:
    buffer = sent(place().Result(1))
    place(imported=False)
    careful = Serializer(allowed=parse_allowed(["JSONData", "PureSourceTextInspect"]), own_classes=True)
    with pytest.raises(DeserializationError):
        careful.deserialize(buffer)
    assert "mylib" not in sys.modules


MAIN = """
import sys
from pathlib import Path
from farcall_common.payload import CloudPickleDataBase64, Serializer

class Point:
    def __init__(self, x):
        self.x = x

{0}
"""
WRITE = "Path(sys.argv[1]).write_bytes(Serializer().serialize(Point(3), strategies=[CloudPickleDataBase64()]))"
READ = """
found = [Serializer(own_classes=own).deserialize(Path(sys.argv[1]).read_bytes()) for own in (True, False)]
print([type(each) is Point for each in found], [each.x for each in found])
"""


def test_a_class_of_a_script_is_that_of_the_script_that_reads_the_result(tmp_path: Path) -> None:
    for name, text in {"write.py": WRITE, "read.py": READ}.items():
        (tmp_path / name).write_text(MAIN.format(text), encoding="utf-8")
    printed = [
        subprocess.run(
            [sys.executable, "-W", "error", name, "buffer"],
            stdout=subprocess.PIPE, text=True, check=True, timeout=WAIT_S, cwd=tmp_path, env={**os.environ},
        ).stdout
        for name in ("write.py", "read.py")
    ]  # fmt: skip
    assert printed[1] == "[True, False] [3, 3]\n"


CACHED = """
import functools

made = []

@functools.cache
def model(name):
    made.append(name)
    return [name]

@functools.lru_cache(maxsize=2, typed=True)
def fib(n):
    return n if n < 2 else fib(n - 1) + fib(n - 2)

def predict(name):
    return model(name) is model(name), len(made), fib(20)
"""


def test_cached_functions_travel_with_an_empty_cache(place: Place) -> None:
    there: Any = place(CACHED)
    there.model("one")
    buffers = [worker.serialize_function(each) for each in (there.predict, there.fib)]
    place(None)
    predict, fib = map(worker.deserialize_function, buffers)
    assert predict("two") == (True, 2, 6765)
    assert fib(10) == 55
    cached: Any = fib
    assert cached.cache_parameters() == {"maxsize": 2, "typed": True}
