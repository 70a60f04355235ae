"""Metadata extraction: the kind, the properties and the topics of every file in a tree.

    python examples/metadata.py --endpoint NAME [--tree DIRECTORY]

Each task reads some files in place, on the endpoint, and returns only metadata. The default tree is the folder of data
sets in the installed scikit-learn package: Python, CSV, compressed tables, images, descriptions.
"""

from __future__ import annotations

import argparse
import ast
import csv
import dataclasses
import gzip
import importlib.util
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

FILES_PER_TASK = 25

COMMON_WORDS = (
    "also been before between call class data default else false from have here import into more must none only other "
    "over param parameters pass raise return returns same self should such than that their them then there these they "
    "this those true type used using value values were when where whether which will with would your"
)


def extract(paths: Sequence[str]) -> list[dict[str, Any]]:
    """One record for each file: path, size in bytes, kind, and the properties of its kind. Runs on a worker.

    A file whose contents do not match its name has the kind ``unreadable`` and a reason.
    """
    return [record_of(Path(path)) for path in paths]


def record_of(path: Path) -> dict[str, Any]:
    kind, read = reader_for(path.name)
    try:
        return {"path": str(path), "kind": kind, "size_bytes": path.stat().st_size, **read(path)}
    except (OSError, ValueError, SyntaxError) as reason:
        return {
            "path": str(path),
            "kind": "unreadable",
            "size_bytes": 0,
            "reason": f"{type(reason).__name__}: {reason}",
        }


def reader_for(name: str) -> tuple[str, Callable[[Path], dict[str, Any]]]:
    readers: list[tuple[str, tuple[str, ...], Callable[[Path], dict[str, Any]]]] = [
        ("python", (".py", ".pyi"), read_python),
        ("table", (".csv", ".csv.gz"), read_table),
        ("json", (".json",), read_json),
        ("image", (".png", ".jpg", ".gif", ".tif"), read_image),
        ("text", (".txt", ".rst", ".md"), read_text),
    ]
    for kind, endings, reader in readers:
        if name.endswith(endings):
            return kind, reader
    return "other", lambda _: {}


def read_python(path: Path) -> dict[str, Any]:
    nodes = list(ast.walk(ast.parse(path.read_bytes())))
    imports = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    imports |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module and not node.level}
    functions = [node for node in nodes if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
    docstrings = [ast.get_docstring(node) or "" for node in (*functions, *classes)]
    return {
        "functions": len(functions),
        "classes": len(classes),
        "imports": sorted({name.partition(".")[0] for name in imports}),
        "keywords": keywords("\n".join(docstrings)),
    }


def read_table(path: Path) -> dict[str, Any]:
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open(newline="") as lines:
        rows = [row for row in csv.reader(lines) if row]
    columns = max(map(len, rows), default=0)
    body = [row for row in rows[1:] if len(row) == columns]
    numeric = sum(all(is_number(row[column]) for row in body) for column in range(columns)) if body else 0
    return {"rows": len(rows), "columns": columns, "numeric_columns": numeric, "head": rows[0][:8] if rows else []}


def read_json(path: Path) -> dict[str, Any]:
    value = json.loads(path.read_text())
    return {"depth": depth(value), "keys": sorted(value)[:20] if isinstance(value, dict) else []}


def read_image(path: Path) -> dict[str, Any]:
    from PIL import Image  # only workers with images need it

    with Image.open(path) as image:
        return {"width": image.width, "height": image.height, "mode": image.mode}


def read_text(path: Path) -> dict[str, Any]:
    text = path.read_text()
    return {"lines": text.count("\n"), "keywords": keywords(text)}


def keywords(text: str, most: int = 8) -> list[str]:
    words = Counter(re.findall(r"[a-z]{4,24}", text.lower()))
    for word in COMMON_WORDS.split():
        words.pop(word, None)
    return [word for word, _ in words.most_common(most)]


def is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def depth(value: Any) -> int:
    """The nesting depth of lists and objects in a JSON value."""
    if not isinstance(value, (dict, list)):
        return 0
    return 1 + max(map(depth, value.values() if isinstance(value, dict) else value), default=0)


@dataclasses.dataclass(frozen=True)
class Catalogue:
    """The metadata of a tree: one record per file, by path."""

    records: Mapping[str, Mapping[str, Any]]

    @property
    def kinds(self) -> Counter[str]:
        """Number of files of each kind."""
        return Counter(record["kind"] for record in self.records.values())

    @property
    def total_bytes(self) -> int:
        return sum(record["size_bytes"] for record in self.records.values())

    def topics(self, most: int = 10) -> list[str]:
        """The keywords with the largest number of files."""
        words = Counter(word for record in self.records.values() for word in record.get("keywords", ()))
        return [word for word, _ in words.most_common(most)]


def files_below(tree: str | None) -> list[str]:
    """All files except compiled ones, in a fixed order. Runs on a worker.

    Without a tree: the data sets in the installed scikit-learn package.
    """
    if tree is None:
        package = importlib.util.find_spec("sklearn")
        if package is None or package.origin is None:
            raise LookupError("scikit-learn is not installed on the endpoint: pass --tree")
        tree = str(Path(package.origin).parent / "datasets")
    paths = sorted(Path(tree).rglob("*"))
    return [str(path) for path in paths if "__pycache__" not in path.parts and path.suffix != ".so" and path.is_file()]


def run(executor: Executor, tree: Path | None = None) -> Catalogue:
    """Extract the metadata of every file below ``tree``."""
    paths = executor.submit(files_below, None if tree is None else str(tree)).result()
    groups = [paths[start : start + FILES_PER_TASK] for start in range(0, len(paths), FILES_PER_TASK)]
    return Catalogue({record["path"]: record for records in executor.map(extract, groups) for record in records})


def main() -> None:
    import farcall

    parser = argparse.ArgumentParser(description="Extract metadata from every file of a tree.")
    parser.add_argument("--endpoint", required=True, help="name or id of the endpoint to run on")
    parser.add_argument("--tree", type=Path, help="a folder on the endpoint (default: scikit-learn's data sets)")
    arguments = parser.parse_args()
    with farcall.Executor(endpoint_id=arguments.endpoint) as executor:
        catalogue = run(executor, arguments.tree)
    print(f"{len(catalogue.records)} files, {catalogue.total_bytes / 1e6:.1f} MB: {dict(catalogue.kinds)}")
    print(f"about: {', '.join(catalogue.topics())}")


if __name__ == "__main__":
    main()
