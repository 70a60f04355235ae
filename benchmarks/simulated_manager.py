"""A manager in virtual time: the real core with simulated workers, for experiments about placement and routing.

    manager = SimulatedManager(slots=10, start_s=lambda environment: 1.8, duration_s=lambda order: 1.0)
    manager.handle([TasksReceived([job("t1", environment)])], now=0.0)
    while manager.next_event() < math.inf:
        for progress in manager.advance(manager.next_event()):
            ...

Nothing here sleeps or reads a clock: the caller owns the time, and may drive several managers by one.
"""

from __future__ import annotations

import collections
import dataclasses
import heapq
import itertools
import math
from collections.abc import Callable, Iterable
from typing import Final

from farcall_common.environments import Environment
from farcall_common.task_options import TaskOptions
from farcall_endpoint.contracts.agent_manager import Progress, ResultsTaken, TaskOrder
from farcall_endpoint.contracts.manager_worker import Done, Order, Ready, Synced
from farcall_endpoint.contracts.prefetch import PrefetchPolicy
from farcall_endpoint.manager.core.actions import Action, Kill, Launch, Prepare, Recall, Report, Send
from farcall_endpoint.manager.core.events import (
    EnvironmentReady,
    Event,
    Instant,
    Job,
    PacketsReceived,
    Recalled,
    TasksReceived,
    WorkerDied,
)
from farcall_endpoint.manager.core.manager import ManagerCore
from farcall_endpoint.manager.core.warm_pool import WarmPoolSettings

_ROUNDING_S: Final = 1e-6


def job(
    task_id: str, environment: Environment | None = None, *, function_hash: str = "function", submitter: str = ""
) -> Job:
    """A task without arguments. What it does is for :class:`SimulatedManager` to say."""
    options = TaskOptions(environment=environment)
    return Job(TaskOrder(task_id, 1, function_hash, 0, options, submitter=submitter), b"", b"")


@dataclasses.dataclass
class _Worker:
    worker_id: int
    environment: Environment | None
    pending: collections.deque[Order] = dataclasses.field(default_factory=collections.deque)
    is_ready: bool = False
    running: Order | None = None


