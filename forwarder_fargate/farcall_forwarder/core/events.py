"""Events: the inputs of the core, from sockets, stores and the process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from farcall_common.errors import EndpointInUse, EndpointUnknown, ProtocolError, SpoolOutdated, TicketInvalid
from farcall_common.store.model import (
    BlobRef,
    FunctionBody,
    LeasedTask,
    OutputAsk,
    PeerKey,
    SharedResults,
    Task,
    TaskResult,
)
from farcall_common.wire import Envelope
from farcall_forwarder.core.actions import EndpointStep, GenerationStep, PrepareTasks, ResultBatch


class Event(msgspec.Struct, frozen=True):
    """Base class of all events."""


# -- from the socket ---------------------------------------------------------------------------------------------------


class Received(Event, frozen=True):
    """A decoded envelope of an authenticated peer."""

    routing_id: bytes
    peer: PeerKey
    envelope: Envelope


class MalformedReceived(Event, frozen=True):
    """Bytes of an authenticated peer that are not a valid envelope."""

    routing_id: bytes
    peer: PeerKey
    error: ProtocolError


class PeerDisconnected(Event, frozen=True):
    """A send failed: no peer has this routing id any more."""

    routing_id: bytes


class SlowConsumer(Event, frozen=True):
    """A peer reads so slowly that the messages waiting for it were dropped."""

    routing_id: bytes


# -- from the process --------------------------------------------------------------------------------------------------


class Tick(Event, frozen=True):
    """The next deadline has come."""


class DrainOrdered(Event, frozen=True):
    """The process received a signal to end."""


class WorkAvailable(Event, frozen=True):
    """Endpoints have work, or tasks to cancel."""

    endpoint_ids: Sequence[str]


class ActivityFound(Event, frozen=True):
    """A sweep has found endpoints with work, with tasks to cancel, or with another owner than this forwarder."""

    endpoint_ids: Sequence[str]


class ResultsHeard(Event, frozen=True):
    """Other forwarders have recorded results that clients of this one may wait for."""

    shared_results: Sequence[SharedResults]


class OutputRequested(Event, frozen=True):
    """The API requests output of tasks."""

    asks: Sequence[OutputAsk]


class PubSubLost(Event, frozen=True):
    """The Pub/Sub connection was interrupted: wake-ups and shared results may be missed."""


# -- from the stores ---------------------------------------------------------------------------------------------------


class EndpointEvent(Event, frozen=True):
    """The answer to a step under this fence of an endpoint."""

    endpoint_id: str
    fence: int


class GenerationEvent(Event, frozen=True):
    """The answer to a step for this generation of an endpoint."""

    endpoint_id: str
    generation: int


class StepFenced(Event, frozen=True):
    """A step was refused: another forwarder owns the endpoint."""

    step: EndpointStep


class StepLost(Event, frozen=True):
    """A step found that the queue has lost the endpoint's data."""

    step: EndpointStep


class EndpointClaimed(GenerationEvent, frozen=True):
    """``data_only``: the endpoint runs certain functions only, by its record after the claim."""

    fence: int
    data_only: bool = False


class ClaimRefused(GenerationEvent, frozen=True):
    """Another agent of the endpoint is connected elsewhere, the endpoint or the agent's key was deleted, or the spool
    is an old copy."""

    error: EndpointInUse | EndpointUnknown | SpoolOutdated | TicketInvalid


class LeasesRead(EndpointEvent, frozen=True):
    """``leases`` maps the ids of leased tasks to their attempts."""

    leases: Mapping[str, int]


class TasksRead(EndpointEvent, frozen=True):
    """Tasks as the database has them. For those that may not run twice and are not held: the spools that they were sent
    to, and which of them an agent has accepted."""

    tasks: Mapping[str, Task]
    spools: Mapping[str, frozenset[str]]
    accepted: frozenset[str] = frozenset()


class SpoolGenerationRecorded(EndpointEvent, frozen=True):
    """The database has this generation of a spool."""

    spool_generation: int


class QueueRestored(EndpointEvent, frozen=True):
    pass


class TasksLeased(EndpointEvent, frozen=True):
    limit: int
    tasks: Sequence[LeasedTask]
    reserve: int = 0


class TasksPrepared(Event, frozen=True):
    """``bodies`` maps function ids and hashes to what to send of them, ``urls`` maps blob keys to pre-signed GETs.
    ``refused`` are tasks without a permit: they may have been started from another spool. ``payloads`` are those that
    the queue did not have, by task id."""

    order: PrepareTasks
    bodies: Mapping[str, Mapping[str, FunctionBody]]
    urls: Mapping[str, str]
    refused: frozenset[str]
    payloads: Mapping[str, bytes] = msgspec.field(default_factory=dict)


class TasksRequeued(EndpointEvent, frozen=True):
    """Leases are back in the queue."""


class CancelsRead(EndpointEvent, frozen=True):
    task_ids: Sequence[str]


class EndpointMaintained(EndpointEvent, frozen=True):
    """``reaped`` are expired leases whose tasks the queue does not offer again. ``outbox`` are results that may not
    have reached the database."""

    reaped: Sequence[LeasedTask]
    outbox: Sequence[TaskResult]


class AttemptsRead(EndpointEvent, frozen=True):
    """``attempts`` has the number of recorded dispatches of each of the ``reaped`` tasks, by task id."""

    reaped: Sequence[LeasedTask]
    attempts: Mapping[str, int]


class Refreshed(Event, frozen=True):
    """The ownership of these endpoints is renewed. Those in ``active`` need full maintenance instead."""

    owned: Mapping[str, tuple[int, str]]
    active: frozenset[str]


class StepFailed(Event, frozen=True):
    """A store refuses a step, and would refuse it again."""

    step: EndpointStep | GenerationStep


class BatchFlushed(msgspec.Struct, frozen=True):
    """Outcome of a flush for one endpoint. ``foreign`` are tasks of other endpoints, the other results are recorded.
    With ``fenced``, ``lost`` (the queue has lost its data) or ``failed``, nothing is recorded."""

    batch: ResultBatch
    foreign: frozenset[str] = frozenset()
    fenced: bool = False
    lost: bool = False
    failed: bool = False


class Flushed(Event, frozen=True):
    """``first`` are the results that this flush made final; ``urls`` are pre-signed GETs for owners with streams."""

    batches: Sequence[BatchFlushed]
    first: Mapping[str, TaskResult]
    urls: Mapping[str, str]
    recorded_at: float


class OwnersWatched(Event, frozen=True):
    """``fresh`` are owners whose results no other forwarder shared with this one until now."""

    owner_ids: Sequence[str]
    fresh: frozenset[str]


class ResultsShared(Event, frozen=True):
    """The results were published to other forwarders, or could not be."""


class Announced(Event, frozen=True):
    """This forwarder is registered, as are so many others."""

    others: int


class TransitionsRecorded(Event, frozen=True):
    pass


class UploadGranted(GenerationEvent, frozen=True):
    """``url`` is None if the task is unknown or belongs to another endpoint."""

    task_id: str
    attempt: int
    ref: BlobRef
    url: str | None
    headers: Mapping[str, str]
