"""Events: what happened, as the manager's shell reports it to the core. Messages of the agent are events, too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from farcall_common.errors import ErrorRecord
from farcall_common.graphs import Graph
from farcall_common.wire import TaskState
from farcall_endpoint.contracts.agent_manager import (
    CallNews,
    CancelTasks,
    CopyFiles,
    Died,
    FileContent,
    Limits,
    ManagerGone,
    NodeFile,
    Prewarm,
    ReadOutput,
    RefuseCalls,
    ResultsTaken,
    ReturnTasks,
    Stop,
    TakeCalls,
    TaskOrder,
    ValkeyAnswered,
)
from farcall_endpoint.contracts.manager_worker import BlocksAnswer, CallOrder, Packet
from farcall_endpoint.contracts.output import Printed
from farcall_endpoint.host.shared_memory import Body, Frame


class Instant(NamedTuple):
    """A moment, in seconds of the monotonic clock and of the epoch."""

    mono: float
    epoch: float


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How a call has ended.

    :param parts: the buffers of its value; or what its function raised, for an engine.
    :param is_retried: whether the options of the call retry its error.
    :param output: the tails of what it printed.
    :param pid: process id of its worker; 0 if none ran it.
    :param node: host name of another manager, if that ran it.
    """

    state: TaskState
    error: dict[str, Any] | None = None
    parts: Sequence[Frame] = ()
    started_at: float | None = None
    ended_at: float | None = None
    is_retried: bool = False
    output: tuple[Printed, bytes] | None = None
    pid: int = 0
    node: str = ""

    @property
    def result(self) -> Frame:
        """The value, if it is in one buffer."""
        return self.parts[0] if self.parts else b""


class Owner(Protocol):
    """Owner of calls: a running graph, or a task that waits for its calls. It gets their outcomes, not the agent.

    The core calls these methods while it handles events. The owner records them, and acts when the core asks it to.

    ``sums``: use of its calls. ``above``: the owner of this owner's own task, if that task is a call.
    """

    sums: Sums

    @property
    def above(self) -> Owner | None: ...

    def touch(self) -> None:
        """Record a change in the owner's calls, or in calls that these have made."""

    def started(self, job: Job, at: float) -> None:
        """Record that a call has been running for a while, since the epoch second ``at``."""

    def ran(self, job: Job, started_at: float, ended_at: float, pid: int) -> None:
        """Record the run of a call between these epoch seconds in a worker that is gone. Its outcome follows."""

    def ended(self, job: Job, outcome: Outcome) -> None:
        """Record that a call has ended, or was cancelled or refused."""

    def died(self, job: Job, died: Died) -> None:
        """Record that the worker of a call died. The owner decides whether the call may be started again."""


class Sums:
    """Use of an owner's calls by the manager's clock, with the calls that these have made. ``run_s``: seconds for which
    ended calls had a place; ``calls``: number of calls that have had a place. ``is_over``: the owner has ended, and its
    calls do not count any more."""

    __slots__ = ("calls", "is_over", "run_s")

    def __init__(self) -> None:
        self.run_s = 0.0
        self.calls = 0
        self.is_over = False

    def add(self, run_s: float, calls: int = 1) -> None:
        """Add the seconds for which calls had a place."""
        self.run_s += run_s
        self.calls += calls


class Callees(msgspec.Struct, frozen=True):
    """Functions, graph and environments of a task with callees, besides its own function.

    :param functions: the bodies of the callees, by hash.
    :param graph: the payload of the task, if it is a graph.
    :param refusals: reasons why the submitter may not use environments of the graph's stages, by environment key.
    :param environments: keys of the environments that a callee may run in, by its hash; empty key: the endpoint's own.
    """

    functions: Mapping[str, Frame]
    graph: Graph | None = None
    refusals: Mapping[str, ErrorRecord] = {}
    environments: Mapping[str, frozenset[str]] = {}


class Job(msgspec.Struct, frozen=True):
    """A task, or a call of one, with its user bytes.

    :param refusal: why its submitter may not use the environment that it names.
    :param callees: what a task has that calls other functions.
    :param call: of a graph, or of a task that runs; with its ``inputs``, as they follow the payload, and how many bytes
        they add to its packet.
    :param depth: how many tasks wait for this one, each for the next: 0, or more for a call of a task that runs.
    :param owner: gets the outcome of a call; None for a task, whose outcome the agent gets.
    :param files: of a task, those that it reads from copies of the node, until it has links to them; ``read_dir``: the
        directory of these, empty if it has none.
    """

    order: TaskOrder
    function: Frame
    payload: Frame
    refusal: ErrorRecord | None = None
    callees: Callees | None = None
    call: CallOrder | None = None
    inputs: tuple[Frame, ...] = ()
    input_bytes: int = 0
    depth: int = 0
    owner: Owner | None = None
    files: tuple[NodeFile, ...] = ()
    read_dir: str = ""


