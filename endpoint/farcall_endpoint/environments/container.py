"""Containers of a launcher: what is to be started, what runs, and what its runner prints."""

from __future__ import annotations

import contextlib
import dataclasses
import hmac
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from farcall_common.environments import Environment
from farcall_common.plain_text import PlainStream
from farcall_endpoint.environments.prepare import probe
from farcall_endpoint.environments.prepare.access import Place
from farcall_endpoint.environments.runners.base import Mount
from farcall_endpoint.worker.boot import BEGUN, SECRET, Boot, Descriptors

SOCKET: Final = "s"
"""The name of a container's socket in its directory: paths of sockets are short."""
_MOST_UNPROVED: Final = 16
"""Connections of a container's socket whose process has not sent the secret."""
_MOST_SECRET_BYTES: Final = 256
_MOST_LOG_BYTES: Final = 256 * 1024
"""A runner that prints more has its output closed."""
_TAIL_BYTES: Final = 16 * 1024


@dataclasses.dataclass(frozen=True)
class ContainerStart:
    """Request of a manager to start a worker.

    :param boot, descriptors: data and descriptors for the worker; the caller keeps the descriptors.
    :param sent: called when the descriptors are not needed any more.
    :param mounts: working directories to mount, besides the mounts of the settings.
    :param variables: variables of the runner's own process; with a Python prefix, also of the worker until it boots.
    :param group: name of the group of workers that see the same files of the node and may be forks of one template.
    :param fork: whether the worker may be a fork of a template, and its own template may have other forks.
    :param accelerators, amd, private_root: see :class:`~farcall_endpoint.environments.runners.base.Start`.
    :param locate: checks the file or directory that a submitter names on the node, at each start, or raises
        :class:`~farcall_endpoint.environments.NotLocated`; None: there is nothing to check.
    :param confine: returns the words before a runner's command, given further paths that the runner must read, the
        image, and the result of ``locate``.
    :param before: words before the whole command.
    :param within: words before the program itself: a runner clears the variables of words before its own command.
    """

    boot: Boot
    descriptors: Descriptors
    sent: Callable[[], object]
    mounts: tuple[Mount, ...]
    variables: Mapping[str, str]
    group: str = ""
    fork: bool = False
    accelerators: tuple[str, ...] = ()
    amd: bool = False
    private_root: bool = False
    locate: Callable[[], Place | None] | None = None
    confine: Callable[[Sequence[str], str, Place | None], Sequence[str]] | None = None
    before: Sequence[str] = ()
    within: Sequence[str] = ()


