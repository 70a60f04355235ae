"""Interruption of tasks: they are recalled, cancelled, stopped at a limit, or lost with their worker. No I/O, no clock.

Tasks that a worker has not started are recalled (see :mod:`farcall_endpoint.contracts.manager_worker`): if the one that
runs takes too long, if that one must be stopped, or if the worker's place goes to another pair. A task that runs is
stopped only with its worker: what is behind it is recalled first, and then the worker is killed.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping
from typing import Final, Literal

import msgspec

from farcall_common.retries import WALLTIME_NAME
from farcall_common.wire import TaskState
from farcall_endpoint.contracts import outcomes
from farcall_endpoint.contracts.agent_manager import Died, Ending, Used
from farcall_endpoint.manager.core import orders
from farcall_endpoint.manager.core.actions import Action, Kill, Pass, Recall
from farcall_endpoint.manager.core.away import AwayCalls
from farcall_endpoint.manager.core.calls_ahead import AheadCalls
from farcall_endpoint.manager.core.environment_states import EnvironmentStates
from farcall_endpoint.manager.core.events import Instant, Job, WorkerDied
from farcall_endpoint.manager.core.graphs import RunningGraph
from farcall_endpoint.manager.core.nested_calls import Driver, NestedCalls
from farcall_endpoint.manager.core.reports import Reports
from farcall_endpoint.manager.core.task_queue import TaskQueue
from farcall_endpoint.manager.core.workers import StopReason, Worker

STARTED_AFTER_S: Final = 0.05
"""Seconds after which a task is reported as running. A shorter task reports only its result."""
_OVERDUE_S: Final = 0.01
"""Seconds of a task's run after which the tasks behind it are recalled."""
_AHEAD_S: Final = 1.0
"""Seconds after which a call that was sent ahead, whose value was sent, is recalled unless it has begun: the value may
not have arrived."""

_CALLED_EARLY: Final = "another task of its worker has made calls for it"

_ONE_TASK_S: Final = 600.0
"""Time in which workers of a submitter run one task each, after one of them has computed without a task."""
Kept = Literal["all", "calls", "none"]
"""Which tasks the manager keeps that have not started, or whose worker has died: when it ends, it leaves all to the
agent, or all but the calls of those that continue."""


