"""How long a silence lasts, for one who may have slept meanwhile."""

from __future__ import annotations

from farcall._pacing import Silence


def test_a_silence_lasts_until_there_is_an_answer() -> None:
    silence = Silence(now=10.0)
    assert [silence.lasts(now=now) for now in (12.0, 40.0, 95.0)] == [2.0, 30.0, 85.0]
    silence.end(now=100.0)
    assert silence.lasts(now=101.0) == 1.0


def test_sleep_counts_for_a_minute() -> None:
    silence = Silence(now=0.0)
    assert silence.lasts(now=10.0) == 10.0
    assert silence.lasts(now=8 * 3600.0) == 70.0
    assert silence.lasts(now=8 * 3600.0 + 5.0) == 75.0
