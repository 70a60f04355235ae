"""Warm pool: idle workers, the order and time in which they are ended, and workers without a place. No I/O, no clock.

Greedy-Dual (N. Young, "The k-server dual and loose competitiveness for paging", 1994), as FaasCache uses it for warm
functions (A. Fuerst and P. Sharma, ASPLOS 2021, section 4): the value of a worker is *clock + frequency x start cost /
memory*. Its clock is the pool's clock at its last task, and the pool's clock is the value of the worker that was ended
last. So a worker that has long been unused loses to a worker in use, whatever its value was.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Final, Literal

from farcall_endpoint.manager.core.task_queue import TaskQueue
from farcall_endpoint.manager.core.workers import Pair, Worker

_UNKNOWN_BYTES: Final = 100 * 2**20
"""Assumed memory of a worker in an environment that was never measured."""
_MOST_PAIRS: Final = 4096
_HALF_LIFE_S: Final = 3600.0
"""Seconds after which a task counts half for the frequency of its pair. FaasCache forgets the frequency when the
last worker ends; remembering it spares pairs that come back a start."""


@dataclasses.dataclass(frozen=True)
class WarmPoolSettings:
    """Limits for workers of environments that stay without a task.

    :param idle_s: maximum idle time in seconds.
    :param memory_bytes: maximum memory of all idle workers; None: no limit.
    :param eviction: the worker to end first: the least valuable, or the least recently used.
    :param extra_workers: maximum number of warm workers without a place, beyond the slots; see
        :func:`~farcall_endpoint.host.slots.extra_workers`.
    """

    idle_s: float = 600.0
    memory_bytes: int | None = None
    eviction: Literal["greedy-dual", "lru"] = "greedy-dual"
    extra_workers: int = 0


class WarmPool:
    """The values of workers.

    :param start_s: how long a start takes in an environment.
    :param memory_of: bytes of a worker of an environment; None if they are not known.
    """

    def __init__(
        self,
        settings: WarmPoolSettings,
        *,
        start_s: Callable[[str], float],
        memory_of: Callable[[str], int | None],
    ) -> None:
        self.settings = settings
        self._start_s = start_s
        self._memory_of = memory_of
        self._clock = 0.0
        #: Of each pair, and as of when.
        self._frequency: dict[Pair, tuple[float, float]] = {}

    def used(self, worker: Worker, tasks: int, now: float) -> None:
        """Record that a worker was sent ``tasks`` tasks."""
        worker.age = self._clock
        frequency, at = self._frequency.pop(worker.pair, (0.0, now))  # the dictionary is in order of the last use
        self._frequency[worker.pair] = frequency * 0.5 ** ((now - at) / _HALF_LIFE_S) + tasks, now
        if len(self._frequency) > _MOST_PAIRS:
            del self._frequency[next(iter(self._frequency))]

    def evicted(self, worker: Worker) -> None:
        """An idle worker is ended."""
        self._clock = max(self._clock, self._value(worker))

    def in_order(self, workers: Iterable[Worker]) -> list[Worker]:
        """Idle workers, the one to end first first."""
        workers = sorted(workers, key=lambda worker: worker.since)
        if self.settings.eviction == "lru":
            return workers
        # The second idle worker of a pair is worth half as much as the first one, and so on.
        ranks: collections.Counter[Pair] = collections.Counter()
        values: dict[int, float] = {}
        for worker in reversed(workers):
            ranks[worker.pair] += 1
            values[worker.worker_id] = self._value(worker, ranks[worker.pair])
        return sorted(workers, key=lambda worker: values[worker.worker_id])

    def expired(self, idle: Iterable[Worker], protected: Collection[int], *, now: float) -> list[Worker]:
        """Return the workers that have been idle too long, and those beyond the memory limit of idle workers."""
        candidates = [worker for worker in idle if worker.worker_id not in protected]
        ended = [worker for worker in candidates if now - worker.since >= self.settings.idle_s]
        if self.settings.memory_bytes is not None:
            left = self.in_order(worker for worker in candidates if now - worker.since < self.settings.idle_s)
            excess = sum(map(self.memory_bytes, idle)) - sum(map(self.memory_bytes, ended))
            excess -= self.settings.memory_bytes
            for worker in left:
                if excess <= 0:
                    break
                excess -= self.memory_bytes(worker)
                ended.append(worker)
        return ended

    def memory_bytes(self, worker: Worker) -> int:
        """Return the memory of a worker: measured for its environment, else an estimate."""
        return self._memory_of(worker.pair.key) or _UNKNOWN_BYTES

    def next_expiry(self, idle: Iterable[Worker], protected: Collection[int]) -> float:
        """Return when the idle time of the next worker ends."""
        ends = [worker.since + self.settings.idle_s for worker in idle if worker.worker_id not in protected]
        return min(ends, default=math.inf)

    def _value(self, worker: Worker, rank: int = 1) -> float:
        frequency = self._frequency.get(worker.pair, (0.0, 0.0))[0] / rank
        return worker.age + frequency * self._start_s(worker.pair.key) / (self.memory_bytes(worker) / 2**20)


class WarmWorkers:
    """The workers of a manager that stay although they have nothing to do.

    ``parked``: workers without a place, by id. ``due_at``: when :meth:`surplus` may return workers.

    :param workers: all workers of the manager.
    :param kept: the pair of workers that stay with a place although no task waits for them.
    """

    def __init__(self, pool: WarmPool, *, workers: Mapping[int, Worker], queue: TaskQueue, kept: Pair) -> None:
        self._pool = pool
        self._workers = workers
        self._queue = queue
        self._kept = kept
        self.parked: dict[int, Worker] = {}
        self.due_at = 0.0

    def park(self, worker: Worker) -> bool:
        """An idle worker gives its place away, and stays without one; False if it may not.

        Threads that a task left behind run on: those of other submitters than the owner never do without a place.
        """
        if not self._pool.settings.extra_workers or worker.tasks_left is not None or worker.pair.submitter:
            return False
        worker.yields_to, worker.parked = None, True
        self.parked[worker.worker_id] = worker
        self.due_at = 0.0
        return True

    def resume(self, pair: Pair, *, slot: int, now: float) -> bool:
        """Give a place to a worker of a pair that has none; False if there is no such worker."""
        worker = next((each for each in self.parked.values() if each.is_idle and each.pair == pair), None)
        if worker is None:
            return False
        del self.parked[worker.worker_id]
        worker.parked, worker.slot, worker.turn_began = False, slot, now
        return True

    def forget(self, worker: Worker) -> bool:
        """A worker has ended; whether it had no place."""
        return self.parked.pop(worker.worker_id, None) is not None

    def surplus(self, protected: Callable[[], Collection[int]], *, now: float) -> list[Worker]:
        """The workers to end: those whose time is over, and those for which there is no memory, or no place and no
        room without one.

        :param protected: returns the ids of those that should be there.
        """
        idle = self._idle()
        if not idle:
            self.due_at = math.inf
            return []
        spared = protected()
        ended = self._pool.expired(idle, spared, now=now)
        gone = {worker.worker_id for worker in ended}
        parked = [worker for number, worker in self.parked.items() if not worker.killed and number not in gone]
        if (excess := len(parked) - self._pool.settings.extra_workers) > 0:
            in_order = self._pool.in_order(parked)
            in_order.sort(key=lambda worker: worker.worker_id in spared)
            ended += in_order[:excess]
            gone.update(worker.worker_id for worker in in_order[:excess])
        self.due_at = self._pool.next_expiry([worker for worker in idle if worker.worker_id not in gone], spared)
        return ended

    def _idle(self) -> list[Worker]:
        """The workers of environments that have nothing to do, and those of any that have no place."""
        kept = self._kept
        return [
            worker
            for worker in self._workers.values()
            if (worker.parked or (worker.pair.key and worker.pair != kept and not self._queue.waiting(worker.pair)))
            and worker.is_idle
        ]
