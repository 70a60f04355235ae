"""Chunks of ``Executor.map``: functions that make many calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from farcall_common.coroutines import is_coroutine_function


def by_chunk(function: Callable[..., Any], *, name: str) -> Callable[..., Any]:
    """A function of that name that makes many calls. It is nested, and so sent by value: workers need no package of
    ours."""

    def call_each(*rows: Sequence[Any]) -> list[Any]:
        return [function(*row) for row in rows]

    async def await_each(*rows: Sequence[Any]) -> list[Any]:
        return [await function(*row) for row in rows]

    made: Callable[..., Any] = await_each if is_coroutine_function(function) else call_each
    made.__name__ = name
    return made
