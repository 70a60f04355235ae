"""Tasks of an agent: their stages, their results, and the reasons to refuse them."""

from __future__ import annotations

import collections
import dataclasses
import enum
import hashlib
from collections.abc import Collection, Sequence
from typing import Any

from farcall_common.backoff import Backoff
from farcall_common.errors import ErrorRecord
from farcall_common.wire import BlobGrant, BlobLocation, FunctionSpec, TaskSpec, TaskState, TaskTransition
from farcall_endpoint import outcomes
from farcall_endpoint.protocol import Finished
from farcall_endpoint.shared import Bytes


class Stage(enum.Enum):
    """Where a task is inside the endpoint."""

    FETCHING = enum.auto()
    QUEUED = enum.auto()
    DISPATCHED = enum.auto()
    ENDED = enum.auto()


@dataclasses.dataclass(slots=True)
class End:
    """How a task ended. ``body`` is the result while it is at hand; the spool has it in any case.

    ``sha256`` is set (in hex) for results that are too large to travel inline, ``blob`` once they are uploaded,
    ``upload_backoff`` once an upload failed.
    ``exhausted``: the last permitted attempt, too, took down what ran it.
    """

    state: TaskState
    error: dict[str, Any] | None = None
    size_bytes: int = 0
    sha256: str = ""
    started_at: float | None = None
    ended_at: float | None = None
    body: bytes | memoryview | None = None
    blob: BlobLocation | None = None
    upload_backoff: Backoff | None = None
    exhausted: bool = False
    details: dict[str, Any] | None = None

    @property
    def needs_upload(self) -> bool:
        """Whether the result has to be in the blob store before the end can be reported."""
        return bool(self.sha256) and self.blob is None


@dataclasses.dataclass(slots=True, eq=False)
class Task:
    """A task that the spool holds, under the number ``seq``.

    ``starts`` counts how often it was given to a manager and may have been started, ``deaths`` says why these came to
    nothing, as far as this agent has seen it. ``payload`` is there while it is at
    hand; the spool has it in any case. ``state`` was entered ``at`` (epoch seconds), ``reported`` is what the cloud
    knows.
    """

    seq: int
    spec: TaskSpec
    attempt: int
    stage: Stage
    at: float
    state: TaskState = TaskState.WAITING_FOR_NODES
    reported: TaskState = TaskState.WAITING_FOR_EP
    watched: bool = False
    starts: int = 0
    deaths: tuple[str, ...] = ()
    payload: bytes | None = None
    manager_id: str | None = None
    cancelling: bool = False
    end: End | None = None

    @property
    def task_id(self) -> str:
        """The task's id, the same for all attempts."""
        return self.spec.task_id

    @property
    def may_start_again(self) -> bool:
        """Whether an attempt is left. What was delivered elsewhere before, and did not come back, counts as well."""
        return self.spec.options.idempotent and self.spec.attempt - 1 + self.starts < self.spec.options.max_attempts


@dataclasses.dataclass(frozen=True)
class Demand:
    """Tasks that wait or run, and the managers that have some."""

    tasks: int
    busy: Collection[str]


@dataclasses.dataclass
class Decisions:
    """What the shell has to do after a turn: first all of the spool's part in one transaction, then the rest."""

    # the spool's part
    functions: list[tuple[FunctionSpec, bytes]] = dataclasses.field(default_factory=list)
    accepted: list[Task] = dataclasses.field(default_factory=list)
    redelivered: list[Task] = dataclasses.field(default_factory=list)
    fetched: list[Task] = dataclasses.field(default_factory=list)
    starts: list[Task] = dataclasses.field(default_factory=list)
    ended: list[Task] = dataclasses.field(default_factory=list)
    dropped: list[int] = dataclasses.field(default_factory=list)  # unfinished, and not wanted any more
    forgotten: list[int] = dataclasses.field(default_factory=list)  # ended and recorded: there is no hurry
    # to managers
    orders: dict[str, list[Task]] = dataclasses.field(default_factory=lambda: collections.defaultdict(list))
    cancels: dict[str, list[str]] = dataclasses.field(default_factory=lambda: collections.defaultdict(list))
    # to the blob store
    fetches: list[Task] = dataclasses.field(default_factory=list)
    uploads: list[tuple[Task, BlobGrant]] = dataclasses.field(default_factory=list)
    # to the cloud
    acknowledged: list[Task] = dataclasses.field(default_factory=list)
    transitions: list[TaskTransition] = dataclasses.field(default_factory=list)
    results: list[Task] = dataclasses.field(default_factory=list)
    blob_requests: list[Task] = dataclasses.field(default_factory=list)
    credit: int = 0


