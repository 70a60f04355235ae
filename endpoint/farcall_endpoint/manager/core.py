"""The manager's core: which worker gets which task, which worker is killed, what the agent receives. No I/O, no clock.

The shell reports events and performs actions. Tasks are pipelined: a ready worker has several queued in its socket, so
that short tasks do not wait for a round trip each. Tasks that a worker has not started can be recalled (see
:mod:`farcall_endpoint.worker.channel`), so that no task waits behind a long one, and exactly one task was running when
a worker died.

A worker serves one submitter. It keeps its submitter while others need no worker, and at least for a turn; then it is
ended, and another one is started in its place.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from farcall_common.backoff import Backoff
from farcall_common.errors import ErrorRecord
from farcall_common.fairness import FairQueue
from farcall_common.limits import MAX_PAYLOAD_BYTES
from farcall_common.retries import WALLTIME_NAME
from farcall_common.wire import TaskState
from farcall_endpoint import outcomes
from farcall_endpoint.manager.actions import Action, Kill, Launch, Leave, ReadStreams, Recall, Report, Send
from farcall_endpoint.manager.events import (
    AgentLost,
    Event,
    Instant,
    Job,
    LimitExceeded,
    MalformedReceived,
    PacketsReceived,
    Recalled,
    TasksReceived,
    Terminated,
    WorkerDied,
)
from farcall_endpoint.output import Printed, split
from farcall_endpoint.prefetch import PrefetchPolicy
from farcall_endpoint.protocol import (
    FIRST_WINDOW_BYTES,
    CancelTasks,
    Died,
    Finished,
    Progress,
    ReadOutput,
    ResultsTaken,
    Started,
    Stop,
    TaskOrder,
    WantedOutput,
)
from farcall_endpoint.shared_memory import Frame
from farcall_endpoint.worker.channel import Begun, Done, Order, Ready, Run, Synced

STARTED_AFTER_S: Final = 0.05
"""A task that runs for so long is reported as running; a shorter one only by its result."""
_UNSEEN_S: Final = 0.1
"""A worker reports the times of a task, and the task's code runs in it: it may hide no more than this."""
_OVERDUE_S: Final = 0.01
"""When a task runs for so long, the tasks behind it are recalled."""
_REPORT_PERIOD_S: Final = 1.0
"""Longest time between two reports; a local agent also sees the manager die."""
_FIRST_START_WAIT_S: Final = 0.2
_MAX_START_WAIT_S: Final = 10.0
TURN_S: Final = 1.0
"""A worker with tasks keeps its submitter for so long, so that fairness does not cost a process start each time."""
_MAX_START_FAILURES: Final = 6
"""After so many failed rounds of worker starts in a row, and with no running worker, the manager ends."""
_MAX_KNOWN_FUNCTIONS: Final = 256
_MAX_PACKET_TASKS: Final = 64
_MAX_PACKET_BYTES: Final = 32 * 1024
"""Tasks are joined into packets up to here; one task may be larger."""
_MAX_UNREAD_BYTES: Final = 96 * 1024
_END_OF_TIME: Final = 2.0**40
"""Epoch seconds that no clock shows."""
_PACKET_BYTES: Final = 1024
"""Overhead of a packet in a socket's buffer, and so of a task that is sent alone."""


@dataclasses.dataclass(frozen=True)
class _StopReason:
    """How a task ends that must be stopped, if it is running."""

    state: TaskState
    record: ErrorRecord
    is_retried: bool = False


