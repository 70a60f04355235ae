"""Durations in words."""

from __future__ import annotations

import pytest

from farcall_common.durations import ago, span


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (-3, "0 s"),
        (0.4, "0 s"),
        (119, "119 s"),
        (120, "2 minutes"),
        (7199, "120 minutes"),
        (7200, "2 hours"),
        (3 * 86_400, "3 days"),
    ],
)
def test_spans_have_one_unit(seconds: float, words: str) -> None:
    assert span(seconds) == words


def test_what_has_just_happened_is_now() -> None:
    assert (ago(0.9), ago(-5), ago(2), ago(240)) == ("now", "now", "2 s ago", "4 minutes ago")
