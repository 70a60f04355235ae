"""Results: reading tasks, their history and groups. Reading never changes anything."""

from __future__ import annotations

import dataclasses
import datetime as dt
from collections.abc import Mapping, Sequence
from typing import Final, Literal

import msgspec

from farcall_common.errors import BlobUnknown, ErrorRecord, InvalidRequest, TaskGroupUnknown, TaskUnknown, TooManyTasks
from farcall_common.graphs import STAGES, StageState
from farcall_common.nested_json import sent_bytes
from farcall_common.progress import PROGRESS, Progress, read_progress
from farcall_common.staging import Staging
from farcall_common.store.model import BlobRef, Endpoint, GraphState, Task, TaskEvent, TaskGroup
from farcall_common.wire.states import TaskState
from farcall_lambdas.identity import Identity
from farcall_lambdas.services.base import Service
from farcall_lambdas.services.limits import check_count

#: Bytes of an entry of an answer without its texts and details: ids, times, options, a pre-signed URL.
_ENTRY_BYTES: Final = 2_000
#: Bytes of an entry of a task group.
_GROUP_ENTRY_BYTES: Final = 100
#: Tasks that are read from the database at once: a result there may have 64 KiB, and an error several of them.
_READ_AT_ONCE: Final = 500
#: States of a task that its endpoint has.
_AT_ENDPOINT: Final = frozenset({TaskState.WAITING_FOR_NODES, TaskState.WAITING_FOR_LAUNCH, TaskState.RUNNING})
_FARCALL_FORMAT: Final = (
    "The result is in a format of Farcall, as its submitter requested: read it with farcall.Client, or submit "
    'such calls with result_serializers=["DillDataBase64"].'
)
_FOR_ITS_SUBMITTER: Final = "Only its submitter can read why."


@dataclasses.dataclass(frozen=True)
class TaskView:
    """A task as a caller sees it. A result is text, or ``result_ref`` with ``url`` (a pre-signed GET) when it does not
    fit an answer or the caller prefers that; ``reason`` says why it is neither."""

    task: Task
    result: str | None = None
    result_ref: BlobRef | None = None
    url: str | None = None
    reason: str | None = None
    #: Of a graph, in the view of one task.
    stages: Sequence[StageState] = ()
    #: In the view of one task.
    progress: Progress | None = None
    #: In the view of one task.
    staging: Staging | None = None

    def size_bytes(self) -> int:
        """Its approximate size in an answer, as it is sent. The stages are counted again for the view of one task."""
        task, record = self.task, self.task.error
        size = _ENTRY_BYTES
        options = task.options
        if options.result_serializers or options.environment:
            size += sent_bytes((options.result_serializers, options.environment and options.environment.label))
        if task.details:
            size += sent_bytes(task.details) + (sent_bytes(task.details[STAGES]) if STAGES in task.details else 0)
        if self.result:
            size += sent_bytes(self.result)
        if record:  # its text is there a second time, as `exception`
            size += sent_bytes(record.to_json()) + sent_bytes(record.traceback or record.message)
        return size


