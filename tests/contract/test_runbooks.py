"""Every command of a runbook is run by a test, or a table says why it cannot be."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from tests.support.runbooks import NOT_RUN, PAGES, SHELL_LANGUAGES, Block, block, blocks, is_run

_TESTS: Final = Path(__file__).parents[1]
#: Settings of a profile: test_cloud_documents.py has a test of their names.
_SETTINGS: Final = frozenset({"toml"})
#: Queries: test_runbooks.py of the integration tests runs all of them.
_QUERIES: Final = frozenset({"sql"})


def _calls() -> Iterator[tuple[Path, ast.Call]]:
    """Calls of :func:`block` in integration tests."""
    for path in sorted((_TESTS / "integration").glob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "block":
                yield path, node


def _named_blocks() -> list[Block]:
    """The blocks that integration tests name, with the commands that they run."""
    found = []
    for path, call in _calls():
        try:
            positional: list[Any] = [ast.literal_eval(argument) for argument in call.args]
            named: dict[str, Any] = {str(each.arg): ast.literal_eval(each.value) for each in call.keywords}
        except ValueError as error:
            raise AssertionError(f"{path}, line {call.lineno}: block() takes literals only") from error
        found.append(block(*positional, **named))
    return found


def _all_commands() -> Iterator[tuple[Block, str]]:
    for page in PAGES:
        for each in blocks(page):
            if each.language not in _SETTINGS:
                yield from ((each, command) for command in each.commands)


def test_every_command_of_a_runbook_is_run_or_cannot_be() -> None:
    run = {(each.page, each.section, each.number, command) for each in _named_blocks() for command in each.commands}
    open_ = [
        f"{each}: {command}"
        for each, command in _all_commands()
        if is_run(command)
        and each.language not in _QUERIES
        and (each.page, each.section, each.number, command) not in run
    ]
    assert open_ == []


def test_every_reason_belongs_to_a_command() -> None:
    commands = [command for _, command in _all_commands()]
    assert [start for start in NOT_RUN if not any(command.startswith(start) for command in commands)] == []


def test_commands_have_no_language_but_the_shells() -> None:
    """A command in a block of text would be neither parsed nor run."""
    ours = ("aws ", "curl ", "farcall", "git ", "make ")
    texts = [each for page in PAGES for each in blocks(page) if each.language not in SHELL_LANGUAGES]
    assert [str(each) for each in texts if each.body.startswith(ours)] == []


def test_pages_have_blocks() -> None:
    assert {"deploy", "deploy/localstack", "operations", "operations/keys", "operations/upgrades"} <= set(PAGES)
    assert sum(len(blocks(page)) for page in PAGES) > 30
