"""Serialisation strategies as callers name them: by object, class, id, name or Globus Compute's import path."""

from __future__ import annotations

from collections.abc import Iterable

from farcall._calls import DEFAULT_SERIALIZER
from farcall_common.errors import ConfigurationError
from farcall_common.payload import Serializer, Strategy, strategy_named


def as_strategy(like: object) -> Strategy:
    """The strategy that is meant. Globus Compute's own classes and objects are known by their ``identifier``.

    :raises ConfigurationError: if there is none like it.
    """
    if isinstance(like, Strategy):
        return like
    if isinstance(like, type) and issubclass(like, Strategy):
        return like()
    if isinstance(like, str):
        return strategy_named(like)
    identifier = getattr(like, "identifier", None)
    if isinstance(identifier, str):
        return strategy_named(identifier.strip())
    raise ConfigurationError(
        f"{like!r} is no serialisation strategy",
        hint="Give a strategy of farcall_common.payload, or its name, like 'JSONData'.",
    )


def strategy_names(likes: Iterable[object] | None) -> tuple[str, ...]:
    """The class names of strategies, which every endpoint understands.

    :raises ConfigurationError: if one of them is none.
    """
    return tuple(type(as_strategy(like)).__name__ for like in likes or ())


def as_serializer(like: object = None, *, code: object = None, data: object = None) -> Serializer:
    """The serializer that is meant: one of ours, or Globus Compute's (by its two strategies), or made of ``code`` and
    ``data``, where None means the strategies that Farcall would try.

    :raises ConfigurationError: if it is none.
    """
    if isinstance(like, Serializer):
        return like
    if like is not None:
        code, data = getattr(like, "code_serializer", None), getattr(like, "data_serializer", None)
        if code is None or data is None:
            raise ConfigurationError(
                f"a {type(like).__name__} is no serializer", hint="Give a farcall_common.payload.Serializer."
            )
    if code is None and data is None:
        return DEFAULT_SERIALIZER
    return Serializer(
        code=DEFAULT_SERIALIZER.code if code is None else (_for_code(code, wanted=True),),
        data=DEFAULT_SERIALIZER.data if data is None else (_for_code(data, wanted=False),),
        own_classes=True,
    )


def _for_code(like: object, *, wanted: bool) -> Strategy:
    strategy = as_strategy(like)
    if strategy.for_code is not wanted:
        kind, other = ("functions", "data") if wanted else ("data", "functions")
        raise ConfigurationError(f"{type(strategy).__name__} is a strategy for {other}, and is wanted for {kind}")
    return strategy
