"""Namespaces of a worker that is a fork: mounts, processes, IPC, host name, and network if wanted.

A fork has what a fresh container in the same place has, and shares nothing with other forks that fresh containers would
not share: it sees its own processes only, and each directory in memory, such as ``/tmp``, is its own.

The template enters process and mount namespaces once, which it owns (:func:`enter`): with privileges as it is, without
them in a user namespace that maps its user to itself. There it can make a process namespace for each child before it
forks (:func:`fork_apart`), so one fork is enough. The child makes the other namespaces (:func:`separate`), and gives up
all privileges (:func:`drop_privileges`). Nothing of this depends on what the child will do, so that children that are
forked in advance are done with it before a task waits for them.

``os.unshare`` and ``os.setns`` exist from Python 3.12 on; hence ctypes.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import stat
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

NEWNS: Final = 0x00020000
NEWUTS: Final = 0x04000000
NEWIPC: Final = 0x08000000
NEWUSER: Final = 0x10000000
NEWPID: Final = 0x20000000
NEWNET: Final = 0x40000000

_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC = 1, 2, 4, 8
_MS_REMOUNT, _MS_BIND, _MS_REC, _MS_PRIVATE = 32, 4096, 16384, 1 << 18
_KEPT_FLAGS: Final = {"nosuid": 2, "nodev": 4, "noexec": 8, "noatime": 1024, "nodiratime": 2048, "relatime": 1 << 21}
"""Flags of a mount that a process in a user namespace may not take away."""
_RENEWED_FLAGS: Final = _MS_NOSUID | _MS_NODEV
_PROC_FLAGS: Final = _MS_NOSUID | _MS_NODEV | _MS_NOEXEC

_SYS_MOUNT_SETATTR: Final = 442
"""On every architecture; since Linux 5.12."""
_SYS_CLOSE_RANGE: Final = 436
"""Since Linux 5.9."""
_ABOVE_DESCRIPTORS: Final = 2**31
_ATTR_RDONLY: Final = 1

_SET_DUMPABLE, _SET_NO_NEW_PRIVS, _CAPBSET_DROP, _SET_PDEATHSIG = 4, 38, 24, 1
_PR_CAP_AMBIENT, _AMBIENT_CLEAR_ALL = 47, 4
_CAP_SYS_ADMIN: Final = 21
_CAP_HEADER: Final = (ctypes.c_uint32 * 2)(0x20080522, 0)
_NO_CAPABILITIES: Final = (ctypes.c_uint32 * 6)()
_MOST_CAPABILITIES: Final = 64

_TEMPORARY: Final = ("/dev/shm", "/run", "/tmp", "/var/tmp")  # noqa: S108 - each child's own
"""Paths of writable directories that a container may have in memory."""
_IN_MEMORY: Final = ("tmpfs", "ramfs", "mqueue")
_LAYERED: Final = ("overlay", "fuse.fuse-overlayfs", *_IN_MEMORY)
"""File systems of a root that belongs to one container."""
_COVER_NOTHING: Final = ("autofs", "binfmt_misc")
"""File systems that the kernel expects at its own directories in ``/proc``."""
_KERNEL_SETTINGS: Final = ("/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger")
"""Paths where root may write without any capability. One of them names a program that the kernel runs."""
_IFF_UP_RUNNING: Final = 1 | 64
_SIOCSIFFLAGS: Final = 0x8914

_libc: Final = ctypes.CDLL(None, use_errno=True)


class _MountAttributes(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("set", "clear", "propagation", "user_namespace")]


class Mount(NamedTuple):
    """A mount that a process sees: its number and that of its parent, where it is, of which kind of file system, with
    which options, and whether it may be written."""

    number: int
    parent: int
    path: str
    kind: str
    options: tuple[str, ...]
    is_writable: bool


class Renewed(NamedTuple):
    """A directory that is new in each child, and the mounts below it, which stay. ``mode``: its permissions; empty for
    ``/proc``."""

    path: str
    below: tuple[str, ...]
    mode: str = ""


class Plan(NamedTuple):
    """Changes to a container's mounts: ``renewed`` mounts are new in each child, ``sealed`` mounts become read-only."""

    renewed: tuple[Renewed, ...]
    sealed: tuple[str, ...]


