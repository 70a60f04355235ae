"""Store steps: they block, run in a pool's thread, and answer with one event each (or none).

The steps here are performed one by one. Those that many endpoints need at once are in ``batched_steps``.
"""

from __future__ import annotations

import datetime as dt
import functools
import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

from farcall_common.errors import ErrorRecord, FarcallError, Fault, Fenced, ProtocolError, QueueDataLost, Unavailable
from farcall_common.limits import KIB
from farcall_common.store.model import BlobRef, LeasedTask, OutputAnswer, SharedResults, TaskResult, TokensTaken
from farcall_common.store.ports import Blobs
from farcall_common.store.rights import may_use_endpoint
from farcall_common.store.settings import Stores
from farcall_common.wire import FileReason
from farcall_forwarder.adapters.batched_steps import BATCH_LIMITS, BatchedSteps, delivery_of, refused
from farcall_forwarder.core import actions as do
from farcall_forwarder.core import events as ev
from farcall_forwarder.core.events import Event
from farcall_forwarder.core.files import AnswerFile, AskFile, DeletePieces, FileAsked, PieceSigned, SignPiece
from farcall_forwarder.core.relay import BlobStored, PieceRead, ReadPiece, StoreBlob
from farcall_forwarder.core.results import blob_key, check_blob

#: User bytes in one message to another forwarder, except that a single result always fits.
_SHARE_BYTES: Final = 1024 * 1024
_DAY_S: Final = 86_400.0
_NONE: Final[frozenset[str]] = frozenset()

_logger = logging.getLogger(__name__)


