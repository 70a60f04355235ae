"""The pages of the command line match the commands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from farcall.cli._app import COMMANDS
from farcall.cli._reference import MAIN_PAGE, PAGES, with_reference

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / MAIN_PAGE


@pytest.mark.parametrize("page", PAGES)
def test_the_reference_is_that_of_the_commands(page: str) -> None:
    text = (DOCS / page).read_text()
    assert text == with_reference(text, page), "run `python -m farcall.cli._reference docs`"
    assert all(f"\n## farcall {name}\n" in text for name in PAGES[page])


def test_each_command_is_on_one_page() -> None:
    assert sorted(name for names in PAGES.values() for name in names) == sorted(COMMANDS)


def test_the_text_before_it_names_commands_and_options_that_exist() -> None:
    text = PAGE.read_text().partition("<!--")[0]
    named = {(top, leaf) for top, leaf in re.findall(r"farcall (\w+) ?(\w+)?", text) if top in COMMANDS}
    assert ("groups", "wait") in named
    for top, leaf in named:
        leaves = getattr(COMMANDS[top].load(top), "commands", None)
        assert not leaf or leaves is None or leaf in leaves, f"farcall {top} {leaf}"


def test_the_text_around_the_reference_stays() -> None:
    page = PAGE.read_text() + "\nThe end.\n"
    stale = page.replace("| 0 | done |", "| 0 | nothing |")
    assert stale != page
    assert with_reference(stale, MAIN_PAGE) == page