class Namespaces(NamedTuple):
    """Namespaces of a template's children. ``own``: a descriptor of the template's process namespace; ``renewed``: see
    :class:`Plan`; ``protected``: paths in a new ``/proc`` that are made read-only; ``network``: whether children
    share the template's network."""

    own: int
    renewed: tuple[Renewed, ...]
    protected: tuple[str, ...]
    network: bool


def plan(mounts: Sequence[Mount], *, writable: Collection[str]) -> Plan:
    """Return the mounts that forks of a template in a container must not share, as fresh containers would not. Pure.

    Directories in memory belong to the container, unless they are ``writable`` paths: these belong to the node, also in
    fresh containers.

    :param mounts: mounts of the container, in the order in which they were made.
    :raises OSError: if forks would share the container's root.
    """
    root = next((each for each in reversed(mounts) if each.path == "/"), None)
    if root is not None and root.is_writable and root.kind in _LAYERED:
        raise OSError(0, "forks would share it, as it can be written to", "the container's root")
    tops = _visible(mounts)
    in_memory = [each for each in tops if each.is_writable and each.kind in _IN_MEMORY]
    own = [each for each in in_memory if not any(_is_in(each.path, path) for path in writable)]
    renewed = [path for path in _TEMPORARY if any(each == _around(path, tops) for each in own)]
    # What is in one of them is made with it.
    renewed = [path for path in renewed if not any(path != each and _is_in(path, each) for each in renewed)]
    covers = [each for each in tops if each.kind not in _COVER_NOTHING]
    return Plan(
        renewed=(
            Renewed("/proc", _below("/proc", covers)),
            *(Renewed(path, _below(path, tops), "1777") for path in renewed),
        ),
        sealed=tuple(each.path for each in own if not any(_is_in(each.path, path) for path in renewed)),
    )


def enter(*, writable: Collection[str] = (), network: bool = True) -> Namespaces:
    """Move this process, which has one thread, into process and mount namespaces of its own, as their first process.

    The caller's process stays outside, waits, and ends as the inner one does: this returns in the inner one only.

    :param writable: where the node's directories are mounted for tasks to write.
    :param network: whether children share the network.
    :raises OSError: if the system forbids it, or forks would share what fresh containers do not; nothing has changed
        then but for a user namespace.
    """
    found = plan(read_mounts(), writable=writable)
    if not is_privileged():
        _enter_user_namespace()
    _unshare(NEWNS | NEWPID)
    mount("none", "/", flags=_MS_REC | _MS_PRIVATE)
    _stay_outside()
    _renew(found.renewed[0])
    for path in found.sealed:
        set_read_only(path)
    candidates = _KERNEL_SETTINGS if os.geteuid() == 0 else ()
    protected = tuple(path for path in candidates if path not in found.renewed[0].below and os.path.exists(path))  # noqa: PTH110
    _keep_only_present_privileges()
    die_with_parent()
    own = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
    return Namespaces(own, found.renewed, protected, network)


def missing(*, writable: Collection[str] = (), network: bool = True) -> str:
    """Why children of this process cannot have namespaces; empty if they can. Only a try shows it, in a child.

    Parameters are those of :func:`enter`.
    """
    reading, writing = os.pipe2(os.O_CLOEXEC)
    pid = os.fork()
    if pid == 0:
        try:
            _try_all(writing, writable=writable, network=network)
        except OSError as error:
            os.write(writing, f"{error.strerror} ({error.filename})".encode())
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, "rb") as file:  # noqa: PTH123 - a descriptor
        reason = file.read().decode(errors="replace")
    os.waitpid(pid, 0)
    return "" if reason == "ok" else f"namespaces: {reason or 'the process that tried was killed'}"


def _try_all(writing: int, *, writable: Collection[str], network: bool) -> None:
    entered = enter(writable=writable, network=network)
    pid = fork_apart(entered)
    if pid == 0:
        try:
            separate(entered)
            drop_privileges()
            os.write(writing, b"ok")
        except OSError as error:
            os.write(writing, f"{error.strerror} ({error.filename})".encode())
        finally:
            os._exit(0)
    os.waitpid(pid, 0)


def fork_apart(namespaces: Namespaces) -> int:
    """Fork a child that is the first of a process namespace; as ``os.fork``."""
    _unshare(NEWPID)
    try:
        pid = os.fork()
    except OSError:
        _check(_libc.setns(namespaces.own, NEWPID), "setns")
        raise
    if pid:
        _check(_libc.setns(namespaces.own, NEWPID), "setns")  # the template's next child is in its own again
    return pid


