"""Cache of what was prepared on a node: images, packages, and the worker's code."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

_LOCK_PERIOD_S: Final = 0.2


class Cache:
    """A directory of prepared images and bundles, shared by the managers of a node, or of many that share its file
    system. Each entry has a lock file: who makes or removes the entry has it alone, who uses it shares it.

    :param most_bytes: the least recently used entries are removed beyond that, never one in use.
    """

    def __init__(self, directory: Path, *, most_bytes: int) -> None:
        self.directory = directory
        self._most_bytes = most_bytes
        self._held: dict[str, int] = {}
        self._lock = threading.Lock()

    def make(self) -> None:
        """Make the directory if it does not exist.

        :raises OSError: if others could write into it: it may be in a directory that all users share. Or if no code
            could be loaded from it.
        """
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = self.directory.lstat()
        if (
            not stat.S_ISDIR(found.st_mode)
            or found.st_uid != os.geteuid()
            or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        ):
            raise PermissionError(f"the cache {self.directory} must be a directory that only this user can write")
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
        """Have an entry alone, then share it until :meth:`release`.

        :param waiting: called while another process has it; False to give up.
        :raises TimeoutError: if that gave up.
        """
        descriptor = os.open(
            self.directory / f".{name}.use", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
        )
        try:
            while not _locked(descriptor, fcntl.LOCK_EX):
                if not (_locked(descriptor, fcntl.LOCK_SH) and self._exists(name)) and waiting():
                    time.sleep(_LOCK_PERIOD_S)
                    continue
                if not self._exists(name):
                    raise TimeoutError(f"another process has been preparing {name} for too long")
                break
            yield
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            os.utime(descriptor)
        except BaseException:
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

    def clean(self) -> list[str]:
        """Remove the least recently used entries beyond the limit; their names."""
        names = [each.name for each in self.directory.iterdir()]
        entries = [self.directory / name for name in names if f".{name}.use" in names]
        sizes = {each: _size_of(each) for each in entries}
        excess = sum(sizes.values()) - self._most_bytes
        removed: list[str] = []
        for entry in sorted(entries, key=self._used_at):
            if excess <= 0:
                break
            if self._remove(entry):
                excess -= sizes[entry]
                removed.append(entry.name)
        return removed

    def remove(self, name: str) -> None:
        """Remove an entry, unless another process uses it."""
        self.release(name)
        with contextlib.suppress(OSError):
            self._remove(self.directory / name)

    def _exists(self, name: str) -> bool:
        return (self.directory / name).exists()

    def _used_at(self, entry: Path) -> float:
        try:
            return (self.directory / f".{entry.name}.use").stat().st_mtime
        except OSError:
            return 0.0

    def _remove(self, entry: Path) -> bool:
        lock = self.directory / f".{entry.name}.use"
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            if not _locked(descriptor, fcntl.LOCK_EX):
                return False
            doomed = self.directory / f".removed-{uuid.uuid4().hex}"
            entry.rename(doomed)
            _remove_tree(doomed)
            return True
        finally:
            os.close(descriptor)


def _locked(descriptor: int, kind: int) -> bool:
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
        path.unlink()
        return
    for parent, _, _ in os.walk(path):
        with contextlib.suppress(OSError):
            Path(parent).chmod(0o700)
    shutil.rmtree(path, ignore_errors=True)
