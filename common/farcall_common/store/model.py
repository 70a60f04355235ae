"""Values of the stores' ports. No I/O, no SQL, no Redis.

Tasks are structures of msgspec, because there are many of them: a frozen dataclass takes a dozen times as long to make.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import enum
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from farcall_common.environments import Environment
from farcall_common.errors import ErrorRecord, QuotaExceeded
from farcall_common.fairness import LANE, payer_of
from farcall_common.graphs import StageState
from farcall_common.progress import Progress
from farcall_common.qos_report import InfeasibleTarget, QosReport
from farcall_common.staging import Staging
from farcall_common.task_options import TaskOptions
from farcall_common.wire.messages import OutputPiece, OutputWanted
from farcall_common.wire.states import Reporter, TaskState
from farcall_common.worker_share import WorkerShare

PIECES: Final = "piece/"
"""Keys of blobs that are pieces of files begin with it: they are kept for a day at most."""


@dataclasses.dataclass(frozen=True)
class BlobRef:
    """User bytes that live in S3: key within the deployment's bucket, size in bytes, SHA-256 in hex."""

    blob_key: str
    size_bytes: int
    sha256: str


class Quotable(enum.StrEnum):
    """Objects whose number per owner is limited; of functions, each version counts."""

    ACCOUNT = "service accounts"
    ALIAS = "aliases"
    CONTAINER = "containers"
    ENDPOINT = "endpoints"
    FUNCTION = "functions and versions of them"
    MEMBER = "members of this team"
    SHARE = "shares of this object"
    TEAM = "teams"
    TOKEN = "tokens"  # noqa: S105 - a kind


@dataclasses.dataclass(frozen=True)
class Quota:
    """A limit to check before an object of an owner is added; the owner of a share is its object, of a member its team.
    ``most_bytes``, and ``more_bytes`` of the new one, are for functions; ``but`` is the name of the alias, the member
    or the grantee of the share that is not counted, because it is replaced."""

    kind: Quotable
    owner_id: str
    limit: int
    more_bytes: int = 0
    most_bytes: int = 0
    but: str = ""

    def check(self, count: int, size_bytes: int = 0) -> None:
        """:raises QuotaExceeded: if an owner with ``count`` objects of ``size_bytes`` may not add this one."""
        if count >= self.limit:
            raise QuotaExceeded(f"You have {count} {self.kind} already; {self.limit} are allowed.")
        if self.most_bytes and size_bytes + self.more_bytes > self.most_bytes:
            raise QuotaExceeded(
                f"Your functions have {size_bytes} bytes; {self.more_bytes} more exceed the limit of {self.most_bytes}."
            )


@dataclasses.dataclass(frozen=True)
class OpenTask:
    """An open task as the reconciler reads it. ``added_in`` is the transaction that added it: later ones have greater
    numbers, independent of clocks."""

    task_id: str
    endpoint_id: str
    added_in: int
    state: TaskState
    attempt: int
    submitted_at: dt.datetime


#: The action of an audit entry about a refusal, which only the owner of the object reads: it names that owner.
FORBIDDEN: Final = "request.forbidden"


@dataclasses.dataclass(frozen=True)
class AuditEntry:
    """An entry of the audit log: ``action`` (like ``function.delete``) by ``identity_id``, on an object of
    ``owner_id``.

    ``detail`` is small and JSON, and never holds user bytes. ``audit_id`` is given by the store.
    """

    at: dt.datetime
    identity_id: str
    action: str
    object_id: str
    owner_id: str
    detail: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    audit_id: int = 0


#: Key in a function's metadata: its SSH signature.
SIGNATURE: Final = "ssh_signature"


@dataclasses.dataclass(frozen=True)
class ApiToken:
    """A token of ``identity_id``, which ``owner_id`` made: the same identity, or the owner of that service account.

    It permits operations with one of ``scopes``; on ``endpoints`` and ``functions`` only, unless those are None.
    ``last_used_at`` may be an hour old.
    """

    token_id: str
    identity_id: str
    owner_id: str
    name: str
    scopes: Sequence[str]
    created_at: dt.datetime
    expires_at: dt.datetime
    endpoints: Sequence[str] | None = None
    functions: Sequence[str] | None = None
    revoked_at: dt.datetime | None = None
    last_used_at: dt.datetime | None = None


