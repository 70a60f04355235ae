"""Actions: instructions of the agent's core to its shell, in the order in which they are performed.

The tasks in them belong to the core: the shell reads them, and changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from farcall_common.environments import Environment
from farcall_common.event_log import UserBytes
from farcall_common.wire import BlobGrant, FunctionSpec, TaskTransition
from farcall_endpoint.agent.core.replicas import CopyOrder
from farcall_endpoint.agent.core.tasks import Kept, Task
from farcall_endpoint.contracts.agent_manager import CallNews, ManagerGone, RefuseCalls, RunCalls, TakeCalls
from farcall_endpoint.contracts.agent_manager import CancelTasks as CancelCalls
from farcall_endpoint.files.orders import Order

CallMessage = TakeCalls | RefuseCalls | RunCalls | CallNews | CancelCalls | ManagerGone
"""Messages from the agent to a manager about function calls of graphs and of running tasks."""


class Action(msgspec.Struct, frozen=True):
    """Base class of all actions."""


# -- to the spool ------------------------------------------------------------------------------------------------------


class WriteSpool(Action, frozen=True):
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
    #: Tasks that wait for a retry, and tasks that were retried before and have ended now.
    retried: Sequence[Task] = ()
    #: Tasks that succeeded, and whose files are stored before that is reported: their ``kept`` result is written.
    storing: Sequence[Task] = ()


# -- to the store of output --------------------------------------------------------------------------------------------


class KeepOutput(Action, frozen=True):
    """Keep the output of attempts that have ended, before their results are reported. May fail: then it is lost."""

    outputs: Sequence[Kept]


# -- to managers -------------------------------------------------------------------------------------------------------


class RunTasks(Action, frozen=True):
    """Send tasks to a manager."""

    manager_id: str
    tasks: Sequence[Task]


class CancelTasks(Action, frozen=True):
    """Let a manager stop tasks. Comes before WriteSpool: what follows from it is written with the manager's answer."""

    manager_id: str
    task_ids: Sequence[str]


class ReturnTasks(Action, frozen=True):
    """Let a manager give back tasks that have not begun. What follows from it comes with the manager's answer."""

    manager_id: str
    task_ids: Sequence[str]


class Prewarm(Action, frozen=True):
    """Let a manager keep ``count`` workers of an environment warm; with ``retry`` also if it has just failed."""

    manager_id: str
    environment: Environment
    count: int
    retry: bool = False


class PassOn(Action, frozen=True):
    """Send a manager something about calls of graphs and running tasks, with bodies that come from another one. Comes
    before WriteSpool: the spool knows nothing of them."""

    manager_id: str
    message: CallMessage
    bodies: UserBytes


class CopyFiles(Action, frozen=True):
    """Let a manager copy files from other managers, or from the endpoint's directory. It reports in FilesReported."""

    manager_id: str
    copies: Sequence[CopyOrder]


# -- to the transfer process -------------------------------------------------------------------------------------------


class MoveFiles(Action, frozen=True):
    """Give orders to the transfer process. Its reports come as TransfersReported or TransfersLost."""

    orders: Sequence[Order]


# -- to the log --------------------------------------------------------------------------------------------------------


class LogSigner(Action, frozen=True):
    """Log who has signed a function that may run for that."""

    name: str
    function_hash: str
    principals: str


class LogFiles(Action, frozen=True):
    """Log which files could not be moved."""

    messages: Sequence[str]


# -- to the blob store -------------------------------------------------------------------------------------------------


class FetchPayloads(Action, frozen=True):
    """Download payloads. Each is answered by PayloadFetched or FetchFailed."""

    tasks: Sequence[Task]


class UploadResults(Action, frozen=True):
    """Upload results. Each is answered by ResultUploaded or UploadFailed, unless the session ends."""

    uploads: Sequence[tuple[Task, BlobGrant]]


# -- to the cloud, or to the futures of an engine ----------------------------------------------------------------------


class AcknowledgeTasks(Action, frozen=True):
    """Report that tasks were accepted."""

    tasks: Sequence[Task]


class GiveCredit(Action, frozen=True):
    """Permit the cloud to send more tasks."""

    tasks: int


class ReportTransitions(Action, frozen=True):
    """Report states of tasks that have not finished."""

    transitions: Sequence[TaskTransition]


class ReportResults(Action, frozen=True):
    """Report results."""

    tasks: Sequence[Task]


class RequestUploads(Action, frozen=True):
    """Request permission to upload large results. Each is answered by BlobGranted, unless the session ends."""

    tasks: Sequence[Task]