def separate(namespaces: Namespaces) -> None:
    """In a child: namespaces of its own, for the rest, and directories in memory of its own.

    :raises OSError: if the system forbids it.
    """
    _unshare(NEWNS | NEWIPC | NEWUTS | (0 if namespaces.network else NEWNET))
    for each in namespaces.renewed:
        _renew(each)
    for path in namespaces.protected:
        mount(path, path, flags=_MS_BIND)
        set_read_only(path)
    if not namespaces.network:
        _raise_loopback()


def _renew(what: Renewed) -> None:
    """Mount an empty directory in memory, or the processes of this namespace, and below it what was there."""
    opened = [(path, os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)) for path in what.below]
    if what.mode:
        mount("tmpfs", what.path, "tmpfs", _RENEWED_FLAGS, f"mode={what.mode}")
    else:
        mount("proc", what.path, "proc", _PROC_FLAGS)
    for path, descriptor in opened:
        if what.mode:
            _make_place(path, is_directory=stat.S_ISDIR(os.fstat(descriptor).st_mode))
        mount(f"/proc/self/fd/{descriptor}", path, flags=_MS_BIND | _MS_REC)
        os.close(descriptor)


def _make_place(path: str, *, is_directory: bool) -> None:
    if is_directory:
        os.makedirs(path, exist_ok=True)  # noqa: PTH103
        return
    os.makedirs(os.path.dirname(path), exist_ok=True)  # noqa: PTH103, PTH120
    os.close(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o644))


