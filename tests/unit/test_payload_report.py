"""Exceptions of user code as records."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from farcall_common.errors import DeserializationError, ErrorRecord, Fault, TaskFailed, original_of
from farcall_common.payload import JSONData, Serializer, describe_exception, load_user_data, pack_exception, task_error
from farcall_common.payload.source import function_from_source

OURS = frozenset({__name__.partition(".")[0]})
"""This module plays the worker: its frames are the ones to cut."""


def run(function: Callable[[], Any]) -> ErrorRecord:
    try:
        function()
    except BaseException as error:  # noqa: BLE001 - as a worker does
        record = describe_exception(error, own_packages=OURS)
    json.dumps(record.to_json()).encode()
    return record


def fail(script: str) -> ErrorRecord:
    return run(function_from_source("f", script))


def test_the_traceback_holds_the_users_frames_with_their_lines_and_no_others() -> None:
    record = fail("def g(x):\n    return 1 / x\n\ndef f():\n    return g(0)\n")
    assert record.code == "TASK_FAILED"
    assert record.fault is Fault.USER_CODE
    assert record.exception_type == "ZeroDivisionError"
    assert record.message == "ZeroDivisionError: division by zero"
    assert record.traceback is not None
    assert "return g(0)" in record.traceback
    assert "return 1 / x" in record.traceback
    assert __file__ not in record.traceback


def test_byte_code_shows_its_lines_too() -> None:
    serializer = Serializer()
    script = "def make(n):\n    def inner(x):\n        return x / n\n    return inner\n"
    buffer = serializer.serialize_function(function_from_source("make", script)(0))
    assert buffer.startswith(b"f2")
    record = run(lambda: serializer.deserialize_function(buffer)(1))
    assert "return x / n" in (record.traceback or "")


def test_an_error_before_the_first_line_has_no_frames() -> None:
    def f() -> None: ...

    record = run(lambda: f(1))  # type: ignore[call-arg]
    assert record.traceback == f"TypeError: {f.__qualname__}() takes 0 positional arguments but 1 was given\n"


def test_attempt_endpoint_and_output_are_passed_on() -> None:
    record = describe_exception(ValueError(), attempt=2, endpoint_id="e", stdout_tail="out", stderr_tail="err")
    assert (record.attempt, record.endpoint_id, record.stdout_tail, record.stderr_tail) == (2, "e", "out", "err")
    assert record.message == "ValueError"


def test_causes_and_contexts_are_shown_and_truncated() -> None:
    record = fail(
        "def f():\n    try:\n        {}['key']\n    except KeyError as error:\n"
        "        try:\n            int('x')\n        except ValueError:\n"
        "            raise RuntimeError('late') from error\n"
    )
    assert record.message == "RuntimeError: late"
    assert record.traceback is not None
    assert "KeyError: 'key'" in record.traceback
    assert "direct cause" in record.traceback
    assert __file__ not in record.traceback


def test_exception_groups_are_shown_and_truncated() -> None:
    def part(number: int) -> Exception:
        try:
            raise ValueError(f"part {number}")
        except ValueError as error:
            return error

    record = run(lambda: (_ for _ in ()).throw(ExceptionGroup("both", [part(1), part(2)])))
    assert record.exception_type == "ExceptionGroup"
    assert record.traceback is not None
    assert "ValueError: part 1" in record.traceback
    assert "ValueError: part 2" in record.traceback
    assert __file__ not in record.traceback


def test_exceptions_that_cannot_be_shown_are_still_reported() -> None:
    record = fail(
        "def f():\n    class Hostile(Exception):\n        def __str__(self): raise ValueError\n"
        "        __repr__ = __str__\n    raise Hostile\n"
    )
    assert record.exception_type == "__farcall__.f.<locals>.Hostile"
    assert "cannot be shown" in record.message
    assert "raise Hostile" in (record.traceback or "")


def test_attributes_that_raise_do_not_hide_the_exception() -> None:
    record = fail(
        "def f():\n    class Hostile(NameError):\n        @property\n        def name(self): raise ValueError\n"
        "    raise Hostile('boo')\n"
    )
    assert record.message == "__farcall__.f.<locals>.Hostile: boo"
    assert "boo" in (record.traceback or "")


def test_long_texts_lose_their_middle() -> None:
    record = fail("def f(): raise ValueError('start' + 10**6 * 'x' + 'end')\n")
    assert len(record.message) < 5_000
    assert len(record.traceback or "") < 70_000
    assert record.message.startswith("ValueError: start")
    assert record.message.endswith("end")
    assert "characters left out" in record.message


def test_unstorable_text_is_escaped() -> None:
    record = fail("def f(): raise ValueError('\\x00 \\ud800')\n")
    assert record.message == "ValueError: \\x00 \\ud800"
    assert "\x00" not in (record.traceback or "")


def test_endless_recursion_is_reported_briefly() -> None:
    record = fail("def f(): return f()\n")
    assert record.exception_type == "RecursionError"
    assert len(record.traceback or "") < 5_000


@pytest.mark.parametrize("script", ["def f(): raise SystemExit(3)\n", "def f(): raise KeyboardInterrupt\n"])
def test_exits_are_failures_like_others(script: str) -> None:
    assert fail(script).code == "TASK_FAILED"


@pytest.mark.parametrize(
    ("script", "hint"),
    [
        ("def f():\n    import no_such_package.part\n", "Install no_such_package on the endpoint"),
        ("def f(): return forgotten\n", "If forgotten is defined outside the function"),
        ("def f(): raise ValueError('x')\n", ""),
    ],
)
def test_common_mistakes_have_hints(script: str, hint: str) -> None:
    assert fail(script).hint.startswith(hint)
    assert bool(fail(script).hint) == bool(hint)


def test_an_exception_travels_as_a_buffer_of_text() -> None:
    data = pack_exception(KeyError("gone"))
    assert data is not None
    read: Any = Serializer().deserialize(data.encode())
    assert read.args == ("gone",)


class ExitsWhenPickled(Exception):
    def __reduce__(self) -> Any:
        raise SystemExit(1)


@pytest.mark.parametrize(
    "error", [ValueError("x" * 20_000), ExitsWhenPickled()], ids=["too large", "cannot be pickled"]
)
def test_an_exception_that_cannot_be_in_a_record_stays_behind(error: Exception) -> None:
    assert pack_exception(error) is None


def test_plain_data_holds_no_exception() -> None:
    assert pack_exception(KeyError("gone"), [JSONData()]) is None


@pytest.mark.parametrize("made", [7, None, SystemExit])
def test_non_exception_is_no_cause(made: object) -> None:
    record = ErrorRecord("TASK_FAILED", "m")
    error = task_error(record, expected=TaskFailed, load_original=lambda: made)
    assert type(error) is TaskFailed
    assert error.__cause__ is None


def test_reading_never_exits_but_for_an_interrupt_of_the_main_thread() -> None:
    def exits() -> None:
        raise SystemExit(1)

    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(DeserializationError, match="SystemExit: 1"):
        load_user_data(exits)
    with pytest.raises(KeyboardInterrupt):
        load_user_data(interrupted)
    with ThreadPoolExecutor(1) as pool, pytest.raises(DeserializationError):
        pool.submit(load_user_data, interrupted).result()


class Errno(OSError):
    """Its attributes are code of the user's."""

    @property
    def errno(self) -> int:  # type: ignore[override]
        raise SystemExit(1)


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    number: int


