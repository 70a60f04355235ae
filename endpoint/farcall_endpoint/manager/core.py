"""The manager's core: which worker gets which task, which worker is killed, what the agent receives. No I/O, no clock.

The shell reports events and performs actions. Tasks are pipelined: a ready worker has several queued in its socket, so
that short tasks do not wait for a round trip each. Tasks that a worker has not started can be recalled (see
:mod:`farcall_endpoint.worker.channel`), so that no task waits behind a long one, and exactly one task was running when
a worker died.

A worker serves one submitter in one environment. It keeps them while others need no worker, and at least for a turn;
then it is ended, and another one is started in its place (see :mod:`farcall_endpoint.manager.placement`). Before the
first worker is started in an environment, that is prepared (:mod:`farcall_endpoint.manager.environment_states`).
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec

from farcall_common.backoff import Backoff
from farcall_common.environments import Environment
from farcall_common.errors import ErrorRecord
from farcall_common.limits import MAX_PAYLOAD_BYTES
from farcall_common.retries import WALLTIME_NAME
from farcall_common.wire import TaskState
from farcall_endpoint import outcomes
from farcall_endpoint.graphs.values import GraphSettings
from farcall_endpoint.manager import orders
from farcall_endpoint.manager.actions import (
    Action,
    Kill,
    Launch,
    Leave,
    ReadGraph,
    ReadStreams,
    Recall,
)
from farcall_endpoint.manager.ahead import AheadCalls
from farcall_endpoint.manager.away import AwayCalls, Guests
from farcall_endpoint.manager.environment_states import EnvironmentStates
from farcall_endpoint.manager.events import (
    AgentLost,
    CallNewsReceived,
    EnvironmentFailed,
    EnvironmentGone,
    EnvironmentProgress,
    EnvironmentReady,
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
from farcall_endpoint.manager.extra_workers import Extras
from farcall_endpoint.manager.graphs import Graphs, RunningGraph
from farcall_endpoint.manager.limits import is_limited
from farcall_endpoint.manager.nested_calls import NestedCalls
from farcall_endpoint.manager.placement import Placement
from farcall_endpoint.manager.preparation import Preparations
from farcall_endpoint.manager.reports import Reports
from farcall_endpoint.manager.task_queue import TaskQueue
from farcall_endpoint.manager.warm_pool import WarmPool, WarmPoolSettings, WarmWorkers
from farcall_endpoint.manager.workers import OWN, TURN_S, Pair, StopReason, Worker
from farcall_endpoint.prefetch import PrefetchPolicy
from farcall_endpoint.protocol import (
    CancelTasks,
    Died,
    ManagerGone,
    Prewarm,
    ReadOutput,
    RefuseCalls,
    ResultsTaken,
    Stop,
    TakeCalls,
    TaskOrder,
    WantedOutput,
)
from farcall_endpoint.shared_memory import Body, Frame
from farcall_endpoint.worker.channel import Begun, Calls, Done, DropCalls, Ready, Synced, Waits

STARTED_AFTER_S: Final = 0.05
"""A task that runs for so long is reported as running; a shorter one only by its result."""
_UNSEEN_S: Final = 0.1
"""A worker reports the times of a task, and the task's code runs in it: it may hide no more than this."""
_OVERDUE_S: Final = 0.01
"""When a task runs for so long, the tasks behind it are recalled."""
_AHEAD_S: Final = 1.0
"""When a call that was sent ahead has had its value for so long and may not have begun, it is recalled: it may not have
got it."""
_FIRST_START_WAIT_S: Final = 0.2
_MAX_START_WAIT_S: Final = 10.0
_MAX_START_FAILURES: Final = 6
"""After so many failed rounds of starts of the endpoint's own Python in a row, and with no running worker, the manager
ends."""
_END_OF_TIME: Final = 2.0**40
"""Epoch seconds that no clock shows."""
_ENVIRONMENT_OF: Final = operator.attrgetter("order.options.environment")


