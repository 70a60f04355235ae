"""Retries of tasks whose function raised: which task is run again, and when. No I/O.

The end of such a run is known, unlike that of an attempt whose worker died: it is not counted in ``Task.starts``. The
task waits here, without a worker, until its back-off is over. Instants are epoch seconds.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from typing import Any

from farcall_common.backoff import Backoff
from farcall_common.graphs import STAGE_CALLS, STAGE_RUN_S
from farcall_common.retries import EARLIER_RUN_S, MAX_DELAY_S, error_name
from farcall_common.wire import TaskState
from farcall_endpoint.agent.core.tasks import Stage, Task, TaskResult
from farcall_endpoint.contracts.agent_manager import Finished, Used


class RetryQueue:
    """Tasks that wait for their retry.

    :param jitter: returns random numbers in [0, 1), which shorten each wait by up to a half, so that tasks that failed
        together do not run again together.
    """

    def __init__(self, *, jitter: Callable[[], float]) -> None:
        self._jitter = jitter
        self._waiting: dict[int, Task] = {}
        #: With entries of tasks that do not wait any more.
        self._due: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def take_up(self, task: Task, finished: Finished, now: float) -> None:
        """A run raised: count it, and let the task wait for the next one."""
        options = task.spec.options
        backoff = Backoff(first_s=options.retry_delay_s, most_s=MAX_DELAY_S, jitter=lambda: 1.0 - self._jitter() / 2.0)
        backoff.reset(failures=task.retries_used)
        task.retries_used += 1
        task.retry_at = now + backoff.next_s()
        used = used_of(finished.details)
        count_run(task, Used(_run_s(task, finished, now)) if used is None else used)
        task.starts -= 1
        task.starts_at_retry = task.starts
        self.add(task)

    def add(self, task: Task) -> None:
        """Let a task wait until its ``retry_at``."""
        task.stage, task.manager_id = Stage.RETRYING, None
        self._waiting[task.seq] = task
        heapq.heappush(self._due, (task.retry_at, task.seq))

    def discard(self, task: Task) -> None:
        """A task does not wait any more."""
        self._waiting.pop(task.seq, None)

    def next_deadline(self) -> float | None:
        """When :meth:`due` may have something next."""
        return self._due[0][0] if self._due else None

    def due(self, *, now: float) -> list[Task]:
        """Take out the tasks whose time has come, in this order."""
        tasks = []
        if self._due and self._due[0][0] > now + MAX_DELAY_S:  # the machine's clock was set back
            self._due = sorted((now + MAX_DELAY_S, seq) for _, seq in self._due)
        while self._due and self._due[0][0] <= now:
            task = self._waiting.pop(heapq.heappop(self._due)[1], None)
            if task is not None:
                tasks.append(task)
        return tasks

    def clear(self) -> list[Task]:
        """Take out all tasks."""
        tasks = list(self._waiting.values())
        self._waiting.clear()
        self._due.clear()
        return tasks


def may_retry(task: Task, manager_id: str) -> bool:
    """Whether a run that raised is followed by another one. A report of a manager that was given up is not about the
    run that counts. The stages of a graph are retried where it runs, and the whole graph only if it was too slow
    and each of them may run twice."""
    return (
        (task.graph is None or task.is_idempotent)
        and task.retries_used < task.spec.options.retries
        and task.stage is Stage.DISPATCHED
        and task.manager_id == manager_id
        and not task.cancelling
    )


def history_detail(task: Task, finished: Finished) -> dict[str, Any]:
    """Entry for a retry in the task's history. Of the user's text it has only the name of the exception's class, and
    not even that if the call was sealed."""
    error = finished.error or {}
    shown = "" if task.answer_key else error_name(str(error.get("exception_type") or error.get("code")))
    detail: dict[str, Any] = {
        "retry": task.retries_used,
        "retries": task.spec.options.retries,
        "retry_at": task.retry_at,
    }
    return detail | ({"error": shown} if shown else {})


def with_retries(task: Task, result: TaskResult) -> TaskResult:
    """The result of a task with earlier runs: what these have used, and how often it was retried."""
    details = {**(result.details or {}), EARLIER_RUN_S: round(task.earlier_run_s, 6)}
    if calls := task.earlier_calls:
        used = used_of(details)
        details[STAGE_CALLS] = calls + (0 if used is None else used.calls)
        task.earlier_calls = 0  # a result may be replaced by another one
    if task.retries_used:
        details["retries_used"] = task.retries_used
        if result.error is not None:
            result.error = {**result.error, "retries_used": task.retries_used}
    result.details = details
    return result


def count_run(task: Task, used: Used) -> None:
    """Count a run of a task that another one follows."""
    task.earlier_run_s += used.run_s
    task.earlier_calls += used.calls
    task.used = None


def used_of(details: Mapping[str, Any] | None) -> Used | None:
    """Return the use of a graph, or of a task with calls, by the details of its result; None for others. A task can
    forge details of its own, whose values are texts."""
    calls, run_s = ((details or {}).get(name) for name in (STAGE_CALLS, STAGE_RUN_S))
    if not isinstance(calls, int) or not isinstance(run_s, int | float):
        return None
    return Used(float(run_s), calls)


def with_used(result: TaskResult, used: Used | None) -> TaskResult:
    """Add the use of its task to a result that the manager has not made; None if it is not known."""
    if used is not None:
        result.details = {**(result.details or {}), STAGE_CALLS: used.calls, STAGE_RUN_S: used.run_s}
    return result


def _run_s(task: Task, finished: Finished, now: float) -> float:
    if finished.started_at is not None and finished.ended_at is not None:
        return max(0.0, finished.ended_at - finished.started_at)
    return max(0.0, now - task.at) if task.state is TaskState.RUNNING else 0.0  # it was stopped
