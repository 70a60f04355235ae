"""Task shapes: submit, read, explain, cancel; uploads; the version of the service."""

from __future__ import annotations

from collections.abc import Iterable
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, Self, Union, get_args, get_origin, get_type_hints

from pydantic import Base64Bytes, Field, create_model, model_validator

from farcall_common.limits import MAX_OUTPUT_TASKS, MAX_SOURCE_FILES, MAX_SOURCES
from farcall_common.retries import MAX_NAME_CHARACTERS, MAX_NAMES, NAME_PATTERN
from farcall_common.task_options import MAX_CALLEES, Callee, TaskOptions
from farcall_lambdas.models.containers import EnvironmentShape
from farcall_lambdas.models.endpoints import EndpointDetails, EnvironmentEntry
from farcall_lambdas.models.fields import (
    FunctionReference,
    Id,
    Ids,
    JsonObject,
    Maybe,
    NamedFunctions,
    Reference,
    Shape,
    SmallJsonObject,
    Strategies,
    Text,
    UserBytes,
)
from farcall_lambdas.models.qos import InfeasibleShape, QosShape

Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
Size = Annotated[int, Field(ge=0, lt=2**53)]
#: W3C's trace context: version, trace id, span id, flags.
TraceParent = Annotated[str, Field(pattern="^[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}$")]

#: Module and qualified name of an exception class.
ClassName = Annotated[str, Field(max_length=MAX_NAME_CHARACTERS, pattern=NAME_PATTERN)]


class BlobRefShape(Shape):
    blob_key: Annotated[Text, Field(max_length=512)]
    size_bytes: Size
    sha256: Sha256


class BinaryShape(Shape):
    """A packed buffer that is not text, in Base64."""

    base64: Base64Bytes


#: Options of tasks with rules of the API's own: what a name is, how much each of many tasks may keep.
_OWN_RULES: Final = frozenset(
    {
        "max_attempts",
        "retry_on",
        "callees",
        "sources",
        "source_files",
        "container",
        "environment",
        "qos",
        "result_serializers",
        "resource_specification",
        "user_endpoint_config",
    }
)

#: A packed buffer, or a reference to an uploaded one.
Payload = UserBytes | BlobRefShape | BinaryShape


def _fields_of_options(names: Iterable[str]) -> dict[str, tuple[Any, Any]]:
    """Options of tasks as fields of a shape: the type, the limits and the default that :class:`TaskOptions` has."""
    types = get_type_hints(TaskOptions, include_extras=True)
    defaults = TaskOptions()
    return {name: (_as_pydantic(types[name]), getattr(defaults, name)) for name in names}


def _as_pydantic(kind: Any) -> Any:
    """A type with limits of msgspec, with the same limits of pydantic."""
    if get_origin(kind) in {Union, UnionType}:
        return Union[*map(_as_pydantic, get_args(kind))]
    if get_origin(kind) is not Annotated:
        return kind
    base, meta = get_args(kind)
    finite = False if base is float else None
    return Annotated[base, Field(gt=meta.gt, ge=meta.ge, le=meta.le, allow_inf_nan=finite)]


if TYPE_CHECKING:
    _PlainOptions = Shape
else:
    _PlainOptions = create_model(
        "_PlainOptions",
        __base__=Shape,
        **_fields_of_options(name for name in TaskOptions.__struct_fields__ if name not in _OWN_RULES),
    )


