"""Walker: makes system calls inside a task, with arguments that name resources of the owner and other submitters.

This module stands alone: the task gets its source. The owner sends the name of a call and the targets, and the walker
tries all combinations of the values of its arguments. A forked child makes the calls. It looks for tokens in what the
kernel has written: the owner has put one into each resource, and never sends any.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import mmap
import os
import random
import re
import resource
import select
import shutil
import signal
import socket
import struct
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

TOKEN = re.compile(b"FwK7[a-z]{4}")
"""Marks that the owner puts into its resources, and that reach the walker only through the kernel."""
_OUT_BYTES = 16384
_ARENA_BYTES = 1 << 20
_RECORD = struct.Struct("<qii48s")
"""Result, number of the error, 1, tokens."""
_MOST = 4000
"""Combinations of the arguments of a call."""
_STEP_MS = 10
_CALL_MS = 100
"""A call that takes longer blocks."""
_PROGRAM_MS = 5000
_MISSING = 1 << 40
"""Stands for a descriptor that could not be opened."""
_BATCH = 3
_ALONE = frozenset(
    [
        "munmap",
        "mprotect",
        "mremap",
        "brk",
        "rt_sigaction",
        "rt_sigprocmask",
        "rt_sigsuspend",
        "rt_sigtimedwait",
        "sigaltstack",
        "setuid",
        "setgid",
        "setreuid",
        "setregid",
        "setresuid",
        "setresgid",
        "setfsuid",
        "setfsgid",
        "setgroups",
        "setsid",
        "prctl",
        "arch_prctl",
        "iopl",
        "ioperm",
        "personality",
        "execve",
        "execveat",
        "unshare",
        "close_range",
        "seccomp",
        "capset",
        "landlock_restrict_self",
        "alarm",
        "setitimer",
        "fork",
        "clone",
        "clone3",
        "mlockall",
        "modify_ldt",
        "mseal",
        "restart_syscall",
        "set_robust_list",
        "set_tid_address",
        "rseq",
        "remap_file_pages",
    ]
)
"""Calls that change the caller: each combination has a child of its own."""
_PROGRAMS = frozenset({"execve", "execveat"})
_OPENING = frozenset({"open", "openat", "openat2", "creat", "open_by_handle_at", "open_tree"})

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


class Option(NamedTuple):
    """Values of one or more arguments; ``label``: the other's resource that they name."""

    numbers: tuple[int, ...]
    label: str = ""


