"""The commands of containers from directory trees and of Python prefixes, as they were when they were last reviewed.

The files are for reading, with a line for each option. After a change:
``python -m tests.contract.test_environment_tree_commands``.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import pytest

from farcall_endpoint.environments.runners.base import Mount, Runner, Start
from farcall_endpoint.environments.runners.bubblewrap import BubblewrapRunner
from farcall_endpoint.environments.runners.charliecloud import CharliecloudRunner
from farcall_endpoint.environments.runners.prefixes import PrefixRunner
from farcall_endpoint.host import tree_root

GOLDEN: Final = Path(__file__).parent / "data" / "runners"

TREES: Final[Mapping[str, Runner]] = {
    "bubblewrap": BubblewrapRunner(is_root=False),
    "charliecloud": CharliecloudRunner(),
}
PREFIXES: Final[Mapping[str, Runner]] = {"venv": PrefixRunner("venv"), "conda": PrefixRunner("conda")}
RUNNERS: Final = {**TREES, **PREFIXES}

IN_TREE: Final[Mapping[str, Any]] = {
    "image": "/images/sci",
    "command": ("/usr/bin/python3", "-I", "-S", "/run/farcall/bootstrap.py"),
    "mounts": (
        Mount("/home/alice/work", "/home/alice/work", writable=True),
        Mount("/var/cache/farcall/worker-1", "/run/farcall"),
        Mount("/tmp/farcall-7", "/run/farcall/run"),
    ),
    "variables": {"PATH": "/usr/bin:/bin", "NOTE": "two words, $HOME and ünïcode"},
    "directory": "/home/alice/work",
}
IN_PREFIX: Final[Mapping[str, Any]] = {
    "image": "/opt/sci",
    "command": ("/opt/sci/bin/python", "-I", "-S", "/var/cache/farcall/worker-1/bootstrap.py"),
    "mounts": (Mount("/home/alice/work", "/home/alice/work", writable=True),),
    "variables": {"PATH": "/usr/bin:/bin", "NOTE": "two words, $HOME and ünïcode"},
    "directory": "/home/alice/work",
}
CASES: Final[Mapping[str, Mapping[str, Any]]] = {
    "plain": {},
    "submitter": {"private_root": True},
    "no-network": {"network": False},
    "nvidia": {"accelerators": ("0", "1")},
    "amd": {"accelerators": ("0",), "amd": True},
    "options": {"options": ("--ro-bind", "/data", "/data")},
}
_OF_TREES_ONLY: Final = ("no-network", "options")


def _commands() -> Iterator[tuple[str, str]]:
    for name, runner in RUNNERS.items():
        values = IN_TREE if name in TREES else IN_PREFIX
        for case, changes in CASES.items():
            if name in TREES or case not in _OF_TREES_ONLY:
                yield f"{name}-{case}", _readable(runner.command(Start(**{**values, **changes})))
    yield "bubblewrap-root", _readable(BubblewrapRunner(is_root=True).command(Start(**IN_TREE)))


def _readable(command: list[str]) -> str:
    names = {sys.executable: "PYTHON", str(Path(tree_root.__file__)): "tree_root.py"}
    text = ""
    for word in (names.get(word, word) for word in command):
        text += ("\n" if word.startswith("-") and text else " " if text else "") + shlex.quote(word)
    return text + "\n"


@pytest.fixture(autouse=True)
def _no_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs are found where they are installed; here they keep their names."""
    monkeypatch.setenv("PATH", "")


def test_commands_are_those_that_were_reviewed() -> None:
    files = [path for name in RUNNERS for path in GOLDEN.glob(f"{name}-*.txt")]
    assert dict(_commands()) == {path.stem: path.read_text(encoding="utf-8") for path in files}


def test_mounts_below_others_come_after_them() -> None:
    mounts = tuple(Mount(f"/source{target}", target) for target in ("/a/b/c", "/a", "/a/b"))
    command = RUNNERS["bubblewrap"].command(Start("/image", ("true",), mounts))
    assert [command.index(f"/source{target}") for target in ("/a", "/a/b", "/a/b/c")] == sorted(
        command.index(mount.source) for mount in mounts
    )


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"mounts": (Mount("/a", "/b"),)}, "no container in which /a could be mounted at /b"),
        ({"network": False}, "no container that could be without the node's network"),
        ({"options": ("--nv",)}, "no container that takes options: --nv"),
    ],
)
@pytest.mark.parametrize("name", PREFIXES)
def test_a_prefix_refuses_what_only_a_container_has(name: str, changes: Mapping[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=f"{name}: there is {reason}"):
        RUNNERS[name].command(Start(**{**IN_PREFIX, **changes}))


if __name__ == "__main__":
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", "")
        GOLDEN.mkdir(exist_ok=True)
        for stem, text in _commands():
            (GOLDEN / f"{stem}.txt").write_text(text, encoding="utf-8")
