"""Site build hook: the tutorial's notebook as a page, with the outputs that it is stored with."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

_NOTEBOOK: Final = "tutorial.ipynb"
_PAGE: Final = "notebook.md"
_DOWNLOAD: Final = f"Download it: [{_NOTEBOOK}]({_NOTEBOOK}).\n"

Json = Mapping[str, Any]


def on_files(files: Files, /, *, config: MkDocsConfig) -> Files:
    """Add the page and its pictures."""
    cells = json.loads(Path(config.docs_dir, _NOTEBOOK).read_text(encoding="utf-8"))["cells"]
    pictures: dict[str, bytes] = {}
    blocks = [block for cell in cells for block in _cell(cell, pictures)]
    files.append(File.generated(config, _PAGE, content="\n".join([blocks[0], _DOWNLOAD, *blocks[1:]])))
    for path, content in pictures.items():
        files.append(File.generated(config, path, content=content))
    return files


def _cell(cell: Json, pictures: dict[str, bytes]) -> Iterator[str]:
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        yield f"{source}\n"
        return
    yield f"```python\n{source}\n```\n"
    for output in cell["outputs"]:
        yield from _output(output, pictures)


def _output(output: Json, pictures: dict[str, bytes]) -> Iterator[str]:
    data = {kind: "".join(value) for kind, value in output.get("data", {}).items()}
    if "image/png" in data:
        path = f"assets/notebook/{len(pictures) + 1}.png"
        pictures[path] = base64.b64decode(data["image/png"])
        yield f"![A plot that the cell above draws]({path})\n"
    elif "text/html" in data:
        yield f"<div>{data['text/html']}</div>\n"
    else:
        text = data.get("text/plain") or "".join(output.get("text", ""))
        yield f'```text title="output"\n{text.rstrip()}\n```\n'
