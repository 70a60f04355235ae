"""What an agent decides about its tasks. No I/O: told what happened, :meth:`AgentCore.decide` says what to do.

Every task that the spool holds is here, from acceptance until the cloud has recorded its end. Instants named ``now``
are epoch seconds.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import heapq
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from farcall_common.errors import ErrorRecord
from farcall_common.wire import (
    BlobGrant,
    BlobLocation,
    EndpointReport,
    HeldTask,
    RunTasks,
    TaskMove,
    TaskRef,
    TaskSpec,
    TaskState,
)
from farcall_endpoint import outcomes
from farcall_endpoint.agent.roster import Roster
from farcall_endpoint.agent.scheduling import Lifetime, SchedulingPolicy
from farcall_endpoint.agent.tasks import Decisions, Demand, End, Stage, Task
from farcall_endpoint.prefetch import PrefetchPolicy
from farcall_endpoint.protocol import RANKS, Died, Finished, Progress
from farcall_endpoint.shared import Bytes

__all__ = ["REPORT_AFTER_S", "AgentCore"]

REPORT_AFTER_S: Final = 0.5
"""A state that lasts for so long is worth a message; tasks that are over sooner cost none."""
_UPLOAD_TRIES: Final = 5
_UPLOAD_RETRY_S: Final = 0.5


class AgentCore:
    """One per agent.

    :param endpoint_id: for error records.
    :param slots_hint: workers to expect before a manager has registered.
    :param prefetch: tasks to keep at a manager behind each running one.
    :param window: tasks to hold here for each slot, so that the way to the cloud is hidden; at most ``max_window``.
    :param max_inline_bytes: larger results must be uploaded before their end is reported.
    :param tells_states: whether anybody wants to know in which state a task is before it ends.
    :param block_s: seconds that a block of managers lives; None if it has no end.
    :param drain_s: in the last seconds of a block no task starts whose length nobody knows.
    :param max_walltime_s: what every attempt may run at most, whatever its task asks for; None is no limit.
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
        max_inline_bytes: int = outcomes.MAX_INLINE_BYTES,
        tells_states: bool = True,
        block_s: float | None = None,
        drain_s: float = 0.0,
        max_walltime_s: float | None = None,
    ) -> None:
        self._endpoint_id = endpoint_id
        self._policy = policy
        self._slots_hint = slots_hint
        self._prefetch = prefetch
        self._window = window
        self._max_window = max_window
        self._max_inline_bytes = max_inline_bytes
        self._tells_states = tells_states
        self._block_s = block_s
        self._drain_s = drain_s
        self._max_walltime_s = max_walltime_s
        self._tasks: dict[str, Task] = {}
        self._queue: collections.deque[Task] = collections.deque()  # also what has ended while it waited: passed over
        self._functions: set[str] = set()
        self._roster = Roster()
        self._ended = 0
        #: Ends since the start, of whatever kind.
        self.finished_tasks = 0
        self._next_seq = itertools.count(1)
        self._watched: collections.deque[tuple[float, Task]] = collections.deque()
        self._uploads_due: list[tuple[float, int, Task]] = []
        self._connected = False
        self._draining = False
        self._credit = 0
        self._spool_problem = ""
        self._nodes_problem = ""
        self._refusal = ""
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
            elif task.stage is Stage.FETCHING:
                self._decisions.fetches.append(task)
            else:
                self._queue.append(task)
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
        self._credit = 0
        for task in self._tasks.values():
            if task.end is not None:
                self._report_end(task)

    def closed(self) -> None:
        """The session is gone; everything goes on without it, except for what was never acknowledged in it."""
        self._connected = False
        self._disown()
        for waiting in (
            self._decisions.acknowledged,
            self._decisions.moves,
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
        self._credit -= len(message.tasks)
        for function in message.functions:
            body = frames[function.body]
            if function.function_hash not in self._functions and _sha256(body) == function.function_hash:
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
        if spec.function_hash not in self._functions:
            self._fail(task, outcomes.function_missing(spec.function_hash))
        elif spec.container_id is not None:
            self._fail(task, outcomes.containers_unsupported(spec.container_id))
        elif spec.resource_specification and (wrong := _wrong_limit(spec.resource_specification)):
            self._fail(task, outcomes.limit_invalid(*wrong))
        elif self._block_s is not None and (spec.walltime_s or 0.0) > self._block_s:
            self._fail(task, outcomes.walltime_too_long(spec.walltime_s or 0.0, block_s=self._block_s))
        elif self._refusal:
            self._fail(task, outcomes.nodes_unavailable(self._refusal))
        else:
            (self._queue if stage is Stage.QUEUED else self._decisions.fetches).append(task)
            self._watch(task, now)

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
                self._end(task, End(TaskState.CANCELLED, outcomes.cancelled(running=False).to_json()))

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
            self._roster.release(task.manager_id, task.task_id)
            task.starts -= 1
        self._requeue(again, now)
        self._credit -= decisions.credit
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
            self._queue.append(task)

    def fetch_failed(self, task: Task, reason: str) -> None:
        """A payload cannot be had."""
        if task.stage is Stage.FETCHING:
            self._fail(task, outcomes.payload_unavailable(reason))

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
        end.upload_tries += 1
        if retryable and end.upload_tries < _UPLOAD_TRIES:
            due_at = now + _UPLOAD_RETRY_S * 2 ** (end.upload_tries - 1)
            heapq.heappush(self._uploads_due, (due_at, task.seq, task))
            return
        record = outcomes.result_not_uploaded(reason, size_bytes=end.size_bytes)
        self._ended -= 1
        self._fail(task, record, started_at=end.started_at, ended_at=end.ended_at)

    # -- managers ------------------------------------------------------------------------------------------------------

    def nodes(self, *, refusal: str, problem: str) -> None:
        """How it stands with blocks. While there is a ``refusal`` no manager can be had: what waits fails with it."""
        self._nodes_problem, self._refusal = problem, refusal
        if refusal:
            waiting, self._queue = self._queue, collections.deque()
            for task in waiting:
                if task.stage is Stage.QUEUED:
                    self._fail(task, outcomes.nodes_unavailable(refusal))

    def demand(self) -> Demand:
        """What there is to do, and who does it."""
        return Demand(len(self._tasks) - self._ended, self._roster.busy)

    def manager_registered(self, manager_id: str, *, slots: int, ends_at: float | None = None) -> None:
        """A manager is there; ``ends_at``: when its time is over, where that is known."""
        lifetime = None if ends_at is None else Lifetime(ends_at, self._drain_s, self._max_walltime_s)
        self._roster.add(manager_id, slots=slots, lifetime=lifetime)

    def progress(self, manager_id: str, progress: Progress, bodies: Sequence[Bytes], *, now: float) -> None:
        """A manager reports. A result counts even if the manager was given up meanwhile."""
        self._roster.note(
            manager_id, workers=progress.workers, idle_workers=progress.idle_workers, problem=progress.problem
        )
        for finished in progress.finished:
            self._finished(manager_id, finished, bodies)
        self._observe(progress.finished)
        for died in progress.died:
            self._died(manager_id, died, now)
        for started in progress.started:
            task = self._tasks.get(started.task_id)
            if task is not None and task.stage is Stage.DISPATCHED:
                self._enter(task, TaskState.RUNNING, started.at)

    def manager_lost(self, manager_id: str, reason: str, *, expected: bool = False, now: float) -> None:
        """A manager is gone with all that it had. If that was ``expected``, no start is held against a task."""
        manager = self._roster.remove(manager_id)
        if manager is not None:
            suspects = 0 if expected else manager.slots
            self._reconsider(list(manager.outstanding.values()), suspects, reason, now)

    # -- time and decisions --------------------------------------------------------------------------------------------

    def next_deadline(self) -> float | None:
        """The epoch second at which :meth:`decide` may have something to do although nothing happened."""
        deadlines = [self._watched[0][0]] if self._watched else []
        if self._uploads_due:
            deadlines.append(self._uploads_due[0][0])
        return min(deadlines, default=None)

    def decide(self, *, now: float) -> Decisions:
        """Everything that follows from what happened since the last time."""
        if not self._draining:
            self._dispatch(now)
            self._give_credit()
        while self._watched and self._watched[0][0] <= now:
            self._report_state(self._watched.popleft()[1], now)
        while self._uploads_due and self._uploads_due[0][0] <= now:
            task = heapq.heappop(self._uploads_due)[2]
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
        problem = self._spool_problem or self._nodes_problem or self._roster.problem
        unfinished = len(self._tasks) - self._ended
        return EndpointReport(
            managers=len(self._roster),
            total_workers=self._roster.workers,
            idle_workers=self._roster.idle_workers,
            pending_tasks=max(0, unfinished - self._roster.outstanding),
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
        queue = self._queue
        while queue and queue[0].stage is not Stage.QUEUED:  # ended while it waited
            queue.popleft()
        if not (queue and self._roster):
            return
        waiting = (task for task in queue if task.stage is Stage.QUEUED)
        passed = []
        for task, manager_id in self._policy.place(waiting, self._roster.loads, depth=self._prefetch.depth, now=now):
            while (head := queue.popleft()) is not task:
                if head.stage is Stage.QUEUED:
                    passed.append(head)
            task.stage, task.manager_id = Stage.DISPATCHED, manager_id
            task.starts += 1
            self._roster.assign(manager_id, task)
            self._decisions.starts.append(task)
            self._decisions.orders[manager_id].append(task)
            self._enter(task, TaskState.WAITING_FOR_LAUNCH, now)
        queue.extendleft(reversed(passed))

    def _give_credit(self) -> None:
        if not self._connected or self._spool_problem:
            return
        slots = self._roster.slots or self._slots_hint
        window = min(slots * (2 + self._window.depth), max(self._max_window, 2 * slots))
        due = window - (len(self._tasks) - self._ended) - self._credit
        if due >= max(1, window // 4) or (due > 0 and self._credit == 0):
            self._credit += due
            self._decisions.credit += due

    def _finished(self, manager_id: str, finished: Finished, bodies: Sequence[Bytes]) -> None:
        task = self._release(manager_id, finished.task_id)
        if task is None:
            return
        end = End(finished.state, None, 0, "", finished.started_at, finished.ended_at, details=finished.details)
        if finished.error is not None:
            end.error = {"attempt": task.attempt, "endpoint_id": self._endpoint_id, **finished.error}
        if finished.result is not None:
            end.body = bodies[finished.result]
            end.size_bytes = len(end.body)
            if end.size_bytes > self._max_inline_bytes:
                end.sha256 = _sha256(end.body)
        self._end(task, end)

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
            self._end(task, End(TaskState.CANCELLED, outcomes.cancelled(running=True).to_json()))
        elif task.may_start_again:
            task.deaths += (died.reason,)
            self._requeue([task], now)
        else:
            self._give_up(task, died.reason, stdout_tail=died.stdout_tail, stderr_tail=died.stderr_tail)

    def _release(self, manager_id: str, task_id: str) -> Task | None:
        """Note that a manager has done with a task; None if its end is known already."""
        self._roster.release(manager_id, task_id)
        task = self._tasks.get(task_id)
        return None if task is None or task.end is not None else task

    def _reconsider(self, tasks: Sequence[Task], suspects: int, reason: str, now: float) -> None:
        """Decide about tasks, in the order of their dispatch, whose manager is gone.

        Managers run in order, so only the first few of them, as many as it had slots, can have been running; the start
        of the others does not count. Tasks that may not run twice are never sent ahead: each may have been running.
        """
        again = []
        for index, task in enumerate(tasks):
            if task.cancelling:
                self._end(task, End(TaskState.CANCELLED, outcomes.cancelled(running=True).to_json()))
            elif not task.spec.idempotent:
                self._end(task, End(TaskState.LOST, self._located(outcomes.lost(reason), task)))
            elif index >= suspects:
                task.starts -= 1
                self._decisions.starts.append(task)
                again.append(task)
            elif task.may_start_again:
                task.deaths += (reason,)
                again.append(task)
            else:
                self._give_up(task, reason)
        self._requeue(again, now)

    def _requeue(self, tasks: Sequence[Task], now: float) -> None:
        for task in reversed(tasks):
            task.stage, task.manager_id = Stage.QUEUED, None
            self._queue.appendleft(task)
            self._enter(task, TaskState.WAITING_FOR_NODES, now)

    def _give_up(self, task: Task, reason: str, *, stdout_tail: str = "", stderr_tail: str = "") -> None:
        """No attempt is left to a task whose worker died."""
        elsewhere = min(task.spec.attempt - 1, task.spec.max_attempts)
        reasons = ("the endpoint that had it went away",) * elsewhere + (*task.deaths, reason)
        record = outcomes.worker_died(
            reason, starts=task.starts, reasons=reasons, stdout_tail=stdout_tail, stderr_tail=stderr_tail
        )
        self._fail(task, record, exhausted=task.spec.idempotent)

    def _fail(
        self,
        task: Task,
        record: ErrorRecord,
        *,
        started_at: float | None = None,
        ended_at: float | None = None,
        exhausted: bool = False,
    ) -> None:
        error = self._located(record, task)
        end = End(TaskState.FAILED, error, started_at=started_at, ended_at=ended_at, exhausted=exhausted)
        self._end(task, end)

    def _located(self, record: ErrorRecord, task: Task) -> dict[str, object]:
        return dataclasses.replace(record, attempt=task.attempt, endpoint_id=self._endpoint_id).to_json()

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

    def _enter(self, task: Task, state: TaskState, at: float) -> None:
        task.state, task.at = state, at
        if not task.watched and task.reported is not state:
            self._watch(task, at)

    def _watch(self, task: Task, at: float) -> None:
        if self._tells_states:
            task.watched = True
            self._watched.append((at + REPORT_AFTER_S, task))

    def _report_state(self, task: Task, now: float) -> None:
        task.watched = False
        if task.stage is Stage.ENDED or task.reported is task.state:
            return
        if now < task.at + REPORT_AFTER_S:
            self._watch(task, task.at)
        elif self._connected:
            task.reported = task.state
            self._decisions.moves.append(
                TaskMove(task_id=task.task_id, attempt=task.attempt, state=task.state, at=task.at)
            )


def _wrong_limit(specification: Mapping[str, object]) -> tuple[str, object] | None:
    """The name and value of a limit that is none."""
    for name in ("memory_bytes", "max_output_bytes", *RANKS):
        value = specification.get(name)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value <= 0):
            return name, value
    return None


def _sha256(data: Bytes) -> str:
    return hashlib.sha256(data).hexdigest()
