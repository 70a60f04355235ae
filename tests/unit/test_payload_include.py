"""Included modules: what travels, what is refused, and what a worker makes of it."""

from __future__ import annotations

import base64
import importlib
import json
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from farcall._functions import FunctionTable, PackedFunction, pack_call
from farcall._results import task_error
from farcall_common.errors import PayloadTooLarge, SerializationError
from farcall_common.payload import Serializer, describe_exception, include
from farcall_common.payload.functions import Included
from farcall_common.payload.pickler import dumps_by_reference
from farcall_common.payload.pickling import INCLUDED_MARK, travels_by_value
from farcall_common.wire import StreamResult, TaskState

#: Runs calls as a worker does. Its input: a line for each call, with function and payload.
WORKER = """
import base64, hashlib, json, sys
from farcall_common.task_options import TaskOptions
from farcall_endpoint.worker.capture import Capture
from farcall_endpoint.contracts.manager_worker import Order, Run
from farcall_endpoint.worker.runner import Runner
from farcall_endpoint.worker.settings import WorkerSettings

runner = Runner(Capture(), endpoint_id="e", settings=WorkerSettings())
answers = []
for line in open(sys.argv[1]):
    body, payload = map(base64.b64decode, json.loads(line))
    name = hashlib.sha256(body).hexdigest()
    if name not in runner._functions:
        runner.learn(Run((), ((name, len(body)),)), body)
    done, result = runner.run(Order("t", 1, name, 0, TaskOptions(), "", "", False), payload)
    answers.append([done.error, base64.b64encode(b"".join(result)).decode()])
left = sorted(name for name in sys.modules if name.partition(".")[0] in ("mylib", "other", "farcall"))
json.dump([answers, left], open(sys.argv[2], "w"))
"""

MYLIB = """
from __future__ import annotations
import dataclasses
from typing import ClassVar
import other

@dataclasses.dataclass
class Point:
    kind: ClassVar[str] = "plane"
    x: int
    y: int = 2

    def moved(self, by: int) -> Point:
        return Point(self.x + by * other.FACTOR, self.y)

class Wrong(KeyError):
    pass

def total(point: Point) -> int:
    return point.x + point.y

def fail(point):
    raise Wrong(point.x)
"""


#: The modules that tests make.
NAMES = frozenset({"mylib", "mylib_package", "native", "large", "old", "other"})

Call = tuple[Callable[..., Any], tuple[Any, ...]]


