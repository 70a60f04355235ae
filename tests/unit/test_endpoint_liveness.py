"""Liveness timer: a silent peer is lost after the limit, unless this process slept."""

from __future__ import annotations

from farcall_endpoint.contracts.liveness import LivenessTimer


def test_a_peer_is_lost_after_the_limit() -> None:
    timer = LivenessTimer(limit_s=60, now=100)
    assert not timer.is_expired(now=159.9)
    assert timer.is_expired(now=160)
    assert timer.is_expired(now=161)


def test_a_message_restarts_the_timer() -> None:
    timer = LivenessTimer(limit_s=60, now=100)
    timer.heard(now=150)
    assert timer.deadline == 210
    assert not timer.is_expired(now=209)
    assert timer.is_expired(now=210)


def test_after_sleep_there_is_a_grace_period() -> None:
    timer = LivenessTimer(limit_s=60, now=100)
    assert not timer.is_expired(now=1000)
    assert timer.deadline == 1005
    assert not timer.is_expired(now=1004)
    assert timer.is_expired(now=1005)


def test_after_sleep_a_message_restarts_the_timer() -> None:
    timer = LivenessTimer(limit_s=60, now=100)
    assert not timer.is_expired(now=1000)
    timer.heard(now=1000.1)
    assert timer.deadline == 1060.1


def test_the_grace_period_is_no_longer_than_the_limit() -> None:
    timer = LivenessTimer(limit_s=1, now=100)
    assert timer.is_expired(now=101.5)
    assert not timer.is_expired(now=102)
    assert timer.deadline == 103


def test_without_a_limit_no_peer_is_lost() -> None:
    timer = LivenessTimer(limit_s=None, now=100)
    assert timer.deadline is None
    assert not timer.is_expired(now=1e9)
