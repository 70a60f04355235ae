"""Spool: the tasks that an agent accepted, and the results that the cloud has not recorded yet.

SQLite in WAL mode, one transaction per turn of the agent. With ``synchronous=NORMAL`` a commit survives the death of
any process; a power cut can take the last moments with it, and the cloud then delivers those tasks again. A turn that
starts tasks which may not run twice is flushed to the disk before they start (``synchronous=FULL``, one flush), and
raises the spool's generation: the cloud refuses a spool with an older one, for it is an old copy. The locking
mode is exclusive, so that it also works on the shared home directories of clusters; WAL's shared memory would not.

Bodies (arguments and results) are in a table of their own, so that a start rewrites a short row. One of more than
64 KiB is a file in the folder ``spool.bodies``, written before the commit that refers to it. In a table it would be
written page by page, twice (WAL, then database), with two flushes of all of it at each checkpoint: 5 MB took 110 ms
where the file takes 10 (ext4, 2 cores under load). A worker maps the file as it is, and an upload reads it bit by bit.
Files are not flushed: after a power cut each one is checked (:meth:`Spool.load`).

A file system that is full, over its quota or broken makes a commit fail as a whole. Nothing is lost by that: what was
to be written is still in memory, and :class:`farcall_endpoint.agent.core.spool_space.SpoolSpace` decides when to retry.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec

from farcall_common.errors import ConfigurationError, EndpointInUse, FarcallError, Unavailable
from farcall_common.wire import FunctionSpec, TaskSpec, new_id
from farcall_endpoint.agent.core.actions import WriteSpool
from farcall_endpoint.agent.core.graphs import GraphNeeds, read_graph
from farcall_endpoint.agent.core.tasks import RetryState, SpooledTask, Stage, StoredResult, Task, TaskResult
from farcall_endpoint.files.plan import FileList
from farcall_endpoint.host.shared_memory import Bytes, Frame, MemoryFile, SharedBytes, copy_of

_logger = logging.getLogger(__name__)

_MOST_FORGOTTEN: Final = 1000
_FORMAT: Final = "4"
_MAX_ROW_BYTES: Final = 64 * 1024
"""Larger bodies are files. Arguments and results of that size travel through the blob store too."""
_META: Final = "CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL)"
_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS functions (hash TEXT PRIMARY KEY, name TEXT NOT NULL, body BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS signatures (hash TEXT PRIMARY KEY, name TEXT NOT NULL, signature TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS tasks (
    seq INTEGER PRIMARY KEY, attempt INTEGER NOT NULL, starts INTEGER NOT NULL, at REAL NOT NULL, spec BLOB NOT NULL
);
CREATE TABLE IF NOT EXISTS results (
    seq INTEGER PRIMARY KEY, attempt INTEGER NOT NULL, at REAL NOT NULL, spec BLOB NOT NULL, end BLOB NOT NULL
);
CREATE TABLE IF NOT EXISTS bodies (seq INTEGER PRIMARY KEY, size_bytes INTEGER NOT NULL, file TEXT, body BLOB);
CREATE TABLE IF NOT EXISTS sealed_calls (
    task_id TEXT PRIMARY KEY, seq INTEGER NOT NULL, at REAL NOT NULL, answer_key BLOB
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS retries (
    seq INTEGER PRIMARY KEY, used INTEGER NOT NULL, at REAL NOT NULL, starts INTEGER NOT NULL, run_s REAL NOT NULL
);
CREATE TABLE IF NOT EXISTS graphs (seq INTEGER PRIMARY KEY, needs BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS files (seq INTEGER PRIMARY KEY, files BLOB NOT NULL);
"""
"""A body is the payload of an unfinished task, the result of a finished one; NULL if it is a file. A task without
one has yet to fetch it. Names of files are never used again, so that a copy of a spool finds its own or none. Sealed
calls are kept after their task, so that none is run again; their keys until the result is here, which is sealed.
Files of a task with a result are yet to be stored."""
_NO_ROOM: Final = frozenset(
    {sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN}
)
"""SQLite errors of a file system that accepts no more data. An exceeded quota is an I/O error to SQLite."""
_RESERVE_BYTES: Final = 256 * 1024 * 1024
_RESERVE_SHARE: Final = 20
_MAX_LOG_BYTES: Final = 16 * 1024 * 1024
_KEPT_FREE_BYTES: Final = 16 * 1024 * 1024
"""Free bytes to keep inside the file. SQLite reuses them; returning them to the file system is slow."""
_PAGES_AT_ONCE: Final = 2048
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_FORGOTTEN_AT_ONCE: Final = 64


