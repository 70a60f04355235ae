"""The manager's core: which worker gets which task, which worker is killed, what the agent receives. No I/O, no clock.

The shell reports events and performs actions. Tasks are pipelined: a ready worker has several queued in its socket, so
that short tasks do not wait for a round trip each (:mod:`farcall_endpoint.manager.core.assignment`). Tasks that a
worker has not started can be recalled, so that no task waits behind a long one, and exactly one task was running when a
worker died (:mod:`farcall_endpoint.manager.core.interruption`).

A worker serves one pair: a submitter (or all, where they share workers) with its latency class, in one environment. It
keeps the pair while others need no worker, and at least for a turn; then it is ended, and another one is started in its
place (see :mod:`farcall_endpoint.manager.core.placement`). Before the first worker is started in an environment, that
is prepared (:mod:`farcall_endpoint.manager.core.environment_states`).
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Final

import msgspec

from farcall_common.environments import Environment
from farcall_common.errors import ErrorRecord
from farcall_common.limits import MAX_PAYLOAD_BYTES
from farcall_common.progress import clean_progress
from farcall_common.wire import TaskState
from farcall_endpoint.config.settings import QosSettings
from farcall_endpoint.contracts import outcomes
from farcall_endpoint.contracts.agent_manager import (
    CancelTasks,
    CopyFiles,
    ManagerGone,
    Prewarm,
    ReadOutput,
    RefuseCalls,
    ResultsTaken,
    ReturnTasks,
    Stop,
    TakeCalls,
    TaskOrder,
    ValkeyAnswered,
    WantedOutput,
)
from farcall_endpoint.contracts.manager_worker import (
    Begun,
    BlocksRequest,
    Calls,
    Done,
    DropCalls,
    Progressed,
    Ready,
    Synced,
    ValkeyRequest,
    Waits,
)
from farcall_endpoint.contracts.prefetch import PrefetchPolicy
from farcall_endpoint.graphs.values import GraphSettings
from farcall_endpoint.host.shared_memory import Body, Frame
from farcall_endpoint.manager.core import orders
from farcall_endpoint.manager.core.actions import Action, Leave, ReadGraph, ReadStreams
from farcall_endpoint.manager.core.assignment import Assignment
from farcall_endpoint.manager.core.away import AwayCalls, Guests
from farcall_endpoint.manager.core.blocks import BlockRequests
from farcall_endpoint.manager.core.calls_ahead import AheadCalls
from farcall_endpoint.manager.core.environment_states import EnvironmentStates
from farcall_endpoint.manager.core.events import (
    AgentLost,
    BlocksServed,
    CallNewsReceived,
    CopyEnded,
    CpusMeasured,
    EnvironmentFailed,
    EnvironmentGone,
    EnvironmentProgress,
    EnvironmentReady,
    EnvironmentsCrowded,
    Event,
    Instant,
    Job,
    LimitExceeded,
    Linked,
    MalformedReceived,
    PacketsReceived,
    ProcessesLeft,
    Recalled,
    TasksReceived,
    Terminated,
    WorkerDied,
)
from farcall_endpoint.manager.core.graphs import Graphs
from farcall_endpoint.manager.core.interruption import Interruptions, Kept
from farcall_endpoint.manager.core.latency import LatencyTasks
from farcall_endpoint.manager.core.limits import is_limited
from farcall_endpoint.manager.core.nested_calls import NestedCalls
from farcall_endpoint.manager.core.node_copies import NodeFiles
from farcall_endpoint.manager.core.preparation import Preparations
from farcall_endpoint.manager.core.reports import Reports
from farcall_endpoint.manager.core.task_queue import TaskQueue
from farcall_endpoint.manager.core.uses import Uses
from farcall_endpoint.manager.core.valkey import ValkeyRequests
from farcall_endpoint.manager.core.warm_pool import WarmPoolSettings
from farcall_endpoint.manager.core.workers import StopReason, Worker
from farcall_endpoint.qos.controller import Controller

_UNSEEN_S: Final = 0.1
"""Seconds that a worker's report may omit from a task's run time. The task runs in the worker and can forge it."""
_LATE_S: Final = 60.0
"""Maximum delay until the manager reads that a task has ended, while the worker already runs the next task."""
_END_OF_TIME: Final = 2.0**40
"""Epoch seconds that no clock shows."""
_MOST_TEXT_BYTES: Final = 512 * 1024
"""Limit for the error and the details of a result together: twice the longest traceback and output of a worker."""
_ENVIRONMENT_OF: Final = operator.attrgetter("order.options.environment")


class ManagerCore:
    """All decisions of one manager.

    :param slots: number of workers with a place; each runs one task at a time.
    :param steps_aside: see :class:`~farcall_endpoint.manager.core.extra_workers.Extras`.
    :param prefetch: number of tasks to queue behind the running one.
    :param batching: whether several tasks may share a packet, and calls of graphs may be sent before the calls that
        they wait for have ended.
    :param start_limit_s: seconds after which a worker that is not ready is replaced.
    :param shared_workers: whether a worker serves all submitters.
    :param refusal: reason why tasks of submitters other than the owner are refused; empty if they are accepted.
    :param default_environment: environment of tasks that name none; None: the endpoint's own Python.
    :param environment_start_limit_s: longest preparation of an environment, and longest start of a worker in it.
    :param warm: settings for how long workers of environments stay without a task.
    :param tasks_per_worker: number of tasks after which a worker is replaced; 0: no limit.
    :param graphs: limits of the space for values between calls of graphs.
    :param types: see :class:`~farcall_endpoint.manager.core.away.AwayCalls`.
    :param agent_host: the agent's machine, as tasks of this node reach it.
    :param node_cache_bytes: space for copies of files on this node; 0: no copies.
    :param qos: how latency targets are held.
    :param latency_workers: maximum number of workers for tasks with a target, beyond the slots; 0: such tasks are
        batch work that comes first.
    :param jitter: returns random numbers in [0, 1), which shorten waits before retries by up to a half.
    """

    def __init__(
        self,
        *,
        slots: int,
        steps_aside: bool = True,
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
        agent_host: str = "127.0.0.1",
        node_cache_bytes: int = 0,
        qos: QosSettings | None = None,
        latency_workers: int = 0,
        jitter: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._prefetch = prefetch
        self._refusal = refusal
        self._default = default_environment
        default_key = "" if default_environment is None else default_environment.key
        self._workers: dict[int, Worker] = {}
        self._latency = LatencyTasks(
            Controller(QosSettings() if qos is None else qos),
            workers=self._workers,
            most_workers=latency_workers,
            shared=shared_workers,
        )
        self._queue = TaskQueue(shared=shared_workers, latency=self._latency, default_key=default_key)
        self._environments = EnvironmentStates()
        self._stop_at: float | None = None
        #: Until then graphs and tasks with calls continue, and nothing else is started; then it stops.
        self._finish_by: float | None = None
        self._stop_reason = "the agent stopped it"
        self._failure = ""
        self._agent_lost = False
        self._left = False
        self._actions: list[Action] = []
        self._reports = Reports()
        warm = WarmPoolSettings() if warm is None else warm
        self._preparations = Preparations(
            self._environments,
            queue=self._queue,
            workers=self._workers,
            reports=self._reports,
            actions=self._actions,
            default=default_environment,
            limit_s=environment_start_limit_s,
            idle_s=warm.idle_s,
            most_prewarmed=slots + warm.extra_workers,
        )
        graphs = GraphSettings() if graphs is None else graphs
        self._ahead = AheadCalls(workers=self._workers, actions=self._actions)
        self._away = AwayCalls(
            queue=self._queue,
            reports=self._reports,
            actions=self._actions,
            types=types,
            slots=slots,
            default_key=default_key,
        )
        self._uses = Uses(workers=self._workers, waits=self._ahead.waits, away=self._away.used)
        self._graphs = Graphs(graphs, reports=self._reports, uses=self._uses, writers=slots, jitter=jitter)
        self.value_memory = self._graphs.memory
        self._nested = NestedCalls(
            actions=self._actions, memory=self.value_memory, jitter=jitter, uses=self._uses, node=graphs.node
        )
        self._files = NodeFiles(actions=self._actions, budget_bytes=node_cache_bytes)
        self._blocks = BlockRequests(actions=self._actions)
        self._valkey = ValkeyRequests(actions=self._actions, agent_host=agent_host)
        self.guests = Guests(reports=self._reports, node=graphs.node)
        self._interruptions = Interruptions(
            workers=self._workers,
            queue=self._queue,
            environments=self._environments,
            nested=self._nested,
            ahead=self._ahead,
            away=self._away,
            reports=self._reports,
            actions=self._actions,
        )
        self._assignment = Assignment(
            workers=self._workers,
            queue=self._queue,
            environments=self._environments,
            preparations=self._preparations,
            interruptions=self._interruptions,
            graphs=self._graphs,
            ahead=self._ahead,
            reports=self._reports,
            actions=self._actions,
            latency=self._latency,
            slots=slots,
            steps_aside=steps_aside,
            default_key=default_key,
            prefetch=prefetch,
            most_packet_tasks=orders.MAX_PACKET_TASKS if batching else 1,
            tasks_per_worker=tasks_per_worker,
            warm=warm,
            start_limit_s=start_limit_s,
            environment_start_limit_s=environment_start_limit_s,
        )
        self._placement = self._assignment.placement
        self._reads: list[ReadOutput] = []

    # -- the shell's side ----------------------------------------------------------------------------------------------

    def handle(self, events: Iterable[Event], now: Instant) -> list[Action]:
        """Handle events in order, and what is due; the actions to perform."""
        for event in events:
            self._handle(event, now)
        if self._graphs.running:
            self._advance_graphs(now)
        self._handle_deadlines(now)
        if self._reports.ended_with_target:
            self._latency.ended(self._reports.ended_with_target, now.mono)
        if self._latency.controller.due_at <= now.mono:
            self._actions += self._latency.control(now.mono)
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
        deadline = min(self._reports.due_at, self._reports.task_progress.due_at)
        if self._stop_at is not None:
            deadline = min(deadline, self._stop_at)
        else:
            if self._finish_by is not None:
                deadline = min(deadline, self._finish_by)
            only_needed = self._finish_by is not None
            deadline = min(deadline, self._assignment.due_at(only_needed=only_needed), self._away.due_at)
            if self._placement.review_at is not None:
                deadline = min(deadline, self._placement.review_at)
            deadline = min(deadline, self._latency.controller.due_at, self.guests.due_at)
            if self._environments:
                deadline = min(deadline, self._preparations.due_at)
            if self._nested.drivers:
                deadline = min(deadline, self._nested.due_at)
        if self._graphs.running:
            deadline = min(deadline, self._graphs.due_at)
        due = [
            self._interruptions.due_at(worker) if worker.is_ready else self._assignment.start_due_at(worker)
            for worker in self._workers.values()
            if not worker.killed and (worker.jobs or not worker.is_ready)
        ]
        return min([deadline, *due])

    @property
    def is_over(self) -> bool:
        """Stopped, and all workers have ended."""
        return self._stop_at is not None and not self._workers

    def limited(self, *, processes: int = 0) -> list[tuple[int, TaskOrder | None, Begun | None]]:
        """The running tasks that must be measured, by worker; and, with None in place of a task, the workers that start
        in environments for other submitters than the owner, whose packages run before a task.

        :param processes: as of :func:`~farcall_endpoint.manager.core.limits.is_limited`.
        """
        found: list[tuple[int, TaskOrder | None, Begun | None]] = []
        for worker in self._workers.values():
            if worker.killed:
                continue
            if worker.jobs:
                if is_limited(order := worker.jobs[0].order, processes=processes):
                    found.append((worker.worker_id, order, worker.begun))
            elif not worker.is_ready and worker.environment is not None and worker.pair.submitter:
                found.append((worker.worker_id, None, None))
        return found

    def busy_since(self, worker_id: int) -> float:
        """When the task that a worker runs began, in monotonic seconds; infinite if it runs none."""
        worker = self._workers.get(worker_id)
        return worker.since if worker is not None and worker.jobs else math.inf

    def tasks_at(self, worker_id: int) -> int:
        """How many tasks a worker has: one runs, others wait behind it."""
        worker = self._workers.get(worker_id)
        return 0 if worker is None else len(worker.jobs)

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
                        self._assignment.ready(worker, now)
                    elif isinstance(packet, Calls | Waits | DropCalls):
                        self._called(worker, packet, body, instant)
                    elif isinstance(packet, Progressed):
                        self._progressed(worker, packet, instant)
                    elif isinstance(packet, ValkeyRequest | BlocksRequest):
                        self._requested(worker, packet)
                    else:
                        self._interruptions.kill(worker, f"{type(packet).__name__} out of turn")
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
                self._away.heard(news, bodies, instant)
            case RefuseCalls():
                self._away.refuse(event)
            case ManagerGone(manager_id=manager_id):
                self._away.forget(manager_id)
            case ValkeyAnswered():
                self._valkey.answered(event)
            case BlocksServed(worker_id=worker_id):
                self._blocks.served(event, self._workers.get(worker_id))
            case ResultsTaken(size_bytes=size_bytes, window_bytes=window_bytes):
                self._reports.taken(size_bytes, window_bytes)
            case Recalled(worker_id=worker_id, revoked=revoked):
                self._interruptions.recalled(self._workers[worker_id], revoked, self._kept, now)
            case WorkerDied():
                self._worker_died(event, instant)
            case EnvironmentsCrowded():
                self._preparations.release_unused(instant)
            case EnvironmentProgress() | EnvironmentReady() | EnvironmentFailed() | EnvironmentGone() | Prewarm():
                if self._stop_at is None:
                    self._preparations.handle(event, instant)
            case CancelTasks(task_ids=task_ids):
                self._graphs.cancel(task_ids)
                if self._files:
                    self._cancel_waiting_for_files(set(task_ids))
                self._interruptions.cancel(set(task_ids), now)
            case ReturnTasks(task_ids=task_ids):
                self._reports.returned += [job.order.task_id for job in self._queue.take_out(set(task_ids))]
            case CopyFiles() | CopyEnded() | Linked():
                self._files.handle(event)
                self._accept_with_files(instant)
            case ReadOutput():
                self._reads.append(event)
            case ProcessesLeft(worker_id=worker_id, computes=computes):
                if (left := self._workers.get(worker_id)) is not None and not left.killed:
                    self._interruptions.end_after_task(left)
                    if computes:
                        self._interruptions.restrain(left.pair.submitter, now)
            case CpusMeasured():
                self._latency.cpus = event
            case LimitExceeded(worker_id=worker_id):
                if (exceeding := self._workers.get(worker_id)) is not None:
                    self._limit_exceeded(exceeding, event)
            case MalformedReceived(worker_id=worker_id, reason=reason):
                self._interruptions.kill(self._workers[worker_id], reason)
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
            elif job.files:
                self._latency.arrived(job, now.mono)
                self._files.add(job)
            elif job.callees is not None and job.callees.graph is not None and job.call is None:
                for call in self._graphs.add(job, job.callees, now):
                    if call.refusal is not None:
                        self._fail(call, call.refusal)
                    else:
                        accepted.append(call)
            else:
                if job.order.target is not None:
                    self._latency.arrived(job, now.mono)
                accepted.append(job)
        self._accept(accepted, now, first=first)
        if self._files.ready:
            self._accept_with_files(now)

    def _accept_with_files(self, now: Instant) -> None:
        """Queue tasks that wait for no files any more."""
        jobs, self._files.ready = self._files.ready, []
        if jobs and self._stop_at is None and self._finish_by is None:
            self._accept(jobs, now)

    def _cancel_waiting_for_files(self, task_ids: Collection[str]) -> None:
        for job in self._files.cancel(task_ids):
            self._reports.finish(job, TaskState.CANCELLED, outcomes.cancelled(running=False).to_json())

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
                self._interruptions.cancel(dropped, now.mono)
            if jobs and self._stop_at is None:
                self._tasks_received(jobs, now, first=True)

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
            self._interruptions.kill(worker, "the result of a task that it does not run")
            return
        if not (0 <= done.started_at < _END_OF_TIME and 0 <= done.ended_at < _END_OF_TIME):  # NaN is neither
            self._interruptions.kill(worker, "times that cannot be")
            return
        if (done.error is not None or done.details is not None) and (
            len(msgspec.msgpack.encode((done.error, done.details))) > _MOST_TEXT_BYTES
        ):
            self._interruptions.kill(worker, f"an error or details of more than {_MOST_TEXT_BYTES} bytes")
            return
        call, parts, output = worker.jobs[0].call, None, None
        is_plain = call is None and done.printed is None and not done.parts
        if is_plain and type(body) is bytes and len(body) <= MAX_PAYLOAD_BYTES:  # as most are
            result: Frame = body
        else:
            try:
                result, parts, output = orders.received(call, done, body, is_owner=not worker.pair.submitter)
            except ValueError as error:
                self._interruptions.kill(worker, str(error))
                return
        job = worker.jobs.popleft()
        self._queue.done(job.order.share_of)
        worker.unread_bytes -= orders.unread_bytes(job)
        run_s, measured_s, ended_at = done.ended_at - done.started_at, now.mono - worker.since, done.ended_at
        if run_s < 0.0 or not -_LATE_S <= measured_s - run_s <= _UNSEEN_S:
            run_s, ended_at = measured_s, now.epoch
        elif abs(now.epoch - ended_at) > _LATE_S:  # the forwarder drops instants that are far from its own clock
            ended_at = now.epoch
        worker.since, worker.head_reported, worker.overdue, worker.begun = now.mono, False, False, None
        if worker.stops:
            worker.stops.pop(done.task_id, None)
        if call is not None:
            if job.owner is not None:
                # A call that waited in the worker for its value: the manager does not know when the call began.
                is_early = worker.awaits > 0 and self._ahead.waits(job)
                said_s = max(0.0, done.ended_at - done.started_at)
                job.owner.sums.add(min(said_s, measured_s) if is_early else measured_s)
            if call.deliver or worker.awaits:
                for each in self._ahead.ended(worker, job, done, now.mono):
                    self._interruptions.recall(each)
        details: dict[str, Any] | None = done.details
        if worker.drives:
            if job.owner is None:
                details = {**(details or {}), **self._nested.details(job, measured_s, now.mono)}
            output = self._nested.output(job, output)
            self._interruptions.cancel_calls(worker, job, now.mono)
        start_s, worker.start_s = worker.start_s, 0.0
        self._prefetch.observe(run_s)
        finish: Callable[..., None] = self._reports.finish
        if call is not None and self._ahead:
            finish = functools.partial(self._ahead.report, finish)
        finish(
            job,
            TaskState.SUCCESS if done.error is None else TaskState.FAILED,
            done.error,
            result=result,
            started_at=ended_at - run_s,
            ended_at=ended_at,
            details=details,
            is_retried=done.is_retried,
            output=output,
            parts=parts,
            pid=worker.pid,
            start_s=start_s,
        )
        is_worker_over = self._stop_at is not None or (worker.tasks_left == 0 and not worker.jobs)
        if is_worker_over and not worker.recalling:
            self._interruptions.kill(worker)

    def _fail(self, job: Job, record: ErrorRecord) -> None:
        self._reports.finish(job, TaskState.FAILED, record.to_json())

    def _progressed(self, worker: Worker, packet: Progressed, now: Instant) -> None:
        """A task says how far it is, which it can forge. Of calls of other tasks nothing is shown."""
        if not worker.runs(packet.task_id) or worker.jobs[0].owner is not None:
            return
        progress = clean_progress(packet.done, packet.total, packet.text, now.epoch)
        if progress is not None:
            self._reports.task_progress.note(packet.task_id, progress, now=now.mono)

    def _requested(self, worker: Worker, packet: ValkeyRequest | BlocksRequest) -> None:
        """A task asks for Valkey, or blocks, which it can forge: but only for its own submitter."""
        if worker.runs(packet.task_id):
            try:
                if isinstance(packet, ValkeyRequest):
                    self._valkey.requested(worker, packet)
                else:
                    self._blocks.requested(worker, packet)
            except ValueError as error:
                self._interruptions.kill(worker, str(error))

    # -- calls of tasks that run ---------------------------------------------------------------------------------------

    def _called(self, worker: Worker, packet: Calls | Waits | DropCalls, body: Body, now: Instant) -> None:
        """Handle a packet about the calls of a running task. Threads that an ended task left may still send packets,
        and a task can forge them."""
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
                self._interruptions.cancel(gone, now.mono)
        else:
            if not worker.drives:
                worker.drives = True
                if len(worker.jobs) > 1:  # what was sent behind it must not wait for its calls, or be one of them
                    self._interruptions.recall(worker)
            try:
                self._accept(self._nested.received(worker, packet, body), now)
            except ValueError as error:
                self._interruptions.kill(worker, str(error))

    # -- workers -------------------------------------------------------------------------------------------------------

    def _limit_exceeded(self, worker: Worker, event: LimitExceeded) -> None:
        if not event.task_id:
            worker.excess = event.record
            self._interruptions.kill(worker)
        if worker.runs(event.task_id) or (not event.task_id and worker.jobs and worker.jobs[0].order.submitter):
            reason = StopReason(TaskState.FAILED, event.record)
            self._interruptions.stop(worker, worker.jobs[0].order.task_id, reason)

    def _worker_died(self, event: WorkerDied, now: Instant) -> None:
        worker = self._assignment.remove(event.worker_id)
        has_excess = worker.excess is not None and worker.environment is not None
        has_failed = not worker.is_ready or (has_excess and event.revoked >= len(worker.jobs))
        self._interruptions.died(worker, event, now, self._kept)
        if has_failed and self._stop_at is None:
            self._assignment.start_failed(worker, event, now)
        if worker.environment is not None:
            self._preparations.worker_ended(worker.environment, now)

    # -- the end -------------------------------------------------------------------------------------------------------

    def _finish(self, by: float, now: float) -> None:
        """Accept no more tasks, and let those that run finish: of graphs and of tasks with calls, also the calls that
        have not started."""
        self._finish_by = by
        self._files.clear()
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
                self._interruptions.recall(worker)

    @property
    def _has_calls(self) -> bool:
        """Whether there are graphs, or tasks with calls."""
        return bool(self._graphs.running or self._nested.drivers)

    @property
    def _kept(self) -> Kept:
        """Which tasks stay here that have not started, or whose worker has died."""
        if self._stop_at is not None:
            return "none"
        return "all" if self._finish_by is None else "calls"

    def _stop(self, grace_s: float, now: float) -> None:
        """Accept no more tasks, let running ones finish within ``grace_s`` seconds, then kill all workers."""
        self._stop_at = now + grace_s if self._stop_at is None else min(self._stop_at, now + grace_s)
        self._queue.clear()
        self._files.clear()
        for state in self._environments.values():
            state.waiting.clear()
        for worker in self._workers.values():
            if worker.is_ready:
                self._interruptions.recall(worker)
            else:
                self._interruptions.kill(worker)

    # -- time ----------------------------------------------------------------------------------------------------------

    def _handle_deadlines(self, now: Instant) -> None:
        if self._assignment.problem and self._stop_at is None and self._assignment.is_hopeless:
            self._failure = self._assignment.problem
            self._stop(0.0, now.mono)
        finish_by = self._finish_by if self._stop_at is None else None
        if finish_by is not None and (now.mono >= finish_by or not self._has_calls):
            self._stop(max(0.0, finish_by - now.mono), now.mono)
        if self._stop_at is not None and now.mono >= self._stop_at:
            for worker in self._workers.values():
                self._interruptions.kill(worker)
        for worker in self._workers.values():
            if worker.killed:
                continue
            if not worker.is_ready:
                if self._assignment.is_start_overdue(worker, now.mono):
                    self._interruptions.kill(worker)
            elif worker.jobs:
                self._interruptions.check(worker, now)
            elif worker.yields_to is not None:
                self._assignment.vacate(worker)
        if self._stop_at is None:
            if self._environments and now.mono >= self._preparations.due_at:
                self._preparations.check(now)
            only_needed = self._finish_by is not None
            self._placement.review_at = None
            if self._assignment.free_slots and (not only_needed or self._queue):
                self._assignment.launch(now.mono)
            if self._nested.drivers:
                for job in self._nested.due(now.mono):
                    self._accept([job], now)
            self._assignment.assign(now.mono, has_drivers=bool(self._nested.drivers), only_needed=only_needed)

    # -- reports -------------------------------------------------------------------------------------------------------

    def _report(self, now: Instant) -> None:
        """Report changes at once, and the number of workers each second.

        Results for which the agent has no room stay here, and while some do, no task is started; unless the manager
        stops.
        """
        everything = self._stop_at is not None
        if self._reports.ended_with_links:
            self._files.ended(self._reports.ended_with_links)
        if self._files.has_news(now.mono) and not everything:
            self._actions += self._files.news(now.mono)
        if self._environments and now.mono >= self._reports.environments_at:
            self._reports.environments(self._preparations.statuses, now)
        if self._nested.drivers:
            for progress in self._nested.changed(now.mono):
                self._reports.graph(progress)
        if (self._away or (self._queue and (self._graphs.running or self._nested.drivers))) and self._stop_at is None:
            self._away.review(now.mono, mean_s=self._prefetch.mean_s)
        if self.guests.due_at <= now.mono:
            self.guests.review(self._uses.all, now.mono)
        if self.guests:
            self._actions.append(self.guests.news())
        if self._latency.report_at <= now.mono and (status := self._latency.status(now.mono)) is not None:
            self._reports.cpu_shares(status)
        if not self._reports.is_due(now.mono, everything=everything):
            return
        ready = [worker for worker in self._workers.values() if worker.is_ready and worker.has_slot]
        self._actions.append(
            self._reports.make(
                now.mono,
                workers=len(ready),
                idle_workers=sum(not worker.jobs for worker in ready),
                problem=self._assignment.problem or (self._preparations.problem() if self._environments else ""),
                everything=everything,
            )
        )
