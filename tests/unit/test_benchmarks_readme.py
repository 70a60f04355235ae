"""Figures of benchmarks/README.md and of the pages in benchmarks/figures."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.readme import PAGES, SECTIONS, sections_of, with_figures


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_page_has_the_stored_results(page: Path) -> None:
    text = page.read_text()
    assert with_figures(text) == text, "run: python -m benchmarks.readme"


def test_each_section_is_on_one_page() -> None:
    assert sorted(name for page in PAGES for name in sections_of(page.read_text())) == sorted(SECTIONS)
