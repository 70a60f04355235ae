"""Tasks of an agent: their stages and their results."""

from __future__ import annotations

import dataclasses
import enum
import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from farcall_common.backoff import Backoff
from farcall_common.environments import Environment
from farcall_common.errors import ErrorRecord
from farcall_common.graphs import STAGES, VALUES
from farcall_common.wire import BlobLocation, TaskSpec, TaskState
from farcall_endpoint.agent.core.graphs import GraphNeeds, bounded
from farcall_endpoint.contracts import outcomes
from farcall_endpoint.contracts.agent_manager import FileContent, Finished, NodeFile, OrderTarget, Used
from farcall_endpoint.contracts.output import Printed
from farcall_endpoint.files.plan import FileList
from farcall_endpoint.host.shared_memory import Bytes


class Stage(enum.Enum):
    """Stage of a task inside the endpoint."""

    FETCHING = enum.auto()
    #: Its files are copied to the endpoint.
    STAGING = enum.auto()
    QUEUED = enum.auto()
    DISPATCHED = enum.auto()
    #: Its function raised, and it waits for its retry.
    RETRYING = enum.auto()
    #: It succeeded, and the files that it has written are stored.
    STAGING_OUT = enum.auto()
    FINISHED = enum.auto()
    #: The cloud has its result, or does not need it.
    FORGOTTEN = enum.auto()


class StoredResult(msgspec.Struct, frozen=True, array_like=True):
    """A result as the spool has it, without its body. Fields with defaults are missing in older spools."""

    state: TaskState
    error: dict[str, Any] | None
    size_bytes: int
    sha256: str
    started_at: float | None
    ended_at: float | None
    exhausted: bool = False
    details: dict[str, Any] | None = None


class OpenedCall(msgspec.Struct, frozen=True):
    """Result of opening a sealed call: the key of its answers, empty if the call was not sealed, or the error if the
    call is refused."""

    answer_key: bytes = b""
    error: dict[str, Any] | None = None


