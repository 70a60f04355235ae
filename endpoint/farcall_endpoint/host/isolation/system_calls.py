"""System calls that tasks of other submitters may not make, or only with arguments that reach nothing of others.

Landlock has rules for files, signals and ``ptrace``. Each call in :data:`RULES` reaches a process, a name or a kernel
object by another way. Calls that are newer than :data:`NEWEST` are refused until they have been reviewed.
"""

from __future__ import annotations

import dataclasses
import enum
import errno
import platform
from typing import Final

NEWEST: Final = 469
"""Number of the newest system call that was reviewed: ``file_setattr`` of Linux 6.17."""
OWN: Final = -1
"""Placeholder in an :class:`Argument`: the process that installs the filter."""


class Action(enum.Enum):
    """Result of a call that no permitted form of a rule matches."""

    REFUSE = enum.auto()
    #: The call succeeds and changes nothing.
    IGNORE = enum.auto()
    #: The supervisor performs the call on the task's own files and sockets.
    SUPERVISE = enum.auto()


@dataclasses.dataclass(frozen=True)
class Argument:
    """Comparison of 32 bits of an argument: ``argument & mask == value``. ``high``: compare the upper half."""

    index: int
    value: int
    mask: int = 0xFFFF_FFFF
    high: bool = False


@dataclasses.dataclass(frozen=True)
class Rule:
    """Treatment of a system call.

    :param numbers: of x86-64 and of AArch64; None: the architecture lacks the call.
    :param reason: why the call is not left to Landlock.
    :param permitted: forms that are executed; one matches if all of its comparisons hold.
    :param refused: forms that get the action; if there are some, all others are executed.
    :param sandboxed: whether the rule also holds for workers in namespaces of their own.
    """

    numbers: tuple[int | None, int | None]
    reason: str
    permitted: tuple[tuple[Argument, ...], ...] = ()
    refused: tuple[tuple[Argument, ...], ...] = ()
    action: Action = Action.REFUSE
    error: int = errno.EPERM
    sandboxed: bool = False


_NAMES: Final = "reports the names in directories that the task cannot list"
_KEYS: Final = "reaches the owner's kernel keyrings, for example Kerberos tickets"
_IPC: Final = "reaches System V and POSIX objects of every process of the account"
_KERNEL: Final = "opens a large part of the kernel that tasks do not need"
_MOUNTS: Final = "changes what paths mean"
_XATTR: Final = "changes attributes of files that the task cannot write"
_OWNER: Final = "changes the owner or group of files that the task cannot write"
_MODE: Final = "changes modes of files that the task cannot write"
_TIMES: Final = "changes times of files that the task cannot write"
_ABSTRACT: Final = "lets other accounts connect to an abstract socket, and pass files of their mount namespaces"
_PRIORITY: Final = "slows other processes of the account"
_NAMESPACES: Final = 0x7E02_0000
"""CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID and NEWNET."""
_NEW_TIME: Final = 0x80
"""CLONE_NEWTIME; ``clone`` has another meaning for this bit."""


def _own_process(index: int) -> tuple[tuple[Argument, ...], ...]:
    return (Argument(index, 0),), (Argument(index, OWN),)


def _own_of(kinds: tuple[int, ...]) -> tuple[tuple[Argument, ...], ...]:
    """Forms whose first argument is a kind of target, and whose second is the caller."""
    return tuple((Argument(0, kind), *each) for kind in kinds for each in _own_process(1))


def _missing(x86: int | None, arm: int | None, reason: str, *, sandboxed: bool = False) -> Rule:
    """Rule of a call that a program should treat as absent from the kernel, and do without."""
    return Rule((x86, arm), reason, error=errno.ENOSYS, sandboxed=sandboxed)


def _supervised(x86: int | None, arm: int | None, reason: str) -> Rule:
    return Rule((x86, arm), reason, action=Action.SUPERVISE)


