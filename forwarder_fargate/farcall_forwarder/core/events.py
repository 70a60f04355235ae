"""Events: the inputs of the core, from sockets, stores and the process."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from farcall_common.errors import EndpointInUse, EndpointUnknown, ProtocolError, SpoolOutdated
from farcall_common.store.model import BlobRef, LeasedTask, PeerKey, SharedResults, Task, TaskResult
from farcall_common.wire import Envelope
from farcall_forwarder.core.actions import EndpointStep, GenerationStep, PrepareTasks, ResultBatch


@dataclasses.dataclass(frozen=True, slots=True)
class Event:
    """Base class of all events."""


# -- from the socket ---------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Received(Event):
    """A decoded envelope of an authenticated peer."""

    routing_id: bytes
    peer: PeerKey
    envelope: Envelope


@dataclasses.dataclass(frozen=True, slots=True)
class MalformedReceived(Event):
    """Bytes of an authenticated peer that are not a valid envelope."""

    routing_id: bytes
    peer: PeerKey
    error: ProtocolError


@dataclasses.dataclass(frozen=True, slots=True)
class PeerDisconnected(Event):
    """A send failed: no peer has this routing id any more."""

    routing_id: bytes


@dataclasses.dataclass(frozen=True, slots=True)
class SlowConsumer(Event):
    """A peer reads so slowly that the messages waiting for it were dropped."""

    routing_id: bytes


# -- from the process --------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Tick(Event):
    """The next deadline has come."""


@dataclasses.dataclass(frozen=True, slots=True)
class DrainOrdered(Event):
    """The process received a signal to end."""


@dataclasses.dataclass(frozen=True, slots=True)
class WorkAvailable(Event):
    """Endpoints have work, or tasks to cancel."""

    endpoint_ids: Sequence[str]


@dataclasses.dataclass(frozen=True, slots=True)
class ActivityFound(Event):
    """A sweep has found endpoints with work, with tasks to cancel, or with another owner than this forwarder."""

    endpoint_ids: Sequence[str]


@dataclasses.dataclass(frozen=True, slots=True)
class ResultsHeard(Event):
    """Other forwarders have recorded results that clients of this one may wait for."""

    shared_results: Sequence[SharedResults]


@dataclasses.dataclass(frozen=True, slots=True)
class PubSubLost(Event):
    """The Pub/Sub connection was interrupted: wake-ups and shared results may be missed."""


# -- from the stores ---------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class EndpointEvent(Event):
    """The answer to a step under this fence of an endpoint."""

    endpoint_id: str
    fence: int


@dataclasses.dataclass(frozen=True, slots=True)
class GenerationEvent(Event):
    """The answer to a step for this generation of an endpoint."""

    endpoint_id: str
    generation: int


@dataclasses.dataclass(frozen=True, slots=True)
class StepFenced(Event):
    """A step was refused: another forwarder owns the endpoint."""

    step: EndpointStep


@dataclasses.dataclass(frozen=True, slots=True)
class StepLost(Event):
    """A step found that the queue has lost the endpoint's data."""

    step: EndpointStep


@dataclasses.dataclass(frozen=True, slots=True)
class EndpointClaimed(GenerationEvent):
    fence: int


@dataclasses.dataclass(frozen=True, slots=True)
class ClaimRefused(GenerationEvent):
    """Another agent of the endpoint is connected elsewhere, the endpoint was deleted, or the spool is an old copy."""

    error: EndpointInUse | EndpointUnknown | SpoolOutdated


@dataclasses.dataclass(frozen=True, slots=True)
class LeasesRead(EndpointEvent):
    """``leases`` maps the ids of leased tasks to their attempts."""

    leases: Mapping[str, int]


@dataclasses.dataclass(frozen=True, slots=True)
class TasksRead(EndpointEvent):
    """Tasks as the database has them. For those that may not run twice and are not held: the spools that they were sent
    to, and which of them an agent has accepted."""

    tasks: Mapping[str, Task]
    spools: Mapping[str, frozenset[str]]
    accepted: frozenset[str] = frozenset()