class SubmitOptions(_PlainOptions):
    """``user_runtime`` is accepted and not needed. There is no message broker, so ``create_queue`` is refused from
    Globus Compute's clients.

    With ``memoize``, a task whose function and payload have the bytes of an earlier one of yours that succeeded gets
    its result at once; null leaves it to the function. ``retries`` is how often a task runs again after its function
    raised an exception of a class in ``retry_on`` (``module.Class``; without it, any), first after about
    ``retry_delay_s``. The tasks run in ``container`` (id or name of a container of yours) or ``environment``, one of
    the two; else in the environment of their function, else in the endpoint's own Python. ``num_nodes``,
    ``ranks_per_node``, ``num_ranks``, ``memory_bytes``, ``max_output_bytes`` and ``keep_output`` may be in
    ``resource_specification`` instead. ``callees`` are other functions that the tasks call on their endpoint: those of
    the stages of a graph, or those that they may call while they run. Each runs in ``container`` or ``environment``,
    else in its own environment. ``sources`` are other endpoints whose files the tasks read; the caller may use each of
    them. ``source_files`` are these files, each as the first 32 hexadecimal digits of the SHA-256 of the endpoint's id
    and the absolute path: the tasks' endpoint can read no others."""

    task_group_id: Id | None = None
    create_queue: bool | None = None
    user_runtime: JsonObject | None = None
    user_endpoint_config: JsonObject | None = None
    resource_specification: SmallJsonObject | None = None
    result_serializers: Strategies | None = None
    max_attempts: Annotated[int, Field(ge=1, le=100)] = 3
    retry_on: Annotated[list[ClassName], Field(fail_fast=True, max_length=MAX_NAMES)] | None = None
    container: Reference | None = None
    environment: EnvironmentShape | None = None
    qos: QosShape | None = None
    callees: Annotated[list[FunctionReference], Field(fail_fast=True, max_length=MAX_CALLEES)] | None = None
    sources: Annotated[list[Id], Field(fail_fast=True, max_length=MAX_SOURCES)] | None = None
    source_files: (
        Annotated[
            list[Annotated[str, Field(pattern="^[0-9a-f]{64}$")]], Field(fail_fast=True, max_length=MAX_SOURCE_FILES)
        ]
        | None
    ) = None

    @model_validator(mode="after")
    def _check_options(self) -> Self:
        self.options()
        return self

    def options(self) -> TaskOptions:
        """The options of the tasks; the resource specification of Globus Compute's programs is translated.

        :raises ValueError: for a value there that an option cannot have, and for two environments.
        """
        environment = None if self.environment is None else self.environment.environment()
        # Clients send both, the name for releases of the API that know no environments.
        if environment is not None and self.container not in (None, environment.reference):
            raise ValueError("container and environment: a task has one environment")
        given = {name: getattr(self, name) for name in TaskOptions.__struct_fields__}  # checked already, by this shape
        given["environment"] = environment
        given["qos"] = None if self.qos is None else self.qos.qos()
        given |= {
            name: tuple(given[name] or ()) for name in ("result_serializers", "retry_on", "sources", "source_files")
        }
        given["callees"] = tuple(map(Callee, self.callees or ()))
        return TaskOptions(**given).translated()


class Submit(SubmitOptions):
    """Tasks for one endpoint. ``task_ids`` runs parallel to ``tasks``; sending the same ids again is harmless.
    ``traceparents``, too: the spans below which the tasks run. A function is named by its id, which means its newest
    version, or by ``<id>@<version>``."""

    tasks: Annotated[NamedFunctions[Annotated[list[Payload], Field(fail_fast=True)]], Field(min_length=1)]
    task_ids: NamedFunctions[Ids] | None = None
    traceparents: NamedFunctions[Annotated[list[TraceParent | None], Field(fail_fast=True)]] | None = None


class SubmitWarning(Shape):
    """Warning about accepted tasks of a function: ``TARGET_INFEASIBLE``, the endpoint cannot hold their latency
    target."""

    code: str
    function_id: str
    message: str
    hint: str = ""


class SubmitAnswer(Shape):
    """``results`` are those of memoized tasks; ``results_left_out`` is the number of them that did not fit, if any:
    read those like other tasks. ``warnings`` name functions as the request does; left out if there are none."""

    request_id: str
    task_group_id: str
    endpoint_id: str
    tasks: dict[str, list[str]]
    results: Maybe[dict[str, TaskAnswer]] = None
    results_left_out: Maybe[int] = None
    warnings: Maybe[list[SubmitWarning]] = None


class SubmitV2(SubmitOptions):
    """The older form: each task is ``[function_id, endpoint_id, payload]``."""

    tasks: Annotated[list[tuple[Id, Id, UserBytes]], Field(fail_fast=True, min_length=1)]


class SubmitV2Result(Shape):
    status: str
    task_uuid: str | None
    http_status_code: int
    reason: str | None


class SubmitV2Answer(Shape):
    """``response`` is "success", or "batch" when the results must be looked at one by one."""

    response: str
    task_group_id: str
    results: list[SubmitV2Result]


class ResultRefShape(BlobRefShape):
    """``url`` is a pre-signed GET."""

    url: str


class StageShape(Shape):
    """A stage of a graph. ``state``: "waiting", "running", "done", "failed", "cancelled" or "skipped" (its value was
    not needed). It makes ``calls`` calls, as far as that is known; ``ended`` of these have ended, ``failed`` without
    success; ``retries`` are starts beyond the first. ``run_s`` are the seconds of all calls together, ``workers``
    process ids on ``node``. ``error`` is that of the first call that failed for good."""

    number: int
    name: str
    state: str
    calls: int = 1
    ended: int = 0
    failed: int = 0
    retries: int = 0
    run_s: float = 0.0
    value_bytes: int = 0
    workers: list[int] = Field(default_factory=list)
    node: str = ""
    started_at: Maybe[float] = None
    ended_at: Maybe[float] = None
    error: Maybe[dict[str, Any]] = None


