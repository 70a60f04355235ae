"""The code in the pages runs, and prints what the pages say."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import pytest

from tests.docs.pages import DOCS, Block, Page, check_output, pages, printed, run

#: A whole id in code. A group of an identity provider has no other name.
ID_IN_CODE: Final = re.compile(r"""(?<!group:)\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b|\["uuid"\]""")
#: Pages whose code needs an id: REST has no names, and the example of an error asks for a task that does not exist.
WITH_IDS: Final = frozenset({"reference/rest.md", "errors.md"})
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


@pytest.mark.parametrize("page", [page for page in pages() if page.name not in WITH_IDS], ids=lambda page: page.name)
def test_code_names_endpoints_without_ids(page: Page) -> None:
    code = [block.body for block in page.blocks if block.language in ("python", "bash", "console")]
    assert [match for body in code for match in ID_IN_CODE.findall(body)] == []


def test_the_notebook_names_endpoints_without_ids() -> None:
    cells = json.loads((DOCS / "tutorial.ipynb").read_text(encoding="utf-8"))["cells"]
    assert [match for cell in cells for match in ID_IN_CODE.findall("".join(cell["source"]))] == []
    assert ID_IN_CODE.search('Client().get_endpoints()[0]["uuid"]')
    assert ID_IN_CODE.search('Executor("00000000-0000-4000-8000-000000000001")')


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
