"""Routes of Globus Flows' interface for action providers, in both forms that it has: ``/actions/<id>/status`` and
``/actions/actions/<id>``."""

from typing import Annotated, Any, Final, Literal

from aws_lambda_powertools.event_handler.openapi.params import Query

from farcall_common.errors import TaskUnknown
from farcall_common.store.model import TaskEvent
from farcall_common.wire.states import TaskState
from farcall_lambdas.models.actions import (
    ActionLog,
    ActionLogEntry,
    ActionProvider,
    ActionStatus,
    LogMarker,
    NoReverseOrder,
    RunAction,
    StatusValue,
    duration_of,
    input_schema,
)
from farcall_lambdas.routes.call import Call, CurrentCall, new_router
from farcall_lambdas.services.actions import ActionView, TaskPart

router = new_router()

#: Tasks of an action whose errors an answer has with their messages, and characters of each.
_ERRORS_SHOWN: Final = 100
_ERROR_CHARACTERS: Final = 1_000
_DAY_S: Final = 86_400.0

_WITHOUT_GLOBUS: Final = (
    " This deployment does not use Globus Auth, so the Globus Flows service has no tokens for it; other clients send a "
    "token of the deployment."
)


@router.get("/actions", summary="Describe this action provider of Globus Flows", tags=["actions"])
def introspect(call: CurrentCall) -> ActionProvider:
    scope = call.settings.globus_scope
    return ActionProvider(
        globus_auth_scope=scope,
        title="Farcall",
        subtitle="Run registered functions on endpoints",
        description="Runs functions on endpoints, as Globus Compute's action provider does, and takes the same body."
        + ("" if scope else _WITHOUT_GLOBUS),
        admin_contact="the operator of this deployment",
        input_schema=input_schema(),
        keywords=["farcall", "compute", "function"],
        visible_to=["all_authenticated_users"],
        runnable_by=["all_authenticated_users"],
        maximum_deadline=duration_of(call.settings.max_wait_days * _DAY_S),
    )


@router.post("/actions/run", summary="Run an action", tags=["actions"], status_code=202)
@router.post("/actions/actions", summary="Run an action (newer form)", tags=["actions"], status_code=202)
def run_action(body: RunAction, call: CurrentCall) -> ActionStatus:
    call.count(len(body.body.calls()))
    return _status(call.services.actions.run(call.identity, body))


@router.get("/actions/actions", summary="List your actions, newest first", tags=["actions"])
def list_actions(
    call: CurrentCall,
    status: Annotated[str, Query(max_length=64)] = "active",
    roles: Annotated[Literal["creator_id"], Query()] = "creator_id",  # noqa: ARG001  # others are refused
    limit: Annotated[int, Query(ge=1, le=100)] = 100,
) -> list[ActionStatus]:
    """Actions that you created, in the states ``status`` (with commas), without their results."""
    wanted = {each.strip().upper() for each in status.split(",")}
    views = call.services.actions.newest(call.identity, limit=limit)
    call.count(sum(view.action.tasks for view in views))
    return [_status(view, with_details=False) for view in views if _value(view) in wanted]


@router.get("/actions/<action_id>/status", summary="Get an action", tags=["actions"])
@router.get("/actions/actions/<action_id>", summary="Get an action (newer form)", tags=["actions"])
def get_action(action_id: str, call: CurrentCall) -> ActionStatus:
    return _counted(call.services.actions.status(call.identity, action_id), call)


@router.post("/actions/<action_id>/cancel", summary="Cancel the tasks of an action", tags=["actions"])
@router.post("/actions/actions/<action_id>/cancel", summary="Cancel an action (newer form)", tags=["actions"])
def cancel_action(action_id: str, call: CurrentCall) -> ActionStatus:
    return _counted(call.services.actions.cancel(call.identity, action_id), call)


@router.post("/actions/<action_id>/release", summary="Forget an action that has ended", tags=["actions"])
@router.delete("/actions/actions/<action_id>", summary="Forget an action (newer form)", tags=["actions"])
def release_action(action_id: str, call: CurrentCall) -> ActionStatus:
    return _counted(call.services.actions.release(call.identity, action_id), call)


