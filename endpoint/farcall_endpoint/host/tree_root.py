"""Root of a container, assembled from a directory tree that has no place for our mounts and stays as it is.

A program that runs before bubblewrap's or Charliecloud's, as the process that becomes it: what a tree contains is
looked at where the container is started, in the view that its submitter has, and no slow file system delays the
manager.
Stands alone (``python -I -S tree_root.py``) and imports next to nothing: ``typing`` would take longer than all else.

    tree_root.py bubblewrap TREE bwrap ARGUMENTS
    tree_root.py charliecloud TREE network|none {ro|rw SOURCE TARGET} -- ch-run ARGUMENTS

It also opens what a submitter has named, and others may replace by a link at any time. What was checked is a path
without links, so it is opened without following any; a command finds it as descriptor 9, or where it is mounted:

    tree_root.py opened PATH COMMAND
    tree_root.py shown PATH PLACE COMMAND

A tree may be hostile. Nothing of it is followed as a link while the root is assembled: its links become links of the
container. Where a mount needs a directory, and the tree has something else in that place, the mount wins.
"""

from __future__ import annotations

import errno
import os
import stat
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from typing import NoReturn

DESCRIPTOR = "9"
"""Number of the descriptor of an opened file or directory."""
DIRECTORY, FILE, LINK, OTHER = "directory", "file", "link", "other"
MOST_ENTRIES = 2000
"""Maximum entries of a directory of the tree that must be assembled; bubblewrap takes 9,000 arguments."""

_TEMPORARY = "/tmp"  # noqa: S108 - the container's own
_OF_CHARLIECLOUD = {
    **dict.fromkeys(("/dev", "/proc", "/sys", _TEMPORARY), DIRECTORY),
    **dict.fromkeys(("/etc/passwd", "/etc/group"), FILE),
}
"""Paths on which ch-run mounts, and which it must find in an image."""
_BUBBLEWRAP_SOURCES = ("--bind", "--bind-try", "--ro-bind", "--ro-bind-try", "--dev-bind", "--dev-bind-try")
_BUBBLEWRAP_DIRECTORIES = ("--dev", "--proc", "--tmpfs", "--mqueue", "--dir")
_NEWNS, _NEWUSER, _NEWNET = 0x20000, 0x10000000, 0x40000000
_RDONLY, _NOSUID, _NODEV, _REMOUNT, _BIND, _REC, _SLAVE = 1, 2, 4, 32, 4096, 16384, 1 << 19
_LOCKED = {os.ST_NOEXEC: 8, os.ST_NOATIME: 1024, os.ST_NODIRATIME: 2048, os.ST_RELATIME: 1 << 21}
"""Flags that a mount keeps, by those of ``statvfs``: a user namespace may not drop them."""


Entry = tuple[str, str]
"""An entry of a directory: its kind, and of a link where it leads."""
Step = tuple[str, str, str]
"""A step to the root, its path, and where a link leads: ``directory`` creates one, ``bind`` shows a path of the tree,
``link`` creates a link."""


def layout(read: Callable[[str], Mapping[str, Entry]], targets: Mapping[str, str]) -> list[Step]:
    """Return the steps that show a tree, read-only, so that all mounts have their place. Pure, apart from ``read``.

    :param read: the entries of a directory of the tree, by its path in the container.
    :param targets: absolute paths where something is mounted afterwards, each with its kind.
    :raises ValueError: for a directory with too many entries.
    """
    directories: dict[str, Mapping[str, Entry]] = {}

    def kind(path: str) -> str:
        """Kind of a path of the tree, without following links; empty if the path does not exist."""
        if path == "/":
            return DIRECTORY
        above, name = os.path.split(path)
        return entries(above).get(name, ("", ""))[0] if kind(above) == DIRECTORY else ""

    def entries(path: str) -> Mapping[str, Entry]:
        if path not in directories:
            directories[path] = read(path)
        return directories[path]

    def show(path: str) -> list[Step]:
        """The steps for a directory of the tree."""
        below = [target for target in targets if _is_below(target, path)]
        if all(kind(target) == targets[target] for target in below):
            return [("bind", path, "")]
        if len(entries(path)) > MOST_ENTRIES:
            raise ValueError(f"{path} has more than {MOST_ENTRIES:,} entries")
        steps = [] if path == "/" else [("directory", path, "")]
        for name, (found, leads_to) in sorted(entries(path).items()):
            inner = os.path.join(path, name)  # noqa: PTH118 - pathlib would take longer to load than all this
            if inner in targets:
                continue
            if any(_is_below(target, inner) for target in below):
                steps += show(inner) if found == DIRECTORY else []
            elif found == LINK:
                steps.append(("link", inner, leads_to))
            elif found != OTHER:
                steps.append(("bind", inner, ""))
        return steps

    return show("/")


def _is_below(path: str, above: str) -> bool:
    return path != above and path.startswith(above.rstrip("/") + "/")


