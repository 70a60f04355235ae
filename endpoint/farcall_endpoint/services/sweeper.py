"""Sweeper: deletes files in the directories that the endpoint keeps for tasks, by the age of their last use and so that
all of them together stay within a budget.

What to delete is decided by :func:`choose`, which is pure. A task can put anything under any name there, so each
directory is opened below the one before, and no link is followed.
"""

from __future__ import annotations

import collections
import contextlib
import heapq
import itertools
import logging
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from farcall_common.errors import InvalidRequest
from farcall_common.object_keys import Key, lifetime_of
from farcall_endpoint.config.settings import SweepSettings
from farcall_endpoint.host.removal import make_accessible, remove_tree
from farcall_endpoint.worker.directories import SUBMITTERS, name_of
from farcall_endpoint.worker.places import SHARED

_logger = logging.getLogger(__name__)

YOUNG_S: Final = 60.0
"""Files and objects used within this time are never deleted: they may be in use."""
_FAR_OVER: Final = 2
"""Multiple of the budget beyond which files go whatever their age, of who uses more than an equal share."""
MOST_FILES: Final = 100_000
"""Maximum files and directories of each payer: the oldest are deleted. Those beyond twice as many go at once."""
MOST_DEPTH: Final = 64
"""Maximum depth of directories. Deeper ones are deleted."""
_SLOWER: Final = 20
_LONGEST_PAUSE_S: Final = 60.0
"""Longest pause after a slow sweep. A pause is :data:`_SLOWER` times as long as the sweep, which is slow on a network
file system. The limit exists because tasks can write without limit between two sweeps."""
_MOST_SHARED_BYTES: Final = 64 * 2**30
_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_BLOCK_BYTES: Final = 512
_NO_PAYERS: Final[Mapping[str, str]] = {}


class StoredFile(NamedTuple):
    """A file, or a directory.

    :param place: of which submitter's directory, by its path.
    :param path: below that.
    :param used_at: its time of modification, in epoch seconds. A task may set that ahead, but not the time at which it
        did so: the earlier one of both. Of a directory, also of what is in it.
    """

    place: str
    path: tuple[str, ...]
    size_bytes: int
    used_at: float
    is_directory: bool = False


def choose(
    files: Sequence[StoredFile],
    *,
    now: float,
    budget_bytes: int,
    retention_s: float,
    max_age_s: float,
    payers: Mapping[str, str] = _NO_PAYERS,
    most_files: int = MOST_FILES,
) -> list[StoredFile]:
    """The files to delete. Over budget, the payer that uses most loses its oldest file first; who uses no more than an
    equal share loses none, whatever others have that cannot be deleted yet. Pure.

    :param now: epoch seconds.
    :param payers: of service accounts, both by their places; other submitters count for themselves.
    :param most_files: of each payer.
    """
    chosen: list[StoredFile] = []
    sizes: collections.Counter[str] = collections.Counter()
    left: dict[str, list[StoredFile]] = collections.defaultdict(list)
    for file in files:
        age_s = now - file.used_at
        lifetime_s = _lifetime_s(file.path[-1], retention_s=retention_s, max_age_s=max_age_s)
        if age_s >= max(lifetime_s, YOUNG_S):
            chosen.append(file)
        else:
            payer = payers.get(file.place, file.place)
            sizes[payer] += file.size_bytes
            left[payer].append(file)
    for payer, several in left.items():
        excess = len(several) - most_files
        several.sort(key=lambda each: each.used_at, reverse=True)  # the oldest one is the last
        while excess > 0 and now - several[-1].used_at >= YOUNG_S:
            file = several.pop()
            sizes[payer] -= file.size_bytes
            chosen.append(file)
            excess -= 1
    total = sizes.total()
    largest = [(-size, payer) for payer, size in sizes.items()]
    heapq.heapify(largest)
    while total > budget_bytes and largest:
        _, payer = heapq.heappop(largest)
        if sizes[payer] * len(sizes) <= budget_bytes:
            break
        is_far_over = total > _FAR_OVER * budget_bytes  # a task can touch its files for ever
        if not left[payer] or (now - left[payer][-1].used_at < YOUNG_S and not is_far_over):
            continue
        file = left[payer].pop()
        chosen.append(file)
        sizes[payer] -= file.size_bytes
        total -= file.size_bytes
        heapq.heappush(largest, (-sizes[payer], payer))
    return chosen