class ProgressShape(Shape):
    """How far a task is, as its function last said. ``at`` is in epoch seconds, by the clock of its node. Of a sealed
    call ``text`` is left out while it runs, and then sealed with the details."""

    done: int | float
    total: Maybe[int | float] = None
    text: str = ""
    at: float = 0.0


class StagingShape(Shape):
    """Files of a task that its endpoint copies: those that it reads, before it starts, or those that it has written."""

    state: str
    files: int
    files_done: int = 0
    bytes: int = 0
    total: Maybe[int] = None
    url: Maybe[str] = None
    problem: Maybe[str] = None
    since: float = 0.0
    to_node: Maybe[bool] = None


class TaskAnswer(Shape):
    """A task. At most one of ``result``, ``result_ref`` and ``exception`` is there, and none before the task is
    finished.

    ``completion_t`` is epoch seconds as text; ``timings`` are epoch seconds at the stages of the task.
    ``result_serializers`` are those of the submit, if there are any. ``environment`` is the name of that in which it
    runs, or technology and place. ``stages`` are those of a graph, in the answer about a single task: while it runs,
    some of them, as its endpoint last reported them. ``progress`` is what the function last said of its progress, if it
    did, in the answer about a single task. That of a running task may be some seconds old. So may ``staging``, which is
    there while its endpoint copies its files; those that were copied are ``files`` in the details of its result.
    ``qos`` is the latency that the task is to hold, left out if it has no target.
    ``reason`` is why a finished task shows neither a result nor an exception; clients of Globus Compute see it as
    ``exception`` too.
    """

    task_id: str
    status: str
    result: Maybe[str] = None
    result_ref: Maybe[ResultRefShape] = None
    exception: Maybe[str] = None
    completion_t: Maybe[str] = None
    reason: Maybe[str] = None
    details: dict[str, Any] = Field(default_factory=dict)
    error: Maybe[dict[str, Any]] = None
    task_group_id: Maybe[str] = None
    endpoint_id: Maybe[str] = None
    function_id: Maybe[str] = None
    function_version: Maybe[int] = None
    attempt: Maybe[int] = None
    timings: Maybe[dict[str, float]] = None
    result_serializers: Maybe[list[str]] = None
    retry_of: Maybe[str] = None
    environment: Maybe[str] = None
    stages: Maybe[list[StageShape]] = None
    progress: Maybe[ProgressShape] = None
    staging: Maybe[StagingShape] = None
    qos: Maybe[QosShape] = None


class BatchStatus(Shape):
    task_ids: Annotated[Ids, Field(min_length=1)]


class TaskBatchAnswer(Shape):
    """Results that do not fit one answer are left out: request the missing tasks again. unknown are the tasks that
    you do not have; Globus Compute's client gets them as failed tasks in results."""

    response: str = "batch"
    results: dict[str, TaskAnswer]
    unknown: Maybe[list[str]] = None


#: Bytes from the start of an attempt, or if negative before the present end.
Offset = Annotated[int, Field(ge=-(2**53), le=2**53, strict=True)]


class OutputWantedShape(Shape):
    """A task, and where to begin in each stream: behind the bytes that you have already, or if negative so many bytes
    before the present end."""

    task_id: Id
    stdout_from: Offset = 0
    stderr_from: Offset = 0


class BatchOutput(Shape):
    tasks: Annotated[list[OutputWantedShape], Field(fail_fast=True, min_length=1, max_length=MAX_OUTPUT_TASKS)]


class StreamShape(Shape):
    """Bytes of a stream as text, without those that are no text: from ``from``, which is more than what you requested
    if earlier ones are not kept, to before ``next``, where the next request continues."""

    start: int = Field(alias="from")
    next: int
    text: str


class OutputAnswer(Shape):
    """A piece of a task's output.

    ``status`` is the state of the task. ``attempt`` is the attempt that printed this: if it is not the one of your
    last answer, begin at 0. ``complete``: the task has ended, and nothing follows.
    ``source``: "endpoint"; "record" for the end of the output that is recorded of failed tasks, and with
    ``keep_output``, shown to a request from 0 only; or "none".
    ``reason``: why nothing came from the endpoint: "NOT_STARTED", "ENDPOINT_OFFLINE", "NO_ANSWER"
    (ask again), "NOT_KEPT" (nothing was printed, or it is not kept, or not any more), "SEALED" (recorded, and sealed:
    read the task). ``sealed``: of a sealed call, the texts, which are empty then."""

    status: str
    attempt: int
    stdout: StreamShape
    stderr: StreamShape
    complete: bool
    source: Literal["endpoint", "record", "none"]
    reason: str | None
    sealed: str | None


class OutputBatchAnswer(Shape):
    """``unknown`` are the tasks that you do not have."""

    results: dict[str, OutputAnswer]
    unknown: Maybe[list[str]] = None


class TaskGroupEntry(Shape):
    id: str
    created_at: str


