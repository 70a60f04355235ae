"""Events: the inputs of the agent's core, from the cloud, managers, the spool and the blob store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from farcall_common.event_log import UserBytes, without_texts
from farcall_common.task_options import TaskOptions
from farcall_common.wire import BlobGrant, BlobLocation, FunctionSpec, TaskRef, TaskSpec
from farcall_endpoint.agent.core.environments import without_credentials, without_secrets
from farcall_endpoint.agent.core.graphs import GraphNeeds, StageNeeds
from farcall_endpoint.agent.core.tasks import OpenedCall, SpooledTask
from farcall_endpoint.contracts.agent_manager import (
    CallNews,
    CallsTaken,
    Died,
    EnvironmentStatus,
    FilesReported,
    GraphProgress,
    PrewarmRequest,
    Progress,
)
from farcall_endpoint.files.orders import Failed, Report


class Event(msgspec.Struct, frozen=True):
    """Base class of all events."""


# -- from the process --------------------------------------------------------------------------------------------------


class Restored(Event, frozen=True):
    """The spool was read at the start: its tasks, oldest first, the hashes of its functions, and those with a
    signature. ``has_leftovers``: there are directories of tasks' files."""

    tasks: Sequence[SpooledTask]
    function_hashes: Sequence[str]
    signed: Sequence[FunctionSpec] = ()
    has_leftovers: bool = False


class DrainOrdered(Event, frozen=True):
    """The process ends soon: no task starts any more."""


# -- from the cloud ----------------------------------------------------------------------------------------------------


class SessionOpened(Event, frozen=True):
    """A session is open. The cloud does not need the tasks in ``forget``."""

    forget: Sequence[TaskRef] = ()


class SessionClosed(Event, frozen=True):
    """The session has ended."""


class TasksReceived(Event, frozen=True):
    """Tasks to run, with their ``payloads``, and functions whose ``bodies`` have the right hash, each in order.
    ``opened``: what is known of the seal of each task; empty if none has one. Not by id: a message may name a task
    twice."""

    tasks: Sequence[TaskSpec]
    payloads: UserBytes
    functions: Sequence[FunctionSpec] = ()
    bodies: UserBytes = msgspec.field(default_factory=UserBytes)
    opened: Sequence[OpenedCall | None] = ()


class CancelRequested(Event, frozen=True):
    """Submitters do not need these tasks any more."""

    task_ids: Sequence[str]


class ResultsRecorded(Event, frozen=True):
    """The cloud has results of these tasks."""

    tasks: Sequence[TaskRef]


class BlobGranted(Event, frozen=True):
    """Answer to a request to upload a result."""

    grant: BlobGrant


class OwnerKnown(Event, frozen=True):
    """The API has named the endpoint's owner, as submitter of tasks."""

    owner_id: str


# -- from the blob store -----------------------------------------------------------------------------------------------


class PayloadFetched(Event, frozen=True):
    """A payload was downloaded and verified. ``opened``: if it was sealed, or is refused."""

    task_id: str
    seq: int
    payload: UserBytes
    opened: OpenedCall | None = None


class FetchFailed(Event, frozen=True):
    """A payload cannot be downloaded."""

    task_id: str
    seq: int
    reason: str


class ResultUploaded(Event, frozen=True):
    """A result is in the blob store."""

    task_id: str
    seq: int
    location: BlobLocation


class UploadFailed(Event, frozen=True):
    """A result could not be uploaded."""

    task_id: str
    seq: int
    reason: str
    retryable: bool


# -- from managers -----------------------------------------------------------------------------------------------------


class NodesChanged(Event, frozen=True):
    """While there is a ``refusal``, no manager can be had; ``problem`` is for users."""

    refusal: str
    problem: str


class ManagerRegistered(Event, frozen=True):
    """``ends_at``: epoch second at which the manager's time is over; None if it has no limit. ``node``: its host name.
    ``types``: the technologies that it was asked for, each with why it does not work there. ``image``: the key of the
    only environment that it runs. ``latency_slots``: its workers for tasks with a target, beyond the slots."""

    manager_id: str
    slots: int
    ends_at: float | None = None
    node: str = ""
    types: Mapping[str, str] = {}
    image: str = ""
    latency_slots: int = 0


class ManagersDraining(Event, frozen=True):
    """Managers that get no more tasks, because their blocks make room for another image. All other managers do."""

    manager_ids: Sequence[str]


class PrewarmRequested(Event, frozen=True):
    """The complete list of the owner's pre-warming requests. It replaces the former list."""

    requests: Sequence[PrewarmRequest]


