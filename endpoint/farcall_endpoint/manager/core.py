"""What a manager decides: which worker gets which task, which worker must die, what the agent hears. No I/O, no clock.

The shell tells the core what happened and performs the actions that it gives back. Tasks are pipelined: a ready worker
has several ordered ahead, so that short tasks do not wait for a round trip each. What a worker has not started can be
recalled (see :mod:`farcall_endpoint.worker.channel`), so that pipelining never hides a task behind a long one, and
never blurs which single task was running when a worker died. Instants are monotonic seconds.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec

from farcall_common.backoff import Backoff
from farcall_common.errors import ErrorRecord
from farcall_common.fairness import FairQueue
from farcall_common.wire import TaskState
from farcall_endpoint import outcomes
from farcall_endpoint.manager.limits import has_limits
from farcall_endpoint.prefetch import PrefetchPolicy
from farcall_endpoint.protocol import FIRST_WINDOW_BYTES, Died, Finished, Progress, Started, TaskOrder
from farcall_endpoint.shared_memory import Frame
from farcall_endpoint.worker.channel import Done, Order, Run

STARTED_AFTER_S: Final = 0.05
"""A task that runs for so long is reported as running; for a shorter one its end says it all."""
_OVERDUE_S: Final = 0.01
"""A task that runs for so long gives up what waits behind it."""
_FIRST_START_WAIT_S: Final = 0.2
_MAX_START_WAIT_S: Final = 10.0
_MAX_START_FAILURES: Final = 6
"""So many rounds of starting workers may fail in a row, with none that works, until the manager gives up."""
_MAX_KNOWN_FUNCTIONS: Final = 256
_MAX_PACKET_TASKS: Final = 64
_MAX_PACKET_BYTES: Final = 32 * 1024
"""Tasks are joined into packets up to here; one task may be larger."""
_MAX_UNREAD_BYTES: Final = 96 * 1024
_PACKET_BYTES: Final = 1024
"""What a packet costs in a socket's buffer beside its bytes; what a task costs if it travels alone."""


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """A task with its user bytes."""

    order: TaskOrder
    function: Frame
    payload: Frame


@dataclasses.dataclass(frozen=True)
class Launch:
    """Start a worker on a slot, which no other worker has meanwhile. Answered by ``ready`` or ``died``."""

    worker_id: int
    slot: int


@dataclasses.dataclass(frozen=True)
class Send:
    """Order tasks. If that cannot be done, the worker is to be killed."""

    worker_id: int
    packet: Run
    body: tuple[Frame, ...]


@dataclasses.dataclass(frozen=True)
class Recall:
    """Revoke what a worker has not started, then pass on what it has sent, then say ``recalled``. If anything was
    revoked, send Sync, which is answered by ``synced``."""

    worker_id: int


@dataclasses.dataclass(frozen=True)
class Kill:
    """End a worker's process and all that it started. Answered by ``died``."""

    worker_id: int


Action = Launch | Send | Recall | Kill


@dataclasses.dataclass(frozen=True)
class _Stop:
    """Why a task must not go on: how it is to end if it is running."""

    state: TaskState
    record: ErrorRecord


@dataclasses.dataclass(slots=True)
class _Worker:
    worker_id: int
    slot: int
    since: float  # start of the launch, later of the task at the head of ``jobs``
    ready: bool = False
    jobs: collections.deque[Job] = dataclasses.field(default_factory=collections.deque)
    ahead_bytes: int = 0  # what the jobs may take up in the socket's buffer
    head_reported: bool = False
    overdue: bool = False
    known: set[str] = dataclasses.field(default_factory=set)
    stops: dict[str, _Stop] = dataclasses.field(default_factory=dict)
    recalling: bool = False
    syncing: bool = False
    doomed: bool = False

    @property
    def open(self) -> bool:
        return self.ready and not (self.doomed or self.recalling or self.syncing)