@dataclasses.dataclass(frozen=True, slots=True)
class SpoolGenerationRecorded(EndpointEvent):
    """The database has this generation of a spool."""

    spool_generation: int


@dataclasses.dataclass(frozen=True, slots=True)
class QueueRestored(EndpointEvent):
    pass


@dataclasses.dataclass(frozen=True, slots=True)
class TasksLeased(EndpointEvent):
    limit: int
    tasks: Sequence[LeasedTask]
    reserve: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class TasksPrepared(Event):
    """``bodies`` maps function hashes to names and bodies, ``urls`` maps blob keys to pre-signed GETs. ``refused`` are
    tasks without a permit: they may have been started from another spool. ``payloads`` are those that the queue did
    not have, by task id."""

    order: PrepareTasks
    bodies: Mapping[str, tuple[str, bytes]]
    urls: Mapping[str, str]
    refused: frozenset[str]
    payloads: Mapping[str, bytes] = dataclasses.field(default_factory=dict, repr=False)


@dataclasses.dataclass(frozen=True, slots=True)
class CancelsRead(EndpointEvent):
    task_ids: Sequence[str]


@dataclasses.dataclass(frozen=True, slots=True)
class EndpointMaintained(EndpointEvent):
    """``reaped`` are expired leases whose tasks the queue does not offer again. ``outbox`` are results that may not
    have reached the database."""

    reaped: Sequence[LeasedTask]
    outbox: Sequence[TaskResult]


@dataclasses.dataclass(frozen=True, slots=True)
class AttemptsRead(EndpointEvent):
    """``attempts`` has the number of recorded dispatches of each of the ``reaped`` tasks, by task id."""

    reaped: Sequence[LeasedTask]
    attempts: Mapping[str, int]


@dataclasses.dataclass(frozen=True, slots=True)
class Refreshed(Event):
    """The ownership of these endpoints is renewed. Those in ``active`` need full maintenance instead."""

    owned: Mapping[str, tuple[int, str]]
    active: frozenset[str]


@dataclasses.dataclass(frozen=True, slots=True)
class StepFailed(Event):
    """A store refuses a step, and would refuse it again."""

    step: EndpointStep | GenerationStep


@dataclasses.dataclass(frozen=True, slots=True)
class BatchFlushed:
    """Outcome of a flush for one endpoint. ``foreign`` are tasks of other endpoints, the other results are recorded.
    With ``fenced``, ``lost`` (the queue has lost its data) or ``failed``, nothing is recorded."""

    batch: ResultBatch
    foreign: frozenset[str] = frozenset()
    fenced: bool = False
    lost: bool = False
    failed: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Flushed(Event):
    """``first`` are the results that this flush made final; ``urls`` are pre-signed GETs for owners with streams."""

    batches: Sequence[BatchFlushed]
    first: Mapping[str, TaskResult]
    urls: Mapping[str, str]
    recorded_at: float


@dataclasses.dataclass(frozen=True, slots=True)
class OwnersWatched(Event):
    """``fresh`` are owners whose results no other forwarder shared with this one until now."""

    owner_ids: Sequence[str]
    fresh: frozenset[str]


@dataclasses.dataclass(frozen=True, slots=True)
class ResultsShared(Event):
    """The results were published to other forwarders, or could not be."""


@dataclasses.dataclass(frozen=True, slots=True)
class Announced(Event):
    """This forwarder is registered, as are so many others."""

    others: int


@dataclasses.dataclass(frozen=True, slots=True)
class TransitionsRecorded(Event):
    pass


@dataclasses.dataclass(frozen=True, slots=True)
class UploadGranted(GenerationEvent):
    """``url`` is None if the task is unknown or belongs to another endpoint."""

    task_id: str
    attempt: int
    ref: BlobRef
    url: str | None
    headers: Mapping[str, str]
