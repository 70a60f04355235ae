"""What error messages tell people to type exists: commands, their options, and variables."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import typer

from farcall.cli._app import app as farcall
from farcall.cli._lazy import LazyGroup
from farcall_endpoint.app.cli import app as farcall_endpoint

ROOT: Final = Path(__file__).parents[2]
PARTS: Final = (
    "analytics",
    "common",
    "sdk/farcall",
    "endpoint/farcall_endpoint",
    "lambdas",
    "forwarder_fargate",
    "infra",
    "local",
)
PROGRAMS: Final = {"farcall": farcall, "farcall-endpoint": farcall_endpoint}

#: Between backticks, as all of our texts write a command.
COMMAND: Final = re.compile(r"`(farcall(?:-endpoint)?)((?: [^`]*)?)`")
VARIABLE: Final = re.compile(r"\bFARCALL_[A-Z0-9_]*[A-Z0-9]\b")
#: What stands for something: NAME, ID..., {value}, < FILE, a path.
PLACEHOLDER: Final = re.compile(r"[A-Z][A-Z_]*(\.\.\.)?|.*[{}<>/.:=].*")


def sources() -> Iterator[Path]:
    for part in PARTS:
        yield from sorted((ROOT / part).rglob("*.py"))


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """The strings of a module that users may see; what an f-string fills in stands as {}."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    nodes = list(ast.walk(tree))
    inner = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    inner |= {id(node.value) for node in nodes if isinstance(node, ast.Expr)}  # docstrings
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            parts = (str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
            yield node.lineno, "".join(parts)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inner:
            yield node.lineno, node.value


def commands() -> list[tuple[str, str, str]]:
    return [
        (f"{path.relative_to(ROOT)}:{line}", match[1], match[2].strip())
        for path in sources()
        for line, text in texts(path)
        for match in COMMAND.finditer(" ".join(text.split()))
    ]


def below(command: Any, context: typer.Context, name: str) -> Any:
    """The command of that name, itself and no stand-in for it."""
    if isinstance(command, LazyGroup):
        deferred = command.find(name)
        return deferred and deferred.load(name)
    return command.get_command(context, name)


def problem(program: str, words: list[str]) -> str:
    """Why a command line cannot be typed like that; empty if it can."""
    if not words:
        return ""  # the program is named, and nothing is to be typed
    command: Any = typer.main.get_command(PROGRAMS[program])
    context = command.make_context(program, [], resilient_parsing=True)
    while words and hasattr(command, "get_command") and (found := below(command, context, words[0])) is not None:
        command, words = found, words[1:]
        context = typer.Context(command, info_name=command.name, parent=context)
    options = {name for each in command.get_params(context) for name in (*each.opts, *each.secondary_opts)} | {"--help"}
    unknown = [word for word in words if word.startswith("--") and word.partition("=")[0] not in options]
    if unknown:
        return f"no option {unknown[0]}"
    rest = [word for word in words if not word.startswith("-") and not PLACEHOLDER.fullmatch(word)]
    if hasattr(command, "get_command"):
        if rest:
            return f"no command {rest[0]}"
        shows_more = command.invoke_without_command or "--help" in words or "..." in words
        return "" if shows_more else "a mere group, which shows its help"
    return ""


@pytest.mark.parametrize(("where", "program", "rest"), commands())
def test_commands_in_hints_exist(where: str, program: str, rest: str) -> None:
    assert problem(program, rest.split()) == "", f"{where} names `{program} {rest}`"


def test_an_unknown_command_is_found() -> None:
    assert len(commands()) >= 20
    assert problem("farcall", ["tasks", "ls", "--state"]) == ""
    assert problem("farcall", ["tasks", "resubmit", "ID"]) == "no command resubmit"
    assert problem("farcall", ["tasks", "retry", "--harder", "ID"]) == "no option --harder"
    assert problem("farcall", ["tasks"]) == "a mere group, which shows its help"
    assert problem("farcall-endpoint", ["begin", "NAME"]) == "no command begin"


def fields(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id


def test_variables_in_hints_are_read_by_the_code() -> None:
    """As a constant of its own, or by the name of the setting that it is."""
    named: dict[str, str] = {}
    read: set[str] = set()
    for path in sources():
        for line, text in texts(path):
            if VARIABLE.fullmatch(text):
                read.add(text)
            elif len(text) < 1000:
                named |= {name: f"{path.relative_to(ROOT)}:{line}" for name in VARIABLE.findall(text)}
    read |= {f"FARCALL_{field.upper()}" for path in sources() for field in fields(path)}
    assert {name: where for name, where in named.items() if name not in read} == {}
