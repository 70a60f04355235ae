"""Arguments against signatures."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from farcall import Executor
from farcall._binding import accepts_of, check_arguments
from farcall.testing import FakeCloud
from tests.waiting import WAIT_S


def check_of(function: Callable[..., Any]) -> Callable[..., None] | None:
    accepts = accepts_of(function)
    if accepts is None:
        return None
    return lambda *args, **kwargs: check_arguments(function, accepts, args, kwargs)


def plain(path: str, times: int = 2, /, *rest: int, mode: str, **options: Any) -> Any:
    return path, times, rest, mode, options


def nothing() -> None: ...


def keyword_only(*, a: int, b: int = 2) -> int:
    return a + b


class Shape:
    def grown(self, by: int) -> int:
        return by


def around(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(x: int) -> Any:
        return function(x, mode="given")

    return wrapper


def message_of(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    try:
        function(*args, **kwargs)
    except TypeError as error:
        return str(error)
    return ""


CALLS: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
    ((), {}),
    ((1,), {}),
    ((1,), {"mode": "x"}),
    ((1, 2, 3, 4), {"mode": "x", "path": 1, "other": 2}),
    ((), {"a": 1}),
    ((), {"a": 1, "c": 1}),
    ((1,), {"a": 1}),
    ((1,), {"by": 1}),
    ((1, 2), {}),
]


@pytest.mark.parametrize(
    "function", [plain, nothing, keyword_only, Shape().grown, around(plain), functools.partial(plain, "a", mode="m")]
)
def test_python_says_the_same(function: Callable[..., Any]) -> None:
    check = check_of(function)
    assert check is not None
    for args, kwargs in CALLS:
        by_python, by_us = message_of(function, args, kwargs), message_of(check, args, kwargs)
        assert by_us.partition("; it is called as ")[0] == by_python


def test_the_signature_is_in_the_message() -> None:
    check: Any = check_of(keyword_only)
    with pytest.raises(TypeError, match=r"it is called as keyword_only\(\*, a: 'int', b: 'int' = 2\) -> 'int'$"):
        check()


def test_what_is_unknown_is_not_checked() -> None:
    for function in (pow, len, int, Shape, print, "".join, functools.partial(pow, 2), min):
        assert check_of(function) is None

    class Bad:
        def __repr__(self) -> str:
            raise RuntimeError

    def with_default(x: Any, y: Any = Bad()) -> None: ...  # noqa: B008

    check: Any = check_of(with_default)
    check(1)
    with pytest.raises(TypeError, match=r"called as with_default\(\.\.\.\)$"):
        check()


def test_executors_check_before_they_send(cloud: FakeCloud) -> None:
    with cloud.client() as client, Executor(cloud.endpoint_id, client) as executor:
        with pytest.raises(TypeError, match="missing 1 required keyword-only argument: 'a'"):
            executor.submit(keyword_only)  # type: ignore[call-overload]
        with pytest.raises(TypeError, match="positional"):
            executor.map(keyword_only, [1])
        with pytest.raises(TypeError, match="positional"):
            executor.map(keyword_only, [1, 2], chunksize=2)
        executor.register_function(keyword_only)
        with pytest.raises(TypeError, match="missing"):
            executor.submit(keyword_only)  # type: ignore[call-overload]
        function_id = executor.register_function(plain)
        other = executor.register_function(keyword_only, function_id)
        given: Callable[..., Any] = keyword_only
        assert executor.submit(given, "x", mode="m").result(WAIT_S)[0] == "x"
        assert executor.submit_to_registered_function(other, ["x"], {"mode": "m"}).result(WAIT_S)[0] == "x"
        assert executor.submit(pow, 2, 3).result(WAIT_S) == 8
    assert executor.task_count_submitted == 3


def test_nothing_of_the_function_is_kept() -> None:
    class Large:
        def method(self, x: int) -> int:
            return x

    def accepting() -> tuple[list[Callable[..., None] | None], weakref.ref[Large]]:
        large = Large()

        def closure(x: Any = large) -> Any:
            return large, x

        functions = (large.method, closure, functools.partial(closure, large))
        return [accepts_of(each) for each in functions], weakref.ref(large)

    kept, large = accepting()
    gc.collect()
    assert None not in kept
    assert large() is None
