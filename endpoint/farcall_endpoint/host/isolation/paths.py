"""Paths: what tasks of other submitters than the owner may reach of a node."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

_SYSTEM: Final = (
    *("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc", "/opt", "/sys", "/proc", "/nix", "/snap"),
    *("/run/systemd/resolve", "/run/resolvconf", "/var/lib/sss/pipes", "/run/nscd"),  # names of hosts and users
    *("/apps", "/sw", "/software", "/cvmfs", "/spack", "/modules"),
)
"""Directories of a system, and of the packages that a site offers."""
SHARED_MEMORY: Final = "/dev/shm"  # noqa: S108 - no file is made here
"""The memory file system of a node."""
MEMORY_PREFIX: Final = "farcall-memory-"
"""Prefix of the names of directories in :data:`SHARED_MEMORY`, one directory for each agent."""
TEMPORARY_PREFIX: Final = "farcall-temporary-"
"""Prefix of the names of directories with the temporary files of tasks, one directory for each manager."""
DEVICES: Final = (
    *("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom"),
    *("/dev/dri", "/dev/kfd", "/dev/infiniband", "/dev/nvidia-caps", "/dev/nvidiactl", "/dev/nvidia-uvm"),
    *("/dev/nvidia-uvm-tools", *(f"/dev/nvidia{number}" for number in range(16))),
)


def readable_paths(
    chosen: Iterable[str], *, private: Collection[Path], home: Path, environ: Mapping[str, str]
) -> list[str]:
    """Return the existing paths that tasks may read besides their own directories, as written and without links.

    :param chosen: paths that the owner chose; they are not checked against ``private`` and ``home``.
    :param private: directories in which nothing is readable.
    :param home: the owner's home directory, which is not readable itself; directories of Python in it are.
    :param environ: environment of the worker; the directories in its search paths are readable.
    """
    hidden = [path.resolve() for path in private]
    found: list[Path] = []
    for path in map(_existing, [*_SYSTEM, *_python(), *_search_paths(environ)]):
        if path is None:
            continue
        target = path.resolve()
        opens = any(target in (each, *each.parents) for each in (*hidden, home.resolve()))
        if not opens and not any(each in target.parents for each in hidden):
            found += [path, target]
    for path in map(_existing, chosen):
        found += [] if path is None else [path, path.resolve()]
    return list(dict.fromkeys(map(str, found)))


def _python() -> Iterator[str]:
    """Directories of this interpreter and of the modules that it can import."""
    yield from (sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix)
    yield from sysconfig.get_paths().values()
    yield from filter(None, sys.path)


def _search_paths(environ: Mapping[str, str]) -> Iterator[str]:
    for name in ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "MODULEPATH", "CONDA_PREFIX", "VIRTUAL_ENV"):
        yield from filter(None, environ.get(name, "").split(os.pathsep))


def _existing(path: str) -> Path | None:
    """An absolute path that exists."""
    try:
        found = Path(path).expanduser()
    except RuntimeError:  # "~", and a user without a home directory
        return None
    if not found.is_absolute() or not os.path.exists(found):  # noqa: PTH110 - False where the owner may not look
        return None
    return found.resolve() if ".." in found.parts else found
