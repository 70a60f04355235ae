"""Directory of objects: each is a file that appears as a whole, and is read where it lies."""

from __future__ import annotations

import contextlib
import errno
import functools
import mmap
import os
import stat
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from farcall_common.errors import (
    ConfigurationError,
    InvalidRequest,
    ObjectDamaged,
    StoreDenied,
    StoreFull,
    StoreUnavailable,
)
from farcall_common.object_keys import Key, Lifetime, lifetime_of
from farcall_common.objects.connectors import ObjectConnector
from farcall_common.payload import Piece

DRAFT_PREFIX: Final = ".draft-"
"""Name prefix of a file that is being written."""
_DRAFT_AGE_S: Final = 3600.0
_TOUCH_S: Final = 60.0
"""Uses within this time count as one: a change of a file's time is a message to a file server."""
_SWEEP_MARK: Final = ".swept"
_SWEEP_S: Final = 3600.0
_MAPPED_BYTES: Final = 256 * 1024
"""Below this size a copy takes less time than a mapping."""
_LOCAL: Final = frozenset({"bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "tmpfs", "xfs", "zfs"})
"""File systems on which a file stays readable for those who have opened it, although it is deleted."""
_READ: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_CREATE: Final = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM})
_DENIED: Final = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})


class Directory(ObjectConnector):
    """Objects as files of a directory, which all who use them can reach by the same path: on a shared file system, or
    on one machine.

    The directory is made with mode 0700. On a file system of this machine large objects are mapped, not read.

    :param path: of the directory.
    """

    _kind = "directory"

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path: Final = os.path.abspath(path)  # noqa: PTH100 - paths of objects are joined for each use
        self._is_checked = False
        self._next_sweep_at = 0.0

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.path!r})"

    def config(self) -> dict[str, Any]:
        return {"path": self.path}

    def write(self, key: Key, pieces: Sequence[Piece]) -> None:
        lifetime_of(key)
        with self._errors():
            draft, descriptor = self._new_draft(sum(map(len, pieces)))
            try:
                try:
                    _write_all(descriptor, pieces)
                finally:
                    os.close(descriptor)  # on a file server, the last bytes are written here
                os.rename(draft, self._file(key.name))  # noqa: PTH104
            except BaseException:
                remove(draft)
                raise
        self._sweep_sometimes()

    def get(self, key: Key) -> memoryview | None:
        return self._get(key)

    def get_copy(self, key: Key, *, most_bytes: int) -> memoryview | None:
        return self._get(key, most_bytes)

    def _get(self, key: Key, most_bytes: int | None = None) -> memoryview | None:
        """The bytes of an object; a copy if ``most_bytes`` is given."""
        lifetime = lifetime_of(key)
        with self._errors():
            self._check()
            for name in _names(key, lifetime):
                with contextlib.suppress(FileNotFoundError), self._opened(name) as (descriptor, state):
                    if _has_expired(state, lifetime):
                        return None
                    self._hold(descriptor, state, name)
                    if most_bytes is not None and state.st_size > most_bytes:
                        raise ObjectDamaged(f"The object has {state.st_size:,} bytes, and should have {most_bytes:,}.")
                    data = self._read(descriptor, state.st_size, is_copy=most_bytes is not None)
                    if lifetime.reads is not None:
                        self._claim(name)
                    _touch(descriptor, state)
                    return data
        return None

    def exists(self, key: Key) -> bool:
        lifetime = lifetime_of(key)
        with self._errors():
            for name in _names(key, lifetime):
                with contextlib.suppress(FileNotFoundError):
                    return not _has_expired(os.lstat(self._file(name)), lifetime)
        return False

    def evict(self, key: Key) -> None:
        with self._errors():
            for name in _names(key, lifetime_of(key)):
                self._discard(name)

    def evict_group(self, group: str) -> None:
        with self._errors(), contextlib.suppress(FileNotFoundError), os.scandir(self.path) as entries:
            for entry in entries:
                if entry.name.endswith(f".g-{group}"):
                    remove(entry.path)

    # -- files ---------------------------------------------------------------------------------------------------------

    def _file(self, name: str) -> str:
        return f"{self.path}/{name}"

    def _new_draft(self, size: int) -> tuple[str, int]:  # noqa: ARG002 - of what is written
        """Path and descriptor of a new file."""
        draft = self._file(f"{DRAFT_PREFIX}{os.urandom(16).hex()}")
        self._check()
        try:
            return draft, os.open(draft, _CREATE, 0o600)
        except FileNotFoundError:
            Path(self.path).mkdir(mode=0o700, parents=True, exist_ok=True)
            self._check()
            return draft, os.open(draft, _CREATE, 0o600)

    def _check(self) -> None:
        """Refuse a directory in which anyone could put a pickle.

        :raises ConfigurationError: for such a directory.
        """
        if self._is_checked:
            return
        try:
            state = os.stat(self.path)  # noqa: PTH116
        except FileNotFoundError:
            return
        if not stat.S_ISDIR(state.st_mode):
            raise ConfigurationError(f"{self.path} is not a directory.", hint="Choose another path for the store.")
        if state.st_mode & stat.S_IWOTH:
            raise ConfigurationError(
                f"Every user of the machine can write to {self.path}, and could put code there for readers to run.",
                hint=f"Choose a directory of your own, or run `chmod o-w {self.path}`.",
            )
        if state.st_uid not in (0, os.geteuid()):
            parent = os.path.dirname(self.path)  # noqa: PTH120
            if os.stat(parent).st_mode & stat.S_IWOTH:  # noqa: PTH116
                raise ConfigurationError(
                    f"Another user has made {self.path}, and could put code there for readers to run: every user of "
                    f"the machine can write to {parent}.",
                    hint="Choose a directory of your own.",
                )
        self._is_checked = True

    @contextlib.contextmanager
    def _opened(self, name: str) -> Iterator[tuple[int, os.stat_result]]:
        try:
            descriptor = os.open(self._file(name), _READ)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise ObjectDamaged(f"{self._file(name)} is a link, not an object.") from error
            raise
        try:
            state = os.fstat(descriptor)
            if not stat.S_ISREG(state.st_mode):
                raise ObjectDamaged(f"{self._file(name)} is not a regular file.")
            yield descriptor, state
        finally:
            os.close(descriptor)

    def _read(self, descriptor: int, size: int, *, is_copy: bool) -> memoryview:
        """The content of a file: mapped if that is safe, else a copy."""
        if size >= _MAPPED_BYTES and not is_copy and self._is_mapped(descriptor):
            try:
                return memoryview(mmap.mmap(descriptor, size, flags=mmap.MAP_PRIVATE))
            except OSError as error:
                if error.errno != errno.EMFILE:  # a mapping has a descriptor; a copy needs none
                    raise
        if size == 0:
            return memoryview(b"")
        copy = memoryview(mmap.mmap(-1, size) if size >= _MAPPED_BYTES else bytearray(size))
        at = 0
        while at < size and (count := os.preadv(descriptor, [copy[at:]], at)):
            at += count
        return copy[:at]

    def _is_mapped(self, descriptor: int) -> bool:
        return _file_system(os.fstat(descriptor).st_dev) in _LOCAL

    def _hold(self, descriptor: int, state: os.stat_result, name: str) -> None:
        """Keep an open file as it is for as long as it is open, or mapped.

        :raises FileNotFoundError: if it was evicted.
        """

    def _discard(self, name: str) -> None:
        """Remove a file, if it is there."""
        remove(self._file(name))

    def _claim(self, name: str) -> None:
        """Take one of the reads of an object: its file's name says how many are left.

        :raises FileNotFoundError: if another reader has taken this one.
        """
        stem, _, left = name.rpartition("-")
        if left == "1":
            os.unlink(self._file(name))  # noqa: PTH108
        else:
            os.rename(self._file(name), self._file(f"{stem}-{int(left) - 1}"))  # noqa: PTH104

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """Errors of the file system as those of a store."""
        with file_errors(f"The {self._kind} {self.path} of objects"):
            yield

    # -- cleaning up ---------------------------------------------------------------------------------------------------

    def _sweep_sometimes(self) -> None:
        """Once an hour, one of those who write deletes what has expired."""
        now = time.monotonic()
        if now < self._next_sweep_at:
            return
        self._next_sweep_at = now + _SWEEP_S
        mark = Path(self.path, _SWEEP_MARK)
        with contextlib.suppress(OSError):
            if mark.exists() and time.time() - mark.stat().st_mtime < _SWEEP_S:
                return
            mark.touch(mode=0o600)
            threading.Thread(target=sweep, args=(self.path,), name="objects-sweep", daemon=True).start()