def _lifetime_s(name: str, *, retention_s: float, max_age_s: float) -> float:
    """Return the seconds to keep a file after its last use: ``retention_s``, or the time in an object's name. Objects
    that stay until they are evicted are kept for ``max_age_s``, which is also the longest time."""
    try:
        lifetime = lifetime_of(Key(name))
    except InvalidRequest:
        return retention_s
    if lifetime.expires_s is None:
        return max_age_s
    return min(float(lifetime.expires_s), max_age_s) if lifetime.is_timed else retention_s


class Sweeper:
    """Sweeps the directories of an endpoint. :meth:`sweep` takes as long as it takes: call it in a thread.

    :param memory_root: where the directories in memory are; None: there are none.
    :param payers: see :func:`choose`.
    :param clock, steady: return epoch seconds and monotonic ones. The system's time may jump: a file counts as no older
        than it is by either.
    """

    def __init__(
        self,
        working_dir: Path,
        memory_root: Path | None,
        settings: SweepSettings,
        *,
        payers: Callable[[], Mapping[str, str]] = dict,
        clock: Callable[[], float] = time.time,
        steady: Callable[[], float] = time.monotonic,
    ) -> None:
        self._payers = payers
        self._clock = clock
        self._steady = steady
        self._offset_s = clock() - steady()
        self._working_dir = working_dir
        self._memory_root = memory_root
        self.settings = settings
        #: Bytes in the shared directories and in those in memory, as found last.
        self.shared_bytes = 0
        self.memory_bytes = 0

    def sweep(self) -> float:
        """Delete old files and files beyond the budgets. Return the seconds until the next sweep."""
        began = time.monotonic()
        try:
            self.shared_bytes = self._sweep_places(list(self._shared_places()), self._shared_budget)
            if self._memory_root is not None:
                self.memory_bytes = self._sweep_places(list(_places_in(self._memory_root)), self._memory_budget)
        except OSError as error:  # of a file server, for example; the next sweep tries again
            _logger.warning("old files of tasks cannot be deleted: %s", error)
        pause_s = min(_SLOWER * (time.monotonic() - began), _LONGEST_PAUSE_S)
        return max(self.settings.period_s, pause_s)

    def _sweep_places(self, places: list[tuple[str, int]], budget: Callable[[int, int], int]) -> int:
        """Sweep directories, each given by its path and a descriptor, which is closed; the bytes that are left."""
        descriptors = dict(places)
        try:
            payers = self._payers()
            left = collections.Counter({payers.get(path, path): 2 * MOST_FILES for path in descriptors})
            files: list[StoredFile] = []
            for path, descriptor in places:
                payer = payers.get(path, path)
                found = _used_with_content(list(_files_of(path, descriptor, most=left[payer])))
                left[payer] -= len(found)
                files += found
            if not files:
                return 0
            used_bytes = sum(file.size_bytes for file in files)
            settings = self.settings
            chosen = choose(
                files,
                now=min(self._clock(), self._steady() + self._offset_s),
                budget_bytes=budget(places[0][1], used_bytes),
                retention_s=settings.retention_s,
                max_age_s=settings.max_age_s,
                payers=payers,
                most_files=MOST_FILES,
            )
            for place, several in _by_place(chosen).items():
                used_bytes -= _delete(several, descriptors[place])
            if chosen:
                _logger.debug("deleted %d files that tasks have left", len(chosen))
            return used_bytes
        finally:
            for descriptor in descriptors.values():
                os.close(descriptor)

    def _shared_budget(self, descriptor: int, used_bytes: int) -> int:
        if self.settings.shared_bytes is not None:
            return self.settings.shared_bytes
        system = os.fstatvfs(descriptor)
        return min(_MOST_SHARED_BYTES, (used_bytes + system.f_bavail * system.f_frsize) // 2)

    def _memory_budget(self, descriptor: int, used_bytes: int) -> int:  # noqa: ARG002 - as the other one
        if self.settings.memory_bytes is not None:
            return self.settings.memory_bytes
        system = os.fstatvfs(descriptor)
        return system.f_blocks * system.f_frsize // 4

    def _shared_places(self) -> Iterator[tuple[str, int]]:
        """The shared directories, with descriptors."""
        with _opened(str(self._working_dir)) as root:
            if root is None:
                return
            if (shared := _open(SHARED, root)) is not None:
                yield SHARED, shared
            with _opened(SUBMITTERS, root) as submitters:
                for name in [] if submitters is None else os.listdir(submitters):  # noqa: PTH208 - of a descriptor
                    with _opened(name, submitters) as home:
                        if home is not None and (shared := _open(SHARED, home)) is not None:
                            yield _place(name), shared


class SweeperThread(threading.Thread):
    """Sweeps until :meth:`stop`, in a program without an agent."""

    def __init__(self, sweeper: Sweeper) -> None:
        super().__init__(name="farcall-sweeper", daemon=True)
        self._sweeper = sweeper
        self._is_stopped = threading.Event()

    def run(self) -> None:
        """Sweep now and then."""
        pause_s = self._sweeper.settings.period_s
        while not self._is_stopped.wait(pause_s):
            pause_s = self._sweeper.sweep()

    def stop(self) -> None:
        """End, and wait for that."""
        self._is_stopped.set()
        if self.is_alive():
            self.join()


def place_of(submitter: str) -> str:
    """The place of the shared directory of a submitter other than the owner."""
    return _place(name_of(submitter))


def _place(name: str) -> str:
    return f"{SUBMITTERS}/{name}"


def _places_in(root: Path) -> Iterator[tuple[str, int]]:
    """The directories in memory, with descriptors."""
    with _opened(str(root)) as directory:
        for name in [] if directory is None else os.listdir(directory):  # noqa: PTH208
            if (descriptor := _open(name, directory)) is not None:
                yield name, descriptor


def _files_of(place: str, top: int, *, most: int) -> Iterator[StoredFile]:
    """Yield all files and directories below a directory, apart from those directly in it. Files below too many
    directories, and files beyond ``most``, are removed, because otherwise nothing would count them."""
    pending: list[tuple[str, ...]] = [()]
    with _opened_below(top) as below:
        while pending:
            path = pending.pop()
            directory = below.open(path)
            if directory is None:
                continue
            with os.scandir(directory) as entries:  # of millions the rest comes in later sweeps
                some = itertools.islice(entries, 4 * MOST_FILES)
                names = [(each.name, each.is_dir(follow_symlinks=False)) for each in some]
            if len(path) > 1:
                with contextlib.suppress(OSError):
                    found = _stored(place, path, os.fstat(directory))
                    yield found._replace(size_bytes=0) if names else found
            for name, is_directory in names:
                if most <= 0 or (is_directory and len(path) >= MOST_DEPTH):
                    _remove(name, directory, is_directory=is_directory)
                    continue
                most -= 1
                if is_directory:
                    pending.append((*path, name))
                else:
                    with contextlib.suppress(OSError):
                        yield _stored(place, (*path, name), os.stat(name, dir_fd=directory, follow_symlinks=False))


def _used_with_content(files: list[StoredFile]) -> list[StoredFile]:
    """Directories, each before what is in it, count as used when that was: so that they are chosen after it."""
    latest: dict[tuple[str, ...], float] = {}
    for index in range(len(files) - 1, -1, -1):
        file = files[index]
        used_at = max(file.used_at, latest.pop(file.path, 0.0))
        if used_at != file.used_at:
            files[index] = file._replace(used_at=used_at)
        above = file.path[:-1]
        latest[above] = max(used_at, latest.get(above, 0.0))
    return files


def _remove(name: str, directory: int, *, is_directory: bool) -> None:
    if is_directory:
        remove_tree(name, below=directory)
    else:
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=directory)


