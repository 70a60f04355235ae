"""What an agent decides about its tasks. No I/O: told what happened, :meth:`AgentCore.decide` says what to do.

Every task that the spool holds is here, from acceptance until the cloud has recorded its end. Instants named ``now``
are epoch seconds.
"""

from __future__ import annotations

import collections
import hashlib
import itertools
from collections.abc import Iterable, Mapping, Sequence

from farcall_common.errors import ErrorRecord
from farcall_common.limits import MAX_INLINE_BYTES
from farcall_common.wire import (
    BlobGrant,
    BlobLocation,
    EndpointReport,
    HeldTask,
    RunTasks,
    TaskRef,
    TaskSpec,
    TaskState,
)
from farcall_endpoint import outcomes
from farcall_endpoint.agent.reports import CreditWindow, States, UploadRetries
from farcall_endpoint.agent.scheduling import Lifetime, Managers, SchedulingPolicy, TaskQueue
from farcall_endpoint.agent.tasks import Decisions, Demand, End, Ends, Stage, Task, refusal
from farcall_endpoint.prefetch import PrefetchPolicy
from farcall_endpoint.protocol import Died, Finished, Progress
from farcall_endpoint.shared import Bytes


class AgentCore:
    """One per agent.

    :param endpoint_id, max_inline_bytes: as :class:`Ends`.
    :param slots_hint: workers to expect before a manager has registered.
    :param prefetch: tasks to keep at a manager behind each running one.
    :param window: tasks to hold here for each slot, so that the way to the cloud is hidden; at most ``max_window``.
    :param tells_states: whether anybody wants to know in which state a task is before it ends.
    :param block_s: seconds that a block of managers lives; None if it has no end.
    :param drain_s: in the last seconds of a block no task starts whose length nobody knows.
    :param max_walltime_s: what every attempt may run at most, whatever its task asks for; None is no limit.
    :param weights: by submitter, how many of its tasks run for each one of another; 1 for those not named.
    """

    def __init__(
        self,
        *,
        endpoint_id: str,
        policy: SchedulingPolicy,
        slots_hint: int,
        prefetch: PrefetchPolicy,
        window: PrefetchPolicy,
        max_window: int,
        max_inline_bytes: int = MAX_INLINE_BYTES,
        tells_states: bool = True,
        block_s: float | None = None,
        drain_s: float = 0.0,
        max_walltime_s: float | None = None,
        weights: Mapping[str, int] | None = None,
    ) -> None:
        self._ends = Ends(endpoint_id=endpoint_id, max_inline_bytes=max_inline_bytes)
        self._policy = policy
        self._slots_hint = slots_hint
        self._prefetch = prefetch
        self._window = window
        self._credit = CreditWindow(window, limit=max_window)
        self._states = States(are_told=tells_states)
        self._block_s = block_s
        self._drain_s = drain_s
        self._max_walltime_s = max_walltime_s
        self._tasks: dict[str, Task] = {}
        #: By submitter; see :class:`farcall_common.fairness.FairQueue`.
        self.weights: Mapping[str, int] = weights or {}
        self._queue = TaskQueue(self.weights)
        self._functions: set[str] = set()
        self._managers = Managers()
        self._ended = 0
        #: Ends since the start, of whatever kind.
        self.finished_tasks = 0
        self._next_seq = itertools.count(1)
        self._uploads = UploadRetries()
        self._connected = False
        #: Tasks of a former process that may not run twice: they wait until the cloud has seen that the spool is no old
        #: copy, in which they may have started since.
        self._unconfirmed: list[Task] = []
        self._draining = False
        self._spool_problem = ""
        self._nodes_problem = ""
        self._no_nodes = ""
        self._decisions = Decisions()

    # -- start and end -------------------------------------------------------------------------------------------------

    def restore(self, tasks: Sequence[Task], functions: Iterable[str], *, now: float) -> None:
        """Go on with what the spool holds, oldest first, after the agent's process was ended in whatever way."""
        self._functions.update(functions)
        dispatched = []
        for task in tasks:
            former = self._tasks.get(task.task_id)
            if former is not None and former.end is not None:
                self._ended -= 1  # recorded and delivered anew before the spool came to forget it
                self._decisions.forgotten.append(former.seq)
            self._tasks[task.task_id] = task
            if task.end is not None:
                self._ended += 1
            elif task.starts:
                dispatched.append(task)
            elif not task.spec.options.idempotent:
                self._unconfirmed.append(task)
            elif task.stage is Stage.FETCHING:
                self._decisions.fetches.append(task)
            else:
                self._queue.add(task)
        self._next_seq = itertools.count(max((task.seq for task in tasks), default=0) + 1)
        self._reconsider(dispatched, self._slots_hint, "the endpoint was stopped or died while it had the task", now)

    def drain(self) -> None:
        """Start nothing and accept nothing any more."""
        self._draining = True

    # -- cloud ---------------------------------------------------------------------------------------------------------

    def held(self) -> tuple[HeldTask, ...]:
        """For the greeting: every task that is in the spool."""
        unwritten = {task.seq for task in self._decisions.ended}
        return tuple(
            HeldTask(
                task_id=task.task_id,
                attempt=task.attempt,
                finished=task.end is not None and task.seq not in unwritten,
            )
            for task in self._tasks.values()
        )

    def opened(self, forget: Iterable[TaskRef]) -> None:
        """A session is open. What has ended is reported (again), apart from what the cloud wants forgotten."""
        self.recorded(forget)
        self._connected = True
        self._credit.restart()
        self._queue.put_back([task for task in self._unconfirmed if task.stage is Stage.QUEUED])
        self._decisions.fetches += [task for task in self._unconfirmed if task.stage is Stage.FETCHING]
        self._unconfirmed.clear()
        for task in self._tasks.values():
            if task.end is not None:
                self._report_end(task)

    def closed(self) -> None:
        """The session is gone; everything goes on without it, except for what was never acknowledged in it."""
        self._connected = False
        self._disown()
        for waiting in (
            self._decisions.acknowledged,
            self._decisions.transitions,
            self._decisions.results,
            self._decisions.blob_requests,
        ):
            waiting.clear()  # the next greeting names them all

    def _disown(self) -> None:
        """Drop what was accepted and is not in the spool yet: the cloud still has it, and delivers it again."""
        decisions = self._decisions
        disowned = {task.seq for task in decisions.accepted}
        for task in decisions.accepted:
            if self._tasks.pop(task.task_id, None) is None:
                continue  # recorded meanwhile
            self._ended -= task.end is not None
            task.stage = Stage.ENDED
        decisions.accepted.clear()
        decisions.ended = [task for task in decisions.ended if task.seq not in disowned]
        decisions.fetches = [task for task in decisions.fetches if task.seq not in disowned]

    def run_tasks(self, message: RunTasks, frames: Sequence[bytes], *, now: float) -> None:
        """Accept tasks. One that is here already gets its new attempt number, and is not started again."""
        self._credit.used(len(message.tasks))
        for function in message.functions:
            body = frames[function.body]
            known = function.function_hash in self._functions
            if not known and hashlib.sha256(body).hexdigest() == function.function_hash:
                self._functions.add(function.function_hash)
                self._decisions.functions.append((function, body))
        for spec in message.tasks:
            self.accept(spec, frames[spec.payload] if spec.payload is not None else None, now=now)

    def know(self, function_hash: str) -> None:
        """The body of a function is at hand."""
        self._functions.add(function_hash)

    def accept(self, spec: TaskSpec, payload: bytes | None, *, now: float) -> None:
        """Accept one task. None for a payload that must be fetched first."""
        held = self._tasks.get(spec.task_id)
        if held is not None:
            self._redeliver(held, spec.attempt)
            return
        stage = Stage.QUEUED if payload is not None else Stage.FETCHING
        task = Task(next(self._next_seq), spec, spec.attempt, stage, now, payload=payload)
        self._tasks[task.task_id] = task
        self._decisions.accepted.append(task)
        self._decisions.acknowledged.append(task)
        refused = refusal(
            spec, knows_function=spec.function_hash in self._functions, block_s=self._block_s, no_nodes=self._no_nodes
        )
        if refused is not None:
            self._end(task, self._ends.failed(task, refused))
            return
        if stage is Stage.QUEUED:
            self._queue.add(task)
        else:
            self._decisions.fetches.append(task)
        self._states.watch(task, now)

    def cancel(self, task_ids: Iterable[str]) -> None:
        """Stop tasks, running or not; a task that has ended keeps its end."""
        for task_id in task_ids:
            task = self._tasks.get(task_id)
            if task is None or task.end is not None:
                continue
            if task.stage is Stage.DISPATCHED and task.manager_id is not None:
                task.cancelling = True
                self._decisions.cancels[task.manager_id].append(task_id)
            else:
                self._end(task, self._ends.cancelled(running=False))

    def recorded(self, refs: Iterable[TaskRef]) -> None:
        """The cloud has an end for these: forget them, and stop those that still run."""
        for ref in refs:
            task = self._tasks.pop(ref.task_id, None)
            if task is None:
                continue
            if task.end is not None:
                self._ended -= 1
                self._decisions.forgotten.append(task.seq)
                continue
            self._decisions.dropped.append(task.seq)
            if task.stage is Stage.DISPATCHED and task.manager_id is not None:
                self._decisions.cancels[task.manager_id].append(task.task_id)
            task.stage = Stage.ENDED

    # -- spool ---------------------------------------------------------------------------------------------------------

    def spool_problem(self, problem: str) -> None:
        """Why the spool cannot hold more; while there is such a reason, the cloud is asked for no more tasks."""
        self._spool_problem = problem

    def take_back(self, decisions: Decisions, *, now: float) -> None:
        """The latest decisions could not be made durable. They stand for the next turn that can; only what depends on
        nothing but that turn is undone: tasks go back into the queue as if never placed, and credit was not given."""
        placed = sum(map(len, decisions.orders.values()))
        again = decisions.starts[len(decisions.starts) - placed :]  # placing comes last in a turn
        del decisions.starts[len(decisions.starts) - placed :]
        decisions.orders.clear()
        for task in again:
            assert task.manager_id is not None
            self._managers.release(task.manager_id, task.task_id)
            self._queue.done(task)
            task.starts -= 1
        self._requeue(again, now)
        self._credit.used(decisions.credit)
        decisions.credit = 0
        self._decisions = decisions

    def urgent(self) -> dict[str, list[str]]:
        """Cancels, by manager, which need not wait for the spool: what they lead to is written when it comes."""
        cancels, self._decisions.cancels = self._decisions.cancels, collections.defaultdict(list)
        return cancels

    # -- blobs ---------------------------------------------------------------------------------------------------------

    def fetched(self, task: Task, payload: bytes) -> None:
        """A payload was downloaded and is what was promised."""
        if task.stage is Stage.FETCHING:
            task.stage, task.payload = Stage.QUEUED, payload
            self._decisions.fetched.append(task)
            self._queue.add(task)

    def fetch_failed(self, task: Task, reason: str) -> None:
        """A payload cannot be had."""
        if task.stage is Stage.FETCHING:
            self._end(task, self._ends.failed(task, outcomes.payload_unavailable(reason)))

    def granted(self, grant: BlobGrant, *, now: float) -> None:
        """The answer to a blob request."""
        task = self._tasks.get(grant.task_id)
        if task is None or task.end is None or not task.end.needs_upload or grant.attempt != task.attempt:
            return
        if grant.error is None:
            self._decisions.uploads.append((task, grant))
        else:
            record = ErrorRecord.from_json(grant.error)
            self.upload_failed(task, record.message, retryable=record.retryable, now=now)

    def wants_upload(self, task: Task) -> bool:
        """Whether the result of a task is here and has yet to be uploaded."""
        return self._tasks.get(task.task_id) is task and task.end is not None and task.end.needs_upload

    def uploaded(self, task: Task, location: BlobLocation) -> None:
        """A result is in the blob store."""
        if task.end is not None and task.task_id in self._tasks:
            task.end.blob = location
            self._report_end(task)

    def upload_failed(self, task: Task, reason: str, *, retryable: bool, now: float) -> None:
        """A result could not be uploaded; after some tries the task fails with that."""
        end = task.end
        if end is None or not end.needs_upload or task.task_id not in self._tasks:
            return
        if retryable and self._uploads.add(task, now=now):
            return
        record = outcomes.result_not_uploaded(reason, size_bytes=end.size_bytes)
        self._ended -= 1
        self._end(task, self._ends.failed(task, record, started_at=end.started_at, ended_at=end.ended_at))

    # -- managers ------------------------------------------------------------------------------------------------------

    def nodes(self, *, refusal: str, problem: str) -> None:
        """How it stands with blocks. While there is a ``refusal`` no manager can be had: what waits fails with it."""
        self._nodes_problem, self._no_nodes = problem, refusal
        if refusal:
            for task in self._queue.clear():
                self._end(task, self._ends.failed(task, outcomes.nodes_unavailable(refusal)))

    def demand(self) -> Demand:
        """What there is to do, and who does it."""
        return Demand(len(self._tasks) - self._ended, self._managers.busy)

    def manager_registered(self, manager_id: str, *, slots: int, ends_at: float | None = None) -> None:
        """A manager is there; ``ends_at``: when its time is over, where that is known."""
        lifetime = None if ends_at is None else Lifetime(ends_at, self._drain_s, self._max_walltime_s)
        self._managers.add(manager_id, slots=slots, lifetime=lifetime)

    def progress(self, manager_id: str, progress: Progress, bodies: Sequence[Bytes], *, now: float) -> None:
        """A manager reports. A result counts even if the manager was given up meanwhile."""
        self._managers.note(
            manager_id, workers=progress.workers, idle_workers=progress.idle_workers, problem=progress.problem
        )
        for finished in progress.finished:
            task = self._release(manager_id, finished.task_id)
            if task is not None:
                self._end(task, self._ends.finished(task, finished, bodies))
        self._observe(progress.finished)
        for died in progress.died:
            self._died(manager_id, died, now)
        for started in progress.started:
            task = self._tasks.get(started.task_id)
            if task is not None and task.stage is Stage.DISPATCHED:
                self._states.enter(task, TaskState.RUNNING, started.at)

    def manager_lost(
        self, manager_id: str, reason: str, *, expected: bool = False, unstarted: bool = False, now: float
    ) -> None:
        """A manager is gone with all that it had. If that was ``expected``, no start is held against a task.
        ``unstarted``: it started none of these tasks."""
        manager = self._managers.remove(manager_id)
        if manager is not None:
            suspects = 0 if expected or unstarted else manager.slots
            for task in manager.outstanding.values():
                self._queue.done(task)
            self._reconsider(list(manager.outstanding.values()), suspects, reason, now, unstarted=unstarted)

    # -- time and decisions --------------------------------------------------------------------------------------------

    def next_deadline(self) -> float | None:
        """The epoch second at which :meth:`decide` may have something to do although nothing happened."""
        deadlines = (self._states.next_deadline(), self._uploads.next_deadline())
        return min((at for at in deadlines if at is not None), default=None)

    def decide(self, *, now: float) -> Decisions:
        """Everything that follows from what happened since the last time."""
        if not self._draining:
            self._dispatch(now)
            self._give_credit()
        self._decisions.transitions += self._states.due(now=now, connected=self._connected)
        for task in self._uploads.due(now=now):
            if self._connected and task.end is not None and task.end.needs_upload:
                self._decisions.blob_requests.append(task)
        decisions, self._decisions = self._decisions, Decisions()
        if decisions.forgotten:  # what was to be said of these in the same turn has nothing to stand on any more
            decisions.results = [task for task in decisions.results if task.task_id in self._tasks]
            decisions.blob_requests = [task for task in decisions.blob_requests if task.task_id in self._tasks]
            decisions.uploads = [(task, grant) for task, grant in decisions.uploads if task.task_id in self._tasks]
        return decisions

    def report(self) -> EndpointReport:
        """The numbers for a heartbeat."""
        problem = self._spool_problem or self._nodes_problem or self._managers.problem
        unfinished = len(self._tasks) - self._ended
        return EndpointReport(
            managers=len(self._managers),
            total_workers=self._managers.workers,
            idle_workers=self._managers.idle_workers,
            pending_tasks=max(0, unfinished - self._managers.outstanding),
            outstanding_tasks=unfinished,
            detail={"problem": problem} if problem else {},
        )

    # -- inside --------------------------------------------------------------------------------------------------------

    def _redeliver(self, task: Task, attempt: int) -> None:
        task.attempt = max(task.attempt, attempt)
        self._decisions.redelivered.append(task)
        self._decisions.acknowledged.append(task)
        if task.end is not None:
            self._report_end(task)

    def _dispatch(self, now: float) -> None:
        if not (self._queue and self._managers):
            return
        placed = self._queue.place(self._policy, self._managers.loads, depth=self._prefetch.depth, now=now)
        for task, manager_id in placed:
            task.stage, task.manager_id = Stage.DISPATCHED, manager_id
            task.starts += 1
            self._managers.assign(manager_id, task)
            self._decisions.starts.append(task)
            self._decisions.orders[manager_id].append(task)
            self._states.enter(task, TaskState.WAITING_FOR_LAUNCH, now)

    def _give_credit(self) -> None:
        if not self._connected or self._spool_problem:
            return
        slots = self._managers.slots or self._slots_hint
        self._decisions.credit += self._credit.grant(slots=slots, held=len(self._tasks) - self._ended)

    def _observe(self, ends: Sequence[Finished]) -> None:
        """Learn from how long tasks ran."""
        durations = [e.ended_at - e.started_at for e in ends if e.started_at is not None and e.ended_at is not None]
        if durations:
            mean_s = sum(durations) / len(durations)
            self._prefetch.observe(mean_s, count=len(durations))
            self._window.observe(mean_s, count=len(durations))

    def _died(self, manager_id: str, died: Died, now: float) -> None:
        task = self._release(manager_id, died.task_id)
        if task is None or task.manager_id != manager_id:
            return
        if task.cancelling:
            self._end(task, self._ends.cancelled(running=True))
        elif task.may_start_again:
            task.deaths += (died.reason,)
            self._requeue([task], now)
        else:
            tails = {"stdout_tail": died.stdout_tail, "stderr_tail": died.stderr_tail}
            self._end(task, self._ends.given_up(task, died.reason, **tails))

    def _release(self, manager_id: str, task_id: str) -> Task | None:
        """Note that a manager has done with a task; None if its end is known already."""
        if (released := self._managers.release(manager_id, task_id)) is not None:
            self._queue.done(released)
        task = self._tasks.get(task_id)
        return None if task is None or task.end is not None else task

    def _reconsider(
        self, tasks: Sequence[Task], suspects: int, reason: str, now: float, *, unstarted: bool = False
    ) -> None:
        """Decide about tasks, in the order of their dispatch, whose manager is gone.

        Managers run in order, so only the first few of them, as many as it had slots, can have been running; the start
        of the others does not count. Tasks that may not run twice are never sent ahead: each may have been running,
        unless it is known that all were ``unstarted``.
        """
        again = []
        for index, task in enumerate(tasks):
            if task.cancelling:
                self._end(task, self._ends.cancelled(running=True))
            elif not (task.spec.options.idempotent or unstarted):
                self._end(task, self._ends.lost(task, reason))
            elif index >= suspects:
                task.starts -= 1
                self._decisions.starts.append(task)
                again.append(task)
            elif task.may_start_again:
                task.deaths += (reason,)
                again.append(task)
            else:
                self._end(task, self._ends.given_up(task, reason))
        self._requeue(again, now)

    def _requeue(self, tasks: Sequence[Task], now: float) -> None:
        self._queue.put_back(tasks)
        for task in tasks:
            task.stage, task.manager_id = Stage.QUEUED, None
            self._states.enter(task, TaskState.WAITING_FOR_NODES, now)

    def _end(self, task: Task, end: End) -> None:
        task.end, task.stage, task.payload, task.manager_id = end, Stage.ENDED, None, None
        self._ended += 1
        self.finished_tasks += 1
        self._decisions.ended.append(task)
        self._report_end(task)

    def _report_end(self, task: Task) -> None:
        if not self._connected or task.end is None:
            return
        if task.end.needs_upload:
            self._decisions.blob_requests.append(task)
        else:
            self._decisions.results.append(task)
