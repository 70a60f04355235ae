"""Trials of container technologies: whether one really starts a container on this node, and why not."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from farcall_common.plain_text import plain
from farcall_endpoint.environments.runner import Mount, Runner, Start

_LIMIT_S: Final = 60.0
_LINES: Final = 3
"""At the end of its output, a program says why it fails."""
_DIRECTORIES: Final = ("bin", "lib", "lib32", "lib64", "usr")
"""What ``true`` and its libraries need of a root file system."""


def problem(command: Sequence[str]) -> str:
    """Run a command; its last words if it fails, else the empty string.

    The standard error of a program that was started by it may be the same; so they are words, and nothing to compare.
    """
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_LIMIT_S, check=False)
    except FileNotFoundError:
        return f"the program {command[0]} is not installed"
    except subprocess.TimeoutExpired:
        return f"no answer in {_LIMIT_S:.0f} s"
    except OSError as error:
        return str(error)
    if done.returncode == 0:
        return ""
    lines = (done.stderr or done.stdout).decode(errors="replace").splitlines()
    words = [text for line in lines if (text := plain(line).strip())]
    return "; ".join(words[-_LINES:]) or f"exit code {done.returncode}"


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
