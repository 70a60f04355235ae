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


def test_the_bar_in_a_notebook_needs_no_widgets(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = _Display()
    drawn = shown.drawn
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    monkeypatch.setattr("IPython.display.display", shown.update)
    assert list(track([1, 2], "<counting>")) == [1, 2]
    assert drawn[0]["text/html"].startswith('&lt;counting&gt; <progress max="2" value="0">')
    assert drawn[-1]["text/plain"].startswith("<counting> 2/2, ")
    assert list(track(iter("ab"), show=False)) == ["a", "b"]


class _Display:
    """IPython's ``display``, and the handle that it returns."""

    def __init__(self) -> None:
        self.drawn: list[dict[str, str]] = []

    def update(self, data: dict[str, str], **_: object) -> _Display:
        self.drawn.append(data)
        return self
