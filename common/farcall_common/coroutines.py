"""Coroutine and generator functions as tasks: the first are run, the others are refused before anything is sent."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any


def completed(value: Any) -> Any:
    """The value of a call; of a coroutine, what it returns: it is run here."""
    if type(value) is not types.CoroutineType:
        return value
    import asyncio  # here, because most workers need none

    return asyncio.run(value)


def is_coroutine_function(function: object) -> bool:
    """Whether a call of a function is a coroutine."""
    return any(map(inspect.iscoroutinefunction, _called(function)))


def is_generator_function(function: object) -> bool:
    """Whether a call of a function is a generator, or an asynchronous one."""
    called = _called(function)
    return any(map(inspect.isgeneratorfunction, called)) or any(map(inspect.isasyncgenfunction, called))


def _called(function: Any) -> tuple[Callable[..., Any], ...]:
    """A function without decorator and partial; of another object, also its method that is called."""
    if getattr(type(function), "farcall_decorated", None) is True:
        function = function.__wrapped__
    while isinstance(function, functools.partial):
        function = function.func
    return function, type(function).__call__
