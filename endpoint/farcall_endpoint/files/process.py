"""Transfer process: one for each agent, so that the agent never waits for storage or for a file system.

``python -m farcall_endpoint.files.process``: its standard input is a socket to the agent. First come the settings,
which may have credentials, then orders; reports go back. Each transfer has a thread, as it may hang for ever; one
thread makes directories of tasks, and one removes them, which takes as long as tasks like. The thread that reads orders
does nothing else, so it answers while others work or hang.

When its agent is gone, for whatever reason, the process ends; what it leaves half done is removed at the next start.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import errno
import functools
import hashlib
import logging
import os
import queue
import resource
import select
import signal
import socket
import sqlite3
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec

from farcall_common.errors import ErrorRecord
from farcall_common.file_arguments import shown
from farcall_common.staged_files import FileUse
from farcall_endpoint.contracts import outcomes
from farcall_endpoint.files import orders
from farcall_endpoint.files.access import Access
from farcall_endpoint.files.cache import Cache
from farcall_endpoint.files.movers import BATCH_SCHEMES, BatchMover, Found, Move, MoveCancelled, MoveError, Mover
from farcall_endpoint.files.movers.endpoint import SCHEME, EndpointMover, PieceRequests
from farcall_endpoint.files.orders import Order, Report, frame, frames_of
from farcall_endpoint.files.places import PlaceTaken, StagedDirectories, files_directory
from farcall_endpoint.files.settings import TransferSettings

_DEATH_SIGNAL: Final = 1
"""PR_SET_PDEATHSIG."""
_MOST_THREADS: Final = 400
_MOST_THREADS_OF_ONE: Final = 120
"""Maximum threads of one payer. If its server never answers and they hang, other payers' files still move."""
_MOST_BATCHES: Final = 64
_MOST_BATCHES_OF_ONE: Final = 16
"""Maximum batches at a time, of all payers and of each payer. Files that come meanwhile move together afterwards."""
_PROGRESS_S: Final = 0.2
_CACHE_USE_S: Final = 1.0
"""Shortest times between two reports, of a transfer and of the cache."""
_NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_decode: Final = msgspec.msgpack.Decoder(Order).decode


