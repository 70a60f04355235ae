"""Cache of what was prepared on a node: images, packages, and the worker's code."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import stat
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from farcall_common.files import make_directory

_LOCK_PERIOD_S: Final = 0.2
_LAYOUT: Final = "2"
"""Version of the names in the directory and of their contents."""
_LAYOUT_FILE: Final = ".layout"
_REMOVED: Final = ".removed-"
_DRAFT: Final = re.compile(r"(?P<name>[a-z-]+-[\w.-]+)\.part(?:ial)?-[\w]+")
_LOCK: Final = re.compile(r"\.(?P<name>[a-z]+-[\w.-]+)\.(use|lock)")


class Cache:
    """A directory of prepared images, packages and bundles, shared by the managers of a node, or of many that share its
    file system.

    Each entry has a lock file, ``.NAME.use``: exclusive for a process that makes or removes the entry, shared for one
    that uses it. The kernel releases the locks of a killed process. An unfinished entry has the entry's name and
    ``.part``; it is left over if no process holds the lock. Other files in the directory are not touched.

    :param most_bytes: size limit; above it, the least recently used entries are removed, never one in use.
    """

    def __init__(self, directory: Path, *, most_bytes: int) -> None:
        self.directory = directory
        self._most_bytes = most_bytes
        #: What was beyond the limit after the last :meth:`clean`, and is in use.
        self.excess_bytes = 0
        self._held: dict[str, int] = {}
        self._lock = threading.Lock()

    def make(self) -> None:
        """Make the directory if it does not exist.

        :raises OSError: if others could write into it: it may be in a directory that all users share. Or if no code
            could be loaded from it.
        """
        make_private(self.directory)
        if os.statvfs(self.directory).f_flag & os.ST_NOEXEC:
            raise PermissionError(
                f"the cache {self.directory} is on a file system without programs (mounted noexec); "
                "the owner sets engine.environments.cache_dir to another one"
            )

    def name_of(self, image: str) -> str | None:
        """The name of the entry that a path lies in; None if it is none of the cache's."""
        path = Path(image)
        return path.relative_to(self.directory).parts[0] if path.is_relative_to(self.directory) else None

    @contextlib.contextmanager
    def making(self, name: str, *, waiting: Callable[[], bool]) -> Iterator[None]:
        """Have an entry alone, or share it if it is there; then share it until :meth:`release`.

        :param waiting: called while another process has it; False to give up.
        :raises TimeoutError: if that gave up.
        :raises OSError: if another process removed it at once.
        """
        path = self._lock_of(name)
        while (descriptor := self._try(name)) is None:
            if not waiting():
                raise TimeoutError(f"another process has been preparing {name} for too long")
            time.sleep(_LOCK_PERIOD_S)
        try:
            yield
            fcntl.flock(descriptor, fcntl.LOCK_SH)  # for a moment, it was not locked
            if not (_is_at(descriptor, path) and self._exists(name)):
                raise OSError(f"another process has removed {name}")
            os.utime(descriptor)
        except BaseException:
            self._unlink_of_nothing(descriptor, name)
            os.close(descriptor)
            raise
        with self._lock:
            former = self._held.pop(name, None)
            self._held[name] = descriptor
        if former is not None:
            os.close(former)

    def release(self, name: str) -> None:
        """Use an entry no longer."""
        with self._lock:
            descriptor = self._held.pop(name, None)
        if descriptor is not None:
            os.close(descriptor)

    def tidy(self) -> None:
        """Remove what killed processes have left, and the entries of releases with another layout that are not in use.

        :raises OSError: if the directory cannot be read or written.
        """
        version = self.directory / _LAYOUT_FILE
        is_known = version.exists() and version.read_text(encoding="ascii", errors="replace") == _LAYOUT
        for path in list(self.directory.iterdir()):
            with contextlib.suppress(FileNotFoundError):  # another process does the same
                self._tidy(path, is_known=is_known)
        version.write_text(_LAYOUT, encoding="ascii")

    def _tidy(self, path: Path, *, is_known: bool) -> None:
        if path.name.startswith(_REMOVED):
            _remove_tree(path)
        elif (found := _DRAFT.fullmatch(path.name)) is not None:
            with self._locked(found["name"], fcntl.LOCK_SH) as is_not_made:
                if is_not_made:
                    _remove_tree(path)
        elif (found := _LOCK.fullmatch(path.name)) is not None:
            name = found["name"]
            if path != self._lock_of(name) or not self._exists(name):
                with self._locked(name, fcntl.LOCK_EX) as is_alone:
                    if is_alone:
                        path.unlink(missing_ok=True)
            elif not is_known:
                self._remove(name)

    def clean(self) -> list[str]:
        """Remove the least recently used entries beyond the limit; their names."""
        names = {each.name for each in self.directory.iterdir()}
        entries = [name for name in names if f".{name}.use" in names]
        sizes = {name: _size_of(self.directory / name) for name in entries}
        excess = sum(sizes.values()) - self._most_bytes
        removed: list[str] = []
        for name in sorted(entries, key=self._used_at):
            if excess <= 0:
                break
            if self._remove(name):
                excess -= sizes[name]
                removed.append(name)
        self.excess_bytes = max(0, excess)
        return removed

    def remove(self, name: str) -> None:
        """Remove an entry, unless another process uses it."""
        self.release(name)
        with contextlib.suppress(OSError):
            self._remove(name)

    def _exists(self, name: str) -> bool:
        return (self.directory / name).exists()

    def _lock_of(self, name: str) -> Path:
        return self.directory / f".{name}.use"

    def _used_at(self, name: str) -> float:
        try:
            return self._lock_of(name).stat().st_mtime
        except OSError:
            return 0.0

    def _try(self, name: str) -> int | None:
        """A descriptor of the lock file, if the entry can be had alone, or if it is there and can be shared."""
        path = self._lock_of(name)
        descriptor = _opened(path)
        if _locks(descriptor, fcntl.LOCK_EX) and _is_at(descriptor, path):
            return descriptor
        if _locks(descriptor, fcntl.LOCK_SH) and _is_at(descriptor, path):
            if self._exists(name):
                return descriptor
            path.unlink(missing_ok=True)  # it was deleted while others used it: they keep their lock of nothing
            os.close(descriptor)
            return self._try(name)
        os.close(descriptor)
        return None

    @contextlib.contextmanager
    def _locked(self, name: str, kind: int) -> Iterator[bool]:
        """Whether an entry is not being made until this ends (``LOCK_SH``), or not in use either (``LOCK_EX``).

        The lock file of one that is not there is removed.
        """
        path = self._lock_of(name)
        descriptor = _opened(path)
        try:
            is_locked = _locks(descriptor, kind) and _is_at(descriptor, path)
            yield is_locked
            self._unlink_of_nothing(descriptor, name)
        finally:
            os.close(descriptor)

    def _unlink_of_nothing(self, descriptor: int, name: str) -> None:
        """Remove the lock file of an entry that is not there, nor being made."""
        path = self._lock_of(name)
        if not self._exists(name) and _locks(descriptor, fcntl.LOCK_EX) and _is_at(descriptor, path):
            path.unlink()

    def _remove(self, name: str) -> bool:
        with self._locked(name, fcntl.LOCK_EX) as is_alone:
            if is_alone and self._exists(name):
                doomed = self.directory / f"{_REMOVED}{uuid.uuid4().hex}"
                (self.directory / name).rename(doomed)
                _remove_tree(doomed)
            return is_alone


