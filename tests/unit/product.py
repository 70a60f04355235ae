"""The product's modules, and the error classes in them."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from farcall_common.errors import FarcallError

ROOT: Final = Path(__file__).parents[2]
PACKAGES: Final = (
    *("common/farcall_common", "sdk/farcall", "endpoint/farcall_endpoint", "lambdas/farcall_lambdas"),
    *("forwarder_fargate/farcall_forwarder", "infra/farcall_infra", "local/farcall_local"),
    *("localstack/farcall_localstack", "analytics/farcall_analytics"),
)


def modules() -> Iterator[tuple[str, ast.Module]]:
    """Name and syntax tree of each module."""
    for package in PACKAGES:
        assert (ROOT / package).is_dir()
        for path in sorted((ROOT / package).rglob("*.py")):
            name = ".".join(path.relative_to((ROOT / package).parent).with_suffix("").parts)
            yield name.removesuffix(".__init__"), ast.parse(path.read_text(encoding="utf-8"))


def error_classes() -> dict[str, type[FarcallError]]:
    """Every error class that sets a code, by code. Their modules are imported."""
    found: dict[str, type[FarcallError]] = {}
    for name, tree in modules():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and (code := _code_of(node)):
                cls = getattr(importlib.import_module(name), node.name)
                assert issubclass(cls, FarcallError)
                assert found.setdefault(code, cls) is cls, f"{name}: {code} is the code of {found[code]}, too"
    assert len(found) > 50
    return found


def _code_of(node: ast.ClassDef) -> str | None:
    for line in node.body:
        target = line.targets[0] if isinstance(line, ast.Assign) else getattr(line, "target", None)
        value = getattr(line, "value", None)
        if isinstance(target, ast.Name) and target.id == "code" and isinstance(value, ast.Constant):
            return str(value.value)
    return None
