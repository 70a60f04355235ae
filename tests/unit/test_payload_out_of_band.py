"""Large values as bytes: copies, alignment, readers."""

from __future__ import annotations

import contextlib
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from farcall_common.errors import DeserializationError
from farcall_common.limits import MAX_INLINE_BYTES
from farcall_common.payload import BINARY_DATA, JSONData, PickleDataBase64, Serializer

Array = npt.NDArray[np.float64]
serializer = Serializer()


def strategy_of(buffer: bytes) -> str:
    return buffer[:2].decode()


class Sampled:
    """Of this file, so that it travels by value, with an array in it."""

    def __init__(self, samples: npt.NDArray[Any]) -> None:
        self.samples = samples


def large_array() -> Array:
    return np.arange(1_250_000, dtype=np.float64)


def test_large_values_are_bytes_and_small_ones_text() -> None:
    def written(value: object) -> str:
        return strategy_of(serializer.serialize(value, strategies=BINARY_DATA))

    assert written([1, "two"]) == "11"
    assert written(np.arange(3)) == "f0"
    assert written(Sampled(np.arange(3))) == "f1"
    assert written({"array": large_array()}) == "f3"
    assert written(Sampled(large_array())) == "f3"
    assert written(bytes(MAX_INLINE_BYTES)) == "f3"
    assert written(set(range(100_000))) == "f3"


@pytest.mark.parametrize("shift", [0, 1, 8], ids=["aligned", "odd", "half aligned"])
def test_bytes_round_trip_at_any_alignment(shift: int) -> None:
    value: dict[str, Any] = {
        "wide": large_array(),
        "by column": np.asfortranarray(large_array().reshape(1250, 1000)),
        "every other": large_array()[::2],
        "small": np.arange(7),
        "bytes": bytes(range(256)) * 1000,
        "none": np.zeros((0, 5)),
    }
    buffer = serializer.serialize(value, strategies=BINARY_DATA)
    assert strategy_of(buffer) == "f3"
    memory = memoryview(bytearray(shift) + buffer)[shift:]
    read: Any = serializer.deserialize(memory)
    assert value.keys() == read.keys()
    for name, array in read.items():
        assert np.array_equal(array, value[name]), name
        if name != "bytes":
            assert array.flags.writeable, name
            assert array.flags.aligned, name
    assert read["by column"].flags.f_contiguous


def test_mutability_of_buffers_is_kept() -> None:
    fixed = large_array()
    fixed.flags.writeable = False
    for memory in (bytes, bytearray):
        read: Any = serializer.deserialize(
            memoryview(memory(serializer.serialize([large_array(), fixed], strategies=BINARY_DATA)))
        )
        read[0][0] = 7.0
        assert read[0][0] == 7.0
        assert not read[1].flags.writeable


def test_ten_megabytes_are_copied_once_to_write_and_not_at_all_to_read() -> None:
    array = large_array()
    serializer.deserialize(serializer.serialize(array, strategies=BINARY_DATA))  # imports what it needs
    with peak_of() as writing:
        payload = serializer.pack_call([array], {"scale": 2}, strategies=BINARY_DATA)
    assert writing() < 1.01 * array.nbytes
    received = bytearray(payload)
    with peak_of() as reading:
        (read,), kwargs = serializer.unpack_call(memoryview(received))
    assert reading() < 0.01 * array.nbytes
    assert np.array_equal(read, array)
    assert kwargs == {"scale": 2}
    with peak_of() as pieces:
        sent = serializer.pieces(array, strategies=BINARY_DATA)
    assert pieces() < 0.01 * array.nbytes
    assert b"".join(sent) == serializer.serialize(array, strategies=BINARY_DATA)


def test_a_call_of_bytes_and_text_is_framed_in_bytes() -> None:
    payload = serializer.pack_call([large_array()], {"name": "né"}, strategies=BINARY_DATA)
    args, kwargs = serializer.unpack_call(payload)
    assert np.array_equal(args[0], large_array())
    assert kwargs == {"name": "né"}
    assert serializer.pack_call([1], {"name": "né"}, strategies=BINARY_DATA) == serializer.pack_call(
        [1], {"name": "né"}, strategies=[JSONData(lossless=True), PickleDataBase64()]
    )


@pytest.mark.parametrize("keep", [0, 1, 3, 40, 1000, 5_000_000, -1])
def test_truncated_bytes_are_a_clear_error(keep: int) -> None:
    payload = serializer.pack_call([large_array()], strategies=BINARY_DATA)
    with pytest.raises(DeserializationError):
        serializer.unpack_call(payload[:keep])
    buffer = serializer.serialize(large_array(), strategies=BINARY_DATA)
    with pytest.raises(DeserializationError):
        serializer.deserialize(buffer[:keep])


def test_byte_code_in_bytes_is_bound_to_its_python() -> None:
    buffer = serializer.serialize(Sampled(large_array()), strategies=BINARY_DATA)
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert f'"python": "{here}"'.encode() in buffer[:100]
    elsewhere = buffer.replace(f'"{here}"'.encode(), b'"3.99"', 1)
    with pytest.raises(DeserializationError, match=r"byte code of Python 3\.99"):
        serializer.deserialize(elsewhere)


@contextlib.contextmanager
def peak_of() -> Iterator[Callable[[], int]]:
    """How many bytes were allocated in the block, at the most at once."""
    peak = 0
    tracemalloc.start()
    try:
        yield lambda: peak
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
