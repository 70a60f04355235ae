"""Names of exceptions that are retried, and what they stand for."""

from __future__ import annotations

import sys
import types

import pytest

from farcall_common.retries import MAX_NAMES, error_name, exception_names, is_retried
from farcall_common.task_options import TaskOptions


class Away(ConnectionError):
    """Of this module."""


@pytest.mark.parametrize(
    ("given", "names"),
    [
        (OSError, ("builtins.OSError",)),
        ("OSError", ("builtins.OSError",)),
        (IOError, ("builtins.OSError",)),
        ("IOError", ("builtins.OSError",)),
        ((OSError, "OSError", ValueError), ("builtins.OSError", "builtins.ValueError")),
        (["http.client.HTTPException", "__main__.Away"], ("http.client.HTTPException", "__main__.Away")),
        (Away, (f"{__name__}.Away",)),
        ((), ()),
    ],
)
def test_exceptions_are_given_as_classes_or_names(given: object, names: tuple[str, ...]) -> None:
    assert exception_names(given) == names
    options = TaskOptions.of(retries=1, retry_on=given)  # type: ignore[arg-type]
    assert options.retry_on == options.changed(retries=2).retry_on == names


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("OSErorr", "there is no built-in exception 'OSErorr': did you mean OSError?"),
        ("Away", "write module.Away, or __main__.Away for one of a script"),
        ("int", "there is no built-in exception 'int'"),
        ("", "there is no built-in exception ''"),
        ("a..b", "'a..b' is not the name of an exception class"),
        ("a.b c", "is not the name of an exception class"),
        ("a.1", "is not the name of an exception class"),
        ("a.Fehlér", "is not the name of an exception class"),
        (".Error", "is not the name of an exception class"),
        ("a." + "b" * 200, "is not the name of an exception class"),
        (int, "expected exception classes or their names, got <class 'int'>"),
        (OSError(), "expected exception classes or their names, got OSError()"),
        (None, "expected exception classes or their names, got None"),
        ([5], "expected exception classes or their names, got 5"),
        ([f"a.B{number}" for number in range(MAX_NAMES + 1)], "11 exceptions, and at most 10 are allowed"),
    ],
)
def test_what_is_no_exception_is_refused(given: object, message: str) -> None:
    with pytest.raises(ValueError, match=r"^retry_on: ") as caught:
        TaskOptions.of(retry_on=given)  # type: ignore[arg-type]
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "wrong",
    [
        {"retries": -1},
        {"retries": 101},
        {"retries": 1.5},
        {"retry_delay_s": -1.0},
        {"retry_delay_s": 301.0},
        {"retry_delay_s": float("nan")},
    ],
)
def test_numbers_have_limits(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        TaskOptions.of(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("error", "names", "expected"),
    [
        (OSError(), (), True),
        (SystemExit(1), (), False),
        (KeyboardInterrupt(), (), False),
        (SystemExit(1), ("builtins.SystemExit",), True),
        (FileNotFoundError(), ("builtins.OSError",), True),
        (OSError(), ("builtins.FileNotFoundError",), False),
        (Away(), (f"{__name__}.Away",), True),
        (Away(), ("builtins.ConnectionError",), True),
        (Away(), ("__main__.Away",), True),
        (Away(), ("elsewhere.Away",), False),
        (ValueError(), ("builtins.OSError", "builtins.ValueError"), True),
    ],
)
def test_an_exception_is_one_of_its_classes(error: BaseException, names: tuple[str, ...], expected: bool) -> None:
    assert is_retried(error, names) is expected


def test_a_class_is_known_by_the_name_that_a_package_gives_it(monkeypatch: pytest.MonkeyPatch) -> None:
    package = types.ModuleType("package_of_away")
    package.Away = Away  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "package_of_away", package)
    assert is_retried(Away(), ("package_of_away.Away",))
    assert not is_retried(OSError(), ("package_of_away.Away",))
    assert not is_retried(OSError(), ("package_of_away.None",))


def test_a_class_whose_name_cannot_be_read_is_not_retried() -> None:
    class Hostile(type):
        def __getattribute__(cls, name: str) -> object:
            if name == "__qualname__":
                raise SystemExit
            return super().__getattribute__(name)

    class Error(Exception, metaclass=Hostile):
        pass

    assert not is_retried(Error(), ("__main__.Error",))


@pytest.mark.parametrize("text", ["OSError", "a.b.C", "WALLTIME_EXCEEDED", "a.f.<locals>.Error"])
def test_names_of_errors_are_shown(text: str) -> None:
    assert error_name(text) == text


@pytest.mark.parametrize("text", ["", "a sentence", "a\nb", "\x1b[31m", "x" * 300, "<script>"])
def test_other_text_is_not(text: str) -> None:
    assert error_name(text) == ""
