"""The values that pass between the cloud's services and its stores. No I/O, no SQL, no Redis.

Tasks are structures of msgspec, because there are many of them: a frozen dataclass takes a dozen times as long to make.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import enum
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from farcall_common.errors import ErrorRecord, QuotaExceeded
from farcall_common.task_options import TaskOptions
from farcall_common.wire.states import Reporter, TaskState


@dataclasses.dataclass(frozen=True)
class BlobRef:
    """User bytes that live in S3: key within the deployment's bucket, size in bytes, SHA-256 in hex."""

    blob_key: str
    size_bytes: int
    sha256: str


class Quotable(enum.StrEnum):
    """What an identity may have so many of; of functions, each version counts."""

    ALIAS = "aliases"
    CONTAINER = "containers"
    ENDPOINT = "endpoints"
    FUNCTION = "functions and versions of them"


@dataclasses.dataclass(frozen=True)
class Quota:
    """What must hold before one more thing of an owner is added. ``most_bytes`` and ``more_bytes``, of the new one, are
    for functions; ``but`` is the name of an alias that is not counted, because it is about to be replaced."""

    kind: Quotable
    owner_id: str
    limit: int
    more_bytes: int = 0
    most_bytes: int = 0
    but: str = ""

    def check(self, count: int, size_bytes: int = 0) -> None:
        """:raises QuotaExceeded: if an owner with ``count`` things of ``size_bytes`` may not add this one."""
        if count >= self.limit:
            raise QuotaExceeded(f"You have {count} {self.kind} already; {self.limit} are allowed.")
        if self.most_bytes and size_bytes + self.more_bytes > self.most_bytes:
            raise QuotaExceeded(
                f"Your functions have {size_bytes} bytes; with {self.more_bytes} more it would be over "
                f"{self.most_bytes}."
            )


@dataclasses.dataclass(frozen=True)
class OpenTask:
    """What the reconciler sees of a task that has not ended. ``added_in`` is the transaction that added it: a later
    one has a greater number, whatever any clock says."""

    task_id: str
    endpoint_id: str
    added_in: int
    state: TaskState
    attempt: int
    submitted_at: dt.datetime


@dataclasses.dataclass(frozen=True)
class AuditEntry:
    """Who did what, when: ``action`` (like ``function.delete``) by ``identity_id``, to the object of ``owner_id``.

    ``detail`` is small and JSON, and never holds user bytes. ``audit_id`` is given by the store.
    """

    at: dt.datetime
    identity_id: str
    action: str
    object_id: str
    owner_id: str
    detail: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    audit_id: int = 0


@dataclasses.dataclass(frozen=True)
class Function:
    """A version of a registered function. ``body`` is the packed function buffer, opaque to the cloud, ``body_hash``
    its SHA-256. Name, description and sharing are the function's; body and metadata are the version's, for good."""

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


@dataclasses.dataclass(frozen=True)
class FunctionAlias:
    """An owner's name for a function: for one version of it, or with None for whichever is the newest."""

    owner_id: str
    name: str
    function_id: str
    version: int | None = None


@dataclasses.dataclass(frozen=True)
class Container:
    """A registered environment: an image as its ``technology`` (docker, singularity, ...) refers to one."""

    container_id: str
    owner_id: str
    name: str
    technology: str
    image: str
    description: str | None = None
    created_at: dt.datetime | None = None


@dataclasses.dataclass(frozen=True)
class EndpointStatus:
    """What an agent last reported: numbers of managers, workers and tasks, and what is wrong, if something is."""

    managers: int = 0
    total_workers: int = 0
    idle_workers: int = 0
    pending_tasks: int = 0
    outstanding_tasks: int = 0
    problem: str = ""


@dataclasses.dataclass(frozen=True)
class SpoolMark:
    """The spool of an endpoint's agent that was heard last, and the highest generation that was heard of it."""

    spool_id: str
    generation: int