@dataclasses.dataclass(frozen=True)
class ServiceAccount:
    """An identity for programs. It belongs to the person ``owner_id``, who names it."""

    account_id: str
    owner_id: str
    name: str
    created_at: dt.datetime


@dataclasses.dataclass(frozen=True)
class Action:
    """An action of Globus Flows: a request of ``owner_id`` that became ``tasks`` tasks; :meth:`task_ids` are their ids.

    An owner has one action of a ``request_id``; ``request_hash`` is the SHA-256 of the request in hex. ``monitor_by``
    and ``manage_by`` are the principals, as URNs, that may read and manage it. Its open tasks are cancelled at
    ``deadline``. ``release_after_s`` after its end it is forgotten.
    """

    action_id: str
    owner_id: str
    request_id: str
    request_hash: str
    tasks: int
    created_at: dt.datetime
    release_after_s: float
    label: str | None = None
    monitor_by: Sequence[str] = ()
    manage_by: Sequence[str] = ()
    deadline: dt.datetime | None = None

    def task_ids(self) -> Sequence[str]:
        """The ids of its tasks, in the order of the request: the time in the id of the action, a UUIDv7, and bits that
        are the same each time."""
        found = []
        for number in range(self.tasks):
            bits = hashlib.sha256(f"{self.action_id} {number}".encode()).hexdigest()
            found.append(f"{self.action_id[:19]}8{bits[:3]}-{bits[3:15]}")
        return found


@dataclasses.dataclass(frozen=True)
class Function:
    """A version of a registered function. ``body`` is the packed function buffer, opaque to the cloud, ``body_hash``
    its SHA-256. Name, description and sharing belong to the function; body and metadata to the version, which never
    changes."""

    function_id: str
    owner_id: str
    name: str
    body: bytes
    body_hash: str
    version: int = 1
    description: str | None = None
    public: bool = False
    metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    created_at: dt.datetime | None = None


class FunctionBody(NamedTuple):
    """Function as an endpoint receives it. ``signature`` is empty if the function is not signed."""

    name: str
    body: bytes
    signature: str = ""


@dataclasses.dataclass(frozen=True)
class FunctionAlias:
    """An owner's name for a function: for one version of it, or with None for the newest."""

    owner_id: str
    name: str
    function_id: str
    version: int | None = None


@dataclasses.dataclass(frozen=True)
class Container:
    """A registered environment: an image as its ``technology`` (docker, singularity, ...) refers to one, or packages to
    install (``uv``). ``preload``: modules that templates import; None: learned."""

    container_id: str
    owner_id: str
    name: str
    technology: str
    image: str
    description: str | None = None
    created_at: dt.datetime | None = None
    requirements: tuple[str, ...] = ()
    preload: tuple[str, ...] | None = None

    def environment(self) -> Environment:
        """The definition, as tasks have it.

        :raises ValueError: if it is none.
        """
        return Environment.of(
            {
                "type": self.technology,
                "location": self.image,
                "requirements": self.requirements,
                "preload": self.preload,
                "name": "" if self.name == self.container_id else self.name,
            }
        )


@dataclasses.dataclass(frozen=True)
class EnvironmentState:
    """An environment on a node of an endpoint, as its agent reports it.

    :param key: identifies it, as :attr:`farcall_common.environments.Environment.key`.
    :param label: its name, or technology and place, for people.
    :param warm: its idle workers there; ``busy``: those with a task; ``starting``: those that start.
    :param forkable: whether there is a template that workers are forked from.
    :param text: what happens, for people, since ``since`` (epoch seconds).
    :param problem: why it cannot be started.
    :param retry_at: when one that has failed may be tried again, in epoch seconds.
    """

    key: str
    label: str
    type: str
    node: str
    warm: int = 0
    busy: int = 0
    starting: int = 0
    forkable: bool = False
    text: str = ""
    since: float | None = None
    problem: str = ""
    retry_at: float | None = None


@dataclasses.dataclass(frozen=True)
class GraphState:
    """Stages of a task that runs on an endpoint, as its agent reports them: some at most, and the ``calls`` of all,
    with those that have ``ended``."""

    task_id: str
    stages: tuple[StageState, ...]
    calls: int = 0
    ended: int = 0


