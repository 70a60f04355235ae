"""Actions of Globus Flows: requests that become tasks, and their states.

An action is a row with what its tasks do not have: the request id, a label, and who else may read and manage it. Its
state is that of its tasks, whose ids follow from its own. So a request that is repeated, also after a crash between
the two writes, submits the same tasks again, which is harmless.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import hashlib
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Final

from farcall_common.errors import (
    ActionUnknown,
    Conflict,
    ErrorRecord,
    FarcallError,
    InvalidRequest,
    RequestIdReused,
    TaskCancelled,
    TaskUnknown,
    Unavailable,
)
from farcall_common.json_calls import pack_json_call, read_json_result
from farcall_common.nested_json import sent_bytes
from farcall_common.progress import Progress
from farcall_common.store.model import Action, Task, TaskEvent
from farcall_common.wire.ids import is_uuid, new_task_id
from farcall_common.wire.states import TaskState
from farcall_lambdas.identity import Identity
from farcall_lambdas.models.actions import ActionBody, ActionCall, RunAction, moment_of, seconds_of
from farcall_lambdas.models.fields import shallow
from farcall_lambdas.models.tasks import Payload, Submit, SubmitOptions
from farcall_lambdas.services.base import Context, Service, token_detail
from farcall_lambdas.services.cancel import CancelService
from farcall_lambdas.services.limits import check_count
from farcall_lambdas.services.results import ResultService, TaskView
from farcall_lambdas.services.submit import SubmitService
from farcall_lambdas.services.why import WhyService

_DAY_S: Final = 86_400.0
#: Bytes of a row without its texts.
_ROW_BYTES: Final = 300
#: Bytes of a task in an answer without its result: id, state, and why the result is left out.
_PART_BYTES: Final = 300
#: Open tasks of an action whose reason to wait, or progress, an answer has: each takes several reads.
_EXPLAINED: Final = 10
#: Tasks that are read at once.
_READ_AT_ONCE: Final = 500
#: Characters of an id in a message.
_ID_CHARACTERS: Final = 100
#: Actions that one round of the reconciler ends because of their deadline.
_OVERDUE: Final = 100
#: Functions return JSON where they can, which flows read; what is not JSON is read with an SDK.
_RESULTS_AS_JSON: Final = ["JSONData", "DillDataBase64"]

_NOT_JSON: Final = "The result is not JSON: read it with farcall.Client().get_result."
_LEFT_OUT: Final = "The results are too many bytes for one answer: read it with farcall.Client().get_result."
_BY_MANAGER: Final = TaskCancelled("A manager of the action cancelled the task.", hint="").record


@dataclasses.dataclass(frozen=True)
class TaskPart:
    """A task of an action; ``task`` is None for one that is not kept any more. ``output`` is what its function
    returned, if ``has_output``; ``reason`` says why that is not shown, ``why`` why the task waits."""

    task_id: str
    task: Task | None
    output: object = None
    has_output: bool = False
    reason: str | None = None
    why: str | None = None
    progress: Progress | None = None


@dataclasses.dataclass(frozen=True)
class ActionView:
    """An action with its tasks."""

    action: Action
    parts: Sequence[TaskPart]

    @property
    def has_tasks(self) -> bool:
        """Whether any of its tasks is kept: not before they were submitted, nor long after their end."""
        return any(each.task is not None for each in self.parts)

    @property
    def open_parts(self) -> Sequence[TaskPart]:
        return [each for each in self.parts if each.task is not None and not each.task.state.is_terminal]

    @property
    def has_ended(self) -> bool:
        return not self.open_parts

    @property
    def failed(self) -> TaskPart | None:
        """The first task that has ended without success."""
        ended = [each for each in self.parts if each.task is None or each.task.state.is_terminal]
        return next((each for each in ended if each.task is None or each.task.state is not TaskState.SUCCESS), None)

    @property
    def ended_at(self) -> dt.datetime | None:
        """When the last task ended; None while one is open."""
        if not self.has_ended:
            return None
        return max((each.task.finished_at for each in self.parts if each.task and each.task.finished_at), default=None)


class ActionService(Service):
    """Actions of the caller, and those that their creators let the caller read or manage. Others do not exist."""

    def __init__(
        self,
        context: Context,
        submit: SubmitService,
        results: ResultService,
        cancel: CancelService,
        why: WhyService,
    ) -> None:
        super().__init__(context)
        self._submit = submit
        self._results = results
        self._cancel = cancel
        self._why = why

    def run(self, identity: Identity, wanted: RunAction) -> ActionView:
        """Start an action. Repeating the request gives the same one.

        If its tasks are for several endpoints and one of these refuses them, those at the others are cancelled.

        :raises RequestIdReused: if the caller has an action of that request id and other content.
        :raises FarcallError: what a submit raises; then there is no action.
        """
        calls = wanted.body.calls()
        check_count(len(calls), self._settings)
        self._storage.check()
        action = self._new_action(identity, wanted, tasks=len(calls))
        texts = [action.request_id, action.label or "", *action.monitor_by, *action.manage_by]
        self._storage.add(identity, row_bytes=_ROW_BYTES + sum(map(len, texts)))
        known = self._add(action)
        if known.request_hash != action.request_hash:
            raise RequestIdReused("You have an action of this request_id, and it was another request.")
        is_new = known.action_id == action.action_id
        try:
            if is_new:
                self._check_deadline(known)
            self._submit_calls(identity, known, wanted.body)
        except FarcallError as error:
            # What is unavailable may have been written: the request may be repeated.
            if is_new and not isinstance(error, Unavailable):
                self._cancel.cancel_all(identity, known.task_ids())
                self._stores.actions.delete_action(known.action_id)
            raise
        return self._explained(self._view(known))

    def status(self, identity: Identity, action_id: str) -> ActionView:
        """An action that the caller may read.

        :raises ActionUnknown: if there is none.
        """
        return self._explained(self._found(identity, action_id, monitors=True))

    def newest(self, identity: Identity, *, limit: int) -> Sequence[ActionView]:
        """The caller's actions, newest first, without results; of so many tasks together as one request may read."""
        found: list[ActionView] = []
        room = self._settings.max_tasks_per_request
        for action in self._stores.actions.list_actions(identity.identity_set, limit=limit):
            room -= action.tasks
            if room < 0 and found:
                break
            view = self._view(action)
            if view.has_tasks and not self._is_over(view) and _permits(identity, view):
                found.append(view)
        return found

    def cancel(self, identity: Identity, action_id: str) -> ActionView:
        """Cancel the open tasks of an action that the caller may manage. Harmless for one that has ended.

        :raises ActionUnknown: if there is none.
        """
        view = self._found(identity, action_id, monitors=False)
        if identity.owns(view.action.owner_id):
            self._cancel.cancel_all(identity, view.action.task_ids())
        else:
            self._cancel_open(view, identity.identity_id, _BY_MANAGER, token_detail(identity))
        return self._explained(self._view(view.action))

    def release(self, identity: Identity, action_id: str) -> ActionView:
        """Forget an action that has ended and that the caller may manage. Returns its last state.

        :raises ActionUnknown: if there is none.
        :raises Conflict: if it has not ended.
        """
        view = self._found(identity, action_id, monitors=False)
        if not view.has_ended:
            raise Conflict(f"Action {action_id} has not ended.", hint="Cancel it, or wait for its end.")
        view = self._explained(view)
        entry = self._entry(identity, "action.release", action_id, owner_id=view.action.owner_id)
        self._stores.actions.audited(entry).delete_action(action_id)
        return view

    def log(
        self, identity: Identity, action_id: str, *, after: tuple[int, int], limit: int
    ) -> tuple[Sequence[TaskEvent], tuple[int, int] | None]:
        """A page of the history of an action's tasks, task by task. ``after`` is the number of a task, and the number
        of its events to leave out; also returns that of the next page, None if there is none.

        :raises ActionUnknown: if there is no action that the caller may read.
        """
        action = self._found(identity, action_id, monitors=True).action
        found: list[tuple[TaskEvent, tuple[int, int]]] = []  # each with the position behind it
        ids, (number, skipped) = action.task_ids(), after
        while number < len(ids) and len(found) < limit:
            following: int | None
            try:
                events, following = self._results.events(
                    _creator(action), ids[number], after=skipped, limit=limit - len(found)
                )
            except TaskUnknown:  # it is not kept any more
                events, following = (), None
            found += [(event, (number, skipped + count)) for count, event in enumerate(events, start=1)]
            number, skipped = (number + 1, 0) if following is None else (number, following)
            if following is not None:
                break
        shown = self._fitting(found, shown=lambda each: dict(each[0].detail))
        page = (number, skipped) if len(shown) == len(found) else shown[-1][1]
        return [event for event, _ in shown], page if page[0] < len(ids) else None

    def end_overdue(self, *, until: float) -> int:
        """Cancel the open tasks of actions whose deadline has passed, some at most, until ``until`` (epoch seconds).
        Returns how many actions."""
        ended = 0
        for action in self._stores.actions.find_overdue(at=self._now(), limit=_OVERDUE):
            if ended and self._clock() >= until:
                break
            late = f"The deadline of the action, {action.deadline:%Y-%m-%d %H:%M:%S} UTC, has passed."
            error = TaskCancelled(late, hint="Run it again with a later deadline, or without one.").record
            self._cancel_open(self._view(action), action.owner_id, error, {})
            self._stores.actions.forget_deadline(action.action_id)
            ended += 1
        return ended

    def _new_action(self, identity: Identity, wanted: RunAction, *, tasks: int) -> Action:
        kept_s = self._settings.retention_days * _DAY_S
        content = wanted.model_dump(exclude_unset=True, exclude={"request_id"})
        return Action(
            action_id=new_task_id(),
            owner_id=identity.identity_id,
            request_id=wanted.request_id,
            request_hash=hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest(),
            tasks=tasks,
            created_at=self._now(),
            release_after_s=min(kept_s, seconds_of(wanted.release_after)) if wanted.release_after else kept_s,
            label=wanted.label,
            monitor_by=list(dict.fromkeys(wanted.monitor_by)),
            manage_by=list(dict.fromkeys(wanted.manage_by)),
            deadline=moment_of(wanted.deadline) if wanted.deadline else None,
        )

    def _check_deadline(self, action: Action) -> None:
        """:raises InvalidRequest: for a deadline that cannot be."""
        days = self._settings.max_wait_days
        if action.deadline and not action.created_at < action.deadline <= action.created_at + dt.timedelta(days=days):
            at = f"{action.deadline:%Y-%m-%d %H:%M:%S} UTC"
            raise InvalidRequest(f"deadline: {at} is past, or more than {days:g} days ahead.")

    def _add(self, action: Action) -> Action:
        """The action of the request id: this one, or the one that there is."""
        known = self._stores.actions.add_action(action)
        if known.action_id != action.action_id and self._is_over(self._view(known)):
            self._stores.actions.delete_action(known.action_id)
            known = self._stores.actions.add_action(action)
        return known

    def _submit_calls(self, identity: Identity, action: Action, body: ActionBody) -> None:
        """Submit the calls that are not tasks yet, those of each endpoint together."""
        by_endpoint: dict[str, list[tuple[str, ActionCall]]] = defaultdict(list)
        for task_id, call in zip(action.task_ids(), body.calls(), strict=True):
            by_endpoint[call.endpoint_named or body.endpoint_named or ""].append((task_id, call))
        submitted = self._read(action).keys()
        for endpoint_id, calls in by_endpoint.items():
            if not submitted.isdisjoint(task_id for task_id, _ in calls):
                continue  # of a repeated request: the endpoint, or a task that ended, may have been deleted meanwhile
            payloads: dict[str, list[Payload]] = defaultdict(list)
            task_ids: dict[str, list[str]] = defaultdict(list)
            for task_id, call in calls:
                payloads[call.function_named or ""].append(pack_json_call(*call.arguments()))
                task_ids[call.function_named or ""].append(task_id)
            options: dict[str, Any] = {name: getattr(body, name) for name in SubmitOptions.model_fields}
            options["task_group_id"] = body.task_group_id or action.action_id
            options["result_serializers"] = body.result_serializers or _RESULTS_AS_JSON
            # Checked already, by the shape of the request.
            wanted = Submit.model_construct(**options, tasks=payloads, task_ids=task_ids, traceparents=None)
            self._submit.submit(identity, endpoint_id, wanted)

    def _found(self, identity: Identity, action_id: str, *, monitors: bool) -> ActionView:
        """An action that the caller may read (``monitors``) or manage, without results."""
        action = self._stores.actions.get_action(action_id) if is_uuid(action_id) else None
        if action is not None and self._may(identity, action, monitors=monitors):
            view = self._view(action)
            if self._is_over(view):
                self._stores.actions.delete_action(action_id)
            elif view.has_tasks and _permits(identity, view):
                return view
        raise ActionUnknown(f"There is no action {action_id[:_ID_CHARACTERS]}.")

    def _may(self, identity: Identity, action: Action, *, monitors: bool) -> bool:
        if identity.owns(action.owner_id):
            return True
        named = action.monitor_by if monitors else action.manage_by
        return bool(named) and not self._access.principals_of(identity).isdisjoint(map(_principal, named))

    def _is_over(self, view: ActionView) -> bool:
        """Whether an action ended so long ago that it is forgotten."""
        ended_at = view.ended_at
        return ended_at is not None and self._now() >= ended_at + dt.timedelta(seconds=view.action.release_after_s)

    def _read(self, action: Action) -> Mapping[str, Task]:
        ids, found = action.task_ids(), dict[str, Task]()
        for start in range(0, len(ids), _READ_AT_ONCE):
            found |= self._stores.tasks.get_tasks(ids[start : start + _READ_AT_ONCE], with_bodies=False)
        return found

    def _view(self, action: Action) -> ActionView:
        """An action without results."""
        found = self._read(action)
        return ActionView(action, [TaskPart(task_id, found.get(task_id)) for task_id in action.task_ids()])

    def _explained(self, view: ActionView) -> ActionView:
        """With the results, if the action has ended; else with what its first open tasks do."""
        if view.has_ended:
            return dataclasses.replace(view, parts=self._with_outputs(view.parts))
        creator = _creator(view.action)
        explained = {each.task_id: self._open(creator, each) for each in view.open_parts[:_EXPLAINED]}
        return dataclasses.replace(view, parts=[explained.get(each.task_id, each) for each in view.parts])

    def _open(self, creator: Identity, part: TaskPart) -> TaskPart:
        if part.task is not None and part.task.state is TaskState.RUNNING:
            view = self._results.get(creator, part.task_id, takes_refs=False)
            part = dataclasses.replace(part, progress=view.progress)
        return dataclasses.replace(part, why=self._why.why(creator, part.task_id).text)

    def _with_outputs(self, parts: Sequence[TaskPart]) -> Sequence[TaskPart]:
        """The parts with the results that fit an answer, which has each of them twice."""
        room = max(0, self._settings.max_response_bytes - len(parts) * _PART_BYTES) // 2
        left = room
        wanted = [each.task_id for each in parts if each.task and each.task.state is TaskState.SUCCESS]
        views: dict[str, TaskView] = {}
        for start in range(0, len(wanted), _READ_AT_ONCE):
            ids = wanted[start : start + _READ_AT_ONCE]
            found = self._stores.tasks.get_tasks(ids, for_answers=True)
            shown = self._results.views([found[id_] for id_ in ids if id_ in found], takes_refs=False, room=room)
            views |= shown
            room -= sum(view.size_bytes() for view in shown.values())
            if len(shown) < len(ids):
                break
        succeeded = set(wanted)
        shown_parts: list[TaskPart] = []
        for each in parts:
            part = _with_output(each, views.get(each.task_id)) if each.task_id in succeeded else each
            # Values may be larger than the texts that they were read from: 1e15 becomes 1000000000000000.0.
            size = sent_bytes(part.output) if part.has_output else 0
            if size > left:
                part = dataclasses.replace(each, reason=_LEFT_OUT)
            else:
                left -= size
            shown_parts.append(part)
        return shown_parts

    def _cancel_open(self, view: ActionView, identity_id: str, error: ErrorRecord, about: Mapping[str, object]) -> None:
        """Cancel the open tasks of an action for ``identity_id``, which need not be its creator."""
        by_endpoint = defaultdict(list)
        for each in view.open_parts:
            if each.task is not None:
                by_endpoint[each.task.endpoint_id].append(each.task)
        for endpoint_id, tasks in by_endpoint.items():
            self._cancel.cancel_of_others(identity_id, endpoint_id, tasks, error, about=about)


