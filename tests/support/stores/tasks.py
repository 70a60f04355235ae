"""Fake tasks, in memory."""

from __future__ import annotations

import collections
import dataclasses
import datetime as dt
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Literal

import msgspec

from farcall_common.errors import Conflict, EndpointUnknown
from farcall_common.store import transitions
from farcall_common.store.model import (
    AuditEntry,
    Endpoint,
    Function,
    OpenTask,
    Task,
    TaskEvent,
    TaskGroup,
    TaskResult,
)
from farcall_common.task_options import TaskOptions
from farcall_common.wire.states import Reporter, TaskState
from tests.support.stores.reach import moment
from tests.support.stores.shares import FakeShares
from tests.support.stores.usage import FakeUsage


class FakeTasks(FakeShares, FakeUsage):
    """:class:`~farcall_common.store.ports.Tasks` in memory; a part of FakeDatabase."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        super().__init__(clock)
        self._tasks: dict[str, Task] = {}
        self._dead_letters: set[str] = set()
        self._events: list[TaskEvent] = []
        #: The transaction that added each task, and the newest one.
        self._added_in: dict[str, int] = {}
        self._transaction = 0

    def add_tasks(
        self,
        tasks: Sequence[Task],
        *,
        memoized: Mapping[str, Task] | None = None,
        audit: AuditEntry | None = None,
        endpoint_id: str | None = None,
    ) -> Mapping[str, Task]:
        if any((task.payload is None) == (task.payload_ref is None) for task in tasks):
            raise Conflict("a task has either a payload or a reference to one")
        with self._call():
            known = {}
            is_new = any(task.task_id not in self._tasks for task in tasks)
            if is_new and endpoint_id is not None and endpoint_id not in self._endpoints:
                raise EndpointUnknown(f"there is no endpoint {endpoint_id}")
            self._transaction += 1
            for task in tasks:
                if task.task_id in self._tasks:
                    known[task.task_id] = self._tasks[task.task_id]
                    continue
                new = transitions.as_received(task, memoized, now=dt.datetime.now(dt.UTC))
                self._tasks[task.task_id] = new
                self._added_in[task.task_id] = self._transaction
                self._events.append(TaskEvent(task.task_id, TaskState.RECEIVED, Reporter.API, moment(new.submitted_at)))
                if new.finished_at is not None:
                    self._events.append(TaskEvent(task.task_id, new.state, Reporter.API, new.finished_at))
            if audit is not None and (added := len({task.task_id for task in tasks} - known.keys())):
                self.add_entries([dataclasses.replace(audit, detail={**audit.detail, "tasks": added})])
            return known

    def read_for_submit(
        self, endpoint_id: str, references: Sequence[str], task_ids: Sequence[str]
    ) -> tuple[Endpoint | None, Mapping[str, Function], Mapping[str, Task]]:
        functions = dict(self.get_functions([each for each in references if "@" not in each], with_bodies=False))
        for reference in references:
            function_id, at, version = reference.partition("@")
            if at and (found := self.get_version(function_id, int(version), with_body=False)):
                functions[reference] = found
        return self.get_endpoint(endpoint_id), functions, self.get_tasks(task_ids)

    def find_memoized(self, owner_id: str, memo_keys: Sequence[str]) -> Mapping[str, Task]:
        with self._call():
            found = (
                task
                for task in self._tasks.values()
                if task.owner_id == owner_id and task.memo_key in memo_keys and task.state is TaskState.SUCCESS
            )
            newest = sorted(found, key=lambda task: moment(task.finished_at))
        return {task.memo_key: task for task in newest if task.memo_key is not None}

    def get_tasks(
        self, task_ids: Sequence[str], *, with_bodies: bool = True, for_answers: bool = False
    ) -> Mapping[str, Task]:
        with self._call():
            found = (self._tasks[task_id] for task_id in task_ids if task_id in self._tasks)
            if for_answers:
                return {task.task_id: _shown(task) for task in found}
            return {task.task_id: task if with_bodies else _light(task) for task in found}

    def list_tasks(
        self,
        owner_id: str | None = None,
        *,
        endpoint_id: str | None = None,
        state: TaskState | None = None,
        since: dt.datetime | None = None,
        until: dt.datetime | None = None,
        before: tuple[dt.datetime, str] | None = None,
        limit: int = 100,
    ) -> Sequence[Task]:
        with self._call():
            found = [
                task
                for task in self._tasks.values()
                if owner_id in (None, task.owner_id)
                and endpoint_id in (None, task.endpoint_id)
                and state in (None, task.state)
                and (state is not TaskState.DEAD_LETTERED or task.task_id in self._dead_letters)
                and (since is None or moment(task.submitted_at) >= since)
                and (until is None or moment(task.submitted_at) < until)
                and (before is None or _by_submission(task) < before)
            ]
        newest = sorted(found, key=_by_submission, reverse=True)[:limit]
        return [msgspec.structs.replace(_light(task), options=TaskOptions(), details={}) for task in newest]

    def find_ids(
        self, kind: Literal["task", "group"], beginning: str, *, owner_ids: Collection[str], limit: int = 20
    ) -> tuple[Sequence[str], bool]:
        with self._call():
            own = [task for task in self._tasks.values() if task.owner_id in owner_ids]
            found = {task.task_id if kind == "task" else task.task_group_id for task in own}
            return sorted((each for each in found if each.startswith(beginning)), reverse=True)[:limit], True

    def names_of(self, ids: Collection[str]) -> Mapping[str, str]:
        with self._call():
            functions = {each.function_id: each.name for each in self.get_functions(list(ids)).values()}
            endpoints = {id_: each.name for id_, each in self._endpoints.items() if id_ in ids}
            return functions | endpoints

    def discard_tasks(self, task_ids: Sequence[str]) -> Sequence[str]:
        with self._call():
            discarded = sorted(self._dead_letters & set(task_ids))
            self._dead_letters -= set(discarded)
            for task_id in discarded:
                self._tasks[task_id] = msgspec.structs.replace(self._tasks[task_id], payload=None, payload_ref=None)
            return discarded

    def get_group(
        self, task_group_id: str, *, owner_ids: Collection[str] | None = None, limit: int | None = None
    ) -> Sequence[Task]:
        with self._call():
            found = [
                task
                for task in self._tasks.values()
                if task.task_group_id == task_group_id and (owner_ids is None or task.owner_id in owner_ids)
            ]
        by_submission = sorted(found, key=_by_submission)[:limit]
        return [_short(task) for task in by_submission]

    def list_groups(self, owner_id: str, *, before: str | None = None, limit: int = 100) -> Sequence[TaskGroup]:
        with self._call():
            tasks = [task for task in self._tasks.values() if task.owner_id == owner_id]
        members: dict[str, list[Task]] = {}
        for task in tasks:
            members.setdefault(task.task_group_id, []).append(task)
        groups = [
            TaskGroup(id_, min(moment(task.submitted_at) for task in each), collections.Counter(t.state for t in each))
            for id_, each in members.items()
        ]
        groups.sort(key=lambda group: (group.created_at, group.task_group_id), reverse=True)
        if before is not None:
            ids = [group.task_group_id for group in groups]
            groups = groups[ids.index(before) + 1 :] if before in ids else []
        return groups[:limit]

    def list_open_tasks(self, endpoint_id: str, *, after: str = "", limit: int = 1000) -> Sequence[Task]:
        with self._call():
            found = (t for t in self._tasks.values() if t.endpoint_id == endpoint_id and not t.state.is_terminal)
            return sorted((t for t in found if t.task_id > after), key=lambda t: t.task_id)[:limit]

    def find_open_tasks(
        self,
        *,
        endpoint_id: str | None = None,
        function_id: str | None = None,
        owner_id: str | None = None,
        after: str = "",
        limit: int = 1000,
        with_options: bool = False,
    ) -> Sequence[Task]:
        with self._call():
            found = (
                msgspec.structs.replace(_short(task), options=task.options) if with_options else _short(task)
                for task in self._tasks.values()
                if not task.state.is_terminal
                and task.task_id > after
                and endpoint_id in (None, task.endpoint_id)
                and function_id in (None, task.function_id, *(each.function_id for each in task.options.callees))
                and owner_id in (None, task.owner_id)
            )
            return sorted(found, key=lambda task: task.task_id)[:limit]

    def list_open_ids_of(self, endpoint_id: str, *, limit: int) -> Sequence[str]:
        return [task.task_id for task in self.list_open_tasks(endpoint_id, limit=limit)]

    def find_busy_endpoints(self, endpoint_ids: Sequence[str]) -> frozenset[str]:
        return frozenset(endpoint_id for endpoint_id in endpoint_ids if self.list_open_tasks(endpoint_id, limit=1))

    def list_endpoints_with_open_tasks(self) -> Sequence[str]:
        with self._call():
            return sorted({task.endpoint_id for task in self._tasks.values() if not task.state.is_terminal})

    def list_open_ids(self, *, after: tuple[int, str] = (0, ""), limit: int = 1000) -> Sequence[OpenTask]:
        with self._call():
            found = sorted(
                (self._added_in[task_id], task_id) for task_id, t in self._tasks.items() if not t.state.is_terminal
            )
            tasks = [(number, self._tasks[task_id]) for number, task_id in found if (number, task_id) > after]
        return [
            OpenTask(task.task_id, task.endpoint_id, number, task.state, task.attempt, moment(task.submitted_at))
            for number, task in tasks[:limit]
        ]

    def first_unfinished_transaction(self) -> int:
        with self._call():
            return self._transaction + 1

    def record_transitions(self, events: Sequence[TaskEvent]) -> Sequence[str]:
        transitions.check_transitions(events)
        with self._call():
            before = self._progress([event.task_id for event in events])
            known = (event for event in self._events if event.reporter is Reporter.AGENT)
            reported = collections.Counter((event.task_id, event.attempt) for event in known)
            events = transitions.within_limit(events, reported)
            after = transitions.apply_events(before, events)
            for task_id, now in after.items():
                task = self._tasks[task_id]
                self._tasks[task_id] = msgspec.structs.replace(task, state=now.state, attempt=now.attempt)
            self._events += [event for event in events if event.task_id in before]
            return [task_id for task_id, now in after.items() if now.attempt > before[task_id].attempt]

    def record_results(self, results: Sequence[TaskResult], *, at: dt.datetime) -> Mapping[str, TaskResult]:
        transitions.check_results(results)
        with self._call():
            first = transitions.first_results(self._progress([result.task_id for result in results]), results)
            for task_id, result in first.items():
                self._tasks[task_id] = _as_ended(self._tasks[task_id], result, at)
                self._events.append(transitions.result_event(result, at=at))
                if result.state is TaskState.DEAD_LETTERED:
                    self._dead_letters.add(task_id)
            running = {event.task_id: event.at for event in self._events if event.state is TaskState.RUNNING}
            self._count([self._tasks[task_id] for task_id in first], running)
            return first

    def purge_tasks(self, *, ended_before: dt.datetime, limit: int) -> int:
        with self._call():
            ended = [t for t in self._tasks.values() if t.finished_at is not None and t.finished_at < ended_before]
            gone = {task.task_id for task in sorted(ended, key=lambda task: moment(task.finished_at))[:limit]}
            self._tasks = {task_id: task for task_id, task in self._tasks.items() if task_id not in gone}
            self._events = [event for event in self._events if event.task_id not in gone]
            self._dead_letters -= gone
            return len(gone)

    def list_events(self, task_id: str, *, after: int = 0, limit: int | None = None) -> Sequence[TaskEvent]:
        with self._call():
            events = [event for event in self._events if event.task_id == task_id]
            return events[after:][:limit]

    def _progress(self, task_ids: Sequence[str]) -> dict[str, transitions.TaskProgress]:
        return {
            task_id: transitions.TaskProgress(
                task.state, task.attempt, task.endpoint_id, task.owner_id, task.task_group_id
            )
            for task_id, task in self.get_tasks(task_ids).items()
        }


def _by_submission(task: Task) -> tuple[dt.datetime, str]:
    return moment(task.submitted_at), task.task_id


def _light(task: Task) -> Task:
    return msgspec.structs.replace(task, payload=None, result=None)


def _shown(task: Task) -> Task:
    return msgspec.structs.replace(task, payload=None, options=msgspec.structs.replace(task.options, callees=()))


def _short(task: Task) -> Task:
    return msgspec.structs.replace(_light(task), options=TaskOptions(), details={}, error=None)


def _as_ended(task: Task, result: TaskResult, at: dt.datetime) -> Task:
    return msgspec.structs.replace(
        task,
        state=result.state,
        attempt=max(task.attempt, result.attempt),
        result=result.result,
        result_ref=result.result_ref,
        error=result.error,
        details=result.details or task.details,
        finished_at=at,
        timings={**task.timings, **result.timings, "recorded_at": at.timestamp()},
    )