@dataclasses.dataclass(frozen=True)
class RunningProgress:
    """How far a task is that runs on an endpoint, as its agent reports it."""

    task_id: str
    progress: Progress


@dataclasses.dataclass(frozen=True)
class RunningStaging:
    """Files of a task that its endpoint copies, as its agent reports them."""

    task_id: str
    staging: Staging


@dataclasses.dataclass(frozen=True)
class EndpointStatus:
    """The last report of an agent: numbers of managers, workers, tasks and blocks, its environments by node, its
    problem, if it has one, graphs that run, the progress of tasks that run, files of tasks that it copies, and latency
    targets that it cannot meet. ``reported_at`` is when its forwarder received that, in epoch seconds; None before the
    first report."""

    managers: int = 0
    total_workers: int = 0
    idle_workers: int = 0
    pending_tasks: int = 0
    outstanding_tasks: int = 0
    problem: str = ""
    blocks: int = 0
    pending_blocks: int = 0
    environments: tuple[EnvironmentState, ...] = ()
    reported_at: float | None = dataclasses.field(default=None, compare=False)
    #: Only for those who may see the task.
    graphs: tuple[GraphState, ...] = ()
    #: Likewise.
    progress: tuple[RunningProgress, ...] = ()
    #: Likewise.
    staging: tuple[RunningStaging, ...] = ()
    #: Only for their submitters.
    infeasible: tuple[InfeasibleTarget, ...] = ()
    #: Whether it refuses tasks with such a target.
    refuses_infeasible: bool = False

    def age_s(self, *, now: float) -> float | None:
        """Seconds since the report; None if there was none. ``now`` is in epoch seconds."""
        return None if self.reported_at is None else max(0.0, now - self.reported_at)


@dataclasses.dataclass(frozen=True)
class SpoolMark:
    """The last known spool of an endpoint's agent, and its highest known generation."""

    spool_id: str
    generation: int


@dataclasses.dataclass(frozen=True)
class Presence:
    """Whether an endpoint is online, as its forwarder reports it. The store adds the time. Without ``qos``, the last
    report of latency targets stays."""

    endpoint_id: str
    online: bool
    status: EndpointStatus
    qos: QosReport | None = None


@dataclasses.dataclass(frozen=True)
class Endpoint:
    """A registered endpoint. ``allowed_functions`` is None when any function may run there."""

    endpoint_id: str
    owner_id: str
    name: str
    display_name: str | None = None
    description: str | None = None
    public: bool = False
    multi_user: bool = False
    allowed_functions: Sequence[str] | None = None
    metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    created_at: dt.datetime | None = None
    #: The last heartbeat that reached the database.
    seen_at: dt.datetime | None = None
    #: The age of that at the time of reading, by the store's clock; reads for a submit do not have it.
    silent_s: float | None = dataclasses.field(default=None, compare=False)
    online: bool = False
    status: EndpointStatus = dataclasses.field(default_factory=EndpointStatus)
    #: Of the credential with which its agent may connect; empty if it has none.
    credential_id: str = ""
    #: What each task has there, as the agent reported when it last connected.
    worker_share: WorkerShare = dataclasses.field(default_factory=WorkerShare)


class Right(enum.IntEnum):
    """What someone may do with an endpoint or a function; each right includes the lesser ones. Only the owner has OWN;
    it cannot be given."""

    SEE = 1
    """Read what it is: status, settings, code."""
    USE = 2
    """Run it, or run tasks there."""
    MANAGE = 3
    """Change it, list and cancel its tasks, share it with others."""
    OWN = 4
    """Delete it, connect its agent, name managers."""

    @property
    def word(self) -> str:
        """The right as people write it: ``see``, ``use``, ``manage``, ``own``."""
        return self.name.lower()


class ObjectKind(enum.StrEnum):
    """Kinds of objects that can be shared."""

    ENDPOINT = "endpoint"
    FUNCTION = "function"


