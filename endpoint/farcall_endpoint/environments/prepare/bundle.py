"""Bundle: the worker's code as a directory that is mounted read-only into an image.

An image needs nothing of ours but a Python. What the worker imports besides the standard library is a short list, which
a test holds. All of it is pure Python but msgspec: that is copied from the endpoint's own installation for a Python of
the same kind, and installed by uv for any other. There is one bundle for each kind of Python on a node.

The layout: ``bootstrap.py``, the program; ``lib``, the packages; ``run``, an empty directory for the worker's socket;
``files``, the names of all.
"""

from __future__ import annotations

import compileall
import contextlib
import hashlib
import importlib.metadata
import importlib.util
import os
import py_compile
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec
from uv import find_uv_bin

from farcall_endpoint.environments.runners.uv import index_options
from farcall_endpoint.worker import bootstrap

BOOTSTRAP: Final = "bootstrap.py"
LIBRARY: Final = "lib"
RUN: Final = "run"

MODULES: Final = (
    *("farcall_common", "farcall_common.coroutines", "farcall_common.environments", "farcall_common.errors"),
    *("farcall_common.file_arguments", "farcall_common.finite", "farcall_common.futures"),
    *("farcall_common.json_calls", "farcall_common.limits", "farcall_common.object_keys", "farcall_common.objects"),
    *("farcall_common.objects.block_files", "farcall_common.objects.connectors"),
    *("farcall_common.objects.directory", "farcall_common.objects.encoding", "farcall_common.objects.memory"),
    *("farcall_common.objects.references", "farcall_common.objects.s3", "farcall_common.objects.store"),
    *("farcall_common.objects.valkey", "farcall_common.payload", "farcall_common.payload.arrays"),
    *("farcall_common.payload.arrived_classes", "farcall_common.payload.by_value", "farcall_common.payload.code"),
    *("farcall_common.payload.data", "farcall_common.payload.dill_format", "farcall_common.payload.framing"),
    *("farcall_common.payload.functions", "farcall_common.payload.native", "farcall_common.payload.parts"),
    *("farcall_common.payload.pickler", "farcall_common.payload.pickling", "farcall_common.payload.pools"),
    *("farcall_common.payload.report", "farcall_common.payload.serializer"),
    *("farcall_common.payload.shipped_modules", "farcall_common.payload.snapshot", "farcall_common.payload.source"),
    *("farcall_common.payload.strategy", "farcall_common.plain_text", "farcall_common.progress"),
    *("farcall_common.qos", "farcall_common.retries", "farcall_common.running", "farcall_common.task_options"),
    *("farcall_endpoint", "farcall_endpoint.contracts", "farcall_endpoint.contracts.bodies"),
    *("farcall_endpoint.contracts.fork_protocol", "farcall_endpoint.contracts.manager_worker"),
    *("farcall_endpoint.contracts.outcomes", "farcall_endpoint.contracts.output", "farcall_endpoint.host"),
    *("farcall_endpoint.host.isolation", "farcall_endpoint.host.isolation.confinement"),
    *("farcall_endpoint.host.isolation.landlock", "farcall_endpoint.host.isolation.paths"),
    *("farcall_endpoint.host.isolation.process", "farcall_endpoint.host.isolation.process_limits"),
    *("farcall_endpoint.host.isolation.seccomp", "farcall_endpoint.host.isolation.system_calls"),
    *("farcall_endpoint.host.memory_files", "farcall_endpoint.host.process_reaper"),
    *("farcall_endpoint.host.removal", "farcall_endpoint.host.shared_memory", "farcall_endpoint.worker"),
    *("farcall_endpoint.worker.__main__", "farcall_endpoint.worker.arenas", "farcall_endpoint.worker.boot"),
    *("farcall_endpoint.worker.capture", "farcall_endpoint.worker.current_task"),
    *("farcall_endpoint.worker.directories", "farcall_endpoint.worker.edges"),
    *("farcall_endpoint.worker.environment", "farcall_endpoint.worker.files"),
    *("farcall_endpoint.worker.fork_hazards", "farcall_endpoint.worker.helper_processes"),
    *("farcall_endpoint.worker.imports", "farcall_endpoint.worker.inbox", "farcall_endpoint.worker.inputs"),
    *("farcall_endpoint.worker.mpi", "farcall_endpoint.worker.namespaces", "farcall_endpoint.worker.nested"),
    *("farcall_endpoint.worker.node_memory", "farcall_endpoint.worker.places", "farcall_endpoint.worker.runner"),
    *("farcall_endpoint.worker.settings", "farcall_endpoint.worker.template"),
    *("farcall_endpoint.worker.trusted_places", "farcall_endpoint.worker.usage", "farcall_endpoint.worker.values"),
)
"""Our own modules that a worker imports."""
PACKAGES: Final = ("cloudpickle", "dill", "landlockpy", "typing_extensions")
"""Packages in pure Python that it imports."""
COMPILED: Final = ("msgspec",)
"""Packages with compiled code."""

_FILES: Final = "files"
"""In a bundle: the names of what must be in it."""

