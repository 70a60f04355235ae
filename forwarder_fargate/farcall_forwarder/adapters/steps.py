"""Store steps, one function each: they block, run in a pool's thread, and answer with one event (or none)."""

from __future__ import annotations

import datetime as dt
import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

from farcall_common.errors import EndpointInUse, Fenced, QueueDataLost, Unavailable
from farcall_common.store.model import BlobRef, Holding, LeasedTask, QueuedTask, SharedEnds, Task, TaskResult, Tended
from farcall_common.store.settings import Stores
from farcall_common.wire import Reporter
from farcall_forwarder.adapters.relay import read_piece, store_blob
from farcall_forwarder.core import actions as do
from farcall_forwarder.core import events as ev
from farcall_forwarder.core.events import Event
from farcall_forwarder.core.relay import ReadPiece, StoreBlob
from farcall_forwarder.core.results import blob_key, check_blob

__all__ = ["StoreSteps"]

#: Tasks that are read at once; they come with their payloads.
_PAGE: Final = 500
#: User bytes in one message to another forwarder, except that a single end always fits.
_SHARE_BYTES: Final = 1024 * 1024
_NONE: Final[frozenset[str]] = frozenset()

_logger = logging.getLogger(__name__)


class StoreSteps:
    """Performs store steps.

    :param clock: epoch seconds, for the stores.
    """

    def __init__(self, stores: Stores, *, forwarder_id: str, clock: Callable[[], float]) -> None:
        self._records = stores.records
        self._queue = stores.queue
        self._blobs = stores.blobs
        self._forwarder_id = forwarder_id
        self._clock = clock

    def perform(self, step: do.StoreStep) -> Event | None:
        """Do it. Blocks.

        :raises Unavailable: when a store is away; every step may be repeated.
        """
        try:
            return self._perform(step)
        except (Fenced, QueueDataLost) as refusal:
            return _refused(step, refusal)

    @functools.singledispatchmethod
    def _perform(self, step: do.StoreStep) -> Event | None:
        raise TypeError(f"no rule for {step}")

    # -- owning --------------------------------------------------------------------------------------------------------

    @_perform.register
    def _(self, step: do.ClaimEndpoint) -> Event:
        try:
            fence = self._queue.claim(
                step.endpoint_id, self._forwarder_id, spool_id=step.spool_id, ttl_s=step.ttl_s, now=self._clock()
            )
        except EndpointInUse as error:
            return ev.ClaimRefused(step.endpoint_id, step.life, error)
        return ev.EndpointClaimed(step.endpoint_id, step.life, fence)

    @_perform.register
    def _(self, step: do.ReadLeases) -> Event:
        return ev.LeasesRead(step.endpoint_id, step.fence, self._queue.leased(step.endpoint_id, step.fence))

    @_perform.register
    def _(self, step: do.RestoreQueue) -> Event:
        after = ""
        while page := self._records.list_open_tasks(step.endpoint_id, after=after, limit=_PAGE):
            tasks = [QueuedTask.of(task) for task in page]
            self._queue.restore(
                step.endpoint_id, step.fence, tasks, held=step.held, lease_s=step.lease_s, now=self._clock()
            )
            after = page[-1].task_id
        self._queue.mark_restored(step.endpoint_id, step.fence)
        return ev.QueueRestored(step.endpoint_id, step.fence)

    @_perform.register
    def _(self, step: do.ReadTasks) -> Event:
        tasks: dict[str, Task] = {}
        for start in range(0, len(step.task_ids), _PAGE):
            tasks |= self._records.get_tasks(step.task_ids[start : start + _PAGE])
        spools = {
            task_id: self._spools_of(task_id)
            for task_id in step.unheld
            if (task := tasks.get(task_id)) and not task.idempotent and not task.state.is_terminal
        }
        return ev.TasksRead(step.endpoint_id, step.fence, tasks, spools)

    def _spools_of(self, task_id: str) -> frozenset[str]:
        """The spools that a task which may not run twice was ever sent to."""
        return frozenset(
            event.detail["spool_id"]
            for event in self._records.list_events(task_id)
            if event.reporter is Reporter.FORWARDER and "spool_id" in event.detail
        )

    def keep(self, steps: Sequence[do.KeepEndpoint]) -> Sequence[Event]:
        """Do all of these steps in one. Blocks, and raises, as :meth:`perform` does."""
        held = {step.endpoint_id: Holding(step.fence, step.spool_id, step.renew) for step in steps}
        found = self._queue.tend(
            self._forwarder_id, held, ttl_s=steps[0].ttl_s, lease_s=steps[0].lease_s, now=self._clock()
        )
        return [self._kept(step, found[step.endpoint_id]) for step in steps]

    def _kept(self, step: do.KeepEndpoint, found: Tended | Fenced | QueueDataLost) -> Event:
        if not isinstance(found, Tended):
            return _refused(step, found)
        once = [leased.task.task_id for leased in found.reaped if not leased.task.idempotent]
        sent = {id_: task.attempt for id_, task in self._records.get_tasks(once).items()} if once else {}
        return ev.UpkeepDone(step.endpoint_id, step.fence, found.reaped, sent, found.outbox)

    @_perform.register
    def _(self, step: do.RefreshEndpoints) -> Event:
        stirring = self._queue.refresh(self._forwarder_id, step.owned, ttl_s=step.ttl_s, now=self._clock())
        return ev.Refreshed(step.owned, frozenset(stirring))

    @_perform.register
    def _(self, step: do.ReleaseEndpoint) -> None:
        self._queue.release(step.endpoint_id, self._forwarder_id, step.fence)

    @_perform.register
    def _(self, step: do.SetPresence) -> None:
        if not step.online:  # Whoever took the endpoint over knows better: this raises Fenced then.
            self._queue.keep(step.endpoint_id, self._forwarder_id, step.fence, ttl_s=step.ttl_s, now=self._clock())
        at = dt.datetime.fromtimestamp(step.at, dt.UTC)
        self._records.set_endpoint_presence(step.endpoint_id, online=step.online, status=step.status, at=at)

    # -- dispatching ---------------------------------------------------------------------------------------------------

    @_perform.register
    def _(self, step: do.SweepQueues) -> Event:
        return ev.Swept(self._queue.stirring(step.fences))

    def lease(self, steps: Sequence[do.LeaseTasks]) -> Sequence[Event]:
        """Do all of these steps in one. Blocks, and raises, as :meth:`perform` does."""
        wanted = {step.endpoint_id: (step.fence, step.limit) for step in steps}
        found = self._queue.lease_many(wanted, lease_s=steps[0].lease_s, now=self._clock())
        return [self._leased(step, found[step.endpoint_id]) for step in steps]

    @staticmethod
    def _leased(step: do.LeaseTasks, found: Sequence[LeasedTask] | Fenced | QueueDataLost) -> Event:
        if isinstance(found, Fenced | QueueDataLost):
            return _refused(step, found)
        return ev.TasksLeased(step.endpoint_id, step.fence, step.limit, found)

    @_perform.register
    def _(self, step: do.RequeueTasks) -> None:
        self._queue.unlease(step.endpoint_id, step.fence, step.task_ids, now=self._clock())

    @_perform.register
    def _(self, step: do.ReadCancels) -> Event:
        task_ids = self._queue.cancel_requests(step.endpoint_id, step.fence)
        return ev.CancelsRead(step.endpoint_id, step.fence, task_ids)

    @_perform.register
    def _(self, step: do.PrepareTasks) -> Event:
        bodies = self._records.get_bodies(step.functions) if step.functions else {}
        urls = {key: self._blobs.download_url(key, ttl_s=step.url_ttl_s) for key in step.blob_keys}
        refused: frozenset[str] = frozenset()
        if step.dispatches:
            permitted = set(self._records.record_moves(step.dispatches))
            refused = frozenset(
                event.task_id
                for event in step.dispatches
                # The spool that is to get the task may be the one that it was sent to before. Then it never arrived:
                # the agent said so when this session began. (Or that dispatch is this one, and its answer was lost.)
                if event.task_id not in permitted and self._spools_of(event.task_id) != {step.spool_id}
            )
        return ev.TasksPrepared(step, bodies, urls, refused, self._payloads(step.tasks))

    def _payloads(self, tasks: Sequence[LeasedTask]) -> Mapping[str, bytes]:
        """The payloads that the queue does not have."""
        spilled = [leased.task.task_id for leased in tasks if leased.task.is_spilled]
        rows = self._records.get_tasks(spilled).values() if spilled else ()
        return {row.task_id: row.payload for row in rows if row.payload is not None}

    # -- results -------------------------------------------------------------------------------------------------------

    @_perform.register
    def _(self, step: do.FlushResults) -> Event:
        recorded_at = self._clock()
        verified = [self._verify(batch) if batch.unverified else (batch.results, _NONE) for batch in step.batches]
        # Ended in the queue at first. Whatever it says to each, the database has the last word.
        ends = [(batch.fence, results) for batch, (results, _) in zip(step.batches, verified, strict=True)]
        refusals = self._queue.ack_many(ends, now=self._clock())
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
            result for (_, rows), refusal in zip(ends, refusals, strict=True) if refusal is None for result in rows
        ]
        first: Mapping[str, TaskResult] = {}
        if results:
            first = self._records.record_results(results, at=dt.datetime.fromtimestamp(recorded_at, dt.UTC))
        wanted = {r.result_ref.blob_key for r in first.values() if r.result_ref and r.owner_id in step.watchers}
        urls = {key: self._blobs.download_url(key, ttl_s=step.url_ttl_s) for key in wanted}
        return ev.Flushed(flushed, first, urls, recorded_at)

    def _verify(self, batch: do.ResultBatch) -> tuple[Sequence[TaskResult], frozenset[str]]:
        """The results that the endpoint may report, and the ids of other endpoints' tasks."""
        tasks = self._records.get_tasks(sorted(batch.unverified))
        if unknown := len(batch.unverified - tasks.keys()):
            # They ended long ago, or the database was restored from before they were submitted.
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
        self._queue.flushed_many(step.task_ids)

    @_perform.register
    def _(self, step: do.RecordMoves) -> Event:
        self._records.record_moves(step.events)
        return ev.MovesRecorded()

    @_perform.register
    def _(self, step: do.GrantUpload) -> Event:
        owner_id = step.owner_id
        if owner_id is None:
            task = self._records.get_tasks([step.task_id]).get(step.task_id)
            owner_id = task.owner_id if task and task.endpoint_id == step.endpoint_id else None
        ref = BlobRef(blob_key(owner_id or "", step.sha256), step.size_bytes, step.sha256)
        url, headers = self._blobs.upload_url(ref, ttl_s=step.url_ttl_s) if owner_id else (None, {})
        return ev.UploadGranted(step.endpoint_id, step.life, step.task_id, step.attempt, ref, url, headers)

    @_perform.register
    def _(self, step: ReadPiece) -> Event:
        return read_piece(self._blobs, step)

    @_perform.register
    def _(self, step: StoreBlob) -> Event:
        return store_blob(self._blobs, step)

    # -- what forwarders tell one another; hints, so that an absent queue is no reason to wait -------------------------

    @_perform.register
    def _(self, step: do.WatchOwners) -> Event:
        fresh: frozenset[str] = frozenset()
        try:
            fresh = self._queue.watch(step.owner_ids, self._forwarder_id, ttl_s=step.ttl_s, now=self._clock())
        except Unavailable as error:
            _logger.warning("other forwarders do not hear whose clients wait here: %s", error)
        return ev.OwnersWatched(step.owner_ids, fresh)

    @_perform.register
    def _(self, step: do.ShareEnds) -> Event:
        owner_ids = sorted({end.owner_id for _, ends in step.groups for end in ends})
        try:
            watchers = self._queue.watchers(owner_ids, now=self._clock())
            shares = {
                forwarder_id: list(self._shares(step, frozenset(wanted)))
                for forwarder_id, wanted in watchers.items()
                if forwarder_id != self._forwarder_id
            }
            if shares:
                self._queue.share(shares)
        except Unavailable as error:
            _logger.warning("other forwarders do not hear what has ended: %s", error)
        return ev.EndsShared()

    def _shares(self, step: do.ShareEnds, owner_ids: frozenset[str]) -> Iterator[SharedEnds]:
        """The ends of these owners, in messages of a bearable size."""
        for recorded_at, ends in step.groups:
            wanted = [end for end in ends if end.owner_id in owner_ids]
            for chunk in _chunks(wanted):
                keys = {end.result_ref.blob_key for end in chunk if end.result_ref}
                urls = {key: self._blobs.download_url(key, ttl_s=step.url_ttl_s) for key in keys}
                yield SharedEnds(chunk, urls, recorded_at)

    # -- the registry --------------------------------------------------------------------------------------------------

    @_perform.register
    def _(self, step: do.Announce) -> Event:
        now = self._clock()
        self._queue.announce(step.info, ttl_s=step.ttl_s, now=now)
        alive = self._queue.forwarders(now=now)
        return ev.Announced(sum(other.forwarder_id != self._forwarder_id for other in alive))

    @_perform.register
    def _(self, step: do.Withdraw) -> None:
        self._queue.withdraw(step.forwarder_id)


def _refused(step: do.StoreStep, refusal: Fenced | QueueDataLost) -> Event:
    assert isinstance(step, do.EndpointStep), f"{step} is not about a queue that somebody owns"
    return ev.StepFenced(step) if isinstance(refusal, Fenced) else ev.StepLost(step)


def _chunks(ends: Sequence[TaskResult]) -> Iterator[list[TaskResult]]:
    chunk: list[TaskResult] = []
    size_bytes = 0
    for end in ends:
        end_bytes = len(end.result or b"")
        if chunk and size_bytes + end_bytes > _SHARE_BYTES:
            yield chunk
            chunk, size_bytes = [], 0
        chunk.append(end)
        size_bytes += end_bytes
    if chunk:
        yield chunk
