"""Length of an outage, also when the machine slept meanwhile."""

from __future__ import annotations

from farcall._pacing import OutageTimer


def test_an_outage_lasts_until_there_is_an_answer() -> None:
    timer = OutageTimer(now=10.0)
    assert [timer.failed(now=now) for now in (12.0, 40.0, 95.0)] == [2.0, 30.0, 85.0]
    timer.reset(now=100.0)
    assert timer.failed(now=101.0) == 1.0


def test_sleep_counts_for_one_minute() -> None:
    timer = OutageTimer(now=0.0)
    assert timer.failed(now=10.0) == 10.0
    assert timer.failed(now=8 * 3600.0) == 70.0
    assert timer.failed(now=8 * 3600.0 + 5.0) == 75.0
