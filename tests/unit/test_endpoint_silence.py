"""Who is silent for too long is given up, unless it was the listener who slept."""

from __future__ import annotations

from farcall_endpoint.silence import Silence


def test_a_peer_is_given_up_after_the_limit_and_not_before() -> None:
    silence = Silence(limit_s=60, now=100)
    assert not silence.is_over_limit(now=159.9)
    assert silence.is_over_limit(now=160)
    assert silence.is_over_limit(now=161)


def test_whatever_is_heard_starts_the_count_again() -> None:
    silence = Silence(limit_s=60, now=100)
    silence.heard(now=150)
    assert silence.deadline == 210
    assert not silence.is_over_limit(now=209)
    assert silence.is_over_limit(now=210)


def test_a_listener_that_slept_listens_for_a_moment_first() -> None:
    silence = Silence(limit_s=60, now=100)
    assert not silence.is_over_limit(now=1000)
    assert silence.deadline == 1005
    assert not silence.is_over_limit(now=1004)
    assert silence.is_over_limit(now=1005)


def test_a_listener_that_slept_hears_what_was_said_meanwhile() -> None:
    silence = Silence(limit_s=60, now=100)
    assert not silence.is_over_limit(now=1000)
    silence.heard(now=1000.1)
    assert silence.deadline == 1060.1


def test_with_a_short_limit_the_second_chance_is_short_too() -> None:
    silence = Silence(limit_s=1, now=100)
    assert silence.is_over_limit(now=101.5)
    assert not silence.is_over_limit(now=102)
    assert silence.deadline == 103


def test_without_a_limit_nobody_is_given_up() -> None:
    silence = Silence(limit_s=None, now=100)
    assert silence.deadline is None
    assert not silence.is_over_limit(now=1e9)
