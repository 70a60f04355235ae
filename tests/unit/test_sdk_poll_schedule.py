"""Times at which the executor polls the API for results."""

from __future__ import annotations

import pytest

from farcall._pacing import PollSchedule


def test_without_a_stream_the_delay_grows_while_no_task_ends() -> None:
    schedule, now, delays = PollSchedule(now=0.0), 0.0, []
    for _ in range(20):
        due_at = schedule.due_at(stream_is_open=False, now=now)
        delays.append(due_at - now)
        now = due_at
        schedule.poll_started()
        schedule.polled(ended=0, took_s=0.0, now=now)
    assert delays[0] == pytest.approx(0.02)
    assert delays[1] == pytest.approx(0.03)
    assert delays == sorted(delays)
    assert delays[-1] == pytest.approx(2.0)
    schedule.polled(ended=1, took_s=0.0, now=now)
    assert schedule.due_at(stream_is_open=False, now=now) - now == pytest.approx(0.02)


def test_a_slow_api_is_polled_less_often() -> None:
    schedule = PollSchedule(now=0.0)
    schedule.polled(ended=5, took_s=3.0, now=10.0)
    assert schedule.due_at(stream_is_open=False, now=10.0) == 16.0


def test_sleep_of_the_machine_does_not_delay_the_next_poll() -> None:
    schedule = PollSchedule(now=0.0)
    schedule.failed(took_s=30_000.0, now=30_000.0)
    assert schedule.due_at(stream_is_open=False, now=30_000.0) == pytest.approx(30_000.1)


def test_polls_of_an_unreachable_api_back_off() -> None:
    schedule = PollSchedule(now=0.0)
    schedule.failed(took_s=0.0, now=0.0)
    assert schedule.due_at(stream_is_open=False, now=0.0) == pytest.approx(0.1)
    for _ in range(10):
        schedule.failed(took_s=0.0, now=0.0)
    assert schedule.due_at(stream_is_open=False, now=0.0) == pytest.approx(2.0)


def test_samples_with_a_stream_back_off() -> None:
    schedule, waits = PollSchedule(now=0.0), []
    for _ in range(6):
        waits.append(schedule.due_at(stream_is_open=True, now=0.0))
        assert schedule.next_is_sample(stream_is_open=True, now=0.0)
        schedule.poll_started()
        schedule.sampled(ended=0, took_s=0.0, now=0.0)
    assert waits == [2.0, 4.0, 8.0, 15.0, 15.0, 15.0]


def test_poll_soon_makes_one_full_poll() -> None:
    schedule = PollSchedule(now=0.0)
    schedule.sampled(ended=0, took_s=0.0, now=100.0)
    schedule.poll_soon()
    assert not schedule.next_is_sample(stream_is_open=True, now=100.0)
    assert schedule.due_at(stream_is_open=True, now=100.0) == pytest.approx(100.02)
    schedule.poll_started()
    schedule.polled(ended=0, took_s=0.0, now=101.0)
    assert schedule.next_is_sample(stream_is_open=True, now=101.0)


def test_stream_with_missing_results_is_ignored_for_a_time() -> None:
    schedule = PollSchedule(now=0.0)
    schedule.sampled(ended=3, took_s=0.0, now=0.0)
    assert schedule.next_is_sample(stream_is_open=True, now=0.0)  # it may have been a near miss
    schedule.sampled(ended=1, took_s=0.0, now=2.0)
    assert not schedule.next_is_sample(stream_is_open=True, now=2.0)
    assert schedule.due_at(stream_is_open=True, now=2.0) == pytest.approx(2.02)
    assert schedule.next_is_sample(stream_is_open=True, now=62.0)


def test_only_consecutive_misses_count() -> None:
    schedule = PollSchedule(now=0.0)
    for ended in (1, 0, 1, 0, 1):
        schedule.sampled(ended=ended, took_s=0.0, now=0.0)
    assert schedule.next_is_sample(stream_is_open=True, now=0.0)
