"""Runbooks: the fenced blocks of the pages for operators, and a shell that runs their commands as they are written.

A test names the block that it runs, by its section and its number there: ``shell.run(block("Change the profile"))``.
``tests/contract/test_runbooks.py`` finds these calls, and fails if a command of a page is neither run nor in
:data:`NOT_RUN`.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import pytest

from tests.waiting import WAIT_S

_DOCS: Final = Path(__file__).parents[2] / "docs"
#: The pages for operators, as paths below ``docs`` without their suffix.
PAGES: Final = tuple(
    str(path.relative_to(_DOCS).with_suffix(""))
    for subject in ("operations", "deploy")
    for path in (_DOCS / f"{subject}.md", *sorted(_DOCS.glob(f"{subject}/*.md")))
)
#: Languages of blocks that are typed into a shell.
SHELL_LANGUAGES: Final = frozenset({"", "bash", "console", "sh"})
#: The command line of AWS. The newest in a package index is version 1, which has the same commands.
AWS: Final = os.environ.get("FARCALL_TEST_AWS") or shutil.which("aws")

needs_aws = pytest.mark.skipif(AWS is None, reason="there is no command line of AWS: make .venv-aws/.made")

_LINE: Final = re.compile(
    r"^(?P<hashes>#{1,4}) (?P<section>[^\n]+)$"
    r"|^(?P<indent> *)```(?P<language>\w*)[^\n]*\n(?P<body>.*?)^ *```$",
    re.MULTILINE | re.DOTALL,
)
_SETTING: Final = re.compile(r"(export|eval) |\w+=\$\(")
_INSIGHTS: Final = "no emulator runs queries of CloudWatch Logs Insights"
_CHECKOUT: Final = "it would change the checkout that the tests run in; every run of the tests begins with `make setup`"
_GLOBUS: Final = "it is a request to Globus Auth itself, with a client that only its owner has"

#: Commands that no test runs, by how they begin, and why. A command is here or in a test, never in both.
NOT_RUN: Final[Mapping[str, str]] = {
    "fields @timestamp, message, endpoint_id": _INSIGHTS,
    "fields @timestamp, level, message, status": _INSIGHTS,
    "filter ispresent(refused) | stats": _INSIGHTS,
    "farcall cloud deploy -c api.gradual=false": "no emulator has CodeDeploy for Lambda; tests read both templates",
    "aws rds describe-certificates": "neither moto nor the offline tier has it; a test holds it against AWS' model",
    "aws logs tail": "only version 2 of AWS' command line has it, which is in no package index; it runs until Ctrl-C",
    "git pull && make setup": _CHECKOUT,
    "git clone … farcall": _CHECKOUT,
    "make setup && source": _CHECKOUT,
    "curl -u CLIENT_ID:CLIENT_SECRET": _GLOBUS,
    "farcall login --provider globus": _GLOBUS,
    "docker ": "docker's daemon needs rights that a machine for tests does not give",
    "FARCALL_E2E_TOKENS=": "the whole suite takes minutes; test_localstack_tier.py runs a part of it with this command",
}


@dataclasses.dataclass(frozen=True)
class Block:
    """A fenced block of a page. ``commands`` are what a test runs of it: lines that belong together are one command,
    and comments are none. A block in another language than the shell's is one command."""

    page: str
    section: str
    number: int
    language: str
    body: str
    commands: tuple[str, ...]

    @property
    def settings(self) -> tuple[str, ...]:
        """The commands that set variables for the others."""
        return tuple(command for command in self.commands if _SETTING.match(command))

    def __str__(self) -> str:
        return f"docs/{self.page}.md, {self.section}, block {self.number}"


