"""Files of blocks: one of each block, in a directory in the memory of a node. Tasks of a submitter write there, and
managers read there for tasks on other nodes, so no link is followed, and no name of a block leads elsewhere.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import time
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Final

DIRECTORY: Final = "blocks"
"""In that of a submitter in the memory of a node."""
DRAFT: Final = ".draft-"
_BLOCK: Final = "b-"
_KEPT_S: Final = 86_400.0
"""After so long the next writer without room, and the end of the next job, delete what was not deleted."""
_OPEN_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW
_READ: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


def file_name(name: str) -> str:
    """Of the file of a block."""
    return _BLOCK + urllib.parse.quote(name, safe="")


@contextlib.contextmanager
def opened(directory: Path) -> Iterator[int]:
    """A directory of blocks.

    :raises FileNotFoundError: if there is none.
    :raises OSError: if it is something else, such as a link.
    """
    descriptor = os.open(directory, _OPEN_DIRECTORY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def open_block(directory: int, name: str) -> int:
    """A descriptor of a block.

    :raises FileNotFoundError: if there is none.
    :raises OSError: if it is something else, such as a link.
    """
    descriptor = os.open(file_name(name), _READ, dir_fd=directory)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no block", name)
    return descriptor


def names(directory: int, prefix: str) -> Iterator[str]:
    """The names of blocks below a prefix."""
    for each in os.listdir(directory):
        name = urllib.parse.unquote(each.removeprefix(_BLOCK))
        if each.startswith(_BLOCK) and name.startswith(prefix):
            yield name


def used_bytes(directory: int) -> int:
    """Of all files together."""
    return sum(state.st_size for _, state in _files(directory))


def delete(directory: int, name: str) -> None:
    """Delete a block, if it is there."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(file_name(name), dir_fd=directory)


def delete_below(directory: int, prefix: str) -> None:
    """Delete the blocks below a prefix, and what killed programs left a day ago."""
    for name in names(directory, prefix):
        delete(directory, name)
    delete_old(directory)


def delete_old(directory: int) -> None:
    """Delete what was written a day ago."""
    before = time.time() - _KEPT_S
    for name, state in _files(directory):
        if state.st_mtime < before:
            with contextlib.suppress(OSError):  # another task has deleted it, or it is none of ours
                os.unlink(name, dir_fd=directory)


def _files(directory: int) -> Iterator[tuple[str, os.stat_result]]:
    for name in os.listdir(directory):
        with contextlib.suppress(FileNotFoundError):
            yield name, os.stat(name, dir_fd=directory, follow_symlinks=False)