class Transfers:
    """Performs orders.

    :param report: sends a report to the agent; called by several threads.
    """

    def __init__(self, settings: TransferSettings, report: Callable[[Report], None]) -> None:
        self._report = report
        self._cache = Cache(Path(settings.directory), budget_bytes=settings.cache_bytes)
        self._access = Access(settings, unlink=self._cache.unlink)
        self._working_dir = Path(settings.working_dir)
        self._places = StagedDirectories(self._working_dir)
        self._lock = threading.Lock()
        self._threads: dict[int, threading.Event] = {}  # by transfer: whether it is cancelled
        self._running: collections.Counter[str] = collections.Counter()  # threads, by payer
        self._linked: dict[str, dict[str, int]] = {}  # bytes by task and content
        self._on_way: dict[int, tuple[orders.Fetch, int]] = {}  # and the bytes that the storage has said
        self._to_make: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._to_remove: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._pieces = PieceRequests(report)
        self._waiting: dict[tuple[str, str], list[orders.Fetch | orders.Store]] = {}  # by both
        self._batches: collections.Counter[str] = collections.Counter()  # on their way, by payer
        self._cache_use_at = 0.0
        for chores in (self._to_make, self._to_remove):
            threading.Thread(target=_do_chores, args=(chores,), daemon=True).start()

    def perform(self, order: Order) -> None:
        """Begin with an order."""
        match order:
            case orders.Fetch() | orders.Store():
                self._begin(order)
            case orders.Cancel(number=number):
                with self._lock:
                    cancelled = self._threads.get(number)
                if cancelled is not None:
                    cancelled.set()
            case orders.Make():
                self._to_make.put(lambda: self._make(order))
            case orders.Remove():
                self._to_remove.put(lambda: self._remove(order))
            case orders.Release():
                self._to_remove.put(lambda: self._release(order))
            case orders.Tidy():
                self._to_make.put(lambda: self._tidy(order))
            case orders.Piece():
                self._pieces.answered(order)
            case orders.Ping():
                self._report(orders.Alive())

    # -- directories ---------------------------------------------------------------------------------------------------

    def _make(self, order: orders.Make) -> None:
        problem: ErrorRecord | None = None
        try:
            for url in order.writes:  # now, and not after hours of work
                self._access.check(order.submitter, url, write=True)
            with self._lock:
                self._linked[order.task_id] = {}
            self._places.make(order.task_id, order.submitter, order.writes)
        except MoveError as error:
            problem = error.record
        except PlaceTaken as error:
            path = files_directory(self._working_dir, order.task_id, order.submitter)
            problem = outcomes.file_place_taken("its files", path, error.strerror)
        except OSError as error:
            problem = outcomes.files_no_room(f"their directory cannot be made: {error.strerror}")
        self._report(orders.Made(order.task_id, None if problem is None else problem.to_json()))

    def _remove(self, order: orders.Remove) -> None:
        self._places.remove(order.task_id, order.submitter, self._cache.unlink)
        with self._lock:
            self._linked.pop(order.task_id, None)
        self._report(orders.Removed(order.task_id))

    def _release(self, order: orders.Release) -> None:
        self._places.remove_read(order.task_id, order.submitter, self._cache.unlink)
        self._report(orders.Released(order.task_id))

    def _tidy(self, order: orders.Tidy) -> None:
        self._places.set_aside(order.task_ids)  # before the directory of another task is made

        def remove() -> None:
            self._places.remove_aside(self._cache.unlink)
            self._report(orders.Tidied())

        self._to_remove.put(remove)

    # -- transfers -----------------------------------------------------------------------------------------------------

    def _begin(self, order: orders.Fetch | orders.Store) -> None:
        cancelled = threading.Event()
        with self._lock:
            self._threads[order.number] = cancelled
        if order.use.url.partition("://")[0] in BATCH_SCHEMES:
            with self._lock:
                self._waiting.setdefault((order.submitter, order.share_of), []).append(order)
        elif self._running[order.share_of] >= _MOST_THREADS_OF_ONE:
            problem = f"{_MOST_THREADS_OF_ONE} earlier transfers of the same submitter hang"
            refused = outcomes.file_unreachable(shown(order.use.url), problem)
            self._end(order, orders.Failed(order.number, refused.to_json()))
        else:
            self._start(order.share_of, lambda: self._transfer(order, cancelled))

    def begin_batch(self) -> None:
        """Begin to move the files that move together, after :meth:`perform` got all orders that have come. Submitters
        have separate batches: a transfer may delay all its files, and its errors may name them."""
        begun: list[tuple[str, list[orders.Fetch | orders.Store]]] = []
        with self._lock:
            for whose in list(self._waiting):
                _, payer = whose
                if self._batches[payer] < _MOST_BATCHES_OF_ONE and self._batches.total() < _MOST_BATCHES:
                    self._batches[payer] += 1
                    begun.append((payer, self._waiting.pop(whose)))
        for payer, batch in begun:
            self._start(payer, functools.partial(self._move_batch, payer, batch))

    def _start(self, payer: str, work: Callable[[], None]) -> None:
        with self._lock:
            if self._running.total() >= _MOST_THREADS:
                sys.stderr.write(f"{_MOST_THREADS} transfers hang\n")
                os._exit(1)
            self._running[payer] += 1
        threading.Thread(target=work, daemon=True).start()

    def _transfer(self, order: orders.Fetch | orders.Store, cancelled: threading.Event) -> None:
        self._attempt(
            order,
            lambda: self._fetch(order, cancelled) if isinstance(order, orders.Fetch) else self._store(order, cancelled),
        )
        with self._lock:
            self._stopped(order.share_of)

    def _stopped(self, payer: str) -> None:
        self._running[payer] -= 1
        if not self._running[payer]:
            del self._running[payer]

    def _attempt(self, order: orders.Fetch | orders.Store, work: Callable[[], Report | None]) -> bool:
        """Do something for a transfer, which has ended if that fails or returns a report. True if it has not."""
        try:
            report = work()
            if report is None:
                return True
        except MoveCancelled:
            report = None
        except Exception as error:  # noqa: BLE001 - a defect, perhaps of a library: it is the end of one file only
            report = self._failure(order, error)
        self._end(order, report)
        return False

    def _end(self, order: orders.Fetch | orders.Store, report: Report | None) -> None:
        """A transfer has ended, if it has not ended before."""
        with self._lock:
            self._on_way.pop(order.number, None)
            if self._threads.pop(order.number, None) is None:
                return
            now = time.monotonic()
            is_due = now >= self._cache_use_at
            if is_due:
                self._cache_use_at = now + _CACHE_USE_S
        if is_due:
            self._report(orders.CacheUse(self._cache.used_bytes, self._cache.budget_bytes))
        if report is not None:
            self._report(report)

    def _failure(self, order: orders.Fetch | orders.Store, error: Exception) -> Report:
        record = self._record(shown(order.use.url), error)
        if record.code != outcomes.files_no_room.code:
            return orders.Failed(order.number, record.to_json())
        record = self._too_large(order.number) or record
        missing_bytes = error.missing_bytes if isinstance(error, MoveError) else 0
        budget_bytes = self._cache.budget_bytes if missing_bytes else 0
        return orders.Failed(order.number, record.to_json(), missing_bytes, budget_bytes, self._cache.drafts())

    def _too_large(self, number: int) -> ErrorRecord | None:
        """Why there can be no room for a file: its task alone has more than all of it."""
        with self._lock:
            if number not in self._on_way:
                return None
            needed_bytes = min(
                sum(self._linked.get(task_id, {}).values())
                + sum(size_bytes for each, size_bytes in self._on_way.values() if task_id in each.task_ids)
                for task_id in self._on_way[number][0].task_ids
            )
        if needed_bytes <= self._cache.budget_bytes:
            return None
        return outcomes.files_too_large(needed_bytes, self._cache.budget_bytes)

    def _record(self, url: str, error: Exception) -> ErrorRecord:
        if isinstance(error, MoveError):
            return error.record
        if isinstance(error, sqlite3.OperationalError):
            self._cache.make_room()
            return outcomes.files_no_room(f"{url}: the index of the endpoint's copies: {error}")
        if not isinstance(error, OSError):
            traceback.print_exception(error)
            return outcomes.file_unreachable(url, f"{type(error).__name__}: {error}")
        if error.errno in _NO_ROOM:
            self._cache.make_room()
            return outcomes.files_no_room(f"{url}: {error.strerror}")
        return outcomes.file_unreachable(url, f"the endpoint's own file system: {error.strerror or error}")

    def _fetch(self, order: orders.Fetch, cancelled: threading.Event) -> Report:
        use, submitter = order.use, order.submitter
        if use.sha256 and (size_bytes := self._link(order, use.sha256)) is not None:
            return orders.Fetched(order.number, size_bytes, use.sha256, cached=True)
        mover = self._mover(order, cancelled)
        is_again = False
        while True:
            found = mover.stat(use.url)
            _check_size(use, found.size_bytes)
            sha256 = found.sha256 or self._cache.known(submitter, use.url, found.version)
            if sha256 and not use.sha256 and (size_bytes := self._link(order, sha256)) is not None:
                return orders.Fetched(order.number, size_bytes, sha256, cached=True)
            try:
                sha256, size_bytes = self._copy(order, mover, found, cancelled)
            except MoveError as error:
                if error.record.code != outcomes.file_changed.code or is_again:
                    raise
                is_again = True
                continue
            return orders.Fetched(order.number, size_bytes, sha256, cached=False)

    def _mover(self, order: orders.Fetch, cancelled: threading.Event) -> Mover:
        """Return the mover of a file. For a file of another endpoint, that endpoint decides who may read it."""
        if order.use.url.startswith(f"{SCHEME}://"):
            return EndpointMover(
                self._pieces, submitter=order.submitter, task_ids=order.task_ids, cancelled=cancelled.is_set
            )
        return self._access.mover(order.submitter, order.use.url, write=False)

    def _copy(self, order: orders.Fetch, mover: Mover, found: Found, cancelled: threading.Event) -> tuple[str, int]:
        """Copy a file from its storage to the cache and to its tasks; its SHA-256 and its size."""
        self._begins(order, found)
        with self._cache.draft(order.submitter, order.number, found.size_bytes, payer=order.payer) as draft:
            progress = self._progress(order.number)

            def report(size_bytes: int) -> None:
                self._cache.grown(draft, size_bytes)
                progress(size_bytes)

            sha256 = mover.fetch(order.use.url, draft, found, report, cancelled.is_set)
            return sha256, self._keep(order, draft, found, sha256)

    def _begins(self, order: orders.Fetch, found: Found) -> None:
        if found.size_bytes is not None:
            with self._lock:
                self._on_way[order.number] = order, found.size_bytes

    def _keep(self, order: orders.Fetch, draft: Path, found: Found, sha256: str) -> int:
        """A draft is complete: it becomes a copy, with links at its tasks; its size."""
        use = order.use
        size_bytes = draft.stat().st_size
        _check_size(use, size_bytes)
        if use.sha256 and sha256 != use.sha256:
            raise MoveError(outcomes.file_checksum(shown(use.url), use.sha256, sha256))
        self._cache.add(order.submitter, draft, sha256)
        self._cache.remember(order.submitter, use.url, found.version, sha256)
        if self._link(order, sha256) is None:
            raise MoveError(outcomes.files_no_room("the copy was removed before its task got it"))
        return size_bytes

    def _link(self, order: orders.Fetch, sha256: str) -> int | None:
        """Give a copy to the tasks that wait for it; its size, or None if there is no such copy."""
        with self._cache.using(order.submitter, sha256) as found:
            if found is None:
                return None
            copy, size_bytes = found
            _check_size(order.use, size_bytes)
            url = order.use.url
            for task_id in order.task_ids:
                try:
                    self._places.link(copy, task_id, order.submitter, url)
                except PlaceTaken as error:  # it stays, so that another try would do no more
                    path = self._places.path(task_id, order.submitter, url, "r")
                    raise MoveError(outcomes.file_place_taken(shown(url), path, error.strerror)) from error
            with self._lock:
                self._on_way.pop(order.number, None)
                for task_id in self._linked.keys() & order.task_ids:
                    self._linked[task_id][sha256] = size_bytes
        return size_bytes

    def _store(self, order: orders.Store, cancelled: threading.Event) -> Report:
        mover = self._access.mover(order.submitter, order.use.url, write=True)
        with self._written(order) as (source, size_bytes):
            found = mover.store(source, order.use.url, self._progress(order.number), cancelled.is_set)
        return orders.Stored(order.number, size_bytes, found.sha256)

    @contextlib.contextmanager
    def _written(self, order: orders.Store) -> Iterator[tuple[Path, int]]:
        """Open a file that a task has written, and yield the path of the open file and its size."""
        try:
            descriptor = self._places.open_written(order.task_id, order.submitter, order.use.url)
        except FileNotFoundError as error:
            path = self._places.path(order.task_id, order.submitter, order.use.url, "w")
            raise MoveError(outcomes.file_not_written(shown(order.use.url), path)) from error
        try:
            yield Path(f"/proc/self/fd/{descriptor}"), os.fstat(descriptor).st_size
        finally:
            os.close(descriptor)

    def _move_batch(self, payer: str, batch: Sequence[orders.Fetch | orders.Store]) -> None:
        """Move files of a submitter by a service that takes many in one order."""
        by_mover: dict[BatchMover, list[orders.Fetch | orders.Store]] = {}
        for order in batch:

            def find(order: orders.Fetch | orders.Store = order) -> None:
                if self._threads[order.number].is_set():
                    raise MoveCancelled
                if not self._is_here(order):
                    write = isinstance(order, orders.Store)
                    mover = self._access.batch_mover(order.submitter, order.use.url, write=write)
                    by_mover.setdefault(mover, []).append(order)

            self._attempt(order, find)
        for mover, some in by_mover.items():
            try:
                self._move_with(mover, some)
            except Exception as error:  # noqa: BLE001 - a defect, as in _attempt: files of other movers move
                for order in some:
                    self._end(order, self._failure(order, error))
        with self._lock:
            self._stopped(payer)
            self._batches[payer] -= 1
            if not self._batches[payer]:
                del self._batches[payer]
        self.begin_batch()

    def _is_here(self, order: orders.Fetch | orders.Store) -> bool:
        """Whether the cache has a file that is named by its content; then its transfer has ended."""
        if isinstance(order, orders.Store) or not order.use.sha256:
            return False
        size_bytes = self._link(order, order.use.sha256)
        if size_bytes is None:
            return False
        self._end(order, orders.Fetched(order.number, size_bytes, order.use.sha256, cached=True))
        return True

    def _move_with(self, mover: BatchMover, batch: Sequence[orders.Fetch | orders.Store]) -> None:
        found = mover.stat_many({each.use.url for each in batch if isinstance(each, orders.Fetch)})
        moves: dict[int, tuple[orders.Fetch | orders.Store, Move]] = {}
        with contextlib.ExitStack() as files:
            for order in batch:

                def prepare(order: orders.Fetch | orders.Store = order) -> Report | None:
                    if isinstance(order, orders.Store):
                        path, size_bytes = files.enter_context(self._written(order))
                        there = Found(size_bytes)
                    else:
                        there = _found(found[order.use.url])
                        _check_size(order.use, there.size_bytes)
                        sha256 = there.sha256 or self._cache.known(order.submitter, order.use.url, there.version)
                        if sha256 and not order.use.sha256 and (linked := self._link(order, sha256)) is not None:
                            return orders.Fetched(order.number, linked, sha256, cached=True)
                        self._begins(order, there)
                        draft = self._cache.draft(order.submitter, order.number, there.size_bytes, payer=order.payer)
                        path = files.enter_context(draft)
                    moves[order.number] = order, Move(order.number, order.use.url, order.use.mode, path, there)
                    return None

                self._attempt(order, prepare)
            progress = {number: self._progress(number) for number in moves}

            def done(number: int, result: Found | MoveError) -> None:
                order, move = moves.pop(number)
                self._attempt(order, lambda: self._moved(order, move, _found(result)))

            def is_cancelled(number: int) -> bool:
                cancelled = self._threads.get(number)
                return cancelled is None or cancelled.is_set()

            if moves:
                mover.run(
                    [move for _, move in moves.values()],
                    lambda number, size_bytes: progress[number](size_bytes),
                    done,
                    is_cancelled,
                )
            for order, _ in moves.values():  # those that are not needed any more
                self._end(order, None)

    def _moved(self, order: orders.Fetch | orders.Store, move: Move, there: Found) -> Report:
        with move.path.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        if isinstance(order, orders.Store):
            assert move.found.size_bytes is not None
            return orders.Stored(order.number, move.found.size_bytes, sha256)
        if there.version != move.found.version:
            raise MoveError(outcomes.file_changed(shown(order.use.url)))
        return orders.Fetched(order.number, self._keep(order, move.path, there, sha256), sha256, cached=False)

    def _progress(self, number: int) -> Callable[[int], None]:
        """Takes the bytes of a transfer, and reports them now and then."""
        next_at = time.monotonic() + _PROGRESS_S

        def report(size_bytes: int) -> None:
            nonlocal next_at
            if (now := time.monotonic()) >= next_at:
                next_at = now + _PROGRESS_S
                self._report(orders.Progress(((number, size_bytes),)))

        return report