_SUBVOLUMES: Final = (0x9401, 0x940E, 0x940F, 0x9413, 0x9417, 0x9418, 0x941A, 0x943F)
"""Commands of btrfs that make, change and delete subvolumes and snapshots, without their sizes and directions."""
_SET_ID: Final = (0o4000, 0o2000)
"""Bits of a mode that let other accounts run a file as its owner or group."""


def _opening(flags: int, mode: int) -> tuple[tuple[Argument, ...], ...]:
    """Refused forms of a call that opens files, by the places of its flags and its mode."""
    made = tuple(
        (Argument(flags, kind, mask=kind), Argument(mode, bit, mask=bit))
        for kind in (0o100, 0o2000_0000)  # O_CREAT, and the bit of O_TMPFILE
        for bit in _SET_ID
    )
    # Access mode 3 permits ioctl alone, and Landlock asks for no right.
    return (Argument(flags, 3, mask=3),), *made


def _making(mode: int) -> tuple[tuple[Argument, ...], ...]:
    return tuple((Argument(mode, bit, mask=bit),) for bit in _SET_ID)


_OPENED: Final = "opens files without a right of Landlock, or makes files that others run as the owner"
_READ_XATTR: Final = "reads attributes of files that the task cannot read"
_LOCAL_DATAGRAMS: Final = tuple(
    (Argument(0, 1), Argument(1, kind, mask=0xF))
    for kind in (2, 3)  # SOCK_DGRAM, and SOCK_RAW, which is the same here
)