class Options:
    """Values of the arguments of system calls, by kind.

    :param targets: resources of others, as the owner sends them.
    """

    def __init__(self, targets: dict[str, Any], inherited: list[int], arena: mmap.mmap, own: str) -> None:
        self._targets = targets
        self._inherited = inherited
        self._arena = arena
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(arena))
        self._used = 2 * _OUT_BYTES
        self.out = self._base
        self.zero = self._base + _OUT_BYTES
        self._own_file = f"{own}/own"
        self._own_new = f"{own}/new"
        self._own_region = mmap.mmap(-1, 4 * 4096, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._opened: list[Option] = []
        self._common: list[Option] = []
        self._sockets: list[Option] = []
        self._queues: list[Option] = []
        self._single: dict[str, int] = {}
        self._open()

    def of(self, kind: str) -> list[Option]:
        """Values of a kind."""
        found: list[Option]
        if kind.startswith("="):
            found = [Option((self._number(each),)) for each in kind[1:].split(",")]
        elif kind.startswith("path"):
            found = [Option((self._place(path),), label) for path, label in self._paths()]
        else:
            found = getattr(self, f"_of_{kind.removesuffix('!')}")()
        if not kind.endswith("!"):
            found = [Option(each.numbers) for each in found]
        return [each for each in found if _MISSING not in each.numbers]

    # -- preparation ---------------------------------------------------------------------------------------------------

    def _place(self, data: bytes | str) -> int:
        data = (data.encode() if isinstance(data, str) else data) + b"\0"
        at = self._used
        self._used += (len(data) + 15) & ~15
        assert self._used <= _ARENA_BYTES
        self._arena[at : at + len(data)] = data
        return self._base + at

    def _number(self, text: str) -> int:
        targets = self._targets
        known: dict[str, Callable[[], int]] = {
            "address": lambda: int(targets["address"]),
            "pid": lambda: int(targets["pids"][0][0]),
            "pidclock": lambda: (~int(targets["pids"][0][0]) << 3) | 2,
        }
        if text in known:
            return known[text]()
        if text in self._single:
            return self._single[text]
        return int(text, 8) if text.startswith("0") and text.isdigit() else int(text, 0)

    def _paths(self) -> list[tuple[str, str]]:
        """Paths with their labels. In a mount namespace, another file may be there: it has no label."""
        return [(path, label if _is(path, inode) else "") for path, label, inode in self._targets["paths"]]

    def _open(self) -> None:
        """Open what descriptors there can be: of others, and own ones to use with them."""
        opened: list[Option] = []
        opened += [
            Option((_descriptor(path, flags | os.O_NONBLOCK | os.O_NOCTTY),), label)
            for path, label in self._paths()
            for flags in (os.O_PATH, os.O_PATH | os.O_NOFOLLOW, os.O_RDONLY, os.O_RDWR)
        ]
        for pid, label in self._targets["pids"]:
            opened.append(Option((_try(lambda pid=pid: os.pidfd_open(pid)),), label))  # type: ignore[misc]
        common = ("/", "/proc", "/sys", "/dev", "/dev/shm", self._own_file)
        self._common = [Option((_descriptor(path, os.O_RDONLY),)) for path in common]
        reader, writer = os.pipe2(os.O_NONBLOCK)
        own = os.memfd_create("own")
        os.write(own, b"own" * 100)
        opened += [Option((each,)) for each in (reader, writer, own)]
        for name in self._targets["queues"]:
            number = self._targets["numbers"]["mq_open"]
            queue = _libc.syscall(ctypes.c_long(number), self.place_for_call(name), 0o4002, 0, 0)
            self._queues.append(Option((queue if queue >= 0 else _MISSING,), "message queue"))
        sockets = [
            (family, kind)
            for family in (socket.AF_UNIX, socket.AF_INET)
            for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_SEQPACKET)
        ]
        for family, kind in sockets:
            made = _try(lambda family=family, kind=kind: socket.socket(family, kind | os.O_NONBLOCK).detach())  # type: ignore[misc]
            self._sockets.append(Option((made,)))
        self._opened = opened
        numbers = self._targets["numbers"]
        self._single = {
            "memfd": own,
            "pipe": writer,
            "epoll": _polled(),
            "inotify": int(_libc.syscall(ctypes.c_long(numbers.get("inotify_init1", -1)), ctypes.c_long(0o4000))),
            "fanotify": int(_libc.syscall(ctypes.c_long(numbers["fanotify_init"]), *map(ctypes.c_long, (0x600, 0)))),
        }

    def place_for_call(self, text: str) -> ctypes.c_void_p:
        """The address of a text, as an argument."""
        return ctypes.c_void_p(self._place(text))

    # -- processes -----------------------------------------------------------------------------------------------------

    def _of_pid(self) -> list[Option]:
        return [Option((pid,), label) for pid, label in self._targets["pids"]]

    def _of_signal(self) -> list[Option]:
        """Without effect on most processes; the owner's process keeps it pending."""
        return [Option((0,)), Option((signal.SIGURG,))]

    def _of_clock(self) -> list[Option]:
        others = [Option(((~pid << 3) | 2,), label) for pid, label in self._targets["pids"]]
        return [*(Option((each,)) for each in (0, 1, 3, 7)), *others]

    def _of_siginfo(self) -> list[Option]:
        return [Option((self._place(struct.pack("<iii", signal.SIGURG, 0, -1) + bytes(116)),))]

    def _of_limits(self) -> list[Option]:
        return [Option((self._place(struct.pack("<QQ", 4096, 1 << 62)),))]

    def _of_mask(self) -> list[Option]:
        return [Option((self._place(struct.pack("<Q", 1) + bytes(120)),))]

    def _of_schedattr(self) -> list[Option]:
        return [Option((self._place(struct.pack("<IIQiIQQQII", 56, _BATCH, 0, 0, 0, 0, 0, 0, 0, 0)),))]

    def _of_caps(self) -> list[Option]:
        return [Option((self._place(struct.pack("<Ii", 0x20080522, pid)),)) for pid in (0, self._number("pid"))]

    def _of_perf(self) -> list[Option]:
        return [Option((self._place(struct.pack("<IIQ", 1, 120, 0) + bytes(104)),))]  # software, the processor's clock

    def _of_clone3(self) -> list[Option]:
        kinds = (0, 0x2000_0000, 0x0002_0000)
        return [Option((self._place(struct.pack("<QQQQQ", flags, 0, 0, 0, 17) + bytes(48)),)) for flags in kinds]

    def _of_iovother(self) -> list[Option]:
        return [Option((self._place(struct.pack("<QQ", self._targets["address"], 8)),))]

    def _of_addresses(self) -> list[Option]:
        return [Option((self._place(struct.pack("<Q", self._targets["address"])),))]

    # -- memory of the caller ------------------------------------------------------------------------------------------

    def _of_out(self) -> list[Option]:
        return [Option((self.out,))]

    def _of_zero(self) -> list[Option]:
        return [Option((self.zero,))]

    def _of_in(self) -> list[Option]:
        return [Option((self._place(b"7" * 64),))]

    def _of_own(self) -> list[Option]:
        return [Option((ctypes.addressof(ctypes.c_char.from_buffer(self._own_region)),))]

    def _of_iov(self) -> list[Option]:
        return [Option((self._place(struct.pack("<QQ", self.out, 64)),))]

    def _of_iovin(self) -> list[Option]:
        return [Option((self._place(struct.pack("<QQ", self._place(b"7" * 8), 8)),))]

    def _of_socklen(self) -> list[Option]:
        return [Option((self._place(struct.pack("<Q", 128)),))]

    def _of_text(self) -> list[Option]:
        return [Option((self._place("/nowhere"),))]

    def _of_argv(self) -> list[Option]:
        return [Option((self._place(struct.pack("<QQ", self._place("program"), 0)),))]

    def _of_timeval(self) -> list[Option]:
        return [Option((self._place(struct.pack("<qq", 1_000_000_000, 0)),))]

    _of_timespec = _of_timeval

    def _of_utimbuf(self) -> list[Option]:
        return [Option((self._place(struct.pack("<qq", 1, 1)),))]

    def _of_timevals(self) -> list[Option]:
        return [Option((self._place(struct.pack("<qqqq", 1, 0, 1, 0)),))]

    _of_timespecs = _of_timevals

    def _of_timex(self) -> list[Option]:
        return [Option((self._place(struct.pack("<Iiqqq", 0x100, 0, 100, 0, 0) + bytes(176)),))]  # ADJ_SETOFFSET

    # -- files ---------------------------------------------------------------------------------------------------------

    def _of_new(self) -> list[Option]:
        names = [(self._own_new, ""), *((path, label) for path, label in self._targets["new"])]
        return [Option((self._place(path),), label) for path, label in names]

    def _of_newat(self) -> list[Option]:
        return [Option((-100, *each.numbers), each.label) for each in self._of_new()]

    def _of_at(self) -> list[Option]:
        found = [Option((-100, self._place(path)), label) for path, label in self._paths()]
        for directory, path, label in self._targets["below"]:
            found.append(Option((_descriptor(directory, os.O_PATH), self._place(path)), label))
        for path, label in self._paths():
            found.append(Option((_descriptor(path, os.O_PATH | os.O_NOFOLLOW), self._place("")), label))
        return found

    def _of_open(self) -> list[Option]:
        common = os.O_NONBLOCK | os.O_NOCTTY
        kinds = (os.O_RDONLY, os.O_RDWR, os.O_WRONLY | os.O_TRUNC, os.O_PATH, os.O_PATH | os.O_NOFOLLOW, 3)
        return [Option((flags | common,)) for flags in (*kinds, os.O_TMPFILE | os.O_RDWR)]

    def _of_openhow(self) -> list[Option]:
        hows = [(flags.numbers[0], 0) for flags in self._of_open() if not flags.numbers[0] & os.O_TMPFILE]
        return [Option((self._place(struct.pack("<QQQ", *how, 0)),)) for how in hows]

    def _of_name(self) -> list[Option]:
        return [Option((self._place("user.walk"),))]

    def _of_xattrin(self) -> list[Option]:
        return [Option((self._place(struct.pack("<QII", self._place(b"7" * 8), 8, 0)),))]

    def _of_xattrout(self) -> list[Option]:
        return [Option((self._place(struct.pack("<QII", self.out, 64, 0)),))]

    def _of_fileattr(self) -> list[Option]:
        return [Option((self._place(struct.pack("<QIII", 0x40, 0, 0, 0) + bytes(4)),))]  # FS_XFLAG_NOATIME

    def _of_mountattr(self) -> list[Option]:
        return [Option((self._place(struct.pack("<QQQQ", 1, 0, 0, 0)),))]

    def _of_filesystem(self) -> list[Option]:
        return [Option((self._place(name),)) for name in ("tmpfs", "proc")]

    def _of_mountid(self) -> list[Option]:
        return [Option((self._place(struct.pack("<IIQQQ", 32, 0, 0xFFFF_FFFF_FFFF_FFFF, 0x2F, 0)),))]

    def _of_handle(self) -> list[Option]:
        found = [Option((self._place(struct.pack("<Ii", 128, 0) + bytes(128)),))]
        return found + [Option((self._place(bytes.fromhex(each)),), "file") for each in self._targets["handles"]]

    def _of_anydir(self) -> list[Option]:
        return [Option((_descriptor(path, os.O_RDONLY),)) for path in ("/", self._own_file)]

    def _of_range(self) -> list[Option]:
        return [Option((self._place(struct.pack("<QQ", 0, 4096)),))]

    # -- descriptors ---------------------------------------------------------------------------------------------------

    def _of_fd(self) -> list[Option]:
        return [*self._opened, *self._queues]

    def _of_fdi(self) -> list[Option]:
        """And inherited ones and those of the whole machine, for calls that only read."""
        return [*self._opened, *self._common, *(Option((each,)) for each in self._inherited)]

    def _of_mqd(self) -> list[Option]:
        return self._queues

    def _of_flock(self) -> list[Option]:
        return [Option((self._place(struct.pack("<hhqqi", kind, 0, 0, 0, 0) + bytes(8)),)) for kind in (0, 1)]

    def _of_ioctl(self) -> list[Option]:
        terminals = (0x541B, 0x5412, 0x5413, 0x5414, 0x541C, 0x540E)
        files = (0x8008_6601, 0x4008_6602, 0x801C_581F, 0x401C_5820, 0x4004_9409, 0xC045_8775, 0x8004_5878)
        processes = (*(0xFF01 + each for each in range(10)), 0xC050_FF0B, 0xB703, 0xB701)
        return [Option((each,)) for each in (*terminals, *files, *processes, 0x8912)]

    def _of_pollfds(self) -> list[Option]:
        found = [each.numbers[0] for each in self._opened if each.numbers[0] != _MISSING]
        return [Option((self._place(struct.pack("<ihh", each, 1, 0)),)) for each in found]

    def _of_event(self) -> list[Option]:
        return [Option((self._place(struct.pack("<IQ", 1, 0)),))]

    # -- sockets -------------------------------------------------------------------------------------------------------

    def _of_sockets(self) -> list[Option]:
        return self._sockets

    def _addresses(self) -> Iterator[tuple[bytes, str]]:
        for path in self._targets["sockets"]:
            name = path.encode()
            yield struct.pack("<H", socket.AF_UNIX) + name + (b"" if name.startswith(b"\0") else b"\0"), "socket"
        for port in self._targets["ports"]:
            yield struct.pack("<H", socket.AF_INET) + struct.pack(">H4s8x", port, bytes((127, 0, 0, 1))), "server"

    def _of_address(self) -> list[Option]:
        return [Option((self._place(each), len(each)), label) for each, label in self._addresses()]

    def _of_message(self) -> list[Option]:
        data = self._place(struct.pack("<QQ", self._place(b"7" * 8), 8))
        return [
            Option(
                (self._place(struct.pack("<QIIQQQQI", self._place(each), len(each), 0, data, 1, 0, 0, 0) + bytes(12)),)
            )
            for each, _ in self._addresses()
        ]

    def _of_receive(self) -> list[Option]:
        data = self._place(struct.pack("<QQ", self.out, 64))
        header = struct.pack("<QIIQQQQI", self.out + 64, 128, 0, data, 1, self.out + 256, 256, 0)
        return [Option((self._place(header + bytes(12)),))]

    # -- System V, queues and keys -------------------------------------------------------------------------------------

    def _ids(self, name: str, label: str) -> list[Option]:
        return [Option((each,), label) for each in self._targets[name]]

    def _of_key(self) -> list[Option]:
        return self._ids("ipc_keys", "System V object")

    def _of_shmid(self) -> list[Option]:
        return self._ids("shmids", "System V object")

    def _of_semid(self) -> list[Option]:
        return self._ids("semids", "System V object")

    def _of_msgid(self) -> list[Option]:
        return self._ids("msgids", "System V object")

    def _of_ipcstat(self) -> list[Option]:
        return [Option((self.out,))]

    def _of_semops(self) -> list[Option]:
        return [Option((self._place(struct.pack("<Hhh", 0, change, 0o4000)),)) for change in (1, -1)]

    def _of_semarg(self) -> list[Option]:
        return [Option((self.out,)), Option((7,))]

    def _of_msgbuf(self) -> list[Option]:
        return [Option((self._place(struct.pack("<q", 1) + b"7" * 8),))]

    def _of_queue(self) -> list[Option]:
        return [Option((self._place(each),), "message queue") for each in self._targets["queues"]]

    def _of_keyid(self) -> list[Option]:
        return [Option((-3,)), Option((-4,)), Option((-5,)), *self._of_onekey()]

    def _of_onekey(self) -> list[Option]:
        """Without the keyrings of the account: what other processes have in these is not the walk's."""
        return self._ids("keys", "key")

    _of_keyring = _of_keyid

    def _of_keytype(self) -> list[Option]:
        return [Option((self._place("user"),))]

    def _of_keyname(self) -> list[Option]:
        return [Option((self._place(each),), "key") for each in self._targets["key_names"]]

    def _of_seccomp(self) -> list[Option]:
        return [Option((self._place(struct.pack("<I", 0x7FC0_0000)),))]

    def _of_bpf(self) -> list[Option]:
        return [Option((self._place(struct.pack("<IIII", 2, 4, 4, 1) + bytes(112)),))]


