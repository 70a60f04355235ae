"""Held tasks: every task of the spool, and each change of its state until the cloud has recorded its result. No I/O.

Instants are epoch seconds.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from farcall_common.errors import ErrorRecord
from farcall_common.wire import BlobGrant, BlobLocation, HeldTask, TaskRef, TaskState
from farcall_endpoint.agent.core.managers import TaskQueue
from farcall_endpoint.agent.core.reports import Transitions, UploadRetries
from farcall_endpoint.agent.core.retries import RetryQueue, count_run, history_detail, used_of, with_retries, with_used
from farcall_endpoint.agent.core.running_graphs import RunningGraphs
from farcall_endpoint.agent.core.tasks import Kept, ResultFactory, Stage, Task, TaskResult, attempt_of
from farcall_endpoint.agent.core.turn import Turn
from farcall_endpoint.contracts import outcomes
from farcall_endpoint.contracts.agent_manager import Died, Finished, Started, Used
from farcall_endpoint.contracts.output import Printed
from farcall_endpoint.files.plan import Staging, with_rows
from farcall_endpoint.host.shared_memory import Bytes

_KEEP_BYTES: Final = 16 * 1024
"""Payloads up to here stay in memory until they are sent to a manager; larger ones are read from the spool again."""

_SHARED_LOSSES: Final = 5
"""Managers with which a task may be lost, together with tasks of others, before that counts: it may be the cause."""


class HeldTasks:
    """The tasks that an agent has, from acceptance until the cloud has recorded their results. What has changed is
    noted in ``turn``.

    :param queue: those that wait for a manager.
    :param graphs: the graphs among them.
    :param results: makes their results.
    :param has_cloud: False if nothing is written to a spool, and a result is final once it is reported.
    :param seal: returns the result of a task as it leaves the endpoint.
    :param jitter: returns random numbers in [0, 1), for the waits before retries.
    :param staging: moves the files of tasks.
    """

    def __init__(
        self,
        *,
        queue: TaskQueue,
        graphs: RunningGraphs,
        results: ResultFactory,
        has_cloud: bool,
        seal: Callable[[Task, TaskResult], TaskResult],
        jitter: Callable[[], float],
        staging: Staging,
    ) -> None:
        self._queue = queue
        self._graphs = graphs
        self._results = results
        self._has_cloud = has_cloud
        self._seal = seal
        self._staging = staging
        self._transitions = Transitions(is_enabled=has_cloud)
        self._uploads = UploadRetries()
        self._retries = RetryQueue(jitter=jitter)
        #: All of them, by id; changed here only.
        self.by_id: dict[str, Task] = {}
        self._with_result = 0
        #: Results since the start, of any state.
        self.finished_tasks = 0
        #: The numbers of the next tasks.
        self.seqs = itertools.count(1)
        self.is_connected = not has_cloud
        #: Tasks of a former process that may not run twice: they wait until the cloud has seen that the spool is no old
        #: copy, in which they may have started since.
        self._unconfirmed: list[Task] = []
        #: The present turn.
        self.turn = Turn()
        #: The last turn, while the spool does not have it.
        self._unwritten: Turn | None = None

    # -- what there is -------------------------------------------------------------------------------------------------

    @property
    def unfinished(self) -> int:
        """How many have no result."""
        return len(self.by_id) - self._with_result

    @property
    def aside(self) -> int:
        """How many wait for a retry, or for files to move: they need no worker meanwhile."""
        return len(self._retries) + len(self._staging)

    def find(self, task_id: str, seq: int) -> Task | None:
        """A task that the spool holds under this number."""
        task = self.by_id.get(task_id)
        return task if task is not None and task.seq == seq else None

    def running_at(self, manager_id: str, task_id: str) -> Task | None:
        """A task that a manager has; None if it does not."""
        task = self.by_id.get(task_id)
        is_there = task is not None and task.stage is Stage.DISPATCHED and task.manager_id == manager_id
        return task if is_there else None

    def for_hello(self) -> tuple[HeldTask, ...]:
        """Every task of the spool."""
        unwritten = {task.seq for task in self.turn.finished}
        return tuple(
            HeldTask(
                task_id=task.task_id,
                attempt=task.attempt,
                finished=task.result is not None and task.seq not in unwritten,
            )
            for task in self.by_id.values()
        )

    # -- turns ---------------------------------------------------------------------------------------------------------

    def next_deadline(self) -> float | None:
        """When a retry, an upload or a report may be due next."""
        deadline = None
        for part in (self._transitions, self._uploads, self._retries):
            if (at := part.next_deadline()) is not None and (deadline is None or at < deadline):
                deadline = at
        return deadline

    def end_turn(self, *, now: float) -> Turn:
        """The turn, with the reports that are due; another one begins."""
        turn = self.turn
        turn.transitions += self._transitions.due(now=now, connected=self.is_connected)
        for task in self._uploads.due(now=now):
            if self.is_connected and task.result is not None and task.result.needs_upload:
                turn.upload_requests.append(task)
        if turn.forgotten:  # reports of these in the same turn are obsolete
            turn.results = [task for task in turn.results if task.task_id in self.by_id]
            turn.upload_requests = [task for task in turn.upload_requests if task.task_id in self.by_id]
            turn.uploads = [(task, grant) for task, grant in turn.uploads if task.task_id in self.by_id]
        if not self._has_cloud:
            for task in turn.results:
                del self.by_id[task.task_id]
            self._with_result -= len(turn.results)
        self.turn = Turn()
        return turn

    def writing(self, turn: Turn) -> None:
        """The spool is to have a turn; :meth:`written` or :meth:`take_back` follows."""
        self._unwritten = turn

    def written(self) -> None:
        """The spool has the last turn: what can be read from there leaves the memory."""
        turn, self._unwritten = self._unwritten, None
        if turn is None:
            return
        for task in itertools.chain(turn.accepted, turn.fetched):
            if task.payload is not None and len(task.payload) > _KEEP_BYTES:
                task.payload = None
        for tasks in turn.orders.values():
            for task in tasks:
                task.payload = None
        for task in turn.finished:
            if task.result is not None:
                task.result.body = None
        for task in turn.storing:
            if task.kept is not None:
                task.kept.body = None

    def take_back(self) -> tuple[Sequence[Task], int]:
        """The spool could not take the last turn, which continues without its orders and its credit: the tasks that
        were to start, and the credit."""
        turn, self._unwritten = self._unwritten, None
        if turn is None:
            return (), 0
        placed = sum(map(len, turn.orders.values()))
        again = turn.starts[len(turn.starts) - placed :]  # placing comes last in a turn
        del turn.starts[len(turn.starts) - placed :]
        turn.orders.clear()
        for task in again:
            task.starts -= 1
        credit, turn.credit = turn.credit, 0
        self.turn = turn
        return again, credit

    # -- from the spool and the cloud ----------------------------------------------------------------------------------

    def restore(self, task: Task, refused: ErrorRecord | None, now: float) -> bool:
        """Continue with a task of the spool.

        :param refused: why it cannot run any more, as the configuration has changed.
        :return: whether it may have been running, so that :meth:`reconsider` decides about it.
        """
        former = self.by_id.get(task.task_id)
        if former is not None and former.result is not None:
            self._with_result -= 1  # recorded and delivered again before the spool forgot it
            self.turn.forgotten.append(former.seq)
        self.by_id[task.task_id] = task
        if task.result is not None:
            self._with_result += 1
        elif task.kept is not None:
            self._stage_out(task, now)
        elif refused is not None:
            self.fail(task, refused)
        elif task.starts and not task.waits_for_retry:
            return True
        elif not task.is_idempotent or (task.spec.options.callees and task.stage is Stage.FETCHING):
            self._unconfirmed.append(task)  # of a graph that is not here it is not known
        elif task.stage is Stage.FETCHING:
            self.turn.fetches.append(task)
        elif task.waits_for_retry:
            self._retries.add(task)
        elif not self._stage_in(task, now):
            self._queue.add(task)
        return False

    def number_after(self, seq: int) -> None:
        """The next task that comes gets the number after this one."""
        self.seqs = itertools.count(seq + 1)

    def session_opened(self, forget: Iterable[TaskRef], now: float) -> None:
        """Report all results again, apart from those that the cloud does not need."""
        self.forget(forget)
        self.is_connected = True
        unconfirmed, self._unconfirmed = self._unconfirmed, []
        for task in unconfirmed:
            if task.stage is Stage.QUEUED and task.waits_for_retry:
                self._retries.add(task)
        waiting = [task for task in unconfirmed if task.stage is Stage.QUEUED]
        self._queue.put_back([task for task in waiting if not self._stage_in(task, now)])
        self.turn.fetches += [task for task in unconfirmed if task.stage is Stage.FETCHING]
        for task in self.by_id.values():
            if task.result is not None:
                self._report_result(task)
            elif task.retries_used and task.reported is not task.state:  # a retry is reported late, and may be over
                self._transitions.enter(task, task.state, task.at)

    def session_closed(self) -> None:
        """Continue without a session, except for tasks that were never acknowledged in it."""
        self.is_connected = False
        turn = self.turn
        unwritten = {task.seq for task in turn.accepted}
        for task in turn.accepted:  # the cloud still has them, and delivers them again
            if self.by_id.pop(task.task_id, None) is None:
                continue  # recorded meanwhile
            self._graphs.ended(task)
            self._with_result -= task.result is not None
            task.stage = Stage.FORGOTTEN
            self._end_files(task)
            if task.environment_key:
                self._queue.left(task)
        turn.accepted.clear()
        turn.finished = [task for task in turn.finished if task.seq not in unwritten]
        turn.storing = [task for task in turn.storing if task.seq not in unwritten]
        turn.fetches = [task for task in turn.fetches if task.seq not in unwritten]
        for reports in (turn.acknowledged, turn.transitions, turn.results, turn.upload_requests):
            reports.clear()  # the next Hello names all tasks

    def accept(self, task: Task, refused: ErrorRecord | None, now: float) -> None:
        """Hold a task that has come; with a reason to refuse it, it has failed."""
        turn = self.turn
        self.by_id[task.task_id] = task
        turn.accepted.append(task)
        turn.acknowledged.append(task)
        if refused is not None:
            self.fail(task, refused)
            return
        if task.stage is not Stage.QUEUED:
            turn.fetches.append(task)
        elif task.files is None or not self._stage_in(task, now):
            self._queue.add(task)
        self._transitions.monitor(task, now)

    def fetched(self, task: Task, refused: ErrorRecord | None, now: float) -> None:
        """A task has its payload; with a reason to refuse it, it has failed."""
        if refused is not None:
            self.fail(task, refused)
            return
        task.stage = Stage.QUEUED
        self.turn.fetched.append(task)
        if not self._stage_in(task, now):
            self._queue.add(task)

    def redelivered(self, task: Task, attempt: int) -> None:
        """A task that is here already gets its new attempt number, and is not started again."""
        task.attempt = max(task.attempt, attempt)
        self.turn.redelivered.append(task)
        self.turn.acknowledged.append(task)
        if task.result is not None:
            self._report_result(task)

    def cancel(self, task_ids: Iterable[str]) -> None:
        """Stop tasks, running or not; a finished task keeps its result."""
        for task_id in task_ids:
            task = self.by_id.get(task_id)
            if task is None or task.result is not None:
                continue
            if task.stage is Stage.DISPATCHED and task.manager_id is not None:
                task.cancelling = True
                self.turn.cancels.setdefault(task.manager_id, []).append(task_id)
            elif task.stage is Stage.RETRYING:
                self._retries.discard(task)
                self.finish(task, self._results.cancelled_before_retry())
            elif task.stage is Stage.STAGING_OUT:
                result = self._results.cancelled_while_storing()
                self.finish(task, with_used(result, _used_before(task.kept)))
            else:
                self.finish(task, self._results.cancelled(running=False))

    def forget(self, refs: Iterable[TaskRef]) -> None:
        """The cloud has results of these tasks, or does not need them: stop those that still run."""
        for ref in refs:
            task = self.by_id.pop(ref.task_id, None)
            if task is None:
                continue
            if task.result is not None:
                self._with_result -= 1
                self.turn.forgotten.append(task.seq)
            else:
                self.turn.dropped.append(task.seq)
                if task.retries_used or task.earlier_run_s:
                    self._retries.discard(task)
                    self.turn.retried.append(task)
                if task.stage is Stage.DISPATCHED and task.manager_id is not None:
                    self.turn.cancels.setdefault(task.manager_id, []).append(task.task_id)
            task.stage = Stage.FORGOTTEN
            self._end_files(task)
            if self._graphs.tasks:
                self._graphs.ended(task)
            if task.environment_key:
                self._queue.left(task)

    # -- files ---------------------------------------------------------------------------------------------------------

    def _stage_in(self, task: Task, now: float, *, is_again: bool = False) -> bool:
        """Let the files of a task move to the endpoint; False if it has none that are not there."""
        if task.files is None or not (task.files.reads or task.files.writes):
            return False
        if task.is_staged:
            self._staging.waits(task.task_id, now)
            return False
        task.stage = Stage.STAGING
        spec, is_sealed = task.spec, bool(task.answer_key)
        self._staging.stage_in(
            task.task_id,
            spec.submitter,
            task.files,
            is_sealed=is_sealed,
            now=now,
            payer=spec.payer,
            is_again=is_again,
        )
        return True

    def unstaged(self, task_id: str, now: float) -> None:
        """The files that a task reads are not on the endpoint any more: they are staged again before it runs."""
        task = self.by_id.get(task_id)
        if task is None or not task.is_staged:
            return
        task.is_staged, task.file_rows, task.node_files, task.contents = False, (), (), ()
        if task.stage is Stage.QUEUED:
            self._queue.take_out(task)
            self._stage_in(task, now, is_again=True)

    def staged(self, task: Task, rows: Sequence[dict[str, Any]], *, no_nodes: str) -> None:
        """The files that a task reads are on the endpoint.

        :param no_nodes: why no manager can be had; empty if one can.
        """
        task.is_staged, task.file_rows = True, rows
        task.stage = Stage.QUEUED
        if no_nodes:
            self.fail(task, outcomes.nodes_unavailable(no_nodes))
        else:
            self._queue.add(task)

    def ran(self, task: Task, result: TaskResult, now: float) -> None:
        """A task with files has run. If it succeeded, those that it has written are stored before that is reported."""
        if task.files is None or not task.files.writes or result.state is not TaskState.SUCCESS:
            self.finish(task, result)
        elif task.cancelling:
            self.finish(task, with_used(self._results.cancelled(running=True), _used_before(result)))
        else:
            task.kept, task.stage = self._complete(task, result), Stage.STAGING_OUT
            task.payload, task.manager_id = None, None
            self.turn.storing.append(task)
            self._stage_out(task, now)

    def _stage_out(self, task: Task, now: float) -> None:
        assert task.files is not None
        spec, is_sealed = task.spec, bool(task.answer_key)
        self._staging.stage_out(
            task.task_id, spec.submitter, task.files, is_sealed=is_sealed, now=now, payer=spec.payer
        )

    def stored(self, task: Task, rows: Sequence[dict[str, Any]]) -> None:
        """The files that a task has written are stored."""
        result = task.kept
        assert result is not None
        if not task.answer_key:  # what is sealed stays as it is
            result.details = with_rows(result.details, rows)
        self.finish(task, result)

    def not_stored(self, task: Task, record: ErrorRecord) -> None:
        """A file that a task has written cannot be stored: the task fails."""
        kept = task.kept
        assert kept is not None
        result = self._results.failed(task, record, started_at=kept.started_at, ended_at=kept.ended_at)
        self.finish(task, with_used(result, _used_before(kept)))

    def _end_files(self, task: Task) -> None:
        if task.files is not None:
            self._staging.end(task.task_id)
            task.kept = None

    # -- runs ----------------------------------------------------------------------------------------------------------

    def dispatch(self, placed: Iterable[tuple[Task, str]], now: float) -> None:
        """Each task goes to a manager."""
        turn = self.turn
        for task, manager_id in placed:
            task.stage, task.manager_id = Stage.DISPATCHED, manager_id
            task.starts += 1
            if task.is_staged:
                self._staging.started(task.task_id)
            turn.starts.append(task)
            turn.orders.setdefault(manager_id, []).append(task)
            self._transitions.enter(task, TaskState.WAITING_FOR_LAUNCH, now)

    def started(self, starts: Iterable[Started]) -> None:
        """Tasks have begun to run."""
        for started in starts:
            task = self.by_id.get(started.task_id)
            if task is not None and task.stage is Stage.DISPATCHED:
                self._transitions.enter(task, TaskState.RUNNING, started.at)

    def keep_output(self, task: Task, printed: Printed, tails: Bytes | None) -> None:
        """Keep what the attempt that has ended printed."""
        if self._has_cloud:
            kept = Kept(task.task_id, attempt_of(task), printed, bytes(tails or b""), task.answer_key)
            self.turn.outputs.append(kept)

    def retry(self, task: Task, finished: Finished, now: float) -> None:
        """The function raised, and its task runs again after a while."""
        self._retries.take_up(task, finished, now)
        if task.is_staged:
            self._staging.waits(task.task_id, now)
        if self._graphs.tasks:
            self._graphs.stopped(task)
        self.turn.starts.append(task)
        self.turn.retried.append(task)
        self._transitions.retry(task, history_detail(task, finished), now)

    def end_backoffs(self, *, no_nodes: str, now: float) -> bool:
        """Tasks whose back-off is over are next, as their turn had come before.

        :param no_nodes: why no manager can be had; empty if one can.
        :return: whether there are any.
        """
        tasks = self._retries.due(now=now)
        if not tasks:
            return False
        for task in tasks:
            task.stage = Stage.QUEUED
            if no_nodes:
                self.fail(task, outcomes.nodes_unavailable(no_nodes))
        waiting = [task for task in tasks if task.stage is Stage.QUEUED]
        self._queue.put_back([task for task in waiting if not self._stage_in(task, now)])
        return True

    def died(self, task: Task, died: Died, now: float) -> None:
        """The worker of a task died."""
        if died.printed is not None:
            self.keep_output(task, died.printed, died.output)
        if task.cancelling:
            self.finish(task, with_used(self._results.cancelled(running=True), died.used))
        elif task.may_start_again:
            task.deaths += (died.reason,)
            self._count_run(task, died.used)
            self.requeue([task], now)
        else:
            tails = {"stdout_tail": died.stdout_tail, "stderr_tail": died.stderr_tail}
            self.finish(task, with_used(self._results.given_up(task, died.reason, **tails), died.used))

    def _count_run(self, task: Task, used: Used | None) -> None:
        """Count the last run of a task that runs again, if its use is known."""
        if used is not None:
            count_run(task, used)
            self.turn.retried.append(task)

    def reconsider(
        self, tasks: Sequence[Task], suspects: int, reason: str, now: float, *, unstarted: bool = False
    ) -> None:
        """Decide about tasks, in the order of their dispatch, whose manager is gone.

        Managers run in order, so only the first few of them, as many as it had slots, can have been running; the start
        of the others does not count. If those belong to several submitters, perhaps only one of them is the cause:
        the start of each does not count either, a few times. But if it was about to end the workers of some tasks,
        those are the cause, and only their starts count. Tasks that may not run twice are never sent ahead: each
        may have been running, unless it is known that all were ``unstarted``.
        """
        again = []
        is_shared = len({task.share_of for task in tasks[:suspects]}) > 1
        causes = [task for task in tasks if task.is_ending] if suspects else []
        for index, task in enumerate(tasks):
            used = None if task.used is None else task.used.after(now - task.used_at)
            if task.cancelling:
                self.finish(task, with_used(self._results.cancelled(running=True), used))
            elif not (task.is_idempotent or unstarted):
                self.finish(task, with_used(self._results.lost(task, reason), used))
            elif task not in causes and (
                causes or index >= suspects or (is_shared and task.losses_shared < _SHARED_LOSSES)
            ):
                task.losses_shared += index < suspects and not causes
                task.starts -= 1
                self.turn.starts.append(task)
                self._count_run(task, used)
                again.append(task)
            elif task.may_start_again:
                task.deaths += (reason,)
                self._count_run(task, used)
                again.append(task)
            else:
                self.finish(task, with_used(self._results.given_up(task, reason), used))
        self.requeue(again, now)

    def returned(self, tasks: Iterable[Task], now: float) -> None:
        """Managers have given back tasks that have not begun."""
        again = []
        for task in tasks:
            if task.cancelling:
                self.finish(task, self._results.cancelled(running=False))
            else:
                task.starts -= 1
                self.turn.starts.append(task)
                again.append(task)
        self.requeue(again, now)

    def requeue(self, tasks: Sequence[Task], now: float) -> None:
        """Tasks that managers had wait again, before the others."""
        for task in tasks:
            task.stage, task.manager_id, task.is_ending = Stage.QUEUED, None, False
            if self._graphs.tasks:
                self._graphs.stopped(task)
            self._transitions.enter(task, TaskState.WAITING_FOR_NODES, now)
        self._queue.put_back([task for task in tasks if not self._stage_in(task, now)])

    # -- results -------------------------------------------------------------------------------------------------------

    def finish(self, task: Task, result: TaskResult) -> None:
        """A task has its result."""
        if result is not task.kept:
            result = self._complete(task, result)
        task.result, task.stage = result, Stage.FINISHED
        task.payload, task.manager_id = None, None
        if task.files is not None:
            self._end_files(task)
        self._with_result += 1
        self.finished_tasks += 1
        self.turn.finished.append(task)
        self._report_result(task)

    def _complete(self, task: Task, result: TaskResult) -> TaskResult:
        """The result of a task that runs no more, as it leaves the endpoint."""
        if task.environment_key and task.stage is not Stage.DISPATCHED:
            self._queue.left(task)
        if self._graphs.tasks:
            result = self._graphs.with_progress(task, result)
            self._graphs.ended(task)
        if task.retries_used or task.earlier_run_s:
            result = with_retries(task, result)
            self.turn.retried.append(task)
        if task.file_rows:
            result.details = with_rows(result.details, task.file_rows)
        return self._seal(task, result)

    def fail(self, task: Task, record: ErrorRecord) -> None:
        """A task fails for a reason of the endpoint."""
        self.finish(task, self._results.failed(task, record))

    def fail_waiting(self, record: ErrorRecord) -> None:
        """All tasks fail that wait for a manager, or for a retry."""
        for task in [*self._queue.clear(), *self._retries.clear()]:
            self.fail(task, record)

    def upload_granted(self, grant: BlobGrant, now: float) -> None:
        """The cloud answers the request to upload a result."""
        task = self.by_id.get(grant.task_id)
        if task is None or task.result is None or not task.result.needs_upload or grant.attempt != task.attempt:
            return
        if grant.error is None:
            self.turn.uploads.append((task, grant))
        else:
            record = ErrorRecord.from_json(grant.error)
            self.upload_failed(task, record.message, retryable=record.retryable, now=now)

    def uploaded(self, task: Task, location: BlobLocation) -> None:
        """The result of a task is in the blob store."""
        if task.result is not None:
            task.result.blob = location
            self._report_result(task)

    def upload_failed(self, task: Task, reason: str, *, retryable: bool, now: float) -> None:
        """After some retries the task fails."""
        result = task.result
        if result is None or not result.needs_upload or (retryable and self._uploads.add(task, now=now)):
            return
        record = outcomes.result_not_uploaded(reason, size_bytes=result.size_bytes)
        self._with_result -= 1
        failed = self._results.failed(task, record, started_at=result.started_at, ended_at=result.ended_at)
        self.finish(task, with_used(failed, _used_before(result)))

    def _report_result(self, task: Task) -> None:
        if not self.is_connected or task.result is None:
            return
        if task.result.needs_upload:
            self.turn.upload_requests.append(task)
        else:
            self.turn.results.append(task)


def _used_before(result: TaskResult | None) -> Used | None:
    """Return the use of a task by the details of a result that another one replaces."""
    return None if result is None else used_of(result.details)
