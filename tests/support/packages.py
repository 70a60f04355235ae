"""Tiny Python packages in a directory, for uv to install from."""

from __future__ import annotations

import importlib.metadata
import io
import tarfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path


def make_wheel(
    folder: Path,
    name: str,
    version: str,
    *,
    code: str = "",
    requires: Sequence[str] = (),
    padding_bytes: int = 0,
    files: Mapping[str, str] | None = None,
    tag: str = "py3-none-any",
) -> Path:
    """A wheel with one module of ``code``, as many bytes of data as asked for, and further files."""
    info = f"{name}-{version}.dist-info"
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    lines += [f"Requires-Dist: {each}" for each in requires]
    contents = {
        f"{name}.py": code or f"version = {version!r}\n",
        f"{name}_data.bin": "x" * padding_bytes,
        f"{info}/METADATA": "\n".join([*lines, ""]),
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: {tag}\n",
        **(files or {}),
    }
    record = "".join(f"{path},,\n" for path in (*contents, f"{info}/RECORD"))
    path = folder / f"{name}-{version}-{tag}.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in (contents | {f"{info}/RECORD": record}).items():
            archive.writestr(file, text)
    return path


def make_sdist(folder: Path, name: str, version: str, *, when_built: str) -> Path:
    """A source distribution without a wheel; ``when_built`` is the code that runs when one is built of it."""
    backend = f"""\
import sys
sys.path.insert(0, ".")
{when_built}

def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    import pathlib
    from packages import make_wheel
    return make_wheel(pathlib.Path(wheel_directory), {name!r}, {version!r}).name
"""
    files = {
        "PKG-INFO": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        "pyproject.toml": f'[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
        f'[project]\nname = "{name}"\nversion = "{version}"\n',
        "backend.py": backend,
        "packages.py": Path(__file__).read_text(encoding="utf-8"),
    }
    path = folder / f"{name}-{version}.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for file, text in files.items():
            data = text.encode()
            member = tarfile.TarInfo(f"{name}-{version}/{file}")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return path


def rebuild_wheel(folder: Path, name: str) -> Path:
    """The wheel of a pure package that is installed here."""
    found = importlib.metadata.distribution(name)
    path = folder / f"{name}-{found.version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for file in found.files or ():
            if ".." not in file.parts and file.suffix != ".pyc":
                archive.write(str(found.locate_file(file)), str(file))
    return path
