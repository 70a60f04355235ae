"""Vocabulary of the repository: words that were replaced do not return.

One case for each word; an underscore separates words, so that ``is_well`` and ``test_nobody_waits`` are found as well.
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SUFFIXES = {".py", ".md", ".toml", ".yaml", ".sql"}
IGNORED_FOLDERS = {"__pycache__", "build", "cdk.out", "dist", "node_modules", "site"}

#: Identifiers that were replaced. Upper and lower case count.
IDENTIFIERS = (
    *("CutOff", "GREETED", "Garbled", "Holding", "Judge", "LEGAL_MOVES", "LogicalForwarder", "MoveBuffer"),
    *("PeerBehind", "PeerGone", "PromptHttp", "ShareEnds", "SharedEnds", "Swept", "TaskMove", "Tended", "Woken"),
    *("_Asked", "_Found", "_Told", "_follow", "_greet", "_hear_cloud", "_obey", "_say", "_tell", "_weigh"),
    *("end_from_json", "fates", "first_ends", "heed_sigterm", "is_well", "patience_s", "perform_together"),
    *("shared_steps", "troubles", "upkeep_s", "written_ahead"),
)

#: Archaic words, and words that no field uses for its subject. Upper and lower case do not count.
WORDS = (
    *("anew", "anybody", "bury", "buries", "heed", "heeds", "knock", "knocks", "mend", "mended", "mends"),
    *("newcomer", "newcomers", "nobody", "patience", "roster", "somebody", "stirring", "stranger", "strangers"),
    *("strays", "upkeep", "verdict", "whoever", "whom", "is told", "are told", "was told", "is of", "are of"),
)

_ACCOUNT = "the unprivileged account of Unix"
#: File, word, and why it is the field's own word there.
EXCEPTIONS = (
    ("local/farcall_local/postgres_files.py", "nobody", _ACCOUNT),
    ("local/farcall_local/process.py", "nobody", _ACCOUNT),
    ("localstack/farcall_localstack/server.py", "nobody", _ACCOUNT),
    ("localstack/plugin/farcall_localstack_plugin/children.py", "nobody", _ACCOUNT),
    ("tests/integration/store_servers.py", "nobody", _ACCOUNT),
)


@functools.cache
def texts() -> dict[str, str]:
    """The repository's texts by path; what is not in git is left out where git is there to say."""
    return {
        path: (ROOT / path).read_text(encoding="utf-8")
        for path in sorted(paths())
        if Path(path).suffix in SUFFIXES and (ROOT / path).is_file() and ROOT / path != Path(__file__)
    }


def paths() -> Iterator[str]:
    if (ROOT / ".git").exists():
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
        yield from listed.stdout.split("\0")
        return
    for folder, folders, names in os.walk(ROOT):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in IGNORED_FOLDERS]
        yield from (str((Path(folder) / name).relative_to(ROOT)) for name in names)


def lines_with(word: str, *, flags: re.RegexFlag) -> Iterator[str]:
    """``path:line: text`` of each occurrence, exceptions left out."""
    pattern = re.compile(_pattern(word), flags)
    excepted = {path for path, other, _ in EXCEPTIONS if other == word}
    for path, text in texts().items():
        for found in pattern.finditer(text) if path not in excepted else ():
            number = text.count("\n", 0, found.start())
            yield f"{path}:{number + 1}: {text.splitlines()[number].strip()[:100]}"


@pytest.mark.parametrize("word", IDENTIFIERS)
def test_replaced_identifiers_do_not_return(word: str) -> None:
    assert list(lines_with(word, flags=re.RegexFlag(0))) == []


@pytest.mark.parametrize("word", WORDS)
def test_replaced_words_do_not_return(word: str) -> None:
    assert list(lines_with(word, flags=re.IGNORECASE)) == []


@pytest.mark.parametrize(("path", "word", "reason"), EXCEPTIONS)
def test_exceptions_are_needed(path: str, word: str, reason: str) -> None:
    assert reason
    assert re.search(_pattern(word), texts()[path], re.IGNORECASE), "remove the exception"


def _pattern(word: str) -> str:
    words = r"\s+".join(map(re.escape, word.split()))
    return rf"(?<![A-Za-z0-9]){words}(?![A-Za-z0-9])"
