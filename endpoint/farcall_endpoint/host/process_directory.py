"""Directories that last as long as a process: it removes its own; those of processes that were killed are removed by
the next one of the same user.

The process holds a lock on its directory (``flock``), which the kernel drops at its death.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
import threading
from pathlib import Path
from typing import Final

from farcall_endpoint.host.removal import remove_tree

_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_TRIES: Final = 100


class ProcessDirectory:
    """A new directory of mode 0700, with a random name behind a prefix.

    :param parent: where it is made.
    :raises OSError: if it cannot be made.
    """

    def __init__(self, parent: Path, *, prefix: str) -> None:
        self._parent = parent
        self._prefix = prefix
        for _ in range(_TRIES):
            path = tempfile.mkdtemp(prefix=prefix, dir=parent)
            descriptor = _locked(path)
            if descriptor is None:
                continue
            # Another process may have found it before it was locked, and removed it.
            if os.fstat(descriptor).st_nlink:
                self.path = Path(path)
                self.descriptor = descriptor
                return
            os.close(descriptor)
        raise OSError(0, "it is removed again and again", f"{parent}/{prefix}*")

    def remove_leftovers(self) -> None:
        """Remove the directories of processes that were killed; in a thread, as they may be large."""
        threading.Thread(
            target=remove_leftovers, args=(self._parent,), kwargs={"prefix": self._prefix}, daemon=True
        ).start()

    def remove(self) -> None:
        """Remove it with all that is in it, if that was not done."""
        if self.descriptor < 0:
            return
        remove_tree(str(self.path))
        os.close(self.descriptor)
        self.descriptor = -1


def remove_leftovers(parent: Path, *, prefix: str) -> None:
    """Remove this user's directories of processes that have ended without removing them."""
    with contextlib.suppress(OSError):
        names = [each.name for each in os.scandir(parent) if each.name.startswith(prefix) and _is_own(each)]
        for name in names:
            path = str(parent / name)
            if (descriptor := _locked(path)) is not None:
                remove_tree(path)
                os.close(descriptor)


def _is_own(entry: os.DirEntry[str]) -> bool:
    with contextlib.suppress(OSError):
        return entry.is_dir(follow_symlinks=False) and entry.stat(follow_symlinks=False).st_uid == os.geteuid()
    return False


def _locked(path: str) -> int | None:
    """The descriptor of a directory that this process has locked; None if another one has, or there is none."""
    try:
        descriptor = os.open(path, _DIRECTORY)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor
