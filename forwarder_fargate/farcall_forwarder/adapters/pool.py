"""Store pool: threads that run blocking store steps, with retries while a store is unavailable."""

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

_FIRST_PAUSE_S: Final = 0.05
_LONGEST_PAUSE_S: Final = 5.0
#: Steps that agents wait for, and that renew leases and this forwarder's registration. They have threads of their own,
#: so that slow database work does not delay them.
_QUEUE_STEPS: Final = (
    do.LeaseTasks,
    do.ReadCancels,
    do.ClaimEndpoint,
    do.ReadLeases,
    do.RequeueTasks,
    do.MaintainEndpoint,
    do.RefreshEndpoints,
    do.SweepQueues,
    do.Announce,
)
#: Steps with megabytes of data, in threads of their own so that no other step waits for them.
_RELAY_STEPS: Final = (ReadPiece, StoreBlob)

#: Steps that concern one endpoint.
_OF_ONE_ENDPOINT: Final = (do.EndpointStep, do.ClaimEndpoint, do.PrepareTasks, do.GrantUpload)
#: When a kind of step was refused for so many endpoints in a row, the endpoints are not the cause.
_REFUSED_FOR_ALL: Final = 3

_logger = logging.getLogger(__name__)
A = TypeVar("A")
R = TypeVar("R")


