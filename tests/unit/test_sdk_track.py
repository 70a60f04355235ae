"""Progress bars."""

from __future__ import annotations

import concurrent.futures

import pytest

from farcall import track


def test_a_bar_is_drawn_with_show(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(track(iter("abc"), "spelling", total=3, show=True)) == ["a", "b", "c"]
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "spelling" in captured.err
    assert "3/3" in captured.err


def test_nothing_is_drawn_into_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(track([1, 2])) == [1, 2]
    assert capsys.readouterr() == ("", "")


def test_futures_come_as_they_complete() -> None:
    slow, fast = concurrent.futures.Future[int](), concurrent.futures.Future[int]()
    fast.set_result(1)
    results = track([slow, fast], show=False)
    assert next(results) is fast
    slow.set_result(2)
    assert next(results) is slow
    assert list(results) == []


def test_empty_list_can_be_tracked() -> None:
    assert list(track([], show=False)) == []
