"""When the API is asked for ends."""

from __future__ import annotations

import pytest

from farcall._pacing import Pace


def test_without_a_stream_the_delay_grows_while_nothing_ends() -> None:
    pace, now, delays = Pace(now=0.0), 0.0, []
    for _ in range(20):
        due_at = pace.due_at(stream_is_open=False, now=now)
        delays.append(due_at - now)
        now = due_at
        pace.begun()
        pace.polled(ended=0, took_s=0.0, now=now)
    assert delays[0] == pytest.approx(0.02)
    assert delays[1] == pytest.approx(0.03)
    assert delays == sorted(delays)
    assert delays[-1] == pytest.approx(2.0)
    pace.polled(ended=1, took_s=0.0, now=now)
    assert pace.due_at(stream_is_open=False, now=now) - now == pytest.approx(0.02)


def test_a_slow_api_is_not_asked_more_for_being_slow() -> None:
    pace = Pace(now=0.0)
    pace.polled(ended=5, took_s=3.0, now=10.0)
    assert pace.due_at(stream_is_open=False, now=10.0) == 16.0


def test_a_machine_that_slept_does_not_wait_as_long_again() -> None:
    pace = Pace(now=0.0)
    pace.failed(took_s=30_000.0, now=30_000.0)
    assert pace.due_at(stream_is_open=False, now=30_000.0) == pytest.approx(30_000.1)


def test_an_api_that_is_away_is_asked_less_and_less() -> None:
    pace = Pace(now=0.0)
    pace.failed(took_s=0.0, now=0.0)
    assert pace.due_at(stream_is_open=False, now=0.0) == pytest.approx(0.1)
    for _ in range(10):
        pace.failed(took_s=0.0, now=0.0)
    assert pace.due_at(stream_is_open=False, now=0.0) == pytest.approx(2.0)


def test_behind_a_stream_samples_are_taken_more_and_more_rarely() -> None:
    pace, waits = Pace(now=0.0), []
    for _ in range(6):
        waits.append(pace.due_at(stream_is_open=True, now=0.0))
        assert pace.samples(stream_is_open=True, now=0.0)
        pace.begun()
        pace.sampled(ended=0, took_s=0.0, now=0.0)
    assert waits == [2.0, 4.0, 8.0, 15.0, 15.0, 15.0]


def test_a_gap_is_looked_into_at_once_and_once() -> None:
    pace = Pace(now=0.0)
    pace.sampled(ended=0, took_s=0.0, now=100.0)
    pace.hurry()
    assert not pace.samples(stream_is_open=True, now=100.0)
    assert pace.due_at(stream_is_open=True, now=100.0) == pytest.approx(100.02)
    pace.begun()
    pace.polled(ended=0, took_s=0.0, now=101.0)
    assert pace.samples(stream_is_open=True, now=101.0)


def test_a_stream_that_leaves_ends_out_is_not_trusted_for_a_while() -> None:
    pace = Pace(now=0.0)
    pace.sampled(ended=3, took_s=0.0, now=0.0)
    assert pace.samples(stream_is_open=True, now=0.0)  # it may have been a near miss
    pace.sampled(ended=1, took_s=0.0, now=2.0)
    assert not pace.samples(stream_is_open=True, now=2.0)
    assert pace.due_at(stream_is_open=True, now=2.0) == pytest.approx(2.02)
    assert pace.samples(stream_is_open=True, now=62.0)


def test_near_misses_far_apart_do_not_count_together() -> None:
    pace = Pace(now=0.0)
    for ended in (1, 0, 1, 0, 1):
        pace.sampled(ended=ended, took_s=0.0, now=0.0)
    assert pace.samples(stream_is_open=True, now=0.0)