class ManagerProgress(Event, frozen=True):
    """A manager reports. Its results count even if the manager was given up meanwhile."""

    manager_id: str
    progress: Progress
    results: UserBytes = msgspec.field(default_factory=UserBytes)


class ManagerLost(Event, frozen=True):
    """A manager and its tasks are gone. ``expected``: no start counts against a task; ``unstarted``: it started none of
    its tasks."""

    manager_id: str
    reason: str
    expected: bool = False
    unstarted: bool = False


class CopiesReported(Event, frozen=True):
    """A manager reports what has changed among its copies of files."""

    manager_id: str
    report: FilesReported


class CallsHandedOver(Event, frozen=True):
    """A manager hands over calls for another one. The bodies only pass through."""

    manager_id: str
    taken: CallsTaken
    bodies: UserBytes = msgspec.field(default_factory=UserBytes)


class CallsHeard(Event, frozen=True):
    """News of calls of other managers, from the one that runs them."""

    manager_id: str
    news: CallNews
    bodies: UserBytes = msgspec.field(default_factory=UserBytes)


class WorkerEnding(Event, frozen=True):
    """A manager is about to end the worker of a task."""

    manager_id: str
    task_id: str


class CallsNotNeeded(Event, frozen=True):
    """A manager does not need calls any more that it has handed over."""

    manager_id: str
    task_ids: Sequence[str]


# -- from the transfer process -----------------------------------------------------------------------------------------


class TransfersReported(Event, frozen=True):
    """The transfer process reports."""

    reports: Sequence[Report]


class TransfersLost(Event, frozen=True):
    """The transfer process has ended: what it has not answered is ordered again."""

    reason: str


# -- from the spool ----------------------------------------------------------------------------------------------------


class SpoolWritten(Event, frozen=True):
    """The last turn is in the spool, and its actions were performed."""


class SpoolWriteFailed(Event, frozen=True):
    """The last turn could not be written: nothing of it is in the spool, and no later action was performed."""

    reason: str


class SpoolMeasured(Event, frozen=True):
    """Free bytes of the spool's file system, and how many of them are a reserve; None if that is left, or unknown."""

    room: tuple[int, int] | None


class SpoolRetryOrdered(Event, frozen=True):
    """Write the spool now, without waiting for the next retry."""


EVENTS: dict[str, type[Event]] = {kind.__name__: kind for kind in Event.__subclasses__()}
"""The kinds of events by name, to read a log."""


def for_log(event: Event) -> tuple[Event, int]:
    """An event without user bytes, texts of user code and pre-signed URLs, and the number of tasks that it names."""
    match event:
        case TasksReceived(tasks=tasks):
            masked = [_masked(spec) for spec in tasks]
            logged = TasksReceived(
                masked,
                event.payloads.without_bytes(),
                event.functions,
                event.bodies.without_bytes(),
                [_without_key(opened) for opened in event.opened],
            )
            return logged, len(tasks)
        case ManagerProgress(progress=progress):
            if any(f.error is not None or f.details is not None for f in progress.finished) or progress.died:
                progress = _without_texts(progress)
            if progress.graphs:
                progress = msgspec.structs.replace(progress, graphs=tuple(map(_nameless, progress.graphs)))
            if progress.progress:
                mute = tuple([msgspec.structs.replace(each, text="") for each in progress.progress])
                progress = msgspec.structs.replace(progress, progress=mute)
            if progress.environments:
                progress = msgspec.structs.replace(progress, environments=tuple(map(_quiet, progress.environments)))
            logged_progress = ManagerProgress(event.manager_id, progress, event.results.without_bytes())
            return logged_progress, len(progress.finished) + len(progress.died) + len(progress.started) + len(
                progress.returned
            )
        case CallsHandedOver(taken=taken):
            calls = tuple(
                msgspec.structs.replace(
                    each,
                    call=b"",
                    order=msgspec.structs.replace(
                        each.order, options=TaskOptions(idempotent=each.order.options.idempotent)
                    ),
                )
                for each in taken.calls
            )
            taken = msgspec.structs.replace(taken, calls=calls)
            return CallsHandedOver(event.manager_id, taken, event.bodies.without_bytes()), len(calls)
        case CallsHeard(news=news):
            news = msgspec.structs.replace(
                news,
                ended=tuple(msgspec.structs.replace(each, error=_code_of(each.error)) for each in news.ended),
                died=tuple((number, _quiet_death(each)) for number, each in news.died),
            )
            return CallsHeard(event.manager_id, news, event.bodies.without_bytes()), len(news.ended) + len(news.died)
        case BlobGranted(grant=grant):
            return BlobGranted(msgspec.structs.replace(grant, upload_url="", headers={})), 1
        case PayloadFetched():
            payload = event.payload.without_bytes()
            return msgspec.structs.replace(event, payload=payload, opened=_without_key(event.opened)), 1
        case ResultUploaded(location=location):
            return msgspec.structs.replace(event, location=msgspec.structs.replace(location, url=None)), 1
        case Restored(tasks=restored):
            copies = [_copy(task) for task in restored]
            return msgspec.structs.replace(event, tasks=copies), len(restored)
        case CopiesReported(report=report):
            return event, sum(map(len, (report.wanted, report.dropped, report.have, report.failed, report.gone)))
        case TransfersReported(reports=reports):
            return TransfersReported([_without_url(each) for each in reports]), 0
        case ResultsRecorded(tasks=refs) | SessionOpened(forget=refs):
            return event, len(refs)
        case CancelRequested(task_ids=task_ids):
            return event, len(task_ids)
        case PrewarmRequested(requests=requests):
            hidden = [
                msgspec.structs.replace(each, environment=without_credentials(each.environment)) for each in requests
            ]
            return PrewarmRequested(hidden), 0
        case _:
            return event, 0


