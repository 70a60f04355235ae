"""Supervisor: performs system calls of a confined worker that name a file or a socket, by seccomp user notification.

Landlock has no rules for the modes and times of files, nor for local sockets by their path, nor for others who connect
to the worker's. The worker's filter stops these calls (``Action.SUPERVISE`` of
:mod:`~farcall_endpoint.host.isolation.system_calls`). The supervisor copies the arguments, looks the path up, and
performs the call itself if the file is the submitter's. The worker never continues a call that reaches something,
because it could change the arguments meanwhile (seccomp_unotify(2)). Only ``bind`` is continued: others reach a name
after ``listen``.

A program that stands alone: ``python -I -S supervisor.py VARIABLE COMMAND...``. It starts the command as its child,
and ends with its exit code, above 128 for a signal. It is the worker's ancestor: Yama lets ancestors read a process.
The variable names the socket through which the worker, before its first task, sends the descriptor of its filter and
its paths.

It also ends what the worker leaves. It is in a Landlock domain that confines signals, and the worker in another one
below. One signal to all processes of the domain reaches also those that are being forked, so none can run away.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import json
import os
import re
import select
import signal
import socket
import struct
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator

_NOTIFICATION = struct.Struct("<QIIiIQ6Q")
"""``struct seccomp_notif``: id, thread, flags, number, architecture, instruction, arguments."""
_RESPONSE = struct.Struct("<QqiI")
"""``struct seccomp_notif_resp``: id, value, negative error, flags."""
_RECEIVE, _SEND, _IS_VALID = 0xC0502100, 0xC0182101, 0x40082102
"""SECCOMP_IOCTL_NOTIF_RECV, NOTIF_SEND and NOTIF_ID_VALID."""
_OPENAT2, _PIDFD_OPEN, _PIDFD_GETFD = 437, 434, 438
"""System calls with one number for all architectures."""
_PIDFD_THREAD = os.O_EXCL
_NO_MAGIC_LINKS = 0x02
"""RESOLVE_NO_MAGICLINKS: links of ``/proc`` would lead to the supervisor's own files."""
_NO_FOLLOW, _EMPTY_PATH = 0x100, 0x1000
"""AT_SYMLINK_NOFOLLOW and AT_EMPTY_PATH."""
_AT_CWD = -100
_PATH_BYTES = 4096
_FAMILY_BYTES = 2
"""``sizeof(sa_family_t)``."""
_ADDRESS_BYTES = 128
"""``sizeof(struct sockaddr_storage)``."""
_MOST_CONNECTS = 64
"""Connections of a worker that wait at the same time."""
_MOST_ABSTRACT = 1024
"""Sockets with abstract names of a worker."""
_CONTINUE = 1
"""SECCOMP_USER_NOTIF_FLAG_CONTINUE."""
_SHARED_MEMORY = "/dev/shm"  # noqa: S108 - in directories that no one else may enter
_SET_DUMPABLE = 4
"""PR_SET_DUMPABLE."""
_SET_PDEATHSIG = 1
"""PR_SET_PDEATHSIG."""
_SET_CHILD_SUBREAPER = 36
"""PR_SET_CHILD_SUBREAPER."""
_SET_NO_NEW_PRIVS = 38
"""PR_SET_NO_NEW_PRIVS."""
_LANDLOCK_CREATE_RULESET, _LANDLOCK_ADD_RULE, _LANDLOCK_RESTRICT_SELF = 444, 445, 446
_PATH_BENEATH = 1
"""LANDLOCK_RULE_PATH_BENEATH."""
_REFER = 1 << 13
"""LANDLOCK_ACCESS_FS_REFER."""
_SCOPE_SIGNAL = 1 << 1
"""LANDLOCK_SCOPE_SIGNAL."""
_SIGNALLED = 128
"""Above this exit code, it is the number of a signal, as shells report it."""
_MOST_DESCRIPTORS = 2**20
_OF_DESCRIPTOR = re.compile(rb"/proc/(?:self|thread-self)/fd/(\d+)\Z")
_CALLS = {
    "x86_64": {
        42: "connect",
        49: "bind",
        50: "listen",
        90: "chmod",
        91: "fchmod",
        132: "utime",
        235: "utimes",
        261: "futimesat",
        268: "fchmodat",
        280: "utimensat",
        452: "fchmodat2",
    },
    "aarch64": {
        200: "bind",
        201: "listen",
        203: "connect",
        52: "fchmod",
        53: "fchmodat",
        88: "utimensat",
        452: "fchmodat2",
    },
}
"""Names by number; a test compares them with the rules of the filter."""