def blocks(page: str) -> list[Block]:
    """All fenced blocks of a page, with all of their commands."""
    found: list[Block] = []
    section, number = "", 0
    for line in _LINE.finditer((_DOCS / f"{page}.md").read_text(encoding="utf-8")):
        if line["hashes"]:
            section, number = line["section"].replace("`", ""), 0
        else:
            number += 1
            body = textwrap.dedent(line["body"])
            found.append(Block(page, section, number, line["language"], body, _commands(line["language"], body)))
    return found


def _commands(language: str, body: str) -> tuple[str, ...]:
    if language not in SHELL_LANGUAGES:
        return (body.strip(),)
    lines = body.replace("\\\n", "\0").splitlines()
    joined = [line.replace("\0", "\\\n") for line in lines if line.strip() and not line.startswith("#")]
    return tuple(joined)


def is_run(command: str) -> bool:
    """Whether a test runs this command."""
    return not command.startswith(tuple(NOT_RUN))


def block(section: str, number: int = 1, *, starting: str = "") -> Block:
    """The block of that number in a section of the pages, with those of its commands that tests run and that start
    with ``starting`` or set variables."""
    (found,) = (each for page in PAGES for each in blocks(page) if (each.section, each.number) == (section, number))
    commands = tuple(
        each for each in found.commands if is_run(each) and (each.startswith(starting) or each in found.settings)
    )
    assert commands, f"{found} has no command that starts with {starting!r}"
    return dataclasses.replace(found, commands=commands)


class Shell:
    """A shell in which an operator types the commands of a page.

    :param environment: variables that the operator has set, such as the address of LocalStack.
    :param directory: where the operator works. It gets a directory ``bin`` with the operator's own programs.
    """

    def __init__(self, environment: Mapping[str, str], *, directory: Path) -> None:
        self.directory = directory
        programs = directory / "bin"
        programs.mkdir(exist_ok=True)
        self._programs = programs
        if AWS:
            # Version 1 ignores AWS_ENDPOINT_URL for some services in us-east-1.
            self.add_program("aws", f'exec {AWS} --endpoint-url "$AWS_ENDPOINT_URL" "$@"')
        ours = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "FARCALL_"))}
        path = os.pathsep.join([str(programs), str(Path(sys.executable).parent), os.environ["PATH"]])
        self.environment = {**ours, **environment, "PATH": path, "AWS_PAGER": "", "COLUMNS": "200"}

    def add_program(self, name: str, script: str) -> Path:
        """Give the operator a program, as a script of the shell."""
        program = self._programs / name
        program.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
        program.chmod(0o755)
        return program

    def run(
        self,
        typed: Block,
        fill: Mapping[str, str] | None = None,
        *,
        answer: str = "",
        within_s: float = WAIT_S,
    ) -> list[str]:
        """Run the commands of a block one after the other, or as one script if some of them set variables. Returns what
        each of them prints on standard output.

        :param fill: what the operator puts in the place of names such as ``DATABASE``. Each has to be in the block.
        :param answer: the operator's answer to the question of a command.
        :raises AssertionError: if a command fails, with everything that it printed.
        """
        commands = "\n".join(typed.commands)
        for name, value in (fill or {}).items():
            pattern = rf"(?<![\w-]){re.escape(name)}(?![\w-])"
            assert re.search(pattern, commands), f"{typed} has no {name}"
            commands = re.sub(pattern, value.replace("\\", r"\\"), commands)
        assert "…" not in commands, f"{typed}: the test gives no value for … in {commands}"
        scripts = [commands] if typed.settings else _commands("", commands)
        return [self.type(script, answer=answer, within_s=within_s) for script in scripts]

    def type(self, script: str, *, answer: str = "", within_s: float = WAIT_S) -> str:
        """Run commands that are in no block; otherwise as :meth:`run`."""
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script],
            cwd=self.directory,
            env=self.environment,
            input=answer,
            capture_output=True,
            text=True,
            timeout=within_s,
            check=False,
        )
        assert done.returncode == 0, f"{script}\n{done.stdout}\n{done.stderr}"
        return done.stdout
