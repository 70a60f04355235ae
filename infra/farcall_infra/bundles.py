"""Code bundles: installed packages of ours with their locked dependencies, built by uv, without docker.

A bundle is a directory that Python can run from when it is on the path: the wheels that a file of ``requirements/``
names, for the platform it will run on, plus the files of our packages as they are installed here, from a clone or from
wheels. Its asset hash is a hash of its contents, so that byte code which is added later is deployed. In templates
without bundles it is a hash of the inputs.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

import uv

from farcall_common.errors import ConfigurationError

_HERE: Final = Path(__file__).resolve().parent
#: Programs in the cloud that belong to no part.
RUNTIME: Final = _HERE / "runtime"


@dataclasses.dataclass(frozen=True)
class WheelPlatform:
    """Which wheels go into a bundle; without ``triple`` those for the Python that runs this program."""

    name: str
    python_version: str
    triple: str | None = None

    @property
    def processor(self) -> str:
        """The processor in the template, as Lambda spells it. With this machine's wheels its value has no effect."""
        return "x86_64" if self.triple is not None and self.triple.startswith("x86_64") else "arm64"

    @property
    def pip_arguments(self) -> tuple[str, ...]:
        if self.triple is None:
            return ("--python", sys.executable)
        return ("--python-version", self.python_version, "--python-platform", self.triple)


# Lambda's and the forwarder's processors are the same, and so is their Python.
ARM64: Final = WheelPlatform("arm64", python_version="3.14", triple="aarch64-manylinux_2_28")
X86_64: Final = WheelPlatform("x86_64", python_version="3.14", triple="x86_64-manylinux_2_28")
HOST: Final = WheelPlatform(
    f"{sys.platform}-{sys.implementation.cache_tag}", python_version=f"{sys.version_info[0]}.{sys.version_info[1]}"
)


@dataclasses.dataclass(frozen=True)
class Bundle:
    """The contents of one bundle.

    ``requirements`` is a file of locked requirements with their hashes, ``packages`` names our packages,
    ``extra_files`` are files of ``runtime/``, and ``texts`` are files of one deployment by name and contents.
    If botocore is installed, only its data for ``aws_services`` is kept.
    """

    name: str
    requirements: Path
    packages: tuple[str, ...]
    extra_files: tuple[str, ...] = ()
    texts: tuple[tuple[str, str], ...] = ()
    aws_services: tuple[str, ...] = ()

    def digest(self, platform: WheelPlatform) -> str:
        """A hash of everything that the bundle is made of."""
        digest = hashlib.sha256(f"{platform}\n{self.requirements.read_text()}\n{self.aws_services}".encode())
        for path, relative in self._files():
            digest.update(f"\n{relative}\n".encode())
            digest.update(path.read_bytes())
        for name, text in self.texts:
            digest.update(f"\n{name}\n{text}".encode())
        return digest.hexdigest()

    def build(self, directory: Path, *, platform: WheelPlatform) -> None:
        """Install the bundle into ``directory``.

        :raises ConfigurationError: if uv cannot install it (no wheel for the platform, no network and no cache), or one
            of its texts is empty.
        """
        for name, text in self.texts:
            if not text:
                raise ConfigurationError(
                    f"the contents of {name} are unknown",
                    hint="Pass -c database.authorities=FILE.",
                )
        _uv(
            "pip", "install", "--quiet", "--target", str(directory.absolute()), *platform.pip_arguments,
            "--only-binary", ":all:", "--no-deps", "--require-hashes", "--link-mode", "copy",
            "-r", str(self.requirements),
        )  # fmt: skip
        shutil.rmtree(directory / "bin", ignore_errors=True)  # console scripts; they name this machine's interpreter
        for path, relative in self._files():
            (directory / relative).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, directory / relative)
        for name, text in self.texts:
            (directory / name).write_text(text, encoding="utf-8")
        self._strip(directory)
        python = sys.executable if platform.triple is None else find_python(platform.python_version)
        if python is None:
            sys.stderr.write(
                f"The bundle {self.name} has no byte code, because Python {platform.python_version} is not installed."
                " Its programs take twice as long to start.\n"
            )
        else:
            _compile(directory, python)

    def _strip(self, directory: Path) -> None:
        """Remove files that no program reads: sources of extension modules, tests of packages, and the data of AWS
        services that are not called."""
        # Not "*.pyi": packages that import lazily (globus_sdk) read theirs.
        for pattern in ("**/*.pyx", "**/*.pxd", "**/*.[ch]", "*.dist-info/RECORD"):
            for path in directory.glob(pattern):
                path.unlink()
        for path in directory.glob("*/tests"):
            shutil.rmtree(path)
        for path in directory.glob("botocore/data/*/"):
            if path.name not in self.aws_services:
                shutil.rmtree(path)

    def _files(self) -> list[tuple[Path, Path]]:
        """Our own files and their paths in the bundle, in a stable order."""
        files = [(RUNTIME / name, Path(name)) for name in self.extra_files]
        for package in self.packages:
            root = package_directory(package)
            files += [(path, path.relative_to(root.parent)) for path in package_files(root)]
        return files


def package_directory(package: str) -> Path:
    """Find the directory of one of our packages, without importing it."""
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def package_files(directory: Path) -> list[Path]:
    """The files of a package without byte code, in a stable order."""
    return [path for path in sorted(directory.rglob("*")) if path.is_file() and "__pycache__" not in path.parts]


# A test compares the services with the calls in the sources.
LAMBDAS: Final = Bundle(
    "lambdas",
    requirements=_HERE / "requirements" / "lambdas.txt",
    packages=("farcall_lambdas", "farcall_common"),
    extra_files=("migration_resource.py",),
    aws_services=("cloudwatch", "ecs", "elasticache", "lambda", "s3", "secretsmanager"),
)
FORWARDER: Final = Bundle(
    "forwarder",
    requirements=_HERE / "requirements" / "forwarder.txt",
    packages=("farcall_forwarder", "farcall_common"),
    aws_services=("s3", "secretsmanager"),
)


def content_digest(directory: Path) -> str:
    """The SHA-256 of a built bundle's contents, as ``runtime/fargate_boot.py`` makes it of the archive."""
    files = {str(path.relative_to(directory)): path for path in directory.rglob("*") if path.is_file()}
    lines = [f"{hashlib.sha256(files[name].read_bytes()).hexdigest()}  {name}\n" for name in sorted(files)]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def find_python(version: str) -> str | None:
    """The interpreter of a CPython of that version, None if there is none. uv finds it, and downloads one unless
    ``UV_PYTHON_DOWNLOADS`` forbids that."""
    try:
        program = "import sys; print(sys.executable)"
        return _uv("run", "--no-project", "--python", f"cpython@{version}", "python", "-c", program).strip()
    except ConfigurationError:
        return None


def _compile(directory: Path, python: str) -> None:
    """Add byte code for this Python; it is the same on every processor. Programs then start in half the time. Python
    does not compare it with the sources, because a bundle never changes. Files that are not Python are skipped."""
    # Without the directory's path, the same sources have the same byte code everywhere.
    command = [
        python, "-I", "-m", "compileall", "-qq", "--invalidation-mode", "unchecked-hash", "-s", str(directory),
        str(directory),
    ]  # fmt: skip
    subprocess.run(command, check=False)


def _uv(*arguments: str) -> str:
    """Run uv, without the settings of the current directory, and return what it printed."""
    done = subprocess.run([uv.find_uv_bin(), *arguments], cwd=_HERE, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ConfigurationError(f"uv {' '.join(arguments[:2])} failed: {done.stderr.strip()}")
    return done.stdout
