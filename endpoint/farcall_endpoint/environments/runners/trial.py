"""Trials of container technologies: whether one really starts a container on this node, and why not."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from farcall_endpoint.environments.runners.base import Mount, Runner, Start
from farcall_endpoint.host.isolation.trial import problem

_DIRECTORIES: Final = ("bin", "lib", "lib32", "lib64", "usr")
"""What ``true`` and its libraries need of a root file system."""


def start_problem(runner: Runner, program: str) -> str:
    """Start a container of nothing but the node's own programs, as tasks' containers are started; why it fails.

    :param program: the runner's.
    """
    if shutil.which(program) is None:
        return f"the program {program} is not installed"
    with _smallest_root() as (root, mounts):
        start = Start(image=root, command=("true",), mounts=mounts, name=f"farcall-trial-{os.getpid()}")
        try:
            return problem(runner.command(start))
        finally:
            if remove := runner.stop(start):
                problem(remove)


@contextlib.contextmanager
def _smallest_root() -> Iterator[tuple[str, tuple[Mount, ...]]]:
    """A temporary root file system, and what to mount into it."""
    with tempfile.TemporaryDirectory(prefix="farcall-trial-") as root:
        for name in ("dev", "etc", "proc", "run", "sys", "tmp", "var/tmp"):
            (Path(root) / name).mkdir(parents=True)
        (Path(root) / "etc/mtab").symlink_to("../proc/self/mounts")
        found = [f"/{name}" for name in _DIRECTORIES if Path(f"/{name}").is_dir()]
        for path in found:
            (Path(root) / path[1:]).mkdir()
        yield root, tuple(Mount(os.path.realpath(path), path) for path in found)
