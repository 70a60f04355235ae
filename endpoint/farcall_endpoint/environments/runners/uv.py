"""Packages that uv installs on a node: the runner of environments of type ``uv``, and the program that installs.

An environment is a virtual environment of the endpoint's own Python below the cache. Submitters share it, since it
depends on nothing but the requirements. So nothing of a submitter runs while it is made: uv installs wheels, which are
unpacked, and byte code is compiled without importing anything. Where packages without a wheel are allowed, building
them runs their code: then uv has a cache of its own, and bubblewrap or Landlock keep it off everything else.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import hashlib
import json
import os
import platform
import re
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import uv

from farcall_common.environments import UV, Environment, requirement_problem
from farcall_endpoint.environments.cache import locked
from farcall_endpoint.environments.runners.base import ImagePreparation, Start
from farcall_endpoint.environments.runners.prefixes import PrefixRunner
from farcall_endpoint.host.isolation import bubblewrap, landlock
from farcall_endpoint.host.isolation.confinement import confined_command
from farcall_endpoint.host.isolation.environment import for_submitter
from farcall_endpoint.host.isolation.keyring import join_new_session
from farcall_endpoint.host.isolation.paths import readable_paths
from farcall_endpoint.host.isolation.trial import problem

_MAX_WHAT: Final = 100
_PACKAGES: Final = "uv-packages"
_finding: Final = threading.Lock()
"""uv's own cache of unpacked wheels, from which environments are hard links."""

_SETTINGS: Final = "pyvenv.cfg"
_INTERPRETERS: Final = re.compile(r"python|pybuilddir", re.I)
"""Files beside a Python that it reads before all others."""

_COMMON: Final = ("--quiet", "--no-config", "--no-progress", "--color", "never", "--no-python-downloads")
_NETWORK: Final = ("UV_*", "*_proxy", "*_PROXY")
"""Variables that uv needs to reach an index, where builds run code that could read them."""
_OF_FILES: Final = (
    "UV_FIND_LINKS",
    "UV_CONSTRAINT",
    "UV_OVERRIDE",
    "UV_BUILD_CONSTRAINT",
    "SSL_CERT_FILE",
    "SSL_CERT_DIR",
)
"""Variables of the owner's with paths that uv reads."""
_SECRET: Final = re.compile(r"PASSWORD|TOKEN|USERNAME|KEY")
_DEATH_SIGNAL: Final = 1
"""PR_SET_PDEATHSIG."""


def uv_program() -> str:
    """Return the path of uv. One thread at a time looks for it: Python fills its table of directories without a lock.

    :raises FileNotFoundError: if uv's package is there, and its program is not.
    """
    with _finding:
        return uv.find_uv_bin()


class UvRunner:
    """Environments that uv installs; a worker is the Python of its virtual environment.

    :param source_builds: whether packages without a wheel may be built.
    :param index_url: a URL, or the absolute path of a directory with wheels; empty: uv's own choice.
    :param confine: whether uv is kept off everything but the cache, where the node can do that. Where it cannot,
        nothing is built.
    :param readable: what uv may read then, besides the index; empty: the system and Python.
    """

    type: Final = UV
    worker_target: Final = PrefixRunner.worker_target

    def __init__(
        self, *, source_builds: bool = False, index_url: str = "", confine: bool = True, readable: Sequence[str] = ()
    ) -> None:
        self._source_builds = source_builds
        self._index_url = index_url
        self._confine = confine
        self._readable = tuple(readable)
        self._prefix = PrefixRunner("venv")

    def missing(self) -> str:
        """Why uv does not work on this node, after a try; empty if it works."""
        try:
            reason = problem([uv_program(), "--version"])
        except FileNotFoundError as error:  # the package is there, and its program is not
            reason = str(error)
        return f"uv: {reason}" if reason else ""

    def prepare(self, environment: Environment, *, cache: Path) -> ImagePreparation:
        """The command that installs, below ``cache``."""
        image = cache / f"uv-{self.digest(environment)}"
        options = ["--index", self._index_url] if self._index_url else []
        options += ["--source-builds"] if self._source_builds else []
        options += [*(["--confine"] if self._confine else []), *(f"--readable={path}" for path in self._readable)]
        what = f"uv is installing {' '.join(environment.requirements)}"
        return ImagePreparation(
            image=str(image),
            commands=((sys.executable, "-P", "-m", __name__, str(image), *options, "--", *environment.requirements),),
            what=what if len(what) <= _MAX_WHAT else f"{what[:_MAX_WHAT]}...",
        )

    def digest(self, environment: Environment) -> str:
        """32 hexadecimal digits, equal for what one virtual environment serves. Versions are resolved once: until it is
        deleted from the cache, an environment stays as it was installed first."""
        python = (platform.python_version(), platform.machine(), sys.base_prefix)
        facts = [sorted(set(environment.requirements)), python, self._index_url, self._source_builds]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]

    def command(self, start: Start) -> list[str]:
        """Return the command for a virtual environment: uv has installed one."""
        return self._prefix.command(start)

    def stop(self, start: Start) -> list[str] | None:
        """Nothing is left when the process tree was killed."""
        return self._prefix.stop(start)


