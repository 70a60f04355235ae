"""Templates, on the side of the manager: forks that are workers within milliseconds.

A launcher starts the template's program in an environment and gives the connection to a :class:`Template`. Nothing here
waits for a template but :meth:`Template.fork` and :meth:`Template.wait_for`: as long as the kernel takes to fork a
process, which is milliseconds, and never more than :data:`ANSWER_S`. A template that has not answered by then, because
the machine is slow or a task has stopped it, is *suspected*: until it answers, workers are started without it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import functools
import hashlib
import os
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from farcall_common.plain_text import plain
from farcall_endpoint.contracts.fork_protocol import (
    MAX_PACKET,
    Branch,
    Exited,
    Fork,
    Forked,
    FromManager,
    FromTemplate,
    Imported,
    Importing,
    Kill,
    NotForked,
    Preload,
    Reap,
    Refused,
    Serving,
    Skipped,
    decode_from_template,
    encode,
)
from farcall_endpoint.host import process_reaper
from farcall_endpoint.host.isolation.environment import is_secret
from farcall_endpoint.worker.boot import MOST_DESCRIPTORS, Boot, Descriptors, send_boot
from farcall_endpoint.worker.template import THREAD_VARIABLES

#: The module whose ``boot`` makes a process a template.
TEMPLATE: Final = "farcall_endpoint.worker.template"

READ_AT_IMPORT: Final = (
    *("PYTHON*", "LD_LIBRARY_PATH", "LD_PRELOAD", "OMP_*", "GOMP_*", "KMP_*", "MKL_*", "OPENBLAS_*", "NUMEXPR_*"),
    *("NUMBA_*", "BLIS_*", "CUDA_*", "NVIDIA_*", "ROCR_*", "HIP_*", "ZE_*", "XLA_*", "JAX_*", "TF_*", "MPLBACKEND"),
    *("LANG", "LANGUAGE", "LC_*", "SSL_CERT_*", "GLIBC_TUNABLES", "MALLOC_*"),
)
"""Environment variables that Python and well-known packages read when they are loaded. A fork cannot change what they
led to, so workers that differ in one of them come from different templates."""
_is_read: Final = re.compile("|".join(map(fnmatch.translate, READ_AT_IMPORT))).match
_is_for_others: Final = re.compile("TF_VAR_").match
"""Values for Terraform, passwords among them; TensorFlow reads none of these."""
_SET_BY_CHILDREN: Final = frozenset(THREAD_VARIABLES)
"""But for these: a template is loaded with one thread, and a child gives the libraries its own number."""

ANSWER_S: Final = 0.25
"""Longest time that the manager's loop waits for a template. A wrong suspicion costs one start without it."""
_SUSPECTED_LIMIT_S: Final = 60.0
"""Time after which a suspected template is killed with its workers, because the ends of workers cannot be seen."""
_MOST_PACKETS: Final = 200
"""Maximum packets to read in one turn: a hostile image sends without end."""
_MOST_REASON: Final = 500
"""Maximum characters of a template's message about itself; its image may be hostile."""
_FILL_AFTER_S: Final = 0.005
"""Delay before a spare child is replaced, so that the worker that it became begins first."""
_BUSY_S: Final = 0.02
"""Interval of forks below which a spare child is replaced at once: the next fork would wait for it."""
_CREDENTIALS: Final = struct.Struct("3i")
_DESCRIPTORS_BYTES: Final = socket.CMSG_LEN(4 * MOST_DESCRIPTORS)
_STATE, _EXIT_CODE = 0, 49
"""Positions of fields in ``/proc/PID/stat``, counted after the name of the program."""
_ANCILLARY_BYTES: Final = socket.CMSG_SPACE(_CREDENTIALS.size)