@dataclasses.dataclass(slots=True)
class TaskResult:
    """The result of a task. ``body`` is in memory until the spool has it.

    ``sha256`` is set (in hex) for results that are too large to travel inline, ``blob`` once they are uploaded,
    ``upload_backoff`` once an upload failed.
    ``exhausted``: the last permitted attempt ended its worker, too.
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
        """Whether it has to be in the blob store before it can be reported."""
        return bool(self.sha256) and self.blob is None


@dataclasses.dataclass(slots=True, eq=False)
class Task:
    """A task that the spool holds, under the number ``seq``.

    ``starts`` counts how often it was sent to a manager and may have been started, ``deaths`` are the reasons why these
    attempts failed, as far as this agent has seen them. ``losses_shared`` counts the managers that it was lost with
    together with tasks of other submitters, and that ``starts`` leaves out. ``is_ending``: its manager is about to end
    its worker. ``payload`` is None while only the spool
    has it. The task came ``received_at``, and ``state`` was entered ``at`` (epoch seconds); ``reported`` is the last
    state that was reported to the cloud.
    ``answer_key`` seals the answers of a sealed call; empty if it was not sealed.

    ``retries_used`` counts the runs whose function raised and that are followed by another one; ``starts`` leaves them
    out. The next one waits until ``retry_at`` (epoch seconds). It has not started while there are only the
    ``starts_at_retry`` starts of other reasons. Those runs, and others that are over, took ``earlier_run_s`` seconds
    together, with the calls that they made, ``earlier_calls``.

    ``environment_key`` is that of its environment, of a graph that of most stages; empty if that is the endpoint's
    default, or its own Python. ``graph``: what is known of its graph; None if it is no graph, or its payload is not
    here. ``is_apart``: no manager can run all of its stages; others take over calls.

    ``files``: of a task with a list of files. They are on the endpoint if ``is_staged``; ``file_rows`` is what the
    details of the result have of them. ``kept`` is its result while the files that it has written are stored.
    ``node_files``: those that it reads from copies of its node; ``contents``: the largest of these, for its placement.
    ``input_bytes``: the size of its payload, as it came.
    ``used``: of a graph and a task that makes calls, what these have used in the present run, as its manager reported
    it at the instant ``used_at``; None for other tasks.
    ``target``: the latency that it is to hold; None for batch work. ``is_latency``: it was placed on a worker for tasks
    with a target.
    """

    seq: int
    spec: TaskSpec
    attempt: int
    stage: Stage
    at: float
    received_at: float = 0.0
    state: TaskState = TaskState.WAITING_FOR_NODES
    reported: TaskState = TaskState.WAITING_FOR_EP
    is_monitored: bool = False
    starts: int = 0
    losses_shared: int = 0
    is_ending: bool = False
    deaths: tuple[str, ...] = ()
    payload: Bytes | None = None
    manager_id: str | None = None
    cancelling: bool = False
    result: TaskResult | None = None
    answer_key: bytes = b""
    retries_used: int = 0
    retry_at: float = 0.0
    starts_at_retry: int = 0
    earlier_run_s: float = 0.0
    earlier_calls: int = 0
    used: Used | None = None
    used_at: float = 0.0
    environment_key: str = ""
    graph: GraphNeeds | None = None
    is_apart: bool = False
    files: FileList | None = None
    is_staged: bool = False
    file_rows: Sequence[dict[str, Any]] = ()
    kept: TaskResult | None = None
    node_files: Sequence[NodeFile] = ()
    contents: Sequence[FileContent] = ()
    input_bytes: int = 0
    target: OrderTarget | None = None
    is_latency: bool = False

    @property
    def may_be_returned(self) -> bool:
        """Whether its manager may give it back before it has begun: nothing else of it is there."""
        return self.graph is None and self.files is None

    @property
    def task_id(self) -> str:
        """The task's id, the same for all attempts."""
        return self.spec.task_id

    @property
    def share_of(self) -> str:
        """The identity as which it counts where submitters take turns."""
        return self.spec.payer or self.spec.submitter

    @property
    def waits_for_retry(self) -> bool:
        """Whether a task that the spool holds unfinished has not started since its last retry was decided."""
        return bool(self.retries_used) and self.starts == self.starts_at_retry

    @property
    def is_idempotent(self) -> bool:
        """Whether it may run twice: of a graph, whether each of its stages may."""
        return self.spec.options.idempotent and (self.graph is None or not self.graph.once)

    @property
    def environment(self) -> Environment | None:
        """The environment of ``environment_key``."""
        return self.spec.options.environment if self.graph is None else self.graph.environments[0]

    @property
    def walltime_s(self) -> float | None:
        """Its limit; of a graph the longest of a stage."""
        return self.spec.options.walltime_s if self.graph is None else self.graph.walltime_s

    @property
    def may_start_again(self) -> bool:
        """Whether an attempt is left. Attempts at other endpoints, or in earlier sessions, count as well."""
        return self.is_idempotent and self.spec.attempt - 1 + self.starts < self.spec.options.max_attempts


class Kept(NamedTuple):
    """Output of one attempt of a task. ``tails`` has the last bytes of both streams; ``answer_key`` is the key of a
    sealed call."""

    task_id: str
    attempt: int
    printed: Printed
    tails: bytes
    answer_key: bytes = b""


def attempt_of(task: Task) -> int:
    """The number of a task's present run, an attempt or a retry. A redelivery to the endpoint that has it does not
    raise it."""
    return max(0, task.spec.attempt - 1 + task.starts + task.retries_used)


class RetryState(NamedTuple):
    """The fields of a :class:`Task` about retries, as the spool has them."""

    used: int
    at: float
    starts: int
    run_s: float


