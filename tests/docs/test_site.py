"""The site is built with every warning an error: links, anchors, pages that the navigation forgets, docstrings."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.docs.pages import DOCS, printed


def test_the_site_is_built(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    printed(build, directory=DOCS.parent, environment={**os.environ, "NO_MKDOCS_2_WARNING": "1"})
    pages = {str(path.relative_to(tmp_path / "site")) for path in (tmp_path / "site").rglob("*.html")}
    assert {"index.html", "tutorial.html", "errors.html", "reference/rest.html"} <= pages
    assert len([page for page in pages if page.startswith("adr/0")]) == len(list((DOCS / "adr").glob("0*.md")))
    assert "reload_tasks" in (tmp_path / "site" / "reference" / "farcall.html").read_text(encoding="utf-8")
    assert not list((tmp_path / "site").rglob("*.py"))
