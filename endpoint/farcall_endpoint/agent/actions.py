"""Actions: instructions of the agent's core to its shell, in the order in which they are performed.

The tasks in them belong to the core: the shell reads them, and changes nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from farcall_common.wire import BlobGrant, FunctionSpec, TaskTransition
from farcall_endpoint.agent.tasks import Task


@dataclasses.dataclass(frozen=True, slots=True)
class Action:
    """Base class of all actions."""


# -- to the spool ------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class WriteSpool(Action):
    """Write a turn in one transaction. If that fails, perform no later action of the turn.
    Answered by SpoolWritten after the last action of the turn, or by SpoolWriteFailed."""

    functions: Sequence[tuple[FunctionSpec, bytes]] = ()
    accepted: Sequence[Task] = ()
    redelivered: Sequence[Task] = ()
    fetched: Sequence[Task] = ()
    starts: Sequence[Task] = ()
    finished: Sequence[Task] = ()
    #: Numbers of unfinished tasks that are not needed any more.
    dropped: Sequence[int] = ()
    #: Numbers of tasks whose results are recorded. They may be written later.
    forgotten: Sequence[int] = ()


# -- to managers -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class RunTasks(Action):
    """Send tasks to a manager."""

    manager_id: str
    tasks: Sequence[Task]


@dataclasses.dataclass(frozen=True, slots=True)
class CancelTasks(Action):
    """Let a manager stop tasks. Comes before WriteSpool: what follows from it is written with the manager's answer."""

    manager_id: str
    task_ids: Sequence[str]


# -- to the blob store -------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class FetchPayloads(Action):
    """Download payloads. Each is answered by PayloadFetched or FetchFailed."""

    tasks: Sequence[Task]


@dataclasses.dataclass(frozen=True, slots=True)
class UploadResults(Action):
    """Upload results. Each is answered by ResultUploaded or UploadFailed, unless the session ends."""

    uploads: Sequence[tuple[Task, BlobGrant]]


# -- to the cloud, or to the futures of an engine ----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class AcknowledgeTasks(Action):
    """Report that tasks were accepted."""

    tasks: Sequence[Task]


@dataclasses.dataclass(frozen=True, slots=True)
class GiveCredit(Action):
    """Permit the cloud to send more tasks."""

    tasks: int


@dataclasses.dataclass(frozen=True, slots=True)
class ReportTransitions(Action):
    """Report states of tasks that have not finished."""

    transitions: Sequence[TaskTransition]


@dataclasses.dataclass(frozen=True, slots=True)
class ReportResults(Action):
    """Report results."""

    tasks: Sequence[Task]


@dataclasses.dataclass(frozen=True, slots=True)
class RequestUploads(Action):
    """Request permission to upload large results. Each is answered by BlobGranted, unless the session ends."""

    tasks: Sequence[Task]
