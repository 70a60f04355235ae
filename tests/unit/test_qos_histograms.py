"""Histograms of durations: how far quantiles are off, sums, and windows."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farcall_endpoint.qos.histograms import Histogram, WindowedHistogram

DURATIONS = st.lists(st.floats(2e-5, 9e5), min_size=1, max_size=200)
PARTS = st.floats(0, 1)


def histogram(durations: list[float]) -> Histogram:
    found = Histogram()
    for each in durations:
        found.add(each)
    return found


@given(DURATIONS, PARTS)
def test_a_quantile_is_off_by_five_percent_at_most(durations: list[float], part: float) -> None:
    exact = sorted(durations)[max(1, math.ceil(part * len(durations))) - 1]
    assert histogram(durations).quantile(part) == pytest.approx(exact, rel=0.0501)


@given(DURATIONS, DURATIONS, PARTS)
def test_a_sum_has_what_both_have(first: list[float], second: list[float], part: float) -> None:
    both = histogram(first)
    both.merge(histogram(second))
    whole = histogram(first + second)
    assert (both.count, both.quantile(part)) == (whole.count, whole.quantile(part))


@pytest.mark.parametrize("duration_s", [0.0, -3.0, math.nan, 1e-9])
def test_what_is_no_duration_counts_as_the_shortest(duration_s: float) -> None:
    assert histogram([duration_s]).quantile(0.5) == pytest.approx(1e-5, rel=0.11)


def test_what_is_longer_than_all_counts_as_the_longest() -> None:
    assert histogram([math.inf]).quantile(0.5) == pytest.approx(1e6, rel=0.11)


def test_an_empty_one_has_no_quantile() -> None:
    assert Histogram().quantile(0.5) is None


def test_a_duration_counts_several_times() -> None:
    found = Histogram()
    found.add(1.0, 9)
    found.add(100.0)
    assert found.count == 10
    assert found.quantile(0.9) == pytest.approx(1.0, rel=0.0501)
    assert found.quantile(0.91) == pytest.approx(100.0, rel=0.0501)


def test_a_window_forgets_what_is_older() -> None:
    window = WindowedHistogram(10.0, steps=5)
    window.add(1.0, 0.0)
    window.add(2.0, 9.0, 3)
    assert window.histogram(9.0).count == window.count(9.0) == 4
    assert window.histogram(11.9).count == 4
    assert window.histogram(12.0).count == 3
    assert window.histogram(1000.0).count == 0
    window.add(1.0, 1000.0)
    assert window.histogram(1000.0).count == 1


@given(st.lists(st.tuples(st.floats(0, 1000), st.floats(1e-3, 10)), max_size=100))
def test_a_window_has_all_of_its_time_and_a_step_more_at_most(added: list[tuple[float, float]]) -> None:
    window = WindowedHistogram(60.0, steps=6)
    now = 0.0
    for later_s, duration_s in added:
        now += later_s
        window.add(duration_s, now)
    instants = []
    total = 0.0
    for later_s, _ in added:
        total += later_s
        instants.append(total)
    count = window.histogram(now).count
    assert sum(each > now - 60.0 for each in instants) <= count <= sum(each > now - 70.0 - 1e-6 for each in instants)
