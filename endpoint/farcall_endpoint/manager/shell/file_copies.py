"""Copies of files on this node. Threads make them.

``ROOT/NAME/copies/SHA256`` is a copy of a submitter, ``ROOT/NAME/tasks/NUMBER/r/…`` has the links of a task. Other
managers get copies from here (:mod:`.file_server`); one that is on its way is passed on as far as it has come.
A thread whose file system hangs is given up: the tasks read the endpoint's copy, and another thread takes its place.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import hashlib
import itertools
import logging
import os
import queue
import shutil
import socket
import stat
import threading
import time
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple

from farcall_endpoint.contracts.agent_manager import FileContent
from farcall_endpoint.host.process_directory import ProcessDirectory
from farcall_endpoint.host.removal import remove_tree
from farcall_endpoint.manager.core.actions import Copy, FileAction, Link, RemoveCopies, Unlink
from farcall_endpoint.manager.core.events import CopyEnded, Event, Linked
from farcall_endpoint.manager.shell.event_queue import EventQueue
from farcall_endpoint.manager.shell.file_server import (
    PIECE_BYTES,
    SILENCE_LIMIT_S,
    Answered,
    FileClient,
    FileServer,
    Range,
    SourceFailed,
    Wanted,
    started,
)
from farcall_endpoint.worker.directories import name_of

_logger = logging.getLogger(__name__)

_OWNER: Final = "owner"
_COPIES: Final = "copies"
_DRAFTS: Final = "drafts"
_TASKS: Final = "tasks"
_THREADS: Final = 4
"""Number of threads that copy concurrently."""
_HUNG_LIMIT_S: Final = 60.0
"""Seconds without a byte after which a copy is given up, with its thread. A hanging file system has no time limit."""
_MOST_HUNG: Final = 8
"""Number of hung threads at which all copying stops. Copying from the endpoint's directory stops at the first."""
_LOOK_S: Final = 1.0
_STOPPED_S: Final = 5.0
"""Seconds without a check that show that this process itself was stopped: its copies have not hung."""
_UNKNOWN_LIMIT_S: Final = 2.0
"""Seconds for which a node that is named as a source waits for the news that it has, or will get, the copy."""
_MOST_FAILED: Final = 1000
_END_LIMIT_S: Final = 2.0
_NO_THREAD: Final = "the node cannot start another thread"


