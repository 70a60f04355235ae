"""Serializer: values to buffers and back, with chosen strategies or the first that works."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from farcall_common.errors import ConfigurationError, DeserializationError, SerializationError
from farcall_common.payload.arrays import ARRAY_PREFIX, load_array
from farcall_common.payload.code import (
    AllCodeStrategies,
    CloudPickleCode,
    CombinedCode,
    DillCode,
    DillCodeSource,
    DillCodeTextInspect,
    PickleCode,
    PureSourceDill,
    PureSourceTextInspect,
)
from farcall_common.payload.data import (
    AllDataStrategies,
    CloudPickleDataBase64,
    DillDataBase64,
    EdgeData,
    JSONData,
    PickleDataBase64,
    PickledData,
    PickleOutOfBand,
)
from farcall_common.payload.framing import Piece, pack, pack_binary, unpack
from farcall_common.payload.native import NATIVE_PREFIX, load_native
from farcall_common.payload.strategy import (
    SEND_DATA,
    Combination,
    Strategy,
    explain,
    explain_all,
    hint_for,
    message_of,
)

STRATEGIES: Mapping[str, Strategy] = MappingProxyType(
    {
        strategy.id: strategy
        for strategy in (
            DillDataBase64(),
            DillCode(),
            PickleCode(),
            DillCodeTextInspect(),
            DillCodeSource(),
            CombinedCode(),
            JSONData(),
            AllCodeStrategies(),
            AllDataStrategies(),
            PureSourceTextInspect(),
            PureSourceDill(),
            PickleDataBase64(),
            CloudPickleDataBase64(),
            CloudPickleCode(),
            PickleOutOfBand(),
        )
    }
)
"""Strategies by id. The table is append-only: old buffers stay readable."""

DEFAULT_DATA: tuple[Strategy, ...] = (JSONData(lossless=True), PickledData())
"""By measured speed (``benchmarks/figures/sdk.md``). JSON refuses values that it would change, without running their
code; pickle passes over a value once. With some hundred values JSON is a little slower than pickle, but bound to no
version, and equal values are equal bytes."""

BINARY_DATA: tuple[Strategy, ...] = (JSONData(lossless=True), PickleOutOfBand())
"""The same for a reader that knows ``f3``: large values are bytes then, and arrays are not copied."""

PORTABLE_DATA: tuple[Strategy, ...] = (DEFAULT_DATA[0], DillDataBase64(), DEFAULT_DATA[1])
"""The same for an unknown reader: Globus Compute's strategies first."""

DEFAULT_CODE: tuple[Strategy, ...] = (PureSourceTextInspect(self_contained=True), CloudPickleCode())
"""Source text if it is provably enough: every Python version runs it. Else byte code, bound to one version.

The first refuses functions of installed packages; the second sends them by name."""

DATA_ONLY = frozenset(
    strategy.id
    for strategy in STRATEGIES.values()
    if not strategy.runs_code
    or (isinstance(strategy, Combination) and any(not part.runs_code for part in strategy.parts))
)
"""The ids to allow for a writer who is not trusted: values without code, alone or as a part of a combination."""

DATA_STRATEGIES = frozenset(strategy.id for strategy in STRATEGIES.values() if not strategy.for_code)
"""The ids for values. Those for functions run code when they are read, whatever was written with them."""

_PREFIX_LENGTH = 3
_SHARE_NOTHING = frozenset({type(None), bool, int, float, str, bytes})
"""Types of values without parts that can be changed."""
_BINARY = frozenset({ARRAY_PREFIX, PickleOutOfBand.prefix})
_OF_WORKERS = frozenset({ARRAY_PREFIX, NATIVE_PREFIX})
"""What workers write for one another (:meth:`Serializer.edge_pieces`), besides buffers of strategies."""
_ID_OF_WORKERS = PickleOutOfBand().id
"""The strategy that is allowed where those may be read."""
_BY_PREFIX: Mapping[bytes, Strategy] = {strategy.prefix: strategy for strategy in STRATEGIES.values()}
_BY_NAME = {type(strategy).__name__: strategy for strategy in STRATEGIES.values()}
_ALL_OF_A_KIND = {"*Code": True, "*Data": False}