_libc = ctypes.CDLL(None, use_errno=True)


def _call(number: int, *arguments: object) -> int:
    result: int = _libc.syscall(ctypes.c_long(number), *arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


class Supervisor:
    """Performs the calls that a filter reports.

    :param listener: descriptor of the filter.
    :param writable: directories of the submitter, in which modes and times may change.
    :param readable: further paths whose sockets may be connected to.
    """

    def __init__(self, listener: int, *, writable: Iterable[str], readable: Iterable[str]) -> None:
        self._listener = listener
        self._writable = [os.path.realpath(path) for path in writable]
        self._connectable = [*self._writable, *map(os.path.realpath, readable)]
        self._connects = threading.BoundedSemaphore(_MOST_CONNECTS)
        self._abstract = _AbstractNames()
        self._names = _CALLS[os.uname().machine]

    def serve(self) -> None:
        """Perform calls until the filter has no process left."""
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        while True:
            [(_, events)] = poll.poll()
            if events & select.POLLHUP:
                return
            buffer = bytearray(_NOTIFICATION.size)
            try:
                fcntl.ioctl(self._listener, _RECEIVE, buffer)
            except OSError as error:
                if error.errno in (errno.ENOENT, errno.EINTR):  # the caller was killed
                    continue
                raise
            call, thread, _, number, _, _, *arguments = _NOTIFICATION.unpack(buffer)
            caller = _Caller(self._listener, call, thread)
            match self._names[number]:
                case "connect":
                    self._connect(caller, arguments)
                case "bind":
                    caller.answer(functools.partial(self._bind, caller, arguments))
                case "listen":
                    caller.answer(functools.partial(self._listen, caller, arguments))
                case name:
                    caller.answer(functools.partial(self._perform, caller, name, arguments))

    def _perform(self, caller: _Caller, name: str, arguments: list[int]) -> None:
        """Perform a call that changes the mode or the times of a file.

        :raises OSError: if the file is not the submitter's, or as the call itself.
        """
        if name == "fchmod":
            with caller.descriptor(arguments[0]) as descriptor:
                if not _is_open_for_writing(descriptor):
                    self._check(descriptor, self._writable, inside=True)
                os.fchmod(descriptor, _mode(descriptor, arguments[1]))
            return
        if name in ("chmod", "utime", "utimes"):
            arguments = [_AT_CWD, *arguments]
        at, path, value, flags = arguments[:4]
        flags = flags & 0xFFFF_FFFF if name in ("fchmodat2", "utimensat") else 0
        with caller.found(_signed(at), path, flags) as descriptor:
            if not (path == 0 and _is_open_for_writing(descriptor)):
                self._check(descriptor, self._writable, inside="chmod" in name)
            target = f"/proc/self/fd/{descriptor}"
            if "chmod" in name:
                os.chmod(target, _mode(descriptor, value))  # noqa: PTH101 - of a descriptor
            else:
                _set_times(target, _times(name, caller, value))

    def _bind(self, caller: _Caller, arguments: list[int]) -> int:
        """Give a socket of the caller an abstract name that no one else can connect to; any other name the kernel
        gives."""
        size = arguments[2] & 0xFFFF_FFFF
        if not _FAMILY_BYTES <= size <= _ADDRESS_BYTES:
            return _CONTINUE
        name = caller.read_exactly(arguments[1], size)[_FAMILY_BYTES:]
        with caller.socket(arguments[0]) as end:
            if not _is_local(end) or name[:1] not in (b"", b"\0"):
                return _CONTINUE
            self._abstract.bind(end, name)
        return 0

    def _listen(self, caller: _Caller, arguments: list[int]) -> int:
        """Let a socket of the caller accept connections. A local one must have a path.

        :raises PermissionError: if its name is abstract: the kernel has given it after the check of ``bind``.
        """
        with caller.socket(arguments[0]) as end:
            name = os.fsencode(end.getsockname()) if _is_local(end) else b"a port"
            if not name:
                raise OSError(errno.EINVAL, "a socket without a name")
            if name.startswith(b"\0"):
                raise PermissionError(errno.EPERM, "abstract sockets")
            if _libc.listen(end.fileno(), _signed(arguments[1])) != 0:
                raise OSError(ctypes.get_errno(), "listen")
        return 0

    def _connect(self, caller: _Caller, arguments: list[int]) -> None:
        """Connect a socket of the caller. A blocking one has a thread, so that other calls need not wait."""
        try:
            address = caller.read(arguments[1], min(arguments[2] & 0xFFFF_FFFF, _ADDRESS_BYTES))
            end = caller.socket(arguments[0])
        except OSError as error:
            caller.fail(error)
            return

        def connect() -> None:
            try:
                with end:
                    caller.answer(lambda: self._connect_socket(caller, end, address))
            finally:
                self._connects.release()

        if not self._connects.acquire(blocking=False):
            end.close()
            caller.fail(OSError(errno.EAGAIN, "too many connections at the same time"))
        elif os.get_blocking(end.fileno()):
            try:
                threading.Thread(target=connect, daemon=True).start()
            except RuntimeError:  # the account has too many threads
                self._connects.release()
                end.close()
                caller.fail(OSError(errno.EAGAIN, "no thread for the connection"))
        else:
            connect()

    def _connect_socket(self, caller: _Caller, end: socket.socket, address: bytes) -> None:
        if not _is_local(end):
            _call_with_address(_libc.connect, end, address)
            return
        name = address[_FAMILY_BYTES:]
        path = name.partition(b"\0")[0]
        with self._abstract.found(path or name) as bound:
            if bound is not None:
                _call_with_address(_libc.connect, end, _local(f"/proc/self/fd/{bound}"))
                return
        if not path:  # the kernel would look at the supervisor's rights
            raise OSError(errno.EPERM, "abstract sockets")
        with caller.looked_up(_AT_CWD, path, 0) as descriptor:
            self._check(descriptor, self._connectable)
            _call_with_address(_libc.connect, end, _local(f"/proc/self/fd/{descriptor}"))

    def _check(self, descriptor: int, directories: list[str], *, inside: bool = False) -> None:
        """Check that an open file is in one of the directories, or is one of them and need not be ``inside``.

        :raises PermissionError: if it is not, or if its path is that of another mount namespace.
        """
        path = os.readlink(f"/proc/self/fd/{descriptor}")  # noqa: PTH115
        found = any(path.startswith(f"{each}/") or (path == each and not inside) for each in directories)
        if not found or _mount_of(descriptor) not in _mounts():
            raise PermissionError(errno.EACCES, "the file is not the submitter's")


class _AbstractNames:
    """Abstract names of local sockets, for the processes below the supervisor only.

    The kernel lets every process of the machine connect to an abstract name, and pass descriptors then: of directories
    in another mount namespace, which Landlock judges by their place there. A socket here has a path instead, in a
    directory that no one may enter and that is removed at once. What leads to the socket is the descriptor of its file.
    """

    def __init__(self) -> None:
        self._paths: dict[bytes, bytes] = {}  # by name
        self._files: dict[bytes, int] = {}  # by path, which getsockname returns
        self._lock = threading.Lock()

    def bind(self, end: socket.socket, name: bytes) -> None:
        """Give a socket a name; an empty one stands for a new one.

        :raises OSError: if the name is in use, or as the call itself.
        """
        with self._lock:
            if name in self._paths or len(self._files) >= _MOST_ABSTRACT:
                self._forget_closed()
            if name in self._paths or len(self._files) >= _MOST_ABSTRACT:
                raise OSError(errno.EADDRINUSE, "address in use")
            directory = f"{_SHARED_MEMORY}/{os.urandom(16).hex()}"
            path = f"{directory}/s".encode()
            os.mkdir(directory, 0o700)  # noqa: PTH102
            try:
                _call_with_address(_libc.bind, end, _local(path.decode()))
                self._files[path] = os.open(path, os.O_PATH | os.O_CLOEXEC)
                os.unlink(path)  # noqa: PTH108
            finally:
                os.rmdir(directory)  # noqa: PTH106
            if name:
                self._paths[name] = path

    @contextlib.contextmanager
    def found(self, name: bytes) -> Iterator[int | None]:
        """A descriptor of the file of a socket, by its name or by the path that it has got; None if there is none."""
        with self._lock:
            file = self._files.get(self._paths.get(name, name))
            copy = None if file is None else os.dup(file)
        try:
            yield copy
        finally:
            if copy is not None:
                os.close(copy)

    def _forget_closed(self) -> None:
        with open("/proc/net/unix", "rb") as file:  # noqa: PTH123
            alive = {line.split()[-1] for line in file}
        for path in self._files.keys() - alive:
            os.close(self._files.pop(path))
        self._paths = {name: path for name, path in self._paths.items() if path in self._files}


class _Caller:
    """A thread that waits for a call, and its memory, files and directory."""

    def __init__(self, listener: int, call: int, thread: int) -> None:
        self._listener = listener
        self._id = call
        self._thread = thread

    def answer(self, perform: Callable[[], int | None]) -> None:
        """Perform the call, and let the caller continue with the result, or with the call (``_CONTINUE``)."""
        try:
            flags = perform() or 0
        except OSError as error:
            self.fail(error)
        except Exception:  # noqa: BLE001 - the caller waits for an answer
            self.fail(OSError(errno.EINVAL, "invalid argument"))
        else:
            self._respond(flags=flags)

    def fail(self, error: OSError) -> None:
        """Let the caller continue with an error."""
        self._respond(error=-(error.errno or errno.EPERM))

    def _respond(self, *, error: int = 0, flags: int = 0) -> None:
        with contextlib.suppress(OSError):  # the caller was killed
            fcntl.ioctl(self._listener, _SEND, _RESPONSE.pack(self._id, 0, error, flags))

    def read(self, address: int, size: int) -> bytes:
        """Copy memory of the caller, at most up to the end of its mapping.

        :raises OSError: if there is none, or the caller was killed.
        """
        if not address:
            raise OSError(errno.EFAULT, "bad address")
        with self._opened("mem", os.O_RDONLY) as memory:
            try:
                return os.pread(memory, size, address)
            except (OSError, OverflowError) as error:
                raise OSError(errno.EFAULT, "bad address") from error

    def read_exactly(self, address: int, size: int) -> bytes:
        """Copy memory of the caller.

        :raises OSError: if there is less.
        """
        data = self.read(address, size)
        if len(data) < size:
            raise OSError(errno.EFAULT, "bad address")
        return data

    def _path(self, address: int) -> bytes:
        data = b""
        while len(data) < _PATH_BYTES:  # a read stops at the end of a mapping, and fails behind it
            page = 4096 - (address + len(data)) % 4096
            piece = self.read(address + len(data), min(page, _PATH_BYTES - len(data)))
            before, end, _ = piece.partition(b"\0")
            data += before
            if end:
                return data
            if not piece:
                raise OSError(errno.EFAULT, "bad address")
        raise OSError(errno.ENAMETOOLONG, "path too long")

    @contextlib.contextmanager
    def _opened(self, name: str, flags: int) -> Iterator[int]:
        descriptor = os.open(f"/proc/{self._thread}/{name}", flags | os.O_CLOEXEC)
        try:
            # The number of a thread that was killed may be another process's by now.
            fcntl.ioctl(self._listener, _IS_VALID, struct.pack("<Q", self._id))
            yield descriptor
        finally:
            os.close(descriptor)

    @contextlib.contextmanager
    def descriptor(self, number: int) -> Iterator[int]:
        """A copy of a descriptor of the caller."""
        descriptor = self._copied(number)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def socket(self, number: int) -> socket.socket:
        """A copy of a socket of the caller.

        :raises OSError: if the descriptor is closed or is not a socket.
        """
        descriptor = self._copied(number)
        try:
            return socket.socket(fileno=descriptor)
        except OSError:
            os.close(descriptor)
            raise

    def _copied(self, number: int) -> int:
        process = _call(_PIDFD_OPEN, self._thread, _PIDFD_THREAD)
        try:
            fcntl.ioctl(self._listener, _IS_VALID, struct.pack("<Q", self._id))
            return _call(_PIDFD_GETFD, process, ctypes.c_int(number & 0xFFFF_FFFF), 0)
        finally:
            os.close(process)

    @contextlib.contextmanager
    def found(self, at: int, address: int, flags: int) -> Iterator[int]:
        """An open descriptor of the file that a call names."""
        path = self._path(address) if address else b""
        if not address or (not path and flags & _EMPTY_PATH):
            with self._opened("cwd", os.O_PATH) if at == _AT_CWD else self.descriptor(at) as descriptor:
                yield descriptor
        else:
            with self.looked_up(at, path, flags) as descriptor:
                yield descriptor

    @contextlib.contextmanager
    def looked_up(self, at: int, path: bytes, flags: int) -> Iterator[int]:
        """An open descriptor of the file at a path of the caller."""
        if (found := _OF_DESCRIPTOR.match(path)) is not None:  # how C libraries change the mode of a link
            with self.descriptor(int(found[1])) as descriptor:
                yield descriptor
            return
        with self._opened("cwd", os.O_PATH) if at == _AT_CWD else self.descriptor(at) as directory:
            follow = os.O_NOFOLLOW if flags & _NO_FOLLOW else 0
            how = struct.pack("<QQQ", os.O_PATH | os.O_CLOEXEC | follow, 0, _NO_MAGIC_LINKS)
            descriptor = _call(_OPENAT2, ctypes.c_int(directory), path, how, ctypes.c_size_t(len(how)))
        try:
            yield descriptor
        finally:
            os.close(descriptor)


def _signed(value: int) -> int:
    return ctypes.c_int(value & 0xFFFF_FFFF).value


def _is_open_for_writing(descriptor: int) -> bool:
    """Whether a descriptor shows that its file may be written. Landlock has checked that when it was opened."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    if flags & os.O_PATH:
        raise OSError(errno.EBADF, "bad descriptor")
    return flags & os.O_ACCMODE in (os.O_WRONLY, os.O_RDWR)


def _mode(descriptor: int, mode: int) -> int:
    """The bits of a mode.

    :raises PermissionError: if other accounts could run the file as its owner.
    """
    if mode & 0o6000 and os.fstat(descriptor).st_mode & 0o170000 != 0o040000:
        raise PermissionError(errno.EPERM, "set-user-ID and set-group-ID bits")
    return mode & 0o7777


def _mount_of(descriptor: int) -> int:
    """The mount through which a file was opened."""
    with open(f"/proc/self/fdinfo/{descriptor}") as file:  # noqa: PTH123
        return next(int(line.split()[1]) for line in file if line.startswith("mnt_id:"))


def _mounts() -> set[int]:
    """The mounts of this namespace."""
    with open("/proc/self/mountinfo") as file:  # noqa: PTH123
        return {int(line.split()[0]) for line in file}


def _times(name: str, caller: _Caller, address: int) -> bytes | None:
    """``struct timespec[2]`` of a call; None stands for the current time."""
    if not address:
        return None
    if name == "utimensat":
        return caller.read_exactly(address, 32)
    if name == "utime":
        accessed, modified = struct.unpack("<qq", caller.read_exactly(address, 16))
        return struct.pack("<qqqq", accessed, 0, modified, 0)
    accessed, accessed_us, modified, modified_us = struct.unpack("<qqqq", caller.read_exactly(address, 32))
    return struct.pack("<qqqq", accessed, accessed_us * 1000, modified, modified_us * 1000)


def _set_times(path: str, times: bytes | None) -> None:
    if _libc.utimensat(_AT_CWD, path.encode(), times, 0) != 0:
        raise OSError(ctypes.get_errno(), "utimensat")


def _is_local(end: socket.socket) -> bool:
    return end.getsockopt(socket.SOL_SOCKET, socket.SO_DOMAIN) == socket.AF_UNIX


def _local(path: str) -> bytes:
    """``struct sockaddr_un``."""
    return struct.pack("H", socket.AF_UNIX) + path.encode() + b"\0"


def _call_with_address(function: Callable[[int, bytes, int], int], end: socket.socket, address: bytes) -> None:
    if function(end.fileno(), address, len(address)) != 0:
        raise OSError(ctypes.get_errno(), "connect or bind")


def _serve(control: socket.socket) -> None:
    try:
        with control, control.makefile("rb") as rest:
            _, descriptors, _, _ = socket.recv_fds(control, 1, 1)
            paths = rest.read()
        if descriptors:  # else the worker ended before
            Supervisor(descriptors[0], **json.loads(paths)).serve()
    except BaseException:  # noqa: BLE001 - a thread
        traceback.print_exc()
        with contextlib.suppress(OSError):
            os.kill(-1, signal.SIGKILL)
        os._exit(1)


def main(variable: str, command: list[str]) -> int:
    """Start the command, serve its calls, and kill what it leaves; its exit code, as a shell reports it.

    :param variable: name of the environment variable for the number of the socket.
    :raises OSError: if the kernel has no domains for signals, or the parent has ended.
    """
    parent = os.getppid()
    for option, value in ((_SET_DUMPABLE, 0), (_SET_CHILD_SUBREAPER, 1), (_SET_PDEATHSIG, signal.SIGTERM)):
        if _libc.prctl(option, value, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl")
    _scope_signals()
    with contextlib.suppress(PermissionError):
        os.kill(parent, 0)
        raise OSError("signals reach processes outside of the domain, or the parent has ended")
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    waited = {signal.SIGTERM, signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_BLOCK, waited)
    own, other = socket.socketpair()
    worker = os.fork()
    if worker == 0:
        try:
            _scope_signals()
            signal.pthread_sigmask(signal.SIG_UNBLOCK, waited)
            other.set_inheritable(True)
            os.execvpe(command[0], command, {**os.environ, variable: str(other.fileno())})  # noqa: S606
        finally:
            os._exit(127)
    for low, high in ((3, own.fileno()), (own.fileno() + 1, _MOST_DESCRIPTORS)):  # what only the worker needs
        os.closerange(low, high)
    other.detach()
    threading.Thread(target=_serve, args=(own,), daemon=True).start()
    status: int | None = None
    while status is None and signal.sigwait(waited) == signal.SIGCHLD:
        with contextlib.suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                if found[0] == worker and not os.WIFSTOPPED(found[1]):  # a worker may let itself be traced
                    status = found[1]
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)
    if status is None:
        _, status = os.waitpid(worker, 0)
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else _SIGNALLED - code


def _scope_signals() -> None:
    """Let this process and its descendants signal no process outside.

    :raises OSError: if the kernel cannot do that.
    """
    rules = (ctypes.c_uint64 * 3)(_REFER, 0, _SCOPE_SIGNAL)  # files, network, scopes
    ruleset = _call(_LANDLOCK_CREATE_RULESET, rules, ctypes.c_size_t(ctypes.sizeof(rules)), 0)
    root = os.open("/", os.O_PATH | os.O_CLOEXEC)
    # Otherwise files could not be moved between directories in a domain below.
    _call(_LANDLOCK_ADD_RULE, ruleset, _PATH_BENEATH, struct.pack("=Qi", _REFER, root), 0)
    os.close(root)
    _libc.prctl(_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    _call(_LANDLOCK_RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)


if __name__ == "__main__":
    os._exit(main(sys.argv[1], sys.argv[2:]))  # threads may wait for connections
