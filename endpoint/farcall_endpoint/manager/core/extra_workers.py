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

The place of a task that waits takes turns like that of any other worker. If it goes to another submitter, the worker
stays, *aside*, without a place: the extra workers of its submitter get a call less at a time, or none, until a place of
that submitter comes back to it. A submitter gets its places back to the workers aside before it gets new workers, so it
never has more of both than slots.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Final, NamedTuple

from farcall_endpoint.manager.core.task_queue import TaskQueue
from farcall_endpoint.manager.core.workers import Pair, Worker

_IDLE_S: Final = 1.0
"""Seconds without a call after which an extra worker is ended."""


class ExtraWorker(NamedTuple):
    """A worker to start."""

    number: int
    pair: Pair
    slot: int


class Extras:
    """Decides on extra workers, and on workers that step aside. ``count``: how many of both there are.

    :param workers: all of the manager.
    :param slots: number of workers with a place.
    :param steps_aside: whether the place of a task that waits may go to another submitter before the task has ended.
    """

    def __init__(
        self, *, workers: Mapping[int, Worker], queue: TaskQueue, slots: int, steps_aside: bool = True
    ) -> None:
        self._workers = workers
        self._queue = queue
        self._slots = slots
        self._steps_aside = steps_aside
        self.count = 0

    # -- extra workers -------------------------------------------------------------------------------------------------

    def wanted(self, can_start: Callable[[Pair], bool]) -> ExtraWorker | None:
        """The next one that is needed and can be started; call it when idle workers have got what they can take."""
        submitters = {worker.pair.submitter for worker in self._workers.values() if worker.waits and not worker.killed}
        if not submitters:
            return None
        found = (
            self._wanted(pair, depth)
            for pair, depth in self._queue.deepest()
            if pair.submitter in submitters and can_start(pair)
        )
        return next((each for each in found if each is not None), None)

    def _wanted(self, pair: Pair, depth: int) -> ExtraWorker | None:
        """The same for the deepest calls of one submitter."""
        own = self._of(pair.submitter)
        given_up = self._given_up(own)
        if len(self._beyond(own)) >= len(given_up):
            return None
        others = [worker for worker in own if not (worker.waits or worker.parked or worker.aside)]
        if any(worker.pair == pair and worker.extra <= depth and not worker.jobs for worker in others):
            return None  # it gets the call, or is about to start
        numbers = {worker.extra for worker in own if worker.extra and worker.pair == pair}
        number = next(each for each in range(1, len(numbers) + 2) if each not in numbers)
        if number > depth:
            return None
        taken = {worker.slot for worker in self._workers.values() if worker.extra}
        slot = next((worker.slot for worker in given_up if worker.slot not in taken), given_up[0].slot)
        return ExtraWorker(number, pair, slot)

    def held_back(self) -> set[int]:
        """The ids of the extra workers that get no calls now, since others have or wait for places of drivers of their
        submitter."""
        held: set[int] = set()
        for submitter in {
            worker.pair.submitter for worker in self._workers.values() if worker.aside or self._gives_up(worker)
        }:
            own = self._of(submitter)
            room = len(self._given_up(own)) - len(self._beyond(own))
            extra = [worker for worker in own if worker.extra and not worker.waits]
            idle = [worker for worker in extra if not worker.jobs and self._queue.depth(worker.pair) >= worker.extra]
            # One with a lower number takes all calls that one with a higher number takes.
            idle.sort(key=lambda worker: worker.extra)
            held.update(worker.worker_id for worker in idle[max(0, room) :])
            if room < 0:
                held.update(worker.worker_id for worker in extra if worker.jobs)
        return held

    def surplus(self, now: float) -> list[Worker]:
        """The extra workers that have had nothing to do for a while, and the workers aside whose task has ended."""
        return [worker for worker in self._workers.values() if now >= self._ends_at(worker)]

    @property
    def due_at(self) -> float:
        """When :meth:`surplus` has something."""
        return min(map(self._ends_at, self._workers.values()), default=math.inf)

    @staticmethod
    def _ends_at(worker: Worker) -> float:
        if not (worker.extra or worker.aside) or not worker.is_idle:
            return math.inf
        return worker.since + (_IDLE_S if worker.extra else 0.0)

    # -- places of drivers ---------------------------------------------------------------------------------------------

    def may_step_aside(self, worker: Worker, pair: Pair) -> bool:
        """Whether a worker can leave its place to a pair before its task ends: the task waits, and no extra worker
        uses the place."""
        if not self._can_give_up(worker, pair):
            return False
        own = self._of(worker.pair.submitter)
        return len(self._beyond(own)) < sum(each.waits and each.has_slot for each in own)

    def step_aside(self, worker: Worker) -> None:
        """A worker whose task waits leaves its place."""
        worker.aside, worker.yields_to = True, None
        self.count += 1

    def bring_back(self, pair: Pair, *, slot: int, now: float) -> bool:
        """Give a place of a pair to a worker aside of its submitter; False if there is none."""
        aside = [worker for worker in self._of(pair.submitter) if worker.aside]
        if not aside:
            return False
        worker = min(aside, key=lambda each: (each.waits, each.slot != slot, each.worker_id))
        worker.aside, worker.slot, worker.turn_began = False, slot, now
        self.count -= 1
        return True

    def _can_give_up(self, worker: Worker, pair: Pair) -> bool:
        if not (worker.waits and worker.has_slot) or worker.killed or not self._steps_aside:
            return False
        if pair.submitter == worker.pair.submitter:
            return False
        if sum(each.aside for each in self._workers.values()) < self._slots:
            return True
        payer = pair.share_of  # one without any place gets its first one
        return not any(
            payer in (each.pair.share_of, each.place.share_of)
            for each in self._workers.values()
            if each is not worker and (each.has_slot or each.aside)
        )

    def _gives_up(self, worker: Worker) -> bool:
        """Whether a worker steps aside as soon as no extra worker uses its place."""
        return worker.yields_to is not None and self._can_give_up(worker, worker.yields_to)

    def _of(self, submitter: str) -> list[Worker]:
        return [worker for worker in self._workers.values() if worker.pair.submitter == submitter and not worker.killed]

    def _given_up(self, own: Iterable[Worker]) -> list[Worker]:
        """The workers of a submitter whose places its extra workers use."""
        return [worker for worker in own if worker.waits and worker.has_slot and not self._gives_up(worker)]

    @staticmethod
    def _beyond(own: Iterable[Worker]) -> list[Worker]:
        """The workers of a submitter without a place that run something, or are about to."""
        return [
            worker
            for worker in own
            if (worker.extra or worker.aside) and not worker.waits and (worker.jobs or not worker.is_ready)
        ]