def _found(result: Found | MoveError) -> Found:
    if isinstance(result, MoveError):
        raise result
    return result


def _check_size(use: FileUse, size_bytes: int | None) -> None:
    if use.size_bytes is not None and size_bytes is not None and size_bytes != use.size_bytes:
        raise MoveError(outcomes.file_size(shown(use.url), size_bytes, use.size_bytes))


def _do_chores(chores: queue.SimpleQueue[Callable[[], None]]) -> None:
    while True:
        chores.get()()


def _end_process(failure: threading.ExceptHookArgs) -> None:
    """End this process, as work failed in an unforeseen way; the agent starts another one, and tries it again."""
    traceback.print_exception(failure.exc_value)
    os._exit(1)


def _received(agent: socket.socket) -> bytes:
    """Receive data from the agent; empty when the agent is gone."""
    try:
        return agent.recv(2**16)
    except ConnectionResetError:  # it has not read all that it was sent
        return b""


def main() -> None:
    """Serve an agent until it is gone."""
    ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)  # also if it is stopped then
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the agent gets them too, and ends this process
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # all files of a batch that tasks have written are open
    threading.excepthook = _end_process
    # To standard error, which is the agent's. Not those of libraries: they log URLs with signatures.
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("farcall_endpoint").setLevel(logging.INFO)
    lock = threading.Lock()
    with socket.socket(fileno=os.dup(0)) as agent:

        def report(message: Report) -> None:
            with lock, contextlib.suppress(OSError):  # the agent is gone, and so is this process in a moment
                agent.sendall(frame(message))

        transfers: Transfers | None = None
        data = bytearray()
        while received := _received(agent):
            data += received
            for message in frames_of(data):
                if transfers is None:
                    settings = msgspec.msgpack.decode(message, type=TransferSettings)
                    try:
                        transfers = Transfers(settings, report)
                    except (OSError, sqlite3.Error) as error:
                        report(orders.Unusable(f"{settings.directory} cannot be used: {error}"))
                        os._exit(1)
                    report(orders.Alive())
                else:
                    transfers.perform(_decode(message))
            if transfers is not None and not select.select([agent], [], [], 0)[0]:
                transfers.begin_batch()
    os._exit(0)  # threads may hang


if __name__ == "__main__":
    main()
