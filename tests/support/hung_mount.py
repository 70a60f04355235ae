"""A file system that hangs: of FUSE, with a server that never answers, as an NFS server that is gone."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

_MS_NOSUID, _MS_NODEV, _MNT_DETACH = 2, 4, 2


class HungMount:
    """A directory whose look-up holds each thread, until it is killed or the server is gone (:meth:`fail`)."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._server = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
        options = f"fd={self._server},rootmode=40755,user_id={os.geteuid()},group_id={os.getegid()},allow_other"
        place = os.fsencode(directory)
        if self._libc.mount(b"hung", place, b"fuse", _MS_NOSUID | _MS_NODEV, options.encode()):
            os.close(self._server)
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(directory))

    def fail(self) -> None:
        """The server is gone: what hangs fails."""
        if self._server >= 0:
            os.close(self._server)
            self._server = -1

    def close(self) -> None:
        """Unmount it."""
        self.fail()
        self._libc.umount2(os.fsencode(self.directory), _MNT_DETACH)


@contextlib.contextmanager
def hung_mount(directory: Path) -> Iterator[HungMount]:
    """A file system that hangs; skips the test where none can be mounted."""
    try:
        mount = HungMount(directory)
    except OSError as error:
        pytest.skip(f"no file system can be mounted: {error}")
    try:
        yield mount
    finally:
        mount.close()