# -- installation ------------------------------------------------------------------------------------------------------


class Refused(Exception):
    """Nothing was installed, for a reason that the submitter or the owner can change."""


def install(
    image: Path,
    requirements: Sequence[str],
    *,
    index: str = "",
    source_builds: bool = False,
    confine: bool = True,
    readable: Sequence[str] = (),
) -> int:
    """Make the virtual environment ``image``, completely or not at all. Others that make it at the same time wait.

    Lock files are those of :class:`farcall_endpoint.environments.cache.Cache`, which removes uv's own packages,
    too, when they are used least recently.

    :returns: the exit code of uv, which has printed why; 0 if the environment is there.
    :raises Refused: if it may not be made.
    :raises OSError: if the disk is full, for example.
    """
    if problems := list(filter(None, map(requirement_problem, requirements))):
        raise Refused("\n".join(problems))
    cache = image.parent
    cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = locked(cache / f".{image.name}.lock", fcntl.LOCK_EX, removes=True)
    with lock, locked(cache / f".{_PACKAGES}.use", fcntl.LOCK_SH):
        if image.exists():
            return 0
        for left in cache.glob(f"{image.name}.part-*"):
            shutil.rmtree(left, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix=f"{image.name}.part-", dir=cache) as folder:
            partial = Path(folder)
            packages = partial / "packages" if source_builds else cache / _PACKAGES
            sandbox = _Sandbox(partial, packages, confine=confine, readable=readable, index=index, builds=source_builds)
            make, add = _commands(partial / "venv", packages, requirements, index, source_builds)
            if code := sandbox.run(make):
                return code
            interpreter = _Interpreter(partial / "venv")
            if code := sandbox.run(add):
                return code
            sandbox.run(_compilation(partial / "venv", image))  # what cannot be compiled is compiled when it is used
            with tempfile.TemporaryDirectory(prefix=f"{image.name}.part-", dir=cache) as checked:
                # What a build has left running may write below the first directory only.
                venv = (partial / "venv").rename(Path(checked) / "venv")
                interpreter.restore(venv)
                venv.rename(image)
    return 0


class _Interpreter:
    """Files with which a new virtual environment runs the endpoint's own Python, which starts before it is confined.

    Packages may write these files, too: a wheel with another ``pyvenv.cfg``, or with ``bin/python3._pth``, would
    replace the standard library.
    """

    def __init__(self, venv: Path) -> None:
        self._settings = (venv / _SETTINGS).read_bytes()
        self._links = {each.name: each.readlink() for each in (venv / "bin").iterdir() if each.is_symlink()}

    def restore(self, venv: Path) -> None:
        """Undo what packages have changed of it.

        :raises Refused: if the directories are not those that uv has made.
        """
        programs = venv / "bin"
        if not all(stat.S_ISDIR(each.lstat().st_mode) for each in (venv, programs)):
            raise Refused("The packages replace directories of their environment.")
        for each in programs.iterdir():
            if each.name in self._links or _INTERPRETERS.match(each.name):
                _remove(each)
        for name, leads_to in self._links.items():
            (programs / name).symlink_to(leads_to)
        _remove(venv / _SETTINGS)  # it may be a link, or a file that another process has open
        (venv / _SETTINGS).write_bytes(self._settings)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _commands(
    venv: Path, packages: Path, requirements: Sequence[str], index: str, source_builds: bool
) -> list[list[str]]:
    """The commands that make a virtual environment and install packages into it."""
    program = uv_program()
    common = [*_COMMON, "--cache-dir", str(packages)]
    source = index_options(index)
    wheels = [] if source_builds else ["--only-binary", ":all:"]
    # Relocatable: it is renamed when it is complete.
    make = [program, "venv", *common, "--no-project", "--relocatable", "--python", sys.executable, str(venv)]
    add = [program, "pip", "install", *common, "--python", f"{venv}/bin/python", *source, *wheels, "--", *requirements]
    return [make, add]


def index_options(index: str) -> list[str]:
    """Options of uv for an index: a URL, the absolute path of a directory with wheels, or empty for uv's own choice."""
    if index.startswith("/"):
        return ["--no-index", "--find-links", index]
    return ["--default-index", index] if index else []


