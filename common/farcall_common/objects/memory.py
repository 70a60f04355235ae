"""Objects in the memory of a node: files of a memory file system, which readers map, and writers can write in place.

Memory that a process gets for the first time takes three times as long to write as memory that it has: the kernel
clears each page. So the files of large objects that were evicted are kept, some at most, and the next ones are written
over them. A reader locks the file that it maps (``flock``), and no file that is locked is
written again.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import mmap
import os
import weakref
from collections.abc import Sequence
from typing import Any, Final

from farcall_common.object_keys import Key, lifetime_of
from farcall_common.objects.directory import DRAFT_PREFIX, Directory, remove
from farcall_common.objects.encoding import HEAD_BYTES, head, is_head
from farcall_common.payload import Piece

_LEAD_BYTES: Final = mmap.PAGESIZE
"""In front of a buffer: room for the head of the object, and for what its value has before the buffer."""

REUSED_BYTES: Final = 8 * 2**20
"""Minimum size of files that are reused for new objects."""
_FREE: Final = f"{DRAFT_PREFIX}free-"
"""Name prefix of files that may be reused; the size follows. Sweepers delete these files like drafts."""
_MOST_FREE: Final = 4
_MOST_FREE_BYTES: Final = 256 * 2**20
_OPEN: Final = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW


class Memory(Directory):
    """Objects in a directory of a memory file system, such as ``/dev/shm``: for processes of one node.

    Large objects are mapped wherever they are read: a value of any size is there in less than a millisecond, and each
    reader may change what it got without others seeing it.

    :param path: of the directory.
    """

    _kind = "memory directory"

    def buffer(self, size: int) -> memoryview:
        """Memory of ``size`` bytes for a value. One that contains it whole is put without a copy; what is written to
        the buffer after that is not seen by others. The bytes are arbitrary at first.

        :raises StoreFull: if there is no room.
        :raises ValueError: if ``size`` is not positive.
        """
        if size < 1:
            raise ValueError(f"a buffer has at least one byte, not {size}")
        with self._errors():
            path, descriptor = self._new_draft(_LEAD_BYTES + size)
            try:
                # Without this, a full file system would end the process at the first write to the buffer.
                os.posix_fallocate(descriptor, 0, _LEAD_BYTES + size)
                mapping = mmap.mmap(descriptor, _LEAD_BYTES + size)
            except BaseException:
                os.close(descriptor)
                remove(path)
                raise
        holder = _array_type(_LEAD_BYTES + size).from_buffer(mapping)
        draft = _Draft(path, descriptor, ctypes.addressof(holder), size)
        _drafts[draft.address + _LEAD_BYTES] = draft
        weakref.finalize(holder, draft.drop)
        return memoryview(holder).cast("B")[_LEAD_BYTES:]

    def write(self, key: Key, pieces: Sequence[Piece]) -> None:
        lifetime_of(key)
        if _drafts and is_head(pieces) and (found := self._written_in_place(pieces)) is not None:
            number, draft = found
            with self._errors():
                try:
                    draft.complete(pieces[1:number], pieces[number + 1 :])
                    os.rename(draft.path, self._file(key.name))  # noqa: PTH104
                except FileNotFoundError:  # a sweeper has deleted the draft as one that was left behind
                    pass
                else:
                    self._sweep_sometimes()
                    return
        super().write(key, pieces)

    def _written_in_place(self, pieces: Sequence[Piece]) -> tuple[int, _Draft] | None:
        """The number of the piece that is the whole of a buffer of this directory, and the buffer, which is taken: a
        second value with it is copied."""
        before = 0
        for number, piece in enumerate(pieces[1:], start=1):
            if isinstance(piece, memoryview) and not piece.readonly and piece:
                address = ctypes.addressof(ctypes.c_char.from_buffer(piece))
                draft = _drafts.get(address)
                if (
                    draft is not None
                    and draft.can_take(len(piece), before, self.path)
                    and _drafts.pop(address, None) is draft
                ):
                    return number, draft
            before += len(piece)
        return None

    def _new_draft(self, size: int) -> tuple[str, int]:
        if size >= REUSED_BYTES and (found := self._reused(size)) is not None:
            return found
        return super()._new_draft(size)

    def _reused(self, size: int) -> tuple[str, int] | None:
        """Path and descriptor of a file that is free, with this size; None if there is none."""
        for name, free in self._free():
            if not size // 2 <= free <= 2 * size:
                continue
            draft = self._file(f"{DRAFT_PREFIX}{os.urandom(16).hex()}")
            try:
                os.rename(self._file(name), draft)  # noqa: PTH104
                descriptor = os.open(draft, _OPEN)
            except OSError:  # another writer has taken it
                continue
            try:
                # A reader that has opened it and locks it later finds that it has lost its name.
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                fcntl.flock(descriptor, fcntl.LOCK_UN)
                os.ftruncate(descriptor, size)
                os.utime(descriptor)  # for sweepers it is new
            except OSError:  # it is still read
                os.close(descriptor)
                remove(draft)
            else:
                return draft, descriptor
        return None

    def _free(self) -> list[tuple[str, int]]:
        """The names and sizes of the files that may be written again."""
        found = []
        with contextlib.suppress(OSError):
            for name in os.listdir(self.path):  # noqa: PTH208
                size = name.removeprefix(_FREE).partition("-")[0]
                if name.startswith(_FREE) and size.isdecimal():
                    found.append((name, int(size)))
        return found

    def _discard(self, name: str) -> None:
        path = self._file(name)
        with contextlib.suppress(OSError):
            size = os.lstat(path).st_size
            if size >= REUSED_BYTES:
                free = self._free()
                if len(free) < _MOST_FREE and size + sum(each for _, each in free) <= _MOST_FREE_BYTES:
                    os.rename(path, self._file(f"{_FREE}{size}-{os.urandom(8).hex()}"))  # noqa: PTH104
                    return
        remove(path)

    def _hold(self, descriptor: int, state: os.stat_result, name: str) -> None:
        if state.st_size < REUSED_BYTES:
            return
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError as error:  # a writer has it, so it was evicted
            raise FileNotFoundError(name) from error
        if os.stat(self._file(name), follow_symlinks=False).st_ino != state.st_ino:  # noqa: PTH116
            raise FileNotFoundError(name)

    def _is_mapped(self, descriptor: int) -> bool:  # noqa: ARG002 - wherever the directory is
        return True


class _Draft:
    """A file that is mapped as a buffer."""

    def __init__(self, path: str, descriptor: int, address: int, size: int) -> None:
        self.path = path
        self.address = address
        self.size = size
        self.is_inherited = False  # by a child process, which may write to it at any time
        self._descriptor = descriptor
        self._pid = os.getpid()

    def can_take(self, size: int, before: int, directory: str) -> bool:
        """Whether a value can be completed around the buffer, which is a piece of this size."""
        return (
            not self.is_inherited
            and size == self.size
            and before <= _LEAD_BYTES - HEAD_BYTES
            and before % HEAD_BYTES == 0
            and os.path.dirname(self.path) == directory  # noqa: PTH120
        )

    def complete(self, before: Sequence[Piece], after: Sequence[Piece]) -> None:
        """Write the rest of an object around the buffer. From then on, what this process writes to the buffer is a
        copy of its own.

        :raises OSError: if that is not possible.
        """
        # Its private pages are those of the file until they are changed: no other object may be written there.
        fcntl.flock(self._descriptor, fcntl.LOCK_SH)
        start = _LEAD_BYTES - sum(map(len, before))
        end = _LEAD_BYTES + self.size
        total = end + sum(map(len, after))
        _write_at(self._descriptor, start, before)
        _write_at(self._descriptor, end, after)
        _write_at(self._descriptor, 0, [head(start, total - start)])
        _map_private(self.address, end, self._descriptor)

    def drop(self) -> None:
        """No object refers to the buffer any more."""
        if os.getpid() != self._pid:
            return
        os.close(self._descriptor)
        _drafts.pop(self.address + _LEAD_BYTES, None)
        with contextlib.suppress(OSError):
            remove(self.path)  # unless it is an object now


_drafts: Final[dict[int, _Draft]] = {}
"""Drafts that may become objects, by the address of the buffer."""


def _before_fork() -> None:
    for draft in list(_drafts.values()):
        draft.is_inherited = True


os.register_at_fork(before=_before_fork, after_in_child=_drafts.clear)


def _write_at(descriptor: int, at: int, pieces: Sequence[Piece]) -> None:
    for piece in pieces:
        rest = memoryview(piece).cast("B")
        while rest:
            count = os.pwrite(descriptor, rest, at)
            rest, at = rest[count:], at + count


def _map_private(address: int, size: int, descriptor: int) -> None:
    """Put a private mapping of a file in place of the shared one at an address.

    :raises OSError: if that is not possible.
    """
    flags = mmap.MAP_PRIVATE | _MAP_FIXED
    if _libc().mmap(address, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, descriptor, 0) != address:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


_MAP_FIXED: Final = 0x10


@functools.lru_cache(maxsize=1)
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_size_t
    number = ctypes.c_int
    libc.mmap.argtypes = (ctypes.c_size_t, ctypes.c_size_t, number, number, number, ctypes.c_ssize_t)
    return libc


@functools.lru_cache(maxsize=64)
def _array_type(size: int) -> Any:
    """A type whose objects are a range of memory, and can be referred to weakly."""
    return ctypes.c_char * size
