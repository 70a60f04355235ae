"""Cache of files: copies by the SHA-256 of their content, for each submitter, and which content a URL had.

``DIRECTORY/NAME/xx/SHA256`` is a copy, ``DIRECTORY/index.sqlite`` knows all of them. Tasks have links to copies, and
run as the same user: a copy whose inode is not as this module left it is read again before it is used, and removed if
it has other content. A copy with a link in a task's directory is never removed.
"""

from __future__ import annotations

import collections
import contextlib
import hashlib
import heapq
import os
import shutil
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

from farcall_endpoint.contracts import outcomes
from farcall_endpoint.files.movers import MoveError
from farcall_endpoint.files.orders import taken_bytes
from farcall_endpoint.worker.directories import name_of

_PIECE_BYTES: Final = 1024 * 1024
_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS copies (
    owner TEXT NOT NULL, sha256 TEXT NOT NULL, size_bytes INTEGER NOT NULL, inode INTEGER NOT NULL,
    mtime_ns INTEGER NOT NULL, ctime_ns INTEGER NOT NULL, boot TEXT NOT NULL, used_at REAL NOT NULL,
    PRIMARY KEY (owner, sha256)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS copies_by_owner ON copies (owner, used_at);
CREATE INDEX IF NOT EXISTS copies_by_inode ON copies (inode);
CREATE TABLE IF NOT EXISTS urls (
    owner TEXT NOT NULL, url TEXT NOT NULL, version TEXT NOT NULL, sha256 TEXT NOT NULL, PRIMARY KEY (owner, url)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS urls_by_content ON urls (owner, sha256);
CREATE TABLE IF NOT EXISTS payers (owner TEXT NOT NULL PRIMARY KEY, payer TEXT NOT NULL) WITHOUT ROWID;
"""
_OWNER: Final = "owner"
_DRAFTS: Final = "drafts"
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_MOST_DEFAULT_BYTES: Final = 50 * 10**9
_DEFAULT_SHARE: Final = 10
_STEP_BYTES: Final = 64 * 2**20
"""Room to reserve at a time for a file of unknown size."""
_MOST_URLS: Final = 100
"""Maximum URLs in the index per content. Each signed URL is a new one, and the budget does not count the index."""


class _Inode(NamedTuple):
    size_bytes: int
    inode: int
    mtime_ns: int
    ctime_ns: int
    boot: str


class Cache:
    """One per transfer process. Its methods may be called from several threads.

    :param directory: of the endpoint, in which nothing else makes files.
    :param budget_bytes: for all copies, and those on their way; None: a tenth of the free space, at most 50 GB.
    """

    def __init__(
        self, directory: Path, *, budget_bytes: int | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        self._directory = directory
        self._clock = clock
        self._lock = threading.RLock()
        self._boot = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""
        self._pinned: dict[tuple[str, str], int] = {}
        self._drafts: dict[Path, int] = {}
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            self._index = self._open()
        except sqlite3.DatabaseError as error:
            if isinstance(error, sqlite3.OperationalError):  # locked, or no room: no reason to lose it
                raise
            for each in directory.iterdir():  # damaged: copies that nothing is known of are useless
                shutil.rmtree(each) if each.is_dir() else each.unlink()
            self._index = self._open()
        for drafts in directory.glob(f"*/{_DRAFTS}"):
            shutil.rmtree(drafts, ignore_errors=True)
        self._used: collections.Counter[str] = collections.Counter()  # bytes, by owner
        for owner, size_bytes in self._index.execute("SELECT owner, size_bytes FROM copies"):
            self._used[owner] += taken_bytes(size_bytes)
        self._index.execute("DELETE FROM payers WHERE owner NOT IN (SELECT owner FROM copies)")
        #: Of service accounts with copies, by owner.
        self._payers: dict[str, str] = dict(self._index.execute("SELECT owner, payer FROM payers").fetchall())
        if budget_bytes is None:
            free = os.statvfs(directory)
            room = free.f_bavail * free.f_frsize + self.used_bytes
            budget_bytes = min(room // _DEFAULT_SHARE, _MOST_DEFAULT_BYTES)
        self.budget_bytes = budget_bytes

    @property
    def used_bytes(self) -> int:
        """Size of all copies."""
        return self._used.total()

    def _open(self) -> sqlite3.Connection:
        index = sqlite3.connect(self._directory / "index.sqlite", isolation_level=None, check_same_thread=False)
        try:
            for pragma in ("locking_mode=EXCLUSIVE", "journal_mode=WAL", "synchronous=NORMAL", "temp_store=MEMORY"):
                index.execute(f"PRAGMA {pragma}").fetchall()
            index.executescript(_SCHEMA)
        except BaseException:
            index.close()
            raise
        return index

    def close(self) -> None:
        """Close the index."""
        self._index.close()

    # -- copies --------------------------------------------------------------------------------------------------------

    def known(self, submitter: str, url: str, version: str) -> str:
        """The SHA-256 of a version of a file; empty if it is not known."""
        if not version:
            return ""
        with self._lock:
            query = "SELECT sha256 FROM urls WHERE owner = ? AND url = ? AND version = ?"
            row = self._index.execute(query, (_name(submitter), url, version)).fetchone()
        return str(row[0]) if row else ""

    @contextlib.contextmanager
    def using(self, submitter: str, sha256: str) -> Iterator[tuple[Path, int] | None]:
        """The path and the size of a copy, which may be linked in here and stays; None if there is none."""
        owner = _name(submitter)
        key = owner, sha256
        with self._lock:
            self._pinned[key] = self._pinned.get(key, 0) + 1
        try:
            size_bytes = self._verified(owner, sha256)
            if size_bytes is None:
                yield None
                return
            yield self._path(owner, sha256), size_bytes
            # A link changes the inode; if there is no room to note that, the copy is read before its next use.
            with self._lock, contextlib.suppress(sqlite3.OperationalError):
                self._note(owner, sha256)
        finally:
            with self._lock:
                self._pinned[key] -= 1
                if not self._pinned[key]:
                    del self._pinned[key]

    def _verified(self, owner: str, sha256: str) -> int | None:
        """The size of a copy whose content is what it should be; None if there is none."""
        path = self._path(owner, sha256)
        query = "SELECT size_bytes, inode, mtime_ns, ctime_ns, boot FROM copies WHERE owner = ? AND sha256 = ?"
        with self._lock:
            row = self._index.execute(query, (owner, sha256)).fetchone()
            found = self._inode(path)
        if row is None or found is None:
            self._drop(owner, sha256)
            return None
        known = _Inode(*row)
        # A task can make its copy larger than all that may be read. Without the lock: large ones take a while.
        is_right = known == found or (
            known.size_bytes == found.size_bytes and _has_digest(path, sha256, size_bytes=known.size_bytes)
        )
        if not is_right:
            self._drop(owner, sha256)
            return None
        return found.size_bytes

    def _inode(self, path: Path) -> _Inode | None:
        try:
            found = path.lstat()
        except OSError:
            return None
        return _Inode(found.st_size, found.st_ino, found.st_mtime_ns, found.st_ctime_ns, self._boot)

    def _note(self, owner: str, sha256: str, path: Path | None = None) -> None:
        """Note how a copy is now, and that it was used; ``path`` is where it is if it is not in its place yet."""
        found = self._inode(path or self._path(owner, sha256))
        if found is not None:
            query = "SELECT size_bytes FROM copies WHERE owner = ? AND sha256 = ?"
            former = self._index.execute(query, (owner, sha256)).fetchone()
            # One statement: a copy that was in the index is there, also if this process ends, or the disk is full.
            row = (owner, sha256, *found, self._clock())
            self._index.execute("INSERT OR REPLACE INTO copies VALUES (?, ?, ?, ?, ?, ?, ?, ?)", row)
            self._used[owner] += taken_bytes(found.size_bytes) - (taken_bytes(former[0]) if former else 0)

    def _drop(self, owner: str, sha256: str) -> None:
        with self._lock:
            self._path(owner, sha256).unlink(missing_ok=True)
            query = "DELETE FROM copies WHERE owner = ? AND sha256 = ? RETURNING size_bytes"
            for (size_bytes,) in self._index.execute(query, (owner, sha256)).fetchall():
                self._used[owner] -= taken_bytes(size_bytes)
            self._index.execute("DELETE FROM urls WHERE owner = ? AND sha256 = ?", (owner, sha256))

    def unlink(self, directory: int, name: str) -> None:
        """Remove a link from the directory of a task; the copy is known as it is after that, if it was before."""
        with self._lock, contextlib.suppress(OSError, sqlite3.Error):  # else it is read before it is used again
            found = os.stat(name, dir_fd=directory, follow_symlinks=False)
            query = "SELECT owner, sha256 FROM copies WHERE inode = ? AND mtime_ns = ? AND ctime_ns = ?"
            row = self._index.execute(query, (found.st_ino, found.st_mtime_ns, found.st_ctime_ns)).fetchone()
            os.unlink(name, dir_fd=directory)
            if row is not None:
                self._note(*row)

    # -- drafts --------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def draft(self, submitter: str, number: int, size_bytes: int | None, *, payer: str = "") -> Iterator[Path]:
        """Make an empty file for a copy, with room reserved for it.

        :param payer: the creator of a service account, whose copies count together; empty: the submitter.
        :raises MoveError: if there is no room.
        """
        owner = _name(submitter)
        path = self._directory / owner / _DRAFTS / str(number)
        try:
            if payer:
                self._note_payer(owner, _name(payer))
            self.reserve(path, min(_STEP_BYTES, self.budget_bytes) if size_bytes is None else size_bytes)
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600))
            yield path
        finally:
            with self._lock:
                self._drafts.pop(path, None)
            path.unlink(missing_ok=True)

    def grown(self, draft: Path, size_bytes: int) -> None:
        """Reserve room if a draft is larger than expected.

        :raises MoveError: if there is no room.
        """
        if size_bytes > self._drafts.get(draft, 0):
            self.reserve(draft, max(size_bytes, min(size_bytes + _STEP_BYTES, self.budget_bytes)))

    def reserve(self, draft: Path, size_bytes: int) -> None:
        """Make room: copies that no task has are removed: of the payer with the most bytes, and of its account with the
        most, each time the one that was not used for longest. So none loses copies to one who has more."""
        with self._lock:
            if size_bytes > self.budget_bytes:
                raise MoveError(outcomes.files_too_large(size_bytes, self.budget_bytes))
            others = sum([size for path, size in self._drafts.items() if path != draft])
            excess = self.used_bytes + others + size_bytes - self.budget_bytes
            if excess > 0:
                excess -= self._evict(excess)
            if excess > 0:
                raise MoveError(
                    outcomes.files_no_room(
                        f"this task's files and those of other tasks need more than {self.budget_bytes:,} bytes"
                    ),
                    missing_bytes=excess,
                )
            self._drafts[draft] = size_bytes

    def drafts(self) -> tuple[tuple[int, int], ...]:
        """The number and the room of each file on its way."""
        with self._lock:
            return tuple([(int(path.name), size_bytes) for path, size_bytes in self._drafts.items()])

    def make_room(self) -> bool:
        """The file system is full: remove all copies that no task has. Whether there were any."""
        with self._lock:
            try:
                return self._evict(None) > 0
            except sqlite3.OperationalError:  # no room to note that: a copy whose file is gone is not used
                return True

    def _note_payer(self, owner: str, payer: str) -> None:
        with self._lock:
            if self._payers.get(owner) != payer:
                self._payers[owner] = payer
                with contextlib.suppress(sqlite3.OperationalError):  # no room: it is noted with a later copy
                    self._index.execute("INSERT OR REPLACE INTO payers VALUES (?, ?)", (owner, payer))

    def _evict(self, needed_bytes: int | None) -> int:
        """Bytes that removing copies has given back; or could, if that is less than what is needed: then none is
        removed."""
        chosen: list[tuple[str, str]] = []
        freed = 0
        # Not all rows are read: with many copies, that would take longer than the transfer that needs the room.
        query = "SELECT sha256, size_bytes FROM copies WHERE owner = ? ORDER BY used_at"
        oldest_first = {owner: self._index.execute(query, (owner,)) for owner in self._used}
        owners: dict[str, list[tuple[int, str]]] = {}  # by payer
        for owner, used_bytes in self._used.items():
            owners.setdefault(self._payers.get(owner, owner), []).append((-used_bytes, owner))
        by_bytes = [(sum(negative_bytes for negative_bytes, _ in each), payer) for payer, each in owners.items()]
        for heap in (by_bytes, *owners.values()):
            heapq.heapify(heap)
        while by_bytes and (needed_bytes is None or freed < needed_bytes):
            of_payer, payer = heapq.heappop(by_bytes)
            of_owner, owner = heapq.heappop(owners[payer])
            row = oldest_first[owner].fetchone()
            if row is not None:
                sha256, size_bytes = row
                taken = 0 if self._is_needed(owner, sha256) else taken_bytes(size_bytes)
                if taken:
                    chosen.append((owner, sha256))
                freed += taken
                of_payer += taken
                heapq.heappush(owners[payer], (of_owner + taken, owner))
            if owners[payer]:
                heapq.heappush(by_bytes, (of_payer, payer))
        if needed_bytes is None or freed >= needed_bytes:
            for owner, sha256 in chosen:
                self._drop(owner, sha256)
        return freed

    def _is_needed(self, owner: str, sha256: str) -> bool:
        if (owner, sha256) in self._pinned:
            return True
        try:
            return self._path(owner, sha256).lstat().st_nlink > 1
        except OSError:
            return False

    def add(self, submitter: str, draft: Path, sha256: str) -> None:
        """A draft is complete: it becomes the copy with this content."""
        owner = _name(submitter)
        path = self._path(owner, sha256)
        draft.chmod(0o444)
        with self._lock:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._note(owner, sha256, draft)  # first: a copy that the index does not have would never be removed
            draft.rename(path)
            self._note(owner, sha256)

    def remember(self, submitter: str, url: str, version: str, sha256: str) -> None:
        """Note which content a version of a file has."""
        if version:
            owner = _name(submitter)
            row = (owner, url, version, sha256)
            of_content = "FROM urls WHERE owner = ? AND sha256 = ?"
            with self._lock:
                (known,) = self._index.execute(f"SELECT count(*) {of_content}", (owner, sha256)).fetchone()
                if known >= _MOST_URLS:
                    self._index.execute(f"DELETE {of_content}", (owner, sha256))
                self._index.execute("INSERT OR REPLACE INTO urls VALUES (?, ?, ?, ?)", row)

    def _path(self, owner: str, sha256: str) -> Path:
        return self._directory / owner / sha256[:2] / sha256


def _name(submitter: str) -> str:
    return name_of(submitter) if submitter else _OWNER


def _has_digest(path: Path, sha256: str, *, size_bytes: int) -> bool:
    """Whether a file has this digest; so many bytes are read at most, as it may grow meanwhile."""
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while size_bytes > 0 and (piece := file.read(min(size_bytes, _PIECE_BYTES))):
                digest.update(piece)
                size_bytes -= len(piece)
    except OSError:
        return False
    return digest.hexdigest() == sha256