class SpooledTask(msgspec.Struct, frozen=True):
    """A task that was read from the spool. ``is_fetched``: the spool has its payload. ``retry``: the fields of
    :class:`Task` about retries, if it was retried. ``graph``: what is known of its graph. ``files``: those in its list;
    of a task with a result they are yet to be stored."""

    seq: int
    spec: TaskSpec
    attempt: int
    at: float
    starts: int = 0
    is_fetched: bool = True
    result: StoredResult | None = None
    answer_key: bytes = b""
    retry: RetryState | None = None
    graph: GraphNeeds | None = None
    files: FileList | None = None

    def to_task(self) -> Task:
        """The task as a core continues with it."""
        stage = Stage.QUEUED if self.is_fetched else Stage.FETCHING
        task = Task(
            self.seq, self.spec, self.attempt, stage, self.at, self.at, starts=self.starts, answer_key=self.answer_key
        )
        if (environment := self.spec.options.environment) is not None:
            task.environment_key = environment.key
        task.graph, task.files = self.graph, self.files
        if self.retry is not None:
            task.retries_used, task.retry_at, task.starts_at_retry, task.earlier_run_s = self.retry
        if self.result is not None:
            result = TaskResult(**msgspec.structs.asdict(self.result))
            if self.files is None:
                task.stage, task.result = Stage.FINISHED, result
            else:
                task.stage, task.kept, task.state = Stage.STAGING_OUT, result, TaskState.RUNNING
        return task


class ResultFactory:
    """Makes the results of tasks.

    :param endpoint_id: for error records.
    :param max_inline_bytes: larger results must be uploaded before they are reported.
    """

    def __init__(self, *, endpoint_id: str, max_inline_bytes: int) -> None:
        self._endpoint_id = endpoint_id
        self._max_inline_bytes = max_inline_bytes

    def finished(self, task: Task, finished: Finished, bodies: Sequence[Bytes | None]) -> TaskResult:
        """Return the result of a task that a manager has reported as finished."""
        result = TaskResult(
            finished.state, started_at=finished.started_at, ended_at=finished.ended_at, details=finished.details
        )
        if result.details and not result.details.keys().isdisjoint((STAGES, VALUES)):
            result.details = bounded(result.details)
        if finished.error is not None:
            result.error = {"attempt": task.attempt, "endpoint_id": self._endpoint_id, **finished.error}
        if finished.result is not None:
            body = bodies[finished.result]
            assert body is not None
            result.body, result.size_bytes = body, len(body)
            # Of a sealed call the bytes that are hashed are those of the seal.
            if result.size_bytes > self._max_inline_bytes and not task.answer_key:
                result.sha256 = hashlib.sha256(body).hexdigest()
        return result

    def failed(
        self, task: Task, record: ErrorRecord, *, started_at: float | None = None, ended_at: float | None = None
    ) -> TaskResult:
        """Failed for a reason of the endpoint."""
        return TaskResult(TaskState.FAILED, self._located(record, task), started_at=started_at, ended_at=ended_at)

    def given_up(self, task: Task, reason: str, *, stdout_tail: str = "", stderr_tail: str = "") -> TaskResult:
        """Failed: no attempt is left, and the last one ended its worker or manager."""
        elsewhere = min(task.spec.attempt - 1, task.spec.options.max_attempts)
        reasons = ("the endpoint that had it went away",) * elsewhere + (*task.deaths, reason)
        record = outcomes.worker_died(
            reason, starts=task.starts, reasons=reasons, stdout_tail=stdout_tail, stderr_tail=stderr_tail
        )
        return dataclasses.replace(self.failed(task, record), exhausted=task.is_idempotent)

    def lost(self, task: Task, reason: str) -> TaskResult:
        """Lost: it may have run when its manager was lost, and may not run twice."""
        return TaskResult(TaskState.LOST, self._located(outcomes.lost(reason), task))

    def cancelled(self, *, running: bool) -> TaskResult:
        """Cancelled by its submitter."""
        return TaskResult(TaskState.CANCELLED, outcomes.cancelled(running=running).to_json())

    def cancelled_while_storing(self) -> TaskResult:
        """Cancelled by its submitter while the files that it has written were stored."""
        return TaskResult(TaskState.CANCELLED, outcomes.cancelled_while_storing().to_json())

    def cancelled_before_retry(self) -> TaskResult:
        """Cancelled by its submitter while it waited for a retry."""
        return TaskResult(TaskState.CANCELLED, outcomes.cancelled_before_retry().to_json())

    def _located(self, record: ErrorRecord, task: Task) -> dict[str, object]:
        return dataclasses.replace(record, attempt=task.attempt, endpoint_id=self._endpoint_id).to_json()
