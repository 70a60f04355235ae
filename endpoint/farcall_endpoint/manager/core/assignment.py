"""Assignment: workers are started on free slots, and get the tasks that wait. No I/O, no clock.

:mod:`farcall_endpoint.manager.core.placement` decides whose worker a slot gets. A worker that is ready gets a share of
its pair's tasks, with some behind the one that it runs. One whose place goes to another pair gets no more tasks; when
it has none, it stays warm without a place (:mod:`farcall_endpoint.manager.core.warm_pool`), or is ended.
"""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Sequence
from typing import Final

from farcall_endpoint.contracts.prefetch import PrefetchPolicy
from farcall_endpoint.manager.core import orders
from farcall_endpoint.manager.core.actions import Action, Adopt, Launch
from farcall_endpoint.manager.core.calls_ahead import AheadCalls
from farcall_endpoint.manager.core.environment_states import EnvironmentStates
from farcall_endpoint.manager.core.events import Instant, Job, WorkerDied
from farcall_endpoint.manager.core.extra_workers import Extras
from farcall_endpoint.manager.core.graphs import Graphs
from farcall_endpoint.manager.core.interruption import Interruptions
from farcall_endpoint.manager.core.latency import LatencyTasks
from farcall_endpoint.manager.core.placement import Placement
from farcall_endpoint.manager.core.preparation import Preparations
from farcall_endpoint.manager.core.reports import Reports
from farcall_endpoint.manager.core.task_queue import TaskQueue
from farcall_endpoint.manager.core.warm_pool import WarmPool, WarmPoolSettings, WarmWorkers
from farcall_endpoint.manager.core.workers import OWN, TURN_S, Pair, Worker

_MAX_START_FAILURES: Final = 6
"""After this number of failed rounds of starts of the owner's workers in the endpoint's own Python, and with no running
worker, the manager ends."""