class SpoolUnwritable(Unavailable):
    """The file system accepts no more data. Data that was written before is safe."""

    code = "SPOOL_UNWRITABLE"
    default_hint = "Make room where the endpoint's directory is, or raise the quota."


_encode: Final = msgspec.msgpack.Encoder().encode
_decode_spec: Final = msgspec.msgpack.Decoder(TaskSpec).decode
_decode_graph: Final = msgspec.msgpack.Decoder(GraphNeeds).decode
_decode_files: Final = msgspec.msgpack.Decoder(FileList).decode
_decode_result: Final = msgspec.msgpack.Decoder(StoredResult).decode


class Spool:
    """One per endpoint directory; the process that opens it must hold the directory's lock.

    :param path: of the database; None keeps it in memory.
    :raises ConfigurationError: if the file is not a spool, or one of a newer version.
    :raises EndpointInUse: if another process has it open.
    """

    def __init__(self, path: Path | None) -> None:
        self._directory = None if path is None else path.parent
        self._files = None if path is None else path.with_suffix(".bodies")
        self._names: dict[str, str] = {}  # of the files that are in the folder
        self._suffix = new_id()
        self._forgotten: list[tuple[int]] = []
        try:
            self._database = sqlite3.connect(":memory:" if path is None else path, isolation_level=None)
        except sqlite3.Error as error:
            raise _cannot_open(path, error) from error
        try:
            self.spool_id, self.generation = self._open(path)
        except (sqlite3.DatabaseError, OSError) as error:
            self._database.close()
            raise _cannot_open(path, error) from error
        except BaseException:
            self._database.close()
            raise

    def _open(self, path: Path | None) -> tuple[str, int]:
        # auto_vacuum counts only while the file is empty; asking for it later would need room on a full disk.
        is_new = path is None or path.stat().st_size == 0
        # temp_store: what SQLite notes down for undoing a statement must not need room elsewhere.
        for statement in (
            *(["auto_vacuum=INCREMENTAL"] if is_new else []),
            "locking_mode=EXCLUSIVE",
            "journal_mode=WAL",
            f"journal_size_limit={_MAX_LOG_BYTES}",
            "synchronous=NORMAL",
            "temp_store=MEMORY",
        ):
            self._database.execute(f"PRAGMA {statement}").fetchall()
        self._database.executescript(_META)
        known = self._meta()
        if known.get("format", _FORMAT) != _FORMAT:
            raise ConfigurationError(
                f"The spool {path} has format {known['format']}, this version reads {_FORMAT}.",
                hint="Start the endpoint with the version that wrote it, or move the spool away.",
            )
        self._database.executescript(_SCHEMA)
        if self._files is not None:
            self._files.mkdir(mode=0o700, exist_ok=True)
        if not known:
            known = {"format": _FORMAT, "spool_id": new_id()}
            self._database.execute("INSERT INTO meta VALUES ('format', :format), ('spool_id', :spool_id)", known)
        return str(known["spool_id"]), int(known.get("generation", 0))

    def close(self) -> None:
        """Write everything into one file."""
        self._forget(self._forgotten)
        self._database.close()

    def give_back(self) -> None:
        """Return space that is not needed any more to the file system, a part with each call: none takes long."""
        some, rest = self._forgotten[:_FORGOTTEN_AT_ONCE], self._forgotten[_FORGOTTEN_AT_ONCE:]
        if some and self._forget(some):
            self._forgotten = rest
        if self._number("freelist_count") * self._number("page_size") > _KEPT_FREE_BYTES:
            # The file gets shorter with the checkpoint.
            self._tidy_up(f"PRAGMA incremental_vacuum({_PAGES_AT_ONCE}); PRAGMA wal_checkpoint(TRUNCATE);")

    def room(self) -> tuple[int, int] | None:
        """Bytes that are free where the spool is, and how many of them are a reserve, for ends of what runs already.
        None if unknown, and for a spool in memory."""
        if self._directory is None:
            return None
        try:
            disk = os.statvfs(self._directory)
        except OSError:
            return None
        return disk.f_bavail * disk.f_frsize, min(_RESERVE_BYTES, disk.f_blocks * disk.f_frsize // _RESERVE_SHARE)

    def load(self) -> tuple[list[SpooledTask], set[str]]:
        """All tasks, oldest first, without their user bytes; and the hashes of the functions that are here.

        What a power cut has taken from files is given up: arguments are fetched again if their task has not started,
        and a task that has is not held any more. The cloud then delivers it again, or ends it as lost.

        :raises ConfigurationError: if a file is there and cannot be read.
        """
        if self._forget(self._forgotten):
            self._forgotten.clear()
        tasks: list[SpooledTask] = []
        answer_keys = dict(
            self._database.execute("SELECT task_id, answer_key FROM sealed_calls WHERE answer_key NOTNULL")
        )
        retries = {row[0]: RetryState(*row[1:]) for row in self._database.execute("SELECT * FROM retries")}
        graphs = dict(self._database.execute("SELECT seq, needs FROM graphs"))
        files = dict(self._database.execute("SELECT seq, files FROM files"))
        calls_gone: list[tuple[str]] = []  # to be opened again
        gone: list[tuple[int]] = []  # bodies
        dropped: list[tuple[int]] = []  # tasks and results that are useless without theirs
        self._names.clear()
        was_cut = self._meta().get("boot_id", "") != (boot_id := _boot_id())
        query = "SELECT seq, attempt, starts, at, spec, size_bytes, file FROM tasks LEFT JOIN bodies USING (seq)"
        for seq, attempt, starts, at, encoded, size_bytes, file in self._database.execute(query).fetchall():
            spec = _decode_spec(encoded)
            blob = spec.payload_blob
            is_fetched = size_bytes is not None
            if file and not self._is_whole(file, size_bytes, blob.sha256 if blob and was_cut else ""):
                gone.append((seq,))
                calls_gone.append((spec.task_id,))
                if starts:
                    dropped.append((seq,))
                    continue
                is_fetched = False
            elif file:
                self._names[_payload_of(seq)] = file
            answer_key = answer_keys.get(spec.task_id, b"")
            needs = graphs.pop(seq, None)
            graph = self._graph(seq, spec, needs) if needs is not None and is_fetched else None
            retry = retries.pop(seq, None)
            listed = files.pop(seq, None)
            tasks.append(
                SpooledTask(
                    seq,
                    spec,
                    attempt,
                    at,
                    starts,
                    is_fetched,
                    None,
                    answer_key,
                    retry=retry,
                    graph=graph,
                    files=None if listed is None or not is_fetched else _decode_files(listed),
                )
            )
        query = "SELECT seq, attempt, at, spec, end, size_bytes, file FROM results LEFT JOIN bodies USING (seq)"
        for seq, attempt, at, encoded, stored, size_bytes, file in self._database.execute(query).fetchall():
            result = _decode_result(stored)
            if file:
                if not self._is_whole(file, size_bytes, result.sha256 if was_cut else ""):
                    gone.append((seq,))
                    dropped.append((seq,))
                    continue
                self._names[_result_of(seq)] = file
            spec = _decode_spec(encoded)
            listed = files.pop(seq, None)
            answer_key = b"" if listed is None else answer_keys.get(spec.task_id, b"")
            to_store = None if listed is None else _decode_files(listed)
            tasks.append(SpooledTask(seq, spec, attempt, at, result=result, answer_key=answer_key, files=to_store))
        tasks.sort(key=lambda task: task.seq)
        if gone:
            _logger.warning(
                "%d large arguments or results are missing or damaged in %s (a power cut, or a backup without that "
                "folder): %d tasks are given back to the cloud, arguments of the others are fetched again",
                len(gone),
                self._files,
                len(dropped),
            )
        self._tidy("DELETE FROM bodies WHERE seq = ?", gone)
        self._tidy("DELETE FROM sealed_calls WHERE task_id = ?", calls_gone)
        self._tidy("DELETE FROM tasks WHERE seq = ?", dropped)
        self._tidy("DELETE FROM retries WHERE seq = ?", [(seq,) for seq in retries])
        self._tidy("DELETE FROM graphs WHERE seq = ?", [(seq,) for seq in graphs])
        self._tidy("DELETE FROM files WHERE seq = ?", [(seq,) for seq in files])
        self._forget(dropped)
        if was_cut:
            self._tidy("INSERT OR REPLACE INTO meta VALUES ('boot_id', ?)", [(boot_id,)])
        if self._files is not None:
            for stray in {file.name for file in self._files.iterdir()}.difference(self._names.values()):
                with contextlib.suppress(OSError):  # a folder that a task made, or still open (NFS)
                    (self._files / stray).unlink()
        self._drop_unused_functions(tasks)
        return tasks, {row[0] for row in self._database.execute("SELECT hash FROM functions")}

    def was_opened(self, task_id: str) -> bool:
        """Whether the sealed call of this task was accepted before."""
        return bool(self._database.execute("SELECT 1 FROM sealed_calls WHERE task_id = ?", (task_id,)).fetchone())

    def forget_calls(self, *, before: float) -> None:
        """Forget sealed calls that were accepted before an epoch second: the endpoint opens them no more."""
        ended = "(answer_key IS NULL OR seq NOT IN (SELECT seq FROM tasks UNION SELECT seq FROM files))"
        self._tidy(f"DELETE FROM sealed_calls WHERE at < ? AND {ended}", [(before,)])  # noqa: S608

    def payload(self, task: Task) -> Frame:
        """The arguments of an unfinished task."""
        return self._body(task.seq)

    def payload_to_send(self, task: Task) -> Frame:
        """The same for a worker: from memory, or as a file, which a worker on this machine reads where it is."""
        payload = task.payload
        return self.payload(task) if payload is None or len(payload) > _MAX_ROW_BYTES else payload

    def body(self, task: Task) -> Frame:
        """The result of a task that succeeded."""
        return self._body(task.seq)

    def function(self, function_hash: str) -> bytes:
        """The body of a function."""
        row = self._database.execute("SELECT body FROM functions WHERE hash = ?", (function_hash,)).fetchone()
        return bytes(row[0])

    def signed_functions(self) -> list[FunctionSpec]:
        """The functions that came with a signature, without their bodies."""
        rows = self._database.execute("SELECT hash, name, signature FROM signatures ORDER BY hash")
        return [FunctionSpec(function_hash=row[0], name=row[1], body=0, signature=row[2]) for row in rows]

    def commit(self, write: WriteSpool) -> None:
        """Make the spool's part of a turn durable, all of it or nothing.

        :raises SpoolUnwritable: if the file system takes nothing more. Then nothing was written, and the same turn
            may be written again, with more in it.
        """
        d = write
        self._remove([_result_of(seq) for seq in d.forgotten])  # and the rows with the next commit
        forgotten = [*self._forgotten, *[(seq,) for seq in d.forgotten]]
        once_only = any(not task.is_idempotent for task in d.starts)
        matters = (
            d.functions or d.accepted or d.redelivered or d.fetched or d.starts or d.finished or d.dropped or d.storing
        )
        if not matters and len(forgotten) < _MOST_FORGOTTEN:
            self._forgotten = forgotten
            return  # what a process that dies did not come to forget is reported and recorded once more
        try:
            self._write_files(d)
            with self._durable() if once_only else contextlib.nullcontext():
                self._database.execute("BEGIN IMMEDIATE")
                self._write(d, forgotten)
                if once_only:
                    raised = ("generation", str(self.generation + 1))
                    self._database.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", raised)
                self._database.execute("COMMIT")
        except BaseException as error:
            if self._database.in_transaction:  # a full disk has ended it already
                self._database.execute("ROLLBACK")
            # Their room may be what the next turn needs; they are written again.
            self._remove([which for _, which, body in _bodies(d) if self._is_file(body)])
            if isinstance(error, OSError) or (isinstance(error, sqlite3.Error) and _no_room(error)):
                raise SpoolUnwritable(f"The spool cannot be written: {error}.") from error
            raise
        self._forgotten = []
        self.generation += once_only
        ended = [task.seq for task in (*d.finished, *d.storing)]
        self._remove([_payload_of(seq) for seq in (*ended, *d.dropped)])
        if d.dropped:  # one that was storing its files
            self._remove([_result_of(seq) for seq in d.dropped])

    @contextlib.contextmanager
    def _durable(self) -> Iterator[None]:
        """A commit in here, and all before it, survives a power cut."""
        self._database.execute("PRAGMA synchronous=FULL")
        try:
            yield
        finally:
            if self._database.in_transaction:
                self._database.execute("ROLLBACK")
            self._database.execute("PRAGMA synchronous=NORMAL")

    def _write_files(self, d: WriteSpool) -> None:
        """The large bodies. Those of a commit that fails are written again with the next one."""
        for _, which, body in _bodies(d):
            if self._is_file(body):
                assert self._files is not None
                self._files.mkdir(mode=0o700, exist_ok=True)  # a task may have removed it
                name = self._names[which] = f"{which}.{self._suffix}"
                with open(self._files / name, "wb", buffering=0, opener=_private) as file:
                    view = memoryview(body)
                    while view:
                        view = view[file.write(view) :]

    def _is_file(self, body: Bytes) -> bool:
        return len(body) > _MAX_ROW_BYTES and self._files is not None

    def _write(self, d: WriteSpool, forgotten: list[tuple[int]]) -> None:
        many = self._database.executemany
        finished = {task.seq for task in d.finished}
        storing = [task for task in d.storing if task.kept is not None]
        ended = {*finished, *[task.seq for task in storing]}
        if d.functions:
            functions = [(function.function_hash, function.name, body) for function, body in d.functions]
            many("INSERT OR IGNORE INTO functions VALUES (?, ?, ?)", functions)
            signed = [(each.function_hash, each.name, each.signature) for each, _ in d.functions if each.signature]
            many("INSERT OR REPLACE INTO signatures VALUES (?, ?, ?)", signed)
        if d.accepted:
            many("INSERT INTO tasks VALUES (?, ?, ?, ?, ?)", [_row(t) for t in d.accepted if t.seq not in ended])
        new = {task.seq for task in d.accepted}
        if starts := [(task.starts, task.seq) for task in d.starts if task.seq not in new]:
            many("UPDATE tasks SET starts = ? WHERE seq = ?", starts)
        if d.redelivered:
            attempts = [(task.attempt, task.seq) for task in d.redelivered]
            many("UPDATE tasks SET attempt = ? WHERE seq = ?", attempts)
            many("UPDATE results SET attempt = ? WHERE seq = ?", attempts)
        if ended:
            many("DELETE FROM tasks WHERE seq = ?", [(seq,) for seq in ended])
            written = [
                *[(task, task.result) for task in d.finished if task.result is not None],
                *[(task, task.kept) for task in storing if task.kept is not None],
            ]
            many("INSERT OR REPLACE INTO results VALUES (?, ?, ?, ?, ?)", [_result_row(*each) for each in written])
            # The body of a result that was kept is here already.
            if bodiless := [(t.seq,) for t, result in written if result.body is None and not result.size_bytes]:
                many("DELETE FROM bodies WHERE seq = ?", bodiless)
        if sealed := [(t.task_id, t.seq, t.at, t.answer_key) for t in (*d.accepted, *d.fetched) if t.answer_key]:
            many("INSERT OR REPLACE INTO sealed_calls VALUES (?, ?, ?, ?)", sealed)
        if answered := [(task.task_id,) for task in d.finished if task.answer_key]:
            many("UPDATE sealed_calls SET answer_key = NULL WHERE task_id = ?", answered)
        if d.retried:
            unfinished = [task for task in d.retried if task.stage not in (Stage.FINISHED, Stage.FORGOTTEN)]
            many("INSERT OR REPLACE INTO retries VALUES (?, ?, ?, ?, ?)", [_retry_row(task) for task in unfinished])
            over = [(task.seq,) for task in d.retried if task.stage in (Stage.FINISHED, Stage.FORGOTTEN)]
            many("DELETE FROM retries WHERE seq = ?", over)
        if graphs := [
            (t.seq, _encode(t.graph)) for t in (*d.accepted, *d.fetched) if t.graph and t.seq not in finished
        ]:
            many("INSERT OR REPLACE INTO graphs VALUES (?, ?)", graphs)
        if over := [(task.seq,) for task in (*d.finished, *storing) if task.graph is not None]:
            many("DELETE FROM graphs WHERE seq = ?", over)
        if listed := [
            (t.seq, _encode(t.files)) for t in (*d.accepted, *d.fetched) if t.files and t.seq not in finished
        ]:
            many("INSERT OR REPLACE INTO files VALUES (?, ?)", listed)
        if unlisted := [(task.seq,) for task in d.finished if task.files is not None]:
            many("DELETE FROM files WHERE seq = ?", unlisted)
        bodies = [
            (seq, len(body), *((self._names[which], None) if self._is_file(body) else (None, body)))
            for seq, which, body in _bodies(d)
        ]
        many("INSERT OR REPLACE INTO bodies VALUES (?, ?, ?, ?)", bodies)
        if d.dropped:
            dropped = [(seq,) for seq in d.dropped]
            for table in ("tasks", "results", "bodies", "graphs", "files"):
                many(f"DELETE FROM {table} WHERE seq = ?", dropped)  # noqa: S608
        if forgotten:
            many("DELETE FROM results WHERE seq = ?", forgotten)
            many("DELETE FROM bodies WHERE seq = ?", forgotten)

    def _tidy(self, statement: str, keys: Sequence[tuple[object]]) -> bool:
        """Remove what is not needed any more; on a full disk it stays for now, which does no harm."""
        try:
            self._database.executemany(statement, keys)
        except sqlite3.OperationalError as error:
            if not _no_room(error):
                raise
            return False
        return True

    def _tidy_up(self, statement: str) -> None:
        """Run a statement that frees space; on a full disk there may be no room for that."""
        try:
            self._database.executescript(statement)  # unlike execute, to the end of a PRAGMA that frees page by page
        except sqlite3.OperationalError as error:
            if not _no_room(error):
                raise

    def _number(self, pragma: str) -> int:
        return int(self._database.execute(f"PRAGMA {pragma}").fetchone()[0])

    def _meta(self) -> dict[str, str]:
        return dict(self._database.execute("SELECT key, value FROM meta").fetchall())

    def _graph(self, seq: int, spec: TaskSpec, needs: bytes) -> GraphNeeds:
        """Decode the requirements of a task's graph. If its row is damaged, read the graph again from the task's
        arguments. If these are damaged, too, the graph must not run twice."""
        try:
            return _decode_graph(needs)
        except (msgspec.DecodeError, TypeError) as error:  # TypeError: a column may have another type in SQLite
            damage = f"what the spool has noted of the graph of task {spec.task_id} is damaged ({error})"
        found = read_graph(copy_of(self._body(seq)), spec.options, is_restricted=spec.data_only)
        if isinstance(found, GraphNeeds):
            _logger.warning("%s; it was read again from the task's arguments", damage)
            return found
        _logger.error("%s, and so are the task's arguments: if it has started, it does not run again", damage)
        return GraphNeeds(1, 1, once=True, walltime_s=spec.options.walltime_s, environments=(spec.options.environment,))

    # -- bodies --------------------------------------------------------------------------------------------------------

    def _body(self, seq: int) -> Frame:
        query = "SELECT size_bytes, file, body FROM bodies WHERE seq = ?"
        size_bytes, name, body = self._database.execute(query, (seq,)).fetchone()
        if body is not None:
            return bytes(body)
        assert self._files is not None
        return SharedBytes(MemoryFile(os.open(self._files / name, os.O_RDONLY | os.O_CLOEXEC)), 0, size_bytes)

    def _is_whole(self, name: str, size_bytes: int, sha256: str) -> bool:
        """Whether a file is there with all of its bytes; looked into if a hash is given."""
        assert self._files is not None
        try:
            with (self._files / name).open("rb") as file:
                is_whole = os.fstat(file.fileno()).st_size == size_bytes
                return is_whole and (not sha256 or hashlib.file_digest(file, "sha256").hexdigest() == sha256)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise ConfigurationError(
                f"The spool cannot be read: {error}.",
                hint=f"Make the files of {self._files} readable for the endpoint's user; nothing of them is lost.",
            ) from error

    def _remove(self, bodies: Iterable[str]) -> None:
        """Delete those that are files."""
        for which in self._names.keys() & bodies:
            assert self._files is not None
            with contextlib.suppress(OSError):  # what stays is deleted by the next load
                (self._files / self._names.pop(which)).unlink()

    def _forget(self, keys: Sequence[tuple[int]]) -> bool:
        return all(self._tidy(f"DELETE FROM {table} WHERE seq = ?", keys) for table in ("results", "bodies"))  # noqa: S608

    def _drop_unused_functions(self, tasks: Iterable[SpooledTask]) -> None:
        unfinished = [task.spec for task in tasks if task.result is None]
        needed = {spec.function_hash for spec in unfinished}
        needed.update(callee.function_hash for spec in unfinished for callee in spec.options.callees)
        known = {row[0] for row in self._database.execute("SELECT hash FROM functions")}
        for table in ("functions", "signatures"):
            self._tidy(f"DELETE FROM {table} WHERE hash = ?", [(unused,) for unused in known - needed])  # noqa: S608


def _no_room(error: sqlite3.Error) -> bool:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF in _NO_ROOM  # the rest of the code says more exactly where


def _cannot_open(path: Path | None, error: sqlite3.Error | OSError) -> FarcallError:
    if getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_BUSY:
        return EndpointInUse(f"The spool {path} is open in another process.", hint="Stop that agent first.")
    if path is not None and (isinstance(error, OSError) or _no_room(error)):
        reason = "read only, or not yours" if not os.access(path.parent, os.W_OK) else "full, over its quota, or broken"
        return ConfigurationError(
            f"The spool {path} cannot be written: {error}.",
            hint=f"The file system of {path.parent} is {reason}. Put it right, or set FARCALL_HOME to another place.",
        )
    return ConfigurationError(
        f"The spool {path} cannot be read: {error}.",
        hint="It is damaged. `farcall-endpoint start NAME --new-spool` keeps it and starts with an empty one.",
    )


def _boot_id() -> str:
    """Another one after each start of the machine, which may have lost what was not on its disk."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return new_id()  # not known: it counts as started since


def _payload_of(seq: int) -> str:
    return f"{seq}.payload"


def _result_of(seq: int) -> str:
    return f"{seq}.result"


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _bodies(d: WriteSpool) -> Iterator[tuple[int, str, Bytes]]:
    """The bodies of a turn: the task's number, which of its bodies it is, its bytes."""
    ended = {task.seq for task in (*d.finished, *d.storing)}
    for task in (*d.accepted, *d.fetched):
        if task.payload is not None and task.seq not in ended:
            yield task.seq, _payload_of(task.seq), task.payload
    for task in d.finished:
        if task.result is not None and task.result.body is not None:
            yield task.seq, _result_of(task.seq), task.result.body
    for task in d.storing:
        if task.kept is not None and task.kept.body is not None:
            yield task.seq, _result_of(task.seq), task.kept.body


def _row(task: Task) -> tuple[object, ...]:
    return task.seq, task.attempt, task.starts, task.at, _encode(task.spec)


def _retry_row(task: Task) -> tuple[object, ...]:
    return task.seq, task.retries_used, task.retry_at, task.starts_at_retry, task.earlier_run_s


def _result_row(task: Task, result: TaskResult) -> tuple[object, ...]:
    stored = StoredResult(
        result.state,
        result.error,
        result.size_bytes,
        result.sha256,
        result.started_at,
        result.ended_at,
        result.exhausted,
        result.details,
    )
    return task.seq, task.attempt, task.at, _encode(task.spec), _encode(stored)
