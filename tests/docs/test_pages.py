"""The code in the pages runs, and prints what the pages say."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import pytest

from tests.docs.pages import DOCS, Block, Page, check_output, pages, printed, run

PAGES: Final = [page for page in pages() if page.program()]


@pytest.mark.parametrize("page", [page for page in PAGES if page.needs_cloud], ids=lambda page: page.name)
def test_the_code_of_a_page_runs(page: Page, environment: Mapping[str, str], tmp_path: Path) -> None:
    check_output(run(page, directory=tmp_path, environment=environment), expected=page.expected())


@pytest.mark.parametrize("page", [page for page in PAGES if not page.needs_cloud], ids=lambda page: page.name)
def test_the_code_of_a_page_runs_without_a_cloud(
    page: Page, bare_environment: Mapping[str, str], tmp_path: Path
) -> None:
    check_output(run(page, directory=tmp_path, environment=bare_environment), expected=page.expected())


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
def test_the_examples_with_curl_run(environment: Mapping[str, str], tmp_path: Path) -> None:
    page = Page.read(DOCS / "reference" / "rest.md")
    session = "".join(block.body for block in page.blocks if block.language == "bash")
    said = printed(["bash", "-euo", "pipefail", "-c", session], directory=tmp_path, environment=environment)
    check_output(said, expected=page.expected())


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_no_code_block_is_skipped(page: Page) -> None:
    text = (DOCS / page.name).read_text(encoding="utf-8")
    assert text.count("```python") == sum(block.language == "python" for block in page.blocks), "a block is indented"
    assert page.in_shell or not any(block.language in ("bash", "sh", "shell") for block in page.blocks)


def test_a_page_that_prints_something_else_fails() -> None:
    check_output("1 of 20 done\n", expected="1 of ... done\n")
    with pytest.raises(AssertionError, match="the page says"):
        check_output("2 of 20 done\n", expected="1 of ... done\n")


def test_a_page_whose_code_raises_fails_at_the_line_of_the_page(
    bare_environment: Mapping[str, str], tmp_path: Path
) -> None:
    page = Page("raises.md", {}, (Block("python", "", "1 / 0\n", 7), Block("text", "output", "never\n", 11)))
    with pytest.raises(AssertionError, match=r"raises\.py\", line 7(.|\n)*ZeroDivisionError"):
        run(page, directory=tmp_path, environment=bare_environment)
