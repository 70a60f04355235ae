"""Wheels of all packages, and environments outside the clone that they are installed into."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import psutil
import uv

ROOT: Final = Path(__file__).parents[2]
THIS_PYTHON: Final = f"{sys.version_info[0]}.{sys.version_info[1]}"

#: Where version managers install Pythons, for those that are not on the path.
_PLACES: Final = (
    (os.environ.get("PYENV_ROOT", "~/.pyenv"), "versions/{version}.*/bin/python"),
    (os.environ.get("ASDF_DATA_DIR", "~/.asdf"), "installs/python/{version}.*/bin/python"),
    (os.environ.get("MISE_DATA_DIR", "~/.local/share/mise"), "installs/python/{version}.*/bin/python"),
    ("/opt/python", "cp{tag}-cp{tag}/bin/python"),
)


def build_wheels(directory: Path) -> Path:
    """Build all wheels by way of their source distributions, as `make wheels` does; returns their folder."""
    make = ["make", "--silent", "wheels", f"DIST={directory}"]
    subprocess.run(make, cwd=ROOT, env={**os.environ, "MAKEFLAGS": ""}, check=True, capture_output=True, text=True)
    # The versions of the lock file: a new release of a dependency is not what is tested, and these are in uv's cache.
    options = ["--quiet", "--frozen", "--all-packages", "--no-dev", "--no-emit-workspace", "--no-hashes"]
    locked = subprocess.run([uv.find_uv_bin(), "export", *options], cwd=ROOT, check=True, capture_output=True).stdout
    (directory / "constraints.txt").write_bytes(locked)
    return directory


def find_python(version: str) -> str | None:
    """An interpreter of that minor version, None if this machine has none."""
    if version == THIS_PYTHON:
        return sys.executable
    find = [uv.find_uv_bin(), "python", "find", "--quiet", "--no-project", f"cpython@{version}"]
    asked = subprocess.run(find, capture_output=True, text=True, check=False)
    candidates = [asked.stdout.strip() if asked.returncode == 0 else "", shutil.which(f"python{version}") or ""]
    for root, pattern in _PLACES:
        found = Path(root).expanduser().glob(pattern.format(version=version, tag=version.replace(".", "")))
        candidates += map(str, sorted(found, reverse=True))
    return next((each for each in candidates if each and _is_python(each, version)), None)


def _is_python(candidate: str, version: str) -> bool:
    program = "import ensurepip, sys; print('.'.join(map(str, sys.version_info[:2])))"
    try:
        done = subprocess.run([candidate, "-I", "-c", program], capture_output=True, text=True, check=False)
    except OSError:
        return False
    return done.stdout.strip() == version


class NoWheel(Exception):
    """A dependency has no wheel for this Python."""


@dataclasses.dataclass(frozen=True)
class Installation:
    """An environment with some of our packages, and a user with an empty home who runs their programs in ``folder``."""

    directory: Path

    @property
    def python(self) -> Path:
        return self.directory / "venv" / "bin" / "python"

    @property
    def folder(self) -> Path:
        return self.directory / "work"

    @property
    def environment(self) -> Mapping[str, str]:
        """What a login shell would have. The caches and the network of uv are those of this machine."""
        passed = ("UV_", "SSL_", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")
        own = {name: value for name, value in os.environ.items() if name.upper().startswith(passed)}
        path = os.pathsep.join([str(self.python.parent), os.defpath])
        home = str(self.directory / "home")
        return {**own, "PATH": path, "HOME": home, "LANG": "C.UTF-8", "UV_CACHE_DIR": _uv_cache()}

    def run(self, *command: str, status: int = 0) -> subprocess.CompletedProcess[str]:
        """Run a program to its end; an ``AssertionError`` with its output if its exit status is another."""
        done = subprocess.run(
            [self._find(command[0]), *command[1:]],
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == status, f"{command} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    def start(self, *command: str) -> subprocess.Popen[str]:
        """Start a program whose output is read later."""
        return subprocess.Popen(
            [self._find(command[0]), *command[1:]],
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def _find(self, program: str) -> str:
        found = shutil.which(program, path=self.environment["PATH"])
        assert found is not None, program
        return found

    def processes(self) -> Iterator[str]:
        """The command lines of this user's processes."""
        for process in psutil.process_iter():
            try:
                if process.environ().get("HOME") == self.environment["HOME"]:
                    yield " ".join(process.cmdline())
            except psutil.Error:
                continue


def install(directory: Path, wheels: Path, *requirements: str, python: str = sys.executable) -> Installation:
    """Install requirements into a new environment below ``directory``, from wheels only.

    :raises NoWheel: if a dependency has none for this Python.
    """
    made = Installation(directory)
    for each in (directory / "home", made.folder):
        each.mkdir(parents=True)
    command = [uv.find_uv_bin(), "venv", "--quiet", "--python", python, str(directory / "venv")]
    subprocess.run(command, check=True, capture_output=True, text=True, cwd=directory)
    options = ["--quiet", "--only-binary", ":all:", "--find-links", str(wheels), "-c", str(wheels / "constraints.txt")]
    command = [uv.find_uv_bin(), "pip", "install", "--python", str(made.python), *options, *requirements]
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=directory)
    if done.returncode and ("no usable wheels" in done.stderr or "no wheels" in done.stderr):
        raise NoWheel(done.stderr)
    assert done.returncode == 0, done.stderr
    return made


def _uv_cache() -> str:
    command = [uv.find_uv_bin(), "cache", "dir"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