def _stored(place: str, path: tuple[str, ...], found: os.stat_result) -> StoredFile:
    size_bytes = found.st_blocks * _BLOCK_BYTES
    return StoredFile(place, path, size_bytes, _used_at(found), stat.S_ISDIR(found.st_mode))


def _used_at(found: os.stat_result) -> float:
    return min(found.st_mtime, found.st_ctime)


def _by_place(files: Sequence[StoredFile]) -> dict[str, list[StoredFile]]:
    by_place: dict[str, list[StoredFile]] = collections.defaultdict(list)
    for file in files:
        by_place[file.place].append(file)
    return by_place


def _delete(files: list[StoredFile], top: int) -> int:
    """Delete files of one place that were not used meanwhile, and directories if they are empty then; how many bytes
    that frees."""
    freed_bytes = 0
    emptied: tuple[str, ...] | None = None
    with _opened_below(top) as below:
        for file in sorted(files, key=lambda each: each.path, reverse=True):  # a directory after what is in it
            directory = below.open(file.path[:-1])
            if directory is None:
                continue
            with contextlib.suppress(OSError):
                name = file.path[-1]
                used_at = _used_at(os.stat(name, dir_fd=directory, follow_symlinks=False))
                is_same = used_at <= file.used_at if file.is_directory else used_at == file.used_at
                if not is_same and file.path != emptied:
                    continue
                remove = os.rmdir if file.is_directory else os.unlink
                try:
                    remove(name, dir_fd=directory)
                except PermissionError:  # a directory that was copied or unpacked as read-only
                    os.fchmod(directory, stat.S_IRWXU)
                    remove(name, dir_fd=directory)
                freed_bytes += file.size_bytes
                emptied = file.path[:-1]
    return freed_bytes


