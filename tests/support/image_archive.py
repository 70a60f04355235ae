"""An image of a container as ``docker save`` writes it, made from a directory tree."""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

#: What a small image keeps of :data:`tests.support.images.DEBIAN`: Python, a shell, and their libraries.
_KEPT: Final = (
    "bin",
    "etc/passwd",
    "etc/group",
    "etc/ld.so",
    "lib",
    "lib64",
    "usr/bin/dash",
    "usr/bin/sh",
    "usr/bin/python3",
)
_KEPT_LIBRARIES: Final = ("usr/lib64", "usr/lib/python3", "usr/lib/x86_64-linux-gnu", "usr/lib/aarch64-linux-gnu")
_LEFT_OUT: Final = (
    "gconv",
    "perl",
    "config-3",
    "lib2to3",
    "idlelib",
    "ensurepip",
    "pydoc_data",
    "__pycache__",
    "dist-packages",
)
_EMPTY: Final = ("etc", "dev", "proc", "run", "sys", "tmp", "var/tmp", "usr/share/zoneinfo/Etc")


def write_archive(path: Path, tree: Path, *, tag: str, config: Mapping[str, object] | None = None) -> None:
    """Write an archive with one layer.

    :param config: of the image, as its registry has it: ``Env``, ``Entrypoint``, ``User`` and so on.
    """
    layer = _layer(tree)
    digest = hashlib.sha256(layer).hexdigest()
    image = json.dumps(
        {
            "architecture": "amd64",
            "os": "linux",
            "config": {"Env": ["PATH=/usr/bin:/bin"], **(config or {})},
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
        }
    ).encode()
    name = f"{hashlib.sha256(image).hexdigest()}.json"
    manifest = json.dumps([{"Config": name, "RepoTags": [tag], "Layers": [f"{digest}/layer.tar"]}]).encode()
    with tarfile.open(path, "w") as archive:
        for member, data in ((name, image), (f"{digest}/layer.tar", layer), ("manifest.json", manifest)):
            header = tarfile.TarInfo(member)
            header.size = len(data)
            archive.addfile(header, io.BytesIO(data))


def write_tree(path: Path, tree: Path, *, owner: int) -> None:
    """Write the same files as a directory of an ordinary user."""
    with tarfile.open(fileobj=io.BytesIO(_layer(tree))) as layer:
        for member in layer:
            member.uid = member.gid = owner
            member.uname = member.gname = ""
            layer.extract(member, path, filter="tar")
    for directory, _, _ in os.walk(path):
        os.chown(directory, owner, owner)


def _layer(tree: Path) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for name in _EMPTY:
            header = tarfile.TarInfo(name)
            header.type, header.mode = tarfile.DIRTYPE, 0o1777 if name.endswith("tmp") else 0o755
            archive.addfile(header)
        for path in sorted(tree.rglob("*")):
            name = str(path.relative_to(tree))
            if any(part in name for part in _LEFT_OUT) or (path.is_dir() and not path.is_symlink()):
                continue
            if name in _KEPT or name.startswith((*_KEPT[3:4], *_KEPT[-1:], *_KEPT_LIBRARIES)):
                archive.add(path, name, recursive=False)
    return buffer.getvalue()