@pytest.fixture(autouse=True)
def _nothing_stays_included(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(include, "_included", include.included())
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in NAMES:
            del sys.modules[name]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "here"
    folder.mkdir()
    (folder / "mylib.py").write_text(MYLIB)
    (folder / "other.py").write_text("FACTOR = 10\n")
    monkeypatch.syspath_prepend(folder)
    return folder


def on_worker(tmp_path: Path, calls: list[Call], *, packed: list[bytes] | None = None) -> Any:
    """What a worker without these modules makes of calls, and the modules of these names that it has afterwards."""
    bodies = packed or [PackedFunction.of(Serializer().serialize_function(function)).code for function, _ in calls]
    lines = [
        json.dumps([base64.b64encode(each).decode() for each in (body, pack_call(args, {}, function_name="f").payload)])
        for body, (_, args) in zip(bodies, calls, strict=True)
    ]
    program, orders, answer = (tmp_path / name for name in ("worker.py", "orders", "answer"))
    program.write_text(WORKER)
    orders.write_text("\n".join(lines))
    command = [sys.executable, "-I", str(program), str(orders), str(answer)]
    with (tmp_path / "stdout").open("ab+") as stdout, (tmp_path / "stderr").open("ab+") as stderr:
        subprocess.run(command, cwd=tmp_path, stdout=stdout, stderr=stderr, check=False)
    assert answer.exists(), (tmp_path / "stderr").read_text()
    return json.loads(answer.read_text())


def values(answers: list[tuple[Any, str]]) -> list[Any]:
    assert [error for error, _ in answers] == [None] * len(answers)
    return [Serializer(own_classes=True).deserialize(base64.b64decode(result)) for _, result in answers]


def imports_inside(x: int) -> int:
    import mylib  # type: ignore[import-not-found]

    return int(mylib.total(mylib.Point(x)))


def by_name(x: int) -> Any:
    import importlib

    return importlib.import_module("mylib").Point(x).moved(1)


def knows_its_class(point: Any) -> Any:
    import pickle

    import mylib

    return isinstance(point, mylib.Point), point.kind, pickle.loads(pickle.dumps(point)) == point


def missing() -> Any:
    import mylib.nothing  # type: ignore[import-not-found]

    return mylib


def test_modules_functions_classes_and_what_they_import_travel(tmp_path: Path, folder: Path) -> None:
    mylib: Any = importlib.import_module("mylib")
    include.include("mylib")

    def closure() -> int:
        return int(mylib.total(mylib.Point(1))) + factor

    factor = 100
    calls: list[Call] = [
        (imports_inside, (1,)),
        (mylib.total, (mylib.Point(3),)),
        (by_name, (1,)),
        (knows_its_class, (mylib.Point(1),)),
        (closure, ()),
    ]
    answers, left = on_worker(tmp_path, calls)
    assert values(answers) == [3, 5, mylib.Point(11), (True, "plane", True), 103]
    assert type(values(answers)[2]) is mylib.Point
    assert left == []
    # No byte code: the values and functions do not depend on the minor version of Python.
    assert b'"python"' not in base64.b64decode(answers[2][1])
    assert PackedFunction.of(Serializer().serialize_function(mylib.total)).requirements is not None
    for _, args in calls:
        requirements = pack_call(args, {}, function_name="f").requirements
        assert requirements is None or requirements.python is None


def test_two_versions_of_a_module_do_not_meet_on_a_worker(tmp_path: Path, folder: Path) -> None:
    bodies = []
    for factor in (10, 20):
        (folder / "other.py").write_text(f"FACTOR = {factor}\n")
        include.include("mylib")
        include.include("other")
        bodies.append(PackedFunction.of(Serializer().serialize_function(by_name)).code)
    assert bodies[0] != bodies[1]
    order = [bodies[0], bodies[1], bodies[0]]
    answers, _ = on_worker(tmp_path, [(by_name, (1,))] * 3, packed=order)
    assert [value.x for value in values(answers)] == [11, 21, 11]


def test_a_module_of_the_endpoint_is_hidden_for_these_calls_only(tmp_path: Path, folder: Path) -> None:
    def total_of_json() -> Any:
        import json

        return getattr(json, "MINE", None), json.__name__

    plain = PackedFunction.of(Serializer().serialize_function(total_of_json)).code
    (folder / "json").mkdir()
    (folder / "json" / "__init__.py").write_text("MINE = 1\n")
    sources = {"json": (True, "MINE = 1\n")}
    include._included = Included(sources, "d1")
    with_mine = include.with_modules(Serializer().serialize_function(total_of_json))
    include._included = Included({}, "")
    delattr(json, INCLUDED_MARK)
    answers, _ = on_worker(tmp_path, [(total_of_json, ())] * 3, packed=[plain, Serializer().pack([with_mine]), plain])
    assert values(answers) == [(None, "json"), (1, "json"), (None, "json")]


def test_errors_have_the_source_line_and_the_own_class(tmp_path: Path, folder: Path) -> None:
    mylib: Any = importlib.import_module("mylib")
    include.include(mylib)
    [[error, _], [absent, _]], _ = on_worker(tmp_path, [(mylib.fail, (mylib.Point(3),)), (missing, ())])
    assert "raise Wrong(point.x)" in error["traceback"]
    assert "shipped" not in error["traceback"]
    assert error["exception_type"] == "mylib.Wrong"
    assert "No module named 'mylib.nothing'" in absent["message"]
    assert "farcall.include('mylib')" in absent["hint"]


def test_a_package_travels_whole(tmp_path: Path, folder: Path) -> None:
    package = folder / "mylib_package"
    (package / "inner").mkdir(parents=True)
    (package / "__init__.py").write_text("from .parts import value\n")
    (package / "parts.py").write_text("from .inner import deep\nvalue = deep.value\n")
    (package / "inner" / "deep.py").write_text("value = 7\n")
    (package / "data.json").write_text("{}")
    include.include("mylib_package")
    assert list(include.included().sources) == [
        "mylib_package",
        "mylib_package.inner",
        "mylib_package.inner.deep",
        "mylib_package.parts",
    ]

    def value() -> Any:
        import mylib_package  # type: ignore[import-not-found]

        return mylib_package.value

    answers, _ = on_worker(tmp_path, [(value, ())])
    assert values(answers) == [7]


def test_a_module_that_uses_farcall_runs_where_it_is_not_installed(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "mylib.py").write_text(
        "import farcall\nfrom farcall import Executor\n@farcall.function(walltime_s=3)\ndef twice(x): return 2 * x\n"
    )
    include.include("mylib")

    def call(x: int) -> Any:
        import mylib

        return mylib.twice(x)

    body = PackedFunction.of(Serializer().serialize_function(call)).code
    without = f"import sys; sys.modules['farcall'] = None\n{WORKER}".replace(
        "answers = []",
        "del sys.modules['farcall']\nimport importlib.util\nfind = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *a: None if name == 'farcall' else find(name, *a)\nanswers = []",
        1,
    )
    monkeypatch.setitem(globals(), "WORKER", without)
    answers, left = on_worker(tmp_path, [(call, (4,))], packed=[body])
    assert values(answers) == [8]
    assert left == []


def test_a_module_may_include_itself_and_others(tmp_path: Path, folder: Path) -> None:
    (folder / "mylib.py").write_text("import farcall\nfarcall.include(__name__, 'other')\nvalue = 5\n")
    importlib.import_module("mylib")

    def value() -> Any:
        import mylib
        import other  # type: ignore[import-not-found]

        return mylib.value, other.FACTOR

    assert sorted(include.included().sources) == ["mylib", "other"]
    answers, _ = on_worker(tmp_path, [(value, ())])
    assert values(answers) == [(5, 10)]


def test_what_was_edited_is_another_function_once_it_is_included_again(folder: Path) -> None:
    table = FunctionTable()
    include.include("mylib")
    first = table.handle(imports_inside)
    assert table.handle(imports_inside) is first
    include.include("mylib")
    assert table.handle(imports_inside) is first
    (folder / "mylib.py").write_text(MYLIB + "\n# edited\n")
    include.include("mylib")
    assert table.handle(imports_inside).key != first.key
    given = table.registered("00000000-0000-0000-0000-000000000001", imports_inside)
    (folder / "mylib.py").write_text(MYLIB)
    include.include("mylib")
    assert table.handle(imports_inside) is given


def test_what_cannot_travel_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModuleNotFoundError, match="nowhere"):
        include.include("nowhere")
    with pytest.raises(SerializationError, match="installed package") as installed:
        include.include("msgspec")
    assert "Install it on the endpoint" in installed.value.hint
    with pytest.raises(SerializationError, match="json is an installed"):
        include.include(json)
    with pytest.raises(SerializationError, match="built in"):
        include.include("sys")
    with pytest.raises(ValueError, match="include 'mylib_package'"):
        include.include(ModuleType("mylib_package.part"))
    with pytest.raises(ValueError, match=r"mylib\.py is a file: give the name of the module, 'mylib'"):
        include.include("mylib.py")
    with pytest.raises(ValueError, match="program itself"):
        include.include("__main__")
    with pytest.raises(TypeError, match="got int"):
        include.include(3)  # type: ignore[arg-type]
    (folder / "native").mkdir()
    (folder / "native" / "_fast.cpython-311-x86_64-linux-gnu.so").write_bytes(b"")
    (folder / "native" / "_fast.abi3.so").write_bytes(b"")
    with pytest.raises(SerializationError, match=r"native\._fast is not pure Python"):
        include.include("native")
    (folder / "old").mkdir()
    (folder / "old" / "latin.py").write_bytes(b"# \xe9\n")
    with pytest.raises(SerializationError, match=r"source text of old\.latin cannot be read"):
        include.include("old")
    (folder / "large.py").write_text(f"TEXT = {'x' * 2**20!r}\n")
    with pytest.raises(PayloadTooLarge, match=r"take 1\.0 MiB of source text, 1\.0 MiB of it large; the limit is 1\.0"):
        include.include("mylib", "large")
    assert include.included().sources == {}
    assert travels_by_value("mylib")