def test_original_with_raising_attributes_is_left_out() -> None:
    record = ErrorRecord("TASK_FAILED", "m", builtin_type="OSError")
    error = task_error(record, expected=TaskFailed, load_original=lambda: Errno(2, "gone"))
    assert isinstance(error, TaskFailed)
    assert isinstance(error, OSError)


def test_an_exception_that_forbids_assignments_travels() -> None:
    frozen = Frozen(7)
    assert pack_exception(frozen) is not None
    error = TaskFailed("m")
    error.__cause__ = frozen
    assert original_of(error) is frozen
    assert isinstance(frozen.__cause__, Exception)


@pytest.mark.parametrize(
    ("code", "message"), [("TASK_FAILED", "ValueError: no"), ("WORKER_DIED", "[WORKER_DIED] ValueError: no")]
)
def test_the_error_of_a_call_in_a_call_is_said_once(code: str, message: str) -> None:
    record = ErrorRecord(
        code=code, message="ValueError: no", hint="Try.", fault=Fault.USER_CODE, builtin_type="ValueError"
    )
    for _ in range(3):
        error = task_error(record, expected=TaskFailed)

        def driver(error: BaseException = error) -> None:
            raise error

        record = run(driver)
        assert (record.code, record.message, record.hint) == ("TASK_FAILED", message, "Try.")
        assert record.builtin_type == "ValueError"
