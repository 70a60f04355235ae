"""Root file systems for tests of containers, made once per machine: ``python -m tests.support.images``.

They lie in ``.tools/images``, or where the variable ``FARCALL_TEST_IMAGES`` says. Each is a whole Debian tree, and
shares files with the first one: nothing may write to them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

DIRECTORY: Final = Path(
    os.environ.get("FARCALL_TEST_IMAGES") or Path(__file__).resolve().parents[2] / ".tools" / "images"
)

DEBIAN: Final = "debian"
"""Debian 12 with ``/usr/bin/python3``, 3.11, and its whole standard library."""
WITHOUT_PYTHON: Final = "without-python"
OLD_PYTHON: Final = "old-python"
"""``/usr/bin/python3`` says that it is 3.8.18, and runs what it is given nevertheless."""
PYTHON_ELSEWHERE: Final = "python-elsewhere"
"""The only Python is ``/opt/conda/bin/python3``, which is not in the usual search path."""
NAMES: Final = (DEBIAN, WITHOUT_PYTHON, OLD_PYTHON, PYTHON_ELSEWHERE)

_SUITE: Final = "bookworm"
_LEFT_OUT: Final = ("/usr/share/doc/*", "/usr/share/man/*", "/usr/share/locale/*", "/usr/share/info/*")
_VERSION: Final = "python3.11"
_OLD: Final = f"""\
#!/opt/real/bin/{_VERSION} -IS
import collections, sys
version = collections.namedtuple("version_info", "major minor micro releaselevel serial")(3, 8, 18, "final", 0)
sys.version_info, sys.hexversion = version, 0x030812F0
sys.version = "3.8.18 (default)" + sys.version.partition(")")[2]
arguments = sys.argv[1:]
if arguments[:1] in (["-V"], ["--version"]):
    sys.exit(print("Python 3.8.18"))
while arguments and arguments[0].startswith("-") and arguments[0] not in ("-", "-c") and arguments[0][-1] != "c":
    arguments = arguments[1:]
first = arguments.pop(0) if arguments else "-"
if first == "-":
    source = sys.stdin.read()
elif first.startswith("-"):
    source = arguments.pop(0)
    first = "-c"
else:
    source = open(first).read()
sys.argv[:] = [first, *arguments]
sys.executable = "/usr/bin/python3"
exec(compile(source, first, "exec"), {{"__name__": "__main__", "__file__": first}})
"""


def image(name: str) -> Path:
    """The directory of a root file system; a test that asks for one that was not made is skipped.

    ``FARCALL_NEED_IMAGES=1`` makes that a failure: the gate sets it.
    """
    path = DIRECTORY / name
    if not path.is_dir():
        reason = f"{path} does not exist: sudo make setup-system .tools/images/.made"
        if os.environ.get("FARCALL_NEED_IMAGES"):
            pytest.fail(reason)
        pytest.skip(reason)
    return path


def make_images(directory: Path = DIRECTORY) -> None:
    """Make those that are missing: about 20 seconds and 200 MB for the first, a second for each other.

    :raises FileNotFoundError: without mmdebstrap.
    :raises subprocess.CalledProcessError: if it fails; it has written why.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for name, make in _MAKERS.items():
        if (directory / name).is_dir():
            continue
        # complete or not there; readable for the ordinary users of the tests
        with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=directory) as unfinished:
            root = Path(unfinished) / name
            make(root, directory / DEBIAN)
            root.chmod(0o755)
            root.rename(directory / name)
    (directory / ".made").touch()  # for make


def _debian(root: Path, _: Path) -> None:
    options = [f"--dpkgopt=path-exclude={path}" for path in _LEFT_OUT]
    command = ["mmdebstrap", "--quiet", "--variant=essential", "--include=python3", *options, _SUITE, str(root)]
    subprocess.run(command, check=True)
    (root / "etc" / "hosts").write_text("127.0.0.1 localhost\n")


def _without_python(root: Path, debian: Path) -> None:
    _copy(root, debian)
    for path in (root / "usr" / "bin").glob("python3*"):
        path.unlink()


def _old_python(root: Path, debian: Path) -> None:
    _copy(root, debian)
    program = root / "usr" / "bin" / _VERSION
    real = root / "opt" / "real" / "bin"
    real.mkdir(parents=True)
    program.rename(real / _VERSION)
    (root / "opt" / "real" / "lib").symlink_to("/usr/lib")
    (root / "usr" / "bin" / "python3").unlink()
    (root / "usr" / "bin" / "python3").write_text(_OLD)
    (root / "usr" / "bin" / "python3").chmod(0o755)


def _python_elsewhere(root: Path, debian: Path) -> None:
    _copy(root, debian)
    place = root / "opt" / "conda"
    (place / "bin").mkdir(parents=True)
    (root / "usr" / "bin" / _VERSION).rename(place / "bin" / _VERSION)
    (root / "usr" / "bin" / "python3").unlink()
    (place / "bin" / "python3").symlink_to(_VERSION)
    (place / "lib").symlink_to("/usr/lib")


def _copy(root: Path, debian: Path) -> None:
    """A tree of hard links: what is removed or renamed in it stays in the other one."""
    subprocess.run(["cp", "--archive", "--link", str(debian), str(root)], check=True)


_MAKERS: Final[dict[str, Callable[[Path, Path], None]]] = {
    DEBIAN: _debian,
    WITHOUT_PYTHON: _without_python,
    OLD_PYTHON: _old_python,
    PYTHON_ELSEWHERE: _python_elsewhere,
}


def main() -> None:
    if shutil.which("mmdebstrap") is None:
        print("Images for tests of containers are not made: mmdebstrap is not installed (sudo make setup-system).")
        return
    if os.geteuid() != 0:
        print("Images for tests of containers are not made: only root can.")
        return
    make_images()


if __name__ == "__main__":
    main()
