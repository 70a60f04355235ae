"""Tasks with a latency target at a manager: they wait, and run, apart from batch work. No I/O, no clock.

Each latency class has workers of its own, beyond the slots of the manager: so a task of it never waits until batch work
has ended, and its workers can have a share of the CPUs of their own (:mod:`farcall_endpoint.qos.controller`). Within a
class, the task that must end first comes first. The payer with the fewest of these workers gets the next one.
"""

from __future__ import annotations

import bisect
import collections
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Final

from farcall_endpoint.contracts.agent_manager import CpuSharesStatus
from farcall_endpoint.manager.core.actions import Action, ShareCpus, Warn
from farcall_endpoint.manager.core.events import CpusMeasured, Job
from farcall_endpoint.manager.core.orders import unread_bytes
from farcall_endpoint.manager.core.workers import TURN_S, Pair, Worker
from farcall_endpoint.qos.controller import BATCH, Controller

_IDLE_S: Final = 300.0
"""Seconds without a task after which a worker of a latency class is ended."""
_MOST_AHEAD: Final = 0.1
"""Work that waits behind a running task takes at most this part of the target, as an idle worker might take it."""

_REPORT_S: Final = 1.0
"""Between two reports of weights, and how much a weight must have changed to be reported."""
_CHANGE: Final = 0.05

_Entry = tuple[float, int, Job]