class SimulatedManager:
    """One manager and its workers.

    ``cold_starts``: launched workers by the key of their environment (empty: the endpoint's own Python).
    ``preparing``: environments that are prepared now.
    ``cold_tasks``: tasks that were the first of their worker. ``started_at``: when each task began.

    :param slots: of the manager.
    :param start_s: how long a worker starts in an environment (None: the endpoint's own Python).
    :param duration_s: how long a task runs.
    :param prepare_s: how long an environment is prepared, before the first start.
    :param prefetch: most tasks in a worker behind the running one; at most ``horizon_s`` seconds of work.
    """

    def __init__(
        self,
        *,
        slots: int,
        start_s: Callable[[Environment | None], float],
        duration_s: Callable[[Order], float],
        prepare_s: float = 0.0,
        forkable: bool = False,
        memory_bytes: Callable[[str], int] = lambda _: 100 * 2**20,
        prefetch: int = 0,
        horizon_s: float = 0.1,
        warm: WarmPoolSettings | None = None,
        shared_workers: bool = False,
        tasks_per_worker: int = 0,
    ) -> None:
        self.core = ManagerCore(
            slots=slots,
            prefetch=PrefetchPolicy(horizon_s=horizon_s, limit=prefetch),
            warm=warm,
            shared_workers=shared_workers,
            tasks_per_worker=tasks_per_worker,
        )
        self.slots = slots
        self.cold_starts: collections.Counter[str] = collections.Counter()
        self.started_at: dict[str, float] = {}
        self.cold_tasks = 0
        self.preparing = 0
        self._start_s = start_s
        self._duration_s = duration_s
        self._prepare_s = prepare_s
        self._forkable = forkable
        self._memory_bytes = memory_bytes
        self._workers: dict[int, _Worker] = {}
        self._fresh: set[int] = set()
        self._events: list[tuple[float, int, Event]] = []
        self._numbers = itertools.count()
        self._now = 0.0
        self._received = 0
        self._reports: list[Progress] = []

    @property
    def running(self) -> int:
        """How many tasks run now."""
        return sum(worker.running is not None for worker in self._workers.values())

    @property
    def starting(self) -> int:
        """How many workers start now."""
        return sum(not worker.is_ready for worker in self._workers.values())

    @property
    def idle(self) -> dict[str, int]:
        """The workers that have nothing to do, by the key of their environment; without those of the endpoint's own
        Python."""
        return collections.Counter(
            worker.environment.key
            for worker in self._workers.values()
            if worker.is_ready and worker.running is None and worker.environment is not None
        )

    @property
    def waiting(self) -> int:
        """How many tasks were handed over and have not begun."""
        return self._received - len(self.started_at)

    def workers(self) -> dict[str, int]:
        """The workers by the key of their environment; without those of the endpoint's own Python."""
        keys = [worker.environment.key for worker in self._workers.values() if worker.environment is not None]
        return dict(sorted(collections.Counter(keys).items()))

    def next_event(self) -> float:
        """The virtual second of the next thing that happens; infinite while all workers are idle."""
        if self._events:
            return max(self._now, min(self._events[0][0], self.core.next_deadline()))
        return math.inf

    def handle(self, events: Iterable[Event], *, now: float) -> list[Progress]:
        """Let the manager handle events, such as messages of the agent; what it reports."""
        self.advance(now)
        events = list(events)
        self._received += sum(len(event.jobs) for event in events if isinstance(event, TasksReceived))
        self._handle(events)
        return self._take()

    def advance(self, now: float) -> list[Progress]:
        """Let happen what is due until ``now``; what the manager reports."""
        while self._events and self.next_event() <= now:
            self._now = max(self._now, self.next_event())
            due: list[Event] = []
            while self._events and self._events[0][0] <= self._now:
                due.append(heapq.heappop(self._events)[2])
            self._handle([event for event in due if self._happens(event)])
            if self.core.next_deadline() <= self._now:  # by a rounding
                self._now += _ROUNDING_S
        self._now = max(self._now, now)
        if self.core.next_deadline() <= self._now:
            self._handle([])
        return self._take()

    def _take(self) -> list[Progress]:
        reports, self._reports = self._reports, []
        return reports

    def _handle(self, events: list[Event]) -> None:
        while True:
            actions = self.core.handle(events, Instant(self._now, self._now))
            events = [event for action in actions for event in self._perform(action)]
            if not events:
                break
        for worker in list(self._workers.values()):
            self._begin(worker)

    def _perform(self, action: Action) -> list[Event]:
        match action:
            case Prepare(environment=environment):
                ready = EnvironmentReady(environment.key, self._forkable, self._memory_bytes(environment.key))
                self.preparing += 1
                self._later(self._prepare_s, ready)
            case Launch(worker_id=worker_id, environment=environment):
                self._workers[worker_id] = _Worker(worker_id, environment)
                self._fresh.add(worker_id)
                self.cold_starts["" if environment is None else environment.key] += 1
                self._later(self._start_s(environment), PacketsReceived(worker_id, [(Ready(1), b"")]))
            case Send(worker_id=worker_id, packet=packet):
                self._workers[worker_id].pending.extend(packet.orders)
            case Recall(worker_id=worker_id):
                pending = self._workers[worker_id].pending
                revoked = len(pending)
                pending.clear()
                events: list[Event] = [Recalled(worker_id, revoked)]
                return [*events, PacketsReceived(worker_id, [(Synced(), b"")])] if revoked else events
            case Kill(worker_id=worker_id):
                worker = self._workers.pop(worker_id)
                return [WorkerDied(worker_id, len(worker.pending), "killed by SIGKILL")]
            case Report(progress=progress, results=results):
                self._reports.append(progress)
                if size_bytes := sum(map(len, results)):
                    return [ResultsTaken(size_bytes, 2**30)]
        return []

    def _begin(self, worker: _Worker) -> None:
        if worker.running is None and worker.pending:
            worker.running = worker.pending.popleft()
            self.started_at[worker.running.task_id] = self._now
            if worker.worker_id in self._fresh:
                self._fresh.discard(worker.worker_id)
                self.cold_tasks += 1
            duration_s = self._duration_s(worker.running)
            done = Done(worker.running.task_id, self._now, self._now + duration_s)
            self._later(duration_s, PacketsReceived(worker.worker_id, [(done, b"")]))

    def _later(self, delay_s: float, event: Event) -> None:
        heapq.heappush(self._events, (self._now + delay_s, next(self._numbers), event))

    def _happens(self, event: Event) -> bool:
        """Whether an event is still true: its worker may have been killed."""
        if not isinstance(event, PacketsReceived):
            self.preparing -= isinstance(event, EnvironmentReady)
            return True
        worker = self._workers.get(event.worker_id)
        if worker is not None and isinstance(event.packets[0][0], Done):
            worker.running = None
        elif worker is not None:
            worker.is_ready = True
        return worker is not None
