"""Serialization cases: ``python -m benchmarks.serialization_cases SYSTEM`` prints the figures of one system as JSON.

Runs in the system's environment, and needs only the standard library, numpy and the system.
"""

from __future__ import annotations

import importlib
import json
import math
import random
import statistics
import sys
import time
import tracemalloc
from collections.abc import Callable
from typing import Any, Final

import numpy as np

#: Functions that write and read; both raise if they do not support a value.
Pair = tuple[Callable[[Any], Any], Callable[[Any], Any]]

_SCALE = 3.0
_BUDGET_S: Final = 0.25
_MIN_ROUNDS: Final = 5
_MEMORY_FROM_BYTES: Final = 1_000_000
"""The memory of smaller values is not measured."""


# -- cases -------------------------------------------------------------------------------------------------------------


def plain(x: float) -> float:
    return x * x + 1


def helper(x: float) -> float:
    return math.sqrt(x) * _SCALE


def uses_others(x: float) -> float:
    return helper(x) + math.pi


def closure() -> Callable[[float], float]:
    shift = 2.5

    def add(x: float) -> float:
        return x + shift

    return add


FUNCTIONS: Final[dict[str, Callable[..., Any]]] = {
    "function of the script": plain,
    "function that uses others": uses_others,
    "lambda": lambda x: x + 1,
    "closure": closure(),
    "function of a package": statistics.median,
}
DATA: Final[dict[str, Callable[[], Any]]] = {
    "small dict": lambda: {"energy": 1.5, "steps": [1, 2, 3], "name": "run 7", "ok": True},
    "200 records": lambda: [{"id": n, "name": f"sample {n}", "value": n / 7} for n in range(200)],
    "bytes, 1 MB": lambda: random.Random(1).randbytes(10**6),
    "array, 1 MB": lambda: np.random.default_rng(1).random(10**6 // 8),
    "array, 10 MB": lambda: np.random.default_rng(1).random(10**7 // 8),
    "array, 100 MB": lambda: np.random.default_rng(1).random(10**8 // 8),
    "100,000 integers": lambda: list(range(100_000)),
}


# -- systems -----------------------------------------------------------------------------------------------------------


def _farcall(*, code: bool = False, binary: bool = False, position: int | None = None) -> Pair:
    """The facade as it chooses, or one of the strategies that it tries, by its position."""
    from farcall_common.payload import BINARY_DATA, DEFAULT_CODE, DEFAULT_DATA, Serializer

    serializer = Serializer()
    chosen = BINARY_DATA if binary else None
    if position is not None:
        chosen = ((DEFAULT_CODE if code else DEFAULT_DATA)[position],)
    if code:
        return lambda value: serializer.serialize_function(value, strategies=chosen), serializer.deserialize_function
    return lambda value: serializer.serialize(value, strategies=chosen), serializer.deserialize


def _globus(code: str | None = None, data: str | None = None) -> Pair:
    theirs = importlib.import_module("globus_compute_sdk.serialize")
    serializer = theirs.ComputeSerializer(
        strategy_code=getattr(theirs, code)() if code else None, strategy_data=getattr(theirs, data)() if data else None
    )
    return serializer.serialize, serializer.deserialize


def _module(name: str) -> Pair:
    module = importlib.import_module(name)
    return (lambda value: module.dumps(value, protocol=5)), module.loads


#: Environment of each system, and its functions for functions and for data; None if it has none.
SYSTEMS: Final[dict[str, tuple[str, Callable[[], Pair] | None, Callable[[], Pair] | None]]] = {
    "farcall": ("ours", lambda: _farcall(code=True), lambda: _farcall(binary=True)),
    "farcall, as text": ("ours", None, _farcall),
    "Globus Compute": ("globus", _globus, _globus),
    "Globus Compute, combined": (
        "globus",
        lambda: _globus("AllCodeStrategies", "AllDataStrategies"),
        lambda: _globus("AllCodeStrategies", "AllDataStrategies"),
    ),
    "Globus Compute, text": (
        "globus",
        lambda: _globus("PureSourceTextInspect", "JSONData"),
        lambda: _globus("PureSourceTextInspect", "JSONData"),
    ),
    "pickle": ("ours", None, lambda: _module("pickle")),  # it writes only the name of a function
    "cloudpickle": ("ours", lambda: _module("cloudpickle"), lambda: _module("cloudpickle")),
    "dill": ("ours", lambda: _module("dill"), lambda: _module("dill")),
    "1st: JSON, source text": ("order", lambda: _farcall(code=True, position=0), lambda: _farcall(position=0)),
    "2nd: pickle, byte code": ("order", lambda: _farcall(code=True, position=1), lambda: _farcall(position=1)),
}


# -- measuring ---------------------------------------------------------------------------------------------------------


def main(name: str) -> None:
    """Measure, print."""
    _, code, data = SYSTEMS[name]
    figures: dict[str, Any] = {"functions": {}, "data": {}}
    for kind, pair, makers in (
        ("functions", code, {case: (lambda function=function: function) for case, function in FUNCTIONS.items()}),
        ("data", data, DATA),
    ):
        if pair is not None:
            write, read = pair()
            for case, make in makers.items():
                figures[kind][case] = _measured(make(), write, read)
    print(json.dumps(figures), flush=True)


def _measured(value: Any, write: Callable[[Any], Any], read: Callable[[Any], Any]) -> dict[str, float] | None:
    """Microseconds to write and to read, length, and the memory for each as multiples of the size of the value."""
    try:
        written = write(value)
        back = read(_received(written))
    except Exception:  # noqa: BLE001 - any error means that the system does not support the value
        return None
    if not (callable(back) or np.array_equal(back, value)):
        return None
    size = getattr(value, "nbytes", None) or (len(value) if isinstance(value, bytes) else 0)
    figures = {
        "write_us": _median_us(lambda: write(value)),
        "read_us": _median_us(read, lambda: _received(written)),
        "size": len(written),
    }
    if size >= _MEMORY_FROM_BYTES:
        figures["write_copies"] = _peak(lambda: write(value)) / size
        received = _received(written)
        figures["read_copies"] = _peak(lambda: read(received)) / size
    return figures


def _received(written: Any) -> Any:
    """The input of a reader: a download has collected bytes in their own memory."""
    return memoryview(bytearray(written)) if isinstance(written, bytes) and written[:3] == b"f3\n" else written


def _median_us(act: Callable[..., Any], prepare: Callable[[], Any] | None = None) -> float:
    took: list[float] = []
    until = time.perf_counter() + _BUDGET_S
    while len(took) < _MIN_ROUNDS or time.perf_counter() < until:
        given = () if prepare is None else (prepare(),)
        began = time.perf_counter()
        kept = act(*given)  # so that its deletion is not measured
        took.append(time.perf_counter() - began)
        del kept
    return statistics.median(took) * 1e6


def _peak(act: Callable[[], Any]) -> int:
    tracemalloc.start()
    kept = act()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    del kept
    return peak


if __name__ == "__main__":
    main(sys.argv[1])