@dataclasses.dataclass(frozen=True)
class Share:
    """A right to an object that its owner or a manager gave to ``grantee``: ``identity ID``, ``name user@lab.org``,
    ``group ID`` or ``team ID``. It ends at ``ends_at``, if that is set."""

    share_id: str
    kind: ObjectKind
    object_id: str
    grantee: str
    right: Right
    granted_by: str
    granted_at: dt.datetime
    ends_at: dt.datetime | None = None
    note: str = ""
    #: Limits of each person who uses an endpoint by this share, as :class:`~farcall_common.store.allowance.Allowance`
    #: writes them.
    allowance: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class SharedObject:
    """A share as its grantee sees it, with the name and the owner of the object."""

    share: Share
    name: str
    owner_id: str


@dataclasses.dataclass(frozen=True)
class Team:
    """People that an owner has put together, to share objects with all of them."""

    team_id: str
    owner_id: str
    name: str
    created_at: dt.datetime


@dataclasses.dataclass(frozen=True)
class TeamMember:
    """A member of a team: ``identity ID`` or ``name user@lab.org``."""

    team_id: str
    member: str
    added_at: dt.datetime


@dataclasses.dataclass(frozen=True)
class EndpointKey:
    """A CURVE public key (Z85) with which an endpoint's agent may connect."""

    public_key: str
    added_at: dt.datetime


@dataclasses.dataclass(frozen=True)
class Withdrawal:
    """A right to use a function or an endpoint that ``identity_id`` withdrew ``at`` a time. The tasks of ``owner_ids``
    keep it. What is still to be done for it: open tasks without the right are cancelled (``cancels_tasks``), and the
    session of the endpoint's agent ends once (``ends_sessions``)."""

    object_id: str
    identity_id: str
    owner_ids: Sequence[str]
    at: dt.datetime
    cancels_tasks: bool = True
    ends_sessions: bool = False


class PeerKind(enum.StrEnum):
    """Role of a CURVE key."""

    AGENT = "agent"
    CLIENT = "client"


@dataclasses.dataclass(frozen=True)
class PeerKey:
    """A CURVE public key (Z85) and its subject: an endpoint id (agent) or an owner id (client)."""

    public_key: str
    kind: PeerKind
    subject: str


class Task(msgspec.Struct, frozen=True):
    """A task in the database: the write-ahead record, and later its result.

    Exactly one of ``payload`` and ``payload_ref`` is set, none after a dead letter was discarded. ``result`` and
    ``result_ref`` are set by success, ``error`` otherwise. ``attempt`` counts dispatches to the endpoint, from
    1; 0 = never dispatched.
    """

    task_id: str
    task_group_id: str
    owner_id: str
    endpoint_id: str
    function_id: str
    function_hash: str
    payload: bytes | None
    payload_ref: BlobRef | None = None
    options: TaskOptions = TaskOptions()
    state: TaskState = TaskState.RECEIVED
    attempt: int = 0
    result: bytes | None = None
    result_ref: BlobRef | None = None
    error: ErrorRecord | None = None
    details: Mapping[str, Any] = msgspec.field(default_factory=dict)
    submitted_at: dt.datetime | None = None
    finished_at: dt.datetime | None = None
    #: Epoch seconds, as far as known, for the latency breakdown of the funcX paper (HPDC 2020, figure 4). API clock:
    #: submitted_at, enqueued_at. Forwarder clock: leased_at, accepted_at (the agent's receipt), returned_at (its
    #: result), recorded_at. Worker clock: started_at, ended_at. Only differences within one clock mean anything.
    timings: Mapping[str, float] = msgspec.field(default_factory=dict)
    #: Equal for equal calls. Set on a task that ran, or will run, and whose success is memoized.
    memo_key: str | None = None
    #: The submitter's span in W3C trace context; the parent of the function's span.
    traceparent: str | None = None
    #: Of the function; ``function_hash`` is this version's.
    function_version: int = 1
    #: The task that this one retries.
    retry_of: str | None = None
    #: Name of the submitter in queues and quotas, if that is not ``owner_id``. A task of a service account counts for
    #: the account's creator; at endpoints of that creator the name is ``creator/account``: it has turns of its own.
    quota_key: str | None = None


class UsageBy(enum.StrEnum):
    """What usage is summed by. ``identity`` is the submitter; ``account`` that of the endpoint's scheduler."""

    DAY = "day"
    IDENTITY = "identity"
    ENDPOINT = "endpoint"
    FUNCTION = "function"
    ACCOUNT = "account"


