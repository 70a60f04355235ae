"""The site is built with every warning an error: links, anchors, pages that the navigation forgets, docstrings."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Final

import pytest

from tests.docs.pages import DOCS, printed

#: Not ``--quiet``: it hides warnings from ``--strict`` as well.
BUILD: Final = [sys.executable, "-m", "mkdocs", "build", "--strict"]
ENVIRONMENT: Final = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}


def test_the_site_is_built(tmp_path: Path) -> None:
    printed([*BUILD, "--site-dir", str(tmp_path / "site")], directory=DOCS.parent, environment=ENVIRONMENT)
    pages = {str(path.relative_to(tmp_path / "site")) for path in (tmp_path / "site").rglob("*.html")}
    assert {"index.html", "tutorial.html", "errors.html", "reference/rest.html"} <= pages
    assert len([page for page in pages if page.startswith("adr/0")]) == len(list((DOCS / "adr").glob("0*.md")))
    assert "reload_tasks" in (tmp_path / "site" / "reference" / "farcall.html").read_text(encoding="utf-8")
    assert not list((tmp_path / "site").rglob("*.py"))


def test_a_link_to_a_missing_anchor_fails(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text("# Here\n\n[there](#there)\n", encoding="utf-8")
    (tmp_path / "mkdocs.yml").write_text("site_name: x\nvalidation: {links: {anchors: warn}}\n", encoding="utf-8")
    with pytest.raises(AssertionError, match="no such anchor"):
        printed(BUILD, directory=tmp_path, environment=ENVIRONMENT)


def test_make_docs_builds_as_the_test_does() -> None:
    makefile = (DOCS.parent / "Makefile").read_text(encoding="utf-8")
    assert "mkdocs build --strict\n" in makefile