def variables_of_template(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a worker that its template needs, too, because imports read them. Secrets are left out:
    other users of the node can read the command line of a runner, and no import needs secrets."""
    return {name: value for name, value in variables.items() if _is_of_template(name)}


@functools.lru_cache(maxsize=1000)
def _is_of_template(name: str) -> bool:
    return bool(_is_read(name) and name not in _SET_BY_CHILDREN and not (is_secret(name) or _is_for_others(name)))


def template_key(environment_key: str, variables: Mapping[str, str]) -> str:
    """Return the key of a template: the key of its environment and a digest of its :func:`variables_of_template`."""
    read = tuple(variables_of_template(variables).items())
    return f"{environment_key}-{_digest(read)}" if read else environment_key


@functools.lru_cache(maxsize=64)
def _digest(read: Sequence[tuple[str, str]]) -> str:
    text = "\0".join(f"{name}={value}" for name, value in sorted(read))
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:16]


class TemplateFailed(OSError):
    """A template cannot fork: it ended, or refuses."""


class TemplateSuspected(TemplateFailed):
    """A template has not answered in time. It can fork again when it does."""


@dataclasses.dataclass(frozen=True)
class TemplateImports:
    """Imports of a template. ``cost``: seconds and bytes by module; ``skipped``: reasons by module."""

    cost: Mapping[str, tuple[float, int]]
    skipped: Mapping[str, str]


class ForkedProcess:
    """A fork of a template. It looks like a child process of the manager, without being one.

    ``pid``: its process id as this process sees it; no other process gets it before :meth:`wait` has returned.
    ``pidfd`` belongs to the caller of :meth:`Template.fork`.
    """

    def __init__(
        self, template: Template, connection: socket.socket, end: socket.socket, *, asked: Fork | Branch
    ) -> None:
        self.pid = 0
        self.pidfd = -1
        self.number = asked.number
        self.asked = asked
        self.problem = ""
        self.code: int | None = None
        self.is_released = False  # of a branch: its template is over
        self.connection = connection
        self._end = end  # a copy of the child's
        self._template = template

    def is_answered(self) -> bool:
        """Whether it is known what became of the request."""
        return bool(self.pid or self.problem)

    def take_back(self) -> bool:
        """Take back the boot message, which the child has not read yet; False if it has."""
        try:
            _, ancillary, *_ = self._end.recvmsg(1, _DESCRIPTORS_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        for _, _, data in ancillary:
            for descriptor in memoryview(data).cast("i"):
                os.close(descriptor)
        return True

    def forked(self, pid: int, pidfd: int) -> None:
        """Its process exists."""
        self.pid, self.pidfd = pid, pidfd
        self._end.close()

    def close_pidfd(self) -> None:
        """Watch the process no more. That of a worker belongs to the caller of :meth:`Template.fork`."""
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1

    def detach(self) -> socket.socket:
        """The connection, which is another one's from now on."""
        self._end.close()
        return socket.socket(fileno=self.connection.detach())

    def close(self) -> None:
        """Close the connection to the child, which ends by itself if it has not got its boot message."""
        self.connection.close()
        self._end.close()

    def wait(self) -> int:
        """Wait for its end; the exit code, or the negative number of the signal that killed it."""
        return self._template.wait_for(self)

    def kill(self) -> None:
        """Let the template kill it with all its descendants, also where they belong to another user of this machine."""
        self._template.kill(self)


class Template:
    """A template that runs. Owned by one thread.

    :param connection: the manager's end of a socket of packets, on which nothing was sent before.
    :param modules: to import, in this order.
    :param places: directories besides Python's own whose modules may be imported.
    :param private: directories whose modules are never imported: where submitters or tasks write.
    :param namespaces: whether children have namespaces of their own; where that is impossible, the template is over.
    :param writable: with ``namespaces``, directories of the node that children may write.
    :param network: with ``namespaces``, whether children share the template's network.
    :param spares: how many children are forked in advance.
    :param start_limit_s: longest import of a module.
    """

    def __init__(
        self,
        connection: socket.socket,
        *,
        modules: Sequence[str] = (),
        places: Sequence[str] = (),
        private: Sequence[str] = (),
        namespaces: bool = False,
        writable: Sequence[str] = (),
        network: bool = True,
        spares: int = 0,
        start_limit_s: float = 60.0,
    ) -> None:
        self._connection = connection
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        connection.setblocking(False)
        self._namespaces = namespaces
        self._spares_wanted = spares
        self._import_limit_s = start_limit_s
        self._modules = frozenset(modules)
        self._importing = ""
        self._importing_since = time.monotonic()
        self._cost: dict[str, tuple[float, int]] = {}
        self._skipped: dict[str, str] = {}
        self._forks: dict[int, ForkedProcess] = {}
        self._spares: deque[ForkedProcess] = deque()
        self._next_number = 1
        # Two packets for each module, and one of two at the end of the imports; then two for each child.
        self._packets_left = 2 * len(modules) + 1
        self._fill_at = float("inf")
        self._forked_at = float("-inf")
        self._suspected_at: float | None = None
        self._is_over = False
        self._closing = False
        #: The template's process as this process sees it; None before its first packet.
        self.pid: int | None = None
        self._pidfd = -1
        #: Whether it can fork.
        self.is_serving = False
        #: Memory that it shared with no other process when it began to serve, as it says itself; 0 if it cannot.
        self.private_bytes = 0
        #: Why it ended, or cannot be a template; empty while that is not the case.
        self.problem = ""
        #: The module that led to the problem; empty if none did.
        self.problem_module = ""
        places, private, writable = tuple(places), tuple(private), tuple(writable)
        self._send(Preload(tuple(modules), namespaces, places, private, start_limit_s, writable, network))

    @property
    def imports(self) -> TemplateImports:
        """Imports of the template so far."""
        return TemplateImports(dict(self._cost), dict(self._skipped))

    @property
    def is_over(self) -> bool:
        """Whether the template has ended, or must not be used any more."""
        return self._is_over

    @property
    def is_idle(self) -> bool:
        """Whether it has neither workers nor branches."""
        return len(self._forks) == len(self._spares)

    @property
    def workers(self) -> set[int]:
        """The process ids of its workers, and of the children that it has forked in advance."""
        return {fork.pid for fork in self._forks.values() if fork.pid and not isinstance(fork.asked, Branch)}

    @property
    def forked(self) -> int:
        """How often it was asked to fork."""
        return self._next_number - 1

    @property
    def unanswered(self) -> int:
        """The number of the oldest request to fork that it has not answered; 0 if there is none."""
        return next((number for number, fork in self._forks.items() if not fork.is_answered()), 0)

    def fileno(self) -> int:
        """Readable when :meth:`serve` has something to do; -1 when the template is over and closed."""
        return self._connection.fileno()

    def next_deadline(self) -> float:
        """When :meth:`serve` must be called in any case, in monotonic seconds."""
        if self._is_over:
            return float("inf")
        if self._suspected_at is not None:
            return self._suspected_at + _SUSPECTED_LIMIT_S
        if self.is_serving:
            return self._fill_at
        return self._importing_since + self._import_limit_s

    def serve(self) -> None:
        """Take what the template has sent, end it if an import hangs, and fork spare children. Never waits."""
        for _ in range(_MOST_PACKETS):
            if not self._read():
                break
        if not self.is_serving and time.monotonic() > self.next_deadline():
            self.problem_module = self._importing
            what = f"the import of {self._importing}" if self._importing else "its start"
            self._end(f"{what} took longer than {self._import_limit_s:g} s")
        if self._suspected_at is not None and time.monotonic() > self.next_deadline():
            self._end(f"it has not answered for {_SUSPECTED_LIMIT_S:g} s")
        if time.monotonic() >= self._fill_at:
            self._fill()

    def fork(self, boot: Boot, descriptors: Descriptors) -> ForkedProcess:
        """A worker. The descriptors stay open here.

        :raises TemplateSuspected: if it does not answer.
        :raises TemplateFailed: if there is none; ``problem`` says why if the template is over.
        """
        if not self.is_serving or self._closing or self._is_over:
            raise TemplateFailed(self.problem or "the template does not serve yet")
        if boot.namespaces and not self._namespaces:
            raise TemplateFailed("children of this template have no namespaces of their own")
        if self._suspected_at is not None:
            raise TemplateSuspected("the template does not answer")
        fork = self._take_spare() or self._request()
        try:
            send_boot(fork.connection, boot, descriptors)
        except OSError as error:
            self._discard(fork)
            fork.close()
            raise TemplateFailed(f"the child is gone: {error}") from error
        deadline = time.monotonic() + ANSWER_S
        while not fork.is_answered() and self._wait(deadline):
            self._read()
        if not fork.is_answered():
            self._suspect()
            if fork.take_back():
                self._spares.append(fork)  # when the template answers
                raise TemplateSuspected("the template did not fork in time")
            deadline = time.monotonic() + ANSWER_S
            # The child says that it exists before it reads.
            while not fork.is_answered() and time.monotonic() < deadline and self._read():
                pass
            if not fork.is_answered():
                self._end("a child began without a word")
        fork.close()
        if fork.problem:
            self._forks.pop(fork.number, None)
            raise TemplateFailed(fork.problem)
        if self._spares_wanted:
            self._plan_spare()
        return fork

    def _plan_spare(self) -> None:
        """Replace the spare child that was taken."""
        now = time.monotonic()
        is_busy, self._forked_at = now < self._forked_at + _BUSY_S, now
        self._fill_at = now + _FILL_AFTER_S
        if is_busy:
            self._fill()

    def branch(self) -> tuple[ForkedProcess, socket.socket]:
        """A further template: what this one has imported is loaded in it. Its process, for :meth:`end_branch`, and the
        connection for a :class:`Template` of its own. Does not wait; if the fork fails, that connection ends.

        This template lives as long as its branches.

        :raises TemplateFailed: as :meth:`fork`.
        """
        if not self.is_serving or self._closing or self._is_over:
            raise TemplateFailed(self.problem or "the template does not serve yet")
        if self._suspected_at is not None:
            raise TemplateSuspected("the template does not answer")
        branch = self._ask(Branch(self._next_number))
        return branch, branch.detach()

    def end_branch(self, branch: ForkedProcess) -> None:
        """A branch is over: kill what is left of it, without waiting. Its process id stays its own until then."""
        branch.is_released = True
        if branch.code is not None:
            self._discard(branch)
        elif branch.number in self._forks and self._send(Kill(branch.number)) and branch.pidfd >= 0:
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(branch.pidfd, signal.SIGKILL)

    def close(self) -> None:
        """Fork no more: the template ends with its last child. Keep on calling :meth:`serve` until :attr:`is_over`."""
        self._closing = True
        for spare in self._spares:
            spare.close()
        self._end_if_closed()

    def kill_all(self, problem: str = "killed") -> None:
        """Kill the template; the kernel kills its children."""
        if self._pidfd >= 0:
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        self._end(problem)

    def kill(self, fork: ForkedProcess) -> None:
        """Let the template kill a child with all its descendants. Where the child is the first process of a namespace,
        it is killed here, and the kernel kills the others."""
        if fork.pid and fork.code is None and not _wait_readable(fork.pidfd, 0):
            process_reaper.kill_first_processes([fork.pid])
            self._send(Kill(fork.number))

    def wait_for(self, fork: ForkedProcess) -> int:
        """Wait for the end of a child; its exit code, or the negative number of a signal."""
        seen: int | None = None
        if fork.code is None:
            _wait_readable(fork.pidfd, None)
            seen = _exit_code_of(fork.pid, fork.pidfd)  # a zombie, if the template has not reaped it
            fork.code = seen or None  # the kernel also says 0 if it does not say
        deadline = time.monotonic() + (ANSWER_S if self._suspected_at is None else 0.0)
        while fork.code is None and self._wait(deadline):
            self._read()
        if fork.code is None and not self._is_over:
            self._suspect()
            fork.code = seen
        if fork.code is None:
            fork.code = -int(signal.SIGKILL)  # the kernel kills the children of a template with it
        self._discard(fork)
        return fork.code

    # -- packets -------------------------------------------------------------------------------------------------------

    def _read(self) -> bool:
        """Take one packet; False if there is none."""
        if self._is_over:
            return False
        try:
            data, ancillary, *_ = self._connection.recvmsg(MAX_PACKET, _ANCILLARY_BYTES)
        except BlockingIOError:
            return False
        except ConnectionResetError:  # it ended before it had read all requests
            data = b""
        if not data:
            self.problem_module = self._importing
            self._end(f"it ended in the import of {self._importing}" if self._importing else "it ended")
            return False
        self._suspected_at = None
        sender = _pid_of(ancillary)
        if self.pid is None:
            self.pid = sender
            with contextlib.suppress(OSError):
                self._pidfd = os.pidfd_open(sender)
        try:
            self._take(decode_from_template(data), sender)
        except (msgspec.MsgspecError, KeyError, ValueError) as error:
            self._end(f"it sent what no template sends: {error!r}")
        return True

    def _take(self, packet: FromTemplate, sender: int) -> None:
        if self.is_serving != isinstance(packet, Forked | NotForked | Exited):
            raise ValueError("a packet at the wrong time")
        self._packets_left -= 1
        if self._packets_left < 0:
            raise ValueError("more packets than a template sends")
        match packet:
            case Importing(module=module) | Imported(module=module) | Skipped(module=module) if (
                module not in self._modules
            ):
                raise ValueError("a module that was not asked for")
            case Importing(module=module):
                self._importing, self._importing_since = module, time.monotonic()
            case Imported(module=module, seconds=seconds, size_bytes=size_bytes):
                self._importing = ""
                self._cost[module] = seconds, size_bytes
            case Skipped(module=module, reason=reason):
                self._importing = ""
                self._skipped[module] = _one_line(reason)
            case Refused(module=module) if module and module not in self._modules:
                raise ValueError("a module that was not asked for")
            case Refused(module=module, reason=reason):
                self.problem_module = module
                self._end(_one_line(reason))
            case Serving(private_bytes=private_bytes):
                self._importing = ""
                self.private_bytes = private_bytes
                self.is_serving = True
                self._fill_at = 0.0
            case Forked(number=number):
                if (fork := self._forks[number]).pidfd >= 0:
                    raise ValueError("a child that was forked before")
                self._forked(fork, sender)
            case NotForked(number=number, reason=reason):
                fork = self._forks.pop(number)
                fork.problem = _one_line(reason) or "it did not fork"
                self._drop_spare(fork)
                self._end_if_closed()
            case Exited(number=number, code=code):
                if (ended := self._forks.get(number)) is not None:
                    if ended.pidfd >= 0 and not _wait_readable(ended.pidfd, 0):
                        raise ValueError("the end of a child that has not ended")  # it would not be killed any more
                    ended.code = code
                    if self._drop_spare(ended):
                        self._discard(ended)
                        self._fill_at = time.monotonic() + _FILL_AFTER_S
                    elif isinstance(ended.asked, Branch):
                        ended.close_pidfd()
                        if ended.is_released:
                            self._discard(ended)

    def _forked(self, fork: ForkedProcess, pid: int) -> None:
        if pid <= 0:
            fork.problem = "its process is in no process namespace below that of this manager"
            return
        # While the template lives, it has not reaped this child: the id is the child's, dead or alive.
        try:
            pidfd = os.pidfd_open(pid)
        except OSError as error:
            fork.problem = f"the child cannot be watched: {error}"
            return
        if self._pidfd >= 0 and _wait_readable(self._pidfd, 0):
            os.close(pidfd)
            self._end("it ended")
            fork.problem = self.problem
            return
        fork.forked(pid, pidfd)

    def _request(self) -> ForkedProcess:
        return self._ask(Fork(self._next_number))

    def _ask(self, asked: Fork | Branch) -> ForkedProcess:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._next_number += 1
        self._packets_left += 2
        fork = ForkedProcess(self, ours, theirs, asked=asked)
        self._forks[fork.number] = fork
        if not self._send(asked, theirs.fileno()):
            self._forks.pop(fork.number)
            fork.close()
            raise TemplateFailed(self.problem)
        return fork

    def _send(self, packet: FromManager, *descriptors: int) -> bool:
        if self._is_over:
            return False
        try:
            socket.send_fds(self._connection, [encode(packet)], descriptors)
        except OSError as error:
            # Also if the socket is full: hundreds of packets that it does not read.
            self._end(f"it does not take requests: {error}")
            return False
        return True

    def _wait(self, deadline: float) -> bool:
        """Wait for a packet, or the end; False if the time is over, or the template."""
        if self._is_over:
            return False
        left_s = deadline - time.monotonic()
        return left_s > 0 and _wait_readable(self._connection.fileno(), left_s)

    def _suspect(self) -> None:
        if self._suspected_at is None:
            self._suspected_at = time.monotonic()

    def _end(self, problem: str) -> None:
        """It is over: nothing more is sent or read. What is left of it, and its children, ends with its socket."""
        if self._is_over:
            return
        self._is_over, self.is_serving = True, False
        self.problem = problem
        if self._pidfd >= 0:
            if not self._closing:
                with contextlib.suppress(OSError):
                    signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            os.close(self._pidfd)
            self._pidfd = -1
        self._connection.close()
        for fork in (*self._spares, *self._forks.values()):
            fork.close()
            fork.problem += "" if fork.problem else problem
            if fork in self._spares or isinstance(fork.asked, Branch):
                fork.close_pidfd()
        self._spares.clear()

    # -- spare children ------------------------------------------------------------------------------------------------

    def _fill(self) -> None:
        self._fill_at = float("inf")
        if not self.is_serving or self._closing or self._suspected_at is not None:
            return
        while len(self._spares) < self._spares_wanted and not self._is_over:
            try:
                self._spares.append(self._request())
            except TemplateFailed:
                return

    def _take_spare(self) -> ForkedProcess | None:
        for spare in self._spares:
            if spare.code is None:
                self._spares.remove(spare)
                return spare
        return None

    def _drop_spare(self, fork: ForkedProcess) -> bool:
        if fork not in self._spares:
            return False
        self._spares.remove(fork)
        fork.close()
        fork.close_pidfd()
        return True

    def _discard(self, fork: ForkedProcess) -> None:
        """The manager needs the id of this child no more."""
        if self._forks.pop(fork.number, None) is not None:
            self._send(Reap(fork.number))
        self._end_if_closed()

    def _end_if_closed(self) -> None:
        if self._closing and not self._forks:
            self._end("closed")


def start_template(
    command: Sequence[str] = (), *, variables: Mapping[str, str], user_packages: bool = True
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start a template of this Python, without an environment; its process, and the connection to it.

    :param command: what to write before the command: a program that starts another one with its descriptors.
    :param variables: its environment variables: what all its children may see.
    :param user_packages: whether to import packages from the home directory, as Python does by default.
    :raises OSError: if the machine lacks processes or descriptors.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        # -P: files in the working directory must not be imported as modules
        options = ["-P"] if user_packages else ["-P", "-s"]
        program = [sys.executable, *options, "-m", TEMPLATE, str(theirs.fileno())]
        try:
            process = subprocess.Popen(
                [*command, *program],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                cwd="/",
                env=dict(variables),
                start_new_session=True,
            )
        except BaseException:
            ours.close()
            raise
    return process, ours


def _one_line(reason: str) -> str:
    """Return a template's message about itself as one line for logs and messages."""
    return " ".join(plain(reason[:_MOST_REASON]).split())


def _pid_of(ancillary: Sequence[tuple[int, int, bytes]]) -> int:
    """The process that sent a packet, as the kernel names it to this process; 0 if it cannot."""
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS:
            pid, _, _ = _CREDENTIALS.unpack(data[: _CREDENTIALS.size])
            return int(pid)
    return 0


def _exit_code_of(pid: int, pidfd: int) -> int | None:
    """The exit code of a zombie that another process has to reap; None if it cannot be read. 0 also for one whose code
    the kernel does not show to this user.

    :param pidfd: of the same process.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:  # noqa: PTH123
            fields = file.read().rpartition(b")")[2].split()
        # A process that is reaped has no id any more: that file may be another one's. In other namespaces, it is.
        with open(f"/proc/self/fdinfo/{pidfd}", "rb") as file:  # noqa: PTH123
            is_same = b"\nPid:\t%d\n" % pid in file.read()
        return os.waitstatus_to_exitcode(int(fields[_EXIT_CODE])) if is_same and fields[_STATE] == b"Z" else None
    except (OSError, ValueError, IndexError):
        return None


def _wait_readable(descriptor: int, timeout_s: float | None) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(None if timeout_s is None else timeout_s * 1000))