class Assignment:
    """Starts workers, adds and removes them, and gives them tasks.

    ``placement``: decides whose worker a slot gets. ``free_slots``: each with the pair that gets it, if tasks still
    wait for that, or None for whose turn it is. ``problem``: why workers of the endpoint's own Python do not start;
    empty if they do.

    :param workers: all workers of the manager; no other object adds or removes workers.
    :param actions: the list of actions of the manager's core.
    :param slots: number of workers with a place.
    :param steps_aside: see :class:`~farcall_endpoint.manager.core.extra_workers.Extras`.
    :param default_key: key of the environment of tasks that name none.
    :param prefetch: number of tasks to queue behind the running one.
    :param most_packet_tasks: maximum number of tasks in a packet; 1: also, no calls of graphs are sent ahead.
    :param tasks_per_worker: number of tasks after which a worker is replaced; 0: no limit.
    :param warm: settings for how long workers of environments stay without a task.
    :param start_limit_s: longest start of a worker of the endpoint's own Python.
    :param environment_start_limit_s: longest start of a worker in an environment.
    """

    def __init__(
        self,
        *,
        workers: dict[int, Worker],
        queue: TaskQueue,
        environments: EnvironmentStates,
        preparations: Preparations,
        interruptions: Interruptions,
        graphs: Graphs,
        ahead: AheadCalls,
        reports: Reports,
        actions: list[Action],
        latency: LatencyTasks,
        slots: int,
        steps_aside: bool,
        default_key: str,
        prefetch: PrefetchPolicy,
        most_packet_tasks: int,
        tasks_per_worker: int,
        warm: WarmPoolSettings,
        start_limit_s: float,
        environment_start_limit_s: float,
    ) -> None:
        self._workers = workers
        self._queue = queue
        self._environments = environments
        self._preparations = preparations
        self._interruptions = interruptions
        self._graphs = graphs
        self._ahead = ahead
        self._reports = reports
        self._actions = actions
        self._latency = latency
        self._slots = slots
        self._prefetch = prefetch
        self._most_packet_tasks = most_packet_tasks
        self._tasks_per_worker = tasks_per_worker
        self._start_limit_s = start_limit_s
        self._environment_start_limit_s = environment_start_limit_s
        idle = Pair("", default_key)  # of workers that nothing is waiting for
        self._pool = WarmPool(warm, start_s=environments.start_s, memory_of=environments.memory_bytes)
        self._warm = WarmWorkers(self._pool, workers=workers, queue=queue, kept=idle)
        self.placement = Placement(
            workers=workers,
            queue=queue,
            environments=environments,
            pool=self._pool,
            prefetch=prefetch,
            idle=idle,
            unlimited=not tasks_per_worker,
        )
        self._extras = Extras(workers=workers, queue=queue, slots=slots, steps_aside=steps_aside)
        self.free_slots = collections.deque[tuple[int, Pair | None]]((slot, OWN) for slot in range(slots))
        self._next_worker_id = 0
        self._latency_numbers = itertools.count()
        self.problem = ""

    # -- when ----------------------------------------------------------------------------------------------------------

    def due_at(self, *, only_needed: bool) -> float:
        """When there is something to do without an event: a start, or a worker that is not needed any more.

        :param only_needed: whether no worker is started while no task waits.
        """
        due_at = math.inf
        if self.free_slots and (not only_needed or self._queue):
            due_at = self.placement.idle_launch_at()
        if self._environments or self._warm.parked:
            due_at = min(due_at, self._warm.due_at)
        if self._extras.count:
            due_at = min(due_at, self._extras.due_at)
        if self._latency.controller.classes:
            due_at = min(due_at, self._latency.due_at)
        return due_at

    @property
    def is_hopeless(self) -> bool:
        """Whether workers of the endpoint's own Python do not start, and no worker runs."""
        if self._environments.own.failures < _MAX_START_FAILURES:
            return False
        return not any(each.is_ready for each in self._workers.values())

    def start_due_at(self, worker: Worker) -> float:
        """When :meth:`is_start_overdue` may be true."""
        return worker.since + self._start_limit(worker)

    def is_start_overdue(self, worker: Worker, now: float) -> bool:
        """Whether the start of a worker takes too long."""
        return now - worker.since >= self._start_limit(worker)

    def _start_limit(self, worker: Worker) -> float:
        return self._start_limit_s if worker.environment is None else self._environment_start_limit_s

    # -- workers -------------------------------------------------------------------------------------------------------

    def launch(self, now: float) -> None:
        """Give free slots to workers: to one that is warm without a place, or to a new one."""
        for _ in range(len(self.free_slots)):
            slot, hint = self.free_slots.popleft()
            pair = self.placement.pair_for_slot(hint, now)
            if pair is None:
                self.free_slots.append((slot, hint))
                continue
            if self._queue:
                self._queue.got_place(pair)
            if self._extras.count and self._extras.bring_back(pair, slot=slot, now=now):
                self._reports.changed = True
                continue
            if self._warm.parked and self._warm.resume(pair, slot=slot, now=now):
                self._reports.changed = True
                continue
            self._start_worker(pair, slot, now)

    def ready(self, worker: Worker, now: float) -> None:
        """A worker has started."""
        worker.is_ready = True
        worker.turn_began = now
        worker.start_s = now - worker.since
        if (state := self._environments.get(worker.pair.key)) is not None:
            state.worker_started(worker.pair.submitter, now - worker.since)
        worker.since = now
        self._reports.changed = True
        if not worker.pair.key:
            self._environments.own.started(worker.pair.submitter)
            self.problem = ""

    def remove(self, worker_id: int) -> Worker:
        """A worker has died: its slot is free."""
        worker = self._workers.pop(worker_id)
        self._reports.changed = True
        if worker.extra or worker.aside:
            self._extras.count -= 1
        elif not self._warm.forget(worker) and worker.has_slot:
            # A worker that dies with each task does not keep its place: whose turn it is gets it.
            self.free_slots.append((worker.slot, worker.yields_to))
        return worker

    def start_failed(self, worker: Worker, event: WorkerDied, now: Instant) -> None:
        """A worker died before it was ready. Only the endpoint's own Python is a problem of the manager. A start whose
        place was needed has not failed."""
        if worker.killed and worker.yields_to is not None and worker.excess is None:
            return
        lines = event.stderr_tail.strip().splitlines()
        last_line = lines[-1] if lines else "no output on standard error"
        words = f"{event.reason}; {last_line}"
        if worker.environment is None:
            self._environments.own.failed(worker.pair.submitter, now.mono)
            self.problem = f"a worker did not start: {words}"
            return
        if worker.killed and now.mono - worker.since >= self._environment_start_limit_s:
            words = f"it was not ready within {self._environment_start_limit_s:g} s; {last_line}"
        self._preparations.worker_not_started(worker, words, event.stderr_tail, now)

    def vacate(self, worker: Worker) -> None:
        """Free the place of an idle worker: it stays warm without one if it may, else it is ended. So is a start. A
        driver that waits for its calls stays without a place."""
        place = worker.place
        if worker.jobs:
            self._extras.step_aside(worker)
            self.free_slots.append((worker.slot, place))
        elif worker.pair.target or not worker.is_ready:
            self._interruptions.kill(worker)
        elif self._warm.park(worker):
            self.free_slots.append((worker.slot, place))
        else:
            self._evict(worker)

    def _evict(self, worker: Worker) -> None:
        """End an idle worker whose memory or place is needed, or whose time is over."""
        self._pool.evicted(worker)
        self._interruptions.kill(worker)

    def _start_worker(self, pair: Pair, slot: int, now: float, *, extra: int = 0) -> None:
        state = self._environments.get(pair.key)
        environment = None if state is None else state.environment
        is_restrained = self._interruptions.is_restrained(pair.submitter, now)
        most_tasks = 1 if is_restrained else self._tasks_per_worker or None
        worker = Worker(self._next_worker_id, slot, pair, now, environment, most_tasks, extra=extra)
        self._next_worker_id += 1
        self._workers[worker.worker_id] = worker
        self._extras.count += bool(extra)
        self._actions.append(Launch(worker.worker_id, slot, pair.submitter, environment, pair.target))

    def _add_extra_workers(self, now: float) -> None:
        """Start workers for calls of tasks that wait."""
        while (extra := self._extras.wanted(lambda each: self._can_start(each, now))) is not None:
            self._start_worker(extra.pair, extra.slot, now, extra=extra.number)

    def _can_start(self, pair: Pair, now: float) -> bool:
        return self._environments.is_ready(pair.key, pair.submitter, now)

    # -- tasks ---------------------------------------------------------------------------------------------------------

    def assign(self, now: float, *, has_drivers: bool, only_needed: bool) -> None:
        """Give tasks to workers, and end the workers that are not needed any more.

        :param has_drivers: whether there are tasks with calls, for which extra workers may be needed.
        :param only_needed: whether no worker is started while no task waits.
        """
        if self._latency.controller.classes:
            self._assign_latency(now)
        self._assign(now)
        if has_drivers:
            self._add_extra_workers(now)
        if self._extras.count:
            for worker in self._extras.surplus(now):
                self._interruptions.kill(worker)
        if (self._warm.parked or self._extras.count) and self.free_slots and (not only_needed or self._queue):  # theirs
            self.launch(now)
            self._assign(now)
        if self._environments or self._warm.parked:  # now that those that are ready have got what waits for them
            for worker in self._warm.surplus(self.placement.protected, now=now):
                self._evict(worker)

    def _assign(self, now: float) -> None:
        """Share the queue among workers that are idle or soon will be; others wait, so that packets are few."""
        if self._queue and not self._reports.is_window_full:
            for worker in self.placement.moved_yields(now, self._extras.may_step_aside):
                self.vacate(worker)
            most_left = (self._prefetch.depth + 1) // 2
            workers = [
                worker
                for worker in self._workers.values()
                if len(worker.jobs) <= most_left and not worker.overdue and worker.accepts_tasks
            ]
            if self._extras.count and (held := self._extras.held_back()):
                workers = [worker for worker in workers if worker.worker_id not in held]
            if self._graphs.spread:  # the one that is idle longest comes first, not one that is still awake
                workers.sort(key=lambda worker: (len(worker.jobs), worker.since))
            else:
                workers.sort(key=lambda worker: len(worker.jobs))
            is_starved = False  # whether a payer before has no worker, and could have one now
            pairs = self._queue.in_turn()
            for pair in pairs:
                own = [worker for worker in workers if worker.pair == pair]
                if is_starved:
                    own = [worker for worker in own if worker.jobs or not self.placement.would_overrun(worker, now)]
                self._share(pair, own, now)
                if len(pairs) > 1 and not (is_starved or self.free_slots):
                    is_starved = not self.placement.has_place(pair.share_of) and self._can_start(pair, now)
            if self._queue:
                self._yield_workers(now)
        if self._preparations.has_prewarmed and not self.free_slots:
            self._yield_to_prewarmed(now)

    def _assign_latency(self, now: float) -> None:
        """Give tasks with a target to workers of their classes, and let each class have those that it needs."""
        latency = self._latency
        if latency and not self._reports.is_window_full:
            self._share_latency(now)
            while (pair := latency.wanted(lambda each: self._can_start(each, now))) is not None:
                if (worker := latency.adoptable(pair)) is None:
                    self._start_worker(pair, next(self._latency_numbers) % self._slots, now)
                    continue
                self.free_slots.append((worker.slot, OWN))
                worker.pair = pair
                self._reports.changed = True
                self._actions.append(Adopt(worker.worker_id, pair.target))
                self._share_latency(now)
            if (worker := latency.unused(now)) is not None:
                self._interruptions.kill(worker)
            elif (turn := latency.take_turns(now)) is not None:
                self._yield(*turn)
        for worker in latency.surplus(now):
            self._interruptions.kill(worker)

    def _share_latency(self, now: float) -> None:
        while self._share_latency_once(now):
            pass

    def _share_latency_once(self, now: float) -> bool:
        """Share tasks among the workers of their classes; True if that changed whose turn it is."""
        latency = self._latency
        one_by_one = latency.controller.is_short_first
        accepting: dict[Pair, list[Worker]] = {}
        for each in self._workers.values():
            if each.pair.target and each.accepts_tasks:
                accepting.setdefault(each.pair, []).append(each)
        for pair in latency.in_turn():
            if (workers := accepting.get(pair)) is None:
                continue
            depth, places = latency.depth(pair, self._prefetch.limit), max(0, latency.places(pair, now))
            idle = [each for each in workers if not each.jobs]
            busy = sorted((each for each in workers if 0 < len(each.jobs) <= depth), key=lambda each: len(each.jobs))
            waiting = latency.waiting(pair)
            self._share(pair, [*idle[: min(places, 1) if one_by_one else places], *busy], now, depth=depth)
            if one_by_one and latency.waiting(pair) < waiting:
                return True
        return False

    def _share(self, pair: Pair, workers: Sequence[Worker], now: float, *, depth: int | None = None) -> None:
        """Share the tasks of a pair among its workers.

        :param depth: how many may wait behind each running one; None: as the length of tasks has it.
        """
        queue = self._queue
        depth = self._prefetch.depth if depth is None else depth
        waiting = queue.waiting(pair)
        for index, worker in enumerate(workers):
            if not waiting:
                break
            share = -(-waiting // (len(workers) - index))
            most = min(share, 1 + depth - len(worker.jobs))
            if worker.tasks_left is not None:
                most = min(most, worker.tasks_left)
            room_bytes = orders.MAX_UNREAD_BYTES - worker.unread_bytes
            jobs = queue.take(pair, most, room_bytes=room_bytes, least_depth=worker.extra)
            if jobs:
                waiting -= len(jobs)
                if self._graphs.running and worker.tasks_left is None and self._most_packet_tasks > 1:
                    self._send_with_followers(worker, jobs, now)
                else:
                    self._send_jobs(worker, jobs, now)

    def _yield_workers(self, now: float) -> None:
        """End workers of those that have nothing to do, or more workers than others that need some."""
        if self.free_slots:  # no worker can be started now
            return
        places = {worker.place for worker in self._workers.values() if worker.has_slot}
        if len(places | self._queue.pairs()) == 1:
            return
        stuck: set[Pair] = set()
        while self._yield_one(stuck, now):
            if self.free_slots:  # of a worker that stays warm: its place goes to who needs it before others yield
                self.launch(now)

    def _yield_one(self, stuck: set[Pair], now: float) -> bool:
        """Give one place to the first that needs it and can get it; those that cannot are added to ``stuck``."""
        for pair, _ in self.placement.needs(now):
            if pair not in stuck:
                if (worker := self.placement.place_for(pair, now)) is not None:
                    self._yield(worker, pair)
                    return True
                stuck.add(pair)
        return False

    def _yield_to_prewarmed(self, now: float) -> None:
        for pair, missing in list(self.placement.prewarm_needs(now)):
            for _ in range(missing):
                if (worker := self.placement.place_to_prewarm(pair)) is not None:
                    self._yield(worker, pair)

    def _yield(self, worker: Worker, pair: Pair) -> None:
        worker.yields_to = pair
        if worker.jobs and not self._extras.may_step_aside(worker, pair):
            self._interruptions.recall(worker)
        else:
            self.vacate(worker)

    def _send_with_followers(self, worker: Worker, jobs: Sequence[Job], now: float) -> None:
        """Send tasks to a worker, and with calls of graphs those that only wait for their values."""
        for each, several in self._ahead.placed(worker, jobs):
            for job in several:
                if job.call is not None and job.call.is_ahead:
                    self._queue.passed(job)
            self._send_jobs(each, several, now)

    def _send_jobs(self, worker: Worker, jobs: Sequence[Job], now: float) -> None:
        """Send tasks to a worker, in as few packets as possible."""
        if not worker.jobs:
            if worker.start_s and now != worker.turn_began:
                worker.start_s = 0.0
            worker.since, worker.head_reported, worker.overdue = now, False, False
            if now >= worker.turn_began + TURN_S and not worker.pair.target and len(self._queue.pairs()) <= 1:
                worker.turn_began = now
        if worker.tasks_left is not None:
            worker.tasks_left -= len(jobs)
        if self._environments:
            self._pool.used(worker, len(jobs), now)
        self._actions += orders.send(worker, jobs, most_tasks=self._most_packet_tasks)
