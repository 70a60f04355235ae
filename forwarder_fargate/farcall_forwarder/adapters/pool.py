"""Threads for the steps that block, and patience with stores that are away."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import random
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

from farcall_common.backoff import Backoff
from farcall_common.errors import Unavailable
from farcall_common.store.model import PeerKey
from farcall_forwarder.adapters.steps import StoreSteps
from farcall_forwarder.core import actions as do
from farcall_forwarder.core import events as ev
from farcall_forwarder.core.events import Event
from farcall_forwarder.core.outbox import MAX_FLUSHES
from farcall_forwarder.core.relay import ReadPiece, StoreBlob

__all__ = ["StorePool"]

_FIRST_PAUSE_S: Final = 0.05
_LONGEST_PAUSE_S: Final = 5.0
#: What a waiting agent waits for, and what keeps leases and this forwarder alive, has threads of its own, so that slow
#: database work does not delay it.
_QUEUE_STEPS: Final = (
    do.LeaseTasks,
    do.ReadCancels,
    do.ClaimEndpoint,
    do.ReadLeases,
    do.RequeueTasks,
    do.KeepEndpoint,
    do.RefreshEndpoints,
    do.SweepQueues,
    do.Announce,
)
#: Megabytes at a time, which nobody else should wait behind.
_RELAY_STEPS: Final = (ReadPiece, StoreBlob)

#: Steps that are about one endpoint, and what they are given for it.
_OF_ONE_ENDPOINT: Final = (do.EndpointStep, do.ClaimEndpoint, do.PrepareTasks, do.GrantUpload)
#: Of so many endpoints in a row a kind of step was refused: the fault is not theirs.
_REFUSED_FOR_ALL: Final = 3

_logger = logging.getLogger(__name__)
_Asked = TypeVar("_Asked")
_Found = TypeVar("_Found")


class StorePool:
    """Runs store steps in threads. A step whose store is away is repeated, with full jitter, until it succeeds."""

    def __init__(self, steps: StoreSteps) -> None:
        self._steps = steps
        self._flushes = ThreadPoolExecutor(MAX_FLUSHES, "flush")
        self._queue = ThreadPoolExecutor(3, "queue")
        self._others = ThreadPoolExecutor(3, "store")
        self._lookups = ThreadPoolExecutor(2, "zap")
        self._relays = ThreadPoolExecutor(4, "relay")
        self._failing: dict[int, object] = {}
        #: Endpoints whose steps of a kind were refused since one of that kind succeeded.
        self._refused: dict[type[do.StoreStep], set[str]] = {}

    @property
    def is_degraded(self) -> bool:
        """Whether a store did not answer when it was last asked, or refused one step after another: those of several
        endpoints, without one between them that it did. Then it is not the endpoints."""
        return bool(self._failing) or any(len(endpoints) >= _REFUSED_FOR_ALL for endpoints in self._refused.values())

    async def perform(self, step: do.StoreStep) -> Event | None:
        """Do a step, however long it takes; its event. An Announce is not repeated: the next one is newer.

        What a store refuses for one endpoint is the end of that endpoint's session, and nobody else's.
        """
        try:
            event = await self._patiently(self._steps.perform, step, like=step)
        except Exception as error:  # whatever a row or a message of one endpoint made the driver or the server raise
            if isinstance(step, do.FlushResults):
                return await self._flush_apart(step, error)
            if isinstance(step, do.RecordMoves):
                return await self._record_apart(step, error)
            if not isinstance(step, _OF_ONE_ENDPOINT):
                raise
            return self._failed(step, step.endpoint_id, error, ev.StepFailed(step))
        self._refused.pop(type(step), None)
        return event

    async def perform_together(self, steps: Sequence[do.StoreStep]) -> Sequence[Event]:
        """Do steps of one kind in one, however long it takes; their events. Steps that fail together are done apart."""
        try:
            events = await self._patiently(self._steps.perform_together, steps, like=steps[0]) or ()
        except Exception as error:
            if len(steps) > 1:
                return [event for step in steps for event in await self.perform_together([step])]
            [step] = steps
            if not isinstance(step, _OF_ONE_ENDPOINT):
                raise
            return [self._failed(step, step.endpoint_id, error, ev.StepFailed(step))]
        self._refused.pop(type(steps[0]), None)
        return events

    async def _flush_apart(self, step: do.FlushResults, error: Exception) -> Event:
        """Flush the results of each endpoint by themselves."""
        if len(step.batches) == 1:
            [batch] = step.batches
            failed = ev.Flushed([ev.BatchFlushed(batch, failed=True)], {}, {}, 0.0)
            return self._failed(step, batch.endpoint_id, error, failed)
        parts = [await self.perform(dataclasses.replace(step, batches=[batch])) for batch in step.batches]
        flushed = [part for part in parts if isinstance(part, ev.Flushed)]
        return ev.Flushed(
            [batch for part in flushed for batch in part.batches],
            {id_: end for part in flushed for id_, end in part.first.items()},
            {key: url for part in flushed for key, url in part.urls.items()},
            max(part.recorded_at for part in flushed),
        )

    async def _record_apart(self, step: do.RecordMoves, error: Exception) -> Event:
        """Record the state changes of each task by themselves. What is refused stays unrecorded: its end says more."""
        task_ids = list(dict.fromkeys(event.task_id for event in step.events))
        if len(task_ids) == 1:
            return self._failed(step, f"of task {task_ids[0]}", error, ev.MovesRecorded())
        for half in (frozenset(task_ids[: len(task_ids) // 2]), frozenset(task_ids[len(task_ids) // 2 :])):
            await self.perform(do.RecordMoves([event for event in step.events if event.task_id in half]))
        return ev.MovesRecorded()

    def _failed(self, step: do.StoreStep, endpoint_id: str, error: Exception, event: Event) -> Event:
        """Log it, and remember it until such a step succeeds for anybody."""
        _logger.error("%s failed: %s", type(step).__name__, error, exc_info=error, extra={"endpoint_id": endpoint_id})
        self._refused.setdefault(type(step), set()).add(endpoint_id)
        return event

    async def _patiently(self, call: Callable[[_Asked], _Found], asked: _Asked, *, like: do.StoreStep) -> _Found | None:
        is_repeated = not isinstance(like, do.Announce)
        marker: object = asked if is_repeated else do.Announce
        backoff: Backoff | None = None  # most steps succeed at once
        try:
            while True:
                try:
                    found = await self._run(self._threads_for(like), call, asked)
                except Unavailable as error:
                    _logger.warning("%s waits: %s", type(like).__name__, error)
                    self._failing[id(marker)] = marker
                    if not is_repeated:
                        return None
                else:
                    self._failing.pop(id(marker), None)
                    return found
                # Nothing to wait for but time: a store does not say when it is back.
                backoff = backoff or Backoff(first_s=_FIRST_PAUSE_S, most_s=_LONGEST_PAUSE_S, jitter=random.random)
                await asyncio.sleep(backoff.next_s())
        finally:
            if is_repeated:
                self._failing.pop(id(marker), None)

    async def look_up(
        self, find: Callable[[Sequence[str]], Mapping[str, PeerKey | None]], public_keys: Sequence[str]
    ) -> Mapping[str, PeerKey | None]:
        """Find the owners of keys; once."""
        return await self._run(self._lookups, find, public_keys)

    def _threads_for(self, step: do.StoreStep) -> ThreadPoolExecutor:
        if isinstance(step, do.FlushResults):
            return self._flushes
        if isinstance(step, _RELAY_STEPS):
            return self._relays
        return self._queue if isinstance(step, _QUEUE_STEPS) else self._others

    @staticmethod
    async def _run(threads: ThreadPoolExecutor, call: Callable[[_Asked], _Found], asked: _Asked) -> _Found:
        return await asyncio.get_running_loop().run_in_executor(threads, call, asked)

    def close(self) -> None:
        """Start nothing more, and wait for the calls under way: the stores are closed next, and a call that came later
        would open a connection again. Each call has its store's timeout."""
        pools = (self._flushes, self._queue, self._others, self._lookups, self._relays)
        for threads in pools:
            threads.shutdown(wait=False, cancel_futures=True)
        for threads in pools:
            threads.shutdown()
