"""Owner's side of the walk: resources with tokens, and snapshots that show what a task has changed."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import random
import shutil
import socket
import string
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from farcall_endpoint.host.isolation.system_calls import NEWEST, architecture
from tests.support.ordinary_user import as_ordinary_user
from tests.support.system_call_probe.calls import CALLS

ADDRESS: Final = 0x1234_5670_0000
"""Page of a token in processes of the owner and of other submitters."""
_PROGRAM: Final = Path(__file__).with_name("owner_process.py")
_READ_FLAGS: Final = 0x8008_6601
"""FS_IOC_GETFLAGS."""
_FILES: Final = frozenset({"file", "directory", "link", "shared memory"})
_CONSUMING: Final = frozenset(
    {"mq_unlink", "mq_timedreceive", "mq_notify", "msgrcv", "msgctl", "shmctl", "semctl", "keyctl"}
)
"""Calls that take tokens away where they succeed."""

Snapshot = dict[tuple[str, str], object]


def numbers() -> dict[str, int]:
    """Numbers of system calls of this machine, by name."""
    found = architecture()
    assert found is not None
    return {call.name: number for call in CALLS.values() if (number := call.numbers[found[0]]) is not None}


class Owner:
    """Resources of an account, each with a token.

    :param home: directory of the account.
    :param user: the account.
    :param others: directories of the endpoint and of other submitters; each gets a file with a token.
    """

    def __init__(self, home: Path, user: int) -> None:
        self._user = user
        self._directory = home / "of-the-owner"
        self._endpoint_file = home / "walk-of-the-endpoint"
        self._cleanup = contextlib.ExitStack()
        self._tokens: dict[str, str] = {}
        self._chosen: dict[tuple[str, str], str] = {}
        self._processes: dict[str, int] = {}
        self._notes: list[Path] = []
        self._numbers = numbers()
        self._process: subprocess.Popen[str] | None = None
        self._objects: dict[str, int] = {}
        self._offset_s = time.time() - time.monotonic()
        self._before: Snapshot = {}
        self._cgroup = ""

    def __enter__(self) -> Owner:
        with contextlib.ExitStack() as stack:
            stack.callback(self._stop_process)
            self._make_files()
            self._make_session_key()
            self._make_terminal(stack)
            self._make_sockets(stack)
            self._memory = Path(f"/dev/shm/farcall-walk-{os.getpid()}-{random.getrandbits(32):x}")
            stack.callback(lambda: _remove(self._memory))
            self._fill_memory()
            self._cleanup = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._cleanup.close()

    # -- preparation ---------------------------------------------------------------------------------------------------

    def token(self, label: str, place: str) -> str:
        """The token of a place."""
        if (label, place) not in self._chosen:
            text = "FwK7" + "".join(random.choices(string.ascii_lowercase, k=4))
            self._chosen[label, place] = text
            self._tokens[text] = label
        return self._chosen[label, place]

    def label(self, token: str) -> str | None:
        """The label of the resource that has a token."""
        return self._tokens.get(token)

    def attach(self, processes: dict[str, int], notes: list[Path]) -> None:
        """Watch further processes and files, and begin."""
        self._processes = processes
        self._notes = notes
        self._start_process()
        self._before = self.snapshot()

    def _make_files(self) -> None:
        _remove(self._directory)
        self._directory.mkdir()
        file = self._directory / "file"
        file.write_text(self.token("file", "content"))
        os.setxattr(file, "user.walk", self.token("file", "attribute").encode())
        _remove(self._endpoint_file)
        self._endpoint_file.write_text(self.token("file", "endpoint"))
        (self._directory / self.token("directory", "name")).write_text("")
        (self._directory / "link").symlink_to(self.token("link", "target"))
        program = self._directory / "program"
        program.write_text(f"#!/bin/sh\n: > {self._directory}/ran\n")
        for path in (self._directory, *self._directory.iterdir(), self._endpoint_file):
            if not path.is_symlink():
                path.chmod(0o700 if path in (self._directory, program) else 0o600)
            os.chown(path, self._user, self._user, follow_symlinks=False)
            os.utime(path, (10**9, 10**9), follow_symlinks=False)

    def _make_session_key(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.syscall(ctypes.c_long(self._numbers["keyctl"]), ctypes.c_long(1), None)  # KEYCTL_JOIN_SESSION_KEYRING
        token = self.token("key", "session").encode()
        number = ctypes.c_long(self._numbers["add_key"])
        libc.syscall(number, b"user", b"farcall-walk-session", token, ctypes.c_long(8), ctypes.c_long(-3))

    def _make_terminal(self, stack: contextlib.ExitStack) -> None:
        self._controller, self._terminal = os.openpty()
        stack.callback(os.close, self._controller)
        stack.callback(os.close, self._terminal)
        os.chown(os.ttyname(self._terminal), self._user, self._user)
        os.set_blocking(self._controller, False)
        attributes = termios.tcgetattr(self._terminal)
        attributes[3] &= ~(termios.ECHO | termios.ICANON)
        termios.tcsetattr(self._terminal, termios.TCSANOW, attributes)
        self._fill_terminal()

    def _fill_terminal(self) -> None:
        termios.tcflush(self._terminal, termios.TCIFLUSH)
        os.write(self._controller, self.token("terminal", "input").encode() * 8)

    def _make_sockets(self, stack: contextlib.ExitStack) -> None:
        name = f"farcall-walk-{os.getpid()}"
        self._paths = [str(self._directory.parent / f"walk-{kind}") for kind in ("stream", "datagram", "packet")]
        self._names = [f"\0{name}-{kind}" for kind in ("stream", "datagram", "packet")]
        self._sockets: dict[str, socket.socket] = {}
        stack.callback(self._close_sockets)
        for address in (*self._paths, *self._names):
            self._bind(address)
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        self._port = server.getsockname()[1]
        server.setblocking(False)
        self._server = server

    def _close_sockets(self) -> None:
        for made in self._sockets.values():
            made.close()

    def _bind(self, address: str) -> None:
        """Make a socket at an address; its name says the kind."""
        kinds = {"stream": socket.SOCK_STREAM, "datagram": socket.SOCK_DGRAM, "packet": socket.SOCK_SEQPACKET}
        made = socket.socket(socket.AF_UNIX, kinds[address.rpartition("-")[2]])
        made.setblocking(False)
        made.bind(address)
        if made.type != socket.SOCK_DGRAM:
            made.listen(128)
        if address.startswith("/"):
            os.chown(address, self._user, self._user)
        if address in self._sockets:
            self._sockets.pop(address).close()
        self._sockets[address] = made

    def _fill_memory(self) -> None:
        _remove(self._memory)
        self._memory.write_text(self.token("shared memory", "content"))
        self._memory.chmod(0o600)
        os.chown(self._memory, self._user, self._user)
        os.utime(self._memory, (10**9, 10**9))

    def _start_process(self) -> None:
        settings = {
            "numbers": self._numbers,
            "address": ADDRESS,
            "directory": str(self._directory),
            "key": os.getpid() + 0x0100_0000,
            "queue": f"farcall-walk-{os.getpid()}",
            "key_name": f"farcall-walk-{os.getpid()}",
            "tokens": {
                name: self.token(label, name)
                for name, label in {
                    "memory": "process",
                    "mapping": "process",
                    "shm": "System V object",
                    "message": "System V object",
                    "queue": "message queue",
                    "key": "key",
                }.items()
            },
        }
        argument = json.dumps(settings)
        command = [sys.executable, "-I", "-S", str(_PROGRAM), argument, self.token("command line", "argument")]
        if self._user != os.geteuid():
            command = as_ordinary_user(command, reachable=[self._directory.parent, Path(__file__).parents[3]])
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={"TOKEN": self.token("process", "environment")},
        )
        assert self._process.stdout is not None
        self._objects = json.loads(self._process.stdout.readline())

    def _stop_process(self) -> None:
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(18)  # a task may have stopped it
        self._process.communicate()
        self._process = None

    # -- what the walker gets ------------------------------------------------------------------------------------------

    def targets(self) -> dict[str, Any]:
        """Names of the resources."""
        assert self._process is not None
        pid, directory = self._process.pid, self._directory
        in_proc = (
            *("environ", "mem", "maps", "cmdline", "cwd", "cwd/file", f"root{directory}/file", "oom_score_adj"),
            *("coredump_filter", "timerslack_ns", "autogroup", "auxv", "stack", "syscall", "limits", "ns/mnt", "fd/3"),
            *(f"task/{pid}/environ", "clear_refs", "pagemap", "io"),
        )
        paths = [
            *((str(path), "file") for path in (directory / "file", self._endpoint_file, *self._notes)),
            (str(directory), "directory"),
            (str(directory / "link"), "link"),
            (str(directory / "program"), "file"),
            (str(directory / "created"), "directory"),
            *((path, "socket") for path in self._paths),
            (os.ttyname(self._terminal), "terminal"),
            (str(self._memory), "shared memory"),
            *((f"/proc/{pid}/{name}", "process") for name in in_proc),
            *(
                (f"/proc/{other}/{name}", "process")
                for other in self._processes.values()
                for name in ("environ", "mem")
            ),
        ]
        return {
            "numbers": self._numbers,
            "pids": [(pid, "process"), *((other, "process") for other in self._processes.values())],
            "address": ADDRESS,
            "paths": [(path, label, _inode(path)) for path, label in paths],
            "below": [
                (str(directory), "file", "file"),
                (str(directory), "link", "link"),
                ("/", str(directory / "file").lstrip("/"), "file"),
                ("/proc", f"{pid}/environ", "process"),
                (f"/proc/{pid}/cwd", "file", "file"),
                (f"/proc/{pid}/root", str(directory / "file").lstrip("/"), "file"),
                ("/dev/shm", self._memory.name, "shared memory"),
            ],
            "new": [(str(directory / "made"), "directory")],
            "sockets": [*self._paths, *self._names],
            "ports": [self._port],
            "queues": [f"farcall-walk-{os.getpid()}"],
            "ipc_keys": [os.getpid() + 0x0100_0000],
            "shmids": [self._objects["shm"]],
            "semids": [self._objects["sem"]],
            "msgids": [self._objects["msg"]],
            "keys": [self._objects["key"]],
            "key_names": [f"farcall-walk-{os.getpid()}", "farcall-walk-session"],
            "handles": [],
        }

    # -- what a task has changed ---------------------------------------------------------------------------------------

    def changed(self, call: str, *, reached: bool) -> set[str]:
        """Labels of the resources that have changed since the last look. They are then as before."""
        now = self.snapshot()
        found = {label for label, place in now.keys() | self._before.keys() if self._differs(now, label, place)}
        if found & _FILES:
            self._make_files()
            self._fill_memory()
            for path in self._paths:
                _remove(Path(path))
                self._bind(path)
        if found & {"process", "System V object"} or (reached and call in _CONSUMING):
            self._stop_process()
            self._start_process()
        if "terminal" in found or call in ("read", "readv", "ioctl"):
            self._fill_terminal()
        if found or reached:
            self._before = self.snapshot()
        return found

    def _differs(self, now: Snapshot, label: str, place: str) -> bool:
        return now.get((label, place)) != self._before.get((label, place))

    def snapshot(self) -> Snapshot:
        """Everything that can change, by label and place."""
        assert self._process is not None
        found: Snapshot = {("node", "hostname"): socket.gethostname()}
        found["node", "clock"] = abs(time.time() - time.monotonic() - self._offset_s) > 0.5
        found["directory", "names"] = sorted(map(str, self._directory.iterdir())) if self._directory.is_dir() else []
        for path, label in (
            (self._directory, "directory"),
            (self._directory / "file", "file"),
            (self._directory / "program", "file"),
            (self._directory / "link", "link"),
            (self._endpoint_file, "file"),
            (self._memory, "shared memory"),
            *((note, "file") for note in self._notes),
            *((Path(path), "file") for path in self._paths),
            (Path(os.ttyname(self._terminal)), "terminal"),
        ):
            found[label, str(path)] = _state_of(path)
        found["terminal", "output"] = self._output()
        found["terminal", "settings"] = termios.tcgetattr(self._terminal)
        found["terminal", "size"] = fcntl.ioctl(self._terminal, termios.TIOCGWINSZ, bytes(8))
        found["server", "connections"] = _received(self._server)
        for address, made in self._sockets.items():
            found["socket", address] = _received(made)
        for name, pid in {"owner": self._process.pid, **self._processes}.items():
            found["process", name] = _process_state(pid)
        found["process", "memory"] = _memory_of(self._process.pid)
        for name in ("shm", "sem", "msg"):
            found["System V object", name] = _system_v(name, self._objects[name])
        return found

    def _output(self) -> bytes:
        with contextlib.suppress(BlockingIOError):
            return os.read(self._controller, 4096)
        return b""


def _state_of(path: Path) -> object:
    try:
        status = path.lstat()
    except OSError as error:
        return error.errno
    attributes: list[object] = []
    if not path.is_symlink():
        with contextlib.suppress(OSError):
            attributes = [(name, os.getxattr(path, name)) for name in os.listxattr(path)]
    content: object = ""
    if path.is_symlink():
        content = os.readlink(path)  # noqa: PTH115
    elif path.is_file():
        with path.open("rb") as file, contextlib.suppress(OSError):
            content = status.st_size, file.read(4096)
            attributes.append(fcntl.ioctl(file, _READ_FLAGS, bytes(8)))
    is_file = path.is_file() or path.is_symlink()
    times = status.st_mtime_ns if is_file else 0
    return (status.st_mode, status.st_uid, status.st_gid, status.st_nlink if is_file else 0, times, attributes, content)


def _remove(path: Path) -> None:
    """Remove what a task may have put there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _inode(path: str) -> int:
    """Number of a file; 0 if there is none, or if it is made by the kernel for each look."""
    with contextlib.suppress(OSError):
        return 0 if path.startswith("/proc/") else os.lstat(path).st_ino
    return 0


