"""Leases: tasks that this forwarder leased for an endpoint, each with its stage."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable, Iterator

from farcall_common.fairness import payer_of
from farcall_common.store.model import BlobRef, LeasedTask, Task, lane_of


class Stage(enum.Enum):
    """Stage of a leased task, between the queue and its recorded result."""

    PREPARING = enum.auto()
    """Leased; its function or permit is still being fetched."""
    SENT = enum.auto()
    ACCEPTED = enum.auto()
    """In the agent's spool."""
    RETURNED = enum.auto()
    """Its result was received and is being recorded."""


@dataclasses.dataclass(slots=True)
class Lease:
    """One attempt of one task. ``expires_at`` is a monotonic second; ``timings`` are epoch seconds, by the names of
    Task.timings."""

    task_id: str
    attempt: int
    owner_id: str
    task_group_id: str
    idempotent: bool
    stage: Stage
    expires_at: float
    timings: dict[str, float]
    cancelled: bool = False
    payload_ref: BlobRef | None = None
    #: Endpoints whose files the task reads, and these files.
    sources: tuple[str, ...] = ()
    source_files: tuple[str, ...] = ()
    #: How many the agent has reported.
    transitions: int = 0
    #: The name of its submitter in the queue.
    lane: str = ""
    #: The identity whose quotas it counts against.
    payer_id: str = ""

    @property
    def payload_to_pull(self) -> BlobRef | None:
        """The payload in the blob store that the agent may still need."""
        return None if self.stage is Stage.RETURNED else self.payload_ref

    @classmethod
    def of_leased(cls, leased: LeasedTask, *, stage: Stage, expires_at: float) -> Lease:
        """A lease that the queue has just granted."""
        task = leased.task
        timings = {"enqueued_at": leased.enqueued_at, "leased_at": leased.leased_at}
        if task.submitted_at is not None:
            timings["submitted_at"] = task.submitted_at
        return cls(
            task.task_id,
            leased.attempt,
            task.owner_id,
            task.task_group_id,
            task.options.idempotent,
            stage,
            expires_at,
            timings,
            payload_ref=task.payload_ref,
            sources=task.options.sources,
            source_files=task.options.source_files,
            lane=lane_of(task),
            payer_id=payer_of(lane_of(task)),
        )

    @classmethod
    def of_held(cls, task: Task, *, attempt: int, expires_at: float) -> Lease:
        """The lease of a task that a connecting agent holds."""
        return cls(
            task.task_id,
            attempt,
            task.owner_id,
            task.task_group_id,
            task.options.idempotent,
            Stage.ACCEPTED,
            expires_at,
            dict(task.timings),
            payload_ref=task.payload_ref,
            sources=task.options.sources,
            source_files=task.options.source_files,
            lane=lane_of(task),
            payer_id=payer_of(lane_of(task)),
        )


class LeaseTable(dict[str, Lease]):
    """Leases by task id."""

    def at(self, *stages: Stage) -> Iterator[Lease]:
        """Leases at one of these stages."""
        return (lease for lease in self.values() if lease.stage in stages)

    def attempts(self) -> dict[str, int]:
        """Attempts by task id."""
        return {task_id: lease.attempt for task_id, lease in self.items()}

    def drop(self, task_ids: Iterable[str]) -> None:
        """Forget leases. Unknown ids are ignored."""
        for task_id in task_ids:
            self.pop(task_id, None)

    def pop_at(self, stage: Stage) -> list[str]:
        """Forget the leases at a stage; returns their ids."""
        popped = [lease.task_id for lease in self.at(stage)]
        self.drop(popped)
        return popped

    def drop_expired(self, now: float) -> None:
        """Forget leases that the queue has ended meanwhile, except those whose result is being recorded."""
        self.drop([id_ for id_, lease in self.items() if lease.expires_at < now and lease.stage is not Stage.RETURNED])
