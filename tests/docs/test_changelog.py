"""The changelog has one sentence a line, and few lines for each release."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import pytest

MAX_LINES: Final = 60
MAX_WORDS: Final = 35
RELEASES: Final = re.split(
    r"^## ", (Path(__file__).parents[2] / "CHANGELOG.md").read_text(encoding="utf-8"), flags=re.MULTILINE
)[1:]


@pytest.mark.parametrize("release", RELEASES, ids=lambda release: release.partition("\n")[0])
def test_a_release_has_few_lines_of_one_sentence(release: str) -> None:
    lines = [line for line in release.splitlines()[1:] if line and not line.startswith("### ")]
    assert 0 < len(lines) <= MAX_LINES
    assert [line for line in lines if not re.fullmatch(r"- (?:[^.]|\.(?! [A-Z]))+\.", line)] == []
    assert [line for line in lines if len(line.split()) > MAX_WORDS] == []
