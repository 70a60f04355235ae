"""Blocks in the memory of nodes: a task writes into a directory in the memory of its node, and tasks of the same node
map what is there.

A block is a file, written under another name and then linked: a link to a name that exists fails, so that a block is
created once on a node. Two attempts of a task on two nodes may both create theirs; the name under which a block is
read says on which node it is.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import stat
import time
import urllib.parse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from farcall_common import running
from farcall_common.errors import ConfigurationError, ObjectGone, StoreDenied, StoreFull, StoreUnavailable
from farcall_common.objects.blocks import Blocks, Part
from farcall_common.payload import Piece

SCHEME: Final = "node:"
_BLOCKS: Final = "blocks"
"""The directory of blocks in the one that a submitter has in the memory of a node."""
_SEPARATOR: Final = "//"
_BLOCK: Final = "b-"
_DRAFT: Final = ".draft-"
_KEPT_S: Final = 86_400.0
"""After so long the next writer without room, and the end of the next job, delete what was not deleted."""
_RESERVED_PART: Final = 8
"""One of so many parts of the memory, and of its file system, stays free."""
_MAPPED_BYTES: Final = 256 * 1024
"""Below this size a copy takes less time than a mapping."""
_READ: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_CREATE: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM})
_DENIED: Final = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})


def is_on_nodes(url: str) -> bool:
    """Whether an address is that of the memory of nodes, which tasks alone reach."""
    return url.startswith(SCHEME)


def name_on_node(node: str, name: str) -> str:
    """The name of a block for tasks of all nodes.

    :param node: its address; empty: this node, or all if they share their memory.
    """
    return f"{node}{_SEPARATOR}{name}" if node else name


def node_of(name: str) -> str:
    """The node of a block with such a name."""
    return name.partition(_SEPARATOR)[0] if _SEPARATOR in name else ""


def open_node_blocks(url: str) -> NodeBlocks:
    """The storage ``node:`` or ``node:BYTES``: that many on each node at most, of all jobs of a submitter together.

    :raises ConfigurationError: if that is no such address, or no task of Farcall runs here.
    """
    most = url.removeprefix(SCHEME)
    if most and not most.isdecimal():
        raise ConfigurationError(f"{url} is no storage of blocks.", hint="Write node: or node:BYTES.")
    try:
        directory = running.current().memory_dir
    except ConfigurationError as error:
        raise ConfigurationError(
            "The memory of nodes is for tasks of Farcall, and none runs here.",
            hint="Use an Executor or an Engine of Farcall, or another method of exchange.",
        ) from error
    return NodeBlocks(None if directory is None else directory / _BLOCKS, most_bytes=int(most) if most else None)


class NodeBlocks(Blocks):
    """Blocks in a directory in the memory of this node.

    :param directory: which is made if it does not exist; None: this node has none, so nothing has room.
    :param most_bytes: of all blocks there; None: as many as leave an eighth of the memory free.
    """

    def __init__(self, directory: Path | None, *, most_bytes: int | None = None) -> None:
        self._directory = directory
        self._most_bytes = most_bytes

    def create(self, name: str, pieces: Sequence[Piece]) -> bool:
        if self._directory is None:
            raise StoreFull("This node has no memory for blocks.")
        path = self._path(self._directory, name)
        with _errors(path):
            self._directory.mkdir(mode=0o700, exist_ok=True)
            if os.path.lexists(path):
                return False
            self._check_room(self._directory, sum(map(len, pieces)))
            draft = self._directory / f"{_DRAFT}{os.urandom(16).hex()}"
            try:
                _write(draft, pieces)
                os.link(draft, path, follow_symlinks=False)
            except FileExistsError:
                return False
            finally:
                draft.unlink(missing_ok=True)
        return True

    def read(self, part: Part) -> memoryview:
        if part.end is not None and part.end <= part.start:
            return memoryview(b"")
        if self._directory is None:
            raise _gone(part)
        path = self._path(self._directory, part.name)
        with _errors(path):
            try:
                descriptor = open_block(self._directory, part.name)
            except FileNotFoundError:
                raise _gone(part) from None
            try:
                size = os.fstat(descriptor).st_size
                end = size if part.end is None else part.end
                if end > size or part.start > size:
                    raise _gone(part)
                return _read(descriptor, part.start, end)
            finally:
                os.close(descriptor)

    def names(self, prefix: str) -> Iterator[str]:
        for each in self._entries():
            name = urllib.parse.unquote(each.name.removeprefix(_BLOCK))
            if each.name.startswith(_BLOCK) and name.startswith(prefix):
                yield name

    def delete(self, names: Sequence[str]) -> None:
        if self._directory is None:
            return
        for name in names:
            path = self._path(self._directory, name)
            with _errors(path):
                path.unlink(missing_ok=True)

    def delete_below(self, prefix: str) -> None:
        """Delete all blocks below a prefix, and what killed programs left a day ago."""
        super().delete_below(prefix)
        self._delete_old()

    def close(self) -> None:
        """Do nothing: nothing is open."""

    def _path(self, directory: Path, name: str) -> Path:
        return directory / file_name(name)

    def _entries(self) -> list[os.DirEntry[str]]:
        if self._directory is None:
            return []
        try:
            with os.scandir(self._directory) as entries:
                return list(entries)
        except FileNotFoundError:
            return []

    def _check_room(self, directory: Path, size: int) -> None:
        """:raises StoreFull: if there is no room for so many bytes."""
        if self._room(directory) < size:
            self._delete_old()
            if (room := self._room(directory)) < size:
                raise StoreFull(f"A block of {size:,} bytes has no room in {max(0, room):,} of this node's memory.")

    def _room(self, directory: Path) -> int:
        state = os.statvfs(directory)
        room = (state.f_bavail - state.f_blocks // _RESERVED_PART) * state.f_frsize
        memory = _memory()
        room = min(room, memory["MemAvailable"] - memory["MemTotal"] // _RESERVED_PART)
        if self._most_bytes is not None:
            used = 0
            for each in self._entries():
                with contextlib.suppress(FileNotFoundError):
                    used += each.stat(follow_symlinks=False).st_size
            room = min(room, self._most_bytes - used)
        return room

    def _delete_old(self) -> None:
        before = time.time() - _KEPT_S
        for each in self._entries():
            with contextlib.suppress(OSError):  # another task has deleted it, or it is none of ours
                if each.stat(follow_symlinks=False).st_mtime < before:
                    os.unlink(each.path)  # noqa: PTH108


def file_name(name: str) -> str:
    """Of the file of a block: no name leads out of the directory."""
    return _BLOCK + urllib.parse.quote(name, safe="")


def open_block(directory: Path, name: str) -> int:
    """A descriptor of a block's file. Links are not followed: any task of the submitter may have made them.

    :raises FileNotFoundError: if there is none.
    :raises OSError: if it is something else.
    """
    descriptor = os.open(directory / file_name(name), _READ)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no block", name)
    return descriptor


def _write(path: Path, pieces: Sequence[Piece]) -> None:
    descriptor = os.open(path, _CREATE, 0o600)
    try:
        for piece in pieces:
            left = memoryview(piece).cast("B")
            while left:
                left = left[os.write(descriptor, left) :]
    finally:
        os.close(descriptor)


def _read(descriptor: int, start: int, end: int) -> memoryview:
    """Bytes of a file: mapped if there are many, else a copy."""
    if end - start >= _MAPPED_BYTES:
        first = start - start % mmap.ALLOCATIONGRANULARITY
        try:
            found = mmap.mmap(descriptor, end - first, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ, offset=first)
            return memoryview(found)[start - first :]
        except OSError as error:
            if error.errno != errno.EMFILE:  # a mapping has a descriptor; a copy needs none
                raise
    copy = memoryview(bytearray(end - start))
    at = 0
    while at < len(copy) and (count := os.preadv(descriptor, [copy[at:]], start + at)):
        at += count
    return copy[:at]


def _memory() -> dict[str, int]:
    """Bytes of the node, by the names of the kernel."""
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    return {name.rstrip(":"): int(number) * 1024 for name, number, *_ in lines}


def _gone(part: Part) -> ObjectGone:
    return ObjectGone(f"There is no block {part.name} with the bytes {part.start} to {part.end} on its node.")


@contextlib.contextmanager
def _errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        message = f"{path}: {error.strerror}."
        if error.errno in _FULL:
            raise StoreFull(message) from error
        if error.errno in _DENIED:
            raise StoreDenied(message) from error
        raise StoreUnavailable(message) from error
