"""``@farcall.function``: what it does here, what it sends, and what it refuses."""

from __future__ import annotations

import asyncio
import functools
import inspect
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import farcall
from farcall import Executor
from farcall._decorator import _shared
from farcall._functions import FunctionTable, registration
from farcall.testing import FakeCloud
from farcall_common.payload import Serializer
from tests.waiting import WAIT_S


@farcall.function
def double(x: int) -> int:
    """Twice as much."""
    return 2 * x


@farcall.function(endpoint="here", walltime_s=60, keep_output=True, name="quadruple", description="Four times.")
def times_four(x: int, *, more: int = 0) -> int:
    return double(double(x)) + more


@farcall.function
def factorial(n: int) -> int:
    return 1 if n < 2 else n * factorial(n - 1)


@pytest.fixture
def shared(cloud: FakeCloud, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCloud]:
    """A cloud for decorated functions."""
    with cloud.client() as client:
        monkeypatch.setattr(
            "farcall._decorator.Executor", lambda label: Executor(cloud.endpoint_id, client, label=label)
        )
        monkeypatch.setattr(client, "find_endpoint", lambda name: cloud.endpoint_id)
        yield cloud
        _shared.close()


def endpoint_named(cloud: FakeCloud) -> farcall.Function[[int], int]:
    return double.options(endpoint=cloud.endpoint_id)


def test_it_is_the_function_here() -> None:
    assert double(4) == 8
    assert times_four(1, more=1) == 5
    assert (double.__name__, double.__doc__, double.__module__) == ("double", "Twice as much.", __name__)
    assert str(inspect.signature(times_four)) == "(x: 'int', *, more: 'int' = 0) -> 'int'"
    assert repr(double) == "<farcall function double>"
    assert pickle.loads(pickle.dumps(double)) is double
    assert times_four.endpoint == "here"
    assert double.endpoint is None


def test_calls_on_the_endpoint(shared: FakeCloud) -> None:
    assert double.submit(4).result(WAIT_S) == 8
    assert list(double.map(range(5), chunksize=2)) == [0, 2, 4, 6, 8]
    assert factorial.submit(5).result(WAIT_S) == 120
    assert endpoint_named(shared).submit(double.submit(1)).result(WAIT_S) == 4

    async def main() -> int:
        return await double.submit(3)

    assert asyncio.run(main()) == 6


def test_options_go_with_the_function(shared: FakeCloud) -> None:
    function = times_four.options(endpoint=shared.endpoint_id, max_attempts=2)
    assert function.submit(2, more=1).result(WAIT_S) == 9
    assert times_four.task_options == {"walltime_s": 60, "keep_output": True}
    with shared.client() as client, Executor(shared.endpoint_id, client, walltime_s=5, idempotent=False) as executor:
        view = executor._with_options_of(function)
        assert (view.walltime_s, view.max_attempts, view.idempotent) == (60, 2, False)
        assert executor._with_options_of(function) is view
        executor.idempotent = True
        assert executor._with_options_of(function).idempotent
        assert executor.submit(function, 1).result(WAIT_S) == 4
        assert list(executor.map(function, [1, 2], chunksize=2)) == [4, 8]
        assert executor.walltime_s == 5


def test_names_and_descriptions_of_registrations() -> None:
    body = registration(times_four)
    assert (body["function_name"], body["description"]) == ("quadruple", "Four times.")
    assert registration(double)["description"] == "Twice as much."
    handle = FunctionTable().handle(times_four)
    assert (handle.registration()["function_name"], handle.registration()["description"]) == (
        "quadruple",
        "Four times.",
    )


def test_the_plain_function_travels_as_text_without_the_decorator() -> None:
    code = registration(times_four)["function_code"]
    assert "st\nfunction" not in code
    assert "st\ntimes_four:" in code
    assert "farcall" not in code
    assert Serializer().unpack_function(code.encode())(3) == 12


def test_it_travels_as_byte_code_where_text_is_not_enough(tmp_path: Path) -> None:
    @farcall.function(max_attempts=1)
    def plus(x: int) -> int:
        return double(x) + extra

    extra = 10
    buffer = Serializer().pack_function(plus)
    as_argument = Serializer().serialize([plus])
    program = tmp_path / "worker.py"
    program.write_text(
        "import sys\nsys.modules['farcall'] = None\nfrom farcall_common.payload import Serializer\n"
        "from pathlib import Path\ns = Serializer()\n"
        "function, argument = (Path(each).read_bytes() for each in sys.argv[1:])\n"
        "print(s.unpack_function(function)(1), s.deserialize(argument)[0](2))\n"
    )
    for name, content in (("function", buffer), ("argument", as_argument)):
        (tmp_path / name).write_bytes(content)
    command = [sys.executable, str(program), "function", "argument"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["12", "14"], done.stderr


def test_what_is_wrong_is_said_where_it_is_written() -> None:
    with pytest.raises(TypeError, match=r"'wall_time' is not an option of tasks\. Did you mean 'walltime_s'\?"):
        farcall.function(wall_time=3)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match=r"'retry' is not an option of tasks\. Did you mean 'retry_on' or 'retries'"):
        double.options(retry=3)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="'endpoint_id' is not an option"):
        double.options(endpoint_id="here")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"Robot\.move is a method"):

        class Robot:
            @farcall.function
            def move(self) -> None: ...

    for wrong in (Machine, functools.partial(pow, 2), pow, 3):
        with pytest.raises(TypeError, match="expected a function, got"):
            farcall.function(wrong)  # type: ignore[arg-type]


class Machine:
    pass


def test_wrong_arguments_fail_before_anything_is_sent(shared: FakeCloud) -> None:
    with pytest.raises(TypeError, match=r"times_four\(\) got an unexpected keyword argument 'x2'"):
        times_four.options(endpoint=None).submit(1, x2=1)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match=r"double\(\) missing 1 required positional argument: 'x'"):
        double.submit()  # type: ignore[call-overload]


SCRIPT = """
import farcall
from farcall._decorator import _shared

@farcall.function(endpoint="cluster", walltime_s=3)
def clean(path):
    return path

assert clean("a") == "a"
assert _shared._executor is None
import sys
print(*[name for name in ("httpx", "zmq", "farcall_common.payload") if name in sys.modules])
"""


def test_importing_a_module_with_decorated_functions_contacts_and_loads_nothing(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    environ = {"HOME": str(tmp_path), "FARCALL_API_URL": "http://127.0.0.1:9"}
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, env=environ, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout.split()) == (0, []), done.stderr


def test_a_forked_child_makes_an_executor_of_its_own(shared: FakeCloud) -> None:
    double.submit(1).result(WAIT_S)
    executor: Any = _shared._executor
    lock = _shared._lock
    try:
        _shared.forget()
        assert _shared._executor is None
        assert _shared._lock is not lock
    finally:
        _shared._executor = executor