def _without_url(report: Report) -> Report:
    return Failed(report.number, _code_of(report.error) or {}) if isinstance(report, Failed) else report


def _without_key(opened: OpenedCall | None) -> OpenedCall | None:
    return opened and msgspec.structs.replace(opened, answer_key=b"")


def _quiet(status: EnvironmentStatus) -> EnvironmentStatus:
    """An environment of a node without the words of its runner."""
    return msgspec.structs.replace(
        status,
        label=without_secrets(status.label),
        text="x" if status.text else "",
        problem="x" if status.problem else "",
    )


def _nameless(graph: GraphProgress) -> GraphProgress:
    """The stages of a task without the texts of its submitter."""
    stages = [msgspec.structs.replace(each, name="", node="", error=_code_of(each.error)) for each in graph.stages]
    return GraphProgress(graph.task_id, tuple(stages), graph.used)


def _masked_needs(graph: GraphNeeds) -> GraphNeeds:
    """A graph's requirements without the credentials and texts that its submitter wrote into its options."""
    return msgspec.structs.replace(
        graph,
        environments=tuple([each and without_credentials(each) for each in graph.environments]),
        options=tuple([StageNeeds("", _masked_options(each.options)) for each in graph.options]),
    )


def _masked(spec: TaskSpec) -> TaskSpec:
    """A task without its pre-signed URL and without the texts that its submitter wrote into its options."""
    if spec.payload_blob is not None:
        spec = msgspec.structs.replace(spec, payload_blob=msgspec.structs.replace(spec.payload_blob, url=None))
    options = _masked_options(spec.options)
    return spec if options is spec.options else msgspec.structs.replace(spec, options=options)


def _masked_options(options: TaskOptions) -> TaskOptions:
    if options.resource_specification or options.user_endpoint_config:
        options = msgspec.structs.replace(
            options,
            resource_specification=without_texts(options.resource_specification),
            user_endpoint_config=without_texts(options.user_endpoint_config),
        )
    if options.environment is not None:
        options = msgspec.structs.replace(options, environment=without_credentials(options.environment))
    return options


def _copy(task: SpooledTask) -> SpooledTask:
    """A task without the texts of its result."""
    result = task.result
    if result is not None:
        result = msgspec.structs.replace(result, error=_code_of(result.error), details=None)
    graph = task.graph and _masked_needs(task.graph)
    files = task.files and msgspec.structs.replace(task.files, packed=b"")
    return msgspec.structs.replace(
        task, spec=_masked(task.spec), result=result, answer_key=b"", graph=graph, files=files
    )


def _code_of(error: Mapping[str, Any] | None) -> dict[str, Any] | None:
    return None if error is None else {"code": error.get("code", "")}


def _quiet_death(died: Died) -> Died:
    return msgspec.structs.replace(died, stdout_tail="", stderr_tail="", output=bytes(len(died.output)))


def _without_texts(progress: Progress) -> Progress:
    """Errors and output of user code removed; a finished task keeps the code of its error."""
    finished = tuple(
        msgspec.structs.replace(each, error=_code_of(each.error), details=None) for each in progress.finished
    )
    died = tuple(map(_quiet_death, progress.died))
    return msgspec.structs.replace(progress, finished=finished, died=died)
