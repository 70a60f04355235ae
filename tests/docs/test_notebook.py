"""The notebook runs from top to bottom, in a kernel of its own, and its stored outputs have the form of those."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from tests.docs.pages import DOCS, printed

NOTEBOOK: Final = DOCS / "tutorial.ipynb"


def test_the_notebook(environment: Mapping[str, str], tmp_path: Path) -> None:
    notebook = tmp_path / NOTEBOOK.name
    shutil.copy(NOTEBOOK, notebook)
    execute = str(Path(sys.executable).with_name("jupyter-execute"))
    # The kernel's files go with the test, and the user's own settings of Jupyter are not asked.
    own = {"HOME": str(tmp_path), "JUPYTER_CONFIG_DIR": str(tmp_path), "IPYTHONDIR": str(tmp_path / "ipython")}
    printed([execute, "--inplace", str(notebook)], directory=tmp_path, environment={**environment, **own})
    if os.environ.get("FARCALL_UPDATE_NOTEBOOK"):
        store(notebook)

    run = code_cells(notebook)
    said = [_said(cell) for cell in run]
    assert said[0] == "'online'"
    assert 3.1 < float(_said({"outputs": run[3]["outputs"][1:]})) < 3.2
    assert "100/100" in "".join(run[3]["outputs"][0]["data"]["text/html"])
    assert said[5] == "True"
    assert said[6] == "1024"
    assert said[7].startswith("TASK_FAILED TypeError")
    assert said[8] == "hello from bash"
    assert said[9] == "True"
    assert [_form(cell) for cell in code_cells(NOTEBOOK)] == [_form(cell) for cell in run]


def test_the_stored_notebook_shows_a_table_and_a_plot() -> None:
    cells = code_cells(NOTEBOOK)
    kinds = {kind for cell in cells for output in cell["outputs"] for kind in output.get("data", {})}
    assert {"text/html", "image/png"} <= kinds
    assert not any(output["output_type"] == "error" for cell in cells for output in cell["outputs"])
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    assert NOTEBOOK.stat().st_size < 100_000


def code_cells(notebook: Path) -> list[dict[str, Any]]:
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def store(notebook: Path) -> None:
    """Keep the outputs of a run in the documentation, without the times of cells and the version of the kernel."""
    content = json.loads(notebook.read_text(encoding="utf-8"))
    for cell in content["cells"]:
        cell["metadata"] = {}
    content["metadata"] = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["metadata"]
    NOTEBOOK.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _said(cell: Mapping[str, Any]) -> str:
    """What a cell printed, and the value of its last line."""
    texts = [output.get("text") or output.get("data", {}).get("text/plain", "") for output in cell["outputs"]]
    return "".join("".join(text) for text in texts).strip()


def _form(cell: Mapping[str, Any]) -> list[tuple[str, list[str]]]:
    """The kinds of a cell's outputs, in their order."""
    return [(output["output_type"], sorted(output.get("data", ()))) for output in cell["outputs"]]
