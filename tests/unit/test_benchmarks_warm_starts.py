"""The image of the benchmark of warm starts."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from benchmarks.warm_starts import special_files


def test_a_copy_of_an_image_leaves_devices_and_pipes_out(tmp_path: Path) -> None:
    image = tmp_path / "image"
    (image / "dev").mkdir(parents=True)
    os.mkfifo(image / "dev" / "initctl")
    (image / "dev" / "fd").symlink_to("/proc/self/fd")
    (image / "file").write_text("text")
    shutil.copytree(image, tmp_path / "copy", symlinks=True, ignore=special_files)
    assert sorted(path.relative_to(tmp_path / "copy").as_posix() for path in (tmp_path / "copy").rglob("*")) == [
        "dev",
        "dev/fd",
        "file",
    ]