@contextlib.contextmanager
def file_errors(what: str) -> Iterator[None]:
    """Errors of a file system as those of a store.

    :param what: has them, for people.
    """
    try:
        yield
    except OSError as error:
        message = f"{what}: {error.strerror or error}."
        if error.errno in _FULL:
            raise StoreFull(message) from error
        if error.errno in _DENIED:
            raise StoreDenied(message) from error
        raise StoreUnavailable(message) from error


def sweep(path: str) -> int:
    """Delete the objects of a directory that have expired, and files that were not finished; returns their number."""
    now = time.time()
    count = 0
    with contextlib.suppress(OSError), os.scandir(path) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):  # read, evicted or swept meanwhile
                if _is_over(entry.name, now - entry.stat(follow_symlinks=False).st_mtime):
                    os.unlink(entry.path)  # noqa: PTH108
                    count += 1
    return count


def _is_over(name: str, age_s: float) -> bool:
    """Whether a file that was not used for this time is deleted. Files of others stay."""
    if name.startswith(DRAFT_PREFIX):
        return age_s > _DRAFT_AGE_S
    try:
        expires_s = lifetime_of(Key(name)).expires_s
    except InvalidRequest:
        return False
    return expires_s is not None and age_s > expires_s


def _has_expired(state: os.stat_result, lifetime: Lifetime) -> bool:
    return lifetime.expires_s is not None and time.time() - state.st_mtime > lifetime.expires_s


