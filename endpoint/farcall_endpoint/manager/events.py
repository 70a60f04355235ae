"""Events: what happened, as the manager's shell reports it to the core. Messages of the agent are events, too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from farcall_common.errors import ErrorRecord
from farcall_endpoint.output import Printed
from farcall_endpoint.protocol import CancelTasks, Prewarm, ReadOutput, ResultsTaken, Stop, TaskOrder
from farcall_endpoint.shared_memory import Body, Frame
from farcall_endpoint.worker.channel import Packet


class Instant(NamedTuple):
    """A moment, in seconds of the monotonic clock and of the epoch."""

    mono: float
    epoch: float


class Job(msgspec.Struct, frozen=True):
    """A task with its user bytes. ``refusal``: why its submitter may not use the environment that it names."""

    order: TaskOrder
    function: Frame
    payload: Frame
    refusal: ErrorRecord | None = None


class _Event(msgspec.Struct, frozen=True):  # quicker to make than a dataclass
    pass


class TasksReceived(_Event, frozen=True):
    """The agent sent tasks."""

    jobs: Sequence[Job]


class PacketsReceived(_Event, frozen=True):
    """A worker sent packets, each with its body."""

    worker_id: int
    packets: Sequence[tuple[Packet, Body]]


class MalformedReceived(_Event, frozen=True):
    """A worker sent bytes that are not a packet."""

    worker_id: int
    reason: str


class Recalled(_Event, frozen=True):
    """A Recall was performed: the last ``revoked`` tasks of the worker will not start; at most one other is left."""

    worker_id: int
    revoked: int


class WorkerDied(_Event, frozen=True):
    """A worker's process ended; all its packets were reported before. Its last ``revoked`` tasks did not start."""

    worker_id: int
    revoked: int
    reason: str
    stdout_tail: str = ""
    stderr_tail: str = ""
    output: tuple[Printed, bytes] | None = None


class EnvironmentProgress(_Event, frozen=True):
    """What the preparation of an environment does now, for people."""

    key: str
    text: str


class EnvironmentReady(_Event, frozen=True):
    """An environment can be started. ``forkable``: it has a template, whose forks take ``memory_bytes`` each; may come
    again when that changes."""

    key: str
    forkable: bool = False
    memory_bytes: int | None = None


class EnvironmentFailed(_Event, frozen=True):
    """An environment cannot be prepared; ``record`` is the error of its tasks. With ``record.retryable``, it is worth
    another try."""

    key: str
    record: ErrorRecord


class EnvironmentGone(_Event, frozen=True):
    """What was prepared of an environment is gone: it must be prepared again."""

    key: str


class LimitExceeded(_Event, frozen=True):
    """A running task exceeds a limit; ``record`` is the error that it fails with."""

    worker_id: int
    task_id: str
    record: ErrorRecord


class Terminated(_Event, frozen=True):
    """The manager must end now, for a reason that was not reported to the agent yet."""

    reason: str


class AgentLost(_Event, frozen=True):
    """The agent is gone."""


Event = (
    PacketsReceived
    | TasksReceived
    | ResultsTaken
    | Recalled
    | WorkerDied
    | EnvironmentProgress
    | EnvironmentReady
    | EnvironmentFailed
    | EnvironmentGone
    | Prewarm
    | CancelTasks
    | ReadOutput
    | LimitExceeded
    | MalformedReceived
    | Stop
    | Terminated
    | AgentLost
)
