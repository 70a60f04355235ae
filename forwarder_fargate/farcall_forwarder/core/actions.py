"""What a forwarder can do to the world. The shell performs them; each store step is answered by one event."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from farcall_common.store.model import EndpointStatus, ForwarderInfo, LeasedTask, TaskEvent, TaskResult
from farcall_common.wire import Envelope

__all__ = [
    "Action",
    "Announce",
    "ClaimEndpoint",
    "DropBacklog",
    "EndpointStep",
    "FlushResults",
    "GrantUpload",
    "KeepEndpoint",
    "LeaseTasks",
    "MarkFlushed",
    "Note",
    "PrepareTasks",
    "ReadAttempts",
    "ReadCancels",
    "ReadLeases",
    "ReadTasks",
    "RecordGeneration",
    "RecordMoves",
    "RefreshEndpoints",
    "ReleaseEndpoint",
    "ReleaseMemory",
    "RequeueTasks",
    "RestoreQueue",
    "ResultBatch",
    "Send",
    "SetPresence",
    "ShareEnds",
    "StoreStep",
    "SweepQueues",
    "WatchOwners",
    "Withdraw",
]


@dataclasses.dataclass(frozen=True, slots=True)
class Action:
    """The root of all actions."""


# -- on the socket -----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Send(Action):
    routing_id: bytes
    envelope: Envelope


@dataclasses.dataclass(frozen=True, slots=True)
class DropBacklog(Action):
    """Nothing that still waits for this peer matters any more."""

    routing_id: bytes


@dataclasses.dataclass(frozen=True, slots=True)
class ReleaseMemory(Action):
    """Give memory that nobody uses back to the machine."""


@dataclasses.dataclass(frozen=True, slots=True)
class Note(Action):
    """Something for the log. Never payloads or tickets."""

    message: str
    fields: Mapping[str, str | int | float]


# -- on the stores -----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class StoreStep(Action):
    """A step that blocks; repeated while its store is unavailable."""


@dataclasses.dataclass(frozen=True, slots=True)
class EndpointStep(StoreStep):
    """A step on the queue of an endpoint that this forwarder owns under ``fence``."""

    endpoint_id: str
    fence: int


@dataclasses.dataclass(frozen=True, slots=True)
class ClaimEndpoint(StoreStep):
    """Take an endpoint over for the agent with this spool. ``life`` tells this claim from those of earlier sessions."""

    endpoint_id: str
    life: int
    spool_id: str
    ttl_s: float
    weights: Mapping[str, int] = dataclasses.field(default_factory=dict)
    #: How new the spool is; None if the agent does not count.
    generation: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class RecordGeneration(EndpointStep):
    """Remember how new an agent's spool is."""

    spool_id: str
    generation: int


@dataclasses.dataclass(frozen=True, slots=True)
class ReadLeases(EndpointStep):
    pass


@dataclasses.dataclass(frozen=True, slots=True)
class ReadTasks(EndpointStep):
    """Read tasks from the database; of those in ``unheld`` that may not run twice, also where they went."""

    task_ids: Sequence[str]
    unheld: frozenset[str]


@dataclasses.dataclass(frozen=True, slots=True)
class RestoreQueue(EndpointStep):
    """Fill the endpoint's queue from the database; ``held`` maps what the agent holds to attempts."""

    held: Mapping[str, int]
    lease_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class LeaseTasks(EndpointStep):
    """Lease up to ``limit`` tasks, and up to ``reserve`` more of submitters of which the agent has none, or fewer than
    their weight."""

    limit: int
    lease_s: float
    reserve: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class RequeueTasks(EndpointStep):
    """Give back leases of tasks that never reached the agent. Answered by nothing."""

    task_ids: Sequence[str]


@dataclasses.dataclass(frozen=True, slots=True)
class ReadCancels(EndpointStep):
    pass


@dataclasses.dataclass(frozen=True, slots=True)
class SweepQueues(StoreStep):
    """Find endpoints that have something to do which no wake-up told of, by the fences under which they are owned."""

    fences: Mapping[str, int]


