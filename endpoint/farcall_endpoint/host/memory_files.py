"""Memory files: memory of a task that is in no process's resident memory, because no process has mapped it.

Memory files (``memfd_create``) and deleted files in memory exist while a process holds them open. A worker with a mount
namespace of its own has a ``/tmp`` in memory as well. Other files in memory have a path, and belong to no task.

Nothing here looks at a file on another file system: the answer of a dead server would never come.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

_BLOCK_BYTES: Final = 512
"""Unit of ``st_blocks``."""
_MEMORY_FILE: Final = "/memfd:"
_DELETED: Final = " (deleted)"
"""Start and end of what the kernel shows in place of a path."""
_MOST_CHARACTERS: Final = 2**20
"""Maximum characters to read of a table of mounts: a task can make 100,000 mounts."""
_IN_MEMORY: Final = "tmpfs"
_ESCAPED: Final = re.compile(r"\\([0-7]{3})")
_PATH_ONLY: Final = os.O_PATH | os.O_CLOEXEC | os.O_DIRECTORY | os.O_NOFOLLOW


class Mount(NamedTuple):
    """A mount of a memory file system: its directory, and its device as in ``st_dev``."""

    directory: str
    device: int


class Mounts:
    """The mounts of a process's namespace.

    :param text: of ``/proc/PID/mountinfo``.
    """

    def __init__(self, text: str) -> None:
        self._kinds: dict[str, str] = {}
        found: dict[int, str] = {}
        for line in text.splitlines():
            before, _, after = line.partition(" - ")
            _, _, device, _, escaped, *_ = before.split(" ")
            directory, kind = _unescaped(escaped), after.partition(" ")[0]
            self._kinds[directory] = kind  # the last mount hides the others in the same place
            if kind == _IN_MEMORY:
                major, _, minor = device.partition(":")
                found[os.makedev(int(major), int(minor))] = directory
        #: In memory, one of each file system.
        self.in_memory = [Mount(directory, device) for device, directory in found.items()]

    @classmethod
    def of(cls, pid: int | str) -> Mounts:
        """Read the mounts of a process; none if it has ended, or if they cannot be read."""
        try:
            with open(f"/proc/{pid}/mountinfo", encoding="utf-8", errors="surrogateescape") as file:  # noqa: PTH123
                return cls(file.read(_MOST_CHARACTERS).rpartition("\n")[0])
        except OSError:
            return cls("")

    def is_in_memory(self, path: str) -> bool:
        """Whether an absolute path is on a memory file system."""
        while path:
            if (kind := self._kinds.get(path)) is not None:
                return kind == _IN_MEMORY
            path = path.rpartition("/")[0]
        return self._kinds.get("/") == _IN_MEMORY


def open_files(pid: int | str, mounts: Mounts) -> Iterator[tuple[str, int, int] | None]:
    """The files in memory that exist because this process, or another one, holds them open: the name of each in
    :func:`held`, its device and its bytes. None for each other descriptor: there can be many.

    A file that has a path belongs to no process.
    """
    try:
        entries = os.scandir(f"/proc/{pid}/fd")
    except OSError:  # it has ended, or has hidden them
        return
    with entries:
        for entry in entries:
            file = None
            with contextlib.suppress(OSError):
                path = os.readlink(entry.path)  # noqa: PTH115
                if path.startswith(_MEMORY_FILE) or (path.endswith(_DELETED) and mounts.is_in_memory(path)):
                    found = os.stat(entry.path)  # noqa: PTH116
                    if found.st_nlink == 0:
                        file = f"{found.st_dev}:{found.st_ino}", found.st_dev, found.st_blocks * _BLOCK_BYTES
            yield file


def used_bytes(pid: int | str, mount: Mount) -> int:
    """Return the bytes that a mount's files use, as a process sees the mount; 0 if that cannot be read. Links are not
    followed, because they could lead out of the process's namespace."""
    try:
        descriptor = os.open(f"/proc/{pid}/root", _PATH_ONLY & ~os.O_NOFOLLOW)
        try:
            for name in filter(None, mount.directory.split("/")):
                below = os.open(name, _PATH_ONLY, dir_fd=descriptor)
                os.close(descriptor)
                descriptor = below
            if os.fstat(descriptor).st_dev != mount.device:
                return 0
            found = os.fstatvfs(descriptor)
        finally:
            os.close(descriptor)
    except OSError:
        return 0
    return (found.f_blocks - found.f_bfree) * found.f_frsize


def held(pids: Iterable[int], mounts: Mounts) -> dict[str, int]:
    """Bytes of the files in memory that these processes hold open, and of each memory file system of this process."""
    found = {str(mount.device): used_bytes("self", mount) for mount in mounts.in_memory}
    for pid in pids:
        found.update({file[0]: file[2] for file in open_files(pid, mounts) if file is not None})
    return found


def _unescaped(path: str) -> str:
    return _ESCAPED.sub(lambda match: chr(int(match[1], 8)), path)
