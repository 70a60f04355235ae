"""Ranges of large objects: their order, the shares of helpers, and reads that stall."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator

import pytest

from farcall_endpoint.files.movers.ranges import RANGE_BYTES, Helpers, RangeReader
from tests.waiting import WAIT_S, wait_until

SIZE_BYTES = 5 * RANGE_BYTES + 3


def content(start: int, end: int) -> Iterator[bytes]:
    """Bytes that tell where they are, in pieces."""
    for position in range(start, end, 2**20):
        size_bytes = min(2**20, end - position)
        yield position.to_bytes(8).ljust(size_bytes, b"\0")[:size_bytes]


def read_with(helpers: Helpers, get: Callable[[int, int], Iterator[bytes]], submitter: str = "") -> Iterator[int]:
    """Read a whole object; yields the bytes that have come, after each piece."""
    found = bytearray()
    with helpers.share_of(submitter) as share:
        for chunk, received_bytes in RangeReader(SIZE_BYTES, get, share).chunks():
            found += memoryview(chunk)
            assert len(found) <= received_bytes <= SIZE_BYTES
            yield received_bytes
    assert found == b"".join(content(0, SIZE_BYTES))


@pytest.mark.parametrize("most", [1, 3, 16])
def test_ranges_come_in_order_with_any_number_of_helpers(most: int) -> None:
    helpers = Helpers(most)
    *_, received_bytes = read_with(helpers, content)
    assert received_bytes == SIZE_BYTES
    wait_until(lambda: helpers._free == most, "all helpers are given back")


def test_helpers_are_shared_by_submitter_and_then_by_transfer() -> None:
    helpers = Helpers(8)
    with helpers.share_of("a"), helpers.share_of("a"), helpers.share_of("b"):
        assert [helpers.take("a", taken) for taken in range(3)] == [True, True, False]
        assert [helpers.take("b", taken) for taken in range(5)] == [True, True, True, True, False]
        assert [helpers.take("a", taken) for taken in range(3)] == [True, True, False], "its other transfer"
    with helpers.share_of("c"):
        assert not helpers.take("c", 0), "all are taken"
        helpers.give_back()
        assert helpers.take("c", 0)


def test_a_read_waits_for_no_other_one() -> None:
    """Eight transfers have all helpers, which hang: another one reads alone."""
    helpers = Helpers(8)
    is_over = threading.Event()

    def hanging(start: int, end: int) -> Iterator[bytes]:
        if start:
            is_over.wait(WAIT_S)
        yield from content(start, end)

    stalled = [read_with(helpers, hanging, "other") for _ in range(8)]
    for each in stalled:
        next(each)
        next(each)  # after the first piece it looks for helpers
    *_, received_bytes = read_with(helpers, content, "mine")
    assert received_bytes == SIZE_BYTES
    is_over.set()
    for each in stalled:
        each.close()  # type: ignore[attr-defined]
    wait_until(lambda: helpers._free == 8, "all helpers are given back")


def test_bytes_that_come_in_advance_count_while_an_earlier_range_hangs() -> None:
    helpers = Helpers(2)
    is_over = threading.Event()

    def get(start: int, end: int) -> Iterator[bytes]:
        if start == RANGE_BYTES:
            is_over.wait(WAIT_S)
        yield from content(start, end)

    progress = read_with(helpers, get)
    seen = next(each for each in progress if each == 2 * RANGE_BYTES)
    assert seen == 2 * RANGE_BYTES, "the first range, and the third one"
    assert next(progress) >= seen, "it looks again while it waits, so that it can be cancelled"
    is_over.set()
    assert list(progress)[-1] == SIZE_BYTES


@pytest.mark.parametrize("wrong", [0, RANGE_BYTES, 4 * RANGE_BYTES])
def test_the_error_of_a_range_is_that_of_the_read(wrong: int) -> None:
    helpers = Helpers(4)

    def get(start: int, end: int) -> Iterator[bytes]:
        yield from itertools.islice(content(start, end), 2)
        if start == wrong:
            raise FileNotFoundError(start)
        yield from itertools.islice(content(start, end), 2, None)

    with pytest.raises(FileNotFoundError, match=str(wrong)):
        list(read_with(helpers, get))
    wait_until(lambda: helpers._free == 4, "all helpers are given back")
