"""``python -m benchmarks.serialization_cases CONTESTANT``: how one serialiser does, as JSON on standard output.

Runs in the contestant's environment: it needs the standard library, numpy and the contestant.
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

#: A way to write, and a way to read what was written; either raises what it cannot do.
Pair = tuple[Callable[[Any], Any], Callable[[Any], Any]]

_SCALE = 3.0
_BUDGET_S: Final = 0.25
_MIN_ROUNDS: Final = 5
_WHILE_COUNTING: Final = 1_000_000
"""Only what is larger has its memory looked at."""


# -- what is written ---------------------------------------------------------------------------------------------------


def plain(x: float) -> float:
    return x * x + 1


def helper(x: float) -> float:
    return math.sqrt(x) * _SCALE


def of_this_script(x: float) -> float:
    return helper(x) + math.pi


def closure() -> Callable[[float], float]:
    shift = 2.5

    def add(x: float) -> float:
        return x + shift

    return add


FUNCTIONS: Final[dict[str, Callable[..., Any]]] = {
    "function of the script": plain,
    "function that uses others": of_this_script,
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


# -- what writes -------------------------------------------------------------------------------------------------------


def _farcall(*strategies: str, code: bool = False, binary: bool = False) -> Pair:
    """The facade as it chooses, or one strategy of it."""
    from farcall_common.payload import BINARY_DATA, Serializer, strategy_named

    serializer = Serializer()
    chosen = [strategy_named(name) for name in strategies] if strategies else BINARY_DATA if binary else None
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


def _first_of_default(position: int, *, code: bool) -> Pair:
    """One of the strategies that the facade tries, in the order in which it tries them."""
    from farcall_common.payload import DEFAULT_CODE, DEFAULT_DATA, Serializer

    serializer, strategy = Serializer(), [(DEFAULT_CODE if code else DEFAULT_DATA)[position]]
    if code:
        return lambda value: serializer.serialize_function(value, strategies=strategy), serializer.deserialize_function
    return lambda value: serializer.serialize(value, strategies=strategy), serializer.deserialize


#: Name: environment, and what it writes functions and data with; None for what is not its affair.
CONTESTANTS: Final[dict[str, tuple[str, Callable[[], Pair] | None, Callable[[], Pair] | None]]] = {
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
    "pickle": ("ours", None, lambda: _module("pickle")),  # of a function it writes the name
    "cloudpickle": ("ours", lambda: _module("cloudpickle"), lambda: _module("cloudpickle")),
    "dill": ("ours", lambda: _module("dill"), lambda: _module("dill")),
    "1st: JSON, source text": (
        "order",
        lambda: _first_of_default(0, code=True),
        lambda: _first_of_default(0, code=False),
    ),
    "2nd: pickle, byte code": (
        "order",
        lambda: _first_of_default(1, code=True),
        lambda: _first_of_default(1, code=False),
    ),
    "3rd: cloudpickle, dill": (
        "order",
        lambda: _first_of_default(2, code=True),
        lambda: _first_of_default(2, code=False),
    ),
    "4th: dill": ("order", None, lambda: _first_of_default(3, code=False)),
}


# -- measuring ---------------------------------------------------------------------------------------------------------


def main(name: str) -> None:
    """Measure, print."""
    _, code, data = CONTESTANTS[name]
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
    """Microseconds to write and to read, length, and the memory for each as times the size of the value."""
    try:
        written = write(value)
        back = read(_received(written))
    except Exception:  # noqa: BLE001 - whatever it is, this contestant cannot do it
        return None
    if not (callable(back) or np.array_equal(back, value)):
        return None
    size = getattr(value, "nbytes", None) or (len(value) if isinstance(value, bytes) else 0)
    figures = {
        "write_us": _median_us(lambda: write(value)),
        "read_us": _median_us(read, lambda: _received(written)),
        "size": len(written),
    }
    if size >= _WHILE_COUNTING:
        figures["write_copies"] = _peak(lambda: write(value)) / size
        received = _received(written)
        figures["read_copies"] = _peak(lambda: read(received)) / size
    return figures


def _received(written: Any) -> Any:
    """What a reader has: for bytes that a download has collected, memory of its own."""
    return memoryview(bytearray(written)) if isinstance(written, bytes) and written[:3] == b"f3\n" else written


def _median_us(act: Callable[..., Any], prepare: Callable[[], Any] | None = None) -> float:
    took: list[float] = []
    until = time.perf_counter() + _BUDGET_S
    while len(took) < _MIN_ROUNDS or time.perf_counter() < until:
        given = () if prepare is None else (prepare(),)
        began = time.perf_counter()
        kept = act(*given)  # it is not the letting go that is measured
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
