"""Plan of transfers: which files of which tasks are copied when, and when a task has all of its files. No I/O.

A file that several tasks of a submitter wait for is looked up and fetched once. What is asked for while a look-up is on
its way waits for the next one: the file may have changed since. Instants are epoch seconds.
"""

from __future__ import annotations

import collections
import dataclasses
import heapq
import itertools
import math
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, Literal

import msgspec

from farcall_common.backoff import Backoff
from farcall_common.errors import DeserializationError, ErrorRecord
from farcall_common.fairness import FairQueue
from farcall_common.file_arguments import place_of, shown
from farcall_common.staged_files import FileUse, unpack_files
from farcall_common.staging import FILES, IN, MAX_FILES_SHOWN, OUT
from farcall_endpoint.contracts import outcomes
from farcall_endpoint.contracts.agent_manager import NodeFile
from farcall_endpoint.files import orders
from farcall_endpoint.files.orders import Order, Report, taken_bytes
from farcall_endpoint.files.room import Room
from farcall_endpoint.host.shared_memory import Bytes

MOST_ROWS: Final = 100
"""Maximum rows of tasks in a report."""
_MOST_ACTIVE: Final = 20_000
"""Maximum files of tasks that are staged at a time, as each takes memory here. A submitter without any such task may
always begin with one."""
_MOST_TAKEN: Final = 96
"""Maximum transfers at a time: a submitter without any may begin with one although others have all ``max_transfers``.
The process has more threads than that."""
_TRIES: Final = 5
_FETCH_RETRY_S: Final = 120.0
"""Time to retry to get a file after temporary failures, such as a network outage."""
_STORE_RETRY_S: Final = 900.0
"""Time to retry to store a file after temporary failures. A lost file would be a task's lost work."""
_FIRST_WAIT_S: Final = 0.5
_LONGEST_WAIT_S: Final = 30.0
_GAVE_WAY: Final = "there is no room for its files, while those of others need it"
STAGED: Final = frozenset({"az", "gs", "http", "https", "s3"})
_MISSING: Final = {
    "globus": "it has no Globus collection (files.globus)",
    "endpoint": "an Engine has no deployment; files of other endpoints need one",
}
"""Reasons why an endpoint cannot copy files of a known scheme."""

Direction = Literal["staging-in", "staging-out"]


# -- the list of a task ------------------------------------------------------------------------------------------------


class FileList(msgspec.Struct, frozen=True, array_like=True):
    """Staged files of a task, as the agent and the spool keep them. Most tasks have few files, but many tasks may have
    thousands each: the list stays packed until the task's turn.

    :param packed: the files that are staged, each with its number in the task's list; see :meth:`uses`.
    :param reads, writes: number of files to read and to write.
    """

    packed: bytes
    reads: int = 0
    writes: int = 0

    def uses(self) -> list[tuple[int, FileUse]]:
        """The files that are staged."""
        return _decode(zlib.decompress(self.packed)) if self.packed else []


_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(list[tuple[int, FileUse]]).decode


def read_files(
    payload: Bytes, *, schemes: frozenset[str] = STAGED, refusal: str = "", most_bytes: int | None = None
) -> tuple[FileList, memoryview] | ErrorRecord:
    """The files of a payload with a list of them, and what is behind the list; or why the task cannot run.

    :param schemes: of the URLs that this endpoint can move.
    :param refusal: why it stages no files at all; empty if it does.
    :param most_bytes: room for the files of one task; None if unknown.
    """
    try:
        uses, rest = unpack_files(payload)
    except DeserializationError as error:
        return outcomes.files_invalid(error.record.message)
    staged = []
    needed_bytes = 0
    for number, use in enumerate(uses):
        scheme = use.url.partition("://")[0]
        if scheme == "file":
            continue  # the worker opens it
        if refusal:
            return outcomes.file_unsupported(shown(use.url), refusal)
        if scheme not in schemes:
            return outcomes.file_unsupported(shown(use.url), _MISSING.get(scheme, "it does not know the scheme"))
        if use.mode == "w" and scheme in ("http", "https", "endpoint"):
            return outcomes.file_unsupported(shown(use.url), f"{scheme}:// cannot be written")
        if scheme == "http" and not use.sha256:
            return outcomes.file_unsupported(
                shown(use.url), "http:// needs sha256, because others on the way could change the file"
            )
        staged.append((number, use))
        needed_bytes += use.size_bytes or 0
    if most_bytes is not None and needed_bytes > most_bytes:
        return outcomes.files_too_large(needed_bytes, most_bytes)
    writes = sum(use.mode == "w" for _, use in staged)
    packed = zlib.compress(_encode(staged), 1) if staged else b""
    return FileList(packed, len(staged) - writes, writes), rest


