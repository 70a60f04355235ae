"""Landlock: a worker gives up, for itself and all its descendants, what its submitter's tasks must not reach.

The kernel refuses everything that no rule allows (https://docs.kernel.org/userspace-api/landlock.html). A task reads
system directories, Python and its packages, and what the configuration adds; it writes to its own directories. Other
processes than its own descendants it cannot trace or read in ``/proc``, nor, from Linux 6.12 on, signal.
"""

from __future__ import annotations

import contextlib
import os
import sys
import sysconfig
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

from landlockpy import AccessFS, AccessNet, Ruleset, Scope, abi_version

#: The first version of the interface that refuses to truncate files; from 6 on (Linux 6.12) it also refuses signals to
#: processes outside, and abstract sockets.
_LEAST_ABI: Final = 3

_SYSTEM: Final = (
    *("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc", "/opt", "/sys", "/proc", "/nix", "/snap"),
    *("/run/systemd/resolve", "/run/resolvconf", "/var/lib/sss/pipes", "/run/nscd"),  # names of hosts and users
    *("/apps", "/sw", "/software", "/cvmfs", "/spack", "/modules"),
)
"""Directories of a system, and of the packages that a site offers."""
_DEVICES: Final = (
    *("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom"),
    *("/dev/dri", "/dev/kfd", "/dev/infiniband", "/dev/nvidia-caps", "/dev/nvidiactl", "/dev/nvidia-uvm"),
    *("/dev/nvidia-uvm-tools", *(f"/dev/nvidia{number}" for number in range(16))),
)
_SHARED_MEMORY: Final = "/dev/shm"  # noqa: S108 - by its name only
_READ: Final = AccessFS.READ_FILE | AccessFS.READ_DIR | AccessFS.EXECUTE
_USE: Final = AccessFS.READ_FILE | AccessFS.WRITE_FILE | AccessFS.READ_DIR | AccessFS.IOCTL_DEV | AccessFS.TRUNCATE
_ALL: Final = AccessFS(sum(AccessFS))
_BY_NAME: Final = _ALL & ~(AccessFS.READ_DIR | AccessFS.EXECUTE)
"""For shared memory: a name can be opened by who knows it, and the names cannot be listed."""


_FILE: Final = AccessFS.READ_FILE | AccessFS.WRITE_FILE | AccessFS.EXECUTE | AccessFS.TRUNCATE | AccessFS.IOCTL_DEV
"""The rights that exist for a file."""


def is_available() -> bool:
    """Whether the kernel of this node has Landlock switched on, in a version that protects files."""
    return abi_version() >= _LEAST_ABI


def readable_paths(
    chosen: Iterable[str], *, private: Collection[Path], home: Path, environ: Mapping[str, str]
) -> list[str]:
    """What tasks of a submitter may read besides their own directories: existing paths, without links.

    :param chosen: by the owner, and not questioned.
    :param private: directories in which nothing is readable.
    :param home: the owner's; in it, Python's directories are.
    :param environ: of the worker; the directories in its search paths are readable.
    """
    hidden = [path.resolve() for path in private]
    found = []
    for path in map(_resolved, [*_SYSTEM, *_python(), *_search_paths(environ)]):
        if path is None or any(each == path or path in each.parents for each in (*hidden, home.resolve())):
            continue
        if not any(each in path.parents for each in hidden):
            found.append(path)
    found += [path for path in map(_resolved, chosen) if path is not None]
    return list(dict.fromkeys(map(str, found)))


def confine(*, readable: Iterable[str], writable: Iterable[str]) -> None:
    """Confine this process, which has one thread, to these paths, for good.

    :raises OSError: if the kernel refuses.
    """
    with Ruleset(handled_net=AccessNet.NONE, scoped=Scope.ABSTRACT_UNIX_SOCKET | Scope.SIGNAL) as ruleset:
        for paths, access in (
            (readable, _READ),
            (writable, _ALL),
            ((*_DEVICES, f"/proc/{os.getpid()}"), _USE),
            ((_SHARED_MEMORY,), _BY_NAME),
        ):
            for path in paths:
                with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError):
                    ruleset.allow_path(path, access if os.path.isdir(path) else access & _FILE)  # noqa: PTH112
        ruleset.restrict()


def _python() -> Iterator[str]:
    """Where this interpreter and what it imports are."""
    yield from (sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix)
    yield from sysconfig.get_paths().values()
    yield from filter(None, sys.path)


def _search_paths(environ: Mapping[str, str]) -> Iterator[str]:
    for name in ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "MODULEPATH", "CONDA_PREFIX", "VIRTUAL_ENV"):
        yield from filter(None, environ.get(name, "").split(os.pathsep))


def _resolved(path: str) -> Path | None:
    """An absolute path that exists, without links."""
    found = Path(path).expanduser()
    if not found.is_absolute():
        return None
    with contextlib.suppress(OSError):
        return found.resolve(strict=True)
    return None