def _names(key: Key, lifetime: Lifetime) -> Iterator[str]:
    """The names that the file of an object may have. Reads only make the number smaller, so that one pass finds it."""
    if lifetime.reads is None:
        yield key.name
        return
    stem = key.name.rpartition("-")[0]
    for left in range(lifetime.reads, 0, -1):
        yield f"{stem}-{left}"


def _write_all(descriptor: int, pieces: Sequence[Piece]) -> None:
    if sum(map(len, pieces)) < _MAPPED_BYTES:
        pieces = [b"".join(pieces)]
    for piece in pieces:
        rest = memoryview(piece).cast("B")
        while rest:
            rest = rest[os.write(descriptor, rest) :]


def _touch(descriptor: int, state: os.stat_result) -> None:
    """Note that an object was used."""
    if time.time() - state.st_mtime > _TOUCH_S:
        with contextlib.suppress(OSError):  # a file system that is mounted to be read only
            os.utime(descriptor)


def remove(path: str) -> None:
    """Delete a file, if it is there."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)  # noqa: PTH108


@functools.lru_cache(maxsize=64)
def _file_system(device: int) -> str:
    """The kind of the file system with a device number; empty if the kernel does not say."""
    wanted = f"{os.major(device)}:{os.minor(device)}"
    with contextlib.suppress(OSError), open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as lines:  # noqa: PTH123
        for line in lines:
            mount, _, kind = line.partition(" - ")
            if mount.split(" ")[2] == wanted:
                return kind.partition(" ")[0]
    return ""