@dataclasses.dataclass(frozen=True, slots=True)
class KeepEndpoint(EndpointStep):
    """Keep the ownership, prolong leases, end expired ones, look for ends that did not reach the database. ``spool_id``
    is that of the agent that is heard, or empty."""

    renew: Sequence[str]
    spool_id: str
    ttl_s: float
    lease_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class ReadAttempts(EndpointStep):
    """Find out how often these tasks were sent, whose leases have expired and which may not run twice."""

    reaped: Sequence[LeasedTask]


@dataclasses.dataclass(frozen=True, slots=True)
class RefreshEndpoints(StoreStep):
    """Keep the ownership of endpoints that have nothing to prolong, by fence and spool, all at once."""

    owned: Mapping[str, tuple[int, str]]
    ttl_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class PrepareTasks(StoreStep):
    """Fetch what dispatching these tasks needs, and commit ``dispatches`` before any of them is sent.

    ``life`` and ``session_id`` name the session that will get the tasks, ``spool_id`` its agent's spool.
    """

    endpoint_id: str
    life: int
    session_id: str
    spool_id: str
    tasks: Sequence[LeasedTask]
    #: Ids of functions, each with the hash of the version that is meant.
    functions: Sequence[tuple[str, str]]
    blob_keys: Sequence[str]
    dispatches: Sequence[TaskEvent]
    url_ttl_s: int


@dataclasses.dataclass(frozen=True, slots=True)
class ResultBatch:
    """Ends of tasks of one endpoint. ``unverified`` are tasks that the forwarder did not lease in this life: they have
    to be looked up, because an agent may report any id."""

    endpoint_id: str
    life: int
    fence: int
    results: Sequence[TaskResult]
    unverified: frozenset[str]


@dataclasses.dataclass(frozen=True, slots=True)
class FlushResults(StoreStep):
    """Take ends out of the queue and commit them. ``watchers`` are the owners that have streams open."""

    batches: Sequence[ResultBatch]
    watchers: frozenset[str]
    url_ttl_s: int


@dataclasses.dataclass(frozen=True, slots=True)
class MarkFlushed(StoreStep):
    """The database has these ends, by endpoint. Answered by nothing."""

    task_ids: Mapping[str, Sequence[str]]


@dataclasses.dataclass(frozen=True, slots=True)
class WatchOwners(StoreStep):
    """Say that clients of these owners wait here. Not repeated; answered in any case."""

    owner_ids: Sequence[str]
    ttl_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class ShareEnds(StoreStep):
    """Tell ends, in groups by the epoch second when they were recorded, to the forwarders where their owners' clients
    wait. Not repeated; answered in any case."""

    groups: Sequence[tuple[float, Sequence[TaskResult]]]
    url_ttl_s: int


@dataclasses.dataclass(frozen=True, slots=True)
class RecordMoves(StoreStep):
    events: Sequence[TaskEvent]


@dataclasses.dataclass(frozen=True, slots=True)
class SetPresence(EndpointStep):
    """Record whether an endpoint is there; a stale owner may not say that it is gone. Answered by nothing."""

    online: bool
    status: EndpointStatus
    ttl_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class ReleaseEndpoint(StoreStep):
    endpoint_id: str
    fence: int


@dataclasses.dataclass(frozen=True, slots=True)
class GrantUpload(StoreStep):
    """Mint a pre-signed PUT for a result. ``owner_id`` is None when the task has to be looked up."""

    endpoint_id: str
    life: int
    task_id: str
    attempt: int
    owner_id: str | None
    size_bytes: int
    sha256: str
    url_ttl_s: int


@dataclasses.dataclass(frozen=True, slots=True)
class Announce(StoreStep):
    """Say that this forwarder lives, and see who else does. Not repeated: the next one is newer."""

    info: ForwarderInfo
    ttl_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class Withdraw(StoreStep):
    forwarder_id: str
