"""The tree of errors and its JSON shape."""

from __future__ import annotations

import copy
import pickle

import pytest

from farcall_common import errors
from farcall_common.errors import (
    ErrorRecord,
    FarcallError,
    Fault,
    NotFound,
    TaskFailed,
    TaskLost,
    builtin_type_of,
    error_from_record,
)
from tests.unit.product import error_classes

CLASSES = error_classes()


def test_remote_data_of_a_failed_task_is_its_text() -> None:
    error = errors.TaskFailed("it raised", hint="Fix it.")
    assert error.remote_data == str(error)


def test_codes_are_unique() -> None:
    assert all(code == cls.code == code.upper() for code, cls in CLASSES.items())
    tree = [cls for cls in CLASSES.values() if cls.__module__ == errors.__name__]
    assert len(tree) > 40


def test_a_class_is_found_by_its_code_in_any_module(monkeypatch: pytest.MonkeyPatch) -> None:
    assert errors._BY_CODE.items() >= CLASSES.items()
    monkeypatch.setattr(errors, "_BY_CODE", dict(errors._BY_CODE))

    class Elsewhere(NotFound):
        code = "ELSEWHERE"

    class Inheriting(Elsewhere):
        pass

    assert type(error_from_record(Inheriting("gone").record)) is Elsewhere


def test_a_code_belongs_to_one_class(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "_BY_CODE", dict(errors._BY_CODE))
    for parent in (FarcallError, NotFound):  # unrelated to the class that has it, and below that class
        with pytest.raises(TypeError, match=r"Second: NotFound of farcall_common\.errors has code 'NOT_FOUND'"):
            type("Second", (parent,), {"code": "NOT_FOUND"})
    assert type(error_from_record(NotFound("x").record)) is NotFound
    again = type("NotFound", (FarcallError,), {"code": "NOT_FOUND", "__module__": NotFound.__module__})
    assert type(error_from_record(NotFound("x").record)) is again  # as by a reload of its module


def test_the_class_of_a_built_in_exception_does_not_take_over_the_code() -> None:
    both = type(error_from_record(ErrorRecord("TASK_FAILED", "m", builtin_type="ValueError")))
    assert issubclass(both, ValueError)
    assert errors._BY_CODE["TASK_FAILED"] is TaskFailed


@pytest.mark.parametrize("cls", CLASSES.values(), ids=CLASSES)
def test_a_record_is_read_as_its_class(cls: type[FarcallError]) -> None:
    error = cls("it broke", hint="fix it", retry_after_s=2.0)
    back = error_from_record(ErrorRecord.from_json(error.record.to_json()))
    assert type(back) is cls
    assert back.record == error.record
    assert str(back) == f"[{cls.code}] it broke (fix it)"


def test_unknown_code_keeps_its_message() -> None:
    record = ErrorRecord.from_json({"code": "NEW_THING", "message": "?", "fault": "peer", "shade": "blue"})
    error = error_from_record(record, default=TaskFailed)
    assert isinstance(error, TaskFailed)
    assert error.record.code == "NEW_THING"
    assert error.record.fault is Fault.PEER


def test_unknown_fault_is_read_as_internal() -> None:
    assert ErrorRecord.from_json({"code": "X", "message": "m", "fault": "weather"}) == ErrorRecord("X", "m")
    for wrong in (7, None, ["us"]):
        with pytest.raises(ValueError):
            ErrorRecord.from_json({"code": "X", "message": "m", "fault": wrong})


def test_unset_fields_are_left_out() -> None:
    assert ErrorRecord(code="X", message="m").to_json() == {
        "code": "X",
        "message": "m",
        "hint": "",
        "fault": "us",
        "retryable": False,
    }


@pytest.mark.parametrize("data", [{}, {"code": "X"}, {"message": "m"}])
def test_a_record_needs_code_and_message(data: dict[str, str]) -> None:
    with pytest.raises(KeyError):
        ErrorRecord.from_json(data)


@pytest.mark.parametrize("name", sorted(errors._BUILTIN_TYPES))
def test_a_task_failure_is_also_the_built_in_class_of_its_record(name: str) -> None:
    record = ErrorRecord("TASK_FAILED", "boom", builtin_type=name)
    error = error_from_record(ErrorRecord.from_json(record.to_json()))
    assert isinstance(error, TaskFailed)
    assert isinstance(error, errors._BUILTIN_TYPES[name])
    assert (str(error), repr(error)) == ("[TASK_FAILED] boom", "TaskFailed('boom')")
    error.add_note("below")
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(again) is type(error)
        assert (again.record, again.__notes__) == (record, ["below"])


@pytest.mark.parametrize(
    "name", ["TimeoutError", "StopIteration", "SystemExit", "UnicodeDecodeError", "eval", "", ["X"]]
)
def test_a_built_in_class_outside_the_table_is_ignored(name: object) -> None:
    record = ErrorRecord.from_json({"code": "TASK_FAILED", "message": "m", "builtin_type": name})
    assert type(error_from_record(record)) is TaskFailed


def test_only_task_failures_take_a_built_in_class() -> None:
    assert type(error_from_record(ErrorRecord("TASK_LOST", "m", builtin_type="ValueError"))) is TaskLost


def test_the_nearest_built_in_class_counts() -> None:
    class Mine(FileNotFoundError):
        pass

    class ValueError(Exception):  # noqa: A001 - a class of a user that has the name of a built-in one
        pass

    expected = {
        Mine(): "FileNotFoundError",
        ValueError(): None,
        TimeoutError(): "OSError",
        UnicodeDecodeError("utf-8", b"", 0, 1, "bad"): "UnicodeError",
        ExceptionGroup("two", [KeyError()]): None,
        SyntaxError(): None,
        StopIteration(): None,
        SystemExit(): None,
        Exception(): None,
    }
    assert {error: builtin_type_of(error) for error in expected} == expected
