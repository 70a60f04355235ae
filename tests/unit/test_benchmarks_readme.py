"""Figures of benchmarks/README.md."""

from __future__ import annotations

from benchmarks.readme import PAGE, with_figures


def test_page_has_the_stored_results() -> None:
    text = PAGE.read_text()
    assert with_figures(text) == text, "run: python -m benchmarks.readme"
