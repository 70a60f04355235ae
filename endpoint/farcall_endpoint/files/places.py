"""Directories of tasks' files: ``WORKING_DIR[/submitters/ID]/staged/TASK/{r,w}/HASH/NAME``.

Tasks of the same submitter may have made any name and any link there before, so each directory is opened below the one
before, and no link is followed: else a task could let the agent write a file where only the agent may, or store one
that only the agent may read.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import uuid
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Final

from farcall_common.file_arguments import Mode, place_of
from farcall_endpoint.host.removal import remove_tree
from farcall_endpoint.worker.directories import SUBMITTERS, name_of, submitter_directory

_STAGED: Final = "staged"
_ASIDE: Final = ".old-"
_NO_LINKS: Final = frozenset({errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP, errno.EACCES})
"""Errors of a file system that cannot create a hard link here."""
_OF_TASKS: Final = frozenset({errno.ENOTDIR, errno.ELOOP, errno.EISDIR, errno.EACCES, errno.EPERM})
"""Errors where a task has made a link, a file or a closed directory. What the task has made stays."""
_COPY_BYTES: Final = 4 * 2**20


class PlaceTaken(OSError):
    """A task has made something else where a directory, or a file that a task reads, belongs. It is not followed."""


def files_directory(working_dir: Path, task_id: str, submitter: str) -> Path:
    """The directory of a task's files. ``submitter`` is empty for the endpoint's owner."""
    parent = submitter_directory(working_dir, name_of(submitter)) if submitter else working_dir
    return parent / _STAGED / name_of(task_id)


def has_leftovers(working_dir: Path) -> bool:
    """Whether there are directories of tasks' files."""
    return any(_names_in(each) != [] for each in _staged_in(working_dir))


def _staged_in(working_dir: Path) -> list[Path]:
    """The directories that may have some; tasks may have made these unreadable."""
    submitters = working_dir / SUBMITTERS
    found = [working_dir, *[submitters / name for name in _names_in(submitters) or ()]]
    return [each / _STAGED for each in found if os.path.isdir(each / _STAGED)]  # noqa: PTH112 - it raises nothing


def _names_in(directory: Path) -> list[str] | None:
    """None if it cannot be read."""
    try:
        return os.listdir(directory)  # noqa: PTH208
    except FileNotFoundError:
        return []
    except OSError:
        return None