class StoreSteps:
    """Performs store steps.

    :param clock: epoch seconds, for the records.
    """

    def __init__(self, stores: Stores, *, forwarder_id: str, clock: Callable[[], float]) -> None:
        self._records = stores
        self._functions, self._tasks = stores.functions, stores.tasks
        self._queue = stores.queue
        self._blobs = stores.blobs
        self._forwarder_id = forwarder_id
        self._clock = clock
        self._batched = BatchedSteps(stores, forwarder_id=forwarder_id)

    def perform(self, steps: Sequence[do.StoreStep]) -> Sequence[Event]:
        """Perform steps of one kind; returns the events that answer them. Blocks. A refusal concerns one endpoint only.

        :raises Unavailable: while a store is unavailable; all of the steps may be repeated.
        """
        if type(steps[0]) in BATCH_LIMITS:
            return self._batched.perform(steps)
        return [event for step in steps if (event := self._perform_alone(step)) is not None]

    def _perform_alone(self, step: do.StoreStep) -> Event | None:
        try:
            return self._perform(step)
        except (Fenced, QueueDataLost) as refusal:
            return refused(step, refusal)

    @functools.singledispatchmethod
    def _perform(self, step: do.StoreStep) -> Event | None:
        raise TypeError(f"no rule for {type(step).__name__}")

    # -- ownership -----------------------------------------------------------------------------------------------------

    @_perform.register
    def _(self, step: do.RefreshEndpoints) -> Event:
        active = self._queue.renew_ownership(self._forwarder_id, step.owned, ttl_s=step.ttl_s)
        return ev.Refreshed(step.owned, frozenset(active))

    @_perform.register
    def _(self, step: do.ReleaseEndpoint) -> None:
        self._queue.release(step.endpoint_id, self._forwarder_id, step.fence)

    # -- dispatching ---------------------------------------------------------------------------------------------------

    @_perform.register
    def _(self, step: do.SweepQueues) -> Event:
        return ev.ActivityFound(self._queue.endpoints_with_activity(step.fences))

    @_perform.register
    def _(self, step: do.RequeueTasks) -> Event:
        self._queue.unlease(step.endpoint_id, step.fence, step.task_ids)
        return ev.TasksRequeued(step.endpoint_id, step.fence)

    @_perform.register
    def _(self, step: do.ReadAttempts) -> Event:
        tasks = self._tasks.get_tasks([leased.task.task_id for leased in step.reaped], with_bodies=False)
        attempts = {task_id: task.attempt for task_id, task in tasks.items()}
        return ev.AttemptsRead(step.endpoint_id, step.fence, step.reaped, attempts)

    @_perform.register
    def _(self, step: do.PrepareTasks) -> Event:
        bodies = self._functions.get_bodies(step.functions) if step.functions else {}
        urls = {key: self._blobs.download_url(key, ttl_s=step.url_ttl_s) for key in step.blob_keys}
        refused: frozenset[str] = frozenset()
        if step.dispatches:
            permitted = set(self._tasks.record_transitions(step.dispatches))
            doubtful = [event.task_id for event in step.dispatches if event.task_id not in permitted]
            refused = frozenset(doubtful) - self._never_arrived(doubtful, step.spool_id)
        return ev.TasksPrepared(step, bodies, urls, refused, self._payloads(step.tasks))

    def _never_arrived(self, task_ids: Sequence[str], spool_id: str) -> frozenset[str]:
        """Return the open tasks that were sent only to this spool and never accepted: the agent did not hold them when
        its session began. (Or the database has recorded this very dispatch, and its answer was lost.)

        A task that has ended is in no spool either: the queue forgets results after a while, and such a task may be
        enqueued late.
        """
        if not task_ids:
            return _NONE
        tasks = self._tasks.get_tasks(task_ids, with_bodies=False).values()
        return frozenset(
            task.task_id
            for task in tasks
            if not task.state.is_terminal and delivery_of(self._tasks, task.task_id) == (frozenset({spool_id}), False)
        )

    def _payloads(self, tasks: Sequence[LeasedTask]) -> Mapping[str, bytes]:
        """The payloads that were too large for the queue."""
        spilled = [leased.task.task_id for leased in tasks if leased.task.is_spilled]
        rows = self._tasks.get_tasks(spilled).values() if spilled else ()
        return {row.task_id: row.payload for row in rows if row.payload is not None}

    # -- results -------------------------------------------------------------------------------------------------------

    @_perform.register
    def _(self, step: do.FlushResults) -> Event:
        recorded_at = self._clock()
        verified = [self._verify(batch) if batch.unverified else (batch.results, _NONE) for batch in step.batches]
        # The queue removes them first. The database decides which result of a task counts.
        removed = [(batch.fence, results) for batch, (results, _) in zip(step.batches, verified, strict=True)]
        refusals = self._queue.ack(removed)
        flushed = [
            ev.BatchFlushed(
                batch,
                foreign if refusal is None else _NONE,
                fenced=isinstance(refusal, Fenced),
                lost=isinstance(refusal, QueueDataLost),
            )
            for batch, (_, foreign), refusal in zip(step.batches, verified, refusals, strict=True)
        ]
        results = [
            result for (_, rows), refusal in zip(removed, refusals, strict=True) if refusal is None for result in rows
        ]
        first: Mapping[str, TaskResult] = {}
        if results:
            first = self._tasks.record_results(results, at=dt.datetime.fromtimestamp(recorded_at, dt.UTC))
        wanted = {r.result_ref.blob_key for r in first.values() if r.result_ref and r.owner_id in step.watchers}
        urls = {key: self._blobs.download_url(key, ttl_s=step.url_ttl_s) for key in wanted}
        return ev.Flushed(flushed, first, urls, recorded_at)

    def _verify(self, batch: do.ResultBatch) -> tuple[Sequence[TaskResult], frozenset[str]]:
        """The results that the endpoint may report, and the ids of other endpoints' tasks."""
        tasks = self._tasks.get_tasks(sorted(batch.unverified))
        if unknown := len(batch.unverified - tasks.keys()):
            # They ended long ago, or the database was restored to a time before they were submitted.
            fields = {"endpoint_id": batch.endpoint_id, "results": unknown}
            _logger.warning("dropped results of tasks that the database does not have", extra=fields)
        foreign = frozenset(id_ for id_, task in tasks.items() if task.endpoint_id != batch.endpoint_id)
        results = [
            check_blob(result, owner_id=tasks[result.task_id].owner_id) if result.task_id in tasks else result
            for result in batch.results
            if result.task_id not in foreign
        ]
        return results, foreign

    @_perform.register
    def _(self, step: do.MarkFlushed) -> None:
        self._queue.flushed(step.task_ids)

    @_perform.register
    def _(self, step: do.RecordTransitions) -> Event:
        self._tasks.record_transitions(step.events)
        return ev.TransitionsRecorded()

    @_perform.register
    def _(self, step: do.GrantUpload) -> Event:
        owner_id = step.owner_id
        if owner_id is None:
            task = self._tasks.get_tasks([step.task_id]).get(step.task_id)
            owner_id = task.owner_id if task and task.endpoint_id == step.endpoint_id else None
        ref = BlobRef(blob_key(owner_id or "", step.sha256), step.size_bytes, step.sha256)
        url, headers = self._blobs.upload_url(ref, ttl_s=step.url_ttl_s) if owner_id else (None, {})
        return ev.UploadGranted(step.endpoint_id, step.generation, step.task_id, step.attempt, ref, url, headers)

    @_perform.register
    def _(self, step: ReadPiece) -> Event:
        return read_piece(self._blobs, step)

    @_perform.register
    def _(self, step: StoreBlob) -> Event:
        return store_blob(self._blobs, step)

    # -- files of other endpoints; these steps are not repeated: the agent tries again ---------------------------------

    @_perform.register
    def _(self, step: AskFile) -> Event:
        try:
            reason = self._file_refusal(step) or ("" if self._queue.ask_file(step.ask) else FileReason.OFFLINE)
        except Exception as error:  # noqa: BLE001 - ends this pull, not the forwarder
            _log_file_problem("a file of another endpoint cannot be requested", error)
            reason = FileReason.NO_ANSWER
        return FileAsked(step.ask.request_id, reason)

    def _file_refusal(self, step: AskFile) -> str:
        """Why a submitter gets no file of an endpoint; empty if there is no reason."""
        ask = step.ask
        endpoint = self._records.endpoints.get_endpoint(ask.endpoint_id)
        if endpoint is None or not may_use_endpoint(self._records, endpoint, ask.submitter, now=self._clock()):
            return FileReason.NO_RIGHT
        # Nothing is taken before there is a piece: the source may be offline or busy.
        has_room = (
            not ask.max_bytes
            or self._count_stored(ask.payer or ask.submitter, 0, step.stored_bytes_per_day).wait_s <= 0
        )
        return "" if has_room else FileReason.QUOTA

    def _count_stored(self, payer_id: str, size_bytes: int, stored_bytes_per_day: int) -> TokensTaken:
        """Count bytes in the bucket of the API, which counts the arguments of the same identity. Of 0 bytes, the answer
        has how long to wait until there is room: not at all, or ``wait_s``."""
        if not stored_bytes_per_day:
            return TokensTaken(0)
        most, tokens = stored_bytes_per_day // KIB, -(-size_bytes // KIB)
        return self._queue.take_tokens(
            f"stored:{payer_id}", tokens, rate_per_s=most / _DAY_S, burst=most, in_debt=tokens > 0
        )

    @_perform.register
    def _(self, step: AnswerFile) -> None:
        try:
            self._queue.answer_file(step.forwarder_id, step.answer)
        except Exception as error:  # noqa: BLE001 - the forwarder that asked waits no longer than it would anyway
            _log_file_problem("the answer about a file does not reach its forwarder", error)

    @_perform.register
    def _(self, step: SignPiece) -> Event:
        try:
            url = self._blobs.download_url(step.blob_key, ttl_s=step.url_ttl_s)
            self._count_stored(step.payer_id, step.piece_bytes, step.stored_bytes_per_day)
        except Exception as error:  # noqa: BLE001 - ends this pull, not the forwarder
            _log_file_problem("a piece of a file cannot be signed", error)
            return PieceSigned(step.request_id, reason=FileReason.NO_ANSWER)
        return PieceSigned(step.request_id, url, step.piece_bytes)

    @_perform.register
    def _(self, step: DeletePieces) -> None:
        try:
            self._blobs.delete(step.blob_keys)
        except Exception as error:  # noqa: BLE001 - they are deleted after a day
            _log_file_problem("pieces of files cannot be deleted", error)

    # -- result sharing between forwarders; these are hints, and not repeated while the queue is unavailable -----------

    @_perform.register
    def _(self, step: do.WatchOwners) -> Event:
        fresh: frozenset[str] = frozenset()
        try:
            fresh = self._queue.watch(step.owner_ids, self._forwarder_id, ttl_s=step.ttl_s)
        except Unavailable as error:
            _logger.warning("cannot subscribe to the results that other forwarders record: %s", error)
        return ev.OwnersWatched(step.owner_ids, fresh)

    @_perform.register
    def _(self, step: do.ShareResults) -> Event:
        owner_ids = sorted({result.owner_id for _, results in step.groups for result in results})
        try:
            watchers = self._queue.watchers(owner_ids)
            shares = {
                forwarder_id: list(self._shares(step, frozenset(wanted)))
                for forwarder_id, wanted in watchers.items()
                if forwarder_id != self._forwarder_id
            }
            if shares:
                self._queue.share(shares)
        except Unavailable as error:
            _logger.warning("results are not shared with other forwarders: %s", error)
        return ev.ResultsShared()

    @_perform.register
    def _(self, step: do.AnswerOutput) -> None:
        answer = OutputAnswer(step.endpoint_id, tuple(step.pieces))
        try:
            self._queue.answer_output(step.request_id, answer, ttl_s=step.ttl_s)
        except Unavailable as error:
            _logger.warning("output of tasks does not reach the API: %s", error)

    def _shares(self, step: do.ShareResults, owner_ids: frozenset[str]) -> Iterator[SharedResults]:
        """The results of these owners, in messages of limited size."""
        for recorded_at, results in step.groups:
            wanted = [result for result in results if result.owner_id in owner_ids]
            for chunk in _chunks(wanted):
                keys = {result.result_ref.blob_key for result in chunk if result.result_ref}
                urls = {key: self._blobs.download_url(key, ttl_s=step.url_ttl_s) for key in keys}
                yield SharedResults(chunk, urls, recorded_at)

    # -- the registry --------------------------------------------------------------------------------------------------

    @_perform.register
    def _(self, step: do.Announce) -> Event:
        self._queue.announce(step.info, ttl_s=step.ttl_s)
        alive = self._queue.forwarders()
        return ev.Announced(sum(other.forwarder_id != self._forwarder_id for other in alive))

    @_perform.register
    def _(self, step: do.Withdraw) -> None:
        self._queue.withdraw(step.forwarder_id)


