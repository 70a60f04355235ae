"""Working directory of each task: the endpoint's, its submitter's, or a separate one (a sandbox).

``WORKING_DIR`` is for the tasks of the endpoint's owner, ``WORKING_DIR/submitters/ID`` for those of another submitter.
With ``sandbox: true`` each task gets ``sandboxes/TASK`` below that. A missing directory is created again.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import shutil
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Final

SUBMITTERS: Final = "submitters"
_SANDBOXES: Final = "sandboxes"
#: What :func:`name_of` makes.
_NAME: Final = re.compile("[0-9a-f]{32}|[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_GONE: Final = frozenset({errno.ENOENT, errno.ESTALE})


class TaskDirectories:
    """One per worker, which starts in the endpoint's working directory.

    :param sandboxed: whether each task has a directory of its own.
    """

    def __init__(self, *, sandboxed: bool) -> None:
        self._sandboxed = sandboxed
        self.root = os.getcwd()  # noqa: PTH109 - in each worker: pathlib takes longer
        self._descriptor = _open_directory(self.root)
        self._lock: int | None = None

    def enter(self, task_id: str, submitter: str) -> str:
        """Make the directory of a task the current one; its path. ``submitter`` is empty for the endpoint's owner.

        :raises OSError: if it cannot be made.
        """
        if not submitter and not self._sandboxed and self._is_in(self.root):
            return self.root
        private: list[str] = []
        if submitter:
            private += [SUBMITTERS, name_of(submitter)]
        if self._sandboxed:
            private += [_SANDBOXES]
        path = os.path.join(self.root, *private)  # noqa: PTH118 - for every task: pathlib takes longer
        if not self._is_in(path):
            self._make(private)
            os.chdir(path)
        if self._sandboxed:
            name = name_of(task_id)
            self._lock = _locked(f".{name}.lock")
            path = os.path.join(path, name)  # noqa: PTH118
            os.makedirs(path, mode=0o700, exist_ok=True)  # noqa: PTH103
            os.chdir(path)
        return path

    def leave(self) -> None:
        """Leave the directory after the task; its retention begins."""
        try:  # noqa: SIM105 - for every task: a context manager would take longer than the call
            os.fchdir(self._descriptor)
        except OSError:
            pass
        if self._lock is not None:
            lock, self._lock = self._lock, None
            with contextlib.suppress(OSError):
                os.utime(lock)
            os.close(lock)

    def _is_in(self, path: str) -> bool:
        """Change to a directory. False if it does not exist: a removed directory can still be the current one."""
        try:
            if path != self.root:
                os.chdir(path)
            return os.getcwd() == path  # noqa: PTH109 - for every task: pathlib takes longer
        except OSError as error:
            if error.errno not in _GONE:
                raise
            return False

    def _make(self, private: list[str]) -> None:
        os.makedirs(self.root, exist_ok=True)  # noqa: PTH103
        os.close(self._descriptor)
        self._descriptor = _open_directory(self.root)
        path = self.root
        for name in private:
            path = os.path.join(path, name)  # noqa: PTH118
            with contextlib.suppress(FileExistsError):
                os.mkdir(path, mode=0o700)  # noqa: PTH102


def submitter_directory(working_dir: Path, name: str) -> Path:
    """The directory of a submitter other than the owner, by its :func:`name_of`."""
    return working_dir / SUBMITTERS / name


def remove_old_sandboxes(working_dir: Path, *, retention_s: float) -> Iterator[Path]:
    """Remove the sandboxes of tasks that ended longer ago than that; yields each that was removed.

    A sandbox that a task uses is locked, by whichever worker on whichever node. Tasks can make any name and any link in
    these directories, so each is opened below the one before, and no link is followed.
    """
    before = time.time() - retention_s
    with _opened(working_dir) as root:
        if root is None:
            return
        yield from _remove_old(root, working_dir / _SANDBOXES, before=before)
        with _opened(SUBMITTERS, below=root) as submitters:
            for name in _names_in(submitters):
                with _opened(name, below=submitters) as submitter:
                    yield from _remove_old(submitter, working_dir / SUBMITTERS / name / _SANDBOXES, before=before)


def _remove_old(parent: int | None, path: Path, *, before: float) -> Iterator[Path]:
    with _opened(_SANDBOXES, below=parent) as directory:
        for lock in _names_in(directory):
            name = lock.removeprefix(".").removesuffix(".lock")
            if lock != f".{name}.lock" or not _NAME.fullmatch(name):
                continue
            # Locked, removed by another node's manager, or deeper than can be removed: the next round sees.
            with contextlib.suppress(OSError, RecursionError):
                if os.stat(lock, dir_fd=directory, follow_symlinks=False).st_mtime > before:
                    continue
                descriptor = os.open(lock, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=directory)
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    if os.access(name, os.F_OK, dir_fd=directory, follow_symlinks=False):
                        shutil.rmtree(name, dir_fd=directory)
                    os.unlink(lock, dir_fd=directory)
                finally:
                    os.close(descriptor)
                yield path / name


@contextlib.contextmanager
def _opened(path: str | Path, *, below: int | None = None) -> Iterator[int | None]:
    """A directory; None if it is none. Below another one, a link is none either."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | (0 if isinstance(path, Path) else os.O_NOFOLLOW)
    try:
        descriptor = os.open(path, flags, dir_fd=below)
    except OSError:
        yield None
        return
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _names_in(directory: int | None) -> list[str]:
    return [] if directory is None else os.listdir(directory)  # noqa: PTH208 - of a descriptor


def _open_directory(path: str) -> int:
    """A descriptor to return to a directory. Tasks cannot list it: another submitter's names are in it."""
    return os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)


def _locked(path: str) -> int:
    """The descriptor of a lock file that says that a sandbox is in use; another attempt of the task may use it too."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            if os.fstat(descriptor).st_nlink:
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # removed between these two steps, as too old


def name_of(identity: str) -> str:
    """A directory name: a UUID unchanged, otherwise a hash."""
    try:
        return str(uuid.UUID(identity))
    except ValueError:
        return hashlib.sha256(identity.encode(errors="surrogatepass")).hexdigest()[:32]