@dataclasses.dataclass(slots=True)
class _Worker:
    worker_id: int
    slot: int
    submitter: str
    since: float  # start of the launch, later of the task at the head of ``jobs``
    turn_began: float = 0.0
    yields_to: str | None = None  # the submitter that gets its place, after the task that runs
    is_ready: bool = False
    jobs: collections.deque[Job] = dataclasses.field(default_factory=collections.deque)
    unread_bytes: int = 0  # upper limit of the jobs' bytes in the socket's buffer
    head_reported: bool = False
    overdue: bool = False
    functions: set[str] = dataclasses.field(default_factory=set)
    stops: dict[str, _StopReason] = dataclasses.field(default_factory=dict)
    begun: Begun | None = None  # of the running task, if its memory is limited
    recalling: bool = False
    syncing: bool = False
    killed: bool = False

    @property
    def accepts_tasks(self) -> bool:
        return self.is_ready and self.yields_to is None and not (self.killed or self.recalling or self.syncing)

    def runs(self, task_id: str) -> bool:
        return bool(self.jobs) and self.jobs[0].order.task_id == task_id


class ManagerCore:
    """All decisions of one manager.

    :param slots: number of workers; each runs one task at a time.
    :param prefetch: how many tasks to queue behind the running one.
    :param batching: whether several tasks may share a packet.
    :param start_limit_s: a worker that is not ready after so long is replaced.
    :param shared_workers: whether a worker serves all submitters.
    :param refusal: why tasks of other submitters than the owner are refused; empty if they are not.
    """

    def __init__(
        self,
        *,
        slots: int,
        prefetch: PrefetchPolicy,
        batching: bool = True,
        start_limit_s: float = 60.0,
        shared_workers: bool = False,
        refusal: str = "",
    ) -> None:
        self._slots = slots
        self._start_limit_s = start_limit_s
        self._prefetch = prefetch
        self._max_packet_tasks = _MAX_PACKET_TASKS if batching else 1
        #: Each with the submitter that gets it, if that still has waiting tasks.
        self._free_slots = collections.deque((slot, "") for slot in range(slots))
        self._queue: FairQueue[Job] = FairQueue()
        self._workers: dict[int, _Worker] = {}
        self._shared_workers = shared_workers
        self._refusal = refusal
        self._next_worker_id = 0
        self._yield_at: float | None = None  # when a turn ends that another submitter waits for
        self._start_backoff = Backoff(first_s=_FIRST_START_WAIT_S, most_s=_MAX_START_WAIT_S)
        self._launch_at = 0.0
        self._stop_at: float | None = None
        self._stop_reason = "the agent stopped it"
        self._failure = ""
        self._problem = ""
        self._agent_lost = False
        self._left = False
        self._actions: list[Action] = []
        self._report_at = 0.0
        self._changed = False  # the number of workers, since the last report
        self._finished: list[Finished] = []
        self._results: list[Frame] = []
        self._result_bytes = 0  # of those
        self._untaken_bytes = 0  # of sent results that the agent has not taken yet
        self._window_bytes = FIRST_WINDOW_BYTES
        self._died: list[Died] = []
        self._started: list[Started] = []
        self._reads: list[ReadOutput] = []

    # -- the shell's side ----------------------------------------------------------------------------------------------

    def handle(self, events: Iterable[Event], now: Instant) -> list[Action]:
        """Handle events in order, and what is due; the actions to perform."""
        for event in events:
            self._handle(event, now)
        self._handle_deadlines(now)
        self._report(now.mono)
        # Behind the report: the agent has the output of tasks that have ended before it hears that they do not run.
        self._actions += map(self._read_output, self._reads)
        self._reads = []
        if self.is_over and not self._left:
            self._left = True
            if not self._agent_lost:
                self._actions.append(Leave(self._failure or self._stop_reason, bool(self._failure)))
        actions, self._actions = self._actions, []
        return actions

    def next_deadline(self) -> float:
        """The monotonic second at which :meth:`handle` is due without an event."""
        deadline = self._report_at
        if self._stop_at is not None:
            deadline = min(deadline, self._stop_at)
        elif len(self._workers) < self._slots:
            deadline = min(deadline, self._launch_at)
        if self._yield_at is not None:
            deadline = min(deadline, self._yield_at)
        due = [self._deadline(worker) for worker in self._workers.values() if not worker.killed]
        return min([deadline, *[each for each in due if each is not None]])

    @property
    def is_over(self) -> bool:
        """Stopped, and all workers have ended."""
        return self._stop_at is not None and not self._workers

    def limited(self) -> list[tuple[int, TaskOrder, Begun | None]]:
        """The running tasks that must be measured, by worker."""
        heads = [
            (worker.worker_id, worker.jobs[0].order, worker.begun)
            for worker in self._workers.values()
            if worker.jobs and not worker.killed
        ]
        return [head for head in heads if has_limits(head[1])]

    def _handle(self, event: Event, instant: Instant) -> None:
        now = instant.mono
        match event:
            case PacketsReceived(worker_id=worker_id, packets=packets):
                worker = self._workers[worker_id]
                for packet, body in packets:
                    if isinstance(packet, Done):
                        self._task_done(worker, packet, body, instant)
                    elif isinstance(packet, Begun):
                        if worker.runs(packet.task_id) and worker.begun is None:  # a task may forge a second one
                            worker.begun = packet
                    elif isinstance(packet, Synced) and worker.syncing:
                        worker.syncing = False
                    elif isinstance(packet, Ready) and not worker.is_ready:
                        self._worker_ready(worker, now)
                    else:
                        self._kill(worker, f"{type(packet).__name__} out of turn")
            case TasksReceived(jobs=jobs):
                if self._stop_at is None:
                    for job in jobs:
                        if self._refusal and job.order.submitter:
                            self._finish(job, TaskState.FAILED, outcomes.isolation_missing(self._refusal).to_json())
                        elif job.refusal is not None:
                            self._finish(job, TaskState.FAILED, job.refusal.to_json())
                        else:
                            self._queue.add(job.order.submitter, job)
            case ResultsTaken(size_bytes=size_bytes, window_bytes=window_bytes):
                self._untaken_bytes -= size_bytes
                self._window_bytes = window_bytes
            case Recalled(worker_id=worker_id, revoked=revoked):
                self._recalled(self._workers[worker_id], revoked)
            case WorkerDied():
                self._worker_died(event, now)
            case CancelTasks(task_ids=task_ids):
                self._cancel(set(task_ids))
            case ReadOutput():
                self._reads.append(event)
            case LimitExceeded(worker_id=worker_id, task_id=task_id, record=record):
                exceeding = self._workers.get(worker_id)
                if exceeding is not None and exceeding.runs(task_id):
                    self._stop_task(exceeding, task_id, _StopReason(TaskState.FAILED, record))
            case MalformedReceived(worker_id=worker_id, reason=reason):
                self._kill(self._workers[worker_id], reason)
            case Stop(grace_s=grace_s):
                self._stop(grace_s, now)
            case Terminated(reason=reason):
                self._stop_reason = reason
                self._stop(0.0, now)
            case AgentLost():
                self._agent_lost = True
                self._stop(0.0, now)

    # -- events --------------------------------------------------------------------------------------------------------

    def _cancel(self, task_ids: Collection[str]) -> None:
        """Stop tasks; results of unknown ones were sent already."""
        for job in [job for job in self._queue.items() if job.order.task_id in task_ids]:
            self._queue.remove(job.order.submitter, job)
            self._finish(job, TaskState.CANCELLED, outcomes.cancelled(running=False).to_json())
        for worker in self._workers.values():
            for job in worker.jobs:
                if job.order.task_id in task_ids:
                    stop = _StopReason(TaskState.CANCELLED, outcomes.cancelled(running=True))
                    self._stop_task(worker, job.order.task_id, stop)

    def _read_output(self, request: ReadOutput) -> Action:
        """Read the streams of the workers where the tasks are the ones that run now."""
        running = {
            worker.jobs[0].order.task_id: worker
            for worker in self._workers.values()
            if worker.jobs and worker.is_ready and not worker.killed
        }
        found: list[tuple[WantedOutput, int | None, bool]] = []
        for wanted in request.tasks:
            worker = running.get(wanted.task_id)
            is_kept = worker is None or worker.jobs[0].order.options.output_bytes > 0
            found.append((wanted, None if worker is None else worker.worker_id, is_kept))
        return ReadStreams(request.request_id, request.max_bytes, found)

    def _stop(self, grace_s: float, now: float) -> None:
        """Accept no more tasks, let running ones finish within ``grace_s`` seconds, then kill all workers."""
        self._stop_at = now + grace_s if self._stop_at is None else min(self._stop_at, now + grace_s)
        self._queue.clear()
        for worker in self._workers.values():
            if worker.is_ready:
                self._recall(worker)
            else:
                self._kill(worker)

    def _worker_ready(self, worker: _Worker, now: float) -> None:
        worker.is_ready = True
        worker.turn_began = now
        self._changed = True
        self._start_backoff.reset()
        self._problem = ""

    def _task_done(self, worker: _Worker, done: Done, result: Frame, now: Instant) -> None:
        if not worker.runs(done.task_id):  # a task has written to its worker's socket
            self._kill(worker, "the result of a task that it does not run")
            return
        if not (0 <= done.started_at < _END_OF_TIME and 0 <= done.ended_at < _END_OF_TIME):  # NaN is neither
            self._kill(worker, "times that cannot be")
            return
        if done.printed is not None and not done.printed.fits(len(result)):
            self._kill(worker, "an output with lengths that cannot be")
            return
        result_bytes = len(result) - (0 if done.printed is None else done.printed.tail_bytes)
        if worker.submitter and result_bytes > MAX_PAYLOAD_BYTES:  # the worker checks it, too
            self._kill(worker, f"a result of {result_bytes} bytes")
            return
        job = worker.jobs.popleft()
        self._queue.done(job.order.submitter)
        worker.unread_bytes -= _unread_bytes(job)
        output = None
        if done.printed is not None:
            result, tails = split(result, done.printed)
            output = done.printed, tails
        started_at, ended_at = done.started_at, done.ended_at
        if (measured_s := now.mono - worker.since) - (ended_at - started_at) > _UNSEEN_S:
            started_at, ended_at = now.epoch - measured_s, now.epoch
        worker.since, worker.head_reported, worker.overdue, worker.begun = now.mono, False, False, None
        if worker.stops:
            worker.stops.pop(done.task_id, None)
        self._prefetch.observe(ended_at - started_at)
        state = TaskState.SUCCESS if done.error is None else TaskState.FAILED
        self._finish(
            job,
            state,
            done.error,
            result=result,
            started_at=started_at,
            ended_at=ended_at,
            details=done.details,
            is_retried=done.is_retried,
            output=output,
        )
        if self._stop_at is not None and not worker.recalling:
            self._kill(worker)

    def _recalled(self, worker: _Worker, revoked: int) -> None:
        worker.recalling = False
        worker.syncing = revoked > 0
        self._requeue(worker, revoked)
        worker.overdue = worker.overdue and bool(worker.jobs)
        is_idle_at_stop = self._stop_at is not None and not worker.jobs
        if is_idle_at_stop or any(job.order.task_id in worker.stops for job in worker.jobs):
            self._kill(worker)
        else:
            worker.stops.clear()

    def _worker_died(self, event: WorkerDied, now: float) -> None:
        worker = self._workers.pop(event.worker_id)
        self._changed = True
        # It may have sent an invalid message and ended at once: it is not there any more to be killed or recalled.
        self._actions = [
            action
            for action in self._actions
            if not isinstance(action, Kill | Recall) or action.worker_id != worker.worker_id
        ]
        self._free_slots.append((worker.slot, worker.submitter if worker.yields_to is None else worker.yields_to))
        self._requeue(worker, event.revoked)
        stdout_tail, stderr_tail = event.stdout_tail, event.stderr_tail
        output = event.output if event.output is not None and event.output[1] else None
        if not worker.is_ready and self._stop_at is None:
            if now >= self._launch_at:  # workers that were started together fail as one round
                self._launch_at = now + self._start_backoff.next_s()
            lines = stderr_tail.strip().splitlines()
            last_line = lines[-1] if lines else "no output on standard error"
            self._problem = f"a worker did not start: {event.reason}; {last_line}"
        for job in worker.jobs:
            self._queue.done(job.order.submitter)
            task_id = job.order.task_id
            stop = worker.stops.get(task_id)
            if not job.order.options.output_bytes:
                output = None
            if stop is not None:
                record = stop.record
                if stop.state is TaskState.FAILED:
                    record = dataclasses.replace(
                        record, stdout_tail=stdout_tail or None, stderr_tail=stderr_tail or None
                    )
                self._finish(job, stop.state, record.to_json(), is_retried=stop.is_retried, output=output)
            elif self._stop_at is None:
                self._died.append(Died(task_id, event.reason, stdout_tail, stderr_tail, *(output or ())))
            # else: it stopped with the endpoint, and the agent knows which manager had it

    # -- time ----------------------------------------------------------------------------------------------------------

    def _handle_deadlines(self, now: Instant) -> None:
        can_start = self._start_backoff.failures < _MAX_START_FAILURES or any(
            each.is_ready for each in self._workers.values()
        )
        if self._stop_at is None and not can_start:
            self._failure = self._problem
            self._stop(0.0, now.mono)
        if self._stop_at is not None and now.mono >= self._stop_at:
            for worker in self._workers.values():
                self._kill(worker)
        for worker in self._workers.values():
            self._check_worker(worker, now)
        if self._stop_at is None:
            self._launch(now.mono)
            self._assign(now.mono)

    def _check_worker(self, worker: _Worker, now: Instant) -> None:
        if worker.killed:
            return
        age_s = now.mono - worker.since
        if not worker.is_ready:
            if age_s >= self._start_limit_s:
                self._kill(worker)
            return
        if not worker.jobs:
            if worker.yields_to is not None:
                self._kill(worker)
            return
        head = worker.jobs[0].order
        if not worker.head_reported and age_s >= STARTED_AFTER_S:
            worker.head_reported = True
            self._started.append(Started(head.task_id, now.epoch - age_s))
        if not worker.overdue and (age_s >= _OVERDUE_S or self._is_window_full) and len(worker.jobs) > 1:
            worker.overdue = True
            self._recall(worker)
        walltime_s = head.options.walltime_s
        if walltime_s is not None and age_s >= walltime_s and head.task_id not in worker.stops:
            is_retried = WALLTIME_NAME in head.options.retry_on
            stop = _StopReason(TaskState.FAILED, outcomes.walltime_exceeded(walltime_s), is_retried)
            self._stop_task(worker, head.task_id, stop)

    def _deadline(self, worker: _Worker) -> float | None:
        if not worker.is_ready:
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

    # -- reports -------------------------------------------------------------------------------------------------------

    def _report(self, now: float) -> None:
        """Report changes at once, and the number of workers each second.

        Results for which the agent has no room stay here, and while some do, no task is started; unless the manager
        stops.
        """
        count, results = len(self._finished), self._results
        if self._is_window_full and self._stop_at is None:
            count, results = self._results_within_window()
        if not (count or self._died or self._started or self._changed or now >= self._report_at):
            return
        self._report_at = now + _REPORT_PERIOD_S
        self._changed = False
        ready = [worker for worker in self._workers.values() if worker.is_ready]
        progress = Progress(
            finished=tuple(self._finished[:count]),
            died=tuple(self._died),
            started=tuple(self._started),
            workers=len(ready),
            idle_workers=sum(not worker.jobs for worker in ready),
            problem=self._problem,
        )
        size_bytes = sum(map(len, results))
        self._untaken_bytes += size_bytes
        self._result_bytes -= size_bytes
        sent = len(results)
        self._results = self._results[sent:]
        self._finished = [_moved(each, sent) for each in self._finished[count:]]
        self._died, self._started = [], []
        self._actions.append(Report(progress, results))

    def _results_within_window(self) -> tuple[int, list[Frame]]:
        """How many finished tasks may be reported, and their results; the last one may exceed the window."""
        results: list[Frame] = []
        room_bytes = self._window_bytes - self._untaken_bytes
        for count, each in enumerate(self._finished):
            bodies = [self._results[body] for body in (each.result, each.output) if body is not None]
            if bodies and room_bytes <= 0:
                return count, results
            results += bodies
            room_bytes -= sum(map(len, bodies))
        return len(self._finished), results

    @property
    def _is_window_full(self) -> bool:
        """Whether the results fill the room that the agent has for them."""
        return self._untaken_bytes + self._result_bytes >= self._window_bytes

    # -- workers -------------------------------------------------------------------------------------------------------

    def _launch(self, now: float) -> None:
        while len(self._workers) < self._slots and now >= self._launch_at:
            slot, submitter = self._free_slots.popleft()
            if not self._queue.of(submitter):
                submitter = next((each for each, _ in self._in_need()), "")
            worker = _Worker(self._next_worker_id, slot, submitter, now)
            self._next_worker_id += 1
            self._workers[worker.worker_id] = worker
            self._actions.append(Launch(worker.worker_id, worker.slot, submitter))

    def _assign(self, now: float) -> None:
        """Share the queue among workers that are idle or soon will be; others wait, so that packets are few."""
        self._yield_at = None
        if not self._queue or self._is_window_full:
            return
        depth = self._prefetch.depth
        if not self._shared_workers:
            self._move_yields(now)
        workers = [
            worker
            for worker in self._workers.values()
            if worker.accepts_tasks and not worker.overdue and len(worker.jobs) <= (depth + 1) // 2
        ]
        workers.sort(key=lambda worker: len(worker.jobs))
        if self._shared_workers:
            self._share(None, workers, now)
            return
        is_starved = False  # whether a submitter before has no worker
        for submitter in self._queue.in_turn():
            own = [worker for worker in workers if worker.submitter == submitter]
            if is_starved:
                own = [worker for worker in own if worker.jobs or not self._would_overrun(worker, now)]
            self._share(submitter, own, now)
            has_place = any(submitter in (each.submitter, each.yields_to) for each in self._workers.values())
            is_starved = is_starved or not (has_place or len(self._workers) < self._slots)
        if self._queue:
            self._yield_workers(now)

    def _share(self, submitter: str | None, workers: Sequence[_Worker], now: float) -> None:
        """Share the tasks of one submitter, or of all, among workers."""
        queue = self._queue
        depth = self._prefetch.depth
        for index, worker in enumerate(workers):
            waiting = len(queue) if submitter is None else len(queue.of(submitter))
            share = -(-waiting // (len(workers) - index))
            jobs: list[Job] = []
            unread_bytes = worker.unread_bytes
            for _ in range(min(share, 1 + depth - len(worker.jobs))):
                if unread_bytes > _MAX_UNREAD_BYTES:
                    break
                if (found := queue.take(submitter=submitter)) is None:
                    break
                unread_bytes += _unread_bytes(found[1])
                jobs.append(found[1])
            self._send_jobs(worker, jobs, now)

    def _in_need(self) -> Iterator[tuple[str, int]]:
        """Submitters with more waiting tasks than workers that start for them, the next one first; how many more."""
        if self._shared_workers or not self._queue:
            return
        coming = collections.Counter(
            worker.submitter if worker.yields_to is None else worker.yields_to
            for worker in self._workers.values()
            if not worker.is_ready or worker.yields_to is not None
        )
        for submitter in self._queue.in_turn():
            missing = len(self._queue.of(submitter)) - coming[submitter]
            if missing > 0:
                yield submitter, missing

    def _yield_workers(self, now: float) -> None:
        """End workers of submitters that have nothing to do, or more workers than others that need some."""
        if len(self._workers) < self._slots:  # no worker can be started now
            return
        counts = collections.Counter(
            worker.submitter if worker.yields_to is None else worker.yields_to for worker in self._workers.values()
        )
        if len(counts.keys() | self._queue.waiting()) == 1:
            return
        for submitter, missing in list(self._in_need()):
            for _ in range(missing):
                if (worker := self._worker_for(submitter, counts, now)) is None:
                    break
                counts[worker.submitter] -= 1
                counts[submitter] += 1
                worker.yields_to = submitter
                if worker.jobs:
                    self._recall(worker)
                else:
                    self._kill(worker)

    def _move_yields(self, now: float) -> None:
        """Of the workers of a submitter, the first that is idle yields. None does if nothing waits for it any more."""
        busy = [worker for worker in self._workers.values() if worker.yields_to is not None and worker.jobs]
        for worker in busy:
            if worker.yields_to is None or worker.killed:
                continue
            if not self._queue.of(worker.yields_to):
                worker.yields_to = None
                continue
            for other in self._workers.values():
                is_idle = other.accepts_tasks and not other.jobs
                if is_idle and other.submitter == worker.submitter and now >= other.turn_began + TURN_S:
                    other.yields_to, worker.yields_to = worker.yields_to, None
                    self._kill(other)
                    break

    def _worker_for(self, submitter: str, counts: Mapping[str, int], now: float) -> _Worker | None:
        """The worker whose place a submitter gets; None if there is none now."""
        others = [
            worker
            for worker in self._workers.values()
            if worker.is_ready and not worker.killed and worker.yields_to is None and worker.submitter != submitter
        ]
        for worker in others:
            if not worker.jobs and not self._queue.of(worker.submitter):
                return worker
            if not worker.jobs and not counts[submitter] and self._would_overrun(worker, now):
                return worker
        richest = max((counts[each.submitter] for each in others), default=0)
        if richest <= counts[submitter]:
            return None
        worker = min((each for each in others if counts[each.submitter] == richest), key=lambda each: each.turn_began)
        ends = worker.turn_began + TURN_S
        if richest == counts[submitter] + 1 > 1:  # the odd worker changes sides, once in a turn
            of_both = [each for each in self._workers.values() if each.submitter in (submitter, worker.submitter)]
            if not all(each.is_ready and each.yields_to is None for each in of_both):
                return None
            ends = max(each.turn_began for each in of_both) + TURN_S
        if now >= ends:
            return worker
        self._yield_at = ends if self._yield_at is None else min(self._yield_at, ends)
        return None

    def _would_overrun(self, worker: _Worker, now: float) -> bool:
        """Whether a task of average length would end after the worker's turn."""
        return now + (self._prefetch.mean_s or 0.0) > worker.turn_began + TURN_S

    def _send_jobs(self, worker: _Worker, jobs: Sequence[Job], now: float) -> None:
        """Send tasks to a worker, in as few packets as possible."""
        if not jobs:
            return
        if not worker.jobs:
            worker.since, worker.head_reported, worker.overdue = now, False, False
            if len(self._queue.waiting()) <= 1 and now >= worker.turn_began + TURN_S:
                worker.turn_began = now
        worker.jobs.extend(jobs)
        start, size = 0, 0
        for index, job in enumerate(jobs):
            worker.unread_bytes += _unread_bytes(job)
            size += len(job.payload)
            if index > start and (index - start >= self._max_packet_tasks or size > _MAX_PACKET_BYTES):
                self._send_packet(worker, jobs[start:index])
                start, size = index, len(job.payload)
        self._send_packet(worker, jobs[start:])

    def _send_packet(self, worker: _Worker, jobs: Sequence[Job]) -> None:
        known = worker.functions
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
                    o.data_only,
                    o.retry,
                )
                for job in jobs
                for o in (job.order,)
            ]
        )
        functions = tuple([(function_hash, len(body)) for function_hash, body in new.items()])
        body = (*new.values(), *[job.payload for job in jobs])
        self._actions.append(Send(worker.worker_id, Run(orders, functions, forget), body))

    def _requeue(self, worker: _Worker, count: int) -> None:
        """Return the last jobs of a worker, which it did not start, to the head of the queue; cancelled ones finish."""
        for _ in range(count):
            job = worker.jobs.pop()
            self._queue.done(job.order.submitter)
            worker.unread_bytes -= _unread_bytes(job)
            stop = worker.stops.pop(job.order.task_id, None)
            if stop is not None and stop.state is TaskState.CANCELLED:
                self._finish(job, TaskState.CANCELLED, outcomes.cancelled(running=False).to_json())
            elif self._stop_at is None:
                self._queue.put_back(job.order.submitter, job)

    def _stop_task(self, worker: _Worker, task_id: str, stop: _StopReason) -> None:
        worker.stops[task_id] = stop
        self._recall(worker)

    def _recall(self, worker: _Worker) -> None:
        if not (worker.recalling or worker.killed):
            worker.recalling = True
            self._actions.append(Recall(worker.worker_id))

    def _kill(self, worker: _Worker, reason: str = "") -> None:
        if not worker.killed:
            worker.killed = True
            self._actions.append(Kill(worker.worker_id, reason))

    def _finish(
        self,
        job: Job,
        state: TaskState,
        error: Mapping[str, Any] | None,
        *,
        result: Frame = b"",
        started_at: float | None = None,
        ended_at: float | None = None,
        details: dict[str, Any] | None = None,
        is_retried: bool = False,
        output: tuple[Printed, bytes] | None = None,
    ) -> None:
        frame = None
        if state is TaskState.SUCCESS or result:
            frame = self._add_body(result)
        record = dict(error) if error is not None else None
        finished = Finished(
            job.order.task_id, state, frame, record, started_at, ended_at, details, is_retried=is_retried
        )
        if output is not None:
            finished = msgspec.structs.replace(finished, printed=output[0], output=self._add_body(output[1]))
        self._finished.append(finished)

    def _add_body(self, body: Frame) -> int:
        """Add a body of the next report; returns its index."""
        self._results.append(body)
        self._result_bytes += len(body)
        return len(self._results) - 1