@dataclasses.dataclass(frozen=True)
class Usage:
    """Sums over ended tasks; fields that the sums are not made by are None. ``failed`` ended neither as success nor
    cancelled. Seconds count the last attempt of each task, with the runs before it that raised and were retried:
    ``core_s`` and ``gpu_s`` times the cores and accelerators that it had to itself. Those of a graph are the seconds of
    its calls together; ``stages`` is how many calls of graphs ran."""

    tasks: int
    failed: int
    wall_s: float
    core_s: float
    gpu_s: float
    day: dt.date | None = None
    owner_id: str | None = None
    endpoint_id: str | None = None
    function_id: str | None = None
    account: str | None = None
    stages: int = 0


@dataclasses.dataclass(frozen=True)
class TaskGroup:
    """Tasks of an owner that were submitted together: how many are in which state."""

    task_group_id: str
    created_at: dt.datetime
    states: Mapping[TaskState, int]


class TaskEvent(msgspec.Struct, frozen=True):
    """One transition: append-only history. ``detail`` is small and JSON."""

    task_id: str
    state: TaskState
    reporter: Reporter
    at: dt.datetime
    attempt: int = 0
    detail: Mapping[str, Any] = msgspec.field(default_factory=dict)


#: Larger payloads are not in the queue.
MAX_QUEUED_BYTES: Final = 4 * 1024


@dataclasses.dataclass(frozen=True)
class QueueMemory:
    """Memory of the queue's server; ``max_bytes`` is 0 if it is not known."""

    used_bytes: int
    max_bytes: int


def lane_of(task: Task | QueuedTask) -> str:
    """The name of a task's submitter in the queue: tasks with a latency target are in a lane of their own, as if they
    were another submitter's, so that they do not wait behind the others."""
    name, qos = task.quota_key or task.owner_id, task.options.qos
    return name + LANE if qos is not None and qos.has_target else name


class QueuedTask(msgspec.Struct, frozen=True):
    """A task in the queue: all that dispatching needs, with its payload if that is small, so that most dispatches read
    no database. It is in memory, which limits its size."""

    task_id: str
    task_group_id: str
    owner_id: str
    endpoint_id: str
    function_id: str
    function_hash: str
    payload: bytes | None
    options: TaskOptions
    payload_ref: BlobRef | None = None
    #: Dispatches that the database already knows; a rebuilt queue continues the count.
    attempt: int = 0
    submitted_at: float | None = None
    traceparent: str | None = None
    quota_key: str | None = None

    @classmethod
    def of(cls, task: Task) -> QueuedTask:
        """The queue's view of a task."""
        payload, at = task.payload, task.submitted_at
        return cls(
            task.task_id,
            task.task_group_id,
            task.owner_id,
            task.endpoint_id,
            task.function_id,
            task.function_hash,
            payload if payload is None or len(payload) <= MAX_QUEUED_BYTES else None,
            task.options,
            task.payload_ref,
            task.attempt,
            at.timestamp() if at else None,
            task.traceparent,
            task.quota_key,
        )

    @property
    def lane(self) -> str:
        """The name under which the queue has it; see :func:`lane_of`."""
        return lane_of(self)

    @property
    def payer_id(self) -> str:
        """The identity whose quotas it counts against."""
        return payer_of(self.quota_key or self.owner_id)

    @property
    def is_spilled(self) -> bool:
        """Whether the payload has to be read from the database when the task is dispatched."""
        return self.payload is None and self.payload_ref is None


class LeasedTask(msgspec.Struct, frozen=True):
    """A task handed to the forwarder for one attempt. Times are epoch seconds."""

    task: QueuedTask
    attempt: int
    enqueued_at: float
    leased_at: float
    cancel_requested: bool = False


class QueueState(enum.StrEnum):
    """State of a task in the queue."""

    QUEUED = "queued"
    LEASED = "leased"
    DONE = "done"
    UNKNOWN = ""


@dataclasses.dataclass(frozen=True)
class TokensTaken:
    """Tokens from a bucket; without any, the seconds until it has one."""

    tokens: int
    wait_s: float = 0.0


