"""Calls of graphs sent ahead of the value that they wait for, to the worker that computes it or to another. No I/O.

The manager sends nothing more when the value is ready: the value stays in the worker that made it, or goes directly to
the other worker (:mod:`farcall_endpoint.worker.edges`). The manager gets the value, too, so it can retry the call.
After any failure, the manager takes back the call, which has not started, and sends it when it has the call's inputs.

Messages of two workers arrive in any order: the manager may learn that a call has ended before it learns that the call
before it has. It then reports the end of the second call after the end of the first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec

from farcall_endpoint.contracts.manager_worker import ITSELF, Delivery, Done
from farcall_endpoint.manager.core.actions import Action, Connect
from farcall_endpoint.manager.core.events import Job
from farcall_endpoint.manager.core.graphs import RunningGraph
from farcall_endpoint.manager.core.orders import MAX_UNREAD_BYTES, unread_bytes
from farcall_endpoint.manager.core.workers import Worker

_MOST: Final = 31
"""Maximum number of calls sent ahead behind one call, each of which waits for the call before it."""


class AheadCalls:
    """Calls that wait in a worker for their value, which that worker or another one computes, and connections between
    workers.

    :param workers: all workers of the manager.
    :param actions: the list of actions of the manager's core, for connections.
    """

    def __init__(self, *, workers: Mapping[int, Worker], actions: list[Action]) -> None:
        self._workers = workers
        self._actions = actions
        self._waiting: dict[str, Worker] = {}  # by the id of the call
        self._before: dict[str, str] = {}  # by the id of a call: that of the one whose value it gets
        self._running: set[str] = set()  # ids of calls before others, until their ends were reported
        self._early: dict[str, Callable[[], None]] = {}  # by the id of a call before: the report of the end behind it
        self._connections: dict[tuple[int, int], int] = {}
        self._next_connection = 0

    def __bool__(self) -> bool:
        """Whether any call that is under way was sent ahead."""
        return bool(self._before or self._running)

    def placed(self, worker: Worker, jobs: Sequence[Job]) -> list[tuple[Worker, list[Job]]]:
        """Return the jobs of a worker and as many following calls as sockets have room for, by receiving worker."""
        placed: dict[int, tuple[Worker, list[Job]]] = {worker.worker_id: (worker, [])}
        rooms = {worker.worker_id: _room(worker) - sum(map(unread_bytes, jobs))}
        for job in jobs:
            at, beside = worker, [worker]
            if isinstance(job.owner, RunningGraph) and job.owner.is_spread:
                beside += self._idle_beside(worker)
            for count in range(1, _MOST + 1):
                next_at = beside[count % len(beside)]
                room_bytes = rooms.setdefault(next_at.worker_id, _room(next_at))
                found = job.owner.follower(job, room_bytes) if isinstance(job.owner, RunningGraph) else None
                if found is None:
                    break
                follower, number = found
                rooms[next_at.worker_id] -= unread_bytes(follower)
                connection = self._connection(at, next_at)
                peer = ITSELF if next_at is at else connection
                delivery = Delivery(peer, follower.order.task_id, number)
                assert job.call is not None
                call = msgspec.structs.replace(job.call, deliver=(delivery,))
                placed[at.worker_id][1].append(msgspec.structs.replace(job, call=call))
                self._before[follower.order.task_id] = job.order.task_id
                self._running.add(job.order.task_id)
                if peer != ITSELF:
                    self._waiting[follower.order.task_id] = next_at
                    next_at.awaits += 1
                placed.setdefault(next_at.worker_id, (next_at, []))
                job, at = follower, next_at
            placed[at.worker_id][1].append(job)
        return list(placed.values())

    def waits(self, job: Job) -> bool:
        """Whether a call was sent ahead to another worker, and the value that it needs has not arrived."""
        return job.order.task_id in self._waiting

    def report(self, finish: Callable[..., None], job: Job, *end: Any, **about: Any) -> None:
        """Report the end of a call, after the end of the call whose value it received."""
        task_id = job.order.task_id
        before = self._before.pop(task_id, "")

        def do() -> None:
            finish(job, *end, **about)
            self._over(task_id)

        if before in self._running:
            self._early[before] = do
        else:
            do()

    def _over(self, task_id: str) -> None:
        self._running.discard(task_id)
        if (early := self._early.pop(task_id, None)) is not None:
            early()

    def ended(self, worker: Worker, job: Job, done: Done, now: float) -> list[Worker]:
        """Record the end of a call; return the workers from which calls that wait for its value must be taken back."""
        assert job.call is not None
        if (waited := self._waiting.pop(job.order.task_id, None)) is not None:  # its value came before the word of it
            waited.awaits -= 1
        lost: list[Worker] = []
        for position, delivery in enumerate(job.call.deliver):
            failed = done.error is not None or position in done.undelivered
            target = self._waiting.pop(delivery.task_id, None)
            if target is not None:
                target.awaits -= 1
                if target.runs(delivery.task_id):
                    target.since = now
            if failed:
                lost.append(worker if target is None else target)
        return lost

    def returned(self, job: Job) -> list[Worker]:
        """Record that a call was not started or that its worker died; return the workers from which calls that wait for
        its value must be taken back."""
        waited = self._waiting.pop(job.order.task_id, None)
        if waited is not None:
            waited.awaits -= 1
        self._before.pop(job.order.task_id, None)
        self._over(job.order.task_id)
        deliveries: Iterable[Delivery] = () if job.call is None else job.call.deliver
        return [target for each in deliveries if (target := self._waiting.get(each.task_id)) is not None]

    def forget(self, worker: Worker) -> None:
        """Forget the connections of a worker that died."""
        if self._connections:
            number = worker.worker_id
            self._connections = {pair: each for pair, each in self._connections.items() if number not in pair}

    def _idle_beside(self, worker: Worker) -> list[Worker]:
        return [
            each
            for each in self._workers.values()
            if each.pair == worker.pair
            and each is not worker
            and not (each.jobs or each.extra or each.tasks_left is not None)
            and each.accepts_tasks
        ]

    def _connection(self, one: Worker, other: Worker) -> int:
        pair = (min(one.worker_id, other.worker_id), max(one.worker_id, other.worker_id))
        number = self._connections.get(pair)
        if number is None:
            number = self._connections[pair] = self._next_connection
            self._next_connection += 1
            self._actions.append(Connect(*pair, number))
        return number


def _room(worker: Worker) -> int:
    """How many bytes more may wait in a worker's socket."""
    return MAX_UNREAD_BYTES - worker.unread_bytes
