"""Arguments against signatures: a call that the function cannot take fails before anything is sent."""

from __future__ import annotations

import functools
import inspect
import textwrap
import types
from collections.abc import Callable
from typing import Any, Final

from farcall._decorated import Decorated

Check = Callable[..., None]

_REMEMBERED: Final = 1024
_LONGEST_SIGNATURE: Final = 500


def check_of(function: Callable[..., Any]) -> Check | None:
    """A function that takes the arguments that ``function`` takes, and does nothing with them; None if that is unknown:
    builtins, classes, instances.

    It raises what Python raises for others, with the signature behind it. Its parameters are those of the function
    itself: what another decorator has as ``__wrapped__`` may differ.
    """
    if isinstance(function, Decorated):
        function = function.__wrapped__
    if isinstance(function, types.FunctionType):
        return _with_signature(function, _accepting(function), (), {})
    if isinstance(function, types.MethodType) and isinstance(function.__func__, types.FunctionType):
        return _with_signature(function, _accepting(function.__func__), (function.__self__,), {})
    if isinstance(function, functools.partial) and isinstance(function.func, types.FunctionType):
        return _with_signature(function, _accepting(function.func), function.args, function.keywords)
    return None


def _with_signature(
    function: Callable[..., Any], accepting: Check | None, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Check | None:
    if accepting is None:
        return None
    bound = functools.partial(accepting, *args, **kwargs) if args or kwargs else accepting

    def check(*args: Any, **kwargs: Any) -> None:
        try:
            bound(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{error}; it is called as {_shown(function)}") from None

    return check


def _shown(function: Callable[..., Any]) -> str:
    named = function.func if isinstance(function, functools.partial) else function
    name: str = named.__name__  # plain functions and methods have one
    try:
        signature = str(inspect.signature(function, follow_wrapped=False))
    except Exception:  # noqa: BLE001 - the repr of a default is code of the user
        signature = "(...)"
    return name + textwrap.shorten(signature, _LONGEST_SIGNATURE, placeholder=" ...")


def _accepting(function: types.FunctionType) -> Check | None:
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
def _empty(code: types.CodeType, defaults: int, keyword_defaults: frozenset[str], name: str) -> Check:
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