_IGNORED: Final = shutil.ignore_patterns("__pycache__", "tests", "*.pyi", "py.typed")


class Abi(msgspec.Struct, frozen=True, kw_only=True):
    """A kind of Python, as far as compiled code depends on it.

    :param version: ``3.12``.
    :param soabi: ``cpython-312-x86_64-linux-gnu``, or ``cpython-313t-aarch64-linux-musl`` without the global lock.
    """

    version: str
    soabi: str

    @property
    def platform(self) -> str:
        """Platform, by uv's name."""
        machine = next((each for each in ("x86_64", "aarch64") if each in self.soabi), os.uname().machine)
        return f"{machine}-unknown-linux-{'musl' if 'musl' in self.soabi else 'gnu'}"


def own_abi() -> Abi:
    """ABI of the Python of this process."""
    return Abi(version=f"{sys.version_info[0]}.{sys.version_info[1]}", soabi=str(sysconfig.get_config_var("SOABI")))


def uv_command(abi: Abi, target: Path, *, index_url: str) -> list[str]:
    """Return the command that installs the compiled packages for an ABI, without running any of their code."""
    # Without the global lock there is one more ABI, which uv takes from an interpreter's name only.
    version = f"{abi.version}t" if abi.soabi.startswith(f"cpython-{abi.version.replace('.', '')}t-") else abi.version
    return [
        *(find_uv_bin(), "pip", "install", "--quiet", "--no-config"),
        *("--target", str(target), "--python-version", version, "--python-platform", abi.platform),
        *("--only-binary", ":all:", "--no-deps"),
        *index_options(index_url),
        *(f"{name}=={importlib.metadata.version(name)}" for name in COMPILED),
    ]


def fingerprint() -> str:
    """12 hexadecimal digits, equal for equal code of the worker."""
    digest = hashlib.sha256(Path(bootstrap.__file__).read_bytes())
    for name in MODULES:
        digest.update(name.encode() + _source(name).read_bytes())
    for name in (*PACKAGES, *COMPILED):
        digest.update(f"{name}=={importlib.metadata.version(name)}".encode())
    return digest.hexdigest()[:12]


def name_of(abi: Abi) -> str:
    """The name of the bundle for a kind of Python, in the cache."""
    return f"worker-{fingerprint()}-{abi.version}-{abi.soabi}"


def make_bundle(abi: Abi, cache: Path, *, run: Callable[[Sequence[str]], object], index_url: str = "") -> Path:
    """The bundle for a kind of Python, which is made if it does not exist. Several processes may do so at once; those
    that share a cache hold its lock.

    :param cache: an existing directory of this user's, which no other user can write.
    :param run: runs a command, and raises if it fails.
    :raises OSError: if the disk is full, for example.
    """
    bundle = cache / name_of(abi)
    if _is_whole(bundle):
        return bundle
    draft = Path(tempfile.mkdtemp(prefix=f"{bundle.name}.part-", dir=cache))
    removed = draft.with_name(f"{draft.name}_removed")
    try:
        library = draft / LIBRARY
        if abi == own_abi():
            _copy_packages(COMPILED, library)
        else:
            run(uv_command(abi, library, index_url=index_url))
        _copy_packages(PACKAGES, library)
        for name in MODULES:
            source = _source(name)
            at = library.joinpath(*name.split("."))
            target = at / source.name if source.name == "__init__.py" else at.with_name(source.name)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
        shutil.copyfile(bootstrap.__file__, draft / BOOTSTRAP)
        (draft / RUN).mkdir()
        if abi == own_abi():
            compileall.compile_dir(library, quiet=2, invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
        files = [path.relative_to(draft).as_posix() for path in draft.rglob("*")]
        (draft / _FILES).write_text("".join(f"{name}\n" for name in files), encoding="utf-8")
        for path in (draft, *draft.rglob("*")):  # readable for other users of a container, writable for none
            path.chmod(0o755 if path.is_dir() else 0o644)
        if not _is_whole(bundle):
            with contextlib.suppress(FileNotFoundError):  # else a cleaner of temporary files has removed a part of it
                bundle.rename(removed)
        with contextlib.suppress(OSError):  # another process was quicker
            draft.rename(bundle)
        return bundle
    except shutil.Error as error:  # with a line for each file
        raise OSError(error.args[0][0][2]) from error
    finally:
        for directory in (draft, removed):
            shutil.rmtree(directory, ignore_errors=True)


def _is_whole(bundle: Path) -> bool:
    """Whether a bundle exists with all of its files."""
    with contextlib.suppress(OSError):
        return all((bundle / name).exists() for name in (bundle / _FILES).read_text(encoding="utf-8").splitlines())
    return False


def _copy_packages(names: Sequence[str], library: Path) -> None:
    for name in names:
        source = _source(name)
        if source.name == "__init__.py":
            shutil.copytree(source.parent, library / name, ignore=_IGNORED)
        else:
            library.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, library / source.name)


def _source(name: str) -> Path:
    """The file of a module of this installation."""
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin)