class ManagerCore:
    """All decisions of one manager.

    :param slots: number of workers with a place; each runs one task at a time.
    :param prefetch: how many tasks to queue behind the running one.
    :param batching: whether several tasks may share a packet, and calls of graphs may be sent before what they wait
        for has ended.
    :param start_limit_s: a worker that is not ready after so long is replaced.
    :param shared_workers: whether a worker serves all submitters.
    :param refusal: why tasks of other submitters than the owner are refused; empty if they are not.
    :param default_environment: of tasks that name none; None: the endpoint's own Python.
    :param environment_start_limit_s: longest preparation of an environment, and longest start of a worker in it.
    :param warm: how long workers of environments stay without a task.
    :param tasks_per_worker: a worker is replaced after so many tasks; 0: it may run any number.
    :param graphs: what values between calls of graphs may occupy.
    :param types: see :class:`~farcall_endpoint.manager.away.AwayCalls`.
    :param jitter: returns random numbers in [0, 1), which shorten waits before retries by up to a half.
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
        default_environment: Environment | None = None,
        environment_start_limit_s: float = 600.0,
        warm: WarmPoolSettings | None = None,
        tasks_per_worker: int = 0,
        graphs: GraphSettings | None = None,
        types: Mapping[str, str] | None = None,
        jitter: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._start_limit_s = start_limit_s
        self._environment_start_limit_s = environment_start_limit_s
        self._prefetch = prefetch
        self._max_packet_tasks = orders.MAX_PACKET_TASKS if batching else 1
        self._refusal = refusal
        self._default = default_environment
        self._default_key = "" if default_environment is None else default_environment.key
        self._idle_pair = Pair("", self._default_key)  # of workers that nothing is waiting for
        self._tasks_per_worker = tasks_per_worker
        #: Each with the pair that gets it, if tasks still wait for that.
        self._free_slots = collections.deque((slot, OWN) for slot in range(slots))
        self._queue = TaskQueue(shared=shared_workers, default_key=self._default_key)
        self._workers: dict[int, Worker] = {}
        self._next_worker_id = 0
        self._environments = EnvironmentStates()
        settings = WarmPoolSettings() if warm is None else warm
        self._pool = WarmPool(settings, start_s=self._environments.start_s, memory_of=self._environments.memory_bytes)
        self._warm = WarmWorkers(self._pool, workers=self._workers, queue=self._queue, kept=self._idle_pair)
        self._placement = Placement(
            workers=self._workers,
            queue=self._queue,
            environments=self._environments,
            pool=self._pool,
            prefetch=prefetch,
            idle=self._idle_pair,
            unlimited=not tasks_per_worker,
        )
        self._start_backoff = Backoff(first_s=_FIRST_START_WAIT_S, most_s=_MAX_START_WAIT_S)
        self._launch_at = 0.0  # for the endpoint's own Python
        self._stop_at: float | None = None
        #: Until then graphs and tasks with calls continue, and nothing else is started; then it stops.
        self._finish_by: float | None = None
        self._stop_reason = "the agent stopped it"
        self._failure = ""
        self._problem = ""
        self._agent_lost = False
        self._left = False
        self._actions: list[Action] = []
        self._reports = Reports()
        self._preparations = Preparations(
            self._environments,
            queue=self._queue,
            workers=self._workers,
            reports=self._reports,
            actions=self._actions,
            default=default_environment,
            limit_s=environment_start_limit_s,
            idle_s=settings.idle_s,
            most_prewarmed=slots + settings.extra_workers,
        )
        graphs = GraphSettings() if graphs is None else graphs
        self._graphs = Graphs(graphs, reports=self._reports, writers=slots, jitter=jitter)
        self.value_memory = self._graphs.memory
        self._nested = NestedCalls(actions=self._actions, memory=self.value_memory, jitter=jitter, node=graphs.node)
        self._ahead = AheadCalls(workers=self._workers, actions=self._actions)
        self._away = AwayCalls(
            queue=self._queue,
            reports=self._reports,
            actions=self._actions,
            types=types,
            slots=slots,
            default_key=self._default_key,
        )
        self.guests = Guests(reports=self._reports, node=graphs.node)
        self._extras = Extras(workers=self._workers, queue=self._queue)
        self._reads: list[ReadOutput] = []

    # -- the shell's side ----------------------------------------------------------------------------------------------

    def handle(self, events: Iterable[Event], now: Instant) -> list[Action]:
        """Handle events in order, and what is due; the actions to perform."""
        for event in events:
            self._handle(event, now)
        if self._graphs.running:
            self._advance_graphs(now)
        self._handle_deadlines(now)
        self._report(now)
        # Behind the report: the agent has the output of tasks that have ended before it hears that they do not run.
        if self._reads:
            self._actions += map(self._read_output, self._reads)
            self._reads = []
        if self._stop_at is not None and self.is_over and not self._left:
            self._left = True
            if not self._agent_lost:
                self._actions.append(Leave(self._failure or self._stop_reason, bool(self._failure)))
        actions = list(self._actions)
        self._actions.clear()
        return actions

    def next_deadline(self) -> float:
        """The monotonic second at which :meth:`handle` is due without an event."""
        deadline = self._reports.due_at
        if self._stop_at is not None:
            deadline = min(deadline, self._stop_at)
        else:
            if self._finish_by is not None:
                deadline = min(deadline, self._finish_by)
            if self._free_slots and self._can_launch:
                deadline = min(deadline, self._placement.idle_launch_at(self._launch_at))
            if self._environments:
                deadline = min(deadline, self._preparations.due_at)
            if self._environments or self._warm.parked:
                deadline = min(deadline, self._warm.due_at)
            if self._nested.drivers:
                deadline = min(deadline, self._nested.due_at)
            if self._extras.count:
                deadline = min(deadline, self._extras.due_at)
        if self._placement.review_at is not None:
            deadline = min(deadline, self._placement.review_at)
        if self._graphs.running:
            deadline = min(deadline, self._graphs.due_at)
        deadline = min(deadline, self._away.due_at)
        due = [
            self._deadline(worker)
            for worker in self._workers.values()
            if not worker.killed and (worker.jobs or not worker.is_ready)
        ]
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
        return [head for head in heads if is_limited(head[1])]

    def _handle(self, event: Event, instant: Instant) -> None:
        now = instant.mono
        match event:
            case PacketsReceived(worker_id=worker_id, packets=packets):
                worker = self._workers[worker_id]
                since, jobs_before = worker.since, len(worker.jobs)
                for packet, body in packets:
                    if isinstance(packet, Done):
                        self._task_done(worker, packet, body, instant)
                    elif isinstance(packet, Begun):
                        if worker.runs(packet.task_id) and worker.begun is None:  # a task may forge a second one
                            worker.begun = packet
                    elif isinstance(packet, Synced) and worker.syncing:
                        worker.syncing = False
                    elif isinstance(packet, Ready) and not worker.is_ready:
                        worker.pid = packet.pid
                        self._worker_ready(worker, now)
                    elif isinstance(packet, Calls | Waits | DropCalls):
                        self._called(worker, packet, body, instant)
                    else:
                        self._kill(worker, f"{type(packet).__name__} out of turn")
                ended = jobs_before - len(worker.jobs)
                if worker.environment is not None and ended and worker.pair.key in self._environments:
                    self._environments[worker.pair.key].tasks_ended(ended, now - since)
            case TasksReceived(jobs=jobs, limits=limits):
                self._nested.limits = limits
                if self._stop_at is None and self._finish_by is None:
                    self._tasks_received(jobs, instant)
            case TakeCalls():
                self._away.give(event, now)
            case CallNewsReceived(news=news, bodies=bodies):
                self._away.heard(news, bodies)
            case RefuseCalls():
                self._away.refuse(event)
            case ManagerGone(manager_id=manager_id):
                self._away.forget(manager_id)
            case ResultsTaken(size_bytes=size_bytes, window_bytes=window_bytes):
                self._reports.taken(size_bytes, window_bytes)
            case Recalled(worker_id=worker_id, revoked=revoked):
                self._recalled(self._workers[worker_id], revoked)
            case WorkerDied():
                self._worker_died(event, instant)
            case EnvironmentProgress() | EnvironmentReady() | EnvironmentFailed() | EnvironmentGone() | Prewarm():
                if self._stop_at is None:
                    self._preparations.handle(event, instant)
            case CancelTasks(task_ids=task_ids):
                self._graphs.cancel(task_ids)
                self._cancel(set(task_ids))
            case ReadOutput():
                self._reads.append(event)
            case LimitExceeded(worker_id=worker_id, task_id=task_id, record=record):
                exceeding = self._workers.get(worker_id)
                if exceeding is not None and exceeding.runs(task_id):
                    self._stop_task(exceeding, task_id, StopReason(TaskState.FAILED, record))
            case MalformedReceived(worker_id=worker_id, reason=reason):
                self._kill(self._workers[worker_id], reason)
            case Stop(grace_s=grace_s):
                if grace_s > 0 and self._stop_at is None:
                    self._finish(now + grace_s, now)
                else:
                    self._stop(grace_s, now)
            case Terminated(reason=reason):
                self._stop_reason = reason
                self._stop(0.0, now)
            case AgentLost():
                self._agent_lost = True
                self._stop(0.0, now)

    # -- tasks ---------------------------------------------------------------------------------------------------------

    def _tasks_received(self, jobs: Iterable[Job], now: Instant, *, first: bool = False) -> None:
        accepted: list[Job] = []
        for job in jobs:
            if self._refusal and job.order.submitter:
                self._fail(job, outcomes.isolation_missing(self._refusal))
            elif job.refusal is not None:
                self._fail(job, job.refusal)
            elif job.callees is not None and job.callees.graph is not None and job.call is None:
                for call in self._graphs.add(job, job.callees, now):
                    if call.refusal is not None:
                        self._fail(call, call.refusal)
                    else:
                        accepted.append(call)
            else:
                accepted.append(job)
        self._accept(accepted, now, first=first)

    def _accept(self, jobs: Iterable[Job], now: Instant, *, first: bool = False) -> None:
        """Queue jobs, or let them wait for their environment.

        :param first: before those of their submitters that are as deep.
        """
        for named, several in itertools.groupby(jobs, _ENVIRONMENT_OF):
            if named is None and self._default is None:
                self._queue.add(several, "", first=first)
                continue
            jobs_there = list(several)
            if named is not None and self._away.cannot_run(named):  # calls go where it can
                self._away.hold([job for job in jobs_there if job.owner is not None], named.key)
                jobs_there = [job for job in jobs_there if job.owner is None]
            if jobs_there:
                self._preparations.add(named, jobs_there, now, first=first)

    def _advance_graphs(self, now: Instant) -> None:
        """Make the calls of graphs that are ready, before other tasks of their submitters: what has begun is finished
        first, so that values do not pile up."""
        while self._graphs.due_at <= now.mono:
            jobs, dropped = self._graphs.advance(now)
            if dropped:
                self._cancel(dropped)
            if jobs and self._stop_at is None:
                self._tasks_received(jobs, now, first=True)

    def _cancel(self, task_ids: Collection[str]) -> None:
        """Stop tasks; results of unknown ones were sent already."""
        record = outcomes.cancelled(running=False).to_json()
        for job in self._queue.take_out(task_ids):
            self._reports.finish(job, TaskState.CANCELLED, record)
        for state in self._environments.values():
            for job in [job for job in state.waiting if job.order.task_id in task_ids]:
                state.waiting.remove(job)
                self._reports.finish(job, TaskState.CANCELLED, record)
        if self._away:
            self._away.cancel(task_ids)
        for worker in self._workers.values():
            for job in worker.jobs:
                if job.order.task_id in task_ids:
                    stop = StopReason(TaskState.CANCELLED, outcomes.cancelled(running=True))
                    self._stop_task(worker, job.order.task_id, stop)

    def _read_output(self, request: ReadOutput) -> Action:
        """Read the streams of the workers where the tasks are the ones that run now."""
        running = {
            worker.jobs[0].order.task_id: worker
            for worker in self._workers.values()
            if worker.jobs and worker.is_ready and not worker.killed
        }
        found: list[tuple[WantedOutput, int | None, bool]] = []
        graphs: list[ReadGraph] = []
        for wanted in request.tasks:
            if (graph := self._graphs.get(wanted.task_id)) is not None:
                graphs.append(graph.read_output(wanted, running, request.max_bytes))
                continue
            worker = running.get(wanted.task_id)
            is_kept = worker is None or worker.jobs[0].order.options.output_bytes > 0
            found.append((wanted, None if worker is None else worker.worker_id, is_kept))
        return ReadStreams(request.request_id, request.max_bytes, found, tuple(graphs))

    def _task_done(self, worker: Worker, done: Done, body: Body, now: Instant) -> None:
        if not worker.runs(done.task_id):  # a task has written to its worker's socket
            self._kill(worker, "the result of a task that it does not run")
            return
        if not (0 <= done.started_at < _END_OF_TIME and 0 <= done.ended_at < _END_OF_TIME):  # NaN is neither
            self._kill(worker, "times that cannot be")
            return
        call, parts, output = worker.jobs[0].call, None, None
        is_plain = call is None and done.printed is None and not done.parts
        if is_plain and type(body) is bytes and len(body) <= MAX_PAYLOAD_BYTES:  # as most are
            result: Frame = body
        else:
            try:
                result, parts, output = orders.received(call, done, body, is_owner=not worker.pair.submitter)
            except ValueError as error:
                self._kill(worker, str(error))
                return
        job = worker.jobs.popleft()
        self._queue.done(job.order.submitter)
        worker.unread_bytes -= orders.unread_bytes(job)
        started_at, ended_at = done.started_at, done.ended_at
        if (measured_s := now.mono - worker.since) - (ended_at - started_at) > _UNSEEN_S:
            started_at, ended_at = now.epoch - measured_s, now.epoch
        worker.since, worker.head_reported, worker.overdue, worker.begun = now.mono, False, False, None
        if worker.stops:
            worker.stops.pop(done.task_id, None)
        if call is not None and (call.deliver or worker.awaits):
            for each in self._ahead.ended(worker, job, done, now.mono):
                self._recall(each)
        details: dict[str, Any] | None = done.details
        if worker.drives:
            details = {**(details or {}), **self._nested.details(job, ended_at - started_at)}
            output = self._nested.output(job, output)
            self._drive_over(worker, job)
        self._prefetch.observe(ended_at - started_at)
        finish: Callable[..., None] = self._reports.finish
        if call is not None and self._ahead:
            finish = functools.partial(self._ahead.report, finish)
        finish(
            job,
            TaskState.SUCCESS if done.error is None else TaskState.FAILED,
            done.error,
            result=result,
            started_at=started_at,
            ended_at=ended_at,
            details=details,
            is_retried=done.is_retried,
            output=output,
            parts=parts,
            pid=worker.pid,
        )
        is_over = self._stop_at is not None or (worker.tasks_left == 0 and not worker.jobs)
        if is_over and not worker.recalling:
            self._kill(worker)

    def _fail(self, job: Job, record: ErrorRecord) -> None:
        self._reports.finish(job, TaskState.FAILED, record.to_json())

    def _stop_task(self, worker: Worker, task_id: str, stop: StopReason) -> None:
        worker.stops[task_id] = stop
        self._recall(worker)

    # -- calls of tasks that run ---------------------------------------------------------------------------------------

    def _called(self, worker: Worker, packet: Calls | Waits | DropCalls, body: Body, now: Instant) -> None:
        """What a running task says of its calls. One that has ended may have left a thread that still says something,
        and a task can forge all of it."""
        if not worker.runs(packet.task_id):
            return
        if self._stop_at is not None:
            if not isinstance(packet, Calls) or now.mono >= self._stop_at:
                return
            self._finish_by, self._stop_at = self._stop_at, None  # its calls are a part of what runs
        if isinstance(packet, Waits):
            worker.waits = worker.drives and not packet.over
        elif isinstance(packet, DropCalls):
            if gone := self._nested.dropped(packet):
                self._cancel(gone)
        else:
            if not worker.drives:
                worker.drives = True
                if len(worker.jobs) > 1:  # what was sent behind it must not wait for its calls, or be one of them
                    self._recall(worker)
            try:
                self._accept(self._nested.received(worker, packet, body), now)
            except ValueError as error:
                self._kill(worker, str(error))

    def _drive_over(self, worker: Worker, job: Job) -> None:
        """A task with calls has ended: those that it left are stopped."""
        worker.drives = worker.waits = False
        if job.order.task_id in self._nested.drivers and (gone := self._nested.over(job)):
            self._cancel(gone)

    # -- warm workers --------------------------------------------------------------------------------------------------

    def _vacate(self, worker: Worker) -> None:
        """Free the place of an idle worker: it stays warm without one if it may, else it is ended."""
        place = worker.place
        if self._warm.park(worker):
            self._free_slots.append((worker.slot, place))
        else:
            self._evict(worker)

    def _evict(self, worker: Worker) -> None:
        """End an idle worker whose memory or place is needed, or whose time is over."""
        self._pool.evicted(worker)
        self._kill(worker)

    # -- workers -------------------------------------------------------------------------------------------------------

    def _worker_ready(self, worker: Worker, now: float) -> None:
        worker.is_ready = True
        worker.turn_began = now
        if (state := self._environments.get(worker.pair.key)) is not None:
            state.worker_started(now - worker.since)
        worker.since = now
        self._reports.changed = True
        if not worker.pair.key:
            self._start_backoff.reset()
            self._problem = ""

    def _recalled(self, worker: Worker, revoked: int) -> None:
        worker.recalling = False
        worker.syncing = worker.syncing or revoked > 0
        if revoked > len(worker.jobs):
            self._kill(worker, "the result of a task that it had not started")
        self._requeue(worker, revoked)
        worker.overdue = worker.overdue and bool(worker.jobs)
        is_over = not worker.jobs and (self._stop_at is not None or worker.tasks_left == 0)
        if is_over or any(job.order.task_id in worker.stops for job in worker.jobs):
            self._kill(worker)
        else:
            worker.stops.clear()

    def _worker_died(self, event: WorkerDied, now: Instant) -> None:
        worker = self._workers.pop(event.worker_id)
        self._reports.changed = True
        # It may have sent an invalid message and ended at once: it is not there any more to be killed or recalled.
        self._actions[:] = [
            action
            for action in self._actions
            if not isinstance(action, Kill | Recall) or action.worker_id != worker.worker_id
        ]
        if worker.extra:
            self._extras.count -= 1
        elif not self._warm.forget(worker):
            self._free_slots.append((worker.slot, worker.place))
        self._requeue(worker, event.revoked)
        stdout_tail, stderr_tail = event.stdout_tail, event.stderr_tail
        output = event.output if event.output is not None and event.output[1] else None
        if not worker.is_ready and self._stop_at is None:
            self._start_failed(worker, event, now)
        if worker.drives:
            output = self._nested.output(worker.jobs[0], output)
            self._drive_over(worker, worker.jobs[0])
        self._ahead.forget(worker)
        for job in worker.jobs:
            self._queue.done(job.order.submitter)
            self._take_back_followers(job)
            task_id = job.order.task_id
            stop = worker.stops.get(task_id)
            if job.owner is not None and job is worker.jobs[0] and worker.is_ready:
                job.owner.ran(job, now.epoch - (now.mono - worker.since), now.epoch, worker.pid)
            if not job.order.options.output_bytes:
                output = None
            if stop is not None:
                record = stop.record
                if stop.state is TaskState.FAILED:
                    record = dataclasses.replace(
                        record, stdout_tail=stdout_tail or None, stderr_tail=stderr_tail or None
                    )
                self._reports.finish(job, stop.state, record.to_json(), is_retried=stop.is_retried, output=output)
            elif self._goes_on(job):
                self._reports.died(job, Died(task_id, event.reason, stdout_tail, stderr_tail, *(output or ())))
            # else: it stopped with the endpoint, and the agent knows which manager had it
        if worker.environment is not None:
            self._preparations.worker_ended(worker.environment, now)

    def _start_failed(self, worker: Worker, event: WorkerDied, now: Instant) -> None:
        """A worker died before it was ready. Only the endpoint's own Python is a problem of the manager."""
        lines = event.stderr_tail.strip().splitlines()
        last_line = lines[-1] if lines else "no output on standard error"
        words = f"{event.reason}; {last_line}"
        if worker.environment is None:
            if now.mono >= self._launch_at:  # workers that were started together fail as one round
                self._launch_at = now.mono + self._start_backoff.next_s()
            self._problem = f"a worker did not start: {words}"
            return
        if worker.killed and now.mono - worker.since >= self._environment_start_limit_s:
            words = f"it was not ready within {self._environment_start_limit_s:g} s; {last_line}"
        self._preparations.worker_not_started(worker.environment, words, event.stderr_tail, now)

    def _finish(self, by: float, now: float) -> None:
        """Accept no more tasks, and let those that run finish: of graphs and of tasks with calls, also the calls that
        have not started."""
        self._finish_by = by
        forgotten = self._graphs.forget_others({job.owner for worker in self._workers.values() for job in worker.jobs})
        if not self._has_calls:
            self._stop(by - now, now)
            return
        forgotten.add(None)
        self._queue.take_out({job.order.task_id for job in self._queue.items() if job.owner in forgotten})
        for state in self._environments.values():
            for job in [job for job in state.waiting if job.owner in forgotten]:
                state.waiting.remove(job)
        for worker in self._workers.values():
            if worker.jobs:
                self._recall(worker)

    @property
    def _has_calls(self) -> bool:
        """Whether there are graphs, or tasks with calls."""
        return bool(self._graphs.running or self._nested.drivers)

    @property
    def _can_launch(self) -> bool:
        return self._finish_by is None or bool(self._queue)

    def _goes_on(self, job: Job) -> bool:
        """Whether a job that has not started, or whose worker has died, is not left to the agent."""
        return self._stop_at is None and (self._finish_by is None or job.owner is not None)

    def _stop(self, grace_s: float, now: float) -> None:
        """Accept no more tasks, let running ones finish within ``grace_s`` seconds, then kill all workers."""
        self._stop_at = now + grace_s if self._stop_at is None else min(self._stop_at, now + grace_s)
        self._queue.clear()
        for state in self._environments.values():
            state.waiting.clear()
        for worker in self._workers.values():
            if worker.is_ready:
                self._recall(worker)
            else:
                self._kill(worker)

    def _requeue(self, worker: Worker, count: int) -> None:
        """Return the last jobs of a worker, which it did not start, to the head of the queue; cancelled ones finish."""
        for _ in range(min(count, len(worker.jobs))):  # a task can forge results of those behind it
            job = worker.jobs.pop()
            if worker.drives and not worker.jobs:  # and their calls
                self._drive_over(worker, job)
            self._queue.done(job.order.submitter)
            worker.unread_bytes -= orders.unread_bytes(job)
            if worker.tasks_left is not None:
                worker.tasks_left += 1
            self._take_back_followers(job)
            stop = worker.stops.pop(job.order.task_id, None)
            if stop is not None and stop.state is TaskState.CANCELLED:
                self._reports.finish(job, TaskState.CANCELLED, outcomes.cancelled(running=False).to_json())
            elif self._goes_on(job):
                self._return(job, worker.pair.key)

    def _return(self, job: Job, key: str) -> None:
        """A worker has not started a job."""
        if job.call is not None and job.call.is_ahead and isinstance(job.owner, RunningGraph):
            job.owner.taken_back(job)
            return
        if job.call is not None and job.call.deliver:
            job = msgspec.structs.replace(job, call=msgspec.structs.replace(job.call, deliver=()))
        self._queue.put_back(job, key)

    def _take_back_followers(self, job: Job) -> None:
        """A call has not started, or its worker has died: those that wait for it are not started either."""
        if job.owner is not None:
            for each in self._ahead.returned(job):
                self._recall(each)

    def _recall(self, worker: Worker) -> None:
        if not (worker.recalling or worker.killed):
            worker.recalling = True
            self._actions.append(Recall(worker.worker_id))

    def _kill(self, worker: Worker, reason: str = "") -> None:
        if not worker.killed:
            worker.killed = True
            self._actions.append(Kill(worker.worker_id, reason))

    # -- time ----------------------------------------------------------------------------------------------------------

    def _handle_deadlines(self, now: Instant) -> None:
        is_hopeless = self._start_backoff.failures >= _MAX_START_FAILURES and self._stop_at is None
        if is_hopeless and not any(each.is_ready for each in self._workers.values()):
            self._failure = self._problem
            self._stop(0.0, now.mono)
        finish_by = self._finish_by if self._stop_at is None else None
        if finish_by is not None and (now.mono >= finish_by or not self._has_calls):
            self._stop(max(0.0, finish_by - now.mono), now.mono)
        if self._stop_at is not None and now.mono >= self._stop_at:
            for worker in self._workers.values():
                self._kill(worker)
        for worker in self._workers.values():
            if worker.jobs or not worker.is_ready or worker.yields_to is not None:
                self._check_worker(worker, now)
        if self._stop_at is None:
            if self._environments and now.mono >= self._preparations.due_at:
                self._preparations.check(now)
            self._placement.review_at = None
            if self._free_slots and self._can_launch:
                self._launch(now.mono)
            if self._nested.drivers:
                for job in self._nested.due(now.mono):
                    self._accept([job], now)
            self._assign(now.mono)
            if self._nested.drivers:
                self._add_extra_workers(now.mono)
            if self._extras.count:
                for worker in self._extras.surplus(now.mono):
                    self._kill(worker)
            if self._warm.parked and self._free_slots and self._can_launch:  # theirs
                self._launch(now.mono)
                self._assign(now.mono)
            if self._environments or self._warm.parked:  # now that those that are ready have got what waits for them
                for worker in self._warm.surplus(self._placement.protected, now=now.mono):
                    self._evict(worker)

    def _check_worker(self, worker: Worker, now: Instant) -> None:
        if worker.killed:
            return
        age_s = now.mono - worker.since
        if not worker.is_ready:
            if age_s >= self._start_limit(worker):
                self._kill(worker)
            return
        if not worker.jobs:
            if worker.yields_to is not None:
                self._vacate(worker)
            return
        if worker.awaits and self._ahead.waits(worker.jobs[0]):
            return
        head = worker.jobs[0].order
        if not worker.head_reported and age_s >= STARTED_AFTER_S:
            worker.head_reported = True
            self._reports.started(worker.jobs[0], now.epoch - age_s)
        overdue_s = self._overdue_s(worker)
        is_overdue = overdue_s is not None and age_s >= overdue_s
        if not worker.overdue and (is_overdue or (worker.delays_others and self._reports.is_window_full)):
            worker.overdue = True
            self._recall(worker)
        walltime_s = head.options.walltime_s
        if walltime_s is not None and age_s >= walltime_s and head.task_id not in worker.stops:
            is_retried = WALLTIME_NAME in head.options.retry_on
            stop = StopReason(TaskState.FAILED, outcomes.walltime_exceeded(walltime_s), is_retried)
            self._stop_task(worker, head.task_id, stop)

    def _deadline(self, worker: Worker) -> float | None:
        if not worker.is_ready:
            return worker.since + self._start_limit(worker)
        if not worker.jobs or (worker.awaits and self._ahead.waits(worker.jobs[0])):
            return None
        head = worker.jobs[0].order
        delays = [STARTED_AFTER_S] if not worker.head_reported else []
        if not worker.overdue and (overdue_s := self._overdue_s(worker)) is not None:
            delays.append(overdue_s)
        if head.options.walltime_s is not None and head.task_id not in worker.stops:
            delays.append(head.options.walltime_s)
        return worker.since + min(delays) if delays else None

    @staticmethod
    def _overdue_s(worker: Worker) -> float | None:
        """After how long at its head job a worker is asked for those that it has not started; None: not at all."""
        if worker.delays_others:
            return _OVERDUE_S
        head = worker.jobs[0].call
        return _AHEAD_S if head is not None and head.is_ahead else None

    def _start_limit(self, worker: Worker) -> float:
        return self._start_limit_s if worker.environment is None else self._environment_start_limit_s

    # -- launches and orders -------------------------------------------------------------------------------------------

    def _launch(self, now: float) -> None:
        """Give free slots to workers: to one that is warm without a place, or to a new one."""
        for _ in range(len(self._free_slots)):
            slot, hint = self._free_slots.popleft()
            pair = self._placement.pair_for_slot(hint, now, can_start_own=now >= self._launch_at)
            if pair is None:
                self._free_slots.append((slot, hint))
                continue
            if self._queue:
                self._queue.got_place(pair)
            if self._warm.parked and self._warm.resume(pair, slot=slot, now=now):
                self._reports.changed = True
                continue
            self._start_worker(pair, slot, now)

    def _start_worker(self, pair: Pair, slot: int, now: float, *, extra: int = 0) -> None:
        state = self._environments.get(pair.key)
        environment = None if state is None else state.environment
        worker = Worker(self._next_worker_id, slot, pair, now, environment, self._tasks_per_worker or None, extra=extra)
        self._next_worker_id += 1
        self._workers[worker.worker_id] = worker
        self._extras.count += bool(extra)
        self._actions.append(Launch(worker.worker_id, slot, pair.submitter, environment))

    def _assign(self, now: float) -> None:
        """Share the queue among workers that are idle or soon will be; others wait, so that packets are few."""
        if self._queue and not self._reports.is_window_full:
            for worker in self._placement.moved_yields(now):
                self._vacate(worker)
            most_left = (self._prefetch.depth + 1) // 2
            workers = [
                worker
                for worker in self._workers.values()
                if len(worker.jobs) <= most_left and not worker.overdue and worker.accepts_tasks
            ]
            if self._graphs.spread:  # the one that is idle longest comes first, not one that is still awake
                workers.sort(key=lambda worker: (len(worker.jobs), worker.since))
            else:
                workers.sort(key=lambda worker: len(worker.jobs))
            is_starved = False  # whether a submitter before has no worker
            pairs = self._queue.in_turn()
            for pair in pairs:
                own = [worker for worker in workers if worker.pair == pair]
                if is_starved:
                    own = [worker for worker in own if worker.jobs or not self._placement.would_overrun(worker, now)]
                self._share(pair, own, now)
                if len(pairs) > 1 and not is_starved:
                    is_starved = not (self._free_slots or self._placement.has_place(pair.submitter))
            if self._queue:
                self._yield_workers(now)
        if self._preparations.has_prewarmed and not self._free_slots:
            self._yield_to_prewarmed(now)

    def _add_extra_workers(self, now: float) -> None:
        """Start workers for calls of tasks that wait."""
        while (extra := self._extras.wanted()) is not None:
            if not self._can_start(extra.pair, now):
                return
            self._start_worker(extra.pair, extra.slot, now, extra=extra.number)

    def _can_start(self, pair: Pair, now: float) -> bool:
        return self._environments.is_ready(pair.key, now) if pair.key else now >= self._launch_at

    def _share(self, pair: Pair, workers: Sequence[Worker], now: float) -> None:
        """Share the tasks of a pair among its workers."""
        queue = self._queue
        depth = self._prefetch.depth
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
                if self._graphs.running and worker.tasks_left is None and self._max_packet_tasks > 1:
                    self._send_with_followers(worker, jobs, now)
                else:
                    self._send_jobs(worker, jobs, now)

    def _yield_workers(self, now: float) -> None:
        """End workers of those that have nothing to do, or more workers than others that need some."""
        if self._free_slots:  # no worker can be started now
            return
        places = {worker.place for worker in self._workers.values() if worker.has_slot}
        if len(places | self._queue.pairs()) == 1:
            return
        stuck: set[Pair] = set()
        while self._yield_one(stuck, now):
            pass

    def _yield_one(self, stuck: set[Pair], now: float) -> bool:
        """Give one place to the first that needs it and can get it; those that cannot are added to ``stuck``."""
        for pair, _ in self._placement.needs(now):
            if pair not in stuck:
                if (worker := self._placement.place_for(pair, now)) is not None:
                    self._yield(worker, pair)
                    return True
                stuck.add(pair)
        return False

    def _yield_to_prewarmed(self, now: float) -> None:
        for pair, missing in list(self._placement.prewarm_needs(now)):
            for _ in range(missing):
                if (worker := self._placement.place_to_prewarm(pair)) is not None:
                    self._yield(worker, pair)

    def _yield(self, worker: Worker, pair: Pair) -> None:
        worker.yields_to = pair
        if worker.jobs:
            self._recall(worker)
        else:
            self._vacate(worker)

    def _send_with_followers(self, worker: Worker, jobs: Sequence[Job], now: float) -> None:
        """Send tasks to a worker, and with calls of graphs those that only wait for their values."""
        for each, several in self._ahead.placed(worker, jobs):
            for job in several:
                if job.call is not None and job.call.is_ahead:
                    self._queue.passed(job.order.submitter)
            self._send_jobs(each, several, now)

    def _send_jobs(self, worker: Worker, jobs: Sequence[Job], now: float) -> None:
        """Send tasks to a worker, in as few packets as possible."""
        if not worker.jobs:
            worker.since, worker.head_reported, worker.overdue = now, False, False
            if now >= worker.turn_began + TURN_S and len(self._queue.pairs()) <= 1:
                worker.turn_began = now
        if worker.tasks_left is not None:
            worker.tasks_left -= len(jobs)
        if self._environments:
            self._pool.used(worker, len(jobs), now)
        self._actions += orders.send(worker, jobs, most_tasks=self._max_packet_tasks)

    # -- reports -------------------------------------------------------------------------------------------------------

    def _report(self, now: Instant) -> None:
        """Report changes at once, and the number of workers each second.

        Results for which the agent has no room stay here, and while some do, no task is started; unless the manager
        stops.
        """
        everything = self._stop_at is not None
        if self._environments and now.mono >= self._reports.environments_at:
            self._reports.environments(self._preparations.statuses, now)
        if self._nested.drivers:
            for progress in self._nested.changed(now.mono):
                self._reports.graph(progress)
        if (self._away or (self._queue and (self._graphs.running or self._nested.drivers))) and self._stop_at is None:
            self._away.review(now.mono, mean_s=self._prefetch.mean_s)
        if self.guests:
            self._actions.append(self.guests.news())
        if not self._reports.is_due(now.mono, everything=everything):
            return
        ready = [worker for worker in self._workers.values() if worker.is_ready and worker.has_slot]
        self._actions.append(
            self._reports.make(
                now.mono,
                workers=len(ready),
                idle_workers=sum(not worker.jobs for worker in ready),
                problem=self._problem or (self._preparations.problem() if self._environments else ""),
                everything=everything,
            )
        )
