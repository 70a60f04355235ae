"""What an agent has promised to remember: tasks that it accepted, and results that the cloud has not recorded yet.

SQLite in WAL mode, one transaction per turn of the agent. With ``synchronous=NORMAL`` a commit survives the death of
any process; a power cut can take the last moments with it, and the cloud then delivers those tasks again. The locking
mode is exclusive, so that it also works on the shared home directories of clusters; WAL's shared memory would not.

A file system that is full, over its quota or broken makes a commit fail as a whole. Nothing is lost by that: what was
to be written is still in memory, and :class:`farcall_endpoint.agent.pressure.Pressure` says when to try again.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from farcall_common.errors import ConfigurationError, Unavailable
from farcall_common.wire import TaskSpec, TaskState, new_id
from farcall_endpoint.agent.tasks import Decisions, End, Stage, Task

__all__ = ["Spool", "SpoolUnwritable"]

_MOST_FORGOTTEN: Final = 1000
_FORMAT: Final = "1"
_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS functions (hash TEXT PRIMARY KEY, name TEXT NOT NULL, body BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS tasks (
    seq INTEGER PRIMARY KEY, attempt INTEGER NOT NULL, starts INTEGER NOT NULL, at REAL NOT NULL,
    spec BLOB NOT NULL, payload BLOB
);
CREATE TABLE IF NOT EXISTS results (
    seq INTEGER PRIMARY KEY, attempt INTEGER NOT NULL, at REAL NOT NULL,
    spec BLOB NOT NULL, end BLOB NOT NULL, body BLOB
);
"""


_NO_ROOM: Final = frozenset(
    {sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN}
)
"""What a file system that takes nothing more looks like. Exceeding a quota, for one, is an I/O error to SQLite."""
_RESERVE_BYTES: Final = 256 * 1024 * 1024
_RESERVE_SHARE: Final = 20


class SpoolUnwritable(Unavailable):
    """The file system takes nothing more; what was written before is safe."""

    code = "SPOOL_UNWRITABLE"
    default_hint = "Make room where the endpoint's directory is, or raise the quota."


class _StoredEnd(msgspec.Struct, frozen=True, array_like=True):
    state: TaskState
    error: dict[str, Any] | None
    size_bytes: int
    sha256: str
    started_at: float | None
    ended_at: float | None
    exhausted: bool = False  # spools of the time before do not have it, nor the next
    details: dict[str, Any] | None = None


_encode: Final = msgspec.msgpack.Encoder().encode
_decode_spec: Final = msgspec.msgpack.Decoder(TaskSpec).decode
_decode_end: Final = msgspec.msgpack.Decoder(_StoredEnd).decode