def bubblewrap_targets(arguments: Sequence[str]) -> dict[str, str]:
    """Return the paths where bubblewrap's arguments mount, with their kinds, without sources that do not exist."""
    found: dict[str, str] = {}
    options = arguments[: arguments.index("--")] if "--" in arguments else arguments
    for index, option in enumerate(options):
        if option in _BUBBLEWRAP_DIRECTORIES:
            found[_path(options[index + 1])] = DIRECTORY
        elif option in _BUBBLEWRAP_SOURCES and os.path.exists(options[index + 1]):  # noqa: PTH110
            found[_path(options[index + 2])] = _kind_of_source(options[index + 1])
    return found


def bubblewrap_arguments(tree: str, steps: Iterable[Step]) -> list[str]:
    """Steps, in bubblewrap's words. Its root is an empty directory in memory."""
    words: list[str] = []
    for kind, path, leads_to in steps:
        if kind == "directory":
            words += ["--dir", path]
        elif kind == "link":
            words += ["--symlink", leads_to, path]
        else:
            words += ["--ro-bind", tree.rstrip("/") + path, path]
    return words


def read_directory(tree: str) -> Callable[[str], dict[str, Entry]]:
    """A reader of directories of a tree."""

    def read(path: str) -> dict[str, Entry]:
        with os.scandir(tree.rstrip("/") + path) as found:
            return {each.name: _entry(each) for each in found}

    return read


def _entry(found: os.DirEntry[str]) -> Entry:
    if found.is_symlink():
        return LINK, os.readlink(found.path)  # noqa: PTH115
    if found.is_dir(follow_symlinks=False):
        return DIRECTORY, ""
    return FILE if found.is_file(follow_symlinks=False) else OTHER, ""


def _kind_of_source(source: str) -> str:
    return DIRECTORY if stat.S_ISDIR(os.stat(source).st_mode) else FILE  # noqa: PTH116


def _path(target: str) -> str:
    """A target as :func:`layout` takes it: ``normpath`` leaves two slashes at the beginning."""
    return "/" + os.path.normpath(target).lstrip("/")


# -- Charliecloud: this process assembles the root, in a mount namespace of its own ------------------------------------


def assemble(tree: str, mounts: Iterable[tuple[str, str, str]], *, network: bool) -> list[str]:
    """Assemble a root in the place of the tree, for this process and its descendants.

    :param mounts: ``ro`` or ``rw``, source and target of each.
    :returns: arguments for ch-run, which mounts ``/tmp`` itself, and so what is below it.
    :raises OSError: if the kernel refuses, or a source does not exist.
    """
    system = _System()
    system.enter(network=network)  # first: what is opened before belongs to the namespace that was left
    sources = {_path(target): (os.open(source, os.O_PATH), source, mode == "rw") for mode, source, target in mounts}
    targets = {target: _kind_of(descriptor) for target, (descriptor, _, _) in sources.items()}
    early = {target: kind for target, kind in targets.items() if not _is_below(target, _TEMPORARY)}
    root = os.open(tree, os.O_PATH | os.O_DIRECTORY)
    steps = layout(read_directory(tree), early | _OF_CHARLIECLOUD)
    tree = tree.rstrip("/")
    if steps == [("bind", "/", "")]:  # it has a place for everything, and stays where it is
        steps = []
    else:
        system.mount("tmpfs", tree, "tmpfs", _NOSUID | _NODEV, "mode=755")
    for step, path, leads_to in steps:
        if step == "link":
            os.symlink(leads_to, tree + path)  # noqa: PTH211
        elif step == "directory":
            os.mkdir(tree + path, 0o755)  # noqa: PTH102
        else:
            source = os.open(path.lstrip("/"), os.O_PATH | os.O_NOFOLLOW, dir_fd=root)
            system.bind(source, tree + path, kind=_kind_of(source), writable=False)
            os.close(source)
    for target, kind in sorted((early | _OF_CHARLIECLOUD).items()):
        _make_place(tree + target, kind)
        if target in early:
            source, _, writable = sources[target]
            system.bind(source, tree + target, kind=kind, writable=writable)
    words = []
    for target in sorted(targets.keys() - early.keys()):
        source, path, writable = sources[target]
        if not writable:
            system.bind(source, path, kind=targets[target], writable=False)
        words.append(f"--bind={path}:{target}")
    return words


def _make_place(path: str, kind: str) -> None:
    """A place for a mount, if there is none; in directories that we have made, or where the tree has its place."""
    if kind == DIRECTORY:
        os.makedirs(path, exist_ok=True)  # noqa: PTH103
    elif not os.path.lexists(path):
        os.makedirs(os.path.dirname(path), exist_ok=True)  # noqa: PTH103, PTH120
        try:  # noqa: SIM105 - contextlib would take longer to load than all this
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
        except FileExistsError:  # by another start, in the cache
            pass


