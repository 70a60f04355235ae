"""cgroups of a node: the one owner of all groups that a manager makes. Version 1, version 2, or both.

A manager's groups lie in ``farcall-PID-START`` below the cgroup that it runs in itself, if that is writable: as root,
or in a subtree that a scheduler or systemd has delegated. After a kill -9 of a manager the next one on the node removes
them. Where nothing is writable there are no groups, and nothing else changes.

In version 2 a group that has processes itself can give its children only the controllers of threads, such as ``cpu``,
and only if all of them are *threaded* groups. :meth:`Cgroups.enable_cpu` makes them so: no process is moved, neither
this one nor others of the same service, container or login.

Writing to ``cgroup.procs`` takes the kernel up to 30 ms, now and then: join while nothing waits for the process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import re
import signal
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from farcall_endpoint.host.process_reaper import read_process

_CPU: Final = "cpu"
_CONTROLLERS: Final = (_CPU, "cpuacct", "memory", "pids")
_OFFERED: Final = "cgroup.controllers"
_TYPE: Final = "cgroup.type"
_CONTROL: Final = "cgroup.subtree_control"
_THREADED: Final = "threaded"
_OWNER: Final = re.compile(r"farcall-(\d+)-(\d+)")
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")


@dataclasses.dataclass(frozen=True)
class Hierarchy:
    """A directory in which groups can be made. ``controllers``: of version 1; empty for version 2."""

    path: Path
    controllers: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Group:
    """The group of a name: one directory in each hierarchy."""

    name: str
    paths: tuple[Path, ...]

    def join(self, pid: int) -> None:
        """Move a process into it; its later children follow.

        :raises OSError: if it has ended, or belongs to another user.
        """
        for path in self.paths:
            (path / "cgroup.procs").write_text(str(pid), encoding="ascii")

    def write(self, file: str, value: object) -> None:
        """Set a value of it, such as ``cpu.weight``.

        :raises OSError: if the kernel refuses it, or the group does not exist (any more).
        """
        for path in self.paths:
            descriptor = os.open(path / file, os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC)  # no O_CREAT
            try:
                os.write(descriptor, str(value).encode())
            except OSError as error:
                error.filename = str(path / file)
                raise
            finally:
                os.close(descriptor)

    def read(self, file: str) -> list[str]:
        """A value of it, in each hierarchy.

        :raises OSError: if there is none.
        """
        return [(path / file).read_text(encoding="ascii").strip() for path in self.paths]

    def processes(self) -> set[int]:
        """The processes in it."""
        return {pid for path in self.paths for pid in _processes(path)}

    def remove(self) -> bool:
        """Remove it; False while there are processes in it."""
        removed = [_remove(path) for path in self.paths]
        return all(removed)


class Cgroups:
    """The groups of this process. Not for several threads.

    :param hierarchies: as :func:`writable_hierarchies` finds them.
    :param remove_leftovers: of managers that have ended.
    """

    def __init__(self, hierarchies: Sequence[Hierarchy], *, remove_leftovers: bool = True) -> None:
        own = read_process(os.getpid())
        self._directory = f"farcall-{os.getpid()}-{own.start if own else 0}"
        self._roots: list[Path] = []
        self._hierarchies: list[Hierarchy] = []
        for hierarchy in hierarchies:
            with contextlib.suppress(OSError):
                if remove_leftovers:
                    _remove_leftovers(hierarchy)
                self._roots.append(self._make_root(hierarchy))
                self._hierarchies.append(hierarchy)

    @property
    def works(self) -> bool:
        """Whether there are groups at all."""
        return bool(self._roots)

    @property
    def directories(self) -> tuple[Path, ...]:
        """Directories that contain all groups. They remain if this process is killed."""
        return tuple(self._roots)

    @property
    def hierarchies(self) -> tuple[Hierarchy, ...]:
        """Hierarchies in which this process can create groups."""
        return tuple(self._hierarchies)

    def tree(self, hierarchy: Hierarchy) -> Group:
        """Return the group that contains all others of a hierarchy."""
        return Group(self._directory, (hierarchy.path / self._directory,))

    def own(self, hierarchy: Hierarchy) -> Group:
        """Return the group of this process, below which all others are created."""
        return Group("", (hierarchy.path,))

    def create(self, name: str, *, within: Hierarchy | None = None) -> Group:
        """The group of this name, which may exist.

        :param within: only in this hierarchy.
        :raises OSError: if the kernel makes no more of them.
        :raises ValueError: for a name that no file should have.
        """
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name!r} cannot be the name of a group")
        group = self._group(name, within)
        for path in group.paths:
            path.mkdir(exist_ok=True)
            if _is_threaded(path.parent):
                _write(path / _TYPE, _THREADED)
        return group

    def create_tree(self, hierarchy: Hierarchy) -> None:
        """Make the directory of all groups again, if it was removed.

        :raises OSError: if that is not permitted.
        """
        self._make_root(hierarchy)

    def enable_cpu(self, hierarchy: Hierarchy) -> None:
        """Give groups of version 2 the controller ``cpu``, also if processes are in the group of this process.

        :raises OSError: if that is not permitted, or the controller is not there.
        """
        own, root = hierarchy.path, self._make_root(hierarchy)
        if _CPU in _words(root / _CONTROL):
            return
        if _CPU not in _words(own / _OFFERED):
            raise FileNotFoundError(errno.ENOENT, f"{_CPU} is not in it", str(own / _OFFERED))
        if _needs_threaded(own):
            for path in (root, *filter(Path.is_dir, root.iterdir())):
                _write(path / _TYPE, _THREADED)
        for path in (own, root):
            _write(path / _CONTROL, f"+{_CPU}")

    def groups(self) -> list[Group]:
        """Return the existing groups."""
        names = {path.name for root in self._roots for path in root.iterdir() if path.is_dir()}
        return [self._group(name) for name in sorted(names)]

    def close(self) -> None:
        """Remove all groups without processes."""
        for root in self._roots:
            _remove_tree(root)
        for hierarchy in self._hierarchies:
            _end_threaded(hierarchy)

    def _make_root(self, hierarchy: Hierarchy) -> Path:
        root = hierarchy.path / self._directory
        root.mkdir(exist_ok=True)
        if hierarchy.controllers:
            return root
        if not _needs_threaded(hierarchy.path):
            _enable_controllers((hierarchy.path, root))
        elif _has_threaded(hierarchy.path):  # so do groups of other managers, and no process could join another kind
            with contextlib.suppress(OSError):
                _write(root / _TYPE, _THREADED)
        return root

    def _group(self, name: str, within: Hierarchy | None = None) -> Group:
        roots = self._roots if within is None else self.tree(within).paths
        return Group(name, tuple(root / name for root in roots))


def writable_hierarchies(
    *, cgroup_file: Path = Path("/proc/self/cgroup"), mounts_file: Path = Path("/proc/self/mountinfo")
) -> list[Hierarchy]:
    """The hierarchies in which this process may make groups below its own."""
    found = own_hierarchies(cgroup_file=cgroup_file, mounts_file=mounts_file)
    return [each for each in found if os.access(each.path, os.W_OK | os.X_OK) and _takes_processes(each.path)]


def own_hierarchies(
    *, cgroup_file: Path = Path("/proc/self/cgroup"), mounts_file: Path = Path("/proc/self/mountinfo")
) -> list[Hierarchy]:
    """The hierarchies with the groups of this process, writable or not."""
    try:
        mounts = mounts_file.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
        lines = cgroup_file.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return []
    return hierarchies_of(lines, mounts)


def hierarchies_of(lines: Iterable[str], mounts: Iterable[str]) -> list[Hierarchy]:
    """The directories of a process's own cgroups, of the controllers that are used here. Pure.

    :param lines: of ``/proc/PID/cgroup``.
    :param mounts: lines of ``/proc/PID/mountinfo``.
    """
    own: dict[tuple[str, ...], str] = {}
    for line in lines:
        _, controllers, path = line.split(":", 2)
        own[tuple(sorted(filter(None, controllers.split(","))))] = path
    found: dict[Path, Hierarchy] = {}
    for line in mounts:
        before, _, after = line.partition(" - ")
        root, target = before.split()[3:5]
        kind, _, options = after.split()[:3]
        if kind not in ("cgroup", "cgroup2"):
            continue
        for names, path in own.items():
            is_this = not names if kind == "cgroup2" else bool(set(names) & set(options.split(",")))
            if not is_this or (kind == "cgroup" and not set(names) & set(_CONTROLLERS)):
                continue
            if path != root and not path.startswith(root.rstrip("/") + "/"):
                continue  # outside of what is mounted here, as in some containers
            place = Path(target + path.removeprefix(root.rstrip("/"))) if path != root else Path(target)
            found.setdefault(place, Hierarchy(place, names))
    return list(found.values())


def _takes_processes(path: Path) -> bool:
    return os.access(path / "cgroup.procs", os.W_OK)


def _enable_controllers(paths: Iterable[Path]) -> None:
    """Enable all offered controllers of version 2, as far as the kernel permits it."""
    for path in paths:
        try:
            offered = _words(path / _OFFERED)
        except OSError:
            return
        for controller in set(offered) & set(_CONTROLLERS):
            with contextlib.suppress(OSError):
                (path / _CONTROL).write_text(f"+{controller}", encoding="ascii")


def _needs_threaded(path: Path) -> bool:
    """Whether a group of version 2 can give controllers only to threaded groups, because it has processes. The root
    group, which has no type, can give them to all groups."""
    if not (path / _TYPE).exists():
        return False
    try:
        return bool(_words(path / "cgroup.procs"))
    except OSError as error:
        return error.errno == errno.EOPNOTSUPP  # it is threaded itself


def _is_threaded(path: Path) -> bool:
    with contextlib.suppress(OSError):
        return _words(path / _TYPE) == [_THREADED]
    return False


def _has_threaded(path: Path) -> bool:
    """Whether all groups in a group must be threaded."""
    with contextlib.suppress(OSError):
        return _THREADED in _words(path / _TYPE)
    return False


def _end_threaded(hierarchy: Hierarchy) -> None:
    """Take back what :meth:`Cgroups.enable_cpu` did to the group of this process, if no group is left in it."""
    path = hierarchy.path
    if not hierarchy.controllers and _has_threaded(path):
        with contextlib.suppress(OSError):
            if not any(map(Path.is_dir, path.iterdir())):
                _write(path / _CONTROL, f"-{_CPU}")


def _processes(path: Path) -> set[int]:
    """The processes in a group. A threaded one lists threads only."""
    with contextlib.suppress(OSError):
        if not _is_threaded(path):
            return set(map(int, _words(path / "cgroup.procs")))
        return {_process_of(thread) for thread in _words(path / "cgroup.threads")} - {0}
    return set()


def _process_of(thread: str) -> int:
    """The process of a thread; 0 if it has ended, or is outside of this process namespace."""
    with contextlib.suppress(OSError):
        status = Path("/proc", thread, "status").read_text(encoding="utf-8", errors="replace")
        return int(status.partition("\nTgid:")[2].split(maxsplit=1)[0])
    return 0


def _words(path: Path) -> list[str]:
    return path.read_text(encoding="ascii").split()


def _write(path: Path, text: str) -> None:
    """Write to a file of the kernel.

    :raises OSError: if the kernel refuses it.
    """
    try:
        path.write_text(text, encoding="ascii")
    except OSError as error:
        error.filename = str(path)
        raise


def _remove_leftovers(hierarchy: Hierarchy) -> None:
    """Remove the groups of managers that have ended, and kill what is left in them."""
    for path in hierarchy.path.iterdir():
        named = _OWNER.fullmatch(path.name)
        if named is None:
            continue
        owner = read_process(int(named[1]))
        if owner is None or owner.start != int(named[2]):
            for group in (*filter(Path.is_dir, path.iterdir()), path):
                _kill_all(group)
            _remove_tree(path)
    _end_threaded(hierarchy)


def _kill_all(path: Path) -> None:
    # 0 is a process outside of this one's process namespace, and to kill it would end this process's own group.
    for pid in filter(None, _processes(path)):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def _remove_tree(root: Path) -> None:
    with contextlib.suppress(OSError):
        for path in root.iterdir():
            if path.is_dir():
                _remove(path)
    _remove(root)


def _remove(path: Path) -> bool:
    try:
        path.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True