RULES: Final[dict[str, Rule]] = {
    # -- names
    "inotify_init": _missing(253, None, _NAMES),
    "inotify_init1": _missing(294, 26, _NAMES),
    "inotify_add_watch": _missing(254, 27, _NAMES),
    "fanotify_init": _missing(300, 262, _NAMES),
    "fanotify_mark": _missing(301, 263, _NAMES),
    "fcntl": Rule(
        (72, 25),
        "F_NOTIFY reports changes in directories, F_SETLEASE and F_SETDELEG delay the owner's programs, F_SETOWN and "
        "F_SETOWN_EX send signals to other processes",
        refused=tuple((Argument(1, command),) for command in (1024, 1026, 1040, 8, 15)),
    ),
    "seccomp": Rule(
        (317, 277),
        "with a listener, makes filters whose decisions come before this one's",
        refused=((Argument(0, 1), Argument(1, 8, mask=8)),),  # SECCOMP_SET_MODE_FILTER, FILTER_FLAG_NEW_LISTENER
    ),
    "open": Rule((2, None), _OPENED, refused=_opening(1, 2)),
    "openat": Rule((257, 56), _OPENED, refused=_opening(2, 3)),
    "openat2": _missing(437, 437, _OPENED),
    "creat": Rule((85, None), _OPENED, refused=_making(1)),
    "mknod": Rule((133, None), _OPENED, refused=_making(1)),
    "mknodat": Rule((259, 33), _OPENED, refused=_making(2)),
    "name_to_handle_at": _missing(303, 264, "names files without their path"),
    "open_by_handle_at": _missing(304, 265, "opens files without their path"),
    # -- keys
    "add_key": _missing(248, 217, _KEYS, sandboxed=True),
    "request_key": _missing(249, 218, _KEYS, sandboxed=True),
    "keyctl": _missing(250, 219, _KEYS, sandboxed=True),
    # -- System V and POSIX objects
    "shmget": _missing(29, 194, _IPC),
    "shmat": _missing(30, 196, _IPC),
    "shmctl": _missing(31, 195, _IPC),
    "semget": _missing(64, 190, _IPC),
    "semop": _missing(65, 193, _IPC),
    "semctl": _missing(66, 191, _IPC),
    "semtimedop": _missing(220, 192, _IPC),
    "msgget": _missing(68, 186, _IPC),
    "msgsnd": _missing(69, 189, _IPC),
    "msgrcv": _missing(70, 188, _IPC),
    "msgctl": _missing(71, 187, _IPC),
    "mq_open": _missing(240, 180, _IPC),
    "mq_unlink": _missing(241, 181, _IPC),
    # -- other processes
    "prlimit64": Rule(
        (302, 261),
        "changes resource limits of other processes, which ends them",
        permitted=(*_own_process(0), (Argument(2, 0), Argument(2, 0, high=True))),
    ),
    "setpriority": Rule((141, 140), _PRIORITY, permitted=_own_of((0, 1))),
    "ioprio_set": Rule((251, 30), _PRIORITY, permitted=_own_of((1, 2))),
    "sched_setparam": Rule((142, 118), _PRIORITY, permitted=_own_process(0)),
    "sched_setscheduler": Rule((144, 119), _PRIORITY, permitted=_own_process(0)),
    "sched_setattr": Rule((314, 274), _PRIORITY, permitted=_own_process(0)),
    # OpenMP and other runtimes name their own threads here, and end the program when that fails.
    "sched_setaffinity": Rule((203, 122), _PRIORITY, permitted=_own_process(0), action=Action.IGNORE),
    "perf_event_open": _missing(298, 241, "measures other processes"),
    # -- terminals and attributes by a descriptor that was opened for reading
    "ioctl": Rule(
        (16, 29),
        "types into terminals (TIOCSTI, TIOCLINUX), sends signals (FIOSETOWN, SIOCSPGRP), changes attributes of files "
        "that the task can only read",
        refused=tuple(
            (Argument(1, command),)
            for command in (
                *(0x5412, 0x541C, 0x8901, 0x8902),  # TIOCSTI, TIOCLINUX, FIOSETOWN, SIOCSPGRP
                *(0x4008_6602, 0x4004_6602, 0x401C_5820),  # FS_IOC_SETFLAGS, FS_IOC32_SETFLAGS, FS_IOC_FSSETXATTR
                *(0x4080_6685, 0x800C_6613, 0x4008_7602),  # FS_IOC_ENABLE_VERITY, SET_ENCRYPTION_POLICY, SETVERSION
                *(0x4004_7602, 0x4008_6604, 0x4004_6604),  # FS_IOC32_SETVERSION, EXT4_IOC_SETVERSION, and of 32 bits
                0x4004_7211,  # FAT_IOCTL_SET_ATTRIBUTES
            )
        )
        + tuple((Argument(1, command, mask=0xFFFF),) for command in _SUBVOLUMES),
    ),
    "file_setattr": _missing(469, 469, _XATTR),
    "setxattr": Rule((188, 5), _XATTR, error=errno.EOPNOTSUPP),
    "lsetxattr": Rule((189, 6), _XATTR, error=errno.EOPNOTSUPP),
    "fsetxattr": Rule((190, 7), _XATTR, error=errno.EOPNOTSUPP),
    "setxattrat": _missing(463, 463, _XATTR),
    "removexattr": Rule((197, 14), _XATTR, error=errno.EOPNOTSUPP),
    "lremovexattr": Rule((198, 15), _XATTR, error=errno.EOPNOTSUPP),
    "fremovexattr": Rule((199, 16), _XATTR, error=errno.EOPNOTSUPP),
    "removexattrat": _missing(466, 466, _XATTR),
    **{
        name: Rule(numbers, _READ_XATTR, error=errno.EOPNOTSUPP)
        for name, numbers in {
            "getxattr": (191, 8),
            "lgetxattr": (192, 9),
            "fgetxattr": (193, 10),
            "listxattr": (194, 11),
            "llistxattr": (195, 12),
            "flistxattr": (196, 13),
        }.items()
    },
    "getxattrat": _missing(464, 464, _READ_XATTR),
    "listxattrat": _missing(465, 465, _READ_XATTR),
    "chown": Rule((92, None), _OWNER),
    "fchown": Rule((93, 55), _OWNER),
    "lchown": Rule((94, None), _OWNER),
    "fchownat": Rule((260, 54), _OWNER),
    # -- performed by the supervisor
    "chmod": _supervised(90, None, _MODE),
    "fchmod": _supervised(91, 52, _MODE),
    "fchmodat": _supervised(268, 53, _MODE),
    "fchmodat2": _supervised(452, 452, _MODE),
    "utime": _supervised(132, None, _TIMES),
    "utimes": _supervised(235, None, _TIMES),
    "futimesat": _supervised(261, None, _TIMES),
    "utimensat": _supervised(280, 88, _TIMES),
    "connect": _supervised(42, 203, "reaches the owner's servers by the path of their sockets"),
    "bind": _supervised(49, 200, _ABSTRACT),
    "listen": _supervised(50, 201, _ABSTRACT),
    # -- sockets that need no connection
    "socket": Rule(
        (41, 198),
        "sends datagrams to the path of any local socket, or reaches the host of a virtual machine",
        refused=(*_LOCAL_DATAGRAMS, (Argument(0, 40),)),  # AF_VSOCK
    ),
    "socketpair": Rule((53, 199), "sends datagrams to the path of any local socket", refused=_LOCAL_DATAGRAMS),
    # SO_LINGER: a process that closes a socket which was passed to it waits until the data has left.
    "setsockopt": Rule(
        (54, 208),
        "lets the endpoint wait as long as the task wishes",
        refused=((Argument(1, 1), Argument(2, 13)),),
        action=Action.IGNORE,
        sandboxed=True,
    ),
    # -- namespaces and mounts
    "clone": Rule((56, 220), _KERNEL, permitted=((Argument(0, 0, mask=_NAMESPACES),),), sandboxed=True),
    # The C library then uses clone, whose flags a filter can read.
    "clone3": _missing(435, 435, _KERNEL, sandboxed=True),
    "unshare": Rule((272, 97), _KERNEL, permitted=((Argument(0, 0, mask=_NAMESPACES | _NEW_TIME),),), sandboxed=True),
    "setns": Rule((308, 268), _KERNEL, sandboxed=True),
    "mount": Rule((165, 40), _MOUNTS),
    "umount2": Rule((166, 39), _MOUNTS),
    "pivot_root": Rule((155, 41), _MOUNTS),
    "chroot": Rule((161, 51), _MOUNTS),
    "open_tree": _missing(428, 428, _MOUNTS),
    "open_tree_attr": _missing(467, 467, _MOUNTS),
    "move_mount": _missing(429, 429, _MOUNTS),
    "fsopen": _missing(430, 430, _MOUNTS),
    "fsconfig": _missing(431, 431, _MOUNTS),
    "fsmount": _missing(432, 432, _MOUNTS),
    "fspick": _missing(433, 433, _MOUNTS),
    "mount_setattr": _missing(442, 442, _MOUNTS),
    # -- the kernel's surface
    "bpf": _missing(321, 280, _KERNEL),
    "userfaultfd": _missing(323, 282, _KERNEL),
    "io_uring_setup": _missing(425, 425, "performs other calls without this filter"),
    "io_uring_enter": _missing(426, 426, "performs other calls without this filter"),
    "io_uring_register": _missing(427, 427, "performs other calls without this filter"),
    "quotactl": Rule((179, 60), _KERNEL),
    "quotactl_fd": _missing(443, 443, _KERNEL),
}

SANDBOX_RULES: Final[dict[str, Rule]] = {
    # A server performs these in another network namespace, and refuses AF_VSOCK.
    "socket": Rule(
        RULES["socket"].numbers,
        _ABSTRACT,
        refused=((Argument(0, 1),), (Argument(0, 40),)),
        action=Action.SUPERVISE,
    ),
    # A datagram socket of a pair can be separated, and bound to a name.
    **{
        name: RULES[name]
        for name in ("socketpair", "setsockopt", "io_uring_setup", "io_uring_enter", "io_uring_register", "seccomp")
    },
}
"""For sandboxes, which share the machine's network. All calls that no rule names are executed."""

_ARCHITECTURES: Final = {"x86_64": (0, 0xC000_003E), "aarch64": (1, 0xC000_00B7)}
"""Column of the numbers, and the value of ``AUDIT_ARCH``."""


def architecture() -> tuple[int, int] | None:
    """Column of this machine in :attr:`Rule.numbers`, and its ``AUDIT_ARCH``; None if it has no column."""
    return _ARCHITECTURES.get(platform.machine())
