"""Actions: instructions of the manager's core to its shell, which performs them in order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from farcall_common.environments import Environment
from farcall_endpoint.contracts.agent_manager import (
    CallNews,
    CallsDropped,
    CallsTaken,
    Ending,
    FileContent,
    FilesReported,
    NodeFile,
    Progress,
    RunningOutput,
    ValkeyRequested,
    WantedOutput,
)
from farcall_endpoint.contracts.manager_worker import BlocksAnswer, BlocksRequest, CallEnded, Run, ValkeyAnswer
from farcall_endpoint.host.shared_memory import Frame


class _Action(msgspec.Struct, frozen=True):  # quicker to make than a dataclass
    pass


class Launch(_Action, frozen=True):
    """Start a worker on a free slot, for tasks of one submitter in one environment (None: the endpoint's own Python),
    and of one latency class (empty: batch work). Answered by a Ready packet or by WorkerDied."""

    worker_id: int
    slot: int
    submitter: str = ""
    environment: Environment | None = None
    target: str = ""


class Adopt(_Action, frozen=True):
    """A worker of batch work runs tasks of a latency class from now on."""

    worker_id: int
    target: str


class ShareCpus(_Action, frozen=True):
    """Give latency classes, and batch work, these weights. ``running``: how many tasks of each run now."""

    weights: Mapping[str, float]
    running: Mapping[str, int]


class Prepare(_Action, frozen=True):
    """Prepare an environment on this node. Answered by EnvironmentReady or EnvironmentFailed."""

    environment: Environment


class Release(_Action, frozen=True):
    """End the template of an environment: none of its workers is wanted any more."""

    key: str


class Send(_Action, frozen=True):
    """Send tasks to a worker. If that fails, kill the worker."""

    worker_id: int
    packet: Run
    body: tuple[Frame, ...]


class Connect(_Action, frozen=True):
    """Connect two workers by a direct edge of this number. If that fails, what one sends is not delivered. One that is
    to be connected with itself gets what its arenas need to be returned."""

    first: int
    second: int
    number: int


class Answer(_Action, frozen=True):
    """Send a worker how a call of its task has ended, the address of Valkey, or blocks, when its socket has room. A
    worker that ends meanwhile does not hear of it."""

    worker_id: int
    packet: CallEnded | ValkeyAnswer | BlocksAnswer
    body: tuple[Frame, ...]


class Recall(_Action, frozen=True):
    """Revoke the tasks that a worker has not started, and report its packets. If tasks were revoked, send Sync, which
    the worker answers with Synced. Answered by Recalled."""

    worker_id: int


class Kill(_Action, frozen=True):
    """Kill a worker with all its descendants. Answered by WorkerDied. ``reason`` is for the log."""

    worker_id: int
    reason: str = ""


class Report(_Action, frozen=True):
    """Send progress to the agent, with the results that it refers to."""

    progress: Progress
    results: Sequence[Frame]


class Pass(_Action, frozen=True):
    """Send the agent what it passes on to another manager (calls, or how they have ended), a request for Valkey, news
    of copies of files, or whose worker is about to be ended."""

    message: CallsTaken | CallNews | CallsDropped | ValkeyRequested | FilesReported | Ending
    bodies: tuple[Frame, ...] = ()


class ServeBlocks(_Action, frozen=True):
    """Give the task of a worker blocks of its submitter, or delete them. ``payer``: the account that its turns
    count for. Answered by BlocksServed."""

    worker_id: int
    submitter: str
    packet: BlocksRequest
    payer: str


class Copy(_Action, frozen=True):
    """Get a copy of a file: from another manager (``host:port``), or from ``path``, where the endpoint's copy is, if
    ``source`` is empty. Answered by CopyEnded."""

    content: FileContent
    source: str
    path: str


class Link(_Action, frozen=True):
    """Make a directory with links to copies, for the task of this number. Answered by Linked."""

    number: int
    submitter: str
    files: Sequence[NodeFile]


class Unlink(_Action, frozen=True):
    """Remove the directory with links of a task."""

    number: int
    submitter: str


class RemoveCopies(_Action, frozen=True):
    """Remove copies of files."""

    contents: Sequence[FileContent]


class Warn(_Action, frozen=True):
    """Log a warning."""

    text: str


class ReadGraph(msgspec.Struct, frozen=True):
    """Known output of a graph, without the output of the call that the worker runs (None: no worker is read). The
    call's output begins at these offsets of both streams."""

    known: RunningOutput
    worker_id: int | None = None
    stdout_base: int = 0
    stderr_base: int = 0


class ReadStreams(_Action, frozen=True):
    """Read output, and send the agent an OutputRead: for each task, the worker that runs it (None: it does not run),
    and whether its output may be read. A worker that has sent packets meanwhile may run another task by now.
    ``graphs``: the same for graphs."""

    request_id: str
    max_bytes: int
    tasks: Sequence[tuple[WantedOutput, int | None, bool]]
    graphs: Sequence[ReadGraph] = ()


class Leave(_Action, frozen=True):
    """Send the manager's last message. With ``failed``, it could not start workers."""

    reason: str
    failed: bool


FileAction = Copy | Link | Unlink | RemoveCopies
Action = (
    Launch
    | Adopt
    | ShareCpus
    | Prepare
    | Release
    | Send
    | Connect
    | Answer
    | Recall
    | Kill
    | Report
    | Pass
    | FileAction
    | ServeBlocks
    | Warn
    | ReadStreams
    | Leave
)