@dataclasses.dataclass(frozen=True)
class QueuePosition:
    """Position of a task in the queue. ``ahead`` tasks of its submitter leave before it, of those with a latency target
    or of the others; ``depth`` tasks of ``submitters`` submitters wait for the endpoint in all. ``limit`` is the most
    leased tasks of its submitter if it waits because there are so many, else 0."""

    state: QueueState
    ahead: int = 0
    depth: int = 0
    submitters: int = 0
    limit: int = 0


@dataclasses.dataclass(frozen=True)
class RunningLimit:
    """Limits of a submitter in the queue of an endpoint, from an allowance: the most leased tasks (None: no limit), and
    the weight of its turns (None: the weight of the agent's configuration)."""

    max_running: int | None = None
    weight: int | None = None


@dataclasses.dataclass(frozen=True)
class HeldLeases:
    """Leases to renew of an endpoint that is owned under ``fence``, and the spool of its agent (empty when
    disconnected)."""

    fence: int
    spool_id: str
    leases: Sequence[str] = ()


class TaskResult(msgspec.Struct, frozen=True):
    """The reported result of a task. Exactly one of result, result_ref and error is set."""

    task_id: str
    endpoint_id: str
    attempt: int
    state: TaskState
    reporter: Reporter
    result: bytes | None = None
    result_ref: BlobRef | None = None
    error: ErrorRecord | None = None
    details: Mapping[str, Any] = msgspec.field(default_factory=dict)
    timings: Mapping[str, float] = msgspec.field(default_factory=dict)
    task_group_id: str = ""
    owner_id: str = ""


@dataclasses.dataclass(frozen=True)
class MaintenanceResult:
    """Result of an endpoint's maintenance: expired leases whose tasks the caller has to end, and results that may not
    have reached the database."""

    reaped: Sequence[LeasedTask]
    outbox: Sequence[TaskResult]


@dataclasses.dataclass(frozen=True)
class SharedResults:
    """Recorded results that one forwarder shares with another, whose clients wait for them. ``urls`` are pre-signed
    GETs by blob key, ``recorded_at`` is epoch seconds."""

    results: Sequence[TaskResult]
    urls: Mapping[str, str]
    recorded_at: float


class OutputAsk(msgspec.Struct, frozen=True):
    """A request for output of tasks of one endpoint, on its way to the forwarder that owns it."""

    request_id: str
    endpoint_id: str
    tasks: tuple[OutputWanted, ...]
    max_bytes: int


class OutputAnswer(msgspec.Struct, frozen=True):
    """Output of tasks of one endpoint, on its way to the process of the API that requested it."""

    endpoint_id: str
    pieces: tuple[OutputPiece, ...]


class FileAsk(msgspec.Struct, frozen=True, tag=True):
    """A request for a piece of a file of an endpoint, on its way to the forwarder that owns it.

    :param forwarder_id: gets the answer.
    :param endpoint_id: has the file.
    :param submitter: the identity whose task reads it.
    :param max_bytes: of the piece; 0: only size and version are wanted.
    :param payer: the identity whose quotas the task uses; empty: the submitter.
    """

    request_id: str
    forwarder_id: str
    endpoint_id: str
    submitter: str
    path: str
    offset_bytes: int
    max_bytes: int
    payer: str = ""


class FileAnswer(msgspec.Struct, frozen=True, tag=True):
    """The answer to a :class:`FileAsk`, on its way to the forwarder that asked. ``reason``: why there is nothing."""

    request_id: str
    endpoint_id: str
    size_bytes: int = 0
    version: str = ""
    piece_bytes: int = 0
    sha256: str = ""
    reason: str = ""


FileMessage = FileAsk | FileAnswer


class CancelOutcome(enum.StrEnum):
    """Outcome of a cancellation in the queue."""

    REMOVED = "removed"
    """The task was waiting and is removed: it never runs."""
    REQUESTED = "requested"
    """The endpoint has the task, and is asked to stop it."""
    FINISHED = "finished"
    UNKNOWN = "unknown"


@dataclasses.dataclass(frozen=True)
class ForwarderInfo:
    """A live forwarder as it announces itself. ``address`` is ``tcp://host:port``, ``server_key`` Z85.

    ``idle_s`` is the number of seconds without a connection, by its monotonic clock; None while it has one.
    """

    forwarder_id: str
    address: str
    server_key: str
    connections: int = 0
    draining: bool = False
    idle_s: float | None = None
