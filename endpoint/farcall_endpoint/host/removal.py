"""Removal of directories that tasks have written: of any depth, with any mode, and without following a link."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from typing import Final

_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def remove_tree(name: str, *, below: int | None = None) -> bool:
    """Remove a directory with all that is in it; True if nothing is left of it. Raises nothing.

    :param below: descriptor of the directory that ``name`` is in; None: ``name`` is a path.
    """
    # The quick way first. It fails for a directory that its owner may not enter, and at a depth of a thousand.
    with contextlib.suppress(OSError, RecursionError):
        shutil.rmtree(name, ignore_errors=True, dir_fd=below)
    with contextlib.suppress(OSError):
        make_accessible(name, below)
        descriptor = os.open(name, _DIRECTORY, dir_fd=below)
        try:
            _empty(descriptor)
        finally:
            os.close(descriptor)
        os.rmdir(name, dir_fd=below)
    try:
        os.stat(name, dir_fd=below, follow_symlinks=False)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return False


def _empty(directory: int) -> None:
    """Remove what is in a directory. What is deeper is moved up first, so that nothing is deep."""
    number = 0
    while names := os.listdir(directory):
        has_removed = False
        for name in names:
            if _unlink(name, directory):
                has_removed = True
                continue
            with contextlib.suppress(OSError):
                make_accessible(name, directory)
                inner = os.open(name, _DIRECTORY, dir_fd=directory)
                try:
                    for each in os.listdir(inner):  # noqa: PTH208
                        if not _unlink(each, inner):
                            make_accessible(each, inner)  # its entry ".." changes, too
                            number += 1
                            os.rename(each, f".moved-{number}", src_dir_fd=inner, dst_dir_fd=directory)
                finally:
                    os.close(inner)
                os.rmdir(name, dir_fd=directory)
                has_removed = True
        if not has_removed:
            return


def _unlink(name: str, directory: int) -> bool:
    """Remove what is no directory; False if it is one, or cannot be removed."""
    try:
        os.unlink(name, dir_fd=directory)
    except OSError:
        return False
    return True


def make_accessible(name: str, below: int | None) -> None:
    """Let this user enter and change a directory, whatever mode a task has given it."""
    descriptor = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=below)
    try:
        # By the descriptor: a name could lead elsewhere by now.
        os.chmod(f"/proc/self/fd/{descriptor}", stat.S_IRWXU)  # noqa: PTH101
    finally:
        os.close(descriptor)
