"""Functions of the data benchmark that run on workers."""

from __future__ import annotations

import os
import random
import time
import zlib
from collections.abc import Sequence
from typing import Any, Final

from benchmarks.data.media import Medium

PAGE: Final = 4096
RECORD_BYTES: Final = 100
KEY_BYTES: Final = 10
_WORDS: Final = 20_000


# -- patterns ----------------------------------------------------------------------------------------------------------


def send(medium: Medium, size: int, copies: int) -> tuple[float, list[Any]]:
    """Write so many pieces; when that began, by the machine's monotonic clock, and their keys."""
    pieces = [os.urandom(16) + bytes(size - 16) for _ in range(copies)]
    began = time.monotonic()
    return began, [medium.put(piece) for piece in pieces]


def receive(medium: Medium, size: int, number: int, sent: Sequence[tuple[float, list[Any]]]) -> tuple[float, float]:
    """Read one piece of each sender: when the first of those began to write, and when all pieces were read."""
    for _, keys in sent:
        piece = memoryview(medium.get(keys[number % len(keys)]))
        assert piece.nbytes == size
        bytes(piece[::PAGE])  # touches each page
    return min(began for began, _ in sent), time.monotonic()


# -- shuffle -----------------------------------------------------------------------------------------------------------

Times = tuple[float, float]
"""Seconds of computing and of the medium."""


def map_words(medium: Medium, number: int, size: int, reducers: int) -> tuple[Times, list[Any]]:
    """Make a text of ``size`` bytes, and write its words in a piece for each reducer."""
    generator = random.Random(number)
    words = [b"w%d" % each for each in range(_WORDS)]
    text = b" ".join(generator.choices(words, k=size // 6))
    began = time.monotonic()
    place = {word: zlib.crc32(word) % reducers for word in words}
    pieces: list[list[bytes]] = [[] for _ in range(reducers)]
    for word in text.split():
        pieces[place[word]].append(word)
    joined = [b" ".join(piece) for piece in pieces]
    computed = time.monotonic()
    keys = [medium.put(piece) for piece in joined]
    return (computed - began, time.monotonic() - computed), keys


def count_words(medium: Medium, number: int, mapped: Sequence[tuple[Times, list[Any]]]) -> tuple[Times, int]:
    """Count the words of a reducer's pieces: how many there are."""
    import collections

    began = time.monotonic()
    pieces = [bytes(medium.get(keys[number])) for _, keys in mapped]
    read = time.monotonic()
    counts: collections.Counter[bytes] = collections.Counter()
    for piece in pieces:
        counts.update(piece.split())
    return (time.monotonic() - read, read - began), counts.total()


def map_records(medium: Medium, number: int, size: int, reducers: int) -> tuple[Times, list[Any]]:
    """Make records of 100 bytes, and write them in a piece for each range of keys."""
    import numpy as np

    records = np.random.default_rng(number).integers(0, 256, (size // RECORD_BYTES, RECORD_BYTES), np.uint8)
    began = time.monotonic()
    prefix = records[:, 0].astype(np.uint32) * 65536 + records[:, 1].astype(np.uint32) * 256 + records[:, 2]
    place = prefix * reducers // 2**24
    pieces = [records[place == each].tobytes() for each in range(reducers)]
    computed = time.monotonic()
    keys = [medium.put(piece) for piece in pieces]
    return (computed - began, time.monotonic() - computed), keys


def sort_records(medium: Medium, number: int, mapped: Sequence[tuple[Times, list[Any]]]) -> tuple[Times, int]:
    """Sort a range of keys: how many records it has."""
    import numpy as np

    began = time.monotonic()
    pieces = [bytes(medium.get(keys[number])) for _, keys in mapped]
    read = time.monotonic()
    records = np.frombuffer(b"".join(pieces), np.uint8).reshape(-1, RECORD_BYTES)
    keys = np.ascontiguousarray(records[:, :KEY_BYTES]).view(f"S{KEY_BYTES}").ravel()
    ordered = records[np.argsort(keys, kind="stable")]
    assert len(ordered) == len(records)
    return (time.monotonic() - read, read - began), len(ordered)


# -- steering ----------------------------------------------------------------------------------------------------------


def simulate(medium: Medium, key: Any, size: int) -> tuple[float, float, Any]:
    """A task of a campaign: seconds of reading its input and of writing its result, and the result's key."""
    began = time.monotonic()
    data = memoryview(medium.get(key))
    bytes(data[::PAGE])
    read = time.monotonic()
    result = os.urandom(16) + bytes(size - 16)
    computed = time.monotonic()
    written = medium.put(result)
    return read - began, time.monotonic() - computed, written