def _try(action: Callable[[], int]) -> int:
    try:
        return action()
    except OSError:
        return _MISSING


def _is(path: str, inode: int) -> bool:
    """Whether a file has this number, or is not there."""
    try:
        return inode in (0, os.stat(path, follow_symlinks=False).st_ino)  # noqa: PTH116
    except OSError:
        return True


def _polled() -> int:
    with select.epoll() as polled:
        return os.dup(polled.fileno())


def _descriptor(path: str, flags: int) -> int:
    return _try(lambda: os.open(path, flags | os.O_CLOEXEC))


class Walker:
    """Makes the calls that the owner names."""

    def __init__(self, own: str, inherited: list[int]) -> None:
        self._own = own
        self._inherited = inherited
        self._arena = mmap.mmap(-1, _ARENA_BYTES)
        self._results = mmap.mmap(-1, 8 + _MOST * _RECORD.size)

    def walk(self, order: dict[str, Any]) -> dict[str, Any]:
        """Make a call with all combinations of its arguments.

        :param order: ``name`` and ``number`` of the call, ``forms`` of its arguments, ``targets``, ``more``: further
            combinations at random.
        """
        with open(f"{self._own}/own", "w") as file:  # noqa: PTH123
            file.write("own")
        before = _descriptors()
        options = Options(order["targets"], self._inherited, self._arena, self._own)
        combinations = list(itertools.islice(_combinations(options, order), _MOST))
        self._results[:] = bytes(len(self._results))
        at, hung, crashed = 0, 0, 0
        while at < len(combinations):
            until = at + 1 if order["name"] in _ALONE else len(combinations)
            ended = self._run(order, options, combinations[:until], at)
            entered, done = struct.unpack_from("<II", self._results, 0)
            hung += ended == "hung"
            crashed += ended != "hung" and done != entered
            at = max(entered, at + 1)
        for descriptor in _descriptors():
            if descriptor not in before:
                with contextlib.suppress(OSError):
                    os.close(descriptor)
        shutil.rmtree(f"{self._own}/new", ignore_errors=True)
        for name in ("own", "new"):
            with contextlib.suppress(OSError):
                os.unlink(f"{self._own}/{name}")  # noqa: PTH108
        return self._summary(combinations) | {"hung": hung, "crashed": crashed}

    def _summary(self, combinations: list[tuple[tuple[int, ...], str]]) -> dict[str, Any]:
        tokens: set[str] = set()
        found: set[str] = set()
        errors: set[int] = set()
        for number, (_, label) in enumerate(combinations):
            value, error, done, texts = _RECORD.unpack_from(self._results, 8 + number * _RECORD.size)
            if done:
                errors.add(error if value == -1 else 0)
                tokens.update(each.decode() for each in TOKEN.findall(texts))
                if value >= 0 and label:
                    found.add(label)
        return {"tokens": sorted(tokens), "found": sorted(found), "errors": sorted(errors), "tried": len(combinations)}

    def _run(self, order: dict[str, Any], options: Options, combinations: list[Any], at: int) -> str:
        """Make calls in a child. "hung": it had to be killed in the call that it entered last."""
        struct.pack_into("<II", self._results, 0, 0, 0)
        others = [other for other, _ in order["targets"]["pids"]]
        while (pid := os.fork()) in others or pid == 0:  # in a namespace, a child may have the number of a target
            if pid == 0:
                try:
                    if os.getpid() not in others:
                        self._child(order, options, combinations, at)
                finally:
                    os._exit(0)
            os.waitpid(pid, 0)
        pidfd = os.pidfd_open(pid)
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        most_ms = _PROGRAM_MS if order["name"] in _PROGRAMS else _CALL_MS
        last, still = -1, 0
        try:
            while not poll.poll(_STEP_MS):
                [entered] = struct.unpack_from("<I", self._results, 0)
                still = still + 1 if entered == last and entered else 0
                last = entered
                if still * _STEP_MS >= most_ms:
                    os.kill(pid, signal.SIGKILL)
                    return "hung"
            return "ended"
        finally:
            os.waitpid(pid, 0)
            os.close(pidfd)

    def _child(self, order: dict[str, Any], options: Options, combinations: list[Any], at: int) -> None:
        me = os.getpid()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        known = set(_descriptors())
        number = ctypes.c_long(order["number"])
        for index in range(at, len(combinations)):
            ctypes.memset(options.out, 0, _OUT_BYTES)
            arguments = [ctypes.c_long(each) for each in combinations[index][0]]
            arguments += [ctypes.c_long(0)] * (6 - len(arguments))
            struct.pack_into("<I", self._results, 0, index + 1)
            ctypes.set_errno(0)
            value = _libc.syscall(number, *arguments)
            error = ctypes.get_errno()
            if os.getpid() != me:
                os._exit(0)
            texts = TOKEN.findall(ctypes.string_at(options.out, _OUT_BYTES))
            self._record(index, value, error, texts)
            texts += _contents(order["name"], value, known)
            self._record(index, value, error, texts)
            struct.pack_into("<I", self._results, 4, index + 1)

    def _record(self, index: int, value: int, error: int, texts: list[bytes]) -> None:
        text = b"".join(dict.fromkeys(texts))[:48]
        _RECORD.pack_into(self._results, 8 + index * _RECORD.size, value, error, 1, text)


