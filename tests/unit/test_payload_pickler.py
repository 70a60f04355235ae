"""Pickler: one pass, by reference or by value, with an answer for each kind of object that pickle has none for."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib
import logging
import operator
import pathlib
import random
import subprocess
import sys
import threading
import types
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import wrapt

from farcall_common.errors import SerializationError
from farcall_common.payload import (
    BINARY_DATA,
    DillCode,
    DillDataBase64,
    PickleDataBase64,
    Serializer,
    pickler,
)
from farcall_common.payload.dill_format import dill_dumps
from farcall_common.payload.native import dump_call, dump_native, load_native
from farcall_common.payload.pickler import set_path_of_workers
from farcall_common.payload.pickling import INCLUDED_MARK, travels_by_value
from tests.waiting import WAIT_S

SERIALIZER = Serializer()

WAYS: dict[str, Callable[[Any], Any]] = {
    "text": lambda value: SERIALIZER.deserialize(SERIALIZER.serialize(value)),
    "binary": lambda value: SERIALIZER.deserialize(SERIALIZER.serialize(value, strategies=BINARY_DATA)),
    "edge": lambda value: SERIALIZER.deserialize(b"".join(SERIALIZER.edge_pieces(value))),
    "engine": lambda value: load_native(dump_native(value)),
}
every_way = pytest.mark.parametrize("there_and_back", WAYS.values(), ids=WAYS)


class Once:
    """May be reduced once."""

    def __init__(self) -> None:
        self.used = False

    def __reduce__(self) -> Any:
        assert not self.used
        self.used = True
        return Once, ()


@dataclasses.dataclass(slots=True)
class Slotted:
    x: int


class Exits:
    def __reduce__(self) -> Any:
        sys.exit(3)


class Named:
    def __reduce__(self) -> str:
        return "NAMED"


NAMED = Named()


@every_way
def test_a_value_is_pickled_once(there_and_back: Callable[[Any], Any]) -> None:
    once, by_value, _ = there_and_back([Once(), Slotted, lambda: 1])
    assert (type(once), by_value) == (Once, Slotted)


@every_way
@pytest.mark.parametrize(
    "make",
    [
        Exits,
        lambda: Path(__file__).open(encoding="utf-8"),  # noqa: SIM115
        lambda: weakref.ref(NAMED),
        threading.Condition,
        threading.Event,
        lambda: sys.modules["__main__"],
    ],
    ids=["exits", "file", "weak reference", "condition", "event", "main module"],
)
def test_what_would_arrive_as_something_else_is_refused(
    make: Callable[[], Any], there_and_back: Callable[[Any], Any]
) -> None:
    value = make()
    with pytest.raises(SerializationError):
        there_and_back([value, Slotted(1)])
    if hasattr(value, "close"):
        value.close()


def test_a_name_in_a_module_is_sent_only_to_who_can_import_it() -> None:
    assert WAYS["engine"](NAMED) is NAMED
    with pytest.raises(SerializationError, match="NAMED, a Named, is sent by its name"):
        SERIALIZER.serialize(NAMED)


@every_way
@pytest.mark.parametrize("kind", [threading.Lock, threading.RLock])
def test_a_lock_arrives_free_and_a_held_one_is_refused(
    kind: Callable[[], Any], there_and_back: Callable[[Any], Any]
) -> None:
    lock = kind()
    first, second = there_and_back([lock, lock])
    assert first is second
    assert first.acquire(blocking=False)
    holder = threading.Thread(target=lock.acquire)
    holder.start()
    holder.join(WAIT_S)
    with pytest.raises(SerializationError, match="cannot be sent"):
        there_and_back(lock)


def test_the_argument_that_cannot_be_sent_is_named() -> None:
    with pytest.raises(SerializationError, match=r"argument 2 \(list\).*cannot be pickled"):
        dump_call((Once(), [threading.Condition()]), {})
    with pytest.raises(SerializationError, match=r"argument 'file' \(Condition\)"):
        dump_call((1,), {"file": threading.Condition()})


def test_locks_that_dill_writes_arrive_free() -> None:
    lock: Any = SERIALIZER.deserialize(SERIALIZER.serialize(threading.RLock(), strategies=[DillDataBase64()]))
    taken: list[bool] = []
    other = threading.Thread(target=lambda: taken.append(lock.acquire(blocking=False)))
    other.start()
    other.join(WAIT_S)
    assert taken == [True]


@every_way
def test_methods_of_global_generators_are_sent_by_name(there_and_back: Callable[[Any], Any]) -> None:
    gauss, draw, normal = there_and_back([random.gauss, random.random, np.random.normal])
    assert gauss.__self__ is draw.__self__ is random._inst
    assert normal.__self__ is np.random.mtrand._rand
    own = random.Random(1)
    assert there_and_back(own).random() == own.random()


MISSING = object()


@every_way
def test_bare_objects_stay_the_same_in_functions_arguments_and_results(there_and_back: Callable[[Any], Any]) -> None:
    other = object()
    assert there_and_back([MISSING, other, MISSING]) == [MISSING, other, MISSING]
    names: dict[str, Any] = {"__name__": "__main__", "MISSING": MISSING}
    exec("def f(x=MISSING): return x is MISSING, MISSING", names)
    assert there_and_back(names["f"])() == there_and_back(names["f"])(there_and_back(MISSING)) == (True, MISSING)


def test_another_process_has_one_object_for_each_bare_object() -> None:
    script = "import pickle, sys\nfrom farcall_common.payload.native import load_native\n"
    script += "a, b = (load_native(bytes.fromhex(text)) for text in sys.argv[1:])\nassert a[0] is b is not a[1]"
    buffers = [dump_native(value).hex() for value in ([MISSING, object()], MISSING)]
    subprocess.run([sys.executable, "-c", script, *buffers], check=True)


@wrapt.decorator
def doubled(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    return 2 * wrapped(*args, **kwargs)


@doubled
def decorated(x: int) -> int:
    return x + 1


class Decorated:
    def __init__(self, x: int) -> None:
        self.x = x

    @doubled
    def get(self) -> int:
        return self.x

    @doubled
    @classmethod
    def name(cls) -> str:
        return cls.__name__

    @doubled
    @staticmethod
    def add(x: int) -> int:
        return x + 1


@every_way
def test_bound_methods_with_decorators_of_wrapt_stay(there_and_back: Callable[[Any], Any]) -> None:
    get, name, add = there_and_back([Decorated(3).get, Decorated.name, Decorated(3).add])
    assert (get(), name(), add(1)) == (6, "DecoratedDecorated", 4)
    with pytest.raises(SerializationError, match="BoundFunctionWrapper of wrapt cannot be sent"):
        there_and_back(Decorated.get)


def test_decorators_of_wrapt_stay() -> None:
    here: Any = decorated
    here._self_tag = here.tag = 3
    there: Any = SERIALIZER.unpack_function(SERIALIZER.pack_function(decorated))
    assert (there(1), there._self_tag, there.tag) == (4, 3, 3)
    proxy: Any = wrapt.ObjectProxy(decorated)
    with pytest.raises(SerializationError, match="object proxy must define"):
        SERIALIZER.serialize_function(proxy)
    with pytest.raises(SerializationError, match="object proxy must define"):
        SERIALIZER.serialize(proxy)


@every_way
def test_markers_of_the_standard_library_stay_what_they_are(there_and_back: Callable[[Any], Any]) -> None:
    markers = [dataclasses.MISSING, dataclasses.KW_ONLY, dataclasses._HAS_DEFAULT_FACTORY]  # type: ignore[attr-defined]
    assert all(map(operator.is_, there_and_back(markers), markers))
    field = dataclasses.fields(Slotted)[0]
    assert there_and_back(field).default is dataclasses.MISSING
    parser = argparse.ArgumentParser()
    parser.add_argument("--left-out", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    parser.add_argument("--n", type=int, default=2)
    parser = there_and_back(parser)
    assert vars(parser.parse_args(["--n", "3"])) == {"n": 3}
    assert "left-out" not in parser.format_help()


@every_way
@pytest.mark.parametrize("size", [3, 100_000])
def test_a_memoryview_of_a_whole_buffer_shares_it(there_and_back: Callable[[Any], Any], size: int) -> None:
    data = bytearray(size)
    found, view, part, frozen = there_and_back(
        [data, memoryview(data), memoryview(data)[1:], memoryview(data).toreadonly()]
    )
    view[0] = view[1] = 1
    assert (found[:2], part[0], bytes(frozen[:2])) == (b"\1\1", 0, b"\0\0")
    assert (len(part), frozen.readonly) == (size - 1, True)


@pytest.mark.parametrize("wrap", [functools.lru_cache(maxsize=2), functools.singledispatch])
def test_a_function_of_functools_keeps_its_attributes(wrap: Callable[..., Any]) -> None:
    @wrap
    def wrapped(_: int) -> int:
        return 1

    wrapped.tag = 3
    there = WAYS["text"](wrapped)
    assert (there(0), there.tag, there.__name__) == (1, 3, "wrapped")


@every_way
@pytest.mark.parametrize("make", ["NewType('N', int)", "TypeVar('N')", "ParamSpec('N')", "TypeVarTuple('N')"])
def test_a_named_type_keeps_its_module(there_and_back: Callable[[Any], Any], make: str) -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(f"import typing\nN = typing.{make}", names)
    assert (there_and_back(names["N"]).__module__, repr(there_and_back(names["N"]))) == ("__main__", repr(names["N"]))


def test_a_module_that_answers_everything_is_like_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    class Lazy(types.ModuleType):
        def __getattr__(self, name: str) -> None:
            return None

    lazy = Lazy("lazy")
    lazy.__file__ = "/nowhere/lazy.py"
    lazy.thing = types.FunctionType((lambda: 5).__code__, {"__name__": "lazy"}, "thing")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "lazy", lazy)
    assert not hasattr(types.ModuleType("lazy"), INCLUDED_MARK)
    assert hasattr(lazy, INCLUDED_MARK)
    assert travels_by_value("lazy")
    assert WAYS["text"](lazy.thing)() == 5


@pytest.mark.parametrize("package", [False, True])
def test_modules_that_workers_of_an_engine_do_not_find_travel_by_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: bool
) -> None:
    """A folder may join ``sys.path`` after the engine has started its workers."""
    name = f"joined_later_{package}"
    file = tmp_path / name / "__init__.py" if package else tmp_path / f"{name}.py"
    file.parent.mkdir(exist_ok=True)
    file.write_text("class C:\n    def get(self): return 3\n")
    monkeypatch.setattr(pickler, "_path_of_workers", None)
    set_path_of_workers(sys.path)
    monkeypatch.syspath_prepend(tmp_path)
    value = importlib.import_module(name).C()
    here = dump_native(value)
    set_path_of_workers(sys.path)
    assert len(dump_native(value)) < len(here)  # by name
    monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry != str(tmp_path)])
    assert load_native(here).get() == 3


def test_paths_of_python_3_13_have_the_name_that_every_version_has() -> None:
    there = type("PurePosixPath", (pathlib.PurePosixPath,), {"__module__": "pathlib._local"})
    buffer = PickleDataBase64().dump(there("a"))
    assert PickleDataBase64().load(buffer) == pathlib.PurePosixPath("a")
    assert sys.modules["pathlib._local"].PurePosixPath


def test_handlers_of_logging_arrive_ready() -> None:
    handler = WAYS["text"](logging.StreamHandler())
    assert handler.stream is sys.stderr
    with handler.lock:
        pass


def test_dill_takes_a_time_that_grows_with_the_number_of_functions() -> None:
    lines = ["def f0(): return 1", "def f1(): return f0()"]
    lines += [f"def f{n}(): return f{n - 1}() + f{n - 2}()" for n in range(2, 40)]
    names: dict[str, Any] = {"__name__": "__main__"}
    exec("\n".join([*lines, "def odd(n): return n and even(n - 1)", "def even(n): return n == 0 or odd(n - 1)"]), names)
    load = DillCode().load
    assert load(DillCode().dump(names["f16"]))() == 1597  # type: ignore[operator]
    assert load(DillCode().dump(names["even"]))(4)  # type: ignore[operator]
    assert len(dill_dumps(names["f39"])) < 100_000  # dill's own way would visit 10**8 paths


@pytest.mark.parametrize("wraps", [False, True])
def test_a_registry_of_functions_stays(wraps: bool) -> None:
    @functools.singledispatch
    def size(x: object) -> Any:
        return "object"

    @size.register(list)
    def _(x: list[Any]) -> Any:
        return [size(each) for each in x]

    size.register(int, lambda _: "int")
    function = functools.partial(size) if wraps else size
    assert WAYS["text"](function)([1, "x", [2]]) == ["int", "object", ["int"]]


def counter() -> Any:
    count = 0
    empty: int

    def increase() -> int:
        nonlocal count
        count += 1
        return count

    def get() -> tuple[int, Any]:
        return count, empty

    def factorial(n: int) -> int:
        return 1 if n < 2 else n * factorial(n - 1)

    if count == 0:
        return increase, get, factorial, lambda: empty
    empty = 0
    return None


@every_way
def test_functions_keep_sharing_the_variables_around_them(there_and_back: Callable[[Any], Any]) -> None:
    functions = counter()
    increase, get, factorial, empty = functions
    increase()
    cells = [increase.__closure__[0], factorial.__closure__[0]]
    for sent in ([*functions, *cells], [*cells, *functions]):
        arrived = there_and_back(sent)
        increase, get, factorial, empty = (each for each in arrived if callable(each))
        assert increase() == 2
        assert get.__closure__[0].cell_contents == 2
        assert get.__closure__[1] is empty.__closure__[0]
        assert factorial(5) == 120
        assert [each for each in arrived if not callable(each)] == [increase.__closure__[0], factorial.__closure__[0]]


@every_way
@pytest.mark.parametrize(
    "body",
    [
        "class C: limit = LIMIT\n return C.limit",
        "return eval('LIMIT')",
        "return globals()['LIMIT']",
        "return query('x > @LIMIT', f.__globals__)",
    ],
)
def test_names_in_classes_and_texts_inside_of_a_function_are_found(
    there_and_back: Callable[[Any], Any], body: str
) -> None:
    names: dict[str, Any] = {"__name__": "__main__", "query": lambda text, names: names[text.rpartition("@")[2]]}
    exec(f"LIMIT = 3\ndef f():\n {body}", names)
    assert there_and_back(names["f"])() == 3


@every_way
def test_a_text_that_is_not_evaluated_names_nothing(there_and_back: Callable[[Any], Any]) -> None:
    names: dict[str, Any] = {"__name__": "__main__", "lock": threading.Condition()}
    exec("def f(text):\n found = {'lock': 3}\n exec(text, found)\n return found['lock']", names)
    assert there_and_back(names["f"])("lock += 1") == 4


def test_a_function_that_looks_up_the_main_module_is_refused() -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    exec("def f():\n import sys\n return [sys.modules['__main__'].LIMIT for _ in range(1)]", names)
    with pytest.raises(SerializationError, match="f uses the main module, __main__, which is another one"):
        SERIALIZER.serialize_function(names["f"])
