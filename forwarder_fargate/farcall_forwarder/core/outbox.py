"""Outbox: results on their way to the database. They are flushed at once, or together after the flush under way."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable
from typing import Final

from farcall_common.store.model import TaskResult
from farcall_forwarder.core.actions import FlushResults, ResultBatch

#: Flushes under way at once.
MAX_FLUSHES: Final = 2


@dataclasses.dataclass(slots=True)
class _Waiting:
    """Results of one endpoint in one generation, and the fence under which they may be removed from the queue."""

    endpoint_id: str
    generation: int
    fence: int
    is_open: bool
    results: dict[str, TaskResult] = dataclasses.field(default_factory=dict)
    unverified: set[str] = dataclasses.field(default_factory=set)


class Outbox:
    """Results by endpoint. An endpoint's results wait while its queue is being rebuilt (:meth:`hold`, :meth:`open`)."""

    def __init__(self) -> None:
        self._waiting: dict[str, _Waiting] = {}
        #: Endpoints with waiting results, the next to be flushed first: among thousands there are few at a time.
        self._filled: dict[str, None] = {}
        #: Number of waiting results of all endpoints: read after every event.
        self._size = 0
        self._flushes = 0
        #: Ids under way, by endpoint and generation: a flush of an earlier generation is no reason to drop a report.
        self._in_flight: dict[tuple[str, int], set[str]] = {}

    def __len__(self) -> int:
        return self._size

    @property
    def is_flushing(self) -> bool:
        """Whether a flush is under way."""
        return self._flushes > 0

    def admit(self, endpoint_id: str, generation: int) -> None:
        """Begin a new generation of an endpoint, and drop the earlier one's results: the agent repeats them."""
        self.close(endpoint_id)
        self._waiting[endpoint_id] = _Waiting(endpoint_id, generation, 0, is_open=False)

    def hold(self, endpoint_id: str) -> None:
        """Hold the endpoint's results back until :meth:`open`."""
        if waiting := self._waiting.get(endpoint_id):
            waiting.is_open = False

    def open(self, endpoint_id: str, fence: int) -> None:
        """The endpoint's results may be flushed, under this fence."""
        waiting = self._waiting[endpoint_id]
        waiting.fence, waiting.is_open = fence, True

    def close(self, endpoint_id: str) -> None:
        """Forget an endpoint and its waiting results."""
        if waiting := self._waiting.pop(endpoint_id, None):
            self._size -= len(waiting.results)
        self._filled.pop(endpoint_id, None)

    def has(self, endpoint_id: str) -> bool:
        """Whether results of this endpoint wait or are under way."""
        waiting = self._waiting.get(endpoint_id)
        return bool(waiting and waiting.results) or any(endpoint_id == in_flight for in_flight, _ in self._in_flight)

    def add(self, result: TaskResult, *, verified: bool) -> None:
        """Add a result. While one waits, a second result of the same task is ignored."""
        waiting = self._waiting[result.endpoint_id]
        in_flight = self._in_flight.get((result.endpoint_id, waiting.generation), ())
        if result.task_id in waiting.results or result.task_id in in_flight:
            return
        waiting.results[result.task_id] = result
        self._size += 1
        self._filled.setdefault(result.endpoint_id)
        if not verified:
            waiting.unverified.add(result.task_id)

    def put_back(self, batch: ResultBatch) -> None:
        """A batch was not flushed: its results wait again, unless the endpoint began a new generation."""
        waiting = self._waiting.get(batch.endpoint_id)
        if waiting and waiting.generation == batch.generation:
            self._size -= len(waiting.results)
            waiting.results = {result.task_id: result for result in batch.results} | waiting.results
            self._size += len(waiting.results)
            waiting.unverified |= batch.unverified
            if waiting.results:
                self._filled.setdefault(batch.endpoint_id)

    def next_flush(self, *, rows: int, watchers: Iterable[str], url_ttl_s: int) -> FlushResults | None:
        """A step with up to ``rows`` results of all endpoints, if some may be flushed. While one flush waits for the
        disk, a second one may begin if it is full: a commit costs about the same for one row and for many.
        """
        if self._flushes >= MAX_FLUSHES or (self._flushes and self._size < rows):
            return None
        batches: list[ResultBatch] = []
        for endpoint_id in list(self._filled):
            if not rows:
                break
            waiting = self._waiting[endpoint_id]
            if waiting.is_open:
                batch = _take(waiting, rows)
                rows -= len(batch.results)
                self._size -= len(batch.results)
                batches.append(batch)
                del self._filled[endpoint_id]
                if waiting.results:  # Last in line again: one busy endpoint does not delay the others.
                    self._filled[endpoint_id] = None
        if not batches:
            return None
        self._flushes += 1
        for batch in batches:
            under_way = self._in_flight.setdefault((batch.endpoint_id, batch.generation), set())
            under_way.update(result.task_id for result in batch.results)
        return FlushResults(batches, frozenset(watchers), url_ttl_s)

    def flushed(self, batches: Iterable[ResultBatch]) -> None:
        """A flush of these batches is over."""
        self._flushes -= 1
        for batch in batches:
            under_way = self._in_flight[batch.endpoint_id, batch.generation]
            under_way.difference_update(result.task_id for result in batch.results)
            if not under_way:
                del self._in_flight[batch.endpoint_id, batch.generation]


def _take(waiting: _Waiting, rows: int) -> ResultBatch:
    taken = [waiting.results.pop(task_id) for task_id in list(itertools.islice(waiting.results, rows))]
    unverified = frozenset(result.task_id for result in taken if result.task_id in waiting.unverified)
    waiting.unverified -= unverified
    return ResultBatch(waiting.endpoint_id, waiting.generation, waiting.fence, taken, unverified)