def test_the_hint_for_a_missing_module_knows_the_files_of_this_machine(folder: Path) -> None:
    hint = include.hint_for_missing("ModuleNotFoundError: No module named 'mylib.parts'")
    assert hint == (
        f"mylib is a file of this machine ({folder / 'mylib.py'}). "
        "Send it along: call farcall.include('mylib') before you submit."
    )
    for text in (
        "No module named 'numpy'",
        "No module named 'nowhere_at_all'",
        "No module named 'json'",
        "KeyError: 1",
    ):
        assert include.hint_for_missing(text) == ""
    include.include("mylib")
    assert include.hint_for_missing("No module named 'mylib'") == ""


def test_the_error_of_a_task_has_that_hint(folder: Path) -> None:
    record = describe_exception(ModuleNotFoundError("No module named 'mylib'", name="mylib"))
    assert record.hint == (
        "Install mylib on the endpoint, or in the environment of the task. If it is your own module, send it along: "
        "call farcall.include('mylib') before you submit."
    )
    result = StreamResult("t", "g", TaskState.FAILED, attempt=1, error=record.to_json())
    assert task_error(result).hint.startswith("mylib is a file of this machine")


#: A worker without any package: what the loader needs of ours is written out.
BARE_WORKER = """
import pickle, sys, types

class Serializer:
    def deserialize_function(self, buffer):
        strategy, _, text = buffer.decode().partition("\\n")
        assert strategy == "st"
        name, _, source = text.partition(":")
        namespace = {"__name__": "__farcall__"}
        exec(source, namespace)
        return namespace[name]

payload = types.ModuleType("farcall_common.payload")
payload.Serializer = Serializer
sys.modules |= {"farcall_common": types.ModuleType("farcall_common"), payload.__name__: payload}
buffer, argument, result = sys.argv[1:]
function = Serializer().deserialize_function(open(buffer, "rb").read())
with function.farcall_modules:
    value = function.farcall_function(pickle.load(open(argument, "rb")))
    pickle.dump(value, open(result, "wb"), protocol=5)
assert "mylib" not in sys.modules
"""


