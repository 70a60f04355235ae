"""Landlock: a worker gives up, for itself and all its descendants, what its submitter's tasks must not reach.

The kernel refuses everything that no rule allows (https://docs.kernel.org/userspace-api/landlock.html). A task reads
system directories, Python and its packages, and what the configuration adds; it writes to its own directories. Other
processes than its own descendants it cannot trace or read in ``/proc``, nor, from Linux 6.12 on, signal.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from typing import Final

from landlockpy import AccessFS, AccessNet, Ruleset, Scope, abi_version

from farcall_endpoint.host.isolation import seccomp
from farcall_endpoint.host.isolation.paths import DEVICES, SHARED_MEMORY

_LEAST_ABI: Final = 3
"""The first version of the interface that refuses to truncate files: enough for a worker in namespaces."""
_LEAST_ALONE: Final = 6
"""The first version that refuses signals to other processes and connections to abstract sockets (Linux 6.12)."""

_READ: Final = AccessFS.READ_FILE | AccessFS.READ_DIR | AccessFS.EXECUTE
_USE: Final = AccessFS.READ_FILE | AccessFS.WRITE_FILE | AccessFS.READ_DIR | AccessFS.IOCTL_DEV | AccessFS.TRUNCATE
_ALL: Final = AccessFS(sum(AccessFS))
_BY_NAME: Final = (
    AccessFS.READ_FILE | AccessFS.WRITE_FILE | AccessFS.TRUNCATE | AccessFS.MAKE_REG | AccessFS.REMOVE_FILE
)
"""For shared memory: a file can be opened by who knows its name, and the names cannot be listed. Directories cannot be
made, moved or replaced by links: those of other submitters are there, under names that cannot be guessed."""


_FILE: Final = AccessFS.READ_FILE | AccessFS.WRITE_FILE | AccessFS.EXECUTE | AccessFS.TRUNCATE | AccessFS.IOCTL_DEV
"""The rights that exist for a file."""


def missing() -> str:
    """Why the kernel of this node cannot protect files; empty if it can."""
    return _older_than(_LEAST_ABI, "6.2")


def missing_alone() -> str:
    """Why Landlock and a filter of system calls cannot separate submitters without namespaces; empty if they can."""
    return _older_than(_LEAST_ALONE, "6.12") or seccomp.missing()


def _older_than(least: int, linux: str) -> str:
    version = abi_version()
    if version >= least:
        return ""
    return f"Landlock: kernel {os.uname().release} has version {version}, and {least} (Linux {linux}) is the least"


def confine(*, readable: Iterable[str], writable: Iterable[str]) -> None:
    """Confine this process, which has one thread, to these paths, for good.

    :raises OSError: if the kernel refuses.
    """
    with Ruleset(handled_net=AccessNet.NONE, scoped=Scope.ABSTRACT_UNIX_SOCKET | Scope.SIGNAL) as ruleset:
        for paths, access in (
            (readable, _READ),
            (writable, _ALL),
            ((*DEVICES, f"/proc/{os.getpid()}"), _USE),
            ((SHARED_MEMORY,), _BY_NAME),
        ):
            for path in paths:
                with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError):
                    ruleset.allow_path(path, access if os.path.isdir(path) else access & _FILE)  # noqa: PTH112
        ruleset.restrict()