class Container:
    """A container that starts or runs; its process is the runner's, the leader of a session.

    ``worker_pid``: the worker's process as seen here, once it has connected; 0 if the system does not say.
    ``template_key``, ``origin``: of the template of workers like this, and how that is started. ``modules``: if it is a
    template itself, what that imports.
    ``secret``: what its program sends first. It is in the directory that the container alone sees.
    ``has_stop``: whether a command makes sure of its end. ``is_remote``: it is no descendant of its runner.
    """

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        *,
        name: str,
        directory: Path,
        listener: socket.socket,
        secret: bytes,
        log: StartLog,
        has_stop: bool,
        is_remote: bool,
    ) -> None:
        self.pid = process.pid
        self.name = name
        self.has_stop = has_stop
        self.is_remote = is_remote
        self.worker_pid = 0
        self.log = log
        self.listener: socket.socket | None = listener
        self.secret = secret
        self._unproved: dict[int, tuple[socket.socket, int]] = {}  # connections and process ids, the oldest first
        self.connection: socket.socket | None = None
        self.has_begun = False
        self.template_key = ""
        self.origin: tuple[Environment, ContainerStart] | None = None
        self.modules: tuple[str, ...] | None = None
        self._pidfd: int | None = None
        self._process = process
        self._directory = directory

    def accept(self, connection: socket.socket, pid: int) -> int | None:
        """A process has connected: keep the connection until it has sent the secret. Return the descriptor of a
        connection to be forgotten, if there are too many."""
        self._unproved[connection.fileno()] = connection, pid
        return next(iter(self._unproved)) if len(self._unproved) > _MOST_UNPROVED else None

    def unproved(self) -> list[int]:
        """The descriptors of connections whose process has not sent the secret."""
        return list(self._unproved)

    def drop(self, descriptor: int) -> None:
        """Close one of them."""
        self._unproved.pop(descriptor)[0].close()

    def proved(self, descriptor: int) -> tuple[socket.socket, int] | None:
        """Return a connection and its process id, if its process has sent the secret."""
        connection, _ = self._unproved[descriptor]
        try:
            sent = connection.recv(_MOST_SECRET_BYTES, socket.MSG_DONTWAIT)
        except OSError:
            return None
        return self._unproved.pop(descriptor) if hmac.compare_digest(sent, self.secret) else None

    def connected(self, connection: socket.socket, pid: int) -> None:
        """Its program has connected."""
        self.stop_listening()
        self.connection = connection
        self.worker_pid = pid
        if self.is_remote and pid > 0:
            with contextlib.suppress(OSError):
                self._pidfd = os.pidfd_open(pid)

    def read(self) -> None:
        """Whether the worker has begun."""
        if self.connection is not None and not self.has_begun:
            with contextlib.suppress(OSError):
                self.has_begun = self.connection.recv(len(BEGUN)) == BEGUN

    def kill_remote(self) -> None:
        """Kill the worker if it is no descendant of this process; all in its container end with it."""
        if self._pidfd is not None:
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def wait(self) -> int:
        """Wait for the end of the runner; its exit code, or the negative number of the signal that killed it."""
        return self._process.wait()

    def stop_listening(self) -> None:
        """Accept no more connections."""
        if self.listener is not None:
            self.listener.close()
            self.listener = None
            for name in (SOCKET, SECRET):
                with contextlib.suppress(OSError):
                    (self._directory / name).unlink()

    def close(self) -> None:
        """Remove what the start needed."""
        self.stop_listening()
        for descriptor in self.unproved():
            self.drop(descriptor)
        if self.connection is not None:
            self.connection.close()
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None
        self.log.close()
        shutil.rmtree(self._directory, ignore_errors=True)


class StartLog:
    """Output of a runner: a pipe that this process reads, and a file with its beginning.

    :param path: the file; None: none.
    """

    def __init__(self, path: Path | None) -> None:
        self._reader, self.writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        os.set_blocking(self.writer, True)
        self._left_bytes = _MOST_LOG_BYTES
        self._tail = b""
        self._plain = PlainStream()
        self._file: int | None = None
        with contextlib.suppress(OSError):
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
            self._file = None if path is None else os.open(path, flags, 0o600)

    def fileno(self) -> int:
        """Readable when there is output, or its end; -1 after that."""
        return self._reader

    def started(self) -> None:
        """The runner has its own copy of the pipe's other end."""
        os.close(self.writer)
        self.writer = -1

    def read(self) -> bool:
        """Read what there is; False at the end."""
        while self._reader >= 0:
            try:
                data = os.read(self._reader, _TAIL_BYTES)
            except BlockingIOError:
                return True
            self._left_bytes -= len(data)
            self._tail = (self._tail + data)[-_TAIL_BYTES:]
            if self._file is not None:
                with contextlib.suppress(OSError):  # a full disk is no reason not to start
                    os.write(self._file, self._plain.write(data))
            if not data or self._left_bytes < 0:
                return False
        return False

    def last_lines(self) -> str:
        """The end of the output, for an error message."""
        return probe.last_lines(self._tail)

    def close(self) -> None:
        """Close all descriptors."""
        for descriptor in (self._reader, self.writer, self._file):
            if descriptor is not None and descriptor >= 0:
                os.close(descriptor)
        self._reader = self.writer = -1
        self._file = None
