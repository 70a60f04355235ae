"""Copies of files on this node, and the server from which other managers get them. Threads do all of it.

``ROOT/NAME/copies/SHA256`` is a copy of a submitter, ``ROOT/NAME/tasks/NUMBER/r/…`` has the links of a task. A manager
that asks for a copy proves that it has the key of the agent, which tasks never get: the server sends random bytes, and
gets an HMAC of these and the request back. The request names the server's address, so that no other node can pass the
proof on. What is sent is not encrypted; who receives it checks the SHA-256.
A copy that is on its way here is passed on as far as it has come.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import hashlib
import hmac
import logging
import os
import queue
import secrets
import shutil
import socket
import stat
import threading
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple

import msgspec

from farcall_endpoint.manager.actions import Copy, FileAction, Link, RemoveCopies, Unlink
from farcall_endpoint.manager.events import CopyEnded, Event, Linked
from farcall_endpoint.process_directory import ProcessDirectory
from farcall_endpoint.protocol import FileContent
from farcall_endpoint.removal import remove_tree
from farcall_endpoint.worker.directories import name_of

_logger = logging.getLogger(__name__)

_OWNER: Final = "owner"
_COPIES: Final = "copies"
_DRAFTS: Final = "drafts"
_TASKS: Final = "tasks"
_THREADS: Final = 4
"""That copy at a time."""
_MOST_READERS: Final = 16
"""That are served at a time; each has a thread."""
_MOST_HANDSHAKES: Final = 32
"""Connections that have not proved yet that they are managers; each has a thread."""
_MOST_REQUEST_BYTES: Final = 1024
_CONNECT_LIMIT_S: Final = 5.0
_HANDSHAKE_LIMIT_S: Final = 5.0
_SILENCE_LIMIT_S: Final = 30.0
_COPY_LIMIT_S: Final = 60.0
_LEAST_BYTES_PER_S: Final = 1e6
"""A copy from another node takes ``_COPY_LIMIT_S`` and the time that its bytes take at this rate, or it fails."""
_UNKNOWN_LIMIT_S: Final = 2.0
"""So long a node that was named as a source may take to hear of the copy itself."""
_MOST_FAILED: Final = 1000
_PAUSE_S: Final = 1.0
_END_LIMIT_S: Final = 2.0
_PIECE_BYTES: Final = 2**20
_CHALLENGE_BYTES: Final = 32
_MAC_BYTES: Final = 32
_LENGTH_BYTES: Final = 2
_SIZE_BYTES: Final = 8
_NO_THREAD: Final = "the node cannot start another thread"
_MISSING: Final = 2**64 - 1
"""In place of the size: the node has no such copy."""
_encode: Final = msgspec.msgpack.Encoder().encode


class _Request(msgspec.Struct, frozen=True, array_like=True):
    """What a manager wants of the server at ``address`` (``host:port``)."""

    address: str
    content: FileContent


_decode: Final = msgspec.msgpack.Decoder(_Request).decode


class _Inode(NamedTuple):
    """What shows that a task has written to a copy, through its link. A task can set the mtime back, and not the ctime;
    this node's own links move the ctime too."""

    inode: int
    size_bytes: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, found: os.stat_result) -> _Inode:
        return cls(found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


@dataclasses.dataclass(eq=False)
class _Draft:
    """A copy on its way: ``written`` bytes of it are in the file at ``path``, None before that exists."""

    path: Path | None = None
    written: int = 0
    is_complete: bool = False
    has_failed: bool = False


class _LocalProblem(Exception):
    """This node cannot keep a copy."""


class _SourceFailed(Exception):
    """A copy could not be had from a source."""

    def __init__(self, reason: str, *, reached: bool = True) -> None:
        super().__init__(reason)
        self.reached = reached


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
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._waker = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._is_closed = threading.Event()
        self._sockets: set[socket.socket] = set()
        self._copying: queue.SimpleQueue[Copy | None] = queue.SimpleQueue()
        self._actions: queue.SimpleQueue[FileAction | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []  # the first one makes links, the others copy
        self._key = b""
        try:
            self._server = FileServer(host, read=self._read)
        except BaseException:
            self._directory.remove()
            os.close(self._waker)
            raise

    @property
    def address(self) -> str:
        """Where other managers get copies."""
        return self._server.address

    def set_key(self, key: bytes) -> None:
        """The key of the agent has come: from now on, copies are given and got."""
        self._key = key
        self._server.start(key)

    def directory_of(self, submitter: str) -> Path:
        """The directory that tasks of a submitter may read, those of the owner (empty) as all else: that of all
        submitters. It is made if it does not exist."""
        path = self._path(submitter) if submitter else self.root
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        return path

    def fileno(self) -> int:
        """Readable when :meth:`events` has some."""
        return self._waker

    def events(self) -> list[Event]:
        """What has happened since the last call."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._waker)
        found: list[Event] = []
        with contextlib.suppress(queue.Empty):
            while True:
                found.append(self._events.get_nowait())
        return found

    def perform(self, action: FileAction) -> None:
        """Perform an action, in a thread."""
        self._start_threads()
        match action:
            case Copy(content=content) if len(self._threads) < 2:
                self._report(CopyEnded(content, _NO_THREAD, is_local=True))
                return
            case Link(number=number) if not self._threads:
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
        for number in range(len(self._threads), 1 + _THREADS):
            name, run = (f"farcall-copies-{number}", self._copy_all) if number else ("farcall-links", self._perform_all)
            if not _has_started(thread := threading.Thread(target=run, name=name, daemon=True)):
                return
            self._threads.append(thread)

    def close(self) -> None:
        """End all threads, and remove all copies."""
        self._is_closed.set()
        with self._changed:
            self._changed.notify_all()
        self._server.close()
        for each in list(self._sockets):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        self._actions.put(None)
        for _ in range(_THREADS):
            self._copying.put(None)
        for thread in self._threads:
            thread.join(_END_LIMIT_S)  # one that reads from a file system that hangs does not end
        self._directory.remove()
        if not any(thread.is_alive() for thread in self._threads):  # such a one may report yet
            os.close(self._waker)

    def _report(self, event: Event) -> None:
        self._events.put(event)
        os.eventfd_write(self._waker, 1)

    def _path(self, submitter: str) -> Path:
        return self.root / (name_of(submitter) if submitter else _OWNER)

    def _copy_path(self, content: FileContent) -> Path:
        return self._path(content.submitter) / _COPIES / content.sha256

    def _read(self, content: FileContent) -> Generator[tuple[BinaryIO, int, int], None, None]:
        """A copy, in parts: its file, where the part begins, and its length. In a thread of the server. Ends early if
        the copy has failed.

        :raises KeyError: if there is none, and none comes.
        :raises OSError: if it cannot be read.
        """

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
                        self._changed.wait_for(functools.partial(self._has_more, draft, sent), _SILENCE_LIMIT_S)
                    end = content.size_bytes if draft is None or draft.is_complete else draft.written
                    if (draft is not None and draft.has_failed) or end <= sent or self._is_closed.is_set():
                        return
                yield file, sent, end - sent
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
            try:
                self._copy(action)
            except _LocalProblem as error:
                self._report(CopyEnded(action.content, str(error), is_local=True))
            except _SourceFailed as error:
                _logger.warning("no copy of %s from %s: %s", action.content.sha256, _shown(action.source), error)
                self._report(CopyEnded(action.content, str(error), reached=error.reached))
            else:
                _logger.debug(
                    "copied %s, %d bytes, from %s",
                    action.content.sha256,
                    action.content.size_bytes,
                    _shown(action.source),
                )
                self._report(CopyEnded(action.content))

    def _copy(self, action: Copy) -> None:
        content = action.content
        path = self._copy_path(content)
        draft = self._path(content.submitter) / _DRAFTS / content.sha256
        state = self._drafts[content]
        try:
            for each in (draft.parent, path.parent):
                each.mkdir(mode=0o700, parents=True, exist_ok=True)
            if shutil.disk_usage(self.root).free < content.size_bytes:
                raise _LocalProblem(f"{self.root} has no room for {content.size_bytes:,} bytes")
            draft.unlink(missing_ok=True)
            descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            source = self._from_manager(content, action.source) if action.source else self._from_disk(action.path)
            with contextlib.closing(source), os.fdopen(descriptor, "wb", buffering=0) as file:
                digest, size_bytes = hashlib.sha256(), 0
                self._has_come(state, draft, 0)
                for piece in source:
                    if self._is_closed.is_set():
                        raise _LocalProblem("the manager ends")
                    size_bytes += len(piece)
                    if size_bytes > content.size_bytes:
                        break
                    digest.update(piece)
                    rest = piece
                    while rest:
                        rest = rest[file.write(rest) :]
                    self._has_come(state, draft, size_bytes)
                if size_bytes != content.size_bytes or digest.hexdigest() != content.sha256:
                    raise _SourceFailed("what came has another size or SHA-256")
                os.fchmod(file.fileno(), 0o444)
            with self._noting:
                draft.rename(path)
                self._there[content] = _Inode.of(path.lstat())
            state.is_complete = True
        except OSError as error:
            raise _LocalProblem(f"{error.strerror or error}: {self.root}") from error
        finally:
            with self._changed:
                del self._drafts[content]
                if not state.is_complete:
                    state.has_failed = True
                    if len(self._failed) >= _MOST_FAILED:
                        self._failed.clear()
                    self._failed.add(content)
                self._changed.notify_all()
            with contextlib.suppress(OSError):
                draft.unlink()

    def _has_come(self, state: _Draft, path: Path, size_bytes: int) -> None:
        with self._changed:
            state.path, state.written = path, size_bytes
            self._changed.notify_all()

    def _from_disk(self, path: str) -> Generator[memoryview, None, None]:
        """The endpoint's copy, in the directory of a task, which may have put links anywhere in there."""
        buffer = memoryview(bytearray(_PIECE_BYTES))
        try:
            descriptor = _open_below(self._working_dir, Path(path).relative_to(self._working_dir).parts)
            with os.fdopen(descriptor, "rb", buffering=0) as file:
                while count := file.readinto(buffer):
                    yield buffer[:count]
        except (OSError, ValueError) as error:
            raise _SourceFailed(f"the endpoint's copy cannot be read: {error}") from error

    def _from_manager(self, content: FileContent, address: str) -> Generator[memoryview, None, None]:
        host, _, port = address.rpartition(":")
        buffer = memoryview(bytearray(_PIECE_BYTES))
        ends_at = time.monotonic() + _COPY_LIMIT_S + content.size_bytes / _LEAST_BYTES_PER_S
        try:
            connection = socket.create_connection((host, int(port)), timeout=_CONNECT_LIMIT_S)
        except (OSError, ValueError, OverflowError) as error:  # the last: a port above 65,535
            raise _SourceFailed(f"it cannot be reached: {error}", reached=False) from error
        with connection:
            self._sockets.add(connection)
            try:
                if self._is_closed.is_set():  # it may not have seen this socket
                    raise _SourceFailed("the manager ends")
                challenge = _received(connection, _CHALLENGE_BYTES, ends_at)
                request = _encode(_Request(address, content))
                proof = hmac.digest(self._key, challenge + request, "sha256")
                connection.sendall(len(request).to_bytes(_LENGTH_BYTES) + request + proof)
                left = int.from_bytes(_received(connection, _SIZE_BYTES, ends_at))
                if left != content.size_bytes:
                    raise _SourceFailed("it does not have it")
                while left:
                    _limit(connection, ends_at)
                    count = connection.recv_into(buffer, min(left, _PIECE_BYTES))
                    if not count:
                        raise _SourceFailed("the connection was closed in the middle")
                    left -= count
                    yield buffer[:count]
            except OSError as error:
                raise _SourceFailed(f"the connection has failed: {error}") from error
            finally:
                self._sockets.discard(connection)


class FileServer:
    """Gives copies to other managers.

    :param read: gives a copy in parts, or raises KeyError; called in several threads.
    :raises OSError: if no port is free.
    """

    def __init__(
        self, host: str, *, read: Callable[[FileContent], Generator[tuple[BinaryIO, int, int], None, None]]
    ) -> None:
        self._read = read
        self._key = b""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, 0), family=family, backlog=_MOST_HANDSHAKES)
        #: ``host:port``
        self.address = f"{host}:{self._socket.getsockname()[1]}"
        self._room = threading.BoundedSemaphore(_MOST_READERS)
        self._connections: set[socket.socket] = set()
        self._handshakes: dict[socket.socket, None] = {}  # those of the connections; the oldest first
        self._lock = threading.Lock()  # of these
        self._threads: set[threading.Thread] = set()
        self._accepting: threading.Thread | None = None
        self._is_closed = threading.Event()

    def start(self, key: bytes) -> None:
        """Serve those who have this key, if that is not done yet."""
        self._key = key
        if self._accepting is None:
            thread = threading.Thread(target=self._accept, name="farcall-file-server", daemon=True)
            if _has_started(thread):
                self._accepting = thread

    def close(self) -> None:
        """End all connections."""
        self._is_closed.set()
        for each in (self._socket, *self._connections):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        if self._accepting is not None:
            self._accepting.join()
        for thread in list(self._threads):
            thread.join(_END_LIMIT_S)
        self._socket.close()

    def _accept(self) -> None:
        while not self._is_closed.is_set():
            try:
                connection, _ = self._socket.accept()
            except OSError as error:
                if not self._is_closed.is_set():
                    _logger.warning("the server of files cannot accept a connection: %s", error)
                    self._is_closed.wait(_PAUSE_S)  # too many open files, for instance
                continue
            thread = threading.Thread(target=self._serve, args=(connection,), name="farcall-file-reader", daemon=True)
            self._connections.add(connection)
            self._threads.add(thread)
            with self._lock:
                self._handshakes[connection] = None
                oldest = next(iter(self._handshakes)) if len(self._handshakes) > _MOST_HANDSHAKES else None
            if oldest is not None:  # who lacks the key cannot keep managers out: their handshake takes a moment
                self._end_handshake(oldest)
                with contextlib.suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)
            if not _has_started(thread):
                self._forget(connection, thread)
                connection.close()
                self._is_closed.wait(_PAUSE_S)

    def _end_handshake(self, connection: socket.socket) -> None:
        with self._lock:
            self._handshakes.pop(connection, None)

    def _forget(self, connection: socket.socket, thread: threading.Thread) -> None:
        self._end_handshake(connection)
        self._connections.discard(connection)
        self._threads.discard(thread)

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection:
                content = self._requested(connection)
                self._end_handshake(connection)
                if content is None or not self._room.acquire(blocking=False):
                    return
                try:
                    self._answer(connection, content)
                finally:
                    self._room.release()
        except (OSError, ValueError) as error:  # it has ended, or is no manager
            _logger.debug("a reader of files: %s", error)
        finally:
            self._forget(connection, threading.current_thread())

    def _requested(self, connection: socket.socket) -> FileContent | None:
        """What a manager wants; None if it is none of this agent, or wants it from another node."""
        ends_at = time.monotonic() + _HANDSHAKE_LIMIT_S
        challenge = secrets.token_bytes(_CHALLENGE_BYTES)
        _limit(connection, ends_at)
        connection.sendall(challenge)
        length = int.from_bytes(_received(connection, _LENGTH_BYTES, ends_at))
        if length > _MOST_REQUEST_BYTES:
            raise ValueError(f"a request of {length:,} bytes")
        request = _received(connection, length, ends_at)
        proof = _received(connection, _MAC_BYTES, ends_at)
        if not hmac.compare_digest(proof, hmac.digest(self._key, challenge + request, "sha256")):
            _logger.warning("a request for a file without the key of this endpoint's agent")
            return None
        wanted = _decode(request)
        if wanted.address != self.address:
            _logger.warning("a request for a file that was meant for the node at %s", wanted.address)
            return None
        return wanted.content

    def _answer(self, connection: socket.socket, content: FileContent) -> None:
        connection.settimeout(_SILENCE_LIMIT_S)
        with contextlib.closing(self._read(content)) as parts:
            try:
                part = next(parts, None)
            except (KeyError, OSError):
                connection.sendall(_MISSING.to_bytes(_SIZE_BYTES))
                return
            connection.sendall(content.size_bytes.to_bytes(_SIZE_BYTES))
            while part is not None:
                file, offset, count = part
                connection.sendfile(file, offset, count)
                part = next(parts, None)


def _has_started(thread: threading.Thread) -> bool:
    """Start a thread; False if this process may have no more."""
    try:
        thread.start()
    except RuntimeError as error:
        _logger.error("%s cannot run: %s", thread.name, error)
        return False
    return True


def _shown(source: str) -> str:
    return f"the node at {source}" if source else "the endpoint's directory"


def _limit(connection: socket.socket, ends_at: float) -> None:
    """Let the next call wait until an instant of :func:`time.monotonic` at most, and never too long.

    :raises OSError: if it has come.
    """
    left_s = ends_at - time.monotonic()
    if left_s <= 0:
        raise TimeoutError(errno.ETIMEDOUT, "it takes too long")
    connection.settimeout(min(left_s, _SILENCE_LIMIT_S))


def _received(connection: socket.socket, count: int, ends_at: float) -> bytes:
    """So many bytes.

    :raises OSError: if the connection ends before, or they have not come until ``ends_at``.
    """
    received = bytearray()
    while len(received) < count:
        _limit(connection, ends_at)
        if not (piece := connection.recv(count - len(received))):
            raise ConnectionResetError(errno.ECONNRESET, "it was closed")
        received += piece
    return bytes(received)


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