def open_path(path: str) -> int:
    """A descriptor of what a path without links leads to, also if a link is put there meanwhile: then there is an
    error. As ``openat2`` with ``RESOLVE_NO_SYMLINKS``, without the need for Linux 5.6 and ``ctypes``.

    :raises OSError: if there is a link, or nothing.
    """
    found = os.open("/", os.O_PATH)
    *above, last = path.strip("/").split("/")
    for name, flags in (*((each, os.O_DIRECTORY) for each in above), (last or ".", 0)):
        try:
            inner = os.open(name, os.O_PATH | os.O_NOFOLLOW | flags, dir_fd=found)
        finally:
            os.close(found)
        found = inner
    if stat.S_ISLNK(os.fstat(found).st_mode):
        os.close(found)
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
    return found


def _kind_of(descriptor: int) -> str:
    return DIRECTORY if stat.S_ISDIR(os.fstat(descriptor).st_mode) else FILE


class _System:
    """System calls that Python has from 3.12 on, or not at all."""

    def __init__(self) -> None:
        import ctypes  # needed for Charliecloud only

        self._libc = ctypes.CDLL(None, use_errno=True)
        self._errno = ctypes.get_errno

    def enter(self, *, network: bool) -> None:
        """A mount namespace, and a network with nothing but a loopback interface; a user namespace if need be."""
        flags = _NEWNS | (0 if network else _NEWNET)
        user, group = os.geteuid(), os.getegid()
        if user != 0 or self._libc.unshare(flags) != 0:
            self._check(self._libc.unshare(flags | _NEWUSER), "user namespace")
            for name, text in (
                ("setgroups", "deny"),
                ("uid_map", f"{user} {user} 1"),
                ("gid_map", f"{group} {group} 1"),
            ):
                with open(f"/proc/self/{name}", "w", encoding="ascii") as file:  # noqa: PTH123
                    file.write(text)
        self.mount(None, "/", None, _REC | _SLAVE, None)  # the node must not see what is mounted here
        if not network:
            _raise_loopback()

    def mount(self, source: str | None, target: str, kind: str | None, flags: int, data: str | None) -> None:
        words = (None if word is None else os.fsencode(word) for word in (source, target, kind))
        self._check(self._libc.mount(*words, flags, None if data is None else data.encode()), target)

    def bind(self, source: int, target: str, *, kind: str, writable: bool) -> None:
        """Bind what a descriptor refers to."""
        _make_place(target, kind)
        self.mount(f"/proc/self/fd/{source}", target, None, _BIND | _REC, None)
        has = os.statvfs(target).f_flag
        kept = sum(flag for seen, flag in _LOCKED.items() if has & seen)
        read_only = _RDONLY if not writable or has & os.ST_RDONLY else 0
        self.mount(None, target, None, _REMOUNT | _BIND | _NOSUID | _NODEV | kept | read_only, None)

    def _check(self, result: int, what: str) -> None:
        if result != 0:
            number = self._errno()
            raise OSError(number, os.strerror(number), what)


def _raise_loopback() -> None:
    import fcntl
    import socket
    import struct

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as handle:
        request = struct.pack("16sH14x", b"lo", 1 | 64)  # IFF_UP | IFF_RUNNING
        fcntl.ioctl(handle, 0x8914, request)  # SIOCSIFFLAGS


def _become_with(how: str, path: str, command: list[str]) -> NoReturn:
    """Become a program that finds what a path leads to, whatever others put there."""
    try:
        if how == "shown":
            place, *command = command
            system = _System()
            system.enter(network=True)
        descriptor = open_path(path)
        if how == "shown":
            # In the cache, a place of the wrong kind would stay, and no later command could use it.
            if os.path.basename(place) != f".{_kind_of(descriptor)}":  # noqa: PTH119
                raise OSError(0, "it was replaced by something else")
            system.bind(descriptor, place, kind=_kind_of(descriptor), writable=False)
        else:
            os.dup2(descriptor, int(DESCRIPTOR))
            os.set_inheritable(int(DESCRIPTOR), True)  # also if it was that one
        if descriptor != int(DESCRIPTOR):
            os.close(descriptor)
        os.execvp(command[0], command)  # noqa: S606
    except OSError as error:
        sys.exit(f"{path} cannot be opened as it was checked: {error}")


def main(arguments: Sequence[str]) -> NoReturn:
    """Assemble the root of a tree, or open a path, and become the program that starts the container."""
    technology, tree, *rest = arguments
    if technology in ("opened", "shown"):
        _become_with(technology, tree, rest)
    if not os.path.isdir(tree):  # noqa: PTH112
        sys.exit(f"{technology}: {tree} is not a directory on this node, or not readable")
    try:
        if technology == "bubblewrap":
            program, *own = rest
            rest = [program, *bubblewrap_arguments(tree, layout(read_directory(tree), bubblewrap_targets(own))), *own]
        else:
            network, *rest = rest
            end = rest.index("--")
            words = assemble(tree, zip(*[iter(rest[:end])] * 3, strict=True), network=network == "network")
            os.environ.setdefault("USER", str(os.geteuid()))  # ch-run does not start without
            rest = [rest[end + 1], *words, *rest[end + 2 :]]
        os.execvp(rest[0], rest)  # noqa: S606
    except (OSError, ValueError) as error:
        sys.exit(f"{technology}: {error}")


if __name__ == "__main__":
    main(sys.argv[1:])
