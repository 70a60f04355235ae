"""Namespaces of a worker that is a fork: mounts, processes, IPC, host name, and network if wanted.

The template enters process and mount namespaces once, which it owns (:func:`enter`): with privileges as it is, without
them in a user namespace that maps its user to itself. There it can make a process namespace for each child before it
forks (:func:`fork_apart`), so one fork is enough. The child makes the other namespaces (:func:`separate`),
then hides what is not its submitter's (:func:`show_only`), and gives up all privileges (:func:`drop_privileges`).

``os.unshare`` and ``os.setns`` exist from Python 3.12 on; hence ctypes.
"""

from __future__ import annotations

import ctypes
import itertools
import os
from collections.abc import Collection, Iterable, Sequence
from typing import Final

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

_SYS_MOUNT_SETATTR: Final = 442
"""On every architecture; since Linux 5.12."""
_SYS_CLOSE_RANGE: Final = 436
"""Since Linux 5.9."""
_ABOVE_DESCRIPTORS: Final = 2**31
_AT_RECURSIVE: Final = 0x8000
_ATTR_RDONLY: Final = 1

_SET_DUMPABLE, _SET_NO_NEW_PRIVS, _CAPBSET_DROP, _SET_PDEATHSIG = 4, 38, 24, 1
_PR_CAP_AMBIENT, _AMBIENT_CLEAR_ALL = 47, 4
_CAP_SYS_ADMIN: Final = 21
_CAP_VERSION: Final = 0x20080522
_MOST_CAPABILITIES: Final = 64

_TEMPORARY: Final = ("/tmp", "/dev/shm")  # noqa: S108 - private to each child

_libc: Final = ctypes.CDLL(None, use_errno=True)


class _MountAttributes(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("set", "clear", "propagation", "user_namespace")]


def enter() -> int:
    """Move this process, which has one thread, into process and mount namespaces of its own, as their first process.

    The caller's process stays outside, waits, and ends as the inner one does: this returns in the inner one only.
    Returns a descriptor of its process namespace.

    :raises OSError: if the system forbids it; nothing has changed then but for a user namespace.
    """
    if not is_privileged():
        _enter_user_namespace()
    _unshare(NEWNS | NEWPID)
    mount("none", "/", flags=_MS_REC | _MS_PRIVATE)
    _stay_outside()
    mount("proc", "/proc", "proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
    die_with_parent()
    return os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)


def missing() -> str:
    """Why children of this process cannot have namespaces; empty if they can. Only a try shows it, in a child."""
    reading, writing = os.pipe2(os.O_CLOEXEC)
    pid = os.fork()
    if pid == 0:
        try:
            _try_all(writing)
        except OSError as error:
            os.write(writing, f"{error.strerror} ({error.filename})".encode())
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, "rb") as file:  # noqa: PTH123 - a descriptor
        reason = file.read().decode(errors="replace")
    os.waitpid(pid, 0)
    return "" if reason == "ok" else f"namespaces: {reason or 'the process that tried was killed'}"


def _try_all(writing: int) -> None:
    pid = fork_apart(enter())
    if pid == 0:
        separate(network=True)
        show_only((), hidden=(), visible=())
        drop_privileges()
        os.write(writing, b"ok")
        os._exit(0)
    os.waitpid(pid, 0)


def fork_apart(own: int) -> int:
    """Fork a child that is the first of a process namespace; as ``os.fork``.

    :param own: the descriptor of :func:`enter`.
    """
    _unshare(NEWPID)
    try:
        pid = os.fork()
    except OSError:
        _check(_libc.setns(own, NEWPID), "setns")
        raise
    if pid:
        _check(_libc.setns(own, NEWPID), "setns")  # the template's next child is in its own again
    return pid