class _Event(msgspec.Struct, frozen=True):  # quicker to make than a dataclass
    pass


class TasksReceived(_Event, frozen=True):
    """The agent sent tasks. ``limits``: of the endpoint, for calls that these make."""

    jobs: Sequence[Job]
    limits: Limits | None = None


class CallNewsReceived(_Event, frozen=True):
    """News of calls that other managers run, with the bodies of the message."""

    news: CallNews
    bodies: Sequence[Frame]


class PacketsReceived(_Event, frozen=True):
    """A worker sent packets, each with its body."""

    worker_id: int
    packets: Sequence[tuple[Packet, Body]]


class MalformedReceived(_Event, frozen=True):
    """A worker sent bytes that are not a packet."""

    worker_id: int
    reason: str


class Recalled(_Event, frozen=True):
    """A Recall was performed: the last ``revoked`` tasks of the worker will not start; at most one other is left."""

    worker_id: int
    revoked: int


class WorkerDied(_Event, frozen=True):
    """A worker's process ended; all its packets were reported before. Its last ``revoked`` tasks did not start."""

    worker_id: int
    revoked: int
    reason: str
    stdout_tail: str = ""
    stderr_tail: str = ""
    output: tuple[Printed, bytes] | None = None


class ProcessesLeft(_Event, frozen=True):
    """Tasks of another submitter than the owner have ended, and processes that they started in this worker have not.
    ``computes``: the worker itself has computed while it ran no task."""

    worker_id: int
    computes: bool = False


class CpusMeasured(_Event, frozen=True):
    """Use of the node's processors. ``pressure``: fraction of the time in which some process waited for a processor.
    ``processors``: their number; 0: not known. ``demands``: by latency class, the mean number of its workers' threads
    that ran or waited for a processor. ``actuator``: name of the backend that sets the shares of these classes;
    ``problem``: its last failure."""

    pressure: float = 1.0
    actuator: str = ""
    problem: str = ""
    processors: int = 0
    demands: Mapping[str, float] = {}


class EnvironmentProgress(_Event, frozen=True):
    """Current step of the preparation of an environment, for display."""

    key: str
    text: str


class EnvironmentReady(_Event, frozen=True):
    """Workers can be started in an environment. ``forkable``: it has a template; a fork occupies ``memory_bytes``. The
    event is repeated when these values change."""

    key: str
    forkable: bool = False
    memory_bytes: int | None = None


class EnvironmentFailed(_Event, frozen=True):
    """An environment cannot be prepared; ``record`` is the error of its tasks. With ``record.retryable``, it is worth
    another try."""

    key: str
    record: ErrorRecord


class EnvironmentsCrowded(_Event, frozen=True):
    """The cache of environments has more than its limit, all of it in use."""


class EnvironmentGone(_Event, frozen=True):
    """The prepared files of an environment are gone. The environment must be prepared again."""

    key: str


class CopyEnded(_Event, frozen=True):
    """A copy of a file is complete; or the ``problem``. ``is_local``: with this node, so that no other source helps;
    ``reached``: whether there was a connection to the source."""

    content: FileContent
    problem: str = ""
    is_local: bool = False
    reached: bool = True


class Linked(_Event, frozen=True):
    """The task of this number has links to its files in ``read_dir``; or the ``problem``, with the copies that were
    ``lost`` because something has changed them."""

    number: int
    read_dir: str = ""
    problem: str = ""
    lost: tuple[FileContent, ...] = ()


class BlocksServed(_Event, frozen=True):
    """The answer to what a task of a worker wants of blocks."""

    worker_id: int
    task_id: str
    packet: BlocksAnswer
    body: tuple[Frame, ...]


class LimitExceeded(_Event, frozen=True):
    """A running task exceeds a limit; ``record`` is the error that it fails with. ``task_id`` is empty if the worker
    itself does: while it starts, or as it is ended for an invalid message."""

    worker_id: int
    task_id: str
    record: ErrorRecord


class Terminated(_Event, frozen=True):
    """The manager must end now, for a reason that was not reported to the agent yet."""

    reason: str


class AgentLost(_Event, frozen=True):
    """The agent is gone."""


Event = (
    PacketsReceived
    | TasksReceived
    | TakeCalls
    | RefuseCalls
    | CallNewsReceived
    | ManagerGone
    | ResultsTaken
    | ValkeyAnswered
    | Recalled
    | WorkerDied
    | EnvironmentProgress
    | EnvironmentReady
    | EnvironmentFailed
    | EnvironmentGone
    | EnvironmentsCrowded
    | Prewarm
    | CopyFiles
    | CopyEnded
    | Linked
    | BlocksServed
    | CancelTasks
    | ReturnTasks
    | ReadOutput
    | ProcessesLeft
    | CpusMeasured
    | LimitExceeded
    | MalformedReceived
    | Stop
    | Terminated
    | AgentLost
)