def index_command(index: str) -> list[str]:
    """A command that reads requirements from its input, and prints why uv does not find them. It keeps nothing.

    :raises OSError: if there is no uv.
    """
    look = [
        uv_program(),
        "pip",
        "compile",
        *_COMMON,
        "--no-cache",
        "--no-header",
        "--no-annotate",
        *index_options(index),
    ]
    return [*look, "--python", sys.executable, "--output-file", os.devnull, "--no-deps", "-"]


def _compilation(venv: Path, image: Path) -> list[str]:
    """The command that compiles byte code, for tasks that may only read it. Without ``site``: a ``.pth`` file of a
    package would run its code. Tests of packages, which are often more than half of them, are left out."""
    options = ["-qq", "-x", "site-packages/.*/tests/", "-s", str(venv), "-p", str(image)]
    return [sys.executable, "-I", "-S", "-m", "compileall", *options, str(venv / "lib")]


class _Sandbox:
    """Runs commands that may read the system and Python, and write only what they install.

    :param confine: whether they must be confined when they run code of packages (``builds``).
    :raises Refused: if that is not possible here.
    """

    def __init__(
        self, partial: Path, packages: Path, *, confine: bool, readable: Sequence[str], index: str, builds: bool
    ) -> None:
        self._partial = partial
        self._writable = [str(partial)] if builds else [str(partial.parent)]  # one mount, for hard links
        self._environment = _variables(os.environ, builds=builds) | {"HOME": str(partial), "TMPDIR": str(partial)}
        reasons = (bubblewrap.missing(), landlock.missing_alone()) if confine else ("", "")
        self._has_bubblewrap = confine and not reasons[0]
        self._has_landlock = confine and not self._has_bubblewrap and not reasons[1]
        if confine and builds and all(reasons):
            raise Refused(
                f"Packages are not built here, since nothing can confine their code ({'; '.join(reasons)}). "
                "Fix: install bubblewrap on the nodes, or set source_builds: false."
            )
        self._is_apart = confine
        packages.mkdir(exist_ok=True)
        self._readable: list[str] = []
        if confine:
            # The endpoint's own files lie around the cache, or the caller has left them out.
            named = re.split(r"[\s,]+", " ".join(os.environ.get(name, "") for name in _OF_FILES))
            chosen = [uv_program(), *readable, *(each for each in (index, *named) if each.startswith("/"))]
            self._readable = readable_paths(
                chosen, private=[partial.parent], home=Path(os.environ.get("HOME", "/")), environ={}
            )

    def run(self, command: Sequence[str]) -> int:
        """Run a command to its end; its exit code."""
        if self._has_bubblewrap:
            command = [
                *bubblewrap.prefix(readable=self._readable, writable=self._writable, directory=self._partial),
                *command,
            ]
        elif self._has_landlock:
            command = confined_command(command, readable=self._readable, writable=self._writable)
        return subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr,
            env=self._environment,
            cwd=self._partial,
            check=False,
            preexec_fn=self._confinement(os.getpid()),  # safe: this program has one thread
        ).returncode

    def _confinement(self, parent: int) -> Callable[[], None]:
        libc = ctypes.CDLL(None, use_errno=True)

        def confine() -> None:
            libc.prctl(_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != parent:
                os._exit(1)
            if self._is_apart:
                join_new_session()

        return confine


def _variables(environ: Mapping[str, str], *, builds: bool) -> dict[str, str]:
    """The environment of uv. Code of packages gets no password."""
    if not builds:
        return {name: value for name, value in environ.items() if name not in ("VIRTUAL_ENV", "CONDA_PREFIX")}
    return {
        name: value
        for name, value in for_submitter(environ, passed=_NETWORK).items()
        if not (_SECRET.search(name) or "@" in value or name in ("VIRTUAL_ENV", "CONDA_PREFIX"))
    }


def main() -> None:
    """Install an environment; errors are those of uv, on standard error."""
    parser = argparse.ArgumentParser()
    parser.add_argument("image", type=Path)
    parser.add_argument("--index", default="")
    parser.add_argument("--source-builds", action="store_true")
    parser.add_argument("--confine", action="store_true")
    parser.add_argument("--readable", action="append", default=[])
    parser.add_argument("requirements", nargs="+")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # it removes what is not complete
    try:
        code = install(
            options.image,
            options.requirements,
            index=options.index,
            source_builds=options.source_builds,
            confine=options.confine,
            readable=options.readable,
        )
    except (Refused, OSError) as error:
        sys.exit(str(error))
    sys.exit(code)


if __name__ == "__main__":
    main()