def other_pythons() -> dict[tuple[int, int], str]:
    """Interpreters of other minor versions that this machine has."""
    found: dict[tuple[int, int], str] = {}
    named = [shutil.which(f"python3.{minor}") for minor in range(11, 20)]
    for python in [*filter(None, named), *map(str, Path(sys.base_prefix).parent.glob("*/bin/python3"))]:
        command = [python, "-c", "import sys; print(*sys.version_info[:2])"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            major, minor = map(int, done.stdout.split())
            found[major, minor] = python
    return {version: python for version, python in found.items() if (3, 11) <= version != sys.version_info[:2]}


def test_other_versions_of_python_take_included_classes(tmp_path: Path, folder: Path) -> None:
    pythons = other_pythons()
    if not pythons:
        pytest.skip("there is no other Python")
    mylib: Any = importlib.import_module("mylib")
    include.include("mylib")

    def moved(point: Any) -> Any:
        import mylib

        return isinstance(point, mylib.Point), point.moved(1)

    program, buffer, argument, result = (tmp_path / name for name in ("worker.py", "buffer", "argument", "result"))
    program.write_text(BARE_WORKER)
    buffer.write_bytes(include.with_modules(Serializer().serialize_function(moved)))
    argument.write_bytes(dumps_by_reference(mylib.Point(1)))
    for python in pythons.values():
        command = [python, "-I", str(program), str(buffer), str(argument), str(result)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert pickle.loads(result.read_bytes()) == (True, mylib.Point(11))
        result.unlink()
