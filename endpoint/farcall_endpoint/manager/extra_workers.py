"""Extra workers: for the calls of tasks that wait for them. No I/O, no clock.

A task that waits for its calls holds its worker, and so a slot. Another worker takes its share of the node meanwhile:
number 1, 2, and so on. Without a limit there would be one for each task that waits, and with a plain limit all workers
could be held by tasks that wait for calls which get none. So

- number *k* is started only while a call of depth *k* or more waits, and takes only such calls;
- all workers take the deepest calls first.

Each submitter and environment has numbers of its own: if two took turns with one extra worker, each call would wait for
the start of a process. Then there are at most as many extra workers for each as its calls are deep, and there is always
one for the deepest call: if all slots and the extra workers up to *k* are held by tasks that wait, then that of number
*k* has a task of depth *k* or more, a call of which waits, and is deep enough for number *k* + 1.

Extra workers of a submitter run for the slots that its tasks have given up: calls of one that run for hours hold up no
other submitter, and no depth gives one more of the node.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

from farcall_endpoint.manager.task_queue import TaskQueue
from farcall_endpoint.manager.workers import Pair, Worker

_IDLE_S: Final = 1.0
"""An extra worker without a call is ended after so long."""


class ExtraWorker(NamedTuple):
    """A worker to start."""

    number: int
    pair: Pair
    slot: int


class Extras:
    """Decides on extra workers. ``count``: how many there are.

    :param workers: all of the manager.
    """

    def __init__(self, *, workers: Mapping[int, Worker], queue: TaskQueue) -> None:
        self._workers = workers
        self._queue = queue
        self.count = 0

    def wanted(self, can_start: Callable[[Pair], bool]) -> ExtraWorker | None:
        """The next one that is needed and can be started; call it when idle workers have got what they can take."""
        waiting: dict[str, list[Worker]] = {}
        for worker in self._workers.values():
            if worker.waits and not worker.killed:
                waiting.setdefault(worker.pair.submitter, []).append(worker)
        if not waiting:
            return None
        found = (
            self._wanted(waiting[pair.submitter], pair, depth)
            for pair, depth in self._queue.deepest()
            if pair.submitter in waiting and can_start(pair)
        )
        return next((each for each in found if each is not None), None)

    def _wanted(self, waiting: Sequence[Worker], pair: Pair, depth: int) -> ExtraWorker | None:
        """The same for the deepest calls of one submitter, for which these workers wait among others."""
        own = [worker for worker in self._workers.values() if worker.pair.submitter == pair.submitter]
        others = [worker for worker in own if not (worker.waits or worker.parked)]
        given_up = sum(worker.has_slot for worker in waiting)
        if sum(worker.extra > 0 and (bool(worker.jobs) or not worker.is_ready) for worker in others) >= given_up:
            return None
        if any(worker.pair == pair and worker.extra <= depth and not worker.jobs for worker in others):
            return None  # it gets the call, or is about to start
        numbers = {worker.extra for worker in own if worker.extra and worker.pair == pair}
        number = next(each for each in range(1, len(numbers) + 2) if each not in numbers)
        if number > depth:
            return None
        taken = {worker.slot for worker in self._workers.values() if worker.extra}
        slot = next((worker.slot for worker in waiting if worker.slot not in taken), waiting[0].slot)
        return ExtraWorker(number, pair, slot)

    def surplus(self, now: float) -> list[Worker]:
        """The extra workers that have had nothing to do for a while."""
        return [worker for worker in self._workers.values() if worker.extra and now >= self._ends_at(worker)]

    @property
    def due_at(self) -> float:
        """When :meth:`surplus` has something."""
        return min((self._ends_at(worker) for worker in self._workers.values() if worker.extra), default=math.inf)

    @staticmethod
    def _ends_at(worker: Worker) -> float:
        return worker.since + _IDLE_S if worker.is_idle else math.inf