class ResultService(Service):
    """Tasks of the caller; those of others do not exist."""

    def get(self, identity: Identity, task_id: str, *, takes_refs: bool) -> TaskView:
        """One task, with its stages if it is a graph, how far it is, and its files that move.

        :raises TaskUnknown: if the caller has no such task.
        """
        task = self.task(identity, task_id)
        view = self._view(task, takes_refs=takes_refs, room=self._settings.max_response_bytes)
        endpoint = self._stores.endpoints.get_endpoint(task.endpoint_id) if task.state in _AT_ENDPOINT else None
        runs_at = endpoint if task.state is TaskState.RUNNING else None
        return dataclasses.replace(
            view,
            stages=_stages(task, runs_at),
            progress=progress_of(task, runs_at),
            staging=staging_of(endpoint, task.task_id),
        )

    def get_many(
        self, identity: Identity, task_ids: Sequence[str], *, takes_refs: bool
    ) -> Mapping[str, TaskView | None]:
        """Tasks by id, None for one that the caller does not have.

        Tasks whose results do not fit one answer are left out, to be requested again; at least one is there.
        """
        check_count(len(task_ids), self._settings)
        wanted = list(dict.fromkeys(task_ids))
        views: dict[str, TaskView | None] = {}
        room = self._settings.max_response_bytes
        # In steps: of many tasks with big results most would not fit.
        for start in range(0, len(wanted), _READ_AT_ONCE):
            ids = wanted[start : start + _READ_AT_ONCE]
            found = self._stores.tasks.get_tasks(ids, for_answers=True)
            own = {id_: found[id_] for id_ in ids if id_ in found and identity.owns_task(found[id_])}
            shown = self.views(list(own.values()), takes_refs=takes_refs, room=room)
            views |= {id_: shown.get(id_) for id_ in ids if id_ in shown or id_ not in own}
            if len(shown) < len(own):
                break
            room -= sum(view.size_bytes() for view in shown.values())
        return views

    def views(self, tasks: Sequence[Task], *, takes_refs: bool, room: int | None = None) -> Mapping[str, TaskView]:
        """Tasks of the caller by id, as many as fit into ``room`` bytes of an answer; of a whole one, at least one if
        there are any."""
        views: dict[str, TaskView] = {}
        most = self._settings.max_response_bytes
        room = most if room is None else room
        for task in tasks:
            if not takes_refs and task.result_ref and room < task.result_ref.size_bytes <= most:
                continue  # it does not fit now
            if room < _ENTRY_BYTES:
                break
            view = self._view(task, takes_refs=takes_refs, room=most)
            size = view.size_bytes()
            if size > room and room < most:
                break  # it does not fit; the others would not either
            views[task.task_id] = view
            room -= size
        return views

    def newest(
        self,
        identity: Identity,
        *,
        state: TaskState | None = None,
        endpoint_id: str | None = None,
        since: dt.datetime | None = None,
        until: dt.datetime | None = None,
        before: tuple[dt.datetime, str] | None = None,
        limit: int,
    ) -> tuple[Sequence[Task], Mapping[str, str], bool]:
        """The caller's tasks, newest first, without results, as many as fit an answer; names of the functions and
        endpoints of the caller's own tasks, by id; and whether there may be more.

        The owner of an endpoint sees the dead letters of all users there, without texts of their code.
        """
        sees_all = (
            state is TaskState.DEAD_LETTERED
            and identity.has_scope("endpoints:manage")
            and self._owns_endpoint(identity, endpoint_id)
        )
        tasks = self._stores.tasks.list_tasks(
            None if sees_all else identity.identity_id,
            endpoint_id=endpoint_id,
            state=state,
            since=since,
            until=until,
            before=before,
            limit=limit,
        )
        own = [task if identity.owns(task.owner_id) else _for_the_endpoint(task) for task in tasks]
        names = self._names(identity, own)

        def texts(task: Task) -> object:
            named = [names.get(each) for each in (task.function_id, task.endpoint_id)]
            return named, task.timings, task.error and task.error.to_json()

        shown = self._fitting(own, shown=texts)
        return shown, names, len(tasks) == limit or len(shown) < len(tasks)

    def find_ids(self, identity: Identity, kind: Literal["task", "group"], beginning: str) -> Sequence[str]:
        """The caller's tasks or task groups whose ids begin with a text, newest first, some at most.

        :raises InvalidRequest: if too many tasks of the deployment have such ids to look at all of them.
        """
        found, is_all = self._stores.tasks.find_ids(kind, beginning, owner_ids=identity.identity_set)
        if not is_all and len(found) < 2:
            raise InvalidRequest(f"Too many {kind}s have ids that begin with {beginning}.", hint="Give more digits.")
        return found

    def _names(self, identity: Identity, tasks: Sequence[Task]) -> Mapping[str, str]:
        own = [task for task in tasks if identity.owns(task.owner_id)]
        ids = {each for task in own for each in (task.function_id, task.endpoint_id)}
        return self._stores.tasks.names_of(ids) if ids else {}

    def _owns_endpoint(self, identity: Identity, endpoint_id: str | None) -> bool:
        endpoint = self._stores.endpoints.get_endpoint(endpoint_id) if endpoint_id else None
        return endpoint is not None and identity.owns(endpoint.owner_id)

    def group(self, identity: Identity, task_group_id: str) -> Sequence[Task]:
        """The caller's tasks of a group, in the order of submission.

        :raises TaskGroupUnknown: if the caller has no task there.
        :raises TooManyTasks: if there are too many for one answer.
        """
        most = self._settings.max_response_bytes // _GROUP_ENTRY_BYTES
        tasks = self._stores.tasks.get_group(task_group_id, owner_ids=identity.identity_set, limit=most + 1)
        if len(tasks) > most:
            raise TooManyTasks(
                f"Group {task_group_id} has more than {most} tasks.", hint="List them in pages: `farcall tasks export`."
            )
        shown = [task for task in tasks if identity.owns_task(task)]
        if not shown:
            raise TaskGroupUnknown(f"There is no task group {task_group_id}.")
        return shown

    def groups(self, identity: Identity, *, before: str | None, limit: int) -> Sequence[TaskGroup]:
        """The caller's task groups, newest first, older than the group ``before``."""
        return self._stores.tasks.list_groups(identity.identity_id, before=before, limit=limit)

    def events(
        self, identity: Identity, task_id: str, *, after: int, limit: int
    ) -> tuple[Sequence[TaskEvent], int | None]:
        """A page of the history of a task, after its first ``after`` events, as many as fit an answer; and the
        ``after`` of the next page, None if there is none. The same error."""
        self.task(identity, task_id)
        found = self._stores.tasks.list_events(task_id, after=after, limit=limit)
        shown = self._fitting(found, shown=lambda event: dict(event.detail))
        has_more = len(found) == limit or len(shown) < len(found)
        return shown, after + len(shown) if has_more else None

    def task(self, identity: Identity, task_id: str) -> Task:
        """A task as it is recorded; the same error."""
        task = self._stores.tasks.get_tasks([task_id]).get(task_id)
        if task is None or not identity.owns_task(task):
            raise TaskUnknown(f"There is no task {task_id}.")
        return task

    def history(self, identity: Identity, task_id: str) -> tuple[Task, Sequence[TaskEvent]]:
        """A task and its history; the same error."""
        return self.task(identity, task_id), self._stores.tasks.list_events(task_id)

    def _view(self, task: Task, *, takes_refs: bool, room: int) -> TaskView:
        ref = task.result_ref
        if ref is None and (task.result is None or takes_refs or not _is_farcall_format(task.result)):
            return TaskView(task, result=None if task.result is None else _text(task.result))
        if ref is None:
            return TaskView(task, reason=_FARCALL_FORMAT)
        reason = None if takes_refs else f"The result has {ref.size_bytes} bytes, too many for an answer: GET its url."
        room -= TaskView(task).size_bytes()
        if not takes_refs and ref.size_bytes <= room:
            try:
                data = self._stores.blobs.read(ref.blob_key)
            except BlobUnknown:
                return TaskView(task, reason="The result has expired in the blob store.")
            if _is_farcall_format(data):
                reason = _FARCALL_FORMAT
            elif sent_bytes(text := _text(data)) <= room:
                return TaskView(task, result=text)
        url = self._stores.blobs.download_url(ref.blob_key, ttl_s=self._settings.url_ttl_s)
        return TaskView(task, result_ref=ref, url=url, reason=reason)


