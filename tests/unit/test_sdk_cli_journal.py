"""What is kept of calls and of names, on this machine only."""

from __future__ import annotations

from pathlib import Path

import pytest

from farcall._blobs import INLINE_BYTES
from farcall.cli._cache import completes, remember
from farcall.cli._journal import KEPT, Call, find, keep


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("FARCALL_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def test_the_newest_calls_are_kept() -> None:
    keep([Call("old", "1"), Call("older", "2")])
    keep(Call(f"new-{number}", "3", walltime_s=9.0) for number in range(KEPT - 1))
    assert find("old") == Call("old", "1")
    assert find("older") is None
    assert find("new-0") == Call("new-0", "3", 9.0)


def test_large_arguments_are_not_kept() -> None:
    keep([Call("large", "x" * (INLINE_BYTES + 1)), Call("small", "x" * INLINE_BYTES)])
    assert find("large") is None
    assert find("small") is not None


def test_lines_that_cannot_be_read_are_passed_over(home: Path) -> None:
    keep([Call("task", "1")])
    kept = home / "cache" / "calls.jsonl"
    kept.write_text('{"other": 1}\nnot json\n' + kept.read_text())
    assert find("task") is not None


def test_a_disk_that_takes_nothing_is_no_error(home: Path) -> None:
    home.parent.mkdir(exist_ok=True)
    home.write_text("a file where the directory should be")
    keep([Call("task", "1")])
    remember("tasks", ["task"])
    assert find("task") is None
    assert completes("tasks")("") == []


def test_names_are_kept_once_and_the_newest_first(home: Path) -> None:
    remember("tasks", ["b", "a"])
    remember("tasks", ["c", "b"])
    remember("groups", ["z"])
    assert completes("tasks")("") == ["c", "b", "a"]
    (home / "cache" / "completion.json").write_text("broken")
    assert completes("tasks")("") == []
