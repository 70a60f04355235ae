"""Output store: the end of what recent attempts printed, for their submitters to read. Bounded by time and by bytes.

It is not part of the spool: output is lost rather than that a task waits for it. A lost or damaged store is replaced by
an empty one.
"""

from __future__ import annotations

import contextlib
import logging
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from farcall_endpoint.agent.core.tasks import Kept
from farcall_endpoint.contracts.output import Printed, Stream

_logger = logging.getLogger(__name__)

RETENTION_S: Final = 86400.0
"""Seconds for which output is kept."""
_ROW_BYTES: Final = 200
"""Size of a database row without its output."""
_DROPPED_AT_ONCE: Final = 1000

_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS output (
    number INTEGER PRIMARY KEY,
    task_id TEXT NOT NULL UNIQUE,
    attempt INTEGER NOT NULL,
    at REAL NOT NULL,
    size_bytes INTEGER NOT NULL,
    stdout_tail INTEGER NOT NULL,
    stderr_tail INTEGER NOT NULL,
    stdout_end INTEGER NOT NULL,
    stderr_end INTEGER NOT NULL,
    answer_key BLOB NOT NULL,
    tails BLOB NOT NULL
) STRICT
"""


class KeptOutput(NamedTuple):
    """Parts of what an attempt printed, and the numbers of all bytes of its streams."""

    attempt: int
    stdout: Stream
    stderr: Stream
    stdout_end: int
    stderr_end: int
    answer_key: bytes


class OutputStore:
    """The output of one endpoint, on its disk. Owned by one thread.

    :param path: the file, which is created if it is missing.
    :param budget_bytes: the most that is kept; the oldest output is dropped first. 0: none is kept.
    """

    def __init__(self, path: Path, *, budget_bytes: int) -> None:
        self._path = path
        self._budget_bytes = budget_bytes
        self._database: sqlite3.Connection | None = None
        self._size_bytes = 0
        self._problem = ""
        if not budget_bytes:
            self._remove()
            return
        try:
            self._open()
        except sqlite3.Error as error:
            _logger.warning("the kept output of tasks cannot be read, and is dropped: %s", error)
            self._replace()

    def close(self) -> None:
        """Close the file."""
        if self._database is not None:
            self._database.close()
            self._database = None

    def keep(self, outputs: Sequence[Kept], *, now: float) -> None:
        """Keep what attempts printed, each in place of an earlier attempt of its task. If the disk takes nothing, it is
        dropped, which is logged once.

        :param now: epoch seconds.
        """
        outputs = list({each.task_id: each for each in outputs}.values())
        outputs = [each for each in outputs if _size_bytes(each) <= self._budget_bytes]
        if not outputs:
            return
        if self._database is None and self._budget_bytes:
            self._replace()
        database = self._database
        if database is None:
            return
        rows = [
            (*each[:2], now, _size_bytes(each), *_columns(each.printed), each.answer_key, each.tails)
            for each in outputs
        ]
        size_bytes = self._size_bytes
        try:
            with database:
                database.execute("BEGIN IMMEDIATE")
                for task_id in (each.task_id for each in outputs):
                    self._drop(database, "DELETE FROM output WHERE task_id = ? RETURNING size_bytes", task_id)
                self._size_bytes += sum(map(_size_bytes, outputs))
                database.executemany(
                    "INSERT INTO output (task_id, attempt, at, size_bytes, stdout_tail, stderr_tail, stdout_end,"
                    " stderr_end, answer_key, tails) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                    rows,
                )
                self._make_room(database)
        except sqlite3.Error as error:
            self._size_bytes = size_bytes
            self._failed(error)
        else:
            self._problem = ""

    def read(self, task_id: str, *, stdout_from: int, stderr_from: int, most_bytes: int) -> KeptOutput | None:
        """Return the output of a task's last attempt that printed something and ended; None if it is not kept. Each
        stream has up to ``most_bytes``, from its offset on (negative: before the end) or from the first byte that is
        kept."""
        if self._database is None:
            return None
        try:
            row = self._database.execute(
                "SELECT number, attempt, stdout_tail, stderr_tail, stdout_end, stderr_end, answer_key FROM output"
                " WHERE task_id = ?",
                (task_id,),
            ).fetchone()
            if row is None:
                return None
            number, attempt, stdout_tail, stderr_tail, stdout_end, stderr_end, answer_key = row
            stdout_at = _place(stdout_from, end=stdout_end, kept_bytes=stdout_tail)
            stderr_at = _place(stderr_from, end=stderr_end, kept_bytes=stderr_tail)
            # A tail may have a MiB, and others wait meanwhile. The first byte of a blob is number 1.
            [stdout, stderr] = self._database.execute(
                "SELECT substr(tails, ?, ?), substr(tails, ?, ?) FROM output WHERE number = ?",
                (
                    1 + stdout_at,
                    min(most_bytes, stdout_tail - stdout_at),
                    1 + stdout_tail + stderr_at,
                    min(most_bytes, stderr_tail - stderr_at),
                    number,
                ),
            ).fetchone()
        except sqlite3.Error as error:
            self._failed(error)
            return None
        return KeptOutput(
            attempt,
            Stream(stdout_end - stdout_tail + stdout_at, stdout),
            Stream(stderr_end - stderr_tail + stderr_at, stderr),
            stdout_end,
            stderr_end,
            answer_key,
        )

    def expire(self, *, now: float) -> None:
        """Drop what is older than the retention, some at a time.

        :param now: epoch seconds.
        """
        if self._database is None:
            return
        try:
            with self._database:
                self._database.execute("BEGIN IMMEDIATE")
                self._drop(
                    self._database,
                    "DELETE FROM output WHERE number IN (SELECT number FROM output WHERE at < ? LIMIT ?)"
                    " RETURNING size_bytes",
                    now - RETENTION_S,
                    _DROPPED_AT_ONCE,
                )
        except sqlite3.Error as error:
            self._failed(error)

    # -- inside --------------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        self._path.touch(mode=0o600)
        database = sqlite3.connect(self._path, isolation_level=None, timeout=0.0)
        try:
            # A power cut may damage the file; it is replaced then. The death of the process does not.
            database.execute("PRAGMA synchronous = OFF")
            database.execute("PRAGMA locking_mode = EXCLUSIVE")
            database.execute("PRAGMA journal_mode = TRUNCATE")
            database.execute(_SCHEMA)
            [self._size_bytes] = database.execute("SELECT coalesce(sum(size_bytes), 0) FROM output").fetchone()
            self._make_room(database)
        except BaseException:
            database.close()
            raise
        self._database = database

    def _make_room(self, database: sqlite3.Connection) -> None:
        """Drop the oldest output until the rest is within the budget."""
        while self._size_bytes > self._budget_bytes:
            excess = self._size_bytes - self._budget_bytes
            numbers: list[int] = []
            for number, size in database.execute(
                "SELECT number, size_bytes FROM output ORDER BY number LIMIT ?", (_DROPPED_AT_ONCE,)
            ):
                numbers.append(number)
                excess -= size
                if excess <= 0:
                    break
            if not numbers:
                self._size_bytes = 0
                return
            self._drop(database, "DELETE FROM output WHERE number <= ? RETURNING size_bytes", numbers[-1])

    def _drop(self, database: sqlite3.Connection, statement: str, *values: str | float) -> None:
        self._size_bytes -= sum(size for (size,) in database.execute(statement, values).fetchall())

    def _replace(self) -> None:
        """Begin with an empty store."""
        self.close()
        self._remove()
        try:
            self._open()
        except (sqlite3.Error, OSError) as error:
            self._failed(error)

    def _remove(self) -> None:
        for name in (self._path, self._path.with_name(self._path.name + "-journal")):
            with contextlib.suppress(OSError):
                name.unlink(missing_ok=True)

    def _failed(self, error: Exception) -> None:
        """Log a problem, but not at each task."""
        if str(error) != self._problem:
            self._problem = str(error)
            _logger.warning("output of tasks is not kept: %s", error)
        if isinstance(error, sqlite3.DatabaseError) and not isinstance(error, sqlite3.OperationalError):
            self.close()  # a damaged file, which the next output replaces


def _columns(printed: Printed) -> tuple[int, int, int, int]:
    return printed.stdout_tail, printed.stderr_tail, printed.stdout_end, printed.stderr_end


def _size_bytes(kept: Kept) -> int:
    return _ROW_BYTES + len(kept.tails)


def _place(offset: int, *, end: int, kept_bytes: int) -> int:
    """Translate an offset in a stream into an offset in the kept last bytes of the stream."""
    return min(max(0, offset + kept_bytes - (0 if offset < 0 else end)), kept_bytes)