def _creator(action: Action) -> Identity:
    """The creator, as which tasks are read: that the caller may read the action was decided before."""
    return Identity(action.owner_id, "")


def _principal(urn: str) -> str:
    """A principal of Globus as shares name it."""
    kind, _, id_ = urn.lower().removeprefix("urn:globus:").rpartition(":")
    return f"{'identity' if kind == 'auth:identity' else 'group'} {id_}"


def _permits(identity: Identity, view: ActionView) -> bool:
    """Whether all tasks are within the limits of the caller's token."""
    return all(
        identity.permits_endpoint(task.endpoint_id) and identity.permits_function(task.function_id)
        for each in view.parts
        if (task := each.task) is not None
    )


def _with_output(part: TaskPart, view: TaskView | None) -> TaskPart:
    """A task that succeeded, with its result as JSON."""
    if view is None:
        return dataclasses.replace(part, reason=_LEFT_OUT)
    if view.result is None:
        return dataclasses.replace(part, reason=view.reason)
    try:
        value = shallow(read_json_result(view.result.encode()))
        json.dumps(value, allow_nan=False)  # a number of thousands of digits is read, and cannot be written
    except ValueError:
        return dataclasses.replace(part, reason=_NOT_JSON)
    return dataclasses.replace(part, output=value, has_output=True)
