"""A root file system with the Apptainer of Debian sid: ``python -m tests.support.apptainer_root`` makes it, once.

Debian 12 has no Apptainer, and sid's needs sid's libraries: it runs in a root of its own
(:func:`tests.support.container_user.apptainer_user`).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Final

from tests.support.images import DIRECTORY

APPTAINER: Final = "apptainer"
"""Its name for :func:`tests.support.images.image`."""

_PACKAGES: Final = "apptainer,squashfuse,fuse3,tzdata,mount"
_LEFT_OUT: Final = ("/usr/share/doc/*", "/usr/share/man/*", "/usr/share/locale/*", "/usr/share/info/*")


def make_root(directory: Path = DIRECTORY) -> None:
    """Make it if it is missing: about 15 seconds and 300 MB.

    :raises subprocess.CalledProcessError: if it fails; mmdebstrap has written why.
    """
    directory.mkdir(parents=True, exist_ok=True)
    if not (directory / APPTAINER).is_dir():
        with tempfile.TemporaryDirectory(prefix=".apptainer-", dir=directory) as unfinished:
            root = Path(unfinished) / APPTAINER
            options = [f"--dpkgopt=path-exclude={path}" for path in _LEFT_OUT]
            options.append('--aptopt=Acquire::Check-Valid-Until "false"')  # a mirror may be older than its Release file
            command = ["mmdebstrap", "--quiet", "--variant=essential", f"--include={_PACKAGES}", *options, "sid"]
            subprocess.run([*command, str(root)], check=True)
            (root / "etc/hosts").write_text("127.0.0.1 localhost\n")
            (root / ".old").mkdir()  # for pivot_root
            root.chmod(0o755)
            root.rename(directory / APPTAINER)
    (directory / ".apptainer-made").touch()  # for make


def main() -> None:
    if shutil.which("mmdebstrap") is None or os.geteuid() != 0:
        print("The image of Apptainer is not made: only root can, and with mmdebstrap.")
        return
    make_root()


if __name__ == "__main__":
    main()
