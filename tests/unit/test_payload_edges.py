"""Values between workers of one endpoint: arrays as they lie in memory, plain pickle, and what falls back to others."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from farcall_common.errors import SerializationError
from farcall_common.limits import MAX_INLINE_BYTES
from farcall_common.payload import BINARY_DATA, DATA_ONLY, DATA_STRATEGIES, Serializer, refused_strategy
from farcall_common.payload.arrays import ARRAY_PREFIX, array_pieces, load_array
from farcall_common.payload.native import NATIVE_PREFIX

SERIALIZER = Serializer()


def there_and_back(value: object) -> Any:
    return SERIALIZER.deserialize(memoryview(bytearray(b"".join(SERIALIZER.edge_pieces(value)))))


@given(
    dtype=st.sampled_from(["?", "u1", ">i2", "<f4", "f8", "c16", "e", "g"]),
    shape=st.lists(st.integers(1, 5), max_size=4),
    order=st.sampled_from(["C", "F"]),
)
def test_arrays_of_numbers(dtype: str, shape: list[int], order: Any) -> None:
    array = np.asarray(np.arange(np.prod(shape, dtype=int)).reshape(shape), dtype=dtype, order=order)
    pieces = array_pieces(array)
    assert pieces is not None
    assert np.shares_memory(np.frombuffer(pieces[1], np.uint8), array)
    found = there_and_back(array)
    assert found.dtype == array.dtype
    assert found.flags.writeable
    assert found.flags.f_contiguous == array.flags.f_contiguous
    np.testing.assert_array_equal(found, array)


class Special(np.ndarray[Any, Any]):
    """A class of its own."""


@pytest.mark.parametrize(
    "value",
    [
        np.array([object()]),
        np.array(["2026-01-01"], "M8[D]"),
        np.array([(1, 2.0)], [("a", "i4"), ("b", "f8")]),
        np.arange(10)[::2],
        np.zeros(0),
        np.zeros(3).view(Special),
        np.float64(3),
        3,
        [np.zeros(3)],
    ],
    ids=["objects", "dates", "records", "every other", "empty", "subclass", "scalar", "number", "list"],
)
def test_other_values_are_not_array_buffers(value: object) -> None:
    assert array_pieces(value) is None


def test_an_array_in_read_only_memory_is_copied() -> None:
    buffer = b"".join(SERIALIZER.edge_pieces(np.arange(5)))
    found = load_array(buffer)
    found[0] = 7
    assert load_array(buffer)[0] == 0


@pytest.mark.parametrize("damaged", [b"a1\n", ARRAY_PREFIX + b"\5xxxxx", ARRAY_PREFIX + b"\x08\x93\xa2|O\x91\x01\xa1C"])
def test_damaged_arrays_are_refused(damaged: bytes) -> None:
    with pytest.raises(Exception):  # noqa: B017 - any: the worker reports it
        load_array(damaged)


@dataclasses.dataclass
class Point:
    """A class that travels by value: the module of a test is not installed."""

    x: int


@pytest.mark.parametrize(
    ("value", "prefix"),
    [
        (1, NATIVE_PREFIX),
        ({"a": [1, 2.5, "x"]}, NATIVE_PREFIX),
        (b"x" * 1_000_000, NATIVE_PREFIX),
        ([b"x" * 1_000_000, 1], NATIVE_PREFIX),
        ([np.zeros(3)], NATIVE_PREFIX),
        (np.zeros(3), ARRAY_PREFIX),
        ([np.zeros(100_000)], b"f3\n"),
        (Point(3), b"f3\n"),
        (lambda: 3, b"f3\n"),
    ],
    ids=lambda each: str(each)[:20],
)
def test_each_value_has_the_form_that_is_quickest(value: object, prefix: bytes) -> None:
    assert bytes(SERIALIZER.edge_pieces(value)[0][:3]) == prefix
    found = there_and_back(value)
    if callable(value):
        assert found() == 3
    elif isinstance(value, Point):
        assert found.x == value.x
    else:
        np.testing.assert_equal(found, value)


def test_what_nothing_writes_is_refused_with_reasons() -> None:
    with pytest.raises(SerializationError, match="PickleOutOfBand"):
        SERIALIZER.edge_pieces(each for each in "x")


@pytest.mark.parametrize("size", [MAX_INLINE_BYTES - 1, MAX_INLINE_BYTES, MAX_INLINE_BYTES + 1])
def test_arrays_of_the_size_at_which_they_leave_the_pickle(size: int) -> None:
    array = np.zeros(size, np.uint8)
    assert bytes(SERIALIZER.pieces(array, strategies=BINARY_DATA)[0]) != b"00\n"  # dill's, for what pickle refuses
    buffer = b"".join(SERIALIZER.pieces(array, strategies=BINARY_DATA))
    np.testing.assert_array_equal(SERIALIZER.deserialize(buffer), array)


@pytest.mark.parametrize("value", [1, np.arange(5)])
def test_readers_of_data_only_refuse_values_of_workers_by_name(value: object) -> None:
    """A client reads small values of stages, if it trusts their endpoint."""
    buffer = b"".join(SERIALIZER.edge_pieces(value))
    assert refused_strategy(buffer, DATA_ONLY) == "PickleOutOfBand"
    assert refused_strategy(buffer, DATA_STRATEGIES) is None
