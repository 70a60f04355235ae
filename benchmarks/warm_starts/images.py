"""Images and virtual environments of this benchmark: the tests' Debian, or this Python, with packages."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tests.support.images import DEBIAN, DIRECTORY

_UV: Final = (sys.executable, "-m", "uv")
#: As pip does. A container's root is read-only, so no start would store the byte code for the next one.
_INSTALL: Final = ("pip", "install", "--quiet", "--compile-bytecode")


def make_image(packages: Sequence[str]) -> str:
    """The name of an image with packages, below the directory of the tests' images. It is made once, and shares files
    with that of Debian."""
    name = f"benchmark-{'-'.join(packages)}"
    if not (DIRECTORY / name).is_dir():
        with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=DIRECTORY) as unfinished:
            root = Path(unfinished) / name
            subprocess.run(["cp", "--archive", "--link", str(DIRECTORY / DEBIAN), str(root)], check=True)
            version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
            target = root / "usr/local/lib" / version / "dist-packages"
            _run(*_INSTALL, "--python", sys.executable, "--target", str(target), *packages)
            for library in Path("/usr/lib").glob(
                "*-linux-gnu/lib*.so.*"
            ):  # of the same Debian: the image is a small one
                copy = root / library.relative_to("/")
                if library.name.startswith(("libstdc++.", "libgcc_s.")) and not copy.exists():
                    shutil.copy2(library, copy)
            root.rename(DIRECTORY / name)
    return name


def make_venv(packages: Sequence[str]) -> Path:
    """A virtual environment of this Python with packages. It is made once."""
    path = DIRECTORY / "-".join(["venv", *packages])
    made = path / ".made"
    if not made.exists():
        _run("venv", "--quiet", "--clear", "--python", sys.executable, str(path))
        if packages:
            _run(*_INSTALL, "--python", str(path / "bin" / "python"), *packages)
        made.touch()
    return path


def _run(*arguments: str) -> None:
    subprocess.run([*_UV, *arguments], check=True)