@dataclasses.dataclass(frozen=True)
class Presence:
    """Whether an endpoint is there, as its forwarder knew it. The store notes when it was told."""

    endpoint_id: str
    online: bool
    status: EndpointStatus


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
    #: The last heartbeat that reached the database, and what it said.
    seen_at: dt.datetime | None = None
    #: The age of that at the time of reading, by the store's clock; only :meth:`Endpoints.get_endpoint` knows it.
    silent_s: float | None = dataclasses.field(default=None, compare=False)
    online: bool = False
    status: EndpointStatus = dataclasses.field(default_factory=EndpointStatus)


class PeerKind(enum.StrEnum):
    """What a CURVE key may connect as."""

    AGENT = "agent"
    CLIENT = "client"


@dataclasses.dataclass(frozen=True)
class PeerKey:
    """A CURVE public key (Z85) and whom it speaks for: an endpoint id (agent) or an owner id (client)."""

    public_key: str
    kind: PeerKind
    subject: str


class Task(msgspec.Struct, frozen=True):
    """A task as the database knows it: the write-ahead record, and later its end.

    Exactly one of ``payload`` and ``payload_ref`` is set, none after a dead letter was discarded. ``result`` and
    ``result_ref`` are set by success, ``error`` by any other end. ``attempt`` counts dispatches to the endpoint, from
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
    #: What makes two calls the same call. Set on a task that ran, or will, and whose success answers later calls.
    memo_key: str | None = None
    #: The span of whoever submitted it, as W3C's trace context writes one; the function runs below it.
    traceparent: str | None = None
    #: Of the function; ``function_hash`` is this version's.
    function_version: int = 1
    #: The task that this one is tried again for.
    retry_of: str | None = None


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


class QueuedTask(msgspec.Struct, frozen=True):
    """What the queue must hold to dispatch a task: with its payload if that is small, so that the database need not be
    asked. It is in memory, and as many tasks as may wait for one endpoint have to fit."""

    task_id: str
    task_group_id: str
    owner_id: str
    endpoint_id: str
    function_id: str
    function_hash: str
    payload: bytes | None
    options: TaskOptions
    payload_ref: BlobRef | None = None
    #: Dispatches that the database already knows of; a rebuilt queue goes on counting from here.
    attempt: int = 0
    submitted_at: float | None = None
    traceparent: str | None = None

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
        )

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
    """What the queue knows of a task."""

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
    """Position of a task in the queue. ``ahead`` tasks of its submitter leave before it; ``depth`` tasks of
    ``submitters`` submitters wait for the endpoint in all."""

    state: QueueState
    ahead: int = 0
    depth: int = 0
    submitters: int = 0


@dataclasses.dataclass(frozen=True)
class HeldLeases:
    """What the owner of an endpoint holds under ``fence``: the agent with this spool (empty when none is heard), and
    leases to be prolonged."""

    fence: int
    spool_id: str
    leases: Sequence[str] = ()


class TaskResult(msgspec.Struct, frozen=True):
    """The end of a task as reported. Exactly one of result, result_ref and error is set."""

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
    """What an upkeep of an endpoint's queue found: leases that have expired and leave their tasks to be ended, and ends
    that may not have reached the database."""

    reaped: Sequence[LeasedTask]
    outbox: Sequence[TaskResult]


@dataclasses.dataclass(frozen=True)
class SharedResults:
    """Recorded results that one forwarder shares with another, whose clients wait for them. ``urls`` are pre-signed
    GETs by blob key, ``recorded_at`` is epoch seconds."""

    results: Sequence[TaskResult]
    urls: Mapping[str, str]
    recorded_at: float


class CancelOutcome(enum.StrEnum):
    """What cancelling found in the queue."""

    REMOVED = "removed"
    """The task was waiting and is out of the queue: it never runs."""
    REQUESTED = "requested"
    """The task is with its endpoint, which is told to stop it."""
    FINISHED = "finished"
    UNKNOWN = "unknown"


@dataclasses.dataclass(frozen=True)
class ForwarderInfo:
    """A live forwarder as it announces itself. ``address`` is ``tcp://host:port``, ``server_key`` Z85.

    ``idle_s`` is for how many seconds it has had no connection, by its own monotonic clock; None while it has one.
    """

    forwarder_id: str
    address: str
    server_key: str
    connections: int = 0
    draining: bool = False
    idle_s: float | None = None
