"""Attributes that the page on the manager's states names exist in the code."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from types import ModuleType
from typing import Final

import farcall_endpoint.graphs
import farcall_endpoint.manager.core
from farcall_endpoint.graphs import stages
from farcall_endpoint.manager.core.environment_states import State
from tests.docs.pages import DOCS

TEXT: Final = (DOCS / "endpoint" / "states.md").read_text(encoding="utf-8")
ATTRIBUTE: Final = re.compile(r"`(?P<cls>[A-Z]\w+)\.(?P<name>\w+)[`(]")


def classes(package: ModuleType) -> dict[str, type]:
    """The classes of a package by name."""
    found: dict[str, type] = {}
    for each in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        module = importlib.import_module(each.name)
        found |= {name: cls for name, cls in vars(module).items() if inspect.isclass(cls)}
    return found


def test_each_attribute_exists() -> None:
    known = classes(farcall_endpoint.manager.core) | classes(farcall_endpoint.graphs)
    named = {(match["cls"], match["name"]) for match in ATTRIBUTE.finditer(TEXT)}
    assert len(named) > 70
    missing = [
        f"{cls}.{name}"
        for cls, name in sorted(named)
        if not re.search(rf"(self\.|def |^    ){name}\b", inspect.getsource(known[cls]), re.MULTILINE)
    ]
    assert missing == []


def test_the_states_of_environments_and_calls_are_all_there() -> None:
    calls = ("WAITING", "STARTED", "DONE", "FAILED", "DROPPED")
    assert all(isinstance(getattr(stages, name), int) for name in calls)
    assert [name for name in (*calls, *(state.name for state in State)) if f" {name}" not in TEXT] == []