@router.get("/actions/<action_id>/log", summary="The history of the tasks of an action", tags=["actions"])
@router.get("/actions/actions/<action_id>/log", summary="The history of an action (newer form)", tags=["actions"])
def get_action_log(
    action_id: str,
    call: CurrentCall,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    pagination_token: Annotated[LogMarker | None, Query()] = None,
    reverse_order: Annotated[NoReverseOrder, Query()] = False,  # noqa: ARG001  # true is refused
) -> ActionLog:
    number, _, skipped = (pagination_token or "0:0").partition(":")
    events, following = call.services.actions.log(
        call.identity, action_id, after=(int(number), int(skipped)), limit=limit
    )
    call.count(len(events))
    marker = ":".join(map(str, following)) if following else None
    entries = [_log_entry(event) for event in events]
    return ActionLog(limit=limit, has_next_page=following is not None, marker=marker, entries=entries)


def _counted(view: ActionView, call: Call) -> ActionStatus:
    call.count(len(view.parts))
    return _status(view)


def _status(view: ActionView, *, with_details: bool = True) -> ActionStatus:
    action = view.action
    return ActionStatus(
        action_id=action.action_id,
        status=_value(view),
        creator_id=f"urn:globus:auth:identity:{action.owner_id}",
        label=action.label,
        monitor_by=list(action.monitor_by),
        manage_by=list(action.manage_by),
        start_time=action.created_at,
        completion_time=view.ended_at,
        release_after=duration_of(action.release_after_s),
        display_status=_display_status(view),
        details=_details(view) if with_details else {"tasks": action.tasks},
    )


def _value(view: ActionView) -> StatusValue:
    """Never INACTIVE: that stops a run of a flow until a person resumes it, and tasks continue by themselves."""
    if not view.has_ended:
        return "ACTIVE"
    return "FAILED" if view.failed else "SUCCEEDED"


def _display_status(view: ActionView) -> str:
    """At most 64 characters."""
    if len(view.parts) == 1:
        return _state(view.parts[0]).replace("-", " ").capitalize()
    ended = len(view.parts) - len(view.open_parts)
    return f"{ended} of {len(view.parts)} tasks have ended"


def _state(part: TaskPart) -> str:
    return part.task.state.value if part.task else "not kept"


def _details(view: ActionView) -> dict[str, Any]:
    tasks = [each.task for each in view.parts if each.task]
    details: dict[str, Any] = {"task_group_id": tasks[0].task_group_id}
    if view.has_ended and view.failed:
        details |= {"code": _error(view.failed)["code"], "description": _error(view.failed)["message"]}
    elif view.has_ended:
        details["result"] = [each.output for each in view.parts]
    errors = 0
    details["results"] = []
    for each in view.parts:
        entry: dict[str, Any] = {"task_id": each.task_id, "status": _state(each)}
        if each.has_output:
            entry["output"] = each.output
        found = {"reason": each.reason, "why": each.why, "progress": each.progress and vars(each.progress)}
        entry |= {name: value for name, value in found.items() if value is not None}
        if _has_failed(each):
            errors += 1
            error = _error(each)
            entry["error"] = error if errors <= _ERRORS_SHOWN else {"code": error["code"]}
        details["results"].append(entry)
    return details


def _has_failed(part: TaskPart) -> bool:
    return part.task is None or (part.task.state.is_terminal and part.task.state is not TaskState.SUCCESS)


def _error(part: TaskPart) -> dict[str, str]:
    """Why a task has no result."""
    if part.task is None:
        record = TaskUnknown(f"Task {part.task_id} is not kept any more.").record
    elif part.task.error is None:
        return {"code": part.task.state.value.upper(), "message": f"The task ended as {part.task.state}.", "hint": ""}
    else:
        record = part.task.error
    most = _ERROR_CHARACTERS
    return {"code": record.code[:most], "message": record.message[:most], "hint": record.hint[:most]}


def _log_entry(event: TaskEvent) -> ActionLogEntry:
    return ActionLogEntry(
        code=event.state.value,
        description=f"Reported by {event.reporter.value}, attempt {event.attempt}",
        time=event.at,
        details={"task_id": event.task_id, **event.detail},
    )
