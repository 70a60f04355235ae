"""What is said while a forwarder gets up: each thing once."""

from __future__ import annotations

from farcall_common.waking import Waking


def test_each_turn_has_one_line() -> None:
    waking = Waking()
    said = [waking.asleep(now=now) for now in (100.0, 110.0, 120.0)]
    assert [line is None for line in said] == [False, True, True]
    assert "about a minute" in str(said[0])
    assert waking.awake(now=158.4) == "The forwarder is awake, after 58 s."
    assert waking.awake(now=159.0) is None


def test_one_that_does_not_come_is_told_of_once() -> None:
    waking = Waking()
    waking.asleep(now=0.0)
    said = [waking.asleep(now=now) for now in (119.0, 125.0, 135.0)]
    assert [line is None for line in said] == [True, False, True]
    assert "125 s ago" in str(said[1])
    assert "farcall cloud status" in str(said[1])
    assert waking.awake(now=200.0) == "The forwarder is awake, after 200 s."


def test_the_next_sleep_is_told_of_like_the_first() -> None:
    waking = Waking()
    first = waking.asleep(now=0.0)
    waking.asleep(now=130.0)
    waking.awake(now=140.0)
    assert waking.asleep(now=10_000.0) == first
    assert waking.asleep(now=10_130.0) is not None


def test_a_forwarder_that_was_there_is_not_worth_a_word() -> None:
    assert Waking().awake(now=1.0) is None