class _Below:
    """Directories below one, each opened in the one above. The last one and those above it stay open."""

    def __init__(self, top: int) -> None:
        self._opened = [top]
        self._names: list[str] = []

    def open(self, path: Sequence[str]) -> int | None:
        """The descriptor of a directory until the next call; None if there is none."""
        same = 0
        while same < min(len(path), len(self._names)) and path[same] == self._names[same]:
            same += 1
        self.close(same)
        for name in path[same:]:
            descriptor = _open(name, self._opened[-1])
            if descriptor is None:
                return None
            self._opened.append(descriptor)
            self._names.append(name)
        return self._opened[-1]

    def close(self, kept: int = 0) -> None:
        while len(self._names) > kept:
            self._names.pop()
            os.close(self._opened.pop())


@contextlib.contextmanager
def _opened_below(top: int) -> Iterator[_Below]:
    below = _Below(top)
    try:
        yield below
    finally:
        below.close()


@contextlib.contextmanager
def _opened(name: str, below: int | None = None) -> Iterator[int | None]:
    descriptor = _open(name, below)
    try:
        yield descriptor
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _open(name: str, below: int | None) -> int | None:
    """Open a directory, which must not be a link if it is below another one; None if there is none."""
    with contextlib.suppress(OSError):
        if below is None:
            return os.open(name, _DIRECTORY & ~os.O_NOFOLLOW)
        try:
            return os.open(name, _DIRECTORY, dir_fd=below)
        except PermissionError:  # whatever mode a task has given it, what is in it counts
            make_accessible(name, below)
            return os.open(name, _DIRECTORY, dir_fd=below)
    return None