class _Inode(NamedTuple):
    """State of a copy's inode, which shows whether a task wrote to the copy through its link. A task can reset the
    mtime, but not the ctime. New links on this node also change the ctime."""

    inode: int
    size_bytes: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, found: os.stat_result) -> _Inode:
        return cls(found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


@dataclasses.dataclass(eq=False)
class _Draft:
    """A copy on its way: ``written`` bytes of it are in the file at ``path``, None before that exists. ``moved_at``:
    when its last bytes came; None while none are waited for, else by ``thread``."""

    path: Path | None = None
    written: int = 0
    moved_at: float | None = None
    thread: threading.Thread | None = None
    is_complete: bool = False
    has_failed: bool = False
    is_given_up: bool = False


class _LocalProblem(Exception):
    """This node cannot keep a copy."""


class FileCopies:
    """All copies of this node. Methods are called in one thread.

    :param parent: where the directory of the copies is made.
    :param working_dir: of tasks: the endpoint's copies are below.
    :param host: the address of this node at which other managers reach it.
    :raises OSError: if there is no such directory, or no port is free.
    """

    def __init__(self, parent: Path, *, working_dir: Path, host: str) -> None:
        self._working_dir = working_dir
        # With the host: on a file system of several nodes, locks may be known on their own node only.
        prefix = f"farcall-temporary-files-{socket.gethostname()}-"
        self._directory = ProcessDirectory(parent.resolve(), prefix=prefix)
        self._directory.remove_leftovers()
        self.root = self._directory.path
        self._there: dict[FileContent, _Inode] = {}
        self._noting = threading.Lock()  # while a copy and what is noted of it differ
        self._linked: dict[Path, list[FileContent]] = {}  # by the directory of a task; for one thread
        self._drafts: dict[FileContent, _Draft] = {}
        self._failed: set[FileContent] = set()  # of which the last copy has failed
        self._changed = threading.Condition()  # of these
        self._events: EventQueue[Event] = EventQueue()
        self._is_closed = threading.Event()
        self._client = FileClient()
        self._copying: queue.SimpleQueue[Copy | None] = queue.SimpleQueue()
        self._actions: queue.SimpleQueue[FileAction | None] = queue.SimpleQueue()
        self._linking: threading.Thread | None = None
        self._watching: threading.Thread | None = None
        self._copiers: set[threading.Thread] = set()
        self._hung: set[threading.Thread] = set()  # that were given up
        self._starting = threading.Lock()  # of these sets
        self._numbers = itertools.count(1)
        self._key = b""
        try:
            self._server = FileServer(host, read=self._read)
        except BaseException:
            self._directory.remove()
            self._events.close()
            raise

    @property
    def address(self) -> str:
        """Address where other managers get copies."""
        return self._server.address

    def set_key(self, key: bytes) -> None:
        """Set the key of the agent. From now on, this manager serves copies and gets copies from other nodes."""
        self._key = key
        self._client.set_key(key)
        self._server.start(key)

    def directory_of(self, submitter: str) -> Path:
        """Return the directory of copies that a submitter's tasks may read, created if missing. The owner's tasks
        (empty) may read those of all submitters."""
        path = self._path(submitter) if submitter else self.root
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        return path

    def fileno(self) -> int:
        """A descriptor that is readable when :meth:`events` has events."""
        return self._events.fileno()

    def events(self) -> list[Event]:
        """Return the events since the last call."""
        return self._events.take()

    def perform(self, action: FileAction) -> None:
        """Perform an action, in a thread."""
        self._start_threads()
        match action:
            case Copy(content=content) if not self._copiers:
                self._report(CopyEnded(content, _NO_THREAD, is_local=True))
                return
            case Link(number=number) if self._linking is None:
                self._report(Linked(number, problem=_NO_THREAD))
                return
            case Copy(content=content):  # from now on, others may ask for it
                with self._changed:
                    self._drafts[content] = _Draft()
                    self._failed.discard(content)
                    self._changed.notify_all()
        self._actions.put(action)

    def _start_threads(self) -> None:
        """Start those that do not run yet, as far as this node has threads: the next action tries again."""
        if self._key:
            self._server.start(self._key)
        with self._starting:
            self._linking = self._linking or started(self._perform_all, "farcall-links")
            self._watching = self._watching or started(self._watch, "farcall-copies-watch")
            while self._linking and self._watching and len(self._copiers) < _THREADS:
                thread = started(self._copy_all, "farcall-copies")
                if thread is None:
                    return
                self._copiers.add(thread)

    def close(self) -> None:
        """End all threads, and remove all copies."""
        self._is_closed.set()
        with self._changed:
            self._changed.notify_all()
        self._server.close()
        self._client.close()
        self._actions.put(None)
        with self._starting:
            own = [each for each in (self._linking, self._watching) if each is not None]
            threads = [*self._copiers, *self._hung, *own]
        for _ in threads:
            self._copying.put(None)
        ends_at = time.monotonic() + _END_LIMIT_S
        for thread in threads:
            thread.join(max(0.0, ends_at - time.monotonic()))  # one that reads from a file system that hangs stays
        self._directory.remove()
        if not any(thread.is_alive() for thread in threads):  # such a one may report yet
            self._events.close()

    def _report(self, event: Event) -> None:
        self._events.put(event)

    def _path(self, submitter: str) -> Path:
        return self.root / (name_of(submitter) if submitter else _OWNER)

    def _copy_path(self, content: FileContent) -> Path:
        return self._path(content.submitter) / _COPIES / content.sha256

    def _read(self, content: Wanted) -> Answered:
        """A copy, in ranges of its file. In a thread of the server. Ends early if the copy has failed.

        :raises KeyError: if there is none, and none comes.
        :raises OSError: if it cannot be read.
        """

        if not isinstance(content, FileContent):
            raise KeyError(content)

        def is_known() -> bool:  # the agent has named this node to another one before it has heard of that itself
            draft = self._drafts.get(content)
            if draft is not None:
                return draft.path is not None or self._is_closed.is_set()
            return content in self._there or content in self._failed or self._is_closed.is_set()

        with self._changed:
            self._changed.wait_for(is_known, _UNKNOWN_LIMIT_S)
            draft = None if content in self._there else self._drafts[content]
            path = None if draft is None else draft.path
            if draft is not None and path is None:
                raise KeyError(content)
        sent = 0
        with self._opened(content, path) as file:  # without the lock, which the manager waits for
            while sent < content.size_bytes:
                with self._changed:
                    if draft is not None:
                        self._changed.wait_for(functools.partial(self._has_more, draft, sent), SILENCE_LIMIT_S)
                    end = content.size_bytes if draft is None or draft.is_complete else draft.written
                    if (draft is not None and draft.has_failed) or end <= sent or self._is_closed.is_set():
                        return
                yield Range(file, sent, end - sent)
                sent = end

    def _opened(self, content: FileContent, draft: Path | None) -> BinaryIO:
        """A copy, or its draft.

        :raises OSError: if it cannot be read, or a task has changed it.
        """
        if draft is not None:
            with contextlib.suppress(FileNotFoundError):  # it has become the copy
                return os.fdopen(_open_regular(draft), "rb", buffering=0)
        descriptor = _open_regular(self._copy_path(content))
        with self._noting:
            is_right = self._there.get(content) == _Inode.of(os.fstat(descriptor))
        if not is_right:
            os.close(descriptor)
            raise OSError(errno.ESTALE, "a task has changed it")
        return os.fdopen(descriptor, "rb", buffering=0)

    def _has_more(self, draft: _Draft, sent: int) -> bool:
        return draft.written > sent or draft.is_complete or draft.has_failed or self._is_closed.is_set()

    # -- links ---------------------------------------------------------------------------------------------------------

    def _perform_all(self) -> None:
        """Perform actions in order. A copy begins after what was removed before: it may be the same one."""
        while (action := self._actions.get()) is not None:
            match action:
                case Copy():
                    self._copying.put(action)
                case Link():
                    self._report(self._link(action))
                case Unlink(number=number, submitter=submitter):
                    self._unlink(self._path(submitter) / _TASKS / str(number))
                case RemoveCopies(contents=contents):
                    for each in contents:
                        self._remove(each)

    def _link(self, action: Link) -> Linked:
        directory = self._path(action.submitter) / _TASKS / str(action.number)
        lost: list[FileContent] = []
        try:
            for each in action.files:
                content = FileContent(action.submitter, each.sha256, each.size_bytes)
                copy = self._copy_path(content)
                link = directory / "r" / each.place
                link.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                with self._noting:
                    if not self._is_right(content):
                        lost.append(content)
                        continue
                    os.link(copy, link, follow_symlinks=False)
                    self._there[content] = _Inode.of(copy.lstat())
                self._linked.setdefault(directory, []).append(content)
        except OSError as error:
            return Linked(action.number, problem=f"{error.strerror}: {directory}")
        if lost:
            for content in lost:
                self._remove(content)
            return Linked(action.number, problem=f"{len(lost)} copies were changed by tasks", lost=tuple(lost))
        return Linked(action.number, str(directory))

    def _unlink(self, directory: Path) -> None:
        """Remove the links of a task. What it has changed stays noted as it was, so that it is not right."""
        with self._noting:
            right = [each for each in self._linked.pop(directory, ()) if self._is_right(each)]
            remove_tree(str(directory))
            for each in right:
                with contextlib.suppress(OSError):
                    self._there[each] = _Inode.of(self._copy_path(each).lstat())

    def _is_right(self, content: FileContent) -> bool:
        try:
            return self._there.get(content) == _Inode.of(self._copy_path(content).lstat())
        except OSError:
            return False

    def _remove(self, content: FileContent) -> None:
        self._there.pop(content, None)
        with contextlib.suppress(OSError):
            self._copy_path(content).unlink()

    # -- copies --------------------------------------------------------------------------------------------------------

    def _copy_all(self) -> None:
        while (action := self._copying.get()) is not None:
            draft = self._drafts[action.content]
            ended = self._copied(action, draft)
            if draft.is_given_up:  # another thread does this one's work
                break
            self._report(ended)
        with self._starting:
            self._hung.discard(threading.current_thread())

    def _copied(self, action: Copy, draft: _Draft) -> CopyEnded:
        content = action.content
        try:
            self._copy(action, draft)
        except _LocalProblem as error:
            return CopyEnded(content, str(error), is_local=True)
        except SourceFailed as error:
            _logger.warning("no copy of %s from %s: %s", content.sha256, _shown(action.source), error)
            return CopyEnded(content, str(error), reached=error.reached)
        source = _shown(action.source)
        _logger.debug("copied %s, %d bytes, from %s", content.sha256, content.size_bytes, source)
        return CopyEnded(content)

    def _copy(self, action: Copy, draft: _Draft) -> None:
        content = action.content
        copy = self._copy_path(content)
        path = self._path(content.submitter) / _DRAFTS / f"{content.sha256}-{next(self._numbers)}"
        with self._changed:
            draft.thread, draft.moved_at = threading.current_thread(), time.monotonic()
        try:
            if len(self._hung) >= (_MOST_HUNG if action.source else 1):
                raise _LocalProblem("other copies hang: the file system does not answer")
            for each in (path.parent, copy.parent):
                each.mkdir(mode=0o700, parents=True, exist_ok=True)
            if shutil.disk_usage(self.root).free < content.size_bytes:
                raise _LocalProblem(f"{self.root} has no room for {content.size_bytes:,} bytes")
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            draft.path = path
            source = self._client.read(content, action.source) if action.source else self._from_disk(action.path)
            with contextlib.closing(source), os.fdopen(descriptor, "wb", buffering=0) as file:
                digest, size_bytes = hashlib.sha256(), 0
                self._has_come(draft, path, 0)
                for piece in source:
                    if self._is_closed.is_set() or draft.is_given_up:
                        raise _LocalProblem("it is not needed any more")
                    size_bytes += len(piece)
                    if size_bytes > content.size_bytes:
                        break
                    digest.update(piece)
                    rest = piece
                    while rest:
                        rest = rest[file.write(rest) :]
                    self._has_come(draft, path, size_bytes)
                if size_bytes != content.size_bytes or digest.hexdigest() != content.sha256:
                    raise SourceFailed("what came has another size or SHA-256")
                os.fchmod(file.fileno(), 0o444)
            with self._changed:
                if draft.is_given_up:
                    raise _LocalProblem("it is not needed any more")
                draft.moved_at = None  # now, all of it is here
            with self._noting:
                path.rename(copy)
                self._there[content] = _Inode.of(copy.lstat())
            draft.is_complete = True
        except OSError as error:
            raise _LocalProblem(f"{error.strerror or error}: {self.root}") from error
        finally:
            if draft.path is not None:  # before it ends: this may hang, too
                with contextlib.suppress(OSError):
                    path.unlink()
            with self._changed:
                if not draft.is_given_up:
                    self._end_draft(content, draft)

    def _end_draft(self, content: FileContent, draft: _Draft) -> None:
        del self._drafts[content]
        if not draft.is_complete:
            draft.has_failed = True
            if len(self._failed) >= _MOST_FAILED:
                self._failed.clear()
            self._failed.add(content)
        self._changed.notify_all()

    def _watch(self) -> None:
        """Give up copies that hang, in a thread of its own: also the links may hang, if the node's disk does."""
        looked_at = time.monotonic()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._drafts or self._is_closed.is_set())
            if self._is_closed.wait(_LOOK_S):
                return
            now = time.monotonic()
            if now > looked_at + _STOPPED_S:
                with self._changed:
                    for draft in self._drafts.values():
                        draft.moved_at = draft.moved_at and now
            else:
                self._give_up_hung(now - _HUNG_LIMIT_S)
                self._start_threads()  # in place of those, and of any that could not be started before
            looked_at = now

    def _give_up_hung(self, latest: float) -> None:
        """Give up copies that have not moved since ``latest``, with their threads."""
        given_up: list[FileContent] = []
        with self._starting, self._changed:  # both: such a thread may come back at this moment
            for content, draft in list(self._drafts.items()):
                if draft.thread is not None and draft.moved_at is not None and draft.moved_at <= latest:
                    draft.is_given_up = True
                    self._end_draft(content, draft)
                    self._copiers.discard(draft.thread)
                    self._hung.add(draft.thread)
                    given_up.append(content)
        for content in given_up:
            _logger.warning("no byte of a copy of %s has come for %g s", content.sha256, _HUNG_LIMIT_S)
            self._report(CopyEnded(content, f"no byte has come for {_HUNG_LIMIT_S:g} s", is_local=True))

    def _has_come(self, draft: _Draft, path: Path, size_bytes: int) -> None:
        with self._changed:
            draft.path, draft.written, draft.moved_at = path, size_bytes, time.monotonic()
            self._changed.notify_all()

    def _from_disk(self, path: str) -> Generator[memoryview, None, None]:
        """The endpoint's copy, in the directory of a task, which may have put links anywhere in there."""
        buffer = memoryview(bytearray(PIECE_BYTES))
        try:
            descriptor = _open_below(self._working_dir, Path(path).relative_to(self._working_dir).parts)
            with os.fdopen(descriptor, "rb", buffering=0) as file:
                while count := file.readinto(buffer):
                    yield buffer[:count]
        except (OSError, ValueError) as error:
            raise SourceFailed(f"the endpoint's copy cannot be read: {error}") from error


def _shown(source: str) -> str:
    return f"the node at {source}" if source else "the endpoint's directory"


def _open_below(root: Path, parts: Sequence[str]) -> int:
    """A descriptor of a regular file, reached by no link.

    :raises OSError: if there is none.
    """
    directory = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for part in parts[:-1]:
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW
            below = os.open(part, flags, dir_fd=directory)
            os.close(directory)
            directory = below
        return _open_regular(parts[-1], directory)
    finally:
        os.close(directory)


def _open_regular(name: str | Path, directory: int | None = None) -> int:
    """A descriptor of a regular file. It waits neither for the writer of a pipe nor for a task that has a lease.

    :raises OSError: if there is none, a task has a lease on it (EWOULDBLOCK), or it is a link.
    """
    file = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=directory)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(errno.EINVAL, "it is not a regular file")
    return file


def address_towards(host: str) -> str:
    """The address of this machine from which another one is reached.

    :raises OSError: if the name of that is unknown, or there is no way to it.
    """
    family, _, _, _, where = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:  # nothing is sent
        probe.connect(where)
        return str(probe.getsockname()[0])
