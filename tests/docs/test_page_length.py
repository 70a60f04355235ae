"""Pages are short: a page above the limit is split by subject."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from tests.docs.pages import DOCS

MAX_WORDS: Final = 4000
PAGES: Final = [path for folder in ("docs", "benchmarks") for path in sorted((DOCS.parent / folder).rglob("*.md"))]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(DOCS.parent)))
def test_a_page_has_at_most_4000_words(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").split()) <= MAX_WORDS, "split the page by subject"