class LatencyTasks:
    """The queue of tasks with a target, and which workers they need.

    :param controller: knows which tasks have a target, and when they should have ended.
    :param workers: of the manager.
    :param most_workers: for all classes together; 0: tasks with a target are batch work that comes first.
    :param shared: whether workers serve all submitters.
    """

    def __init__(
        self, controller: Controller, *, workers: Mapping[int, Worker], most_workers: int, shared: bool
    ) -> None:
        self.controller = controller
        self._workers = workers
        self._most_workers = most_workers
        self._shared = shared
        self._waiting: dict[Pair, list[_Entry]] = {}  # in order; none is empty
        self._numbers = itertools.count()
        self._promised: Pair | None = None  # the class that gets the next worker
        #: As measured last; until then the processors count as busy.
        self.cpus = CpusMeasured()
        #: When :meth:`status` may have something new to say.
        self.report_at = math.inf
        self._reported: CpuSharesStatus | None = None

    def __bool__(self) -> bool:
        """Whether a task waits."""
        return bool(self._waiting)

    # -- control -------------------------------------------------------------------------------------------------------

    def arrived(self, job: Job, now: float) -> None:
        """A task has come, which may have no target. Calls of others have none."""
        target = job.order.target
        if target is not None and job.owner is None:
            self.controller.add(job.order.task_id, target, now, submitter=job.order.submitter, payer=job.order.payer)
            self.report_at = min(self.report_at, now)

    def ended(self, jobs: list[tuple[Job, float | None]], now: float) -> None:
        """These tasks with a target have ended, or have left; each with how long its function ran, if it has ended by
        itself."""
        for job, run_s in jobs:
            if run_s is None:
                self.controller.drop(job.order.task_id, now)
            else:
                self.controller.ended(job.order.task_id, now, run_s)
        jobs.clear()

    def control(self, now: float) -> list[Action]:
        """Decide the weights, when the controller is due. If that fails, the last ones remain, and it starts again."""
        running = self._running()
        self.controller.measured(self.cpus.demands, running, self.cpus.processors)
        try:
            weights = self.controller.decide(
                now,
                pressure=self.cpus.pressure,
                others=int(running[BATCH] > 0),
                workers=self._most_workers or len(self._workers),
            )
        except Exception as error:  # noqa: BLE001 - tasks must go on
            self.controller.restart()
            return [Warn(f"the weights of latency classes stay as they are: {type(error).__name__}: {error}")]
        return [ShareCpus(weights, running)] if self._most_workers else []

    def status(self, now: float) -> CpuSharesStatus | None:
        """The classes and their weights, for the agent; None if nothing has changed that it should know."""
        self.report_at = now + _REPORT_S if self.controller.classes else math.inf
        cpus = self.cpus
        found = CpuSharesStatus(self.controller.report(), cpus.actuator, cpus.problem, round(cpus.pressure, 2))
        if self._reported is not None and _are_alike(found, self._reported):
            return None
        self._reported = found
        return found

    # -- the queue -----------------------------------------------------------------------------------------------------

    def takes(self, job: Job) -> bool:
        """Whether a task waits here, and not among batch work."""
        return job.order.target is not None and bool(self._most_workers) and self.controller.has(job.order.task_id)

    def add(self, job: Job, key: str, *, first: bool = False) -> None:
        """A task that is taken here waits for a worker in the environment of this key.

        :param first: before those that must end at the same time.
        """
        target = job.order.target
        assert target is not None
        submitter, payer = ("", "") if self._shared else (job.order.submitter, job.order.payer)
        pair = Pair(submitter, key, target.name, payer)
        number = next(self._numbers)
        entry = (self.controller.due_time(job.order.task_id), -number if first else number, job)
        bisect.insort(self._waiting.setdefault(pair, []), entry)

    def waiting(self, pair: Pair) -> int:
        """How many tasks wait for workers of a class."""
        return len(self._waiting.get(pair, ()))

    def take(self, pair: Pair, most: int, *, room_bytes: int) -> list[Job]:
        """The next tasks for a worker of this class; the last one may exceed the room."""
        entries = self._waiting.get(pair, [])
        count = 0
        while count < min(most, len(entries)) and room_bytes >= 0:
            room_bytes -= unread_bytes(entries[count][2])
            count += 1
        taken, left = entries[:count], entries[count:]
        self._keep(pair, left)
        return [job for _, _, job in taken]

    def take_out(self, task_ids: Collection[str]) -> list[Job]:
        """Take out those of these tasks that wait here."""
        return self._take_out(lambda _, job: job.order.task_id in task_ids)

    def remove_all(self, key: str, submitter: str | None = None) -> list[Job]:
        """Take out all tasks of an environment, or those of one submitter."""
        return self._take_out(lambda pair, _: pair.key == key and submitter in (None, pair.submitter))

    def clear(self) -> None:
        """Take out all."""
        self._waiting.clear()

    def items(self) -> Iterator[Job]:
        """All that wait."""
        return (job for entries in self._waiting.values() for _, _, job in entries)

    def pairs(self) -> list[Pair]:
        """The classes with waiting tasks: that of the payer with the fewest workers first, then the one whose task must
        end first."""
        if len(self._waiting) <= 1:
            return list(self._waiting)
        have = collections.Counter(worker.pair.share_of for worker in self._own())
        with_worker = {worker.pair for worker in self._own()}
        return sorted(
            self._waiting, key=lambda pair: (have[pair.share_of], pair in with_worker, self._waiting[pair][0][:2])
        )

    def in_turn(self) -> list[Pair]:
        """The classes with waiting tasks, in the order in which they start: that of the payer with the fewest
        running tasks first, then the one whose task is the most urgent."""
        if len(self._waiting) <= 1:
            return list(self._waiting)
        payer_of, urgency = self.controller.payer_of, self.controller.urgency
        runs = collections.Counter(payer_of(worker.pair.target) for worker in self._own() if worker.jobs)
        return sorted(
            self._waiting,
            key=lambda pair: (runs[payer_of(pair.target)], urgency(self._waiting[pair][0][2].order.task_id)),
        )

    # -- workers -------------------------------------------------------------------------------------------------------

    def depth(self, pair: Pair, most: int) -> int:
        """Return how many tasks, at most ``most``, may wait behind each running task of a class; 0 if all classes share
        one order."""
        run_s = self.controller.run_s(pair.target)
        entries = self._waiting.get(pair)
        if run_s is None or not entries or self.controller.is_short_first:
            return 0
        target = entries[0][2].order.target
        assert target is not None
        return min(most, int(_MOST_AHEAD * target.latency_s / max(run_s, 1e-6)))

    def wanted(self, can_start: Callable[[Pair], bool]) -> Pair | None:
        """The class that needs one more worker, if there is room for it, and it can be started now."""
        if not self._waiting:
            return None
        own = list(self._own())
        if len(own) >= self._most_workers:
            return None
        for pair in sorted(self.pairs(), key=lambda each: each != self._promised):
            have = sum(worker.pair == pair for worker in own)
            coming = sum(worker.pair == pair and not (worker.is_ready and worker.jobs) for worker in own)
            is_enough = have >= self.controller.most_running(pair.target, self._most_workers)
            if len(self._waiting[pair]) > coming and not is_enough and can_start(pair):
                self._promised = None
                return pair
        return None

    def places(self, pair: Pair, now: float) -> int:
        """How many more tasks of a class may run now."""
        return self.controller.places(pair.target, self._running(), self._most_workers, now)

    def unused(self, now: float) -> Worker | None:
        """The idle worker that makes room for one of a class whose tasks wait; None if none has to."""
        own = list(self._own())
        if self._without_worker(own) is None:
            return None
        idle = [
            worker
            for worker in own
            if worker.is_idle and (worker.pair not in self._waiting or self.places(worker.pair, now) <= 0)
        ]
        return min(idle, key=lambda worker: worker.since, default=None)

    def take_turns(self, now: float) -> tuple[Worker, Pair] | None:
        """The worker that ends after its task, so that a class gets one whose tasks wait without any; None if none has
        to. It is one of the payer with most, and keeps its class for a turn at least."""
        own = list(self._own())
        for worker in own:
            if worker.yields_to is not None and not self.waiting(worker.yields_to):
                worker.yields_to = None
        pair = self._without_worker(own)
        if pair is None or any(worker.yields_to is not None or not worker.is_ready for worker in own):
            return None
        have = collections.Counter(worker.pair.share_of for worker in own)
        due = [worker for worker in own if now >= worker.turn_began + TURN_S]
        giver = max(due, key=lambda worker: (have[worker.pair.share_of], -worker.turn_began), default=None)
        if giver is None:
            return None
        self._promised = pair
        return giver, pair

    def _without_worker(self, own: list[Worker]) -> Pair | None:
        """The first class whose tasks wait without any worker, while there is no room for another one."""
        if not self._waiting or len(own) < self._most_workers:
            return None
        with_worker = {worker.pair for worker in own}
        return next((pair for pair in self.pairs() if pair not in with_worker), None)

    def surplus(self, now: float) -> list[Worker]:
        """The workers that have had nothing to do for a while."""
        return [worker for worker in self._own() if worker.is_idle and now - worker.since >= _IDLE_S]

    @property
    def due_at(self) -> float:
        """When :meth:`surplus` has something."""
        return min((worker.since + _IDLE_S for worker in self._own() if worker.is_idle), default=math.inf)

    def adoptable(self, pair: Pair) -> Worker | None:
        """An idle worker with a slot that can become one of a class at once; another one is started in its place."""
        plain = Pair(pair.submitter, pair.key, "", pair.payer)
        return next(
            (
                worker
                for worker in self._workers.values()
                if worker.pair == plain and worker.has_slot and worker.is_idle and worker.accepts_tasks
            ),
            None,
        )

    def _running(self) -> collections.Counter[str]:
        """How many tasks run, by class, and of batch work."""
        return collections.Counter(worker.pair.target or BATCH for worker in self._workers.values() if worker.jobs)

    def _own(self) -> Iterator[Worker]:
        return (worker for worker in self._workers.values() if worker.pair.target and not worker.killed)

    def _take_out(self, is_wanted: Callable[[Pair, Job], bool]) -> list[Job]:
        found: list[Job] = []
        for pair, entries in list(self._waiting.items()):
            found += [job for _, _, job in entries if is_wanted(pair, job)]
            self._keep(pair, [entry for entry in entries if not is_wanted(pair, entry[2])])
        return found

    def _keep(self, pair: Pair, entries: list[_Entry]) -> None:
        if entries:
            self._waiting[pair] = entries
        else:
            self._waiting.pop(pair, None)


def _are_alike(found: CpuSharesStatus, former: CpuSharesStatus) -> bool:
    """Whether nothing has changed but weights by a little, and the pressure."""
    if (found.actuator, found.problem, len(found.classes)) != (former.actuator, former.problem, len(former.classes)):
        return False
    return all(
        (one.name, one.problem) == (other.name, other.problem)
        and abs(one.weight - other.weight) <= _CHANGE * other.weight
        for one, other in zip(found.classes, former.classes, strict=True)
    )
