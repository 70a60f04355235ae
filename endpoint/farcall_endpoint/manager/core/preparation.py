"""Preparation of environments: for those that tasks wait for; those that no task needs are released."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final

from farcall_common.environments import Environment, renamed
from farcall_common.errors import ErrorRecord
from farcall_common.wire import TaskState
from farcall_endpoint.contracts import outcomes
from farcall_endpoint.contracts.agent_manager import EnvironmentStatus, Prewarm
from farcall_endpoint.manager.core.actions import Action, Prepare, Release
from farcall_endpoint.manager.core.environment_states import EnvironmentState, EnvironmentStates, State
from farcall_endpoint.manager.core.events import (
    EnvironmentFailed,
    EnvironmentGone,
    EnvironmentProgress,
    EnvironmentReady,
    Instant,
    Job,
)
from farcall_endpoint.manager.core.reports import Reports
from farcall_endpoint.manager.core.task_queue import TaskQueue
from farcall_endpoint.manager.core.workers import Worker

_MOST_AT_ONCE: Final = 8
"""Maximum number of concurrent preparations. Submitters may name any number of environments."""
_MOST_OF_OTHERS: Final = 6
"""Maximum number of concurrent preparations for submitters other than the owner."""
_MOST_OF_ONE: Final = 2
"""Maximum number of concurrent preparations for one payer: a registry that never answers blocks one until its limit."""

_FORGET_FAILED_S: Final = 3600.0
"""Seconds after which a failed environment that no task has named is forgotten, with its pause."""


class Preparations:
    """Preparations of environments. This class adds Prepare and Release to the actions of the core, queues the tasks of
    ready environments, and fails the tasks of failed ones. ``due_at``: when :meth:`check` has something to do.
    ``has_prewarmed``: whether any environment must have workers before its first task.

    :param default: the environment of tasks that name none.
    :param limit_s: time limit of a preparation in seconds.
    :param idle_s: seconds after which an environment without tasks and workers is released.
    :param most_prewarmed: maximum number of workers to keep warm of one environment.
    """

    def __init__(
        self,
        states: EnvironmentStates,
        *,
        queue: TaskQueue,
        workers: Mapping[int, Worker],
        reports: Reports,
        actions: list[Action],
        default: Environment | None,
        limit_s: float,
        idle_s: float,
        most_prewarmed: int,
    ) -> None:
        self._states = states
        self._queue = queue
        self._workers = workers
        self._reports = reports
        self._actions = actions
        self._limit_s = limit_s
        self._idle_s = idle_s
        self._most_prewarmed = most_prewarmed
        self._default = None if default is None else states.of(default)
        if self._default is not None:
            self._default.is_default = True
        self.due_at = 0.0
        self.has_prewarmed = False

    def add(self, environment: Environment | None, jobs: Sequence[Job], now: Instant, *, first: bool = False) -> None:
        """Let tasks wait for a worker in an environment (None: the default, which there is), or for the environment
        itself.

        :param first: before other tasks.
        """
        if environment is None:
            assert self._default is not None
            state = self._default
        else:
            state = self._states.of(environment)
        if (record := state.needed(now)) is not None:
            for job in jobs:
                self._reports.finish(job, TaskState.FAILED, _for_task(record, state, job).to_json())
        elif state.state is State.READY:
            self._queue.add(self._accepted(state, jobs, now), state.key, first=first)
        else:
            state.wait(jobs)
            if state.state is State.COLD:
                self._prepare(state, now)

    def handle(
        self,
        event: EnvironmentProgress | EnvironmentReady | EnvironmentFailed | EnvironmentGone | Prewarm,
        now: Instant,
    ) -> None:
        """Handle what happened to an environment, or what the agent wants of it."""
        self.due_at = 0.0
        if isinstance(event, Prewarm):
            if event.count or event.environment.key in self._states:
                self._prewarm(event, now)
        elif (state := self._states.get(event.key)) is not None:
            if isinstance(event, EnvironmentProgress):
                state.progress(event.text, now)
            elif isinstance(event, EnvironmentGone):
                if state.state is State.READY:
                    state.released(now)
                    state.wait(self._queue.remove_all(state.key))
                    self._prepare(state, now)
            elif isinstance(event, EnvironmentReady):
                state.ready(now, forkable=event.forkable, memory_bytes=event.memory_bytes)
                self._queue.add(state.waiting, state.key)
                state.waiting.clear()
            elif state.state is State.PREPARING:
                state.preparation_failed(event.record, now)
                self._fail_tasks(state)

    def worker_not_started(self, worker: Worker, words: str, log: str, now: Instant) -> None:
        """A worker in an environment died before it was ready, with these last words and this end of its log."""
        assert worker.environment is not None
        state, submitter = self._states.of(worker.environment), worker.pair.submitter
        has_workers = any(
            each.pair.key == state.key and each.is_ready and submitter in ("", each.pair.submitter)
            for each in self._workers.values()
        )
        record = state.worker_not_started(submitter, words, log, now, has_workers=has_workers, excess=worker.excess)
        if submitter and record is not None:
            self._fail_each(self._queue.remove_all(state.key, submitter), record, state)
        else:
            self._fail_tasks(state)

    def worker_ended(self, environment: Environment, now: Instant) -> None:
        """A worker of an environment is gone; it may have been the last."""
        self._states.of(environment).used_at = now.mono
        self.due_at = 0.0

    def check(self, now: Instant) -> None:
        """Prepare what is needed, give up what takes too long, and release what is not used any more."""
        due = [now.mono + self._idle_s]
        in_use = self._in_use()
        for state in list(self._states.values()):
            is_needed = bool(state.waiting) or (state.is_wanted and state.needed(now) is None)
            if is_needed and state.state is State.COLD:
                self._prepare(state, now)
            if state.due_at is not None and now.mono >= state.due_at:
                if state.prepares_again:
                    self._prepare(state, now)
                else:
                    words = f"its preparation has taken longer than {self._limit_s:g} s; at the end {state.text}"
                    state.preparation_failed(outcomes.environment_start_failed(state.environment.label, words), now)
                    self._fail_tasks(state)
            if _is_unused(state, in_use):
                if now.mono >= state.used_at + self._idle_s:
                    self._release(state, now)
                else:
                    due.append(state.used_at + self._idle_s)
            if state.state is State.FAILED and state.key not in in_use and not (state.waiting or state.is_wanted):
                if now.mono >= state.used_at + _FORGET_FAILED_S:
                    del self._states[state.key]
                else:
                    due.append(state.used_at + _FORGET_FAILED_S)
            due += [at for at in (state.due_at, state.retry_at if state.is_wanted else None) if at is not None]
        self.due_at = min(due)

    def release_unused(self, now: Instant) -> None:
        """Release what no worker and no task needs, without waiting for the end of the time for which it is kept."""
        in_use = self._in_use()
        for state in self._states.values():
            if _is_unused(state, in_use):
                self._release(state, now)

    def _in_use(self) -> set[str]:
        """The keys of environments with workers or tasks."""
        return {worker.pair.key for worker in self._workers.values()} | self._queue.keys()

    def _release(self, state: EnvironmentState, now: Instant) -> None:
        self._actions.append(Release(state.key))
        state.released(now)

    def problem(self) -> str:
        """Why tasks that name no environment cannot run, if they have one."""
        return "" if self._default is None or self._default.record is None else self._default.record.message

    def statuses(self) -> tuple[EnvironmentStatus, ...]:
        """The environments that are not cold, for the agent, with the workers that batch work has there."""
        by_key: dict[str, list[Worker]] = collections.defaultdict(list)
        for worker in self._workers.values():
            if not worker.pair.target:
                by_key[worker.pair.key].append(worker)
        known = [state for state in self._states.values() if state.state is not State.COLD or state.waiting]
        return tuple(state.status(by_key[state.key]) for state in known)

    def _prewarm(self, event: Prewarm, now: Instant) -> None:
        state = self._states.of(event.environment)
        state.prewarm = min(event.count, self._most_prewarmed)
        self.has_prewarmed = any(each.prewarm for each in self._states.values())
        if event.retry:
            state.try_now(now)
        if state.prewarm and state.needed(now) is None and state.state is State.COLD:
            self._prepare(state, now)

    def _prepare(self, state: EnvironmentState, now: Instant) -> None:
        """Prepare an environment, now or when fewer others are prepared."""
        if state.state is State.COLD and not self._has_room(state):
            state.postponed(now)
            return
        self._actions.append(Prepare(state.environment))
        state.preparing(now, limit_s=self._limit_s)
        self.due_at = 0.0

    def _has_room(self, state: EnvironmentState) -> bool:
        """Whether one more environment may be prepared. No payer can keep the owner, or all others, from it."""
        requesters = [each.requester for each in self._states.values() if each.state is State.PREPARING]
        if len(requesters) >= _MOST_AT_ONCE:
            return False
        others = list(filter(None, requesters))
        if state.is_wanted or "" in state.payers:
            state.requester = ""
            return True
        found = next((each for each in state.payers if others.count(each) < _MOST_OF_ONE), None)
        if found is None or len(others) >= _MOST_OF_OTHERS:
            return False
        state.requester = found
        return True

    def _accepted(self, state: EnvironmentState, jobs: Sequence[Job], now: Instant) -> Sequence[Job]:
        """Select the tasks for whose submitters workers may start; the others fail."""
        if not state.has_failed_starts:
            return jobs
        accepted: list[Job] = []
        for job in jobs:
            if (record := state.refusal_of(job.order.submitter, now)) is None:
                accepted.append(job)
            else:
                self._fail_each((job,), record, state)
        return accepted

    def _fail_tasks(self, state: EnvironmentState) -> None:
        """Fail the tasks that wait for an environment, if it has failed."""
        if state.state is State.FAILED and state.record is not None:
            self._fail_each((*state.waiting, *self._queue.remove_all(state.key)), state.record, state)
            state.waiting.clear()

    def _fail_each(self, jobs: Iterable[Job], record: ErrorRecord, state: EnvironmentState) -> None:
        for job in jobs:
            self._reports.finish(job, TaskState.FAILED, _for_task(record, state, job).to_json())


def _is_unused(state: EnvironmentState, in_use: Collection[str]) -> bool:
    """Whether an environment is prepared, and has no worker and no task, and need not be warm."""
    return state.state is State.READY and state.key not in in_use and not state.is_wanted


def _for_task(record: ErrorRecord, state: EnvironmentState, job: Job) -> ErrorRecord:
    """An error of an environment, with the name that the task has for it: others may have another one."""
    named = job.order.options.environment
    if named is None or named.name == state.environment.name:
        return record
    return dataclasses.replace(record, message=renamed(record.message, state.environment.label, named.label))