@contextlib.contextmanager
def locked(path: Path, kind: int, *, removes: bool = False) -> Iterator[None]:
    """Hold a lock among the processes of all nodes that share the file system; others wait.

    :param kind: ``fcntl.LOCK_EX`` or ``LOCK_SH``.
    :param removes: whether the lock file is removed at the end; for those that are locked exclusively only.
    """
    while True:
        descriptor = _opened(path)
        try:
            fcntl.flock(descriptor, kind)
            if _is_at(descriptor, path):
                os.utime(descriptor)
                yield
                if removes:
                    path.unlink(missing_ok=True)
                return
        finally:
            os.close(descriptor)


def make_private(directory: Path) -> None:
    """Make the directory of a cache if it does not exist.

    :raises OSError: if others could write into it: it may be in a directory that all users share.
    """
    is_new = not directory.exists()
    make_directory(directory, mode=0o700)
    found = directory.lstat()
    is_shared = bool(found.st_mode & (stat.S_IWGRP | stat.S_IWOTH))
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or is_shared:
        raise PermissionError(f"the cache {directory} must be a directory that only this user can write")
    if is_new:  # also one that was deleted while it was in use: the next process must not take it for another layout
        (directory / _LAYOUT_FILE).write_text(_LAYOUT, encoding="ascii")


def _opened(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether a file is still the one at a path: lock files are removed by those who hold them."""
    try:
        there = path.lstat()
    except OSError:
        return False
    return os.path.samestat(os.fstat(descriptor), there)


def _locks(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _size_of(path: Path) -> int:
    """Bytes on disk of a file or a directory."""
    if path.is_symlink() or not path.is_dir():
        with contextlib.suppress(OSError):
            return path.lstat().st_blocks * 512
        return 0
    total = 0
    for parent, _, files in os.walk(path):
        for name in files:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(parent, name)).st_blocks * 512  # noqa: PTH118 - many files
    return total


def _remove_tree(path: Path) -> None:
    """Remove a file, or a directory with read-only ones in it."""
    if not path.is_dir() or path.is_symlink():
        path.unlink(missing_ok=True)
        return
    for parent, _, _ in os.walk(path):
        with contextlib.suppress(OSError):
            Path(parent).chmod(0o700)
    shutil.rmtree(path, ignore_errors=True)
