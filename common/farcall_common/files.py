"""Atomic file writes: readers find the old file or the whole new one. Standard library only, cheap to import."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

_logger = logging.getLogger(__name__)
_warned: set[Path] = set()


def write_whole(path: Path, data: bytes, *, mode: int = 0o666, sync: bool = False) -> None:
    """Write a file as a whole or not at all; see :func:`whole_file`.

    :raises OSError: if that is not possible; then the old file is unchanged, and there is no draft.
    """
    with whole_file(path, mode=mode, sync=sync) as file:
        file.write(data)


@contextlib.contextmanager
def whole_file(path: Path, *, mode: int = 0o666, sync: bool = False) -> Iterator[BinaryIO]:
    """A draft in the same directory, which replaces a file once all of it is written; if that fails, it is removed.

    :param mode: permissions of the file; the umask is taken away from them, as :func:`open` does.
    :param sync: whether it survives a crash of the machine when this returns.
    :raises OSError: if that is not possible.
    """
    draft = path.with_name(f".{path.name}-{os.urandom(8).hex()}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            if sync:
                file.flush()
                os.fsync(file.fileno())
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    if sync:
        directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(directory)  # the name
        finally:
            os.close(directory)


def make_directory(path: Path, *, mode: int = 0o755) -> None:
    """Make a directory if it is missing, and the missing ones above it, in which no group can write whatever the umask
    is: with ``mkdir(parents=True)`` the mode counts for the last one only.

    :raises OSError: if that is not possible.
    """
    for each in (*reversed(path.parents), path):
        if not each.is_dir():
            each.mkdir(mode=mode if each is path else 0o755, exist_ok=True)


def write_private(path: Path, data: bytes) -> None:
    """:func:`write_whole` with mode 0600, in a directory that is made if it is missing.

    :raises OSError: if that is not possible.
    """
    make_directory(path.parent)
    write_whole(path, data, mode=0o600)


def keep_latest(paths: Iterable[Path], most: int) -> None:
    """Remove all files but so many, the oldest first.

    :raises OSError: if one cannot be looked at or removed.
    """
    by_age = sorted(paths, key=lambda path: path.stat().st_mtime)
    for path in by_age[: max(0, len(by_age) - most)]:
        path.unlink(missing_ok=True)


def warn_if_shared(path: Path) -> None:
    """Log a warning, once, if others than the owner have rights to a file with a secret."""
    if os.name != "posix" or path in _warned:
        return
    mode = path.stat().st_mode & 0o777
    if mode & 0o077:
        _warned.add(path)
        _logger.warning(
            "%s holds a secret and has the mode %o: other users may have access. Run `chmod 600 %s`.", path, mode, path
        )
