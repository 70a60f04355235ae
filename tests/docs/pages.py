"""The code blocks of a page, and how they are run.

Every block marked ``python`` is run: those of a page one after the other, as one program. A block with a ``title`` is
a file of that name instead. In a page that says ``shell: true`` in its head, blocks marked ``bash`` are run in their
order. What is printed must be what the blocks titled ``output`` say, in their order; ``...`` stands for anything.
"""

from __future__ import annotations

import dataclasses
import doctest
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

DOCS: Final = Path(__file__).parents[2] / "docs"

_FENCE: Final = re.compile(r"^```(?P<language>\w+)?(?P<info>[^\n`]*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
_TITLE: Final = re.compile(r'title="([^"]+)"')
_HEAD: Final = re.compile(r"\A---\n(?P<fields>.*?)^---$", re.MULTILINE | re.DOTALL)
_WITHIN_S: Final = 800.0


@dataclasses.dataclass(frozen=True)
class Block:
    """A fenced block; ``line`` is where its first line of code is."""

    language: str
    title: str
    body: str
    line: int


@dataclasses.dataclass(frozen=True)
class Page:
    """A page by its path below ``docs``, with the fields of its head."""

    name: str
    head: Mapping[str, str]
    blocks: tuple[Block, ...]

    @classmethod
    def read(cls, path: Path) -> Page:
        """Read a page."""
        text = path.read_text(encoding="utf-8")
        head = _HEAD.match(text)
        fields = dict(line.split(": ", 1) for line in head["fields"].splitlines()) if head else {}
        blocks = tuple(
            Block(
                found["language"] or "",
                title[1] if (title := _TITLE.search(found["info"])) else "",
                found["body"],
                text.count("\n", 0, found.start("body")) + 1,
            )
            for found in _FENCE.finditer(text)
        )
        return cls(str(path.relative_to(DOCS)), fields, blocks)

    @property
    def in_shell(self) -> bool:
        """Whether its ``bash`` blocks are run."""
        return self.head.get("shell") == "true"

    @property
    def needs_cloud(self) -> bool:
        """Whether its code talks to a cloud tier."""
        return self.head.get("cloud") != "false"

    def files(self) -> dict[str, str]:
        """The files that the page gives, by name."""
        return {block.title: block.body for block in self.blocks if block.title and block.title != "output"}

    def program(self) -> str:
        """Its ``python`` blocks in the lines that they have in the page."""
        lines: list[str] = []
        for block in self.blocks:
            if block.language == "python" and not block.title:
                lines.extend([""] * (block.line - 1 - len(lines)))
                lines.extend(block.body.splitlines())
        return "\n".join(lines) + "\n" if lines else ""

    def expected(self) -> str:
        """What its program prints."""
        return "".join(block.body for block in self.blocks if block.title == "output")


def pages() -> list[Page]:
    """Every page below ``docs``."""
    return [Page.read(path) for path in sorted(DOCS.rglob("*.md"))]


def run(page: Page, *, directory: Path, environment: Mapping[str, str]) -> str:
    """Run the program of a page in ``directory``, and return what it printed; an ``AssertionError`` if it fails."""
    program = directory / page.name.replace("/", "-").replace(".md", ".py")
    program.write_text(page.program(), encoding="utf-8")
    for name, body in page.files().items():
        (directory / name).write_text(body, encoding="utf-8")
    return printed([sys.executable, "-W", "error", str(program)], directory=directory, environment=environment)


def printed(command: list[str], *, directory: Path, environment: Mapping[str, str]) -> str:
    """What a command prints; an ``AssertionError`` with all that it said if it fails."""
    done = subprocess.run(
        command,
        cwd=directory,
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_WITHIN_S,
        check=False,
    )
    assert done.returncode == 0, f"{' '.join(command)} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def follow(blocks: Sequence[Block], *, folder: Path, environment: Mapping[str, str]) -> int:
    """Do in ``folder`` what a reader of these blocks does: save the files, type the commands, and compare what they
    print. Returns the number of blocks with commands."""
    got = ""
    commands = 0
    for block in blocks:
        if block.title == "output":
            check_output(got, expected=block.body)
        elif block.title:
            (folder / block.title).write_text(block.body, encoding="utf-8")
        elif block.language == "bash":
            got = printed(["bash", "-euo", "pipefail", "-c", block.body], directory=folder, environment=environment)
            commands += 1
    return commands


def check_output(got: str, *, expected: str) -> None:
    """Compare what was printed with what a page says."""
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    matches = doctest.OutputChecker().check_output(expected, got, flags)
    assert matches, f"the page says\n{expected}\nand this was printed\n{got}"
