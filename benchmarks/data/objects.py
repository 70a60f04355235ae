"""Objects by reference: put and get of large and small arrays in each store of one node.

Writer and readers are processes of their own. A round is one sample of a large array, and the median of many small
ones.
"""

from __future__ import annotations

import contextlib
import gc
import pickle
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import psutil

from benchmarks.data.media import open_stores
from benchmarks.report import Report, heading, page, spread, table
from farcall_common.objects import Reference, Store
from farcall_endpoint import Engine

_LARGE_BYTES: Final = 100_000_000
_SMALL_BYTES: Final = 1_000_000
_SMALL: Final = 200
_OBJECTS: Final = 100_000

Samples = dict[str, float]

#: Milliseconds to get each object whose reference comes in a line, and to read all of it.
_READER: Final = """
import pickle, sys, time
print("ready", flush=True)
for line in sys.stdin:
    reference = pickle.loads(bytes.fromhex(line))
    began = time.perf_counter()
    value = reference.get()
    got = time.perf_counter()
    value.sum()
    passed = time.perf_counter()
    del value  # before the writer evicts it
    print(1e3 * (got - began), 1e3 * (passed - got), flush=True)
"""


class _Reader:
    """Another process, which gets objects."""

    def __init__(self) -> None:
        command = [sys.executable, "-c", "import numpy, farcall_common.objects\n" + _READER]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._line()

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def get(self, reference: Reference[Any]) -> tuple[float, float]:
        """Milliseconds of the get, and of a pass over the value."""
        assert self._process.stdin is not None
        self._process.stdin.write(pickle.dumps(reference).hex() + "\n")
        self._process.stdin.flush()
        got, passed = map(float, self._line().split())
        return got, passed

    def close(self) -> None:
        self._process.communicate()


def measure(*, quick: bool, full: bool) -> Samples:
    """One round."""
    samples: Samples = {}
    with contextlib.ExitStack() as resources:
        stores = {name: Store(connector) for name, connector in open_stores(resources).items()}
        readers = [_Reader() for _ in range(2)]
        for reader in readers:
            resources.callback(reader.close)
        large = np.random.default_rng(0).random(_LARGE_BYTES // 8)
        for name in ("memory", "directory"):
            samples |= _large(name, stores[name], large, readers)
        samples |= _in_place(stores["memory"], large, readers)
        samples |= _task(stores["memory"], large)
        for name, store in stores.items():
            samples |= _small(name, store, readers[0], _SMALL // (10 if quick else 1))
        if full:
            for name, store in stores.items():
                samples |= _leaks(name, store)
    return samples


def _ms(began: float) -> float:
    return 1e3 * (time.perf_counter() - began)


def _large(name: str, store: Store, array: np.ndarray[Any, Any], readers: Sequence[_Reader]) -> Samples:
    began = time.perf_counter()
    reference = store.put(array)
    put = _ms(began)
    first, first_pass = readers[0].get(reference)
    further, _ = readers[1].get(reference)
    began = time.perf_counter()
    reference.evict()
    evicted = _ms(began)
    began = time.perf_counter()
    again = store.put(array)
    put_again = _ms(began)
    got_again, _ = readers[0].get(again)
    again.evict()
    return {
        f"100 MB, {name}: put (one copy), ms": put,
        f"100 MB, {name}: put after one was evicted, ms": put_again,
        f"100 MB, {name}: put + get after one was evicted, ms": put_again + got_again,
        f"100 MB, {name}: put after one was evicted, GB/s": array.nbytes / put_again / 1e6,
        f"100 MB, {name}: get by another process, ms": first,
        f"100 MB, {name}: put + get, ms": put + first,
        f"100 MB, {name}: get by a further reader, ms": further,
        f"100 MB, {name}: first pass over it, ms": first_pass,
        f"100 MB, {name}: evict, ms": evicted,
    }


def _in_place(store: Store, array: np.ndarray[Any, Any], readers: Sequence[_Reader]) -> Samples:
    began = time.perf_counter()
    own = np.frombuffer(store.buffer(array.nbytes))
    made = _ms(began)
    began = time.perf_counter()
    np.copyto(own, array)
    filled = _ms(began)
    began = time.perf_counter()
    reference = store.put(own)
    put = _ms(began)
    got, _ = readers[0].get(reference)
    reference.evict()
    return {
        "100 MB, written in place: buffer(), ms": made,
        "100 MB, written in place: the first write to it, ms": filled,
        "100 MB, written in place: put, ms": put,
        "100 MB, written in place: get by another process, ms": got,
    }


def _task(store: Store, array: np.ndarray[Any, Any]) -> Samples:
    reference = store.put(array)
    times = []
    with Engine(max_workers=1) as engine:
        engine.submit(len, reference).result()
        for _ in range(20):
            began = time.perf_counter()
            assert engine.submit(len, reference).result() == len(array)
            times.append(_ms(began))
    reference.evict()
    return {"100 MB, memory: task with a reference, round trip, ms": statistics.median(times)}


def _small(name: str, store: Store, reader: _Reader, count: int) -> Samples:
    array = np.random.default_rng(0).random(_SMALL_BYTES // 8)
    puts, gets = [], []
    for _ in range(count):
        began = time.perf_counter()
        reference = store.put(array)
        puts.append(_ms(began))
        gets.append(reader.get(reference)[0])
        reference.evict()
    return {
        f"1 MB, {name}: put, ms": statistics.median(puts),
        f"1 MB, {name}: get by another process, ms": statistics.median(gets),
    }


def _leaks(name: str, store: Store) -> Samples:
    """Growth of this process over many objects."""
    process = psutil.Process()

    def rounds(count: int) -> tuple[int, int]:
        for number in range(count):
            reference = store.put(b"x" * 1000 if number % 10 else bytes(300_000))
            reference.get()
            reference.evict()
        gc.collect()
        return process.num_fds(), process.memory_info().rss

    rounds(_OBJECTS // 100)
    before, began = rounds(_OBJECTS // 100), time.perf_counter()
    after = rounds(_OBJECTS)
    return {
        f"100,000 objects, {name}: put + get + evict, ms each": _ms(began) / _OBJECTS,
        f"100,000 objects, {name}: growth of descriptors": after[0] - before[0],
        f"100,000 objects, {name}: growth of memory, MiB": (after[1] - before[1]) / 2**20,
    }


# -- report ------------------------------------------------------------------------------------------------------------


def as_table(report: Report) -> str:
    """Medians and spreads of all rounds."""
    rounds: list[Samples] = report["rounds"]
    names = dict.fromkeys(name for each in rounds for name in each)
    rows = []
    for name in names:
        values = [each[name] for each in rounds if name in each]
        found = spread(values)
        rows.append((name, *(f"{found[key]:,.3g}" for key in ("median", "min", "max"))))
    return page(
        heading(report, f"{len(rounds)} rounds; 100 MB are one array, 1 MB medians of {_SMALL} arrays in each round"),
        table(("figure", "median", "min", "max"), rows),
    )