class TaskGroupAnswer(Shape):
    taskgroup_id: str
    create_websockets_queue: bool = False
    tasks: list[TaskGroupEntry]


class FoundIds(Shape):
    """Ids, the newest first, some at most."""

    ids: list[str]


class TaskEntry(Shape):
    """A task in a list. Instants are epoch seconds. ``owner_id`` is there when the task belongs to another user;
    otherwise the names are, as long as the function and the endpoint exist."""

    task_id: str
    status: str
    task_group_id: str
    endpoint_id: str
    function_id: str
    function_version: int
    attempt: int
    submitted_at: float | None
    finished_at: float | None
    error: Maybe[dict[str, Any]] = None
    retry_of: Maybe[str] = None
    owner_id: Maybe[str] = None
    function_name: Maybe[str] = None
    endpoint_name: Maybe[str] = None
    timings: Maybe[dict[str, float]] = None


class TaskList(Shape):
    """With ``next`` there may be more: pass it as ``before``."""

    tasks: list[TaskEntry]
    next: Maybe[str] = None


class TaskEventShape(Shape):
    """One transition; ``at`` in epoch seconds."""

    state: str
    reporter: str
    at: float
    attempt: int
    detail: dict[str, Any]


class TaskEvents(Shape):
    """Oldest first. With ``next`` there may be more: pass it as ``after``, the number of events to leave out."""

    task_id: str
    events: list[TaskEventShape]
    next: Maybe[int] = None


class WhyEndpoint(Shape):
    """The endpoint of a task. ``seen_at`` is its last heartbeat, in epoch seconds; ``problem`` is the one that it
    reported; ``environments`` are the states of the task's environment by node. ``details`` and ``problem`` are as of
    ``reported_at`` (epoch seconds), ``age_s`` seconds ago; both are left out if it has not reported yet."""

    endpoint_id: str
    name: str
    status: str
    seen_at: float | None
    details: EndpointDetails
    problem: str
    reported_at: Maybe[float] = None
    age_s: Maybe[float] = None
    environments: Maybe[list[EnvironmentEntry]] = None


class WhyAnswer(Shape):
    """``reason`` is for programs, ``text`` is for people. ``state_since`` is in epoch seconds, as is ``expires_at``: if
    the task has not started by then, it fails; null when it runs or is finished. ``queue_position`` is how many
    of the caller's own tasks leave the endpoint's queue before this one, null when it is not in the queue.
    ``queue_depth`` is how many tasks wait there, ``queue_submitters`` of how many submitters, who take turns.
    ``endpoint`` is left out when it is not registered any more. ``qos`` is the latency that the task is to hold, left
    out without one; ``infeasible`` is why its endpoint cannot hold it, and what would help, as it last reported."""

    task_id: str
    reason: str
    text: str
    state: str
    state_since: float
    state_age_s: float
    expires_at: float | None
    attempt: int
    queue_position: int | None
    queue_depth: int | None
    queue_submitters: int | None
    endpoint: Maybe[WhyEndpoint] = None
    qos: Maybe[QosShape] = None
    infeasible: Maybe[InfeasibleShape] = None


class TaskIds(Shape):
    task_ids: Annotated[Ids, Field(min_length=1)]


class CancelAnswer(Shape):
    """What cancelling did. ``outcome``: "cancelled" (it will never run, or its result will be dropped), "requested"
    (the endpoint was asked to stop it; wait for its result), "finished" (too late) or "unknown" (you have no task with
    this id).
    ``status`` is the state of the task now."""

    task_id: str
    outcome: str
    status: Maybe[str] = None


class CancelBatchAnswer(Shape):
    results: dict[str, CancelAnswer]


class CancelEndpointTasksAnswer(CancelBatchAnswer):
    """``next``: send it as ``after`` to cancel more; left out when there are no more."""

    next: Maybe[str] = None


class Retry(Shape):
    """``task_id`` is for the new task; sending the same one again is harmless."""

    task_id: Id | None = None


class RetryAnswer(Shape):
    """``task_id`` is the new task."""

    task_id: str
    retry_of: str
    task_group_id: str


class DiscardAnswer(Shape):
    task_id: str
    outcome: str = "discarded"


class RequestBlob(Shape):
    size_bytes: Size
    sha256: Sha256


class BlobGranted(Shape):
    """PUT the bytes to ``upload_url`` with exactly these headers, then refer to them by ``blob_key``."""

    blob_key: str
    upload_url: str
    headers: dict[str, str]


class VersionAnswer(Shape):
    """``min_ep_version`` and ``min_endpoint_version`` are the same: Globus Compute's client reads the first, its
    published answers show the second."""

    api: str
    min_sdk_version: str
    min_ep_version: str
    min_endpoint_version: str
    git_sha: str = ""
