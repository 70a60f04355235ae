"""Private Unix sockets, and locks of files."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from farcall_common.errors import ConfigurationError
from farcall_common.files import make_directory

_MAX_SOCKET_PATH_BYTES: Final = 100
"""Addresses of Unix sockets end at 107 bytes on Linux, at 103 on macOS."""


def private_socket(directory: Path, name: str) -> Path:
    """The path of a Unix socket that only this user can reach: in ``directory``, or, if that path is too long for a
    socket, in a directory for all sockets of this user.

    :raises ConfigurationError: if that directory is not private.
    """
    path = directory.absolute() / name
    if len(os.fsencode(path)) <= _MAX_SOCKET_PATH_BYTES:
        return path
    identity = directory.stat()
    for base in (tempfile.gettempdir(), "/tmp"):  # noqa: S108 - checked below
        private = Path(base, f"farcall-{os.getuid()}")
        short = private / f"{identity.st_dev:x}-{identity.st_ino:x}-{name}"
        if len(os.fsencode(short)) <= _MAX_SOCKET_PATH_BYTES:
            break
    private.mkdir(mode=0o700, exist_ok=True)
    state = private.lstat()
    if state.st_uid != os.getuid() or state.st_mode & 0o077:
        raise ConfigurationError(f"{private} is not a private directory of yours.", hint="Remove it.")
    return short


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Wait until no other process holds the lock of a file, and hold it.

    The lock is a second file, because the file itself is replaced. It ends with the process that holds it.

    :raises OSError: if it cannot be created.
    """
    make_directory(path.parent)
    handle = os.open(path.with_name(f"{path.name}.lock"), os.O_RDWR | os.O_CREAT, 0o600)
    try:
        if sys.platform == "win32":
            import msvcrt

            msvcrt.locking(handle, msvcrt.LK_LOCK, 1)
        else:
            import fcntl

            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
