"""``map``: order, chunks, look-ahead, cancellation. And the burst limit of submits."""

from __future__ import annotations

import concurrent.futures
import itertools
from concurrent.futures import Future
from typing import Any

import pytest

from farcall._pacing import BurstLimit
from farcall_common.mapping import chunks_of, flattened, results_in_order


class Pool:
    """Hands out futures; odd and even ones alike are done when the test ends them."""

    def __init__(self, *, at_once: bool = True) -> None:
        self.futures: list[Future[Any]] = []
        self._at_once = at_once

    def submit(self, call: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.futures.append(future)
        if self._at_once:
            future.set_result(call)
        return future


def test_all_calls_are_submitted_before_the_first_result_is_read() -> None:
    pool = Pool()
    results = results_in_order(pool.submit, iter(range(5)), timeout_s=None, ahead=None)
    assert len(pool.futures) == 5
    assert list(results) == [0, 1, 2, 3, 4]


def test_with_a_buffer_endless_calls_can_be_consumed() -> None:
    pool = Pool()
    results = results_in_order(pool.submit, itertools.count(), timeout_s=None, ahead=3)
    assert len(pool.futures) == 3
    assert list(itertools.islice(results, 4)) == [0, 1, 2, 3]
    assert len(pool.futures) == 7
    results.close()


def test_closing_cancels_unfinished_calls() -> None:
    pool = Pool(at_once=False)
    results = results_in_order(pool.submit, iter(range(3)), timeout_s=None, ahead=None)
    pool.futures[0].set_result("first")
    assert next(results) == "first"
    results.close()
    assert [future.cancelled() for future in pool.futures] == [False, True, True]


def test_timeout_covers_the_whole_map_and_cancels() -> None:
    pool = Pool(at_once=False)
    results = results_in_order(pool.submit, iter(range(2)), timeout_s=0.0, ahead=None)
    with pytest.raises(concurrent.futures.TimeoutError):
        next(results)
    assert all(future.cancelled() for future in pool.futures)


def test_failed_submit_cancels_the_other_calls() -> None:
    pool = Pool(at_once=False)

    def submit(call: int) -> Future[Any]:
        if call == 2:
            raise ValueError("cannot be sent")
        return pool.submit(call)

    with pytest.raises(ValueError, match="cannot be sent"):
        results_in_order(submit, iter(range(5)), timeout_s=None, ahead=None)
    assert [future.cancelled() for future in pool.futures] == [True, True]


def test_chunks_are_split_and_joined() -> None:
    rows = [(n,) for n in range(5)]
    assert [len(chunk) for chunk in chunks_of(rows, 2)] == [2, 2, 1]
    pool = Pool(at_once=False)
    results = flattened(results_in_order(pool.submit, chunks_of(rows, 2), timeout_s=None, ahead=None))
    pool.futures[0].set_result([10, 11])
    assert [next(results), next(results)] == [10, 11]
    results.close()
    assert [future.cancelled() for future in pool.futures[1:]] == [True, True]


def test_a_burst_is_sent_at_once_and_the_rest_at_a_steady_rate() -> None:
    burst = BurstLimit(4, 16.0)
    assert [burst.next_delay_s(now=100.0) for _ in range(7)] == [0, 0, 0, 0, 4, 8, 12]
    assert burst.next_delay_s(now=200.0) == 0
    assert [BurstLimit(None, 16.0).next_delay_s(now=1.0) for _ in range(9)] == [0] * 9


@pytest.mark.parametrize(("limit", "window_s", "wrong"), [(0, 1.0, "limit"), (1, 0.0, "window")])
def test_invalid_pace_is_refused(limit: int, window_s: float, wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong):
        BurstLimit(limit, window_s)