class Interruptions:
    """Recalls tasks and kills workers, and decides what follows for the tasks.

    :param workers: all of the manager.
    :param actions: of the manager's core.
    """

    def __init__(
        self,
        *,
        workers: Mapping[int, Worker],
        queue: TaskQueue,
        environments: EnvironmentStates,
        nested: NestedCalls,
        ahead: AheadCalls,
        away: AwayCalls,
        reports: Reports,
        actions: list[Action],
    ) -> None:
        self._workers = workers
        self._queue = queue
        self._environments = environments
        self._nested = nested
        self._ahead = ahead
        self._away = away
        self._reports = reports
        self._actions = actions
        self._one_task_until: dict[str, float] = {}  # by submitter

    def recall(self, worker: Worker) -> None:
        """Ask for the tasks that a worker has not started."""
        if not (worker.recalling or worker.killed):
            worker.recalling = True
            self._actions.append(Recall(worker.worker_id))

    def kill(self, worker: Worker, reason: str = "") -> None:
        """Kill a worker. The agent hears before whose task it runs, if that is not the owner's: such a task may be able
        to bring down the manager now.

        :param reason: for the log.
        """
        if not worker.killed:
            worker.killed = True
            if worker.jobs and worker.jobs[0].order.submitter and (task_id := _task_of(worker.jobs[0])):
                self._actions.append(Pass(Ending(task_id)))
            self._actions.append(Kill(worker.worker_id, reason))

    def end_after_task(self, worker: Worker) -> None:
        """End a worker when the task that it runs has ended; it gets no other task."""
        worker.tasks_left, worker.is_leaving = 0, True
        if worker.jobs:
            self.recall(worker)
        else:
            self.kill(worker)

    def restrain(self, submitter: str, now: float) -> None:
        """Let the workers of a submitter run one task each for ten minutes: a worker has computed without a task, which
        ends with the worker, and counts for no hours.

        :param submitter: empty for the owner, and for workers that all share.
        """
        if not submitter:
            return
        self._one_task_until[submitter] = now + _ONE_TASK_S
        for worker in list(self._workers.values()):
            if worker.pair.submitter == submitter and not worker.killed:
                if worker.is_ready:
                    self.end_after_task(worker)
                else:
                    worker.tasks_left = 1

    def is_restrained(self, submitter: str, now: float) -> bool:
        """Whether the workers of a submitter run one task each now."""
        return now < self._one_task_until.get(submitter, 0.0)

    def stop(self, worker: Worker, task_id: str, reason: StopReason) -> None:
        """Stop a task of a worker, whether it has started or not."""
        worker.stops[task_id] = reason
        self.recall(worker)

    def cancel(self, task_ids: Collection[str], now: float) -> None:
        """Stop tasks; results of unknown ones were sent already."""
        record = outcomes.cancelled(running=False).to_json()
        for job in self._queue.take_out(task_ids):
            self._reports.finish(job, TaskState.CANCELLED, record)
        for state in self._environments.values():
            for job in [job for job in state.waiting if job.order.task_id in task_ids]:
                state.waiting.remove(job)
                self._reports.finish(job, TaskState.CANCELLED, record)
        if self._away:
            self._away.cancel(task_ids, now)
        for worker in self._workers.values():
            for job in worker.jobs:
                if job.order.task_id in task_ids:
                    reason = StopReason(TaskState.CANCELLED, outcomes.cancelled(running=True))
                    self.stop(worker, job.order.task_id, reason)

    def cancel_calls(self, worker: Worker, job: Job, now: float) -> None:
        """A task with calls has ended: those that it left are stopped."""
        worker.drives = worker.waits = False
        if job.order.task_id in self._nested.drivers and (gone := self._nested.over(job, now)):
            self.cancel(gone, now)

    # -- time ----------------------------------------------------------------------------------------------------------

    def check(self, worker: Worker, now: Instant) -> None:
        """Do what is due for the tasks of a worker, which has some."""
        age_s = now.mono - worker.since
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
            self.recall(worker)
        walltime_s = head.options.walltime_s
        if walltime_s is not None and age_s >= walltime_s and head.task_id not in worker.stops:
            is_retried = WALLTIME_NAME in head.options.retry_on
            reason = StopReason(TaskState.FAILED, outcomes.walltime_exceeded(walltime_s), is_retried)
            self.stop(worker, head.task_id, reason)

    def due_at(self, worker: Worker) -> float:
        """When :meth:`check` has something to do for a worker, which has tasks."""
        if worker.awaits and self._ahead.waits(worker.jobs[0]):
            return math.inf
        head = worker.jobs[0].order
        delays = [STARTED_AFTER_S] if not worker.head_reported else []
        if not worker.overdue and (overdue_s := self._overdue_s(worker)) is not None:
            delays.append(overdue_s)
        if head.options.walltime_s is not None and head.task_id not in worker.stops:
            delays.append(head.options.walltime_s)
        return worker.since + min(delays) if delays else math.inf

    @staticmethod
    def _overdue_s(worker: Worker) -> float | None:
        """After how long at its head job a worker is asked for those that it has not started; None: not at all."""
        if worker.delays_others:
            return _OVERDUE_S
        head = worker.jobs[0].call
        return _AHEAD_S if head is not None and head.is_ahead else None

    # -- what follows --------------------------------------------------------------------------------------------------

    def recalled(self, worker: Worker, revoked: int, kept: Kept, now: float) -> None:
        """Handle the answer to a recall: the last ``revoked`` tasks of a worker, not started yet, were revoked."""
        worker.recalling = False
        worker.syncing = worker.syncing or revoked > 0
        if revoked > len(worker.jobs):
            self.kill(worker, "the result of a task that it had not started")
        self._requeue(worker, revoked, kept, now)
        worker.overdue = worker.overdue and bool(worker.jobs)
        is_over = not worker.jobs and (kept == "none" or worker.tasks_left == 0)
        if is_over or any(job.order.task_id in worker.stops for job in worker.jobs):
            self.kill(worker)
        else:
            worker.stops.clear()

    def died(self, worker: Worker, event: WorkerDied, now: Instant, kept: Kept) -> None:
        """Handle the death of a worker, some of whose last tasks were revoked before."""
        # It may have sent an invalid message and ended at once: it is not there any more to be killed or recalled.
        self._actions[:] = [
            action
            for action in self._actions
            if not isinstance(action, Kill | Recall) or action.worker_id != worker.worker_id
        ]
        self._requeue(worker, event.revoked, kept, now.mono)
        stdout_tail, stderr_tail = event.stdout_tail, event.stderr_tail
        output = event.output if event.output is not None and event.output[1] else None
        age_s, details, used = now.mono - worker.since, None, None
        has_begun = worker.is_ready and bool(worker.jobs) and not self._ahead.waits(worker.jobs[0])
        if worker.drives:
            head = worker.jobs[0]
            output = self._nested.output(head, output)
            if head.owner is None:
                details, used = self._nested.details(head, age_s, now.mono), self._nested.used(head, age_s, now.mono)
            self.cancel_calls(worker, head, now.mono)
        self._ahead.forget(worker)
        for job in worker.jobs:
            self._queue.done(job.order.share_of)
            self._take_back_followers(job)
            task_id = job.order.task_id
            stop = worker.stops.get(task_id)
            is_head = job is worker.jobs[0]
            if job.owner is not None and is_head and has_begun:
                job.owner.sums.add(age_s)
                job.owner.ran(job, now.epoch - age_s, now.epoch, worker.pid)
            own_output = output if job.order.options.output_bytes else None
            if stop is not None:
                record = stop.record
                if stop.state is TaskState.FAILED:
                    record = dataclasses.replace(
                        record, stdout_tail=stdout_tail or None, stderr_tail=stderr_tail or None
                    )
                self._reports.finish(
                    job,
                    stop.state,
                    record.to_json(),
                    details=details if is_head else None,
                    is_retried=stop.is_retried,
                    output=own_output,
                )
            elif _is_kept(job, kept):
                died = Died(task_id, event.reason, stdout_tail, stderr_tail, *(own_output or ()))
                if used is not None and is_head:
                    died = msgspec.structs.replace(died, used=used)
                self._reports.died(job, died)
            # else: it stopped with the endpoint, and the agent knows which manager had it

    def _requeue(self, worker: Worker, count: int, kept: Kept, now: float) -> None:
        """Return the last jobs of a worker, which it did not start, to the head of the queue; cancelled ones finish."""
        for _ in range(min(count, len(worker.jobs))):  # a task can forge results of those behind it
            job, used = worker.jobs.pop(), None
            if worker.drives and not worker.jobs:  # and their calls
                used = self._nested.used(job, 0.0, now) if job.owner is None else Used()
                self.cancel_calls(worker, job, now)
            self._queue.done(job.order.share_of)
            worker.unread_bytes -= orders.unread_bytes(job)
            if worker.tasks_left is not None and not worker.is_leaving:
                worker.tasks_left += 1
            self._take_back_followers(job)
            stop = worker.stops.pop(job.order.task_id, None)
            if stop is not None and stop.state is TaskState.CANCELLED:
                self._reports.finish(job, TaskState.CANCELLED, outcomes.cancelled(running=False).to_json())
            elif used is not None and _is_kept(job, kept):  # what its calls have used counts for an attempt
                self._reports.died(job, Died(job.order.task_id, _CALLED_EARLY, used=used))
            elif _is_kept(job, kept):
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
                self.recall(each)


def _task_of(job: Job) -> str:
    """The task that a job belongs to; empty if another manager has it."""
    while isinstance(job.owner, RunningGraph | Driver):
        job = job.owner.job
    return job.order.task_id if job.owner is None else ""


def _is_kept(job: Job, kept: Kept) -> bool:
    return kept == "all" or (kept == "calls" and job.owner is not None)