@dataclasses.dataclass(frozen=True)
class Serializer:
    """Converts values and functions to buffers, and back.

    A buffer is the id of a strategy, a newline, and the strategy's output: UTF-8 text, except for ``f3``. ``data`` and
    ``code`` are the strategies to try in turn when writing; ``allowed`` are the ids that may be read (None: all), see
    :func:`~farcall_common.payload.parse_allowed`. Reading a buffer may run code from it, unless it is JSON: only
    workers, and clients that read results of their own tasks, should. ``own_classes`` is for clients: instances of a
    class that the client can import get that class, even if the source of the sent class differs.
    """

    data: Sequence[Strategy] = DEFAULT_DATA
    code: Sequence[Strategy] = DEFAULT_CODE
    allowed: frozenset[str] | None = None
    own_classes: bool = dataclasses.field(default=False, compare=False)

    def serialize(self, value: object, *, strategies: Sequence[Strategy] | None = None) -> bytes:
        """The buffer of a value, by the first strategy that works.

        :raises SerializationError: if none does; with the reason of each.
        """
        return b"".join(self.pieces(value, strategies=strategies))

    def pieces(self, value: object, *, strategies: Sequence[Strategy] | None = None) -> Sequence[Piece]:
        """Serialize a value to pieces: large contents are not copied. Do not change them before they are sent."""
        return _first_that_dumps(value, self.data if strategies is None else strategies, "The value")

    def serialize_function(
        self, function: Callable[..., Any], *, strategies: Sequence[Strategy] | None = None
    ) -> bytes:
        """The buffer of a function, by the first strategy that works.

        :raises SerializationError: if none does; with the reason of each.
        """
        name = getattr(function, "__qualname__", None)
        subject = f"The function {name}" if isinstance(name, str) else "The function"
        return b"".join(_first_that_dumps(function, self.code if strategies is None else strategies, subject))

    def edge_pieces(self, value: object) -> Sequence[Piece]:
        """The buffer of a value for other workers of the endpoint, in pieces. Large contents are not
        copied.

        :raises SerializationError: if no strategy works; with the reason of each.
        """
        return _first_that_dumps(value, (EdgeData(),), "The value")

    def deserialize(self, buffer: Piece) -> object:
        """The value in a buffer of any writer. Arrays may keep using the memory of the buffer, if it is writable.

        :raises DeserializationError: if the strategy is unknown or not allowed, or if the value cannot be read here.
        """
        prefix = bytes(buffer[:_PREFIX_LENGTH])
        if prefix in _OF_WORKERS and (self.allowed is None or _ID_OF_WORKERS in self.allowed):
            return self._load_of_worker(buffer, prefix)
        strategy = _BY_PREFIX.get(prefix)
        if strategy is None:
            raise DeserializationError(
                f"The buffer starts with {prefix!r}, which is not a known strategy.",
                hint="Upgrade farcall on this side, or choose an older strategy on the other side.",
            )
        if self.allowed is not None and strategy.id not in self.allowed:
            readable = map(STRATEGIES.__getitem__, self.allowed)
            names = sorted(type(known).__name__ for known in readable if known.for_code is strategy.for_code)
            raise DeserializationError(
                f"Buffers of {type(strategy).__name__} may not be read here.",
                hint=f"The administrator allows {', '.join(names)}: choose one of them when you submit.",
            )
        try:
            if isinstance(strategy, PickleOutOfBand):
                return strategy.load(memoryview(buffer)[_PREFIX_LENGTH:], own_classes=self.own_classes)
            text = bytes(buffer[_PREFIX_LENGTH:])
            if isinstance(strategy, CloudPickleDataBase64 | CloudPickleCode):
                return strategy.load(text, own_classes=self.own_classes)
            if isinstance(strategy, Combination):
                return self._first_that_loads(strategy, text)
            return strategy.load(text)
        except DeserializationError:
            raise
        except Exception as error:
            raise DeserializationError(
                f"Cannot be read here: {explain(strategy, error)}", hint=hint_for(error)
            ) from error

    def _load_of_worker(self, buffer: Piece, prefix: bytes) -> object:
        try:
            return load_array(buffer) if prefix == ARRAY_PREFIX else load_native(buffer)
        except Exception as error:
            reason = f"{type(error).__name__}: {message_of(error)}"
            raise DeserializationError(f"Cannot be read here: {reason}", hint=hint_for(error)) from error

    def deserialize_function(self, buffer: Piece) -> Callable[..., Any]:
        """The function in a buffer.

        :raises DeserializationError: as :meth:`deserialize`, and if the buffer has no callable.
        """
        function = self.deserialize(buffer)
        if not callable(function):
            raise DeserializationError(f"Expected a function, found a {type(function).__name__}.")
        return function

    def pack(self, buffers: Iterable[bytes]) -> bytes:
        """Several buffers of text as one; see :mod:`farcall_common.payload.framing`."""
        return pack(buffers)

    def unpack(self, packed: Piece) -> list[Piece]:
        """The buffers in a packed one.

        :raises DeserializationError: if it is damaged.
        """
        return unpack(packed)

    def pack_function(self, function: Callable[..., Any], *, strategies: Sequence[Strategy] | None = None) -> bytes:
        """The packed buffer of a function, as it is registered.

        :raises SerializationError: as :meth:`serialize_function`.
        """
        return pack([self.serialize_function(function, strategies=strategies)])

    def unpack_function(self, packed: bytes) -> Callable[..., Any]:
        """The function that :meth:`pack_function` packed.

        :raises DeserializationError: if it is damaged, or cannot be read here.
        """
        buffers = unpack(packed)
        if len(buffers) != 1:
            raise DeserializationError(f"A function is one packed buffer, not {len(buffers)}.")
        return self.deserialize_function(buffers[0])

    def pack_call(
        self,
        args: Iterable[object] = (),
        kwargs: Mapping[str, object] | None = None,
        *,
        strategies: Sequence[Strategy] | None = None,
    ) -> bytes:
        """The payload of a task: the packed buffers of its positional and its keyword arguments.

        :raises SerializationError: if an argument cannot be sent; with its name and the reason.
        """
        args, kwargs = tuple(args), dict(kwargs or {})
        # JSON has no tuples, and is tried first: endpoints that run certain functions only read nothing else.
        written = list(args) if strategies is None else args
        try:
            return packed(self.call_pieces(written, kwargs, strategies=strategies))
        except SerializationError as error:
            blamed = self._blame_argument(args, kwargs, strategies)
            if blamed is None:
                raise
            try:
                raise blamed from error
            finally:
                del blamed  # its traceback refers to this frame, which would keep the arguments alive

    def call_pieces(
        self, args: Sequence[object], kwargs: Mapping[str, object], *, strategies: Sequence[Strategy] | None = None
    ) -> list[Sequence[Piece]]:
        """The buffers of a call in pieces: of its positional and its keyword arguments. One buffer for both if they may
        have an object in common, which is one object then for the function, too.

        :raises SerializationError: if an argument cannot be sent.
        """
        if _SHARE_NOTHING.issuperset(map(type, args)) or _SHARE_NOTHING.issuperset(map(type, kwargs.values())):
            return [self.pieces(args, strategies=strategies), self.pieces(kwargs, strategies=strategies)]
        return [self.pieces([args, kwargs], strategies=strategies)]

    def unpack_call(self, packed: Piece) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword arguments of a :meth:`pack_call`.

        :raises DeserializationError: if it is damaged, or an argument cannot be read here.
        """
        parts = [self.deserialize(buffer) for buffer in unpack(packed)]
        match parts:
            case [[args, kwargs]] | [args, kwargs]:
                if isinstance(args, (list, tuple)) and isinstance(kwargs, dict):  # JSON has no tuples
                    return tuple(args), kwargs
        kinds = ", ".join(type(part).__name__ for part in parts) or "nothing"
        raise DeserializationError(f"Expected a call: a list and a dict. Found: {kinds}.")

    def _first_that_loads(self, combination: Combination, text: bytes) -> object:
        failures: list[str] = []
        hint = ""
        for buffer in combination.split(text):
            prefix = bytes(buffer[:_PREFIX_LENGTH])
            part = _BY_PREFIX.get(prefix)
            if part is None or isinstance(part, Combination):
                failures.append(f"{prefix!r} cannot be a part of another strategy")
                continue
            try:
                return self.deserialize(buffer)
            except DeserializationError as error:
                failures.append(error.record.message)
                hint = hint or error.hint
        raise DeserializationError(
            f"No part of {type(combination).__name__} can be read here: {'; '.join(failures) or 'it has no parts'}",
            hint=hint,
        )

    def _blame_argument(
        self, args: tuple[object, ...], kwargs: dict[str, object], strategies: Sequence[Strategy] | None
    ) -> SerializationError | None:
        """The error of the first argument that cannot be sent alone; None if each of them can."""
        named = [(f"Positional argument {number}", value) for number, value in enumerate(args, start=1)]
        named += [(f"Keyword argument {name!r}", value) for name, value in kwargs.items()]
        for name, value in named:
            try:
                _first_that_dumps(value, self.data if strategies is None else strategies, name)
            except SerializationError as error:
                return error
        return None


def packed(buffers: Sequence[Sequence[Piece]]) -> bytes:
    """Buffers in pieces as one: as text, unless one of them is binary."""
    if any(map(is_binary, buffers)):
        return pack_binary(buffers)
    return pack([b"".join(pieces) for pieces in buffers])


def is_binary(pieces: Sequence[Piece]) -> bool:
    """Whether a buffer in pieces has large contents as they lie in memory."""
    return pieces[0][:_PREFIX_LENGTH] in _BINARY


def _first_that_dumps(value: object, strategies: Iterable[Strategy], subject: str) -> Sequence[Piece]:
    failures: list[tuple[Strategy, BaseException]] = []
    try:
        for strategy in strategies:
            try:
                return strategy.write(value)
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # noqa: BLE001 - pickling a value may raise anything, even SystemExit
                failures.append((strategy, error))  # explained only when nothing works: most calls fail once, at JSON
        tried = explain_all(failures) or "nothing"
    finally:
        # The traceback of an exception refers to this frame: a frame that refers to the exception keeps the value alive
        # until the garbage collector runs.
        failures.clear()
    raise SerializationError(
        f"{subject} (of type {type(value).__qualname__}) cannot be serialised. Tried {tried}.",
        hint=SEND_DATA,
    )


def strategy_named(name: str) -> Strategy:
    """The strategy of an id (``11``), a class name (``JSONData``) or Globus Compute's import path of the class.

    Nothing is imported.

    :raises ConfigurationError: if the name is unknown.
    """
    strategy = STRATEGIES.get(name) or _BY_NAME.get(name.rpartition(".")[2])
    if strategy is None:
        raise ConfigurationError(
            f"Unknown serialisation strategy {name!r}.", hint=f"Known are: {', '.join(sorted(_BY_NAME))}."
        )
    return strategy


def ids_written(strategies: Iterable[Strategy]) -> frozenset[str]:
    """The ids of the buffers that strategies write, and of the parts of combinations."""
    prefixes: set[bytes] = set()
    for strategy in strategies:
        prefixes |= {strategy.prefix, *strategy.also_writes}
        if isinstance(strategy, Combination):
            prefixes |= {part.prefix for part in strategy.parts}
    return frozenset(_BY_PREFIX[prefix].id for prefix in prefixes)


def refused_strategy(buffer: Piece, allowed: frozenset[str]) -> str | None:
    """The name of the strategy of a buffer if a reader with this allow-list would read no part of it. None if it may
    read it, and for an unknown strategy, which no reader reads."""
    prefix = bytes(buffer[:_PREFIX_LENGTH])
    strategy = _BY_PREFIX[PickleOutOfBand.prefix] if prefix in _OF_WORKERS else _BY_PREFIX.get(prefix)
    if strategy is None:
        return None
    if strategy.id in allowed:
        if not isinstance(strategy, Combination):
            return None
        parts = [
            _BY_PREFIX.get(bytes(part[:_PREFIX_LENGTH])) for part in strategy.split(bytes(buffer[_PREFIX_LENGTH:]))
        ]
        if any(part is not None and part.id in allowed for part in parts):
            return None
    return type(strategy).__name__


def parse_allowed(names: Iterable[str], *, needs_code: bool = True) -> frozenset[str]:
    """The strategy ids of an allow-list.

    Entries are names for :func:`strategy_named`, or ``*Code`` and ``*Data`` (also with a package in front, as in Globus
    Compute). A combination includes its parts.

    :param needs_code: false for a reader of results alone.
    :raises ConfigurationError: if an entry is unknown, or if either no code or no data could be read.
    """
    allowed: set[Strategy] = set()
    for name in names:
        kind = _ALL_OF_A_KIND.get(name.rpartition(".")[2])
        if kind is None:
            strategy = strategy_named(name)
            allowed.add(strategy)
        else:
            allowed.update(strategy for strategy in STRATEGIES.values() if strategy.for_code is kind)
    kinds = {strategy.for_code for strategy in allowed}
    if False not in kinds or (needs_code and True not in kinds):
        wanted = "one strategy for code and one for data" if needs_code else "one strategy for data"
        raise ConfigurationError(
            f"An allow-list needs at least {wanted}.", hint="*Code and *Data stand for all strategies of a kind."
        )
    parts = {part.id for strategy in allowed if isinstance(strategy, Combination) for part in strategy.parts}
    return frozenset(parts | {strategy.id for strategy in allowed})
