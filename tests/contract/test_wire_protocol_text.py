"""PROTOCOL.md names every message, piece, field and state of the wire code."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from farcall_common.environments import Environment
from farcall_common.task_options import Callee, TaskOptions
from farcall_common.wire import Message, TaskState
from farcall_common.wire import messages as m

TEXT = (Path(__file__).parents[2] / "PROTOCOL.md").read_text()
STRUCTS: list[type[msgspec.Struct]] = [
    *Message.__subclasses__(),
    *m.Part.__subclasses__(),
    TaskOptions,
    Callee,
    Environment,
]


def _row(name: str) -> str:
    rows = [line for line in TEXT.splitlines() if re.match(rf"\| `{name}`(,| \|)", line)]
    return max(rows, key=len, default="")


@pytest.mark.parametrize("cls", sorted(STRUCTS, key=str), ids=lambda cls: cls.__name__)
def test_fields_are_documented(cls: type[msgspec.Struct]) -> None:
    row = _row(cls.__name__)
    missing = [name for name in cls.__struct_fields__ if not re.search(rf"`{name}\b", row)]
    assert (bool(row), missing) == (True, [])


def test_states_are_documented() -> None:
    assert [state for state in TaskState if f"`{state}`" not in TEXT] == []
