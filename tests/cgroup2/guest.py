"""Tests of CPU shares by cgroups of version 2, in the virtual machine: ``python -m tests.cgroup2.guest``.

They run in each kind of group that a manager can be in.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

from tests.support.ordinary_user import USER, as_ordinary_user

_UPPERMOST: Final = Path("/sys/fs/cgroup")
_DELEGATED: Final = ("cgroup.procs", "cgroup.subtree_control", "cgroup.threads")
"""The files of a group that systemd gives to the user of a service with ``Delegate=yes``, with the directory."""
_TESTS: Final = (
    "tests/integration/test_endpoint_cpu_shares.py",
    "tests/cgroup2",
    "tests/unit/test_endpoint_cgroups.py",
)
_OPTIONS: Final = ("-q", "--color=no", "-p", "no:cacheprovider", "-p", "pytest_timeout")
"""The only plugin, as others take long to load here."""


@dataclasses.dataclass(frozen=True)
class Place:
    """A group, and who has it."""

    meaning: str
    path: Path
    is_ordinary_user: bool = False


PLACES: Final = (
    Place("root, in the uppermost group", _UPPERMOST),
    Place("root, in the group of a service", _UPPERMOST / "system.slice" / "farcall.service"),
    Place("an ordinary user, in a delegated group", _UPPERMOST / "user.slice" / "farcall.service", True),
)


def run(place: Place, arguments: list[str]) -> int:
    """Run the tests in a group; pytest's exit status."""
    print(f"\n== {place.meaning}: {place.path}", flush=True)
    delegate(place)
    command = [sys.executable, "-m", "pytest", *_OPTIONS, *arguments]
    if place.is_ordinary_user:
        command = as_ordinary_user(command, reachable=[Path.cwd()])
    procs = place.path / "cgroup.procs"
    joined = ["sh", "-c", f'echo $$ > {procs} && exec "$@"', "sh", *command]
    environment = {**os.environ, "FARCALL_CGROUP2": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run(joined, check=False, env=environment).returncode


def delegate(place: Place) -> None:
    """Make the group with the controllers of a service, and give it to its user."""
    for parent in reversed(place.path.relative_to(_UPPERMOST).parents):
        (_UPPERMOST / parent).mkdir(exist_ok=True)
        (_UPPERMOST / parent / "cgroup.subtree_control").write_text("+cpu +memory +pids")
    place.path.mkdir(exist_ok=True)
    if place.is_ordinary_user:
        for path in (place.path, *(place.path / name for name in _DELEGATED)):
            os.chown(path, USER, USER)


def main() -> int:
    statuses = [run(place, sys.argv[1:] or list(_TESTS)) for place in PLACES]
    return max(statuses)


if __name__ == "__main__":
    sys.exit(main())