def separate(*, network: bool) -> None:
    """In a child: namespaces of its own, for the rest. It sees its processes only, and may write nowhere.

    :param network: whether it stays in the template's network.
    :raises OSError: if the system forbids it.
    """
    _unshare(NEWNS | NEWIPC | NEWUTS | (0 if network else NEWNET))
    set_read_only("/", recursive=True)
    mount("proc", "/proc", "proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)


def show_only(writable: Iterable[str], *, hidden: Iterable[str], visible: Iterable[str]) -> None:
    """In a child: private temporary directories, and nothing in ``hidden`` directories but these paths.

    :param writable: existing directories, the only ones that it may write to.
    :param visible: existing directories that it may read, though they lie in hidden or temporary ones.
    :raises OSError: if the system forbids it, or a directory is missing.
    """
    covered = [path for path in (*_TEMPORARY, *hidden) if os.path.isdir(path)]  # noqa: PTH112
    shown = {path: False for path in visible if any(_is_in(path, each) for each in covered)}
    shown |= dict.fromkeys(writable, True)
    opened = {path: os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC) for path in shown}
    for path in covered:
        mode = "1777" if path in _TEMPORARY else "0755"
        mount("tmpfs", path, "tmpfs", _MS_NOSUID | _MS_NODEV, f"mode={mode}")
    for path in sorted(shown):
        os.makedirs(path, exist_ok=True)  # noqa: PTH103
        mount(f"/proc/self/fd/{opened[path]}", path, flags=_MS_BIND | _MS_REC)
        set_read_only(path, not shown[path])
        os.close(opened[path])
    for path in covered:
        if path not in _TEMPORARY:
            set_read_only(path)


def drop_privileges() -> None:
    """Give up all capabilities, for good, also for programs that this process starts.

    :raises OSError: if the kernel refuses.
    """
    for capability in range(_MOST_CAPABILITIES):
        if _libc.prctl(_CAPBSET_DROP, capability, 0, 0, 0) != 0:
            break  # there are no more of them
    _libc.prctl(_PR_CAP_AMBIENT, _AMBIENT_CLEAR_ALL, 0, 0, 0)
    header = (ctypes.c_uint32 * 2)(_CAP_VERSION, 0)
    _check(_libc.capset(header, (ctypes.c_uint32 * 6)()), "capset")
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


def is_outermost() -> bool:
    """Whether this process is in the machine's own user namespace: its capabilities are those of the machine."""
    with open("/proc/self/uid_map", encoding="utf-8") as file:  # noqa: PTH123
        return file.read().split() == ["0", "0", "4294967295"]


def mount(source: str, target: str, kind: str | None = None, flags: int = 0, data: str | None = None) -> None:
    """The system call.

    :raises OSError: as it does; its file name is the target.
    """
    encoded = [None if each is None else os.fsencode(each) for each in (source, target, kind, data)]
    result = _libc.mount(encoded[0], encoded[1], encoded[2], ctypes.c_ulong(flags), encoded[3])
    _check(result, f"mount {kind or 'of'} {target}")


def set_read_only(path: str, read_only: bool = True, *, recursive: bool = False) -> None:
    """Whether a mount may be written, with all mounts below it if ``recursive``.

    :raises OSError: if the system forbids it.
    """
    attributes = _MountAttributes(_ATTR_RDONLY, 0) if read_only else _MountAttributes(0, _ATTR_RDONLY)
    size = ctypes.c_size_t(ctypes.sizeof(attributes))
    flags = _AT_RECURSIVE if recursive else 0
    arguments = (ctypes.c_long(-1), os.fsencode(path), ctypes.c_uint(flags), ctypes.byref(attributes), size)
    if _libc.syscall(ctypes.c_long(_SYS_MOUNT_SETATTR), *arguments) != 0:
        _remount(path, read_only, recursive=recursive)


def _remount(path: str, read_only: bool, *, recursive: bool) -> None:
    """As :func:`set_read_only`, for kernels before 5.12 and profiles that do not know its system call."""
    for target, options in _mounts():
        if target == path or (recursive and _is_in(target, path)):
            kept = sum(_KEPT_FLAGS.get(option, 0) for option in options)
            try:
                mount("none", target, flags=_MS_REMOUNT | _MS_BIND | kept | (_MS_RDONLY if read_only else 0))
            except FileNotFoundError:  # covered by a later mount
                continue


def _mounts() -> list[tuple[str, Sequence[str]]]:
    """All mounts of this process: where they are, and their options."""
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:  # noqa: PTH123
        fields = [line.split() for line in file]
    return [(_unescaped(each[4]), each[5].split(",")) for each in fields]


def _unescaped(path: str) -> str:
    for escaped, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        path = path.replace(escaped, character)
    return path


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
