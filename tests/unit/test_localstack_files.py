"""Atomic file writes of the LocalStack plugin."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

_PLUGIN = Path(__file__).parents[2] / "localstack" / "plugin"


@pytest.fixture
def write_whole() -> Iterator[Callable[[Path, str], None]]:
    """The plugin's function. The plugin is installed in LocalStack's environment, but this part does not need
    LocalStack."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(_PLUGIN))
        yield importlib.import_module("farcall_localstack_plugin.files").write_whole


def test_a_reader_sees_the_old_or_the_new_contents(
    write_whole: Callable[[Path, str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "pid"
    found: list[str | None] = []
    write_text = Path.write_text

    def look() -> None:
        found.append(file.read_text(encoding="utf-8") if file.exists() else None)

    def slow_write(path: Path, text: str, **options: Any) -> int:
        write_text(path, "", **options)  # opened but not written yet, as on a slow machine
        look()
        written = write_text(path, text, **options)
        look()
        return written

    monkeypatch.setattr(Path, "write_text", slow_write)
    write_whole(file, "1")
    look()
    write_whole(file, "22")
    look()
    assert found == [None, None, "1", "1", "1", "22"]
    assert list(tmp_path.iterdir()) == [file]