def _moved(finished: Finished, sent: int) -> Finished:
    """A report whose bodies have moved, because so many before them were sent."""
    result, output = (None if body is None else body - sent for body in (finished.result, finished.output))
    return msgspec.structs.replace(finished, result=result, output=output)


def has_limits(order: TaskOrder) -> bool:
    """Whether a task must be measured while it runs."""
    return order.options.memory_bytes is not None or order.options.max_output_bytes is not None


def capped(order: TaskOrder, memory_bytes: int | None) -> TaskOrder:
    """The order with its memory limited to the share of its worker, if workers have one."""
    requested_bytes = order.options.memory_bytes
    if memory_bytes is None or (requested_bytes is not None and requested_bytes <= memory_bytes):
        return order
    options = msgspec.structs.replace(order.options, memory_bytes=memory_bytes)
    return msgspec.structs.replace(order, options=options)


def breach(order: TaskOrder, *, memory_bytes: int, output_bytes: int) -> ErrorRecord | None:
    """The error of a task that exceeds a limit, or None."""
    return outcomes.limit_exceeded(
        memory_bytes=memory_bytes,
        memory_limit_bytes=order.options.memory_bytes,
        output_bytes=output_bytes,
        output_limit_bytes=order.options.max_output_bytes,
    )


def _unread_bytes(job: Job) -> int:
    """Upper limit of a task's bytes in its worker's socket; large bodies travel in shared memory."""
    return _PACKET_BYTES + min(len(job.payload), _MAX_PACKET_BYTES)
