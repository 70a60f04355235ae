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
"""

from __future__ import annotations

import math
from collections.abc import Mapping
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
    :param slots: how many tasks run at a time.
    """

    def __init__(self, *, workers: Mapping[int, Worker], queue: TaskQueue, slots: int) -> None:
        self._workers = workers
        self._queue = queue
        self._slots = slots
        self.count = 0

    def wanted(self) -> ExtraWorker | None:
        """The next one that is needed; call it when idle workers have got what they can take."""
        waiting = [worker for worker in self._workers.values() if worker.waits and not worker.killed]
        if not waiting or (found := self._queue.deepest()) is None:
            return None
        pair, depth = found
        others = [worker for worker in self._workers.values() if not (worker.waits or worker.parked)]
        if sum(bool(worker.jobs) or not worker.is_ready for worker in others) >= self._slots:
            return None
        if any(worker.pair == pair and worker.extra <= depth and not worker.jobs for worker in others):
            return None  # it gets the call, or is about to start
        extras = [worker for worker in self._workers.values() if worker.extra]
        numbers = {worker.extra for worker in extras if worker.pair == pair}
        number = next(each for each in range(1, len(numbers) + 2) if each not in numbers)
        if number > depth:
            return None
        taken = {extra.slot for extra in extras}
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
