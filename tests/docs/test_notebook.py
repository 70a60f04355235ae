"""The notebook runs from top to bottom, in a kernel of its own."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.docs.pages import DOCS, printed


def test_the_notebook(environment: Mapping[str, str], tmp_path: Path) -> None:
    notebook = tmp_path / "tutorial.ipynb"
    shutil.copy(DOCS / notebook.name, notebook)
    execute = str(Path(sys.executable).with_name("jupyter-execute"))
    # The kernel's files go with the test, and the user's own settings of Jupyter are not asked.
    own = {"HOME": str(tmp_path), "JUPYTER_CONFIG_DIR": str(tmp_path), "IPYTHONDIR": str(tmp_path / "ipython")}
    printed([execute, "--inplace", str(notebook)], directory=tmp_path, environment={**environment, **own})

    said = [_said(cell) for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == "code"]
    assert said[0] == "'online'"
    assert 3.1 < float(said[2].splitlines()[-1]) < 3.2
    assert said[3] == "True"
    assert said[4] == "1024"
    assert said[5].startswith("TASK_FAILED TypeError")
    assert said[6] == "hello from bash"
    assert said[7] == "True"


def test_the_notebook_is_stored_without_outputs() -> None:
    cells = json.loads((DOCS / "tutorial.ipynb").read_text(encoding="utf-8"))["cells"]
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells)


def _said(cell: Mapping[str, object]) -> str:
    """What a cell printed, and the value of its last line."""
    outputs = cell["outputs"]
    assert isinstance(outputs, list)
    texts = [output.get("text") or output.get("data", {}).get("text/plain", "") for output in outputs]
    return "".join("".join(text) for text in texts).strip()
