"""Actions: instructions of the core to the shell. One event answers each store step, with the exceptions noted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from farcall_common.qos_report import QosReport
from farcall_common.store.model import EndpointStatus, ForwarderInfo, LeasedTask, TaskEvent, TaskResult
from farcall_common.wire import Envelope, OutputPiece


class Action(msgspec.Struct, frozen=True):
    """Base class of all actions."""


# -- on the socket -----------------------------------------------------------------------------------------------------


class Send(Action, frozen=True):
    routing_id: bytes
    envelope: Envelope


class DropBacklog(Action, frozen=True):
    """Drop the messages that wait for this peer."""

    routing_id: bytes


class ReleaseMemory(Action, frozen=True):
    """Return the allocator's free memory to the operating system."""


class Log(Action, frozen=True):
    """Write a line to the log. Never payloads or tickets."""

    message: str
    fields: Mapping[str, str | int | float]


# -- on the stores -----------------------------------------------------------------------------------------------------


class StoreStep(Action, frozen=True):
    """A step on the stores. It blocks, and is repeated while its store is unavailable."""


class EndpointStep(StoreStep, frozen=True):
    """A step on the queue of an endpoint that this forwarder owns under ``fence``."""

    endpoint_id: str
    fence: int


class GenerationStep(StoreStep, frozen=True):
    """A step for one generation of an endpoint, under any fence. Each Hello of the agent starts a new generation."""

    endpoint_id: str
    generation: int


class ClaimEndpoint(GenerationStep, frozen=True):
    """Claim the ownership of an endpoint for the agent with this key and this spool."""

    public_key: str
    spool_id: str
    ttl_s: float
    weights: Mapping[str, int] = msgspec.field(default_factory=dict)
    spool_generation: int = 0


class RecordSpoolGeneration(EndpointStep, frozen=True):
    """Record the generation of an agent's spool."""

    spool_id: str
    spool_generation: int


class ReadLeases(EndpointStep, frozen=True):
    pass


class ReadTasks(EndpointStep, frozen=True):
    """Read tasks from the database. For the tasks in ``unheld`` that may not run twice, also read their deliveries."""

    task_ids: Sequence[str]
    unheld: frozenset[str]


class RestoreQueue(EndpointStep, frozen=True):
    """Fill the endpoint's queue from the database. ``held`` maps the ids of tasks that the agent holds to attempts."""

    held: Mapping[str, int]
    lease_s: float


class LeaseTasks(EndpointStep, frozen=True):
    """Lease up to ``limit`` tasks, and up to ``reserve`` more of submitters with no tasks at the agent, or with fewer
    than their weight."""

    limit: int
    lease_s: float
    reserve: int = 0


class RequeueTasks(EndpointStep, frozen=True):
    """Return the leases of tasks that never reached the agent."""

    task_ids: Sequence[str]


class ReadCancels(EndpointStep, frozen=True):
    pass


class SweepQueues(StoreStep, frozen=True):
    """Find owned endpoints with work that no wake-up announced. ``fences`` are the fences of the endpoints."""

    fences: Mapping[str, int]


class MaintainEndpoint(EndpointStep, frozen=True):
    """Renew the ownership and the leases in ``renew``, collect expired leases, and look for results that did not reach
    the database. ``spool_id`` is the spool of the connected agent, or empty."""

    renew: Sequence[str]
    spool_id: str
    ttl_s: float
    lease_s: float


class ReadAttempts(EndpointStep, frozen=True):
    """Read how often these tasks were sent. Their leases have expired, and they may not run twice."""

    reaped: Sequence[LeasedTask]


class RefreshEndpoints(StoreStep, frozen=True):
    """Renew the ownership of endpoints without leases, in one step. ``owned`` maps endpoints to fence and spool."""

    owned: Mapping[str, tuple[int, str]]
    ttl_s: float


class PrepareTasks(GenerationStep, frozen=True):
    """Fetch functions, payloads and URLs of tasks, and commit ``dispatches`` before any of the tasks is sent.

    ``session_id`` is the session that receives the tasks, ``spool_id`` its agent's spool.
    """

    session_id: str
    spool_id: str
    tasks: Sequence[LeasedTask]
    #: Ids of functions, each with the hash of the wanted version.
    functions: Sequence[tuple[str, str]]
    blob_keys: Sequence[str]
    dispatches: Sequence[TaskEvent]
    url_ttl_s: int


class ResultBatch(msgspec.Struct, frozen=True):
    """Results of tasks of one endpoint. ``unverified`` are tasks that the forwarder did not lease in this generation.
    They are looked up first, because an agent may report any id."""

    endpoint_id: str
    generation: int
    fence: int
    results: Sequence[TaskResult]
    unverified: frozenset[str]


class FlushResults(StoreStep, frozen=True):
    """Remove results from the queue and commit them. ``watchers`` are the owners with open streams."""

    batches: Sequence[ResultBatch]
    watchers: frozenset[str]
    url_ttl_s: int


class MarkFlushed(StoreStep, frozen=True):
    """Mark results as recorded in the queue, by endpoint. No event answers it."""

    task_ids: Mapping[str, Sequence[str]]


class WatchOwners(StoreStep, frozen=True):
    """Subscribe to the results of these owners, whose clients are connected here. Not repeated; always answered."""

    owner_ids: Sequence[str]
    ttl_s: float


class ShareResults(StoreStep, frozen=True):
    """Publish results to the forwarders where their owners' clients are connected. Each group has the epoch second of
    its record. Not repeated; always answered."""

    groups: Sequence[tuple[float, Sequence[TaskResult]]]
    url_ttl_s: int


class AnswerOutput(StoreStep, frozen=True):
    """Answer a request for output. Not repeated; no event answers it."""

    request_id: str
    endpoint_id: str
    pieces: Sequence[OutputPiece]
    ttl_s: float


class RecordTransitions(StoreStep, frozen=True):
    events: Sequence[TaskEvent]


class SetPresence(EndpointStep, frozen=True):
    """Record whether an endpoint is online. A stale owner may not set it offline. No event answers it."""

    online: bool
    status: EndpointStatus
    ttl_s: float
    qos: QosReport | None = None


class ReleaseEndpoint(StoreStep, frozen=True):
    endpoint_id: str
    fence: int


class GrantUpload(GenerationStep, frozen=True):
    """Create a pre-signed PUT for a result. ``owner_id`` is None if the task has to be looked up."""

    task_id: str
    attempt: int
    owner_id: str | None
    size_bytes: int
    sha256: str
    url_ttl_s: int


class Announce(StoreStep, frozen=True):
    """Register this forwarder, and count the others. Not repeated: the next one is newer."""

    info: ForwarderInfo
    ttl_s: float


class Withdraw(StoreStep, frozen=True):
    forwarder_id: str
