"""Arguments against signatures: a call that the function cannot take fails before anything is sent."""

from __future__ import annotations

import functools
import inspect
import textwrap
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

from farcall._decorated import Decorated

Accepts = Callable[..., None]

_REMEMBERED: Final = 1024
_LONGEST_SIGNATURE: Final = 500


def accepts_of(function: Callable[..., Any]) -> Accepts | None:
    """A function that takes the arguments that ``function`` takes, and does nothing with them; None if that is unknown:
    builtins, classes, instances.

    It raises what Python raises for others. It refers to nothing of the function, which may hold large data. Its
    parameters are those of the function itself: what another decorator has as ``__wrapped__`` may differ.
    """
    named = _named(function)
    if named is None or (accepts := _accepting(named)) is None:
        return None
    if isinstance(function, types.MethodType):
        return functools.partial(accepts, None)
    if isinstance(function, functools.partial):
        return functools.partial(accepts, *[None] * len(function.args), **dict.fromkeys(function.keywords))
    return accepts


def check_arguments(
    function: Callable[..., Any], accepts: Accepts, args: Iterable[Any], kwargs: Mapping[str, Any]
) -> None:
    """Compare the arguments of a call with what :func:`accepts_of` the function is.

    :raises TypeError: if the function does not take them: Python's message, and the signature.
    """
    try:
        accepts(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"{error}; it is called as {_shown(function)}") from None


def checked(function: Callable[..., Any], rows: Iterator[tuple[Any, ...]]) -> Iterator[tuple[Any, ...]]:
    """The arguments of calls, each compared with the function.

    :raises TypeError: from the iterator, as :func:`check_arguments`.
    """
    accepts = accepts_of(function)
    for row in rows:
        if accepts is not None:
            check_arguments(function, accepts, row, {})
        yield row


def _named(function: Callable[..., Any]) -> types.FunctionType | None:
    """The plain function that is called in the end."""
    inner: object = function
    if isinstance(function, Decorated):
        inner = function.__wrapped__
    elif isinstance(function, types.MethodType):
        inner = function.__func__
    elif isinstance(function, functools.partial):
        inner = function.func
    return inner if isinstance(inner, types.FunctionType) else None


def _shown(function: Callable[..., Any]) -> str:
    plain = function.__wrapped__ if isinstance(function, Decorated) else function
    named = _named(function)
    try:
        signature = str(inspect.signature(plain, follow_wrapped=False))
    except Exception:  # noqa: BLE001 - the repr of a default is code of the user
        signature = "(...)"
    name = "the function" if named is None else named.__name__
    return name + textwrap.shorten(signature, _LONGEST_SIGNATURE, placeholder=" ...")


def _accepting(function: types.FunctionType) -> Accepts | None:
    """A function with the same parameters and an empty body. None if its parameters cannot be written."""
    names = function.__code__.co_varnames[: function.__code__.co_argcount + function.__code__.co_kwonlyargcount]
    if not all(map(str.isidentifier, names)):
        return None
    return _empty(
        function.__code__,
        len(function.__defaults__ or ()),
        frozenset(function.__kwdefaults__ or ()),
        function.__qualname__,
    )


@functools.lru_cache(_REMEMBERED)
def _empty(code: types.CodeType, defaults: int, keyword_defaults: frozenset[str], name: str) -> Accepts:
    count, keyword_only = code.co_argcount, code.co_kwonlyargcount
    names = code.co_varnames
    parameters = [each if at < count - defaults else f"{each}=None" for at, each in enumerate(names[:count])]
    if code.co_posonlyargcount:
        parameters.insert(code.co_posonlyargcount, "/")
    after = count + keyword_only
    if code.co_flags & inspect.CO_VARARGS:
        parameters.append(f"*{names[after]}")
        after += 1
    elif keyword_only:
        parameters.append("*")
    parameters += [f"{each}=None" if each in keyword_defaults else each for each in names[count:][:keyword_only]]
    if code.co_flags & inspect.CO_VARKEYWORDS:
        parameters.append(f"**{names[after]}")
    made: dict[str, Any] = {}
    exec(f"def accept({', '.join(parameters)}): pass", made)  # noqa: S102 - names of parameters alone
    accept: types.FunctionType = made["accept"]
    accept.__qualname__ = name
    return accept
