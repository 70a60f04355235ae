"""Store pool: performs store steps in threads and in batches, with retries while a store is unavailable."""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

import msgspec

from farcall_common.backoff import Backoff
from farcall_common.errors import Unavailable
from farcall_common.store.model import PeerKey
from farcall_forwarder.adapters.batched_steps import BATCH_LIMITS
from farcall_forwarder.adapters.steps import StoreSteps
from farcall_forwarder.core import actions as do
from farcall_forwarder.core import events as ev
from farcall_forwarder.core.events import Event
from farcall_forwarder.core.files import AnswerFile, AskFile, DeletePieces, SignPiece
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
_RELAY_STEPS: Final = (ReadPiece, StoreBlob, do.AnswerOutput)
#: Steps for files of other endpoints: a round trip or more for each piece.
_FILE_STEPS: Final = (AskFile, AnswerFile, SignPiece, DeletePieces)

#: When a kind of step was refused for so many endpoints in a row, the endpoints are not the cause.
_REFUSED_FOR_ALL: Final = 3

_logger = logging.getLogger(__name__)
A = TypeVar("A")
R = TypeVar("R")


class StorePool:
    """Runs store steps in threads. While a store is unavailable, its steps are repeated, with full jitter."""

    def __init__(self, steps: StoreSteps) -> None:
        self._steps = steps
        self._others = ThreadPoolExecutor(3, "store")
        self._lookups = ThreadPoolExecutor(2, "zap")
        flushes = ThreadPoolExecutor(MAX_FLUSHES, "flush")
        self._threads = {
            do.FlushResults: flushes,
            **dict.fromkeys(_QUEUE_STEPS, ThreadPoolExecutor(3, "queue")),
            **dict.fromkeys(_RELAY_STEPS, ThreadPoolExecutor(4, "relay")),
            **dict.fromkeys(_FILE_STEPS, ThreadPoolExecutor(3, "files")),
        }
        #: One mark for each call that waits for its store, and one for Announce.
        self._failing: set[object] = set()
        #: Endpoints whose steps were refused, by kind of step, since one of that kind succeeded.
        self._refused: dict[type[do.StoreStep], set[str]] = {}

    @property
    def is_degraded(self) -> bool:
        """Whether a store did not answer its last step, or refused a kind of step for several endpoints without a
        success in between."""
        return bool(self._failing) or any(len(endpoints) >= _REFUSED_FOR_ALL for endpoints in self._refused.values())

    async def perform(self, steps: Sequence[do.StoreStep]) -> Sequence[Event]:
        """Perform steps of one kind, however long it takes; returns their events. An Announce is not repeated: the next
        one is newer.

        Steps that a store refuses together are performed in smaller parts. What it refuses alone ends the session of
        one endpoint only.
        """
        try:
            events = await self._retry_while_unavailable(steps)
        except Exception as error:  # any error of the driver or the server, caused by one endpoint's row or message
            parts = _parts(steps)
            if len(parts) > 1:
                return _join([event for part in parts for event in await self.perform(part)])
            [step] = steps
            if (refused := _refusal(step)) is None:
                raise
            name, event = refused
            kind = type(step)
            _logger.error("%s failed: %s", kind.__name__, error, exc_info=error, extra={"endpoint_id": name})
            self._refused.setdefault(kind, set()).add(name)
            return [event]
        self._refused.pop(type(steps[0]), None)
        return events

    async def _retry_while_unavailable(self, steps: Sequence[do.StoreStep]) -> Sequence[Event]:
        kind = type(steps[0])
        is_repeated = kind is not do.Announce
        mark: object = object() if is_repeated else do.Announce
        backoff: Backoff | None = None  # most steps succeed at once
        try:
            while True:
                try:
                    events = await self._run(self._threads.get(kind, self._others), self._steps.perform, steps)
                except Unavailable as error:
                    _logger.warning("%s waits: %s", kind.__name__, error)
                    self._failing.add(mark)
                    if not is_repeated:
                        return ()
                else:
                    self._failing.discard(mark)
                    return events
                # A store does not report when it is available again, so that only time can pass.
                backoff = backoff or Backoff(first_s=_FIRST_PAUSE_S, most_s=_LONGEST_PAUSE_S, jitter=random.random)
                await asyncio.sleep(backoff.next_s())
        finally:
            if is_repeated:
                self._failing.discard(mark)

    async def look_up(
        self, find: Callable[[Sequence[str]], Mapping[str, PeerKey | None]], public_keys: Sequence[str]
    ) -> Mapping[str, PeerKey | None]:
        """Find the owners of keys, without retries."""
        return await self._run(self._lookups, find, public_keys)

    @staticmethod
    async def _run(threads: ThreadPoolExecutor, call: Callable[[A], R], argument: A) -> R:
        return await asyncio.get_running_loop().run_in_executor(threads, call, argument)

    def close(self) -> None:
        """Start no more calls, and wait for those under way: the stores are closed next, and a later call would open a
        connection again. Each call has its store's timeout."""
        pools = {*self._threads.values(), self._others, self._lookups}
        for threads in pools:
            threads.shutdown(wait=False, cancel_futures=True)
        for threads in pools:
            threads.shutdown()


