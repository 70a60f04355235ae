"""Trust in results: with which strategies the result of a task is read, by the endpoint that it comes from.

Reading a pickle runs code that its writer chose. Every result and every exception of a task is read through
:class:`ResultPolicy`, however it arrived.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Final

from farcall._arguments import as_id
from farcall._endpoints import EndpointCache
from farcall._functions import DEFAULT_SERIALIZER, as_strategy
from farcall._future import Origin
from farcall_common.credentials import VARIABLES, from_environment, known_home, read_settings
from farcall_common.errors import ConfigurationError, DeserializationError, ResultRefused
from farcall_common.payload import (
    DATA_ONLY,
    STRATEGIES,
    PickleOutOfBand,
    Piece,
    Serializer,
    ids_written,
    parse_allowed,
    refused_strategy,
)

#: Trusts every endpoint.
EVERY_ENDPOINT: Final = "*"
_ALLOWED_VARIABLE: Final = "FARCALL_ALLOWED_DESERIALIZERS"
#: What a client asks for by itself: any strategy, large values as bytes.
_ANY: Final = (PickleOutOfBand().id,)
_ALL: Final = frozenset(STRATEGIES)


class ResultPolicy:
    """Decides which strategies may be read. May be used from any thread.

    A result is read as data (JSON) alone, unless its endpoint belongs to the caller or is trusted. Of a task with
    ``result_serializers`` no other strategy is read, and of an ``allowed`` list none that is not in it.

    :param allowed: ids of strategies; None: all.
    :param trusted: provides the ids of endpoints; :data:`EVERY_ENDPOINT` is all of them.
    """

    def __init__(
        self, endpoints: EndpointCache, *, allowed: frozenset[str] | None, trusted: Callable[[], frozenset[str]]
    ) -> None:
        self._endpoints = endpoints
        self._allowed = _ALL if allowed is None else allowed
        self._trusted = trusted

    def needs_request(self, buffer: Piece, origin: Origin) -> bool:
        """Whether :meth:`serializer_for` may call the API, to find out whose an endpoint is: once for each endpoint."""
        if _is_data(buffer):
            return False
        return any(
            id_ and not self._is_trusted(id_) and self._endpoints.owned(id_) is None for id_ in origin.endpoint_ids
        )

    def serializer_for(self, buffer: Piece, origin: Origin, *, allowed: frozenset[str] | None, what: str) -> Serializer:
        """The serializer that may read a buffer.

        :param allowed: as the policy's; both apply.
        :param what: the subject of the message of an error.
        :raises ResultRefused: if it may not be read here.
        :raises DeserializationError: if it is damaged.
        :raises FarcallError: if the API cannot be asked whose an endpoint is.
        """
        permitted = self._allowed if allowed is None else self._allowed & allowed
        if name := refused_strategy(buffer, permitted):
            raise ResultRefused(
                f"{what} is written with {name}, which this client does not read",
                hint=f"Allowed are {_names(permitted)} (allowed_deserializers, {_ALLOWED_VARIABLE}).",
            )
        requested = _requested(origin.result_serializers)
        if name := refused_strategy(buffer, requested):
            raise ResultRefused(
                f"{what} is written with {name}; the task asked for {', '.join(origin.result_serializers)}",
                hint="The endpoint did not write what was asked for. Read it only if you trust the endpoint.",
            )
        permitted &= requested
        if name := refused_strategy(buffer, DATA_ONLY):
            for endpoint_id in origin.endpoint_ids or ("",):
                if not self._is_trusted(endpoint_id) and not (endpoint_id and self._endpoints.is_own(endpoint_id)):
                    raise _untrusted(what, name, endpoint_id)
        else:
            permitted &= DATA_ONLY
        return _reader_of(permitted)

    def _is_trusted(self, endpoint_id: str) -> bool:
        trusted = self._trusted()
        return EVERY_ENDPOINT in trusted or endpoint_id in trusted


def allowed_strategies(
    given: Iterable[object] | None, *, environ: Mapping[str, str] = os.environ
) -> frozenset[str] | None:
    """The ids of the strategies that a client may read: those that are given, else those of the environment, else None.

    :raises ConfigurationError: if one of them is not a strategy, or if none is for data.
    """
    if given is None:
        given = _words(environ.get(_ALLOWED_VARIABLE, "")) or None
    elif isinstance(given, str):
        given = _words(given)
    return None if given is None else parse_allowed(map(_strategy_name, given), needs_code=False)


def trusted_endpoints(
    given: Iterable[object] | None, *, environ: Mapping[str, str] = os.environ, home: Path | None = None
) -> Callable[[], frozenset[str]]:
    """Provides the ids of trusted endpoints: those that are given, else of ``FARCALL_TRUST``, else ``trust`` of
    ``config.toml``, which is read when it is needed.

    :raises ConfigurationError: if one of them is not an id.
    """
    source = "trust"
    if given is None and (text := from_environment("trust", environ)) is not None:
        given, source = text, VARIABLES["trust"]
    if given is not None:
        known = _endpoint_ids(_words(given) if isinstance(given, str) else given, source=source)
        return lambda: known
    directory = known_home(environ) if home is None else home
    return functools.cache(
        lambda: _endpoint_ids(_words(read_settings(directory).get("trust", "")), source="trust in config.toml")
    )


def _endpoint_ids(given: Iterable[object], *, source: str) -> frozenset[str]:
    try:
        return frozenset(EVERY_ENDPOINT if each == EVERY_ENDPOINT else as_id(str(each)) for each in given)
    except ValueError as error:
        raise ConfigurationError(
            f"{source}: {error}", hint=f"Give ids of endpoints (`farcall endpoints ls`), or {EVERY_ENDPOINT} for all."
        ) from None


def _words(text: str) -> list[str]:
    return text.replace(",", " ").split()


def _strategy_name(like: object) -> str:
    return str(getattr(like, "value", like)) if isinstance(like, str) else type(as_strategy(like)).__name__


@functools.cache
def _requested(names: tuple[str, ...]) -> frozenset[str]:
    """The ids of the buffers that a worker may answer with. A name that is not a strategy stands for none."""
    if names in ((), _ANY):
        return _ALL
    found = []
    for name in names:
        try:
            found.append(as_strategy(name))
        except ConfigurationError:
            continue
    return ids_written(found)


@functools.cache
def _reader_of(permitted: frozenset[str]) -> Serializer:
    return dataclasses.replace(DEFAULT_SERIALIZER, allowed=permitted)


def _is_data(buffer: Piece) -> bool:
    try:
        return refused_strategy(buffer, DATA_ONLY) is None
    except DeserializationError:  # it is damaged: nothing of it is read
        return True


def _names(ids: frozenset[str]) -> str:
    return ", ".join(sorted(type(STRATEGIES[id_]).__name__ for id_ in ids)) or "none"


def _untrusted(what: str, strategy: str, endpoint_id: str) -> ResultRefused:
    place = f"endpoint {endpoint_id}" if endpoint_id else "an unknown endpoint"
    return ResultRefused(
        f"{what} comes from {place}, which is not yours, and is written with {strategy}: reading it could run code",
        hint="The result is kept. If you trust the endpoint's owner, read it again with "
        f"Client(trust={{{endpoint_id or EVERY_ENDPOINT!r}}}), or first run "
        f"`farcall config set trust {endpoint_id or repr(EVERY_ENDPOINT)}`. "
        "Plain data (numbers, text, lists, dictionaries of them) is read from any endpoint.",
    )
