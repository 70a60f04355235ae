"""The commands that a page tells people to type, and what their programs would say of them.

Commands stand in fenced blocks and between backticks. Nothing is run: ours are parsed by their own parsers, and those
of AWS are held against botocore's models of the services.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import botocore.session
import pytest
import typer
from _pytest.config.argparsing import Parser
from botocore import xform_name
from botocore.exceptions import UnknownServiceError

import farcall_localstack.cli
from farcall.cli._app import app as farcall
from farcall_endpoint.app.cli import app as farcall_endpoint
from farcall_infra.cloud.tools import CDK_VERSION
from tests.contract.test_hints import below
from tests.e2e.conftest import pytest_addoption

_WORKSPACE: Final = Path(__file__).resolve().parents[2]
_FENCE: Final = re.compile(r"^(?P<indent> *)```(?P<info>[^\n]*)\n(?P<body>.*?)^ *```$", re.MULTILINE | re.DOTALL)
_SPAN: Final = re.compile(r"`([^`]+)`")
_ASSIGNMENT: Final = re.compile(r"[A-Z][A-Z0-9_]*=.*", re.DOTALL)
#: What ends a command in a line of the shell. No page has a semicolon.
_ENDS: Final = frozenset({"&&", "||", "|"})
#: Parameters of services that the command line gives a value: `aws ec2 run-instances` starts one instance.
_GIVEN: Final = frozenset({"MinCount", "MaxCount"})
#: Languages of blocks that are typed.
_SHELL: Final = frozenset({"", "console", "bash", "sh"})


@dataclasses.dataclass(frozen=True)
class Command:
    """What is typed, as words, and the number of its line in the page."""

    line: int
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"line {self.line}: {' '.join(self.words)}"


def commands_of(text: str) -> Iterator[Command]:
    """The commands of a page: all of its blocks, and the spans that begin with a program of ours or of AWS."""
    for block in _FENCE.finditer(text):
        if block["info"].strip() in _SHELL:
            yield from _commands_of_block(block["body"], text.count("\n", 0, block.start("body")) + 1)
    prose = _FENCE.sub(lambda block: "\n" * block[0].count("\n"), text)
    for span in _SPAN.finditer(prose):
        for part in _split(" ".join(span[1].split())):
            words = _words(part)
            if len(words) > 1 and words[0] in _CHECKS:
                yield Command(prose.count("\n", 0, span.start()) + 1, words)


def _commands_of_block(body: str, first: int) -> Iterator[Command]:
    joined = body.replace("\\\n", "\0")
    number = first
    for line in joined.splitlines():
        yield from (Command(number, words) for part in _split(line.replace("\0", " ")) if (words := _words(part)))
        number += 1 + line.count("\0")


def _split(line: str) -> Iterator[str]:
    """The commands of a line, without their comment and without the files that they read and write."""
    part: list[str] = []
    into_file = False
    lexer = shlex.shlex(line.removeprefix("$ "), posix=False, punctuation_chars="&|>")
    lexer.whitespace_split = True
    lexer.commenters = "#"
    try:
        words = list(lexer)
    except ValueError:
        return  # a quotation mark alone: prose between backticks
    for word in words:
        if word in _ENDS:
            yield " ".join(part)
            part = []
        elif word == ">":
            into_file = True
        elif into_file:
            into_file = False
        else:
            part.append(word)
    yield " ".join(part)


def _words(command: str) -> tuple[str, ...]:
    """The words of a command, without what is said to its environment. ``name=$(command)`` is that command."""
    inner = re.fullmatch(r"\w+=\$\((.*)\)", command)
    words = shlex.split(inner[1] if inner else command)
    while words and (_ASSIGNMENT.fullmatch(words[0]) or words[0] == "export"):
        words.pop(0)
    return tuple(words)


def problem(command: Command) -> str:
    """What its program would not understand; empty if it would."""
    program, *rest = command.words
    check = _CHECKS.get(program)
    return f"no program {program!r} is known here" if check is None else check(rest)


def _ours(app: typer.Typer) -> Callable[[Sequence[str]], str]:
    def check(words: Sequence[str]) -> str:
        command: Any = typer.main.get_command(app)
        context = command.make_context(command.name, [], resilient_parsing=True)
        rest = list(words)
        while rest and hasattr(command, "get_command"):
            found = below(command, context, rest[0])
            if found is None:
                return f"no command {rest[0]}"
            command = found
            context = typer.Context(command, info_name=rest.pop(0), parent=context)
        if hasattr(command, "get_command"):
            return ""  # a group is named, and nothing is to be typed
        try:
            command.make_context(command.name, rest, parent=context.parent)
        except Exception as error:
            if not hasattr(error, "format_message"):
                raise
            return str(error.format_message())
        return ""

    return check


def _aws(words: Sequence[str]) -> str:
    service, operation, *rest = [*words, ""][: len(words)] if len(words) > 1 else (*words, "")
    if (service, operation) in _OWN_OF_AWS_CLI:
        known = _OWN_OF_AWS_CLI[service, operation]
        unknown = [word for word in rest if word.startswith("--") and word not in known]
        return f"no option {unknown[0]}" if unknown else ""
    try:
        model = botocore.session.get_session().get_service_model("s3" if service == "s3api" else service)
    except UnknownServiceError:
        return f"no service {service}"
    if operation == "wait":
        waiters = botocore.session.get_session().get_waiter_model(service)
        found = {xform_name(name, "-"): waiters.get_waiter(name).operation for name in waiters.waiter_names}
        operation, *rest = rest
        if operation not in found:
            return f"nothing to wait for: {operation}"
        name = found[operation]
    else:
        operations = {xform_name(name, "-"): name for name in model.operation_names}
        if operation not in operations:
            return f"no operation {operation}"
        name = operations[operation]
    shape = model.operation_model(name).input_shape
    return _aws_options(rest, shape.members if shape else {}, shape.required_members if shape else [])


def _aws_options(words: Sequence[str], members: Mapping[str, Any], required: Sequence[str]) -> str:
    options = {f"--{xform_name(name, '-')}": shape.type_name != "boolean" for name, shape in members.items()}
    options |= {f"--no-{name[2:]}": False for name, wants_value in list(options.items()) if not wants_value}
    options |= dict.fromkeys(("--query", "--output", "--region", "--profile"), True)
    given = set()
    left = list(words)
    while left:
        word = left.pop(0)
        if word not in options:
            return f"no option {word}"
        given.add(word)
        if options[word]:
            if not left or left[0].startswith("--"):
                return f"{word} without a value"
            while left and not left[0].startswith("--"):
                left.pop(0)
    missing = [name for name in required if f"--{xform_name(name, '-')}" not in given and name not in _GIVEN]
    return f"{xform_name(missing[0], '-')} is missing" if missing and given else ""


#: Commands of AWS' command line itself, not of a service, with the options that our pages use.
_OWN_OF_AWS_CLI: Final[Mapping[tuple[str, str], Sequence[str]]] = {
    ("configure", ""): (),
    ("logs", "tail"): ("--since", "--follow"),
    ("configure", "sso"): (),
    ("login", ""): (),
    ("s3", "rb"): ("--force",),
    ("s3", "sync"): (),
    ("sso", "login"): (),
}


def _module(words: Sequence[str]) -> str:
    if words[:1] != ["-m"]:
        return "no module is named"
    name, *rest = words[1:]
    if name in _MODULES:
        return _MODULES[name](rest)
    found = importlib.util.find_spec(name)
    if found is not None and found.submodule_search_locations is not None:
        found = importlib.util.find_spec(f"{name}.__main__")
    return "" if found else f"no module {name}"


def _pytest(words: Sequence[str]) -> str:
    parser = Parser(_ispytest=True)
    pytest_addoption(parser)
    try:
        known, unknown = parser.parse_known_and_unknown_args(list(words))
    except pytest.UsageError as error:
        return str(error)
    paths = [path for path in known.file_or_dir if not (_WORKSPACE / path).exists()]
    return f"no {(unknown or paths)[0]}" if unknown or paths else ""


def _make(words: Sequence[str]) -> str:
    makefile = (_WORKSPACE / "Makefile").read_text(encoding="utf-8")
    targets = [word for word in words if "=" not in word]
    unknown = [each for each in targets if not re.search(rf"^{re.escape(each)}:", makefile, re.MULTILINE)]
    return f"no target {unknown[0]}" if unknown else ""


def _npx(words: Sequence[str]) -> str:
    return "" if words[0] == f"aws-cdk@{CDK_VERSION}" else f"{words[0]} is not the version that fits"


def _any(_words: Sequence[str]) -> str:
    return ""


_MODULES: Final = {"farcall_localstack": _ours(farcall_localstack.cli.app)}
_CHECKS: Final[Mapping[str, Callable[[Sequence[str]], str]]] = {
    "farcall": _ours(farcall),
    "farcall-endpoint": _ours(farcall_endpoint),
    "aws": _aws,
    "python": _module,
    ".venv/bin/python": _module,
    "pytest": _pytest,
    "make": _make,
    "npx": _npx,
    # Other people's, whose options are not known here.
    **dict.fromkeys(("cd", "cdk", "cdklocal", "cp", "curl", "docker", "eval", "git", "grep", "pip", "source"), _any),
}
