"""Shapes of Globus Flows' interface for action providers: introspection, run, status, log.

Names and shapes are those of ``globus-action-provider-tools``; the body of a run is that of Globus Compute's own action
providers (both versions of it), with Farcall's options of tasks.
"""

from __future__ import annotations

import datetime as dt
import functools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal, NoReturn, Self

from pydantic import AfterValidator, Field, WithJsonSchema, model_validator

from farcall_common.limits import MAX_ACTION_PRINCIPALS, MAX_FUNCTIONS_PER_SUBMIT
from farcall_lambdas.models.fields import FunctionReference, Id, Maybe, Shape, Text, shallow
from farcall_lambdas.models.tasks import SubmitOptions

_UUID: Final = "[a-fA-F0-9]{8}-[a-fA-F0-9]{4}-[a-fA-F0-9]{4}-[a-fA-F0-9]{4}-[a-fA-F0-9]{12}"
_PRINCIPAL: Final = f"^urn:globus:(auth:identity|groups:id):{_UUID}$"
#: ISO 8601, as the published schema of actions has it.
_DURATION: Final = (
    r"^P(?!$)(\d+(?:\.\d+)?Y)?(\d+(?:\.\d+)?M)?(\d+(?:\.\d+)?W)?(\d+(?:\.\d+)?D)?"
    r"(T(?=\d)(\d+(?:\.\d+)?H)?(\d+(?:\.\d+)?M)?(\d+(?:\.\d+)?S)?)?$"
)
_DAY_S: Final = 86_400
#: Seconds of the units, in the order of the expression. Years and months have 365 and 30 days.
_UNITS_S: Final = (365 * _DAY_S, 30 * _DAY_S, 7 * _DAY_S, _DAY_S, 0, 3600, 60, 1)
_MAX_DURATION: Final = 64

_TWO_FORMS: Final = "name the endpoint and its tasks as endpoint_id and tasks, or endpoint, function, args and kwargs"


def _duration(text: str) -> str:
    if not re.fullmatch(_DURATION, text, re.ASCII):
        raise ValueError("not a duration of ISO 8601, such as P30D")
    return text


def seconds_of(duration: str) -> float:
    """The seconds of a duration of ISO 8601."""
    found = re.fullmatch(_DURATION, duration, re.ASCII)
    assert found is not None  # checked by the shape
    return sum(float(part[:-1]) * unit for part, unit in zip(found.groups(), _UNITS_S, strict=True) if part and unit)


def duration_of(seconds: float) -> str:
    """Seconds as a duration of ISO 8601."""
    days, rest = divmod(seconds, _DAY_S)
    return f"P{days:.0f}D" if days and not rest else f"PT{seconds:.0f}S"


def moment_of(text: str) -> dt.datetime:
    """The time that a text of ISO 8601 gives; without a time zone, in UTC.

    :raises ValueError: if it is none.
    """
    at = dt.datetime.fromisoformat(text)
    return (at if at.tzinfo else at.replace(tzinfo=dt.UTC)).astimezone(dt.UTC)


def _moment(text: str) -> str:
    try:
        moment_of(text)
    except (ValueError, OverflowError):
        raise ValueError("not a time of ISO 8601, such as 2026-11-26T12:00:00Z") from None
    return text


def _false(value: bool) -> bool:
    if value:
        raise ValueError("not supported: of each task, the oldest entry comes first")
    return value


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a JSON number")


def _arguments(value: Any) -> Any:
    """A list of arguments; the text of one, as JSON; or a single argument."""
    if isinstance(value, str):
        try:
            read = json.loads(value, parse_constant=_refuse)
        except (ValueError, RecursionError):
            return [value]
        return shallow(read) if isinstance(read, list) else [value]
    return value if isinstance(value, list) else [value]


def _keywords(value: Any) -> Any:
    if isinstance(value, str):
        try:
            value = json.loads(value, parse_constant=_refuse)
        except (ValueError, RecursionError):
            raise ValueError("a text that is not JSON") from None
    if not isinstance(value, dict):
        raise ValueError("not an object")
    return shallow(value)


#: Free-form JSON.
_Json = Annotated[Any, AfterValidator(shallow)]

Principal = Annotated[str, Field(pattern=_PRINCIPAL)]
Principals = Annotated[
    list[Principal], Field(fail_fast=True, max_length=MAX_ACTION_PRINCIPALS, json_schema_extra={"uniqueItems": True})
]
Duration = Annotated[
    str,
    Field(max_length=_MAX_DURATION),
    AfterValidator(_duration),
    WithJsonSchema({"type": "string", "pattern": _DURATION, "maxLength": _MAX_DURATION}),
]
Moment = Annotated[
    str,
    Field(max_length=_MAX_DURATION),
    AfterValidator(_moment),
    WithJsonSchema({"type": "string", "format": "date-time", "maxLength": _MAX_DURATION}),
]
Label = Annotated[Text, Field(min_length=1, max_length=64)]
#: Where a log continues: the number of a task, and how many of its entries to leave out.
LogMarker = Annotated[str, Field(pattern="^[0-9]{1,6}:[0-9]{1,9}$")]
NoReverseOrder = Annotated[bool, AfterValidator(_false)]
StatusValue = Literal["ACTIVE", "INACTIVE", "SUCCEEDED", "FAILED"]


