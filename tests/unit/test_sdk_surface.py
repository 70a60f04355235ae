"""Public names, and the cost of their import."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.start_cost import calls_of

HEAVY = ("httpx", "zmq", "msgspec", "dill", "cloudpickle", "rich", "typer", "asyncio")


@pytest.mark.parametrize("name", ["farcall", "farcall.testing", "farcall.cli"])
def test_all_is_sorted_and_complete(name: str) -> None:
    module = importlib.import_module(name)
    by_kind = sorted(module.__all__, key=lambda each: (not each.isupper(), not each[:1].isupper(), each))
    assert list(module.__all__) == by_kind
    assert all(hasattr(module, each) for each in module.__all__)


def test_importing_loads_nothing_heavy() -> None:
    code = f"import sys, farcall; print(*[name for name in {HEAVY!r} if name in sys.modules])"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert loaded.stdout.split() == []


def test_import_does_little_work(tmp_path: Path) -> None:
    assert calls_of("import farcall", tmp_path) < 40_000
