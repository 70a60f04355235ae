"""The tutorial is done as its reader does it: its files are saved, its commands typed, in a home of its own."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import pytest

from farcall_endpoint.config.reader import parse_config
from tests.docs.pages import DOCS, Page, follow, pages

TUTORIAL: Final = Page.read(DOCS / "tutorial.md")


@pytest.fixture
def reader(bare_environment: Mapping[str, str], tmp_path: Path) -> Iterator[Mapping[str, str]]:
    """The environment of a reader, who may leave at any point."""
    home = tmp_path / "home"
    own = {**bare_environment, "FARCALL_HOME": str(home), "HOME": str(tmp_path)}
    try:
        yield own
    finally:
        if (home / "endpoints" / "here").exists():
            subprocess.run(["farcall-endpoint", "stop", "here"], env=own, check=False, capture_output=True)
        subprocess.run(["farcall", "local", "down"], env=own, check=True, capture_output=True)


def test_the_tutorial(reader: Mapping[str, str], tmp_path: Path) -> None:
    assert TUTORIAL.in_shell
    assert not TUTORIAL.program(), "in the tutorial, every piece of Python is a file"
    folder = tmp_path / "work"
    folder.mkdir()
    assert follow(TUTORIAL.blocks, folder=folder, environment=reader) >= 5


@pytest.mark.parametrize(
    ("page", "text"),
    [
        pytest.param(page.name, text, id=f"{page.name}-{name}")
        for page in pages()
        for name, text in page.files().items()
        if name == "config.yaml"
    ],
)
def test_configurations_on_pages_are_valid(page: str, text: str) -> None:
    parse_config(text, source=page)
