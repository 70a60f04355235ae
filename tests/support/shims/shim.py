"""What the shims share."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NoReturn


def record(program: str, arguments: list[str]) -> None:
    """Append the call to the log."""
    line = {"program": program, "arguments": arguments, "variables": dict(os.environ), "directory": str(Path.cwd())}
    with Path(os.environ["SHIM_LOG"]).open("a") as log:
        log.write(json.dumps(line) + "\n")


def root_of(name: str) -> Path | None:
    """The directory of an image; None if there is no such image."""
    path = Path(os.environ["SHIM_IMAGES"]) / name.replace("/", "_").replace(":", "_")
    return path if path.is_dir() else None


def fail(text: str, code: int) -> NoReturn:
    """End with these words."""
    print(text, file=sys.stderr)
    sys.exit(code)


def run(
    root: Path,
    command: list[str],
    *,
    mounts: Iterable[tuple[str, str, bool]],
    variables: Mapping[str, str],
    directory: str,
    namespaces: Iterable[str] = (),
) -> NoReturn:
    """Become the command, in the root.

    :param mounts: source, target, and whether it is writable.
    """
    words = ["bwrap", "--tmpfs", "/", "--die-with-parent", *namespaces]
    for path in sorted(root.iterdir()):
        if path.is_symlink():
            words += ["--symlink", str(path.readlink()), f"/{path.name}"]
        elif path.name not in ("proc", "dev", "tmp", "run"):
            words += ["--ro-bind", str(path), f"/{path.name}"] if path.name != "mnt" else ["--dir", "/mnt"]
    words += ["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", "--tmpfs", "/run"]
    for source, target, writable in mounts:
        words += ["--bind" if writable else "--ro-bind", source, target]
    words += ["--clearenv"]
    for name, value in variables.items():
        words += ["--setenv", name, value]
    os.execvp("bwrap", [*words, "--chdir", directory, "--", *command])