class ManagerCore:
    """One per manager.

    :param slots: workers to keep; each runs one task at a time.
    :param prefetch: how many tasks to order ahead, behind the one that runs.
    :param batching: whether several tasks may travel in one packet.
    :param start_limit_s: a worker that is not ready after so long is replaced.
    """

    def __init__(
        self, *, slots: int, prefetch: PrefetchPolicy, batching: bool = True, start_limit_s: float = 60.0
    ) -> None:
        self._slots = slots
        self._start_limit_s = start_limit_s
        self._prefetch = prefetch
        self._most_in_packet = _MAX_PACKET_TASKS if batching else 1
        self._free_slots = collections.deque(range(slots))
        self._queue: FairQueue[Job] = FairQueue()
        self._workers: dict[int, _Worker] = {}
        self._next_worker_id = 0
        self._start_backoff = Backoff(first_s=_FIRST_START_WAIT_S, most_s=_MAX_START_WAIT_S)
        self._launch_at = 0.0
        self._stop_at: float | None = None
        self._problem = ""
        #: Why the manager stopped by itself; empty while it did not.
        self.failure = ""
        self._news = False
        self._actions: list[Action] = []
        self._finished: list[Finished] = []
        self._results: list[Frame] = []
        self._result_bytes = 0  # of those
        self._untaken_bytes = 0  # of results that the agent has not taken yet
        self._window_bytes = FIRST_WINDOW_BYTES
        self._died: list[Died] = []
        self._started: list[Started] = []

    # -- what the agent wants ------------------------------------------------------------------------------------------

    def run(self, jobs: Iterable[Job]) -> None:
        """Queue tasks."""
        if self._stop_at is None:
            for job in jobs:
                self._queue.add(job.order.submitter, job)

    def cancel(self, task_ids: Iterable[str]) -> None:
        """Stop tasks; those that are not here any more have been answered for already."""
        wanted = set(task_ids)
        for job in [job for job in self._queue.items() if job.order.task_id in wanted]:
            self._queue.remove(job.order.submitter, job)
            self._end(job, TaskState.CANCELLED, outcomes.cancelled(running=False).to_json())
        for worker in self._workers.values():
            for job in worker.jobs:
                if job.order.task_id in wanted:
                    stop = _Stop(TaskState.CANCELLED, outcomes.cancelled(running=True))
                    self._stop_task(worker, job.order.task_id, stop)

    def results_taken(self, size_bytes: int, *, window_bytes: int) -> None:
        """The agent has room again for results of so many bytes; so many bytes may be on their way to it."""
        self._untaken_bytes -= size_bytes
        self._window_bytes = window_bytes

    def breached(self, worker_id: int, task_id: str, record: ErrorRecord) -> None:
        """A running task has gone beyond a limit: end it with that record, and its worker with it."""
        worker = self._workers.get(worker_id)
        if worker is not None and worker.jobs and worker.jobs[0].order.task_id == task_id:
            self._stop_task(worker, task_id, _Stop(TaskState.FAILED, record))

    def stop(self, *, grace_s: float, now: float) -> None:
        """Take nothing on, let what runs finish within ``grace_s`` seconds, then end everything."""
        self._stop_at = now + grace_s if self._stop_at is None else min(self._stop_at, now + grace_s)
        self._queue.clear()
        for worker in self._workers.values():
            if worker.ready:
                self._recall(worker)
            else:
                self._kill(worker)

    @property
    def is_over(self) -> bool:
        """Stopped, and all workers are gone."""
        return self._stop_at is not None and not self._workers

    def limited(self) -> list[tuple[int, TaskOrder]]:
        """The running tasks that must be measured, and their workers."""
        heads = [
            (worker.worker_id, worker.jobs[0].order)
            for worker in self._workers.values()
            if worker.jobs and not worker.doomed
        ]
        return [(worker_id, order) for worker_id, order in heads if has_limits(order)]

    def running(self, worker_id: int) -> str | None:
        """The task that a worker runs or begins next; None if it has none."""
        worker = self._workers.get(worker_id)
        return worker.jobs[0].order.task_id if worker is not None and worker.jobs else None

    # -- what happens to workers ---------------------------------------------------------------------------------------

    def ready(self, worker_id: int) -> None:
        """A worker has started."""
        self._workers[worker_id].ready = True
        self._news = True
        self._start_backoff.reset()
        self._problem = ""

    def done(self, worker_id: int, done: Done, result: Frame, *, now: float) -> None:
        """A worker ended a task."""
        worker = self._workers[worker_id]
        job = worker.jobs.popleft()
        self._queue.done(job.order.submitter)
        assert job.order.task_id == done.task_id
        worker.ahead_bytes -= _bytes_ahead(job)
        worker.since, worker.head_reported, worker.overdue = now, False, False
        if worker.stops:
            worker.stops.pop(done.task_id, None)
        self._prefetch.observe(done.ended_at - done.started_at)
        state = TaskState.SUCCESS if done.error is None else TaskState.FAILED
        self._end(
            job,
            state,
            done.error,
            result=result,
            started_at=done.started_at,
            ended_at=done.ended_at,
            details=done.details,
        )
        if self._stop_at is not None and not worker.recalling:
            self._kill(worker)

    def recalled(self, worker_id: int, revoked: int) -> None:
        """A Recall was performed: the last ``revoked`` tasks will not be started; what is left is one at most."""
        worker = self._workers[worker_id]
        worker.recalling = False
        worker.syncing = revoked > 0
        self._take_back(worker, revoked)
        worker.overdue = worker.overdue and bool(worker.jobs)
        idle_at_the_end = self._stop_at is not None and not worker.jobs
        if idle_at_the_end or any(job.order.task_id in worker.stops for job in worker.jobs):
            self._kill(worker)
        else:
            worker.stops.clear()

    def synced(self, worker_id: int) -> None:
        """A worker has passed over all that was revoked."""
        self._workers[worker_id].syncing = False

    def died(self, worker_id: int, *, revoked: int, reason: str, tails: tuple[str, str], now: float) -> None:
        """A worker's process ended. What it sent was passed on already; the last ``revoked`` tasks were not started."""
        worker = self._workers.pop(worker_id)
        self._news = True
        self._free_slots.append(worker.slot)
        self._take_back(worker, revoked)
        stdout_tail, stderr_tail = tails
        if not worker.ready and self._stop_at is None:
            if now >= self._launch_at:  # workers that were started together fail as one round
                self._launch_at = now + self._start_backoff.next_s()
            lines = stderr_tail.strip().splitlines()
            self._problem = f"a worker did not start: {reason}; {lines[-1] if lines else 'it said nothing'}"
        for job in worker.jobs:
            self._queue.done(job.order.submitter)
            task_id = job.order.task_id
            stop = worker.stops.get(task_id)
            if stop is not None:
                record = stop.record
                if stop.state is TaskState.FAILED:
                    record = dataclasses.replace(
                        record, stdout_tail=stdout_tail or None, stderr_tail=stderr_tail or None
                    )
                self._end(job, stop.state, record.to_json())
            elif self._stop_at is None:
                self._died.append(Died(task_id, reason, stdout_tail, stderr_tail))
            # else stopped with the endpoint; the agent knows that it had it

    # -- time ----------------------------------------------------------------------------------------------------------

    def pump(self, *, now: float, epoch: float) -> list[Action]:
        """What to do now. Perform all of it in order, report what it led to, and ask again until nothing is left.

        :param epoch: epoch seconds at ``now``, for what is reported.
        """
        can_start = self._start_backoff.failures < _MAX_START_FAILURES or any(
            each.ready for each in self._workers.values()
        )
        if self._stop_at is None and not can_start:
            self.failure = self._problem
            self.stop(grace_s=0.0, now=now)
        if self._stop_at is not None and now >= self._stop_at:
            for worker in self._workers.values():
                self._kill(worker)
        for worker in self._workers.values():
            self._watch(worker, now=now, epoch=epoch)
        if self._stop_at is None:
            self._launch(now)
            self._assign(now)
        actions, self._actions = self._actions, []
        return actions

    def next_deadline(self) -> float | None:
        """The monotonic second at which ``pump`` may have something to do although nothing happened."""
        deadlines = [self._deadline(worker) for worker in self._workers.values() if not worker.doomed]
        if self._stop_at is not None and self._workers:
            deadlines.append(self._stop_at)
        elif len(self._workers) < self._slots and self._stop_at is None:
            deadlines.append(self._launch_at)
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def take_progress(self) -> tuple[Progress, list[Frame]] | None:
        """What the agent should hear now, if anything, with the results that it refers to. Results for which the agent
        has no room wait here, and while some do nothing is started; unless the manager ends."""
        count, results = len(self._finished), self._results
        if self._is_full and self._stop_at is None:
            count, results = self._fitting()
        if not (count or self._died or self._started or self._news):
            return None
        self._news = False
        progress = self.progress(self._finished[:count])
        size_bytes = sum(map(len, results))
        self._untaken_bytes += size_bytes
        self._result_bytes -= size_bytes
        sent = len(results)
        self._results = self._results[sent:]
        self._finished = [
            each if each.result is None else msgspec.structs.replace(each, result=each.result - sent)
            for each in self._finished[count:]
        ]
        self._died, self._started = [], []
        return progress, results

    def _fitting(self) -> tuple[int, list[Frame]]:
        """How many ends may be reported, and their results: the last one may go beyond the window."""
        results: list[Frame] = []
        room_bytes = self._window_bytes - self._untaken_bytes
        for count, each in enumerate(self._finished):
            if each.result is not None:
                if room_bytes <= 0:
                    return count, results
                results.append(self._results[each.result])
                room_bytes -= len(results[-1])
        return len(self._finished), results

    @property
    def _is_full(self) -> bool:
        """Whether there are as many results for the agent as it has room for, or more."""
        return self._untaken_bytes + self._result_bytes >= self._window_bytes

    def progress(self, finished: Sequence[Finished] = ()) -> Progress:
        """How the manager is, and what has happened."""
        ready = [worker for worker in self._workers.values() if worker.ready]
        return Progress(
            finished=tuple(finished),
            died=tuple(self._died),
            started=tuple(self._started),
            workers=len(ready),
            idle_workers=sum(not worker.jobs for worker in ready),
            problem=self._problem,
        )

    # -- inside --------------------------------------------------------------------------------------------------------

    def _watch(self, worker: _Worker, *, now: float, epoch: float) -> None:
        if worker.doomed:
            return
        age_s = now - worker.since
        if not worker.ready:
            if age_s >= self._start_limit_s:
                self._kill(worker)
            return
        if not worker.jobs:
            return
        head = worker.jobs[0].order
        if not worker.head_reported and age_s >= STARTED_AFTER_S:
            worker.head_reported = True
            self._started.append(Started(head.task_id, epoch - age_s))
        if not worker.overdue and (age_s >= _OVERDUE_S or self._is_full) and len(worker.jobs) > 1:
            worker.overdue = True
            self._recall(worker)
        walltime_s = head.options.walltime_s
        if walltime_s is not None and age_s >= walltime_s and head.task_id not in worker.stops:
            stop = _Stop(TaskState.FAILED, outcomes.walltime_exceeded(walltime_s))
            self._stop_task(worker, head.task_id, stop)

    def _deadline(self, worker: _Worker) -> float | None:
        if not worker.ready:
            return worker.since + self._start_limit_s
        if not worker.jobs:
            return None
        head = worker.jobs[0].order
        delays = [STARTED_AFTER_S] if not worker.head_reported else []
        if len(worker.jobs) > 1 and not worker.overdue:
            delays.append(_OVERDUE_S)
        if head.options.walltime_s is not None and head.task_id not in worker.stops:
            delays.append(head.options.walltime_s)
        return worker.since + min(delays) if delays else None

    def _launch(self, now: float) -> None:
        while len(self._workers) < self._slots and now >= self._launch_at:
            worker = _Worker(self._next_worker_id, self._free_slots.popleft(), now)
            self._next_worker_id += 1
            self._workers[worker.worker_id] = worker
            self._actions.append(Launch(worker.worker_id, worker.slot))

    def _assign(self, now: float) -> None:
        """Share the queue out among those that are idle or soon will be; the others wait, so that packets are few."""
        queue = self._queue
        if not queue or self._is_full:
            return
        depth = self._prefetch.depth
        hungry = [w for w in self._workers.values() if w.open and not w.overdue and len(w.jobs) <= (depth + 1) // 2]
        hungry.sort(key=lambda worker: len(worker.jobs))
        for index, worker in enumerate(hungry):
            share = -(-len(queue) // (len(hungry) - index))
            jobs: list[Job] = []
            ahead_bytes = worker.ahead_bytes
            for _ in range(min(share, 1 + depth - len(worker.jobs))):
                if ahead_bytes > _MAX_UNREAD_BYTES:
                    break
                if (found := queue.take()) is None:
                    break
                ahead_bytes += _bytes_ahead(found[1])
                jobs.append(found[1])
            self._give(worker, jobs, now)

    def _give(self, worker: _Worker, jobs: Sequence[Job], now: float) -> None:
        """Order tasks from a worker, in as few packets as may be."""
        if not jobs:
            return
        if not worker.jobs:
            worker.since, worker.head_reported, worker.overdue = now, False, False
        worker.jobs.extend(jobs)
        start, size = 0, 0
        for index, job in enumerate(jobs):
            worker.ahead_bytes += _bytes_ahead(job)
            size += len(job.payload)
            if index > start and (index - start >= self._most_in_packet or size > _MAX_PACKET_BYTES):
                self._send(worker, jobs[start:index])
                start, size = index, len(job.payload)
        self._send(worker, jobs[start:])

    def _send(self, worker: _Worker, jobs: Sequence[Job]) -> None:
        known = worker.known
        new = {job.order.function_hash: job.function for job in jobs if job.order.function_hash not in known}
        forget = bool(new) and len(known) + len(new) > _MAX_KNOWN_FUNCTIONS
        if forget:
            known.clear()
            new = {job.order.function_hash: job.function for job in jobs}
        known.update(new)
        orders = tuple(
            [
                Order(
                    o.task_id,
                    o.attempt,
                    o.function_hash,
                    len(job.payload),
                    o.options,
                    o.traceparent,
                    o.submitter,
                )
                for job in jobs
                for o in (job.order,)
            ]
        )
        functions = tuple([(function_hash, len(body)) for function_hash, body in new.items()])
        body = (*new.values(), *[job.payload for job in jobs])
        self._actions.append(Send(worker.worker_id, Run(orders, functions, forget), body))

    def _take_back(self, worker: _Worker, count: int) -> None:
        """Put the last jobs of a worker, which it did not start, at the head of the queue; or end them, if that is
        what was wanted."""
        for _ in range(count):
            job = worker.jobs.pop()
            self._queue.done(job.order.submitter)
            worker.ahead_bytes -= _bytes_ahead(job)
            stop = worker.stops.pop(job.order.task_id, None)
            if stop is not None and stop.state is TaskState.CANCELLED:
                self._end(job, TaskState.CANCELLED, outcomes.cancelled(running=False).to_json())
            elif self._stop_at is None:
                self._queue.put_back(job.order.submitter, job)

    def _stop_task(self, worker: _Worker, task_id: str, stop: _Stop) -> None:
        worker.stops[task_id] = stop
        self._recall(worker)

    def _recall(self, worker: _Worker) -> None:
        if not (worker.recalling or worker.doomed):
            worker.recalling = True
            self._actions.append(Recall(worker.worker_id))

    def _kill(self, worker: _Worker) -> None:
        if not worker.doomed:
            worker.doomed = True
            self._actions.append(Kill(worker.worker_id))

    def _end(
        self,
        job: Job,
        state: TaskState,
        error: Mapping[str, Any] | None,
        *,
        result: Frame = b"",
        started_at: float | None = None,
        ended_at: float | None = None,
        details: dict[str, Any] | None = None,
    ) -> None:
        frame = None
        if state is TaskState.SUCCESS or result:
            frame = len(self._results)
            self._results.append(result)
            self._result_bytes += len(result)
        record = dict(error) if error is not None else None
        self._finished.append(Finished(job.order.task_id, state, frame, record, started_at, ended_at, details))


def _bytes_ahead(job: Job) -> int:
    """What a task may take up in a worker's socket; large ones travel beside it."""
    return _PACKET_BYTES + min(len(job.payload), _MAX_PACKET_BYTES)
