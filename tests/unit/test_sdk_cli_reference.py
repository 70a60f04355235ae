"""The page of the command line matches the commands."""

from __future__ import annotations

import re
from pathlib import Path

from farcall.cli._app import COMMANDS
from farcall.cli._reference import with_reference

PAGE = Path(__file__).parents[2] / "docs" / "cli.md"


def test_the_reference_is_that_of_the_commands() -> None:
    page = PAGE.read_text()
    assert page == with_reference(page), "run `python -m farcall.cli._reference docs/cli.md`"
    assert all(f"\n## farcall {name}\n" in page for name in COMMANDS)


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
    assert with_reference(stale) == page