class Spool:
    """One per endpoint directory; whoever opens it must hold the directory's lock.

    :param path: of the database; None keeps it in memory.
    :raises ConfigurationError: if the file is not a spool, or one of a newer version.
    """

    def __init__(self, path: Path | None) -> None:
        self._directory = None if path is None else path.parent
        self._forgotten: list[tuple[int]] = []
        try:
            self._database = sqlite3.connect(":memory:" if path is None else path, isolation_level=None)
        except sqlite3.Error as error:
            raise _cannot_open(path, error) from error
        try:
            self.spool_id = self._open(path)
        except sqlite3.DatabaseError as error:
            self._database.close()
            raise _cannot_open(path, error) from error
        except BaseException:
            self._database.close()
            raise

    def _open(self, path: Path | None) -> str:
        # temp_store: what SQLite notes down for undoing a statement must not need room elsewhere.
        for statement in ("locking_mode=EXCLUSIVE", "journal_mode=WAL", "synchronous=NORMAL", "temp_store=MEMORY"):
            self._database.execute(f"PRAGMA {statement}").fetchall()
        self._database.executescript(_SCHEMA)
        known = dict(self._database.execute("SELECT key, value FROM meta").fetchall())
        if not known:
            known = {"format": _FORMAT, "spool_id": new_id()}
            self._database.execute("INSERT INTO meta VALUES ('format', :format), ('spool_id', :spool_id)", known)
        if known["format"] != _FORMAT:
            raise ConfigurationError(
                f"The spool {path} has format {known['format']}, this version reads {_FORMAT}.",
                hint="Start the endpoint with the version that wrote it, or move the spool away.",
            )
        return str(known["spool_id"])

    def close(self) -> None:
        """Write everything into one file."""
        self._tidy("DELETE FROM results WHERE seq = ?", self._forgotten)
        self._database.close()

    def room(self) -> tuple[int, int] | None:
        """Bytes that are free where the spool is, and how many of them are a reserve, for ends of what runs already.
        None if that cannot be told, and for a spool in memory."""
        if self._directory is None:
            return None
        try:
            disk = os.statvfs(self._directory)
        except OSError:
            return None
        return disk.f_bavail * disk.f_frsize, min(_RESERVE_BYTES, disk.f_blocks * disk.f_frsize // _RESERVE_SHARE)

    def load(self) -> tuple[list[Task], set[str]]:
        """All tasks, oldest first, without their user bytes; and the hashes of the functions that are here."""
        if self._tidy("DELETE FROM results WHERE seq = ?", self._forgotten):
            self._forgotten.clear()
        tasks = []
        query = "SELECT seq, attempt, starts, at, spec, payload IS NULL FROM tasks"
        for seq, attempt, starts, at, spec, unfetched in self._database.execute(query):
            stage = Stage.FETCHING if unfetched else Stage.QUEUED
            tasks.append(Task(seq, _decode_spec(spec), attempt, stage, at, starts=starts))
        for seq, attempt, at, spec, stored in self._database.execute("SELECT seq, attempt, at, spec, end FROM results"):
            end = End(**msgspec.structs.asdict(_decode_end(stored)))
            tasks.append(Task(seq, _decode_spec(spec), attempt, Stage.ENDED, at, end=end))
        tasks.sort(key=lambda task: task.seq)
        self._drop_unused_functions(tasks)
        return tasks, {row[0] for row in self._database.execute("SELECT hash FROM functions")}

    def payload(self, task: Task) -> bytes:
        """The arguments of a task that has not ended."""
        return self._bytes("SELECT payload FROM tasks WHERE seq = ?", task.seq)

    def body(self, task: Task) -> bytes:
        """The result of a task that has ended well."""
        return self._bytes("SELECT body FROM results WHERE seq = ?", task.seq)

    def function(self, function_hash: str) -> bytes:
        """The body of a function."""
        return self._bytes("SELECT body FROM functions WHERE hash = ?", function_hash)

    def commit(self, decisions: Decisions) -> None:
        """Make the spool's part of a turn durable, all of it or nothing.

        :raises SpoolUnwritable: if the file system takes nothing more. Then nothing was written, and the same decisions
            may be given again, with others added to them.
        """
        d = decisions
        forgotten = [*self._forgotten, *[(seq,) for seq in d.forgotten]]
        matters = d.functions or d.accepted or d.redelivered or d.fetched or d.starts or d.ended or d.dropped
        if not matters and len(forgotten) < _MOST_FORGOTTEN:
            self._forgotten = forgotten
            return  # what a process that dies did not come to forget is reported and recorded once more
        try:
            self._database.execute("BEGIN IMMEDIATE")
            self._write(d, forgotten)
            self._database.execute("COMMIT")
        except BaseException as error:
            if self._database.in_transaction:  # a full disk has ended it already
                self._database.execute("ROLLBACK")
            if isinstance(error, sqlite3.Error) and _no_room(error):
                raise SpoolUnwritable(f"The spool cannot be written: {error}.") from error
            raise
        self._forgotten = []

    def _write(self, d: Decisions, forgotten: list[tuple[int]]) -> None:
        many = self._database.executemany
        ended = {task.seq for task in d.ended}
        if d.functions:
            bodies = [(function.function_hash, function.name, body) for function, body in d.functions]
            many("INSERT OR IGNORE INTO functions VALUES (?, ?, ?)", bodies)
        if d.accepted:
            many("INSERT INTO tasks VALUES (?, ?, ?, ?, ?, ?)", [_row(t) for t in d.accepted if t.seq not in ended])
        new = {task.seq for task in d.accepted}
        if starts := [(task.starts, task.seq) for task in d.starts if task.seq not in new]:
            many("UPDATE tasks SET starts = ? WHERE seq = ?", starts)
        if d.redelivered:
            attempts = [(task.attempt, task.seq) for task in d.redelivered]
            many("UPDATE tasks SET attempt = ? WHERE seq = ?", attempts)
            many("UPDATE results SET attempt = ? WHERE seq = ?", attempts)
        if d.fetched:
            payloads = [(task.payload, task.seq) for task in d.fetched if task.payload is not None]
            many("UPDATE tasks SET payload = ? WHERE seq = ?", payloads)
        if d.ended:
            many("DELETE FROM tasks WHERE seq = ?", [(seq,) for seq in ended])
            ends = [_result_row(task, task.end) for task in d.ended if task.end is not None]
            many("INSERT OR REPLACE INTO results VALUES (?, ?, ?, ?, ?, ?)", ends)
        if d.dropped:
            many("DELETE FROM tasks WHERE seq = ?", [(seq,) for seq in d.dropped])
        if forgotten:
            many("DELETE FROM results WHERE seq = ?", forgotten)

    def _tidy(self, statement: str, keys: Sequence[tuple[object]]) -> bool:
        """Remove what is not needed any more; on a full disk it stays for now, which does no harm."""
        try:
            self._database.executemany(statement, keys)
        except sqlite3.OperationalError as error:
            if not _no_room(error):
                raise
            return False
        return True

    def _bytes(self, query: str, key: int | str) -> bytes:
        row = self._database.execute(query, (key,)).fetchone()
        return bytes(row[0])

    def _drop_unused_functions(self, tasks: Iterable[Task]) -> None:
        needed = {task.spec.function_hash for task in tasks if task.end is None}
        known = {row[0] for row in self._database.execute("SELECT hash FROM functions")}
        self._tidy("DELETE FROM functions WHERE hash = ?", [(unused,) for unused in known - needed])


def _no_room(error: sqlite3.Error) -> bool:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF in _NO_ROOM  # the rest of the code says more exactly where


def _cannot_open(path: Path | None, error: sqlite3.Error) -> ConfigurationError:
    if path is not None and _no_room(error):
        reason = "read only, or not yours" if not os.access(path.parent, os.W_OK) else "full, over its quota, or broken"
        return ConfigurationError(
            f"The spool {path} cannot be written: {error}.",
            hint=f"The file system of {path.parent} is {reason}. Put it right, or set FARCALL_HOME to another place.",
        )
    return ConfigurationError(
        f"The spool {path} cannot be read: {error}.",
        hint="Another process may use it, or it is damaged; move it away to start with an empty one.",
    )


def _row(task: Task) -> tuple[object, ...]:
    return task.seq, task.attempt, task.starts, task.at, _encode(task.spec), task.payload


def _result_row(task: Task, end: End) -> tuple[object, ...]:
    stored = _StoredEnd(
        end.state, end.error, end.size_bytes, end.sha256, end.started_at, end.ended_at, end.exhausted, end.details
    )
    return task.seq, task.attempt, task.at, _encode(task.spec), _encode(stored), end.body
