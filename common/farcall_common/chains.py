"""Chains of functions, of which each gets what the one before returned. ``import farcall`` loads this module."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, Generic, ParamSpec, TypeVar, overload

P = ParamSpec("P")
T = TypeVar("T")
A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")
D = TypeVar("D")


class Chain(Generic[P, T]):
    """Functions of which each gets what the one before returned, as :func:`chain` makes them. Calling it calls them."""

    def __init__(self, functions: Iterable[Callable[..., Any]]) -> None:
        flat: list[Callable[..., Any]] = []
        for function in functions:
            if isinstance(function, Chain):
                flat += function.functions
            elif callable(function):
                flat.append(function)
            else:
                raise TypeError(f"chain: expected functions, got {type(function).__name__}")
        if not flat:
            raise TypeError("chain: there is no function to call")
        self.functions: tuple[Callable[..., Any], ...] = tuple(flat)
        self.__name__: str = " | ".join(map(name_of, self.functions))

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        first, *rest = self.functions
        value = first(*args, **kwargs)
        for function in rest:
            value = function(value)
        found: T = value
        return found

    def __repr__(self) -> str:
        return f"chain({', '.join(map(name_of, self.functions))})"


@overload
def chain(f: Callable[P, T], /) -> Chain[P, T]: ...


@overload
def chain(f: Callable[P, A], g: Callable[[A], T], /) -> Chain[P, T]: ...


@overload
def chain(f: Callable[P, A], g: Callable[[A], B], h: Callable[[B], T], /) -> Chain[P, T]: ...


@overload
def chain(f: Callable[P, A], g: Callable[[A], B], h: Callable[[B], C], i: Callable[[C], T], /) -> Chain[P, T]: ...


@overload
def chain(
    f: Callable[P, A], g: Callable[[A], B], h: Callable[[B], C], i: Callable[[C], D], j: Callable[[D], T], /
) -> Chain[P, T]: ...


@overload
def chain(*functions: Callable[..., Any]) -> Chain[..., Any]: ...


def chain(*functions: Callable[..., Any]) -> Chain[..., Any]:
    """Functions as one, of which each gets what the one before returned: ``chain(load, resize)(path)`` is
    ``resize(load(path))``.

    Submitted to an executor, it is one task, whose functions run side by side with those of other tasks. A graph takes
    it as a function, too.

    :raises TypeError: for anything that cannot be called.
    """
    return Chain(functions)


def is_decorated(function: object) -> bool:
    """Whether a function has options of its own: the SDK's decorator makes those."""
    return bool(getattr(type(function), "farcall_decorated", False))


def name_of(function: Callable[..., Any]) -> str:
    """The name of a function, also of a partial one; of one without a name (an instance), that of its class."""
    while isinstance(function, functools.partial):
        function = function.func
    given = is_decorated(function) and getattr(function, "registered_name", None)
    name = given or getattr(function, "__name__", None)
    return name if isinstance(name, str) else type(function).__name__
