"""The decision records have numbers without gaps, one form, few words, and an index that lists each of them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import pytest

from tests.docs.pages import DOCS

ADR: Final = DOCS / "adr"
ROOT: Final = DOCS.parent
RECORDS: Final = sorted(ADR.glob("[0-9]*.md"))
MAX_WORDS: Final = 400
PARTS: Final = ("Decided", "Why", "What follows", "Rejected", "Held by")
LINK: Final = re.compile(r"\[(?P<number>\d{4})\]\((?P<name>[^)]+)\)")
PAGE_LINK: Final = re.compile(r"\]\((\.\./[^)#]+)")
ROW: Final = re.compile(r"^\| \[(?P<number>\d{4})\]\((?P<name>[^)]+)\) \| (?P<title>.+?) \| .+ \|$", re.M)
#: What other files say of a record: its path (with or without a title) or its number.
REFERENCE: Final = re.compile(r"(?:docs/adr/|\badr/|\bADR )(?P<name>\d{4}[\w-]*(?:\.md)?)")
FOLDERS: Final = [
    "analytics",
    "benchmarks",
    "common",
    "docs",
    "endpoint",
    "examples",
    "forwarder_fargate",
    "infra",
    "lambdas",
    "local",
    "localstack",
    "sdk",
    "tests",
]
SUFFIXES: Final = frozenset({".py", ".md", ".toml", ".yaml", ".lua", ".sql", ".ipynb"})


def references() -> dict[str, set[str]]:
    """Where each record is referred to, by the reference."""
    found: dict[str, set[str]] = {}
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in SUFFIXES]
    for path in [*files, *ROOT.glob("*.md"), ROOT / "forwarder_fargate" / "Dockerfile"]:
        if path.is_file() and not {"node_modules", ".venv-peers"} & set(path.parts):
            for match in REFERENCE.finditer(path.read_text(encoding="utf-8")):
                found.setdefault(match["name"], set()).add(str(path.relative_to(ROOT)))
    return found


def amended(word: str) -> set[tuple[str, str]]:
    """Pairs of a record and another one that its first paragraph calls ``word``."""
    return {
        (path.name, link["name"])
        for path in RECORDS
        for line in path.read_text(encoding="utf-8").splitlines()
        if line.startswith(f"*{word} ")
        for link in LINK.finditer(line)
    }


def test_record_numbers_have_no_gap() -> None:
    assert [int(path.name[:4]) for path in RECORDS] == list(range(1, len(RECORDS) + 1))


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_a_record_has_the_form(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert re.match(rf"# {path.name[:4]}: [A-Za-z].+\n\n", text)
    parts = re.findall(rf"^\*\*({'|'.join(PARTS)})(?:\.\*\*|\*\*)", text, re.M)
    assert parts in (list(PARTS), [part for part in PARTS if part != "What follows"])


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_a_record_is_short(path: Path) -> None:
    words = [word for word in path.read_text(encoding="utf-8").split() if re.search(r"\w", word)]
    assert len(words) <= MAX_WORDS


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_paths_named_by_a_record_exist(path: Path) -> None:
    held_by = path.read_text(encoding="utf-8").rpartition("**Held by**")[2]
    named = re.findall(r"`([\w./]+\.\w+)`", held_by)
    assert named
    assert [name for name in named if not (ROOT / name).is_file()] == []


def test_the_index_lists_each_record() -> None:
    rows = {match["name"]: match["title"] for match in ROW.finditer((ADR / "README.md").read_text(encoding="utf-8"))}
    titles = {path.name: path.read_text(encoding="utf-8").partition("\n")[0][len("# 0000: ") :] for path in RECORDS}
    assert rows == titles
    assert list(rows) == list(titles)


def test_the_navigation_names_records_in_order() -> None:
    named = re.findall(r"^ +- adr/(\d{4}-.+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.M)
    assert 25 <= len(named) <= 35
    assert named == [path.name for path in RECORDS if path.name in named]


def test_links_name_the_number_that_they_lead_to() -> None:
    for path in ADR.glob("*.md"):
        for link in LINK.finditer(path.read_text(encoding="utf-8")):
            assert link["name"].startswith(link["number"]), path.name
            assert (ADR / link["name"]).is_file(), f"{path.name} links to {link['name']}"


def test_links_to_other_pages_lead_to_files() -> None:
    links = {(path.name, target) for path in RECORDS for target in PAGE_LINK.findall(path.read_text(encoding="utf-8"))}
    assert links
    assert {(name, target) for name, target in links if not (ADR / target).is_file()} == set()


def test_an_amended_record_names_its_amendment() -> None:
    pairs = amended("Amends")
    assert len(pairs) >= 3
    assert {(earlier, later) for later, earlier in pairs} == amended("Amended by")


def test_references_lead_to_a_record() -> None:
    names = {name for path in RECORDS for name in (path.name, path.stem, path.name[:4])}
    found = references()
    assert len(found) > 10
    assert {name: sorted(where) for name, where in found.items() if name not in names} == {}