class StagedDirectories:
    """The directories of all tasks of an endpoint, in its working directory."""

    def __init__(self, working_dir: Path) -> None:
        self._working_dir = working_dir

    def make(self, task_id: str, submitter: str, writes: Collection[str]) -> None:
        """Make the directory of a task, with one in it for each URL that it writes, named for the URL.

        :raises PlaceTaken: if a task has made something else there.
        :raises OSError: if it cannot be made.
        """
        with (
            self._staged(submitter, make=True) as staged,
            _below(staged, name_of(task_id), make=True) as directory,
            _below(directory, "r", make=True),
            _below(directory, "w", make=True) as written,
        ):
            for url in writes:
                with _below(written, place_of("", url, "w").split("/")[2], make=True):
                    pass

    def link(self, copy: Path, task_id: str, submitter: str, url: str) -> None:
        """Let a copy of the cache be the file of a task, unless the task has ended.

        :raises PlaceTaken: if a task has made something else there.
        :raises OSError: if that is not possible.
        """
        _, mode, key, name = place_of("", url, "r").split("/")
        with contextlib.ExitStack() as opened:
            try:
                staged = opened.enter_context(self._staged(submitter))
                task = opened.enter_context(_below(staged, name_of(task_id)))
            except FileNotFoundError:
                return  # not needed any more
            read = opened.enter_context(_below(task, mode, make=True))
            directory = opened.enter_context(_below(read, key, make=True))
            with contextlib.suppress(FileNotFoundError), _own_place():
                os.unlink(name, dir_fd=directory)  # of an earlier agent
            try:
                os.link(copy, name, dst_dir_fd=directory, follow_symlinks=False)
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                _copy(copy, name, directory)

    def open_written(self, task_id: str, submitter: str, url: str) -> int:
        """Open what a task has written; a descriptor.

        :raises FileNotFoundError: if it is no regular file, or was reached by a link.
        """
        _, mode, key, name = place_of("", url, "w").split("/")
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        with contextlib.ExitStack() as opened:
            try:
                directory = opened.enter_context(self._staged(submitter))
                for each in (name_of(task_id), mode, key):
                    directory = opened.enter_context(_below(directory, each))
                descriptor = os.open(name, flags, dir_fd=directory)
            except OSError as error:
                raise FileNotFoundError(str(error)) from error
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise FileNotFoundError("it is not a regular file")
        return descriptor

    def path(self, task_id: str, submitter: str, url: str, mode: Mode) -> str:
        """The path of a file that a task reads or writes, for messages."""
        return place_of(str(files_directory(self._working_dir, task_id, submitter)), url, mode)

    def remove(self, task_id: str, submitter: str, on_read: Callable[[int, str], None]) -> None:
        """Remove the directory of a task.

        :param on_read: called with the directory and the name of each file that the task has read, to remove it.
        """
        with contextlib.suppress(OSError), self._staged(submitter) as staged:
            _remove(staged, name_of(task_id), on_read)

    def remove_read(self, task_id: str, submitter: str, on_read: Callable[[int, str], None]) -> None:
        """Remove what a task has read; ``on_read`` as for :meth:`remove`."""
        with (
            contextlib.suppress(OSError),
            self._staged(submitter) as staged,
            _below(staged, name_of(task_id)) as directory,
        ):
            _unlink_read(directory, on_read)

    def set_aside(self, keep: Collection[str]) -> None:
        """Rename the directories of all tasks but these, so that such a task may come again while they are removed."""
        kept = {name_of(task_id) for task_id in keep}
        for staged in _staged_in(self._working_dir):
            with contextlib.suppress(OSError), _opened(str(staged), None) as directory:
                for name in set(os.listdir(directory)) - kept:  # noqa: PTH208 - of a descriptor
                    if not name.startswith(_ASIDE):
                        os.rename(name, f"{_ASIDE}{uuid.uuid4().hex}", src_dir_fd=directory, dst_dir_fd=directory)

    def remove_aside(self, on_read: Callable[[int, str], None]) -> None:
        """Remove what was set aside; ``on_read`` as for :meth:`remove`."""
        for staged in _staged_in(self._working_dir):
            with contextlib.suppress(OSError), _opened(str(staged), None) as directory:
                for name in os.listdir(directory):  # noqa: PTH208 - of a descriptor
                    if name.startswith(_ASIDE):
                        _remove(directory, name, on_read)

    @contextlib.contextmanager
    def _staged(self, submitter: str, *, make: bool = False) -> Iterator[int]:
        with contextlib.ExitStack() as opened:
            if make:
                self._working_dir.mkdir(parents=True, exist_ok=True)
            directory = opened.enter_context(_opened(str(self._working_dir), None, follow=True))
            for name in (*([SUBMITTERS, name_of(submitter)] if submitter else []), _STAGED):
                directory = opened.enter_context(_below(directory, name, make=make))
            yield directory


def _remove(parent: int, task: str, on_read: Callable[[int, str], None]) -> None:
    with contextlib.suppress(OSError), _below(parent, task) as directory:
        _unlink_read(directory, on_read)
    remove_tree(task, below=parent)


def _unlink_read(task: int, on_read: Callable[[int, str], None]) -> None:
    with contextlib.suppress(OSError), _below(task, "r") as read:
        for number in os.listdir(read):  # noqa: PTH208 - of a descriptor
            with contextlib.suppress(OSError), _below(read, number) as place:
                for name in os.listdir(place):  # noqa: PTH208
                    on_read(place, name)


@contextlib.contextmanager
def _below(parent: int, name: str, *, make: bool = False) -> Iterator[int]:
    """A directory in another one, never by a link."""
    with contextlib.ExitStack() as opened:
        with _own_place():
            if make:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(name, mode=0o700, dir_fd=parent)
            descriptor = opened.enter_context(_opened(name, parent))
        yield descriptor


@contextlib.contextmanager
def _own_place() -> Iterator[None]:
    """:raises PlaceTaken: in place of an error that says so."""
    try:
        yield
    except OSError as error:
        if error.errno in _OF_TASKS:
            raise PlaceTaken(error.errno, error.strerror) from error
        raise


@contextlib.contextmanager
def _opened(path: str, parent: int | None, *, follow: bool = False) -> Iterator[int]:
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    descriptor = os.open(path, flags, dir_fd=parent)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _copy(copy: Path, name: str, directory: int) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    with copy.open("rb") as source, os.fdopen(os.open(name, flags, 0o400, dir_fd=directory), "wb") as target:
        shutil.copyfileobj(source, target, _COPY_BYTES)
        os.fchmod(target.fileno(), 0o444)
