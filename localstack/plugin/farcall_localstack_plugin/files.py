"""Files that another process reads while they are written."""

from __future__ import annotations

from pathlib import Path

__all__ = ["write_whole"]


def write_whole(path: Path, text: str) -> None:
    """Write a file so that a reader finds what was there before, or all of ``text``."""
    draft = path.with_name(f"{path.name}.tmp")
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)