class StorePool:
    """Runs store steps in threads. While a store is unavailable, its steps are repeated, with full jitter."""

    def __init__(self, steps: StoreSteps) -> None:
        self._steps = steps
        self._flushes = ThreadPoolExecutor(MAX_FLUSHES, "flush")
        self._queue = ThreadPoolExecutor(3, "queue")
        self._others = ThreadPoolExecutor(3, "store")
        self._lookups = ThreadPoolExecutor(2, "zap")
        self._relays = ThreadPoolExecutor(4, "relay")
        self._failing: dict[int, object] = {}
        #: Endpoints whose steps were refused, by kind of step, since one of that kind succeeded.
        self._refused: dict[type[do.StoreStep], set[str]] = {}

    @property
    def is_degraded(self) -> bool:
        """Whether a store did not answer its last step, or refused a kind of step for several endpoints without a
        success in between."""
        return bool(self._failing) or any(len(endpoints) >= _REFUSED_FOR_ALL for endpoints in self._refused.values())

    async def perform(self, step: do.StoreStep) -> Event | None:
        """Perform a step, however long it takes; returns its event. An Announce is not repeated: the next one is newer.

        A step that a store refuses for one endpoint ends the session of that endpoint only.
        """
        try:
            event = await self._retry_while_unavailable(self._steps.perform, step, like=step)
        except Exception as error:  # any error of the driver or the server, caused by one endpoint's row or message
            if isinstance(step, do.FlushResults):
                return await self._flush_separately(step, error)
            if isinstance(step, do.RecordTransitions):
                return await self._record_separately(step, error)
            if not isinstance(step, _OF_ONE_ENDPOINT):
                raise
            return self._failed(step, step.endpoint_id, error, ev.StepFailed(step))
        self._refused.pop(type(step), None)
        return event

    async def perform_batch(self, steps: Sequence[do.StoreStep]) -> Sequence[Event]:
        """Perform steps of one kind in one batch, however long it takes; returns their events. If a batch fails, its
        steps are repeated one by one."""
        try:
            events = await self._retry_while_unavailable(self._steps.perform_batch, steps, like=steps[0]) or ()
        except Exception as error:
            if len(steps) > 1:
                return [event for step in steps for event in await self.perform_batch([step])]
            [step] = steps
            if not isinstance(step, _OF_ONE_ENDPOINT):
                raise
            return [self._failed(step, step.endpoint_id, error, ev.StepFailed(step))]
        self._refused.pop(type(steps[0]), None)
        return events

    async def _flush_separately(self, step: do.FlushResults, error: Exception) -> Event:
        """Flush the results of each endpoint in a step of its own."""
        if len(step.batches) == 1:
            [batch] = step.batches
            failed = ev.Flushed([ev.BatchFlushed(batch, failed=True)], {}, {}, 0.0)
            return self._failed(step, batch.endpoint_id, error, failed)
        parts = [await self.perform(dataclasses.replace(step, batches=[batch])) for batch in step.batches]
        flushed = [part for part in parts if isinstance(part, ev.Flushed)]
        return ev.Flushed(
            [batch for part in flushed for batch in part.batches],
            {id_: result for part in flushed for id_, result in part.first.items()},
            {key: url for part in flushed for key, url in part.urls.items()},
            max(part.recorded_at for part in flushed),
        )

    async def _record_separately(self, step: do.RecordTransitions, error: Exception) -> Event:
        """Record the transitions in halves, down to the refused task. Its transitions stay unrecorded."""
        task_ids = list(dict.fromkeys(event.task_id for event in step.events))
        if len(task_ids) == 1:
            return self._failed(step, f"of task {task_ids[0]}", error, ev.TransitionsRecorded())
        for half in (frozenset(task_ids[: len(task_ids) // 2]), frozenset(task_ids[len(task_ids) // 2 :])):
            await self.perform(do.RecordTransitions([event for event in step.events if event.task_id in half]))
        return ev.TransitionsRecorded()

    def _failed(self, step: do.StoreStep, endpoint_id: str, error: Exception, event: Event) -> Event:
        """Log a refused step, and remember it until a step of its kind succeeds for any endpoint."""
        _logger.error("%s failed: %s", type(step).__name__, error, exc_info=error, extra={"endpoint_id": endpoint_id})
        self._refused.setdefault(type(step), set()).add(endpoint_id)
        return event

    async def _retry_while_unavailable(self, call: Callable[[A], R], argument: A, *, like: do.StoreStep) -> R | None:
        is_repeated = not isinstance(like, do.Announce)
        marker: object = argument if is_repeated else do.Announce
        backoff: Backoff | None = None  # most steps succeed at once
        try:
            while True:
                try:
                    found = await self._run(self._threads_for(like), call, argument)
                except Unavailable as error:
                    _logger.warning("%s waits: %s", type(like).__name__, error)
                    self._failing[id(marker)] = marker
                    if not is_repeated:
                        return None
                else:
                    self._failing.pop(id(marker), None)
                    return found
                # A store does not report when it is available again, so that only time can pass.
                backoff = backoff or Backoff(first_s=_FIRST_PAUSE_S, most_s=_LONGEST_PAUSE_S, jitter=random.random)
                await asyncio.sleep(backoff.next_s())
        finally:
            if is_repeated:
                self._failing.pop(id(marker), None)

    async def look_up(
        self, find: Callable[[Sequence[str]], Mapping[str, PeerKey | None]], public_keys: Sequence[str]
    ) -> Mapping[str, PeerKey | None]:
        """Find the owners of keys, without retries."""
        return await self._run(self._lookups, find, public_keys)

    def _threads_for(self, step: do.StoreStep) -> ThreadPoolExecutor:
        if isinstance(step, do.FlushResults):
            return self._flushes
        if isinstance(step, _RELAY_STEPS):
            return self._relays
        return self._queue if isinstance(step, _QUEUE_STEPS) else self._others

    @staticmethod
    async def _run(threads: ThreadPoolExecutor, call: Callable[[A], R], argument: A) -> R:
        return await asyncio.get_running_loop().run_in_executor(threads, call, argument)

    def close(self) -> None:
        """Start no more calls, and wait for those under way: the stores are closed next, and a later call would open a
        connection again. Each call has its store's timeout."""
        pools = (self._flushes, self._queue, self._others, self._lookups, self._relays)
        for threads in pools:
            threads.shutdown(wait=False, cancel_futures=True)
        for threads in pools:
            threads.shutdown()