def _combinations(options: Options, order: dict[str, Any]) -> Iterator[tuple[tuple[int, ...], str]]:
    """Arguments and label of each combination."""
    rng = random.Random(order["name"])
    for form in order["forms"]:
        values = [options.of(kind) for kind in form.split()]
        if all(values):
            for chosen in itertools.product(*values):
                yield _joined(chosen)
            numbers = [kind.startswith("=") for kind in form.split()]
            for _ in range(order["more"] if any(numbers) else 0):
                some = [rng.choice(each) for each in values]
                yield _joined(
                    [_changed(rng, each) if is_number else each for each, is_number in zip(some, numbers, strict=True)]
                )


def _joined(chosen: Any) -> tuple[tuple[int, ...], str]:
    numbers = tuple(itertools.chain.from_iterable(each.numbers for each in chosen))
    return numbers[:6], next((each.label for each in chosen if each.label), "")


def _changed(rng: random.Random, option: Option) -> Option:
    """A number with another bit."""
    return Option((option.numbers[0] ^ (1 << rng.randrange(32)),))


def _contents(name: str, value: int, known: set[int]) -> list[bytes]:
    """Tokens behind the result of a call: in the memory that it has attached, or in the file that it has opened. What
    can be written is changed."""
    if name in ("shmat", "mmap") and value > 4096:
        return TOKEN.findall(ctypes.string_at(value, 64))
    if name not in _OPENING or value < 0 or value in known:
        return []
    found: list[bytes] = []
    with contextlib.suppress(OSError):
        os.set_blocking(value, False)
        with contextlib.suppress(OSError):
            found += TOKEN.findall(os.read(value, 4096))
        with contextlib.suppress(OSError):
            found += TOKEN.findall("\n".join(os.listdir(value)).encode(errors="replace"))
        with contextlib.suppress(OSError):
            os.pwrite(value, b"7", 0)
        with contextlib.suppress(OSError):
            os.write(value, b"7")
        os.close(value)
    return found


def _descriptors() -> list[int]:
    """Open descriptors of this process."""
    found = []
    for each in range(256):
        with contextlib.suppress(OSError):
            os.fstat(each)
            found.append(each)
    return found


def main(port: int) -> None:
    """Make the calls that the owner orders, one a line, until it closes the connection."""
    own, inherited = os.getcwd(), _descriptors()  # noqa: PTH109
    with socket.create_connection(("127.0.0.1", port)) as connection, connection.makefile("rw") as lines:
        walker = Walker(own, inherited)
        for line in lines:
            lines.write(json.dumps(walker.walk(json.loads(line))) + "\n")
            lines.flush()
