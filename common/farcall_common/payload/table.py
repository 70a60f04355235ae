"""Every strategy by its id. The table is append-only: what was written once is read for ever."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from farcall_common.errors import ConfigurationError
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
    JSONData,
    PickleDataBase64,
)
from farcall_common.payload.out_of_band import PickleOutOfBand
from farcall_common.payload.strategy import Combination, Strategy

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

_BY_NAME = {type(strategy).__name__: strategy for strategy in STRATEGIES.values()}
_ALL_OF_A_KIND = {"*Code": True, "*Data": False}


def strategy_named(name: str) -> Strategy:
    """The strategy of an id (``11``), a class name (``JSONData``) or Globus Compute's import path of the class.

    Nothing is imported for it.

    :raises ConfigurationError: if there is no such strategy.
    """
    strategy = STRATEGIES.get(name) or _BY_NAME.get(name.rpartition(".")[2])
    if strategy is None:
        raise ConfigurationError(
            f"There is no serialisation strategy {name!r}.", hint=f"There are: {', '.join(sorted(_BY_NAME))}."
        )
    return strategy


def parse_allowed(names: Iterable[str]) -> frozenset[str]:
    """The strategy ids of an administrator's allow-list.

    Entries are what :func:`strategy_named` takes, or ``*Code`` and ``*Data`` (also with a package in front, as
    Globus Compute writes them). A combination brings its parts.

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
    if {strategy.for_code for strategy in allowed} != {True, False}:
        raise ConfigurationError("An allow-list needs at least one strategy for code and one for data.")
    parts = {part.id for strategy in allowed if isinstance(strategy, Combination) for part in strategy.parts}
    return frozenset(parts | {strategy.id for strategy in allowed})