def _raise_loopback() -> None:
    import fcntl
    import socket
    import struct

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as handle:
        fcntl.ioctl(handle, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", _IFF_UP_RUNNING))


def drop_privileges() -> None:
    """In a child: give up all capabilities. It never gets any again: the template has seen to that.

    :raises OSError: if the kernel refuses.
    """
    _check(_libc.capset(_CAP_HEADER, _NO_CAPABILITIES), "capset")


def _keep_only_present_privileges() -> None:
    """No program that this process or a child of it starts has capabilities. Once, as it takes 0.3 ms."""
    for capability in range(_MOST_CAPABILITIES):
        if _libc.prctl(_CAPBSET_DROP, capability, 0, 0, 0) != 0:
            break  # there are no more of them
    _libc.prctl(_PR_CAP_AMBIENT, _AMBIENT_CLEAR_ALL, 0, 0, 0)
    _check(_libc.prctl(_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl")


def die_with_parent() -> None:
    """Be killed when the process that forked this one ends."""
    _libc.prctl(_SET_PDEATHSIG, 9, 0, 0, 0)


def set_dumpable(dumpable: bool) -> None:
    """Whether other processes of this user may read and trace this one."""
    _libc.prctl(_SET_DUMPABLE, int(dumpable), 0, 0, 0)


def is_privileged() -> bool:
    """Whether this process may make namespaces without a user namespace."""
    with open("/proc/self/status", encoding="utf-8", errors="replace") as file:  # noqa: PTH123
        effective = next((int(line.split()[1], 16) for line in file if line.startswith("CapEff:")), 0)
    return bool(effective >> _CAP_SYS_ADMIN & 1)


def mount(source: str, target: str, kind: str | None = None, flags: int = 0, data: str | None = None) -> None:
    """The system call.

    :raises OSError: as it does; its file name is the target.
    """
    encoded = [None if each is None else os.fsencode(each) for each in (source, target, kind, data)]
    result = _libc.mount(encoded[0], encoded[1], encoded[2], ctypes.c_ulong(flags), encoded[3])
    _check(result, f"mount {kind or 'of'} {target}")


def set_read_only(path: str) -> None:
    """Make a mount read-only, without those below it.

    :raises OSError: if the system forbids it.
    """
    attributes = _MountAttributes(_ATTR_RDONLY)
    size = ctypes.c_size_t(ctypes.sizeof(attributes))
    arguments = (ctypes.c_long(-1), os.fsencode(path), ctypes.c_uint(0), ctypes.byref(attributes), size)
    if _libc.syscall(ctypes.c_long(_SYS_MOUNT_SETATTR), *arguments) != 0:
        # Kernels before 5.12, and profiles that do not know the call.
        options = next((each.options for each in reversed(read_mounts()) if each.path == path), ())
        kept = sum(_KEPT_FLAGS.get(option, 0) for option in options)
        mount("none", path, flags=_MS_REMOUNT | _MS_BIND | kept | _MS_RDONLY)


def read_mounts() -> list[Mount]:
    """All mounts of this process, in the order in which they were made."""
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:  # noqa: PTH123
        return [_mount_of(line) for line in file]


def _mount_of(line: str) -> Mount:
    before, _, after = line.partition(" - ")
    number, parent, _, _, path, options = before.split()[:6]
    kind, _, of_all = after.split()[:3]
    written = options.split(",")
    is_writable = "ro" not in written and "ro" not in of_all.split(",")
    return Mount(int(number), int(parent), unescaped(path), kind, tuple(written), is_writable)


def unescaped(path: str) -> str:
    """A path, as ``/proc/self/mountinfo`` writes it."""
    for escaped, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        path = path.replace(escaped, character)
    return path


def _visible(mounts: Sequence[Mount]) -> list[Mount]:
    """The mounts that no later one covers."""
    parents = {each.number: each.parent for each in mounts}
    found: list[Mount] = []
    for each in mounts:
        found = [other for other in found if not _is_in(other.path, each.path) or each.number in _above(other, parents)]
        found.append(each)
    return found


def _above(mount: Mount, parents: Mapping[int, int]) -> list[int]:
    """The numbers of the mounts that a mount is on."""
    found: list[int] = []
    number = mount.parent
    while number in parents and number not in found:
        found.append(number)
        number = parents[number]
    return found


def _around(path: str, mounts: Iterable[Mount]) -> Mount | None:
    """The mount in which a path lies."""
    return max((each for each in mounts if _is_in(path, each.path)), key=lambda each: len(each.path), default=None)


def _below(path: str, mounts: Iterable[Mount]) -> tuple[str, ...]:
    """Return the mount points directly below a path, without mount points below these."""
    found = sorted(each.path for each in mounts if each.path != path and _is_in(each.path, path))
    return tuple(each for each in found if not any(each != other and _is_in(each, other) for other in found))


def _is_in(path: str, directory: str) -> bool:
    return path == directory or path.startswith(directory.rstrip("/") + "/")


def _enter_user_namespace() -> None:
    """Own a user namespace in which this user is itself."""
    uid, gid = os.geteuid(), os.getegid()
    _unshare(NEWUSER)
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        with open(f"/proc/self/{name}", "w", encoding="utf-8") as file:  # noqa: PTH123
            file.write(text)


def _stay_outside() -> None:
    """Fork: the child returns, the parent waits for its end and ends alike."""
    descriptors = open_descriptors()
    pid = os.fork()
    if pid == 0:
        return
    for descriptor in descriptors - {0, 1, 2}:  # without /proc: the child replaces that for both
        _close(descriptor)
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else 128 - code)


def open_descriptors() -> set[int]:
    """The descriptors of this process."""
    listed = set(map(int, os.listdir("/proc/self/fd")))  # noqa: PTH208 - in every fork: pathlib takes longer
    try:
        os.fstat(max(listed))
    except OSError:  # that of the listing itself, mostly the last one
        return listed - {max(listed)}
    return {descriptor for descriptor in listed if os.path.exists(f"/proc/self/fd/{descriptor}")}  # noqa: PTH110


def keep_only(descriptors: Collection[int]) -> None:
    """Close all descriptors of this process but these."""
    kept = [-1, *sorted(descriptors), _ABOVE_DESCRIPTORS]
    for below, above in itertools.pairwise(kept):
        first, last = ctypes.c_uint(below + 1), ctypes.c_uint(above - 1)
        if below + 1 < above and _libc.syscall(ctypes.c_long(_SYS_CLOSE_RANGE), first, last, ctypes.c_uint(0)) != 0:
            break
    else:
        return
    for descriptor in open_descriptors().difference(descriptors):  # a kernel before 5.9
        _close(descriptor)


def _close(descriptor: int) -> None:
    try:  # noqa: SIM105 - in every fork: a context manager would take longer than the call
        os.close(descriptor)
    except OSError:
        pass


def _unshare(flags: int) -> None:
    _check(_libc.unshare(flags), "unshare")


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), what)
