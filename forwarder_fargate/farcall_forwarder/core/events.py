"""What can happen to a forwarder. Everything it knows of the world came in as one of these."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from farcall_common.errors import EndpointInUse, EndpointUnknown, ProtocolError, SpoolOutdated
from farcall_common.store.model import BlobRef, LeasedTask, PeerKey, SharedEnds, Task, TaskResult
from farcall_common.wire import Envelope
from farcall_forwarder.core.actions import ClaimEndpoint, EndpointStep, GrantUpload, PrepareTasks, ResultBatch

__all__ = [
    "Announced",
    "AttemptsRead",
    "BatchFlushed",
    "CancelsRead",
    "ClaimRefused",
    "CutOff",
    "DrainOrdered",
    "EndpointClaimed",
    "EndsHeard",
    "EndsShared",
    "Event",
    "Flushed",
    "Garbled",
    "GenerationRecorded",
    "LeasesRead",
    "MovesRecorded",
    "OwnersWatched",
    "PeerBehind",
    "PeerGone",
    "QueueRestored",
    "Received",
    "Refreshed",
    "StepFailed",
    "StepFenced",
    "StepLost",
    "Swept",
    "TasksLeased",
    "TasksPrepared",
    "TasksRead",
    "Tick",
    "UpkeepDone",
    "UploadGranted",
    "Woken",
]


@dataclasses.dataclass(frozen=True, slots=True)
class Event:
    """The root of all events."""


# -- from the socket ---------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Received(Event):
    """A readable envelope from an authenticated peer."""

    routing_id: bytes
    peer: PeerKey
    envelope: Envelope


@dataclasses.dataclass(frozen=True, slots=True)
class Garbled(Event):
    """Bytes from an authenticated peer that are no envelope."""

    routing_id: bytes
    peer: PeerKey
    error: ProtocolError


@dataclasses.dataclass(frozen=True, slots=True)
class PeerGone(Event):
    """A send found nobody behind the routing id."""

    routing_id: bytes


@dataclasses.dataclass(frozen=True, slots=True)
class PeerBehind(Event):
    """A peer reads so slowly that what waited for it was thrown away."""

    routing_id: bytes


# -- from the process --------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Tick(Event):
    """The next deadline has come."""


@dataclasses.dataclass(frozen=True, slots=True)
class DrainOrdered(Event):
    """The process was asked to end."""


@dataclasses.dataclass(frozen=True, slots=True)
class Woken(Event):
    """Endpoints that have work, or tasks to cancel."""

    endpoint_ids: Sequence[str]


@dataclasses.dataclass(frozen=True, slots=True)
class Swept(Event):
    """A sweep has found endpoints with work, with tasks to cancel, or with another owner than this forwarder."""

    endpoint_ids: Sequence[str]


@dataclasses.dataclass(frozen=True, slots=True)
class EndsHeard(Event):
    """Other forwarders have recorded ends that clients may wait for here."""

    shared: Sequence[SharedEnds]


@dataclasses.dataclass(frozen=True, slots=True)
class CutOff(Event):
    """For a while nothing could be heard from others: neither wake-ups nor ends."""


# -- from the stores ---------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class StepFenced(Event):
    """A step was refused: somebody else owns the endpoint."""

    step: EndpointStep


@dataclasses.dataclass(frozen=True, slots=True)
class StepLost(Event):
    """A step found that the queue has lost the endpoint's data."""

    step: EndpointStep


@dataclasses.dataclass(frozen=True, slots=True)
class EndpointClaimed(Event):
    endpoint_id: str
    life: int
    fence: int


@dataclasses.dataclass(frozen=True, slots=True)
class ClaimRefused(Event):
    """Another forwarder hears another agent of the endpoint, or there is no such endpoint any more."""

    endpoint_id: str
    life: int
    error: EndpointInUse | EndpointUnknown | SpoolOutdated


@dataclasses.dataclass(frozen=True, slots=True)
class LeasesRead(Event):
    """``leases`` maps the ids of leased tasks to their attempts."""

    endpoint_id: str
    fence: int
    leases: Mapping[str, int]


