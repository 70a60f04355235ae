"""Tasks as an agent knows them, and what it decides about them in one turn."""

from __future__ import annotations

import collections
import dataclasses
import enum
from collections.abc import Collection
from typing import Any

from farcall_common.backoff import Backoff
from farcall_common.wire import BlobGrant, BlobLocation, FunctionSpec, TaskSpec, TaskState, TaskTransition


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
