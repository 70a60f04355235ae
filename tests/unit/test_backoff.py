"""Exponential back-off: from the start, and after many failures."""

from __future__ import annotations

from farcall_common.backoff import Backoff


def waits(backoff: Backoff, count: int) -> list[float]:
    return [backoff.next_s() for _ in range(count)]


def test_waits_grow_up_to_the_longest() -> None:
    assert waits(Backoff(first_s=0.5, most_s=3.0), 5) == [0.5, 1.0, 2.0, 3.0, 3.0]
    assert waits(Backoff(first_s=1.0, most_s=10.0, factor=3.0), 4) == [1.0, 3.0, 9.0, 10.0]
    assert waits(Backoff(first_s=5.0, most_s=1.0), 2) == [1.0, 1.0]


def test_jitter_shortens_one_wait_and_not_the_next() -> None:
    shares = iter([0.5, 0.0, 0.25, 1.0])
    backoff = Backoff(first_s=1.0, most_s=4.0, jitter=lambda: next(shares))

    assert waits(backoff, 4) == [0.5, 0.0, 1.0, 4.0]


def test_reset_restores_the_first_wait() -> None:
    backoff = Backoff(first_s=0.5, most_s=4.0)
    waits(backoff, 3)
    assert backoff.failures == 3

    backoff.reset()

    assert (backoff.failures, waits(backoff, 2)) == (0, [0.5, 1.0])


def test_reset_can_keep_a_number_of_failures() -> None:
    backoff = Backoff(first_s=0.5, most_s=4.0)

    backoff.reset(failures=2)

    assert (waits(backoff, 2), backoff.failures) == ([2.0, 4.0], 4)


def test_any_count_of_failures_has_a_wait() -> None:
    backoff = Backoff(first_s=0.5, most_s=4.0)

    backoff.reset(failures=100_000)

    assert waits(backoff, 2_000) == [4.0] * 2_000