class Ends:
    """Makes ends; whose they are, and that they are, is the caller's to note.

    :param endpoint_id: for error records.
    :param max_inline_bytes: larger results must be uploaded before their end is reported.
    """

    def __init__(self, *, endpoint_id: str, max_inline_bytes: int) -> None:
        self._endpoint_id = endpoint_id
        self._max_inline_bytes = max_inline_bytes

    def finished(self, task: Task, finished: Finished, bodies: Sequence[Bytes]) -> End:
        """A worker has done with it, well or not."""
        end = End(finished.state, started_at=finished.started_at, ended_at=finished.ended_at, details=finished.details)
        if finished.error is not None:
            end.error = {"attempt": task.attempt, "endpoint_id": self._endpoint_id, **finished.error}
        if finished.result is not None:
            end.body = bodies[finished.result]
            end.size_bytes = len(end.body)
            if end.size_bytes > self._max_inline_bytes:
                end.sha256 = hashlib.sha256(end.body).hexdigest()
        return end

    def failed(
        self, task: Task, record: ErrorRecord, *, started_at: float | None = None, ended_at: float | None = None
    ) -> End:
        """It fails for a reason of ours."""
        return End(TaskState.FAILED, self._located(record, task), started_at=started_at, ended_at=ended_at)

    def given_up(self, task: Task, reason: str, *, stdout_tail: str = "", stderr_tail: str = "") -> End:
        """No attempt is left to it, and the last one took down what ran it."""
        elsewhere = min(task.spec.attempt - 1, task.spec.options.max_attempts)
        reasons = ("the endpoint that had it went away",) * elsewhere + (*task.deaths, reason)
        record = outcomes.worker_died(
            reason, starts=task.starts, reasons=reasons, stdout_tail=stdout_tail, stderr_tail=stderr_tail
        )
        return dataclasses.replace(self.failed(task, record), exhausted=task.spec.options.idempotent)

    def lost(self, task: Task, reason: str) -> End:
        """It may have run when what had it went away, and must not run twice."""
        return End(TaskState.LOST, self._located(outcomes.lost(reason), task))

    def cancelled(self, *, running: bool) -> End:
        """Its submitter does not want it any more."""
        return End(TaskState.CANCELLED, outcomes.cancelled(running=running).to_json())

    def _located(self, record: ErrorRecord, task: Task) -> dict[str, object]:
        return dataclasses.replace(record, attempt=task.attempt, endpoint_id=self._endpoint_id).to_json()


def refusal(spec: TaskSpec, *, knows_function: bool, block_s: float | None, no_nodes: str) -> ErrorRecord | None:
    """What a task fails with before it is queued; None for one that is welcome.

    :param block_s: seconds that a block of managers lives; None if it has no end.
    :param no_nodes: why no manager can be had; empty if one can.
    """
    if not knows_function:
        return outcomes.function_missing(spec.function_hash)
    options = spec.options
    if options.container is not None:
        return outcomes.containers_unsupported(options.container)
    if options.resource_specification and (wrong := options.untranslatable()):
        return outcomes.limit_invalid(*wrong)
    if block_s is not None and (options.walltime_s or 0.0) > block_s:
        return outcomes.walltime_too_long(options.walltime_s or 0.0, block_s=block_s)
    return outcomes.nodes_unavailable(no_nodes) if no_nodes else None