def _log_file_problem(problem: str, error: Exception) -> None:
    if isinstance(error, Unavailable):
        _logger.warning("%s: %s", problem, error)
    else:
        _logger.error("%s: %s", problem, error, exc_info=error)


def _chunks(results: Sequence[TaskResult]) -> Iterator[list[TaskResult]]:
    chunk: list[TaskResult] = []
    size_bytes = 0
    for result in results:
        result_bytes = len(result.result or b"")
        if chunk and size_bytes + result_bytes > _SHARE_BYTES:
            yield chunk
            chunk, size_bytes = [], 0
        chunk.append(result)
        size_bytes += result_bytes
    if chunk:
        yield chunk


# -- relay of blobs. While the store is unavailable these are not repeated: the bytes would stay in memory for as long.
# The agent receives the error and tries again.


def read_piece(blobs: Blobs, step: ReadPiece) -> PieceRead:
    """Read a part of a blob; the answer has the bytes or the error."""
    try:
        piece = blobs.read_part(step.blob_key, offset_bytes=step.offset_bytes, length_bytes=step.length_bytes)
    except Exception as error:  # noqa: BLE001 - ends this transfer, not the forwarder
        return PieceRead(step.transfer_id, error=_blob_error(error))
    return PieceRead(step.transfer_id, piece)


def store_blob(blobs: Blobs, step: StoreBlob) -> BlobStored:
    """Store a blob, if its length and hash are the announced ones."""
    data = b"".join(step.pieces)
    if (len(data), hashlib.sha256(data).hexdigest()) != (step.ref.size_bytes, step.ref.sha256):
        error = ErrorRecord(
            code=ProtocolError.code,
            message="The uploaded bytes are not the announced ones: length or SHA-256 differ.",
            hint="Begin the upload again.",
            fault=Fault.PEER,
            retryable=True,
        )
        return BlobStored(step.transfer_id, error)
    try:
        blobs.write(step.ref.blob_key, data)
    except Exception as error:  # noqa: BLE001 - ends this transfer, not the forwarder
        return BlobStored(step.transfer_id, _blob_error(error))
    return BlobStored(step.transfer_id)


def _blob_error(error: Exception) -> ErrorRecord:
    if isinstance(error, FarcallError):
        return error.record
    _logger.error("a blob cannot be relayed", exc_info=error)
    return Unavailable("The blob store failed.").record