def _parts(steps: Sequence[do.StoreStep]) -> Sequence[Sequence[do.StoreStep]]:
    """Smaller parts of steps that were refused together; one part if they concern one endpoint or task."""
    match steps:
        case [do.FlushResults(batches=batches) as flush]:
            return [[msgspec.structs.replace(flush, batches=[batch])] for batch in batches]
        case [do.RecordTransitions(events=events)]:
            task_ids = list(dict.fromkeys(event.task_id for event in events))
            first = frozenset(task_ids[: len(task_ids) // 2])
            halves = [[event for event in events if (event.task_id in first) is is_first] for is_first in (True, False)]
            return [[do.RecordTransitions(half)] for half in halves if half]
        case _:
            return [[step] for step in steps]


def _refusal(step: do.StoreStep) -> tuple[str, Event] | None:
    """The endpoint of a refused step, and the event that answers it; None if the step concerns all endpoints."""
    match step:
        case do.FlushResults(batches=[batch]):
            return batch.endpoint_id, ev.Flushed([ev.BatchFlushed(batch, failed=True)], {}, {}, 0.0)
        case do.RecordTransitions(events=transitions):  # they stay unrecorded
            return f"of task {transitions[0].task_id}", ev.TransitionsRecorded()
        case do.EndpointStep() | do.GenerationStep():
            return step.endpoint_id, ev.StepFailed(step)
        case _:
            return None


def _join(events: Sequence[Event]) -> Sequence[Event]:
    """The events of the parts of one batch. A flush is answered by one event."""
    parts = [event for event in events if isinstance(event, ev.Flushed)]
    if not parts:
        return events
    flushed = ev.Flushed(
        [batch for part in parts for batch in part.batches],
        {id_: result for part in parts for id_, result in part.first.items()},
        {key: url for part in parts for key, url in part.urls.items()},
        max(part.recorded_at for part in parts),
    )
    return [flushed]


class Batcher:
    """Performs steps in the background. Of a batched kind, one batch is under way at a time, and steps that are added
    meanwhile form the next one: with thousands of endpoints, a round trip for each step would be most of the work.
    Steps of other kinds are performed at once.

    :param group: runs the tasks; an unexpected error ends it.
    :param perform: performs steps of one kind; returns the events that answer them, which ``handle`` receives.
    :param limits: most steps in one batch, by kind, so that the first of them does not wait long for the last.
    """

    def __init__(
        self,
        group: asyncio.TaskGroup,
        perform: Callable[[Sequence[do.StoreStep]], Awaitable[Sequence[Event]]],
        handle: Callable[[Sequence[Event]], None],
        *,
        limits: Mapping[type[do.StoreStep], int] = BATCH_LIMITS,
    ) -> None:
        self._group = group
        self._perform = perform
        self._handle = handle
        self._limits = limits
        #: Steps for the next batch, of each kind with a batch under way.
        self._waiting: dict[type[do.StoreStep], deque[do.StoreStep]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def add(self, step: do.StoreStep) -> None:
        """Perform a step soon."""
        kind = type(step)
        waiting = self._waiting.get(kind)
        if waiting is not None:
            waiting.append(step)
            return
        steps = deque([step])
        if kind in self._limits:
            self._waiting[kind] = steps
        task = self._group.create_task(self._work_off(kind, steps))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _work_off(self, kind: type[do.StoreStep], waiting: deque[do.StoreStep]) -> None:
        limit = self._limits.get(kind, 1)
        while waiting:
            steps = [waiting.popleft() for _ in range(min(limit, len(waiting)))]
            if events := await self._perform(steps):
                self._handle(events)
        self._waiting.pop(kind, None)

    async def settle(self) -> None:
        """Wait until no step waits or is under way."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    def cancel(self) -> None:
        """Cancel the steps under way."""
        for task in self._tasks:
            task.cancel()