def _received(made: socket.socket) -> int:
    """Number of connections and messages since the last look."""
    count = 0
    with contextlib.suppress(BlockingIOError):
        while True:
            if made.type == socket.SOCK_DGRAM:
                made.recv(64)
            else:
                made.accept()[0].close()
            count += 1
    return count


_SHOWN: Final = ("TracerPid", "SigPnd", "ShdPnd", "Cpus_allowed:", "NoNewPrivs", "Umask")


def _process_state(pid: int) -> object:
    """What others could change about a process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        found: list[object] = [fields[0] if fields[0] in "TtZX" else "alive", *fields[2:4], fields[16], *fields[37:39]]
        found += [line for line in lines if line.startswith(_SHOWN)]
        for name in ("limits", "oom_score_adj", "coredump_filter", "timerslack_ns", "cgroup", "autogroup"):
            with contextlib.suppress(OSError):
                found.append(Path(f"/proc/{pid}/{name}").read_text())
        with contextlib.suppress(OSError):
            found.append(str(Path(f"/proc/{pid}/cwd").readlink()))
    except FileNotFoundError:
        return "ended"
    number = numbers()["ioprio_get"]
    found.append(ctypes.CDLL(None).syscall(ctypes.c_long(number), ctypes.c_long(1), ctypes.c_long(pid)))
    return found


def _memory_of(pid: int) -> bytes:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:  # noqa: PTH123
        memory.seek(ADDRESS)
        return memory.read(64)
    return b""


def _system_v(name: str, number: int) -> object:
    """Owner, permissions, bytes and messages of an object."""
    header, *lines = [line.split() for line in Path(f"/proc/sysvipc/{name}").read_text().splitlines()]
    kept = [index for index, title in enumerate(header) if title in ("perms", "cbytes", "qnum", "uid", "gid", "size")]
    return [[line[index] for index in kept] for line in lines if line[1] == str(number)]


def unknown_numbers() -> list[tuple[str, int]]:
    """Numbers that no call of the table has, with a name for each; also some that only later kernels have."""
    known = set(numbers().values())
    return [(f"number {number}", number) for number in range(NEWEST + 17) if number not in known]


def orders(owner: Owner, *, more: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """The calls of this machine, and the order for each.

    :param more: further combinations of arguments at random.
    """
    calls = [(name, number, CALLS[name].forms) for name, number in numbers().items() if not CALLS[name].excluded]
    calls += [(name, number, ("",)) for name, number in unknown_numbers()]
    for name, number, forms in sorted(calls, key=lambda each: each[1]):
        targets = owner.targets()
        yield name, {"name": name, "number": number, "forms": forms, "targets": targets, "more": more}