@dataclasses.dataclass(frozen=True, slots=True)
class TasksRead(Event):
    """Tasks as the database knows them; of those that may not run twice and are not held, the spools that they were
    sent to, and which of them an agent has accepted."""

    endpoint_id: str
    fence: int
    tasks: Mapping[str, Task]
    spools: Mapping[str, frozenset[str]]
    accepted: frozenset[str] = frozenset()


@dataclasses.dataclass(frozen=True, slots=True)
class GenerationRecorded(Event):
    """The database knows that a spool is this new."""

    endpoint_id: str
    fence: int
    generation: int


@dataclasses.dataclass(frozen=True, slots=True)
class QueueRestored(Event):
    endpoint_id: str
    fence: int


@dataclasses.dataclass(frozen=True, slots=True)
class TasksLeased(Event):
    endpoint_id: str
    fence: int
    limit: int
    tasks: Sequence[LeasedTask]
    reserve: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class TasksPrepared(Event):
    """``bodies`` maps function hashes to names and bodies, ``urls`` blob keys to pre-signed GETs; ``refused`` are the
    tasks without a permit: they may have been started from another spool. ``payloads`` are those that were not in the
    queue, by task id."""

    order: PrepareTasks
    bodies: Mapping[str, tuple[str, bytes]]
    urls: Mapping[str, str]
    refused: frozenset[str]
    payloads: Mapping[str, bytes] = dataclasses.field(default_factory=dict, repr=False)


@dataclasses.dataclass(frozen=True, slots=True)
class CancelsRead(Event):
    endpoint_id: str
    fence: int
    task_ids: Sequence[str]


@dataclasses.dataclass(frozen=True, slots=True)
class UpkeepDone(Event):
    """``reaped`` are leases that have expired and do not begin again. ``outbox`` are ends that may not have reached the
    database."""

    endpoint_id: str
    fence: int
    reaped: Sequence[LeasedTask]
    outbox: Sequence[TaskResult]


@dataclasses.dataclass(frozen=True, slots=True)
class AttemptsRead(Event):
    """``attempts`` says how often the database saw the ``reaped`` tasks dispatched, by task id."""

    endpoint_id: str
    fence: int
    reaped: Sequence[LeasedTask]
    attempts: Mapping[str, int]


@dataclasses.dataclass(frozen=True, slots=True)
class Refreshed(Event):
    """These endpoints were kept, except that those in ``stirring`` need an upkeep of their own."""

    owned: Mapping[str, tuple[int, str]]
    stirring: frozenset[str]


@dataclasses.dataclass(frozen=True, slots=True)
class StepFailed(Event):
    """A store refuses a step, which is no use to repeat."""

    step: EndpointStep | ClaimEndpoint | PrepareTasks | GrantUpload


@dataclasses.dataclass(frozen=True, slots=True)
class BatchFlushed:
    """What became of one endpoint's results: ``foreign`` are another endpoint's tasks, the rest is recorded; or
    nothing was, because the step was fenced, the queue has lost its data, or the step failed."""

    batch: ResultBatch
    foreign: frozenset[str] = frozenset()
    fenced: bool = False
    lost: bool = False
    failed: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Flushed(Event):
    """``first`` are the ends that this flush made final; ``urls`` pre-signed GETs for those that clients wait for."""

    batches: Sequence[BatchFlushed]
    first: Mapping[str, TaskResult]
    urls: Mapping[str, str]
    recorded_at: float


@dataclasses.dataclass(frozen=True, slots=True)
class OwnersWatched(Event):
    """``fresh`` are owners whose ends nobody shared with this forwarder until now."""

    owner_ids: Sequence[str]
    fresh: frozenset[str]


@dataclasses.dataclass(frozen=True, slots=True)
class EndsShared(Event):
    """Other forwarders were told, or could not be."""


@dataclasses.dataclass(frozen=True, slots=True)
class Announced(Event):
    """This forwarder was announced, and so many others live."""

    others: int


@dataclasses.dataclass(frozen=True, slots=True)
class MovesRecorded(Event):
    pass


@dataclasses.dataclass(frozen=True, slots=True)
class UploadGranted(Event):
    """``url`` is None when the task is not this endpoint's, or is unknown."""

    endpoint_id: str
    life: int
    task_id: str
    attempt: int
    ref: BlobRef
    url: str | None
    headers: Mapping[str, str]
