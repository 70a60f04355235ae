"""Code bundles: a part of the workspace with its locked dependencies, built by uv, without docker.

A bundle is a directory that Python can run from when it is on the path: the wheels that ``uv.lock`` names for that
part, for the platform it will run on, plus the sources of the workspace members. Its asset hash is a hash of exactly
these inputs, so a synth on another machine gives the same template.
"""

from __future__ import annotations

import dataclasses
import hashlib
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

import uv

from farcall_common.errors import ConfigurationError

WORKSPACE: Final = Path(__file__).resolve().parents[2]
_RUNTIME: Final = WORKSPACE / "infra" / "runtime"


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

    ``member`` is the workspace member whose locked dependencies are installed, ``sources`` are package directories
    relative to the workspace, ``extra_files`` are files of ``infra/runtime``, ``texts`` are files of one deployment by
    name and contents, and ``omitted`` names distributions that are left out, together with their own dependencies.
    If botocore is installed, only its data for ``aws_services`` is kept.
    """

    name: str
    member: str
    sources: tuple[str, ...]
    extra_files: tuple[str, ...] = ()
    texts: tuple[tuple[str, str], ...] = ()
    omitted: tuple[str, ...] = ()
    aws_services: tuple[str, ...] = ()

    def requirements(self) -> str:
        """The locked requirements with their hashes, as text for ``uv pip install -r``."""
        prunes = [argument for name in self.omitted for argument in ("--prune", name)]
        return _uv(
            "export", "--frozen", "--package", self.member, "--no-dev", "--no-emit-workspace",
            "--no-annotate", "--no-header", *prunes,
        )  # fmt: skip

    def digest(self, platform: WheelPlatform) -> str:
        """A hash of everything that the bundle is made of."""
        digest = hashlib.sha256(f"{platform}\n{self.requirements()}\n{self.aws_services}".encode())
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
                    hint="Deploy with `farcall cloud deploy`, which downloads the database's CA bundle, or"
                    " pass -c database.authorities=FILE",
                )
        requirements = self.requirements()
        _uv(
            "pip", "install", "--quiet", "--target", str(directory), *platform.pip_arguments, "--only-binary", ":all:",
            "--no-deps", "--require-hashes", "--link-mode", "copy", "-r", "-",
            stdin=requirements,
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
        files = [(_RUNTIME / name, Path(name)) for name in self.extra_files]
        for source in self.sources:
            root = WORKSPACE / source
            files += [
                (path, path.relative_to(root.parent))
                for path in sorted(root.rglob("*"))
                if path.is_file() and "__pycache__" not in path.parts
            ]
        return files


LAMBDAS: Final = Bundle(
    "lambdas",
    member="farcall-lambdas",
    sources=("lambdas/farcall_lambdas", "common/farcall_common"),
    extra_files=("migration_resource.py",),
    omitted=("boto3", "botocore"),  # Lambda's Python runtime has them
)
FORWARDER: Final = Bundle(
    "forwarder",
    member="farcall-forwarder",
    sources=("forwarder_fargate/farcall_forwarder", "common/farcall_common"),
    omitted=("alembic",),  # only the API runs migrations
    aws_services=("s3", "secretsmanager"),  # a test compares them with the calls in the sources
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


def _uv(*arguments: str, stdin: str | None = None) -> str:
    """Run uv in the workspace and return what it printed."""
    done = subprocess.run(
        [uv.find_uv_bin(), *arguments], cwd=WORKSPACE, input=stdin, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise ConfigurationError(f"uv {' '.join(arguments[:2])} failed: {done.stderr.strip()}")
    return done.stdout