def with_rows(details: dict[str, Any] | None, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The details of a result, with files that moved."""
    known = (details or {}).get(FILES, [])
    return {**(details or {}), FILES: [*known, *rows][:MAX_FILES_SHOWN]}


# -- transfers ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(slots=True, eq=False)
class _Staged:
    """A task whose files move. ``number``: of its payer's, those that came before have lower ones. ``left``: the
    transfers of files that are not there yet, by their number in the list.
    ``since``: when it began."""

    task_id: str
    submitter: str
    files: FileList
    direction: Direction
    is_sealed: bool
    since: float
    payer: str = ""
    number: int = 0
    is_active: bool = False
    is_making: bool = False
    left: dict[int, _Transfer] = dataclasses.field(default_factory=dict)
    done: int = 0
    done_bytes: int = 0
    total_bytes: int | None = 0
    problem: str = ""
    rows: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    contents: list[NodeFile] = dataclasses.field(default_factory=list)

    @property
    def share_of(self) -> str:
        """The identity for which its files count."""
        return self.payer or self.submitter

    @property
    def count(self) -> int:
        """The files to move."""
        return self.files.reads if self.direction == IN else self.files.writes


@dataclasses.dataclass(slots=True, eq=False)
class _Transfer:
    """A file that waits or is on its way, for these tasks and their numbers of it. ``late``: those that came after its
    look-up began. ``started_at``: None while it waits, in the queue if ``is_queued``. ``failed_at``: for the first
    time, since it succeeded last. ``missing_bytes``: for which there was no room when it was tried last."""

    number: int
    submitter: str
    use: FileUse
    backoff: Backoff
    payer: str = ""
    tasks: list[tuple[_Staged, int]] = dataclasses.field(default_factory=list)
    late: list[tuple[_Staged, int]] = dataclasses.field(default_factory=list)
    started_at: float | None = None
    failed_at: float | None = None
    heard_at: float = 0.0
    bytes_done: int = 0
    missing_bytes: int = 0
    is_queued: bool = False

    @property
    def share_of(self) -> str:
        """The identity for which it counts."""
        return self.payer or self.submitter


@dataclasses.dataclass(frozen=True, slots=True)
class FilesMoved:
    """The files of a task are all there, or all stored; or why not.

    :param rows: what the details of its result have of the first hundred files.
    :param contents: of the files that it reads, where nodes keep copies.
    """

    task_id: str
    direction: Direction
    error: ErrorRecord | None = None
    rows: Sequence[dict[str, Any]] = ()
    contents: Sequence[NodeFile] = ()


class Staging:
    """All transfers of an agent. What has changed is noted in ``orders``, ``outcomes``, ``unstaged`` and ``failures``;
    their taker clears them.

    :param max_transfers: at a time; those of ``batch_schemes`` do not count, their service has its own limits.
    :param silence_s: a transfer without progress for so long fails, one that takes longer than ``limit_s`` in all, too.
    :param reads_endpoints: whether files of other endpoints can be requested.
    :param refusal: why no files are staged; empty if they are.
    :param most_bytes: room for the files of one task; None if unknown.
    :param for_nodes: whether nodes keep copies.
    :param jitter: returns random numbers in [0, 1), for the waits before retries.
    """

    def __init__(
        self,
        *,
        max_transfers: int = 8,
        silence_s: float = 300.0,
        limit_s: float | None = None,
        batch_schemes: frozenset[str] = frozenset(),
        reads_endpoints: bool = False,
        refusal: str = "",
        most_bytes: int | None = None,
        for_nodes: bool = False,
        jitter: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._max_transfers = max_transfers
        self._silence_s = silence_s
        self._limit_s = limit_s
        self._batch_schemes = batch_schemes
        self._schemes = STAGED | batch_schemes | ({"endpoint"} if reads_endpoints else set())
        self._refusal = refusal
        self._most_bytes = most_bytes
        self._for_nodes = for_nodes
        self._jitter = jitter
        self._tasks: dict[str, _Staged] = {}
        #: By payer; those whose files are stored need no room, and wait for none.
        self._waiting: dict[Direction, dict[str, collections.deque[_Staged]]] = {IN: {}, OUT: {}}
        self._active: collections.Counter[str] = collections.Counter()  # files, by payer
        self._copies: dict[tuple[str, FileUse], _Transfer] = {}  # of files that are read
        self._by_number: dict[int, _Transfer] = {}
        self._queue: FairQueue[_Transfer] = FairQueue()
        self._batches: list[_Transfer] = []
        self._on_way: dict[int, _Transfer] = {}
        self._taken = 0  # of these, those that came from the queue
        self._retries: list[tuple[float, int]] = []
        self._numbers = itertools.count(1)
        self._task_numbers = itertools.count(1)
        self._unstaged: dict[str, int] = {}  # numbers, by task
        self._room = Room()
        self._removing: dict[str, str] = {}  # submitters, by task
        self._tidying: orders.Tidy | None = None
        self._losses = 0  # of processes that have not reported anything
        self._now = 0.0
        #: Instructions for the transfer process.
        self.orders: list[Order] = []
        #: What has become of tasks.
        self.outcomes: list[FilesMoved] = []
        #: Tasks without a worker whose files are not there any more, as others need the room.
        self.unstaged: list[str] = []
        #: For the log: what failed, one line for each file.
        self.failures: list[str] = []

    # -- what there is -------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """How many tasks wait for files to move."""
        return len(self._tasks)

    @property
    def is_busy(self) -> bool:
        """Whether there is something for :meth:`tick`, or for the taker of what has changed."""
        return bool(self._tasks or self.orders or self.outcomes or self.unstaged or self.failures)

    def read(self, payload: Bytes) -> tuple[FileList, memoryview] | ErrorRecord:
        """See :func:`read_files`."""
        return read_files(payload, schemes=self._schemes, refusal=self._refusal, most_bytes=self._most_bytes)

    def refused(self, files: FileList) -> ErrorRecord | None:
        """Why the files of a task that came before are not staged any more; None if they are."""
        if not self._refusal or not (files.reads or files.writes):
            return None
        urls = [shown(use.url) for _, use in files.uses()[:1]]
        return outcomes.file_unsupported("".join(urls), self._refusal)

    def report(self) -> list[dict[str, Any]]:
        """The tasks whose files move, the oldest first. Of sealed calls no URL."""
        moving: dict[str, tuple[int, str]] = {}
        for transfer in self._on_way.values():
            for task, _ in transfer.tasks:
                former_bytes, _ = moving.get(task.task_id, (0, ""))
                moving[task.task_id] = former_bytes + transfer.bytes_done, transfer.use.url
        rows = []
        for task in itertools.islice(self._tasks.values(), MOST_ROWS):
            bytes_moving, url = moving.get(task.task_id, (0, ""))
            row: dict[str, Any] = {
                "task_id": task.task_id,
                "state": task.direction,
                "bytes": task.done_bytes + bytes_moving,
                "files": task.count,
                "files_done": task.done,
                "since": task.since,
            }
            if task.total_bytes:
                row["total"] = task.total_bytes
            if not task.is_sealed:
                row |= {"url": shown(url)} if url else {}
                row |= {"problem": task.problem} if task.problem else {}
            rows.append(row)
        return rows

    def next_deadline(self) -> float | None:
        """When :meth:`tick` may have something to do."""
        deadlines = [self._retries[0][0]] if self._retries else []
        if (at := self._room.next_deadline(self._now)) is not None:
            deadlines.append(at)
        deadlines += [self._due_at(each) for each in self._on_way.values()]
        return min(filter(math.isfinite, deadlines), default=None)

    def _due_at(self, transfer: _Transfer) -> float:
        assert transfer.started_at is not None
        # A file of a batch may be silent while others of it move: its mover has the limit.
        due_at = math.inf if self._is_batched(transfer) else transfer.heard_at + self._silence_s
        return due_at if self._limit_s is None else min(due_at, transfer.started_at + self._limit_s)

    # -- tasks ---------------------------------------------------------------------------------------------------------

    def restore(self, task_ids: Iterable[str]) -> None:
        """An earlier agent has left these tasks: all other directories of files are removed."""
        self._tidying = orders.Tidy(tuple(task_ids))
        self.orders.append(self._tidying)

    def stage_in(
        self,
        task_id: str,
        submitter: str,
        files: FileList,
        *,
        is_sealed: bool,
        now: float,
        payer: str = "",
        is_again: bool = False,
    ) -> None:
        """Copy what a task reads, and make a place for what it writes.

        :param payer: the creator of a service account, whose budget has its files; empty: the submitter.
        :param is_again: whether it was in ``unstaged``: then it comes before the others of its payer.
        """
        task = _Staged(task_id, submitter, files, IN, is_sealed, now, payer)
        if is_again:
            task.problem, task.number = _GAVE_WAY, self._unstaged.pop(task_id, 0)
            self._put_back(task)
        else:
            self._room.came(task.share_of, now)
            self._add(task)

    def started(self, task_id: str) -> None:
        """A task has a worker: it keeps its files."""
        self._room.started(task_id)

    def waits(self, task_id: str, now: float) -> None:
        """A task waits for a worker again."""
        self._room.waits(task_id, now)

    def stage_out(
        self, task_id: str, submitter: str, files: FileList, *, is_sealed: bool, now: float, payer: str = ""
    ) -> None:
        """Store what a task has written; see :meth:`stage_in`."""
        task = _Staged(task_id, submitter, files, OUT, is_sealed, now, payer)
        if self._room.store(task_id, submitter, task.share_of, now):
            self.orders.append(orders.Release(task_id, submitter))
        self._add(task)

    def _add(self, task: _Staged) -> None:
        task.number = next(self._task_numbers)
        self._tasks[task.task_id] = task
        self._waiting[task.direction].setdefault(task.share_of, collections.deque()).append(task)

    def _put_back(self, task: _Staged) -> None:
        self._room.came(task.share_of, self._now)
        self._tasks[task.task_id] = task
        waiting = self._waiting[task.direction].setdefault(task.share_of, collections.deque())
        before = itertools.takewhile(lambda each: each.number < task.number, waiting)
        waiting.insert(sum(1 for _ in before), task)

    def end(self, task_id: str) -> None:
        """A task has ended, or is not needed any more: of its files only the copies in the cache stay."""
        task = self._tasks.pop(task_id, None)
        if task is not None:
            self._stop(task)
            self._room.end(task_id, task.share_of)
        else:
            self._room.end(task_id)
            self._unstaged.pop(task_id, None)
        self._remove(task_id)

    def _stop(self, task: _Staged) -> None:
        """Nothing moves for a task any more."""
        if not task.is_active:
            waiting = self._waiting[task.direction]
            waiting[task.share_of].remove(task)
            self._drop_if_empty(task.share_of, waiting)
            return
        self._no_longer_active(task)
        task.is_active = task.is_making = False
        for transfer in {id(each): each for each in task.left.values()}.values():
            transfer.tasks = [each for each in transfer.tasks if each[0] is not task]
            transfer.late = [each for each in transfer.late if each[0] is not task]
            if transfer.started_at is not None and not transfer.tasks:
                self.orders.append(orders.Cancel(transfer.number))
                self._stopped(transfer)
            elif not transfer.tasks:
                self._forget(transfer)
        task.left.clear()

    def _drop_if_empty(self, payer: str, waiting: dict[str, collections.deque[_Staged]]) -> None:
        if not waiting[payer]:
            del waiting[payer]
            if waiting is self._waiting[IN]:
                self._room.all_began(payer)

    def _remove(self, task_id: str, *, gives_way: bool = False) -> None:
        if (submitter := self._room.leave(task_id, gives_way=gives_way)) is not None:
            self._removing[task_id] = submitter
            self.orders.append(orders.Remove(task_id, submitter))

    def _activate(self, now: float) -> None:
        stored, staged = self._waiting[OUT], self._waiting[IN]
        for payer in list(stored):
            while stored[payer] and self._may_activate(stored[payer][0]):
                self._move(self._activated(stored[payer].popleft()))
            self._drop_if_empty(payer, stored)
        for payer in self._room.in_order(staged, now) if staged else ():
            while staged[payer] and self._may_activate(staged[payer][0]) and self._room.may_begin(payer):
                self._make(self._activated(staged[payer].popleft()), now)
            self._drop_if_empty(payer, staged)

    def _activated(self, task: _Staged) -> _Staged:
        self._active[task.share_of] += task.count
        task.is_active, task.done, task.done_bytes = True, 0, 0
        task.rows.clear()
        task.contents.clear()
        return task

    def _may_activate(self, task: _Staged) -> bool:
        if task.task_id in self._removing:  # its former directory goes first
            return False
        return not self._active[task.share_of] or self._active.total() + task.count <= _MOST_ACTIVE

    def _no_longer_active(self, task: _Staged) -> None:
        self._active[task.share_of] -= task.count
        if not self._active[task.share_of]:
            del self._active[task.share_of]

    def _make(self, task: _Staged, now: float) -> None:
        task.is_making = True
        if task.task_id not in self._room:
            self._room.begin(task.task_id, task.number, task.submitter, task.share_of, now)
        uses = task.files.uses() if task.files.writes else []
        writes = tuple([use.url for _, use in uses if use.mode == "w"])
        self.orders.append(orders.Make(task.task_id, task.submitter, writes))

    def _move(self, task: _Staged) -> None:
        """Let the files of a task move."""
        mode = "r" if task.direction == IN else "w"
        wanted = [(number, use) for number, use in task.files.uses() if use.mode == mode] if task.count else []
        sizes = [use.size_bytes for _, use in wanted if use.size_bytes is not None]
        task.total_bytes = sum(sizes) if len(sizes) == len(wanted) else None
        for number, use in wanted:
            transfer = self._copies.get((task.submitter, use)) if mode == "r" else None
            if transfer is None:
                backoff = Backoff(first_s=_FIRST_WAIT_S, most_s=_LONGEST_WAIT_S, jitter=lambda: 1 - self._jitter() / 2)
                transfer = _Transfer(next(self._numbers), task.submitter, use, backoff, task.payer)
                self._by_number[transfer.number] = transfer
                if mode == "r":
                    self._copies[task.submitter, use] = transfer
                self._enqueue(transfer)
            task.left[number] = transfer
            (transfer.tasks if transfer.started_at is None else transfer.late).append((task, number))
        if not wanted:
            self._done(task)

    def _done(self, task: _Staged) -> None:
        del self._tasks[task.task_id]
        if task.direction == IN:
            self._room.staged(task.task_id, self._now)
        self._no_longer_active(task)
        moved = FilesMoved(task.task_id, task.direction, rows=tuple(task.rows), contents=tuple(task.contents))
        self.outcomes.append(moved)

    def _fail(self, task: _Staged, record: ErrorRecord) -> None:
        del self._tasks[task.task_id]
        self._stop(task)
        self._room.end(task.task_id, task.share_of)
        self.outcomes.append(FilesMoved(task.task_id, task.direction, record))

    # -- transfers -----------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Do what is due: retries, limits of time, and the start of transfers."""
        self._now = now
        while self._retries and self._retries[0][0] <= now:
            if (retried := self._by_number.get(heapq.heappop(self._retries)[1])) is not None:
                self._enqueue(retried)
        for transfer in list(self._on_way.values()):
            if now >= self._due_at(transfer):
                is_silent = not self._is_batched(transfer) and now >= transfer.heard_at + self._silence_s
                limit_s = self._silence_s if is_silent or self._limit_s is None else self._limit_s
                self.orders.append(orders.Cancel(transfer.number))
                self._failed(transfer, outcomes.file_timeout(shown(transfer.use.url), limit_s), now)
        self._activate(now)
        batches, self._batches = self._batches, []
        for transfer in batches:
            transfer.is_queued = False
            if transfer.tasks:
                self._start(transfer, now)
        while self._taken < _MOST_TAKEN:
            # Who has none on the way never waits for those of others, which may be slow on purpose.
            taken = self._queue.take(new_submitters_only=self._taken >= self._max_transfers)
            if taken is None:
                break
            transfer = taken[1]
            transfer.is_queued = False
            if transfer.tasks:
                self._taken += 1
                self._start(transfer, now)
            else:  # it is not needed any more
                self._queue.done(transfer.share_of)

    def _enqueue(self, transfer: _Transfer) -> None:
        if transfer.is_queued or transfer.started_at is not None:
            return
        transfer.is_queued = True
        if self._is_batched(transfer):
            self._batches.append(transfer)
        else:
            self._queue.add(transfer.share_of, transfer)

    def _is_batched(self, transfer: _Transfer) -> bool:
        return transfer.use.url.partition("://")[0] in self._batch_schemes

    def _start(self, transfer: _Transfer, now: float) -> None:
        transfer.started_at = transfer.heard_at = now
        transfer.missing_bytes = 0
        self._on_way[transfer.number] = transfer
        task_ids = tuple([task.task_id for task, _ in transfer.tasks])
        if transfer.use.mode == "r":
            self.orders.append(
                orders.Fetch(transfer.number, transfer.submitter, transfer.use, task_ids, transfer.payer)
            )
        else:
            self.orders.append(
                orders.Store(transfer.number, transfer.submitter, transfer.use, task_ids[0], transfer.payer)
            )

    def _stopped(self, transfer: _Transfer) -> None:
        """A transfer is not on its way any more. For those that wait for it, it continues under another number: of
        the former one something may yet be heard."""
        transfer.started_at, transfer.bytes_done = None, 0
        del self._on_way[transfer.number], self._by_number[transfer.number]
        if not self._is_batched(transfer):
            self._taken -= 1
            self._queue.done(transfer.share_of)
        has_late = bool(transfer.late)
        transfer.tasks += transfer.late
        transfer.late.clear()
        if transfer.tasks:
            transfer.number = next(self._numbers)
            self._by_number[transfer.number] = transfer
        else:
            self._forget(transfer)
        if has_late:
            self._enqueue(transfer)

    def _ended(self, transfer: _Transfer) -> None:
        """A transfer has succeeded or failed for good: for tasks that came meanwhile it begins again."""
        transfer.backoff.reset()
        transfer.failed_at = None
        self._stopped(transfer)

    def _forget(self, transfer: _Transfer) -> None:
        self._by_number.pop(transfer.number, None)
        key = transfer.submitter, transfer.use
        if self._copies.get(key) is transfer:
            del self._copies[key]

    # -- reports -------------------------------------------------------------------------------------------------------

    def handle(self, report: Report, now: float) -> None:
        """The transfer process reports."""
        self._now = now
        if not isinstance(report, orders.Alive | orders.Unusable):
            self._losses = 0
        match report:
            case orders.Made():
                self._made(report)
            case orders.Removed(task_id=task_id):
                self._removing.pop(task_id, None)
                self._room.removed(task_id)
                if task_id not in self._tasks:  # it has ended
                    self._room.room_came()
            case orders.Released():
                self._room.room_came()
            case orders.Tidied():
                self._tidying = None
            case orders.Fetched() | orders.Stored():
                if (moved := self._on_way.get(report.number)) is not None:
                    self._moved(moved, report)
            case orders.Failed(number=number, error=error):
                if (failed := self._on_way.get(number)) is not None:
                    self._failed(failed, ErrorRecord.from_json(error), now, report)
            case orders.Progress(transfers=transfers):
                for number, bytes_done in transfers:
                    moving = self._on_way.get(number)
                    if moving is not None and moving.bytes_done != bytes_done:
                        moving.bytes_done, moving.heard_at = bytes_done, now
            case _:
                pass

    def process_lost(self, reason: str, now: float) -> None:
        """The transfer process has ended; another one gets the orders that it has not answered, unless several have
        ended before they could begin."""
        self._now = now
        self._losses += 1
        making = [task for task in self._tasks.values() if task.is_making]
        if self._losses >= _TRIES:
            for task in making:
                self._fail(task, outcomes.files_no_room(reason))
            making = []
        if self._tidying is not None:
            self.orders.append(self._tidying)
        for transfer in list(self._on_way.values()):
            self._failed(transfer, outcomes.file_unreachable(shown(transfer.use.url), reason), now)
        for task in making:
            self._make(task, now)
        self.orders += [orders.Remove(task_id, submitter) for task_id, submitter in self._removing.items()]

    def _made(self, report: orders.Made) -> None:
        task = self._tasks.get(report.task_id)
        if task is None or not task.is_making:
            return
        task.is_making = False
        if report.error is not None:
            record = ErrorRecord.from_json(report.error)
            self.failures.append(f"the files of task {task.task_id} have no place: {record.message}")
            self._fail(task, record)
        else:
            self._move(task)

    def _moved(self, transfer: _Transfer, report: orders.Fetched | orders.Stored) -> None:
        served, transfer.tasks = transfer.tasks, []
        self._ended(transfer)
        row: dict[str, Any] = {
            "url": shown(transfer.use.url),
            "mode": transfer.use.mode,
            "size_bytes": report.size_bytes,
            "sha256": report.sha256,
        }
        if isinstance(report, orders.Fetched):
            row["cached"] = report.cached
        content = None
        if self._for_nodes and transfer.use.mode == "r":
            place = place_of("", transfer.use.url, "r").removeprefix("/r/")
            content = NodeFile(place, report.sha256, report.size_bytes)
        taken = taken_bytes(report.size_bytes)
        for task, number in served:
            del task.left[number]
            if task.direction == IN:
                self._room.add(task.task_id, report.sha256, taken)
            task.done += 1
            task.done_bytes += report.size_bytes
            task.problem = ""
            if content is not None:
                task.contents.append(content)
            if len(task.rows) < MAX_FILES_SHOWN:
                task.rows.append(row)
            if not task.left:
                self._done(task)

    def _failed(
        self, transfer: _Transfer, record: ErrorRecord, now: float, report: orders.Failed | None = None
    ) -> None:
        """A transfer on its way has failed: it is tried again, or its tasks fail."""
        is_offline = record.code == outcomes.file_endpoint_offline.code
        if not is_offline or transfer.failed_at is None:  # of what lasts, one line
            self.failures.append(record.message)
        has_no_room = record.code == outcomes.files_no_room.code
        if (
            report is not None
            and has_no_room
            and transfer.use.mode == "r"
            and self._make_room(transfer, report, record.message, now)
        ):
            return
        if transfer.failed_at is None:
            transfer.failed_at = now
        fetch_retry_s = 0.0 if has_no_room else _FETCH_RETRY_S
        if is_offline:
            fetch_retry_s = max(fetch_retry_s, self._silence_s)
        retry_s = _STORE_RETRY_S if transfer.use.mode == "w" else fetch_retry_s
        if record.retryable and (transfer.backoff.failures + 1 < _TRIES or now < transfer.failed_at + retry_s):
            self._retry(transfer, record.message, now + transfer.backoff.next_s())
            return
        lost, transfer.tasks = transfer.tasks, []
        self._ended(transfer)
        for task, _ in lost:
            if task.task_id in self._tasks:
                self._fail(task, record)

    def _retry(self, transfer: _Transfer, problem: str, at: float) -> None:
        for task, _ in transfer.tasks:
            task.problem = problem
        self._stopped(transfer)
        heapq.heappush(self._retries, (at, transfer.number))

    def _make_room(self, transfer: _Transfer, report: orders.Failed, problem: str, now: float) -> bool:
        """Let other tasks without a worker give way, or let the tasks of this transfer wait. Return False if no other
        task has files here."""
        drafts: dict[str, int] = {}
        for number, size_bytes in report.drafts:
            moving = self._on_way.get(number)
            if moving is not None and moving.tasks and moving.use.mode == "r":
                task_id = moving.tasks[0][0].task_id
                drafts[task_id] = drafts.get(task_id, 0) + taken_bytes(size_bytes)
        waiting = {task.task_id: task for task, _ in transfer.tasks}
        transfer.missing_bytes = max(1, report.missing_bytes)
        missing = {each.number: each.missing_bytes for task in waiting.values() for each in task.left.values()}
        lack = self._room.lacks(
            waiting, sum(missing.values()), budget_bytes=report.budget_bytes, drafts=drafts, now=now
        )
        if lack is None:
            if self._tidying is not None:  # what an earlier agent left goes
                self._retry(transfer, problem, now + _FIRST_WAIT_S)
            return self._tidying is not None
        for task_id in lack.give_way:
            self._give_way(task_id, _GAVE_WAY)
        if lack.tries_again:
            self._retry(transfer, problem, now + _FIRST_WAIT_S)
        else:
            for task_id in reversed(waiting):
                self._give_way(task_id, problem)
        return True

    def _give_way(self, task_id: str, problem: str) -> None:
        """A task without a worker loses its files, and waits to be staged again."""
        task = self._tasks.get(task_id)
        if task is None:
            self.unstaged.append(task_id)
            self._unstaged[task_id] = self._room.number_of(task_id)
        else:
            self._stop(task)
            task.problem = problem
            self._put_back(task)
        self._remove(task_id, gives_way=True)
