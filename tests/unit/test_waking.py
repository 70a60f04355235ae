"""Notices while a forwarder starts: each once."""

from __future__ import annotations

from farcall_common.waking import WakeNotices


def test_each_step_has_one_line() -> None:
    notices = WakeNotices()
    lines = [notices.on_waking(now=now) for now in (100.0, 110.0, 120.0)]
    assert [line is None for line in lines] == [False, True, True]
    assert "about a minute" in str(lines[0])
    assert notices.on_awake(now=158.4) == "The forwarder is awake, after 58 s."
    assert notices.on_awake(now=159.0) is None


def test_a_forwarder_that_does_not_start_is_reported_once() -> None:
    notices = WakeNotices()
    notices.on_waking(now=0.0)
    lines = [notices.on_waking(now=now) for now in (119.0, 125.0, 135.0)]
    assert [line is None for line in lines] == [True, False, True]
    assert "125 s ago" in str(lines[1])
    assert "farcall cloud status" in str(lines[1])
    assert notices.on_awake(now=200.0) == "The forwarder is awake, after 200 s."


def test_the_next_start_is_reported_like_the_first() -> None:
    notices = WakeNotices()
    first = notices.on_waking(now=0.0)
    notices.on_waking(now=130.0)
    notices.on_awake(now=140.0)
    assert notices.on_waking(now=10_000.0) == first
    assert notices.on_waking(now=10_130.0) is not None


def test_a_forwarder_that_was_running_is_not_reported() -> None:
    assert WakeNotices().on_awake(now=1.0) is None
