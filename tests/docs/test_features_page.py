"""The page that goes through Globus Compute's features forgets none, and what it calls there is there."""

from __future__ import annotations

import inspect
import json
import os
import re
import subprocess
from typing import Final

import pytest

import farcall
from farcall_common import payload
from tests.docs.pages import DOCS
from tests.waiting import WAIT_S

ROWS: Final = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in (DOCS / "features.md").read_text(encoding="utf-8").splitlines()
    if line.startswith("| ") and not line.startswith("| feature |")
]
GLOBUS_PYTHON: Final = os.environ.get("FARCALL_GLOBUS_PYTHON")
#: What Globus Compute's package shows: names, and arguments of the classes that programs make.
SURFACE: Final = """
import inspect, json
import globus_compute_sdk as sdk
from globus_compute_sdk import errors, serialize

def own(cls):
    shown = {name for base in cls.__mro__ if base.__module__.startswith("globus") for name in vars(base)}
    return [name for name in dir(cls) if name in shown and not name.startswith("_")]

def arguments(cls):
    return [name for name in inspect.signature(cls.__init__).parameters if name not in ("self", "kwargs", "client")]

print(json.dumps({
    "names": list(sdk.__all__),
    "methods": {cls.__name__: own(cls) for cls in (sdk.Client, sdk.Executor)},
    "arguments": [name for cls in (sdk.Client, sdk.Executor, sdk.ShellFunction) for name in arguments(cls)],
    "errors": [name for name in dir(errors) if name[0].isupper()],
    "strategies": [cls.__name__ for cls in serialize.concretes.SELECTABLE_STRATEGIES]
    if hasattr(serialize.concretes, "SELECTABLE_STRATEGIES") else
    [name for name in serialize.__all__ if name.startswith(("Dill", "JSON", "Pure", "All", "Combined"))
     and name != "AllowlistWildcard"],
}))
"""
#: The strategies for functions of Globus Compute's package, and those among them that it writes.
WRITTEN: Final = """
import inspect, json
from globus_compute_sdk.serialize import concretes

def writes(strategy):
    try:
        return bool(strategy().serialize(inspect.cleandoc))
    except NotImplementedError:
        return False

found = [each for each in vars(concretes).values() if getattr(each, "for_code", False) and "identifier" in vars(each)]
print(json.dumps({each.__name__: writes(each) for each in found}))
"""


def names_in(text: str) -> set[str]:
    return {each.rpartition(".")[2] for each in re.findall(r"`([\w.]+)`", text)}


def test_every_row_has_an_answer_and_a_no_has_a_reason() -> None:
    assert len(ROWS) > 60
    assert {row[1] for row in ROWS} == {"yes", "better", "no"}
    assert [row[0] for row in ROWS if row[1] == "better" and not row[2]] == []
    assert [row[0] for row in ROWS if row[1] == "no" and not row[2]] == ["macOS endpoints"]
    assert all(len(row) == 3 for row in ROWS)


def test_features_listed_as_present_exist() -> None:
    named = set()
    for feature, answer, why in ROWS:
        text = why if answer == "no" else f"{feature} {why}"
        named |= set(re.findall(r"`(Client|Executor|ComputeFuture)\.(\w+)`", text))
    assert len(named) > 40
    missing = {f"{owner}.{name}" for owner, name in named if not hasattr(getattr(farcall, owner), name)}
    assert missing == set()


def test_every_strategy_is_listed() -> None:
    named = set().union(*(names_in(row[0]) for row in ROWS))
    assert {name for name in named if re.match(r"(Dill|JSON|Pure|All[CD]|Combined|Pickle)", name)} <= set(
        payload.__all__
    )


@pytest.mark.skipif(GLOBUS_PYTHON is None, reason="FARCALL_GLOBUS_PYTHON names no Python with globus-compute-sdk")
def test_output_of_the_globus_package_is_documented() -> None:
    assert GLOBUS_PYTHON is not None
    shown = subprocess.run([GLOBUS_PYTHON, "-c", WRITTEN], stdout=subprocess.PIPE, check=True, timeout=WAIT_S).stdout
    writes = json.loads(shown.splitlines()[-1])
    assert {name for name, written in writes.items() if not written} == {"PickleCode"}
    assert len(writes) > 6
    for name in writes:
        assert payload.strategy_named(name).dump(inspect.cleandoc)


@pytest.mark.skipif(GLOBUS_PYTHON is None, reason="FARCALL_GLOBUS_PYTHON names no Python with globus-compute-sdk")
def test_every_public_name_of_the_globus_package_is_listed() -> None:
    assert GLOBUS_PYTHON is not None
    shown = subprocess.run([GLOBUS_PYTHON, "-c", SURFACE], stdout=subprocess.PIPE, check=True, timeout=WAIT_S).stdout
    surface = json.loads(shown.splitlines()[-1])
    on_the_page = set().union(*(names_in(row[0]) for row in ROWS))
    wanted = {*surface["names"], *surface["arguments"], *surface["errors"], *surface["strategies"]}
    wanted |= {name for names in surface["methods"].values() for name in names}
    assert len(wanted) > 60
    assert wanted - on_the_page == set()