class ActionCall(Shape):
    """A call: a function and its arguments. The newer form has ``endpoint_id`` and ``function_id``, with ``args`` and
    ``kwargs`` as JSON. In the older one they are ``endpoint`` and ``function``, ``kwargs`` may be called ``payload``,
    and arguments may be text that is JSON; ``args`` that are no list are one argument."""

    endpoint_id: Id | None = None
    endpoint: Id | None = None
    function_id: FunctionReference | None = None
    function: FunctionReference | None = None
    args: _Json = None
    kwargs: _Json = None
    payload: _Json = None

    @property
    def endpoint_named(self) -> str | None:
        return self.endpoint_id or self.endpoint

    @property
    def function_named(self) -> str | None:
        return self.function_id or self.function

    @model_validator(mode="after")
    def _check_arguments(self) -> Self:
        for one, other in (("endpoint_id", "endpoint"), ("function_id", "function"), ("kwargs", "payload")):
            if getattr(self, one) is not None and getattr(self, other) is not None:
                raise ValueError(f"{one} and {other}: one of the two")
        self.arguments()
        return self

    def arguments(self) -> tuple[Sequence[object], Mapping[str, object]]:
        """Positional and keyword arguments.

        :raises ValueError: for keyword arguments that are no object.
        """
        keywords = self.payload if self.kwargs is None else self.kwargs
        args = [] if self.args is None else _arguments(self.args)
        return args, {} if keywords is None else _keywords(keywords)


class ActionBody(SubmitOptions, ActionCall):
    """Tasks that an action runs: ``tasks`` at the endpoint ``endpoint_id``, each with a ``function_id``, ``args`` and
    ``kwargs``. Or in the older form ``endpoint``, ``function``, ``args`` and ``kwargs`` of one call, and ``tasks`` with
    more of these. The options are those of all tasks."""

    tasks: Annotated[list[ActionCall], Field(fail_fast=True)] | None = None

    @model_validator(mode="after")
    def _check_calls(self) -> Self:
        calls = self.calls()
        if not calls:
            raise ValueError(f"there is no task: {_TWO_FORMS}")
        for each in calls:
            if each.function_named is None:
                raise ValueError("a task without a function")
            if each.endpoint_named is None and self.endpoint_named is None:
                raise ValueError(f"a task without an endpoint: {_TWO_FORMS}")
        if len({each.function_named for each in calls}) > MAX_FUNCTIONS_PER_SUBMIT:
            raise ValueError(f"names more than {MAX_FUNCTIONS_PER_SUBMIT} functions")
        return self

    def calls(self) -> Sequence[ActionCall]:
        """The calls, in order: that of the body itself first, if it has one."""
        return [*([self] if self.function_named is not None else ()), *(self.tasks or ())]


class RunAction(Shape):
    """A request to run an action. The same ``request_id`` with the same content is answered with the same action.

    ``monitor_by`` and ``manage_by`` are identities and groups that may read, and cancel and release the action, as well
    as its creator. Open tasks are cancelled at ``deadline``. The action is forgotten ``release_after`` its end.
    ``allowed_clients`` other than ``public`` are refused: the deployment does not know through which client a request
    comes."""

    request_id: Annotated[Text, Field(min_length=1, max_length=256)]
    body: ActionBody
    label: Label | None = None
    monitor_by: Principals = Field(default_factory=list)
    manage_by: Principals = Field(default_factory=list)
    allowed_clients: list[Literal["public"]] = Field(default_factory=list)
    deadline: Moment | None = None
    release_after: Duration | None = None


class ActionStatus(Shape):
    """An action. ``details`` has ``results``, one object for each task; of an action that succeeded also ``result``,
    the list of what the functions returned; and of one that failed ``code`` and ``description`` of the first error."""

    action_id: str
    status: StatusValue
    creator_id: str
    label: Maybe[str] = None
    monitor_by: list[str] = Field(default_factory=list)
    manage_by: list[str] = Field(default_factory=list)
    start_time: dt.datetime
    completion_time: Maybe[dt.datetime] = None
    release_after: str
    display_status: str
    details: dict[str, Any]


class ActionLogEntry(Shape):
    """One transition of a task: ``code`` is its state."""

    code: str
    description: str
    time: dt.datetime
    details: dict[str, Any]


class ActionLog(Shape):
    """Transitions of the tasks, task by task, each oldest first. With ``has_next_page``, pass ``marker`` as
    ``pagination_token``."""

    limit: int
    has_next_page: bool
    marker: Maybe[str] = None
    entries: list[ActionLogEntry]


class ActionProvider(Shape):
    """Description of this action provider. ``globus_auth_scope`` is empty if the deployment does not use Globus Auth.
    Then Globus Flows has no tokens for it, and other clients use tokens of the deployment."""

    globus_auth_scope: str
    title: str
    subtitle: str
    description: str
    admin_contact: str
    synchronous: bool = False
    input_schema: dict[str, Any]
    types: list[str] = Field(default_factory=lambda: ["ACTION"])
    api_version: str = "1.0"
    keywords: list[str]
    visible_to: list[str]
    runnable_by: list[str]
    log_supported: bool = True
    maximum_deadline: str


@functools.cache
def input_schema() -> dict[str, Any]:
    """The JSON schema of the body of a run."""
    return ActionBody.model_json_schema()