def _stages(task: Task, endpoint: Endpoint | None) -> Sequence[StageState]:
    """The stages of a task: those of its result; while it runs, those of the endpoint's last report."""
    if STAGES in task.details:
        try:
            return msgspec.convert(task.details[STAGES], list[StageState])
        except msgspec.ValidationError:  # of a later release
            return ()
    graph = graph_of(endpoint, task.task_id)
    return graph.stages if graph is not None else ()


def progress_of(task: Task, endpoint: Endpoint | None) -> Progress | None:
    """How far a task is: as of its result; while it runs, as of the endpoint's last report."""
    if PROGRESS in task.details:
        return read_progress(task.details[PROGRESS])
    reported = endpoint.status.progress if endpoint is not None else ()
    return next((each.progress for each in reported if each.task_id == task.task_id), None)


def staging_of(endpoint: Endpoint | None, task_id: str) -> Staging | None:
    """Return the last report of the endpoint about the files of an open task; None if no file moves."""
    reported = endpoint.status.staging if endpoint is not None else ()
    return next((each.staging for each in reported if each.task_id == task_id), None)


def graph_of(endpoint: Endpoint | None, task_id: str) -> GraphState | None:
    """Return the last report of the endpoint about the calls of a running graph; None for other tasks."""
    graphs = endpoint.status.graphs if endpoint is not None else ()
    return next((graph for graph in graphs if graph.task_id == task_id), None)


def _for_the_endpoint(task: Task) -> Task:
    """Another user's task, as the owner of the endpoint that ran it may see it: no text that its code may choose."""
    error = task.error and ErrorRecord(
        code=task.error.code,
        message=_FOR_ITS_SUBMITTER,
        fault=task.error.fault,
        retryable=task.error.retryable,
        attempt=task.error.attempt,
        endpoint_id=task.error.endpoint_id,
    )
    return msgspec.structs.replace(task, error=error, details={})


def _is_farcall_format(result: bytes) -> bool:
    """Whether a result begins with the id of one of Farcall's strategies, which only its SDK reads."""
    return result[:1] == b"f" and result[2:3] == b"\n"


def _text(data: bytes) -> str:
    """Results are text. One that is not fails when its reader deserialises it, without an effect on other tasks."""
    return data.decode(errors="backslashreplace")
