"""Files of this endpoint that tasks at other endpoints read: whether a submitter may read one, and pieces of it.

The owner's tasks read what the endpoint's user can read. Tasks of others read what is below the directories of their
submitter here, on disk and in memory, and the ``file://`` storages that the configuration opens to them. Where only
certain functions run, the owner's tasks, too, read no more than those storages: otherwise a stolen login, or the cloud
itself where functions must be signed, could read any file.

Whether a path may be read is decided before it is looked at, so that a refusal says nothing about it. Below the
directories in question no link is followed: a task may have put one there.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Final, NamedTuple

from farcall_common.file_arguments import local_path
from farcall_common.wire import FileReason
from farcall_endpoint.files.settings import Storage
from farcall_endpoint.host.tree_root import open_path
from farcall_endpoint.worker.directories import name_of, submitter_directory

_LOCAL: Final = "file"
_MISSING: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG})
_DENIED: Final = frozenset({errno.EACCES, errno.EPERM, errno.ELOOP})


class NotReadable(Exception):
    """A file is not read. ``reason``: see :class:`~farcall_common.wire.FileReason`; the text is for the log."""

    def __init__(self, reason: FileReason, text: str = "") -> None:
        super().__init__(text or reason)
        self.reason = reason


class ReadPiece(NamedTuple):
    """A piece of a file as it is now.

    :param size_bytes: of the file.
    :param version: changes with each change of the file.
    :param sha256: of the piece, in hexadecimal.
    """

    size_bytes: int
    version: str
    data: bytes
    sha256: str


class ReadableFiles:
    """Files of this endpoint that tasks at other endpoints may read.

    :param working_dir: working directory of tasks.
    :param storages: storages of the configuration.
    :param is_restricted: whether only certain functions run here.
    :param memory_of: returns the directory in memory of a submitter; None if there is none.
    """

    def __init__(
        self,
        *,
        working_dir: Path,
        storages: Sequence[Storage],
        is_restricted: bool,
        memory_of: Callable[[str], Path | None] = lambda _: None,
    ) -> None:
        self._working_dir = working_dir
        self._memory_of = memory_of
        self._storages = [each for each in storages if each.url.startswith(f"{_LOCAL}://")]
        self._is_restricted = is_restricted

    def read(self, submitter: str, path: str, *, offset_bytes: int, max_bytes: int) -> ReadPiece:
        """A piece of a file; may block for as long as its file system does.

        :param submitter: empty for the endpoint's owner.
        :raises NotReadable: if it is not read.
        """
        try:
            descriptor = self._open(submitter, path)
            try:
                return _read(descriptor, offset_bytes, max_bytes)
            finally:
                os.close(descriptor)
        except OSError as error:
            if error.errno in _MISSING:
                reason = FileReason.NOT_FOUND
            else:
                reason = FileReason.NOT_PERMITTED if error.errno in _DENIED else FileReason.NOT_READ
            raise NotReadable(reason, error.strerror or "") from error
        except ValueError as error:  # the file system of this process has no such names
            raise NotReadable(FileReason.NOT_FOUND, str(error)) from error

    def _open(self, submitter: str, path: str) -> int:
        wanted = PurePosixPath(path)
        if not wanted.is_absolute() or ".." in wanted.parts or "\0" in path:
            raise NotReadable(FileReason.NOT_PERMITTED)
        if not submitter and not self._is_restricted:
            found = os.open(wanted, os.O_PATH | os.O_CLOEXEC)
        else:
            for root, below in self._roots(submitter):
                # As it is written here, and as tasks see it: the working directory may be reached by links.
                for each in dict.fromkeys((PurePosixPath(root / below), PurePosixPath(os.path.realpath(root), below))):
                    if wanted != each and wanted.is_relative_to(each):
                        found = open_path(str(PurePosixPath(os.path.realpath(root), below, wanted.relative_to(each))))
                        return _regular(found)
            raise NotReadable(FileReason.NOT_PERMITTED)
        return _regular(found)

    def _roots(self, submitter: str) -> Iterator[tuple[Path, PurePosixPath]]:
        """The directories below which a submitter may read: a path of the owner's, which may have links, and what is
        below that, which may not."""
        if submitter and not self._is_restricted:
            own = submitter_directory(self._working_dir, name_of(submitter))
            yield self._working_dir, PurePosixPath(own.relative_to(self._working_dir))
            if (memory := self._memory_of(submitter)) is not None:
                yield memory.parent, PurePosixPath(memory.name)
        for storage in self._storages:
            if storage.is_open_to(submitter, write=False):
                yield local_path(storage.url), PurePosixPath()


def _regular(found: int) -> int:
    """Open a path for reading, which is open as such, if it is a regular file: others may block, or do something."""
    try:
        if not stat.S_ISREG(os.fstat(found).st_mode):
            raise NotReadable(FileReason.NOT_A_FILE)
        # Without waiting: a task may hold a lease on its file.
        return os.open(f"/proc/self/fd/{found}", os.O_RDONLY | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK)
    finally:
        os.close(found)


def _read(descriptor: int, offset_bytes: int, max_bytes: int) -> ReadPiece:
    pieces: list[bytes] = []
    at, left_bytes = offset_bytes, max_bytes
    while left_bytes and (piece := os.pread(descriptor, left_bytes, at)):
        pieces.append(piece)
        at += len(piece)
        left_bytes -= len(piece)
    data = b"".join(pieces)
    # After the read: a file that has changed meanwhile has another version than before.
    found = os.fstat(descriptor)
    if not found.st_size and os.pread(descriptor, 1, 0):
        raise NotReadable(FileReason.NOT_A_FILE, "its size is not known, as in /proc")
    version = f"{found.st_mtime_ns}-{found.st_ino}-{found.st_size}"
    return ReadPiece(found.st_size, version, data, hashlib.sha256(data).hexdigest() if data else "")
