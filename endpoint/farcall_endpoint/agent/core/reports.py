"""Reports to the cloud: credit, status, state transitions, retries of uploads, and the messages of a turn."""

from __future__ import annotations

import collections
import hashlib
import heapq
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import msgspec

from farcall_common.backoff import Backoff
from farcall_common.event_log import UserBytes
from farcall_common.graphs import DETAILS_OF_USAGE
from farcall_common.report_limiter import ReportLimiter
from farcall_common.wire import (
    BlobRequest,
    Credit,
    EndpointReport,
    Envelope,
    ResultSpec,
    RunTasks,
    TaskRef,
    TaskResults,
    TasksAccepted,
    TaskSpec,
    TaskState,
    TaskTransition,
    TaskTransitions,
)
from farcall_endpoint.agent.core import actions as do
from farcall_endpoint.agent.core.actions import Action
from farcall_endpoint.agent.core.events import TasksReceived
from farcall_endpoint.agent.core.tasks import OpenedCall, Stage, Task, TaskResult
from farcall_endpoint.contracts import outcomes
from farcall_endpoint.contracts.prefetch import PrefetchPolicy
from farcall_endpoint.host.shared_memory import Bytes


class CreditWindow:
    """Credit for tasks that the agent gives the forwarder in one session.

    :param window: tasks to hold here per slot, to hide the latency of the cloud: at most ``limit`` in total, but at
        least two per slot.
    """

    def __init__(self, window: PrefetchPolicy, *, limit: int) -> None:
        self._window = window
        self._limit = limit
        self._given = 0
        self._held = 0

    def restart(self) -> None:
        """A session has begun: nothing is given yet."""
        self._given = 0

    def used(self, count: int) -> None:
        """Record that ``count`` tasks came, or that ``count`` of the credit was not sent after all."""
        self._given -= count
        self._held += count

    def grant(self, *, slots: int, held: int) -> int:
        """Return the credit to give now. A small amount waits until it is worth a message, unless the cloud has no
        credit left. The given credit is negative when tasks came from the reserve.

        :param slots: workers here.
        :param held: unfinished tasks here.
        """
        window = min(slots * (2 + self._window.depth), max(self._limit, 2 * slots))
        due = window - held - self._given
        ended, self._held = max(0, self._held - held), held
        if self._given < 0:  # the reserve is used: what ended gives it back, also while the window shrinks
            due = max(due, min(ended, -self._given))
        if due < max(1, window // 4) and not (due > 0 and self._given <= 0):
            return 0
        self._given += due
        return due


_COMPARE_S: Final = 0.1
"""Shortest period between two comparisons of a report with the last one."""


class StatusReports:
    """When to send the endpoint's report: at once when it has changed, within the limits of :class:`ReportLimiter`;
    and once in a heartbeat period, which a busy session would pass without a heartbeat. Instants are monotonic seconds.
    """

    def __init__(self) -> None:
        self._heartbeat_s = float("inf")
        self._limiter = ReportLimiter()
        self._last: EndpointReport | None = None
        self._sent_at = float("-inf")
        #: The instant from which :meth:`is_due` is worth a call: once for many turns of a busy agent.
        self.due_at = float("-inf")

    def restart(self, *, heartbeat_s: float) -> None:
        """A session with this heartbeat period has begun, and has no report yet."""
        self._heartbeat_s = heartbeat_s
        self._last = None
        self.due_at = self._limiter.next_at

    def is_due(self, report: EndpointReport, *, now: float) -> bool:
        """Whether to send this report. From ``due_at`` on, the limiter permits it."""
        if report == self._last and now < self._sent_at + self._heartbeat_s:
            self.due_at = now + _COMPARE_S
            return False
        return True

    def sent(self, report: EndpointReport, *, now: float) -> None:
        """A report was sent."""
        self._last, self._sent_at = report, now
        self._limiter.used(now=now)
        self.due_at = self._limiter.next_at


REPORT_AFTER_S: Final = 0.5
"""Time for which a state must last to be worth a message."""
_MOST_RETRIES: Final = 10_000
"""Reports of retries that wait for a session; beyond that the oldest are dropped."""


class Transitions:
    """The states to report: those that last; of a shorter task the result alone. Instants are epoch seconds.

    :param is_enabled: whether transitions are reported at all.
    """

    def __init__(self, *, is_enabled: bool) -> None:
        self._is_enabled = is_enabled
        self._monitored: collections.deque[tuple[float, Task]] = collections.deque()
        #: Reports that wait for a session.
        self._retries: collections.deque[TaskTransition] = collections.deque(maxlen=_MOST_RETRIES)

    def monitor(self, task: Task, at: float) -> None:
        """Check a task again when its present state, entered ``at``, has lasted."""
        if self._is_enabled:
            task.is_monitored = True
            self._monitored.append((at + REPORT_AFTER_S, task))

    def enter(self, task: Task, state: TaskState, at: float) -> None:
        """A task changes its state."""
        task.state, task.at = state, at
        if not task.is_monitored and task.reported is not state:
            self.monitor(task, at)

    def retry(self, task: Task, detail: dict[str, Any], at: float) -> None:
        """A task waits for a retry. That is reported however short it is, and after a session without a connection."""
        task.state, task.at = TaskState.WAITING_FOR_NODES, at
        if self._is_enabled:
            task.reported = task.state
            self._retries.append(
                TaskTransition(task_id=task.task_id, attempt=task.attempt, state=task.state, at=at, detail=detail)
            )

    def next_deadline(self) -> float | None:
        """When :meth:`due` may have something next."""
        return self._monitored[0][0] if self._monitored else None

    def due(self, *, now: float, connected: bool) -> list[TaskTransition]:
        """Transitions to report now; none without a session, for the next Hello names all tasks."""
        transitions: list[TaskTransition] = []
        if self._retries and connected:
            transitions.extend(self._retries)
            self._retries.clear()
        while self._monitored and self._monitored[0][0] <= now:
            task = self._monitored.popleft()[1]
            task.is_monitored = False
            if task.stage in (Stage.FINISHED, Stage.FORGOTTEN) or task.reported is task.state:
                continue
            if now < task.at + REPORT_AFTER_S:
                self.monitor(task, task.at)
            elif connected:
                task.reported = task.state
                transitions.append(
                    TaskTransition(task_id=task.task_id, attempt=task.attempt, state=task.state, at=task.at)
                )
        return transitions


_TRIES: Final = 5
_FIRST_WAIT_S: Final = 0.5
_LONGEST_WAIT_S: Final = 4.0


class UploadRetries:
    """Tasks whose results wait for their next try. Instants are epoch seconds."""

    def __init__(self) -> None:
        self._due: list[tuple[float, int, Task]] = []

    def add(self, task: Task, *, now: float) -> bool:
        """Try the result of a task again, after twice as long each time. False when it was tried often enough."""
        assert task.result is not None
        if task.result.upload_backoff is None:
            task.result.upload_backoff = Backoff(first_s=_FIRST_WAIT_S, most_s=_LONGEST_WAIT_S)
        backoff = task.result.upload_backoff
        if backoff.failures + 1 >= _TRIES:
            return False
        heapq.heappush(self._due, (now + backoff.next_s(), task.seq, task))
        return True

    def next_deadline(self) -> float | None:
        """When :meth:`due` may have something next."""
        return self._due[0][0] if self._due else None

    def due(self, *, now: float) -> Iterator[Task]:
        """Return the tasks whose retry is due."""
        while self._due and self._due[0][0] <= now:
            yield heapq.heappop(self._due)[2]


_MAX_BATCH: Final = 1000
_MAX_BATCH_BYTES: Final = 4 * 1024 * 1024
"""Maximum size of results and their records in one message, far below the limits of a header and an envelope."""


OpenCall = Callable[[TaskSpec, Bytes], tuple[Bytes, OpenedCall | None]]
"""Function that returns the arguments of a task, and the opened call if it was sealed or is refused."""


def tasks_received(message: RunTasks, frames: Sequence[bytes], open_call: OpenCall | None = None) -> TasksReceived:
    """The event of a message. Functions with the wrong hash are left out: their tasks fail for want of them."""
    functions = [
        each for each in message.functions if hashlib.sha256(frames[each.body]).hexdigest() == each.function_hash
    ]
    payloads: list[Bytes | None] = []
    opened: list[OpenedCall | None] = []
    for spec in message.tasks:
        payload: Bytes | None = None if spec.payload is None else frames[spec.payload]
        call = None
        if payload is not None and open_call is not None:
            payload, call = open_call(spec, payload)
        payloads.append(payload)
        opened.append(call)
    bodies = UserBytes([frames[function.body] for function in functions])
    return TasksReceived(message.tasks, UserBytes(payloads), functions, bodies, opened)


def messages_of(action: Action, *, body: Callable[[Task], bytes]) -> Iterator[Envelope]:
    """The messages of a report to the cloud: large enough to be cheap, small enough to be accepted.

    :param body: returns the result of a task.
    """
    match action:
        case do.AcknowledgeTasks(tasks=tasks):
            yield Envelope(TasksAccepted(tasks=tuple(TaskRef(task_id=t.task_id, attempt=t.attempt) for t in tasks)))
        case do.GiveCredit(tasks=credit):
            yield Envelope(Credit(tasks=credit))
        case do.ReportTransitions(transitions=transitions):
            for start in range(0, len(transitions), _MAX_BATCH):
                yield Envelope(TaskTransitions(transitions=tuple(transitions[start : start + _MAX_BATCH])))
        case do.ReportResults(tasks=tasks):
            yield from _results(tasks, body)
        case do.RequestUploads(tasks=tasks):
            for task in tasks:
                result = task.result
                assert result is not None
                yield Envelope(
                    BlobRequest(
                        task_id=task.task_id,
                        attempt=task.attempt,
                        size_bytes=result.size_bytes,
                        sha256=result.sha256,
                    )
                )


def _results(tasks: Sequence[Task], body: Callable[[Task], bytes]) -> Iterator[Envelope]:
    specs: list[ResultSpec] = []
    frames: list[bytes] = []
    size_bytes = 0
    for task in tasks:
        assert task.result is not None
        # In the header, for which there is a limit: tasks decide how long these are.
        record_bytes = _record_bytes(task.result)
        result = task.result if record_bytes <= _MAX_BATCH_BYTES else _without_record(task.result, record_bytes)
        has_frame = bool(result.size_bytes) and result.blob is None
        result_bytes = min(record_bytes, _MAX_BATCH_BYTES) + (result.size_bytes if has_frame else 0)
        if specs and (len(specs) >= _MAX_BATCH or size_bytes + result_bytes > _MAX_BATCH_BYTES):
            yield Envelope(TaskResults(results=tuple(specs)), tuple(frames))
            specs, frames, size_bytes = [], [], 0
        size_bytes += result_bytes
        frame = None
        if has_frame:
            frame = len(frames)
            frames.append(body(task))
        specs.append(
            ResultSpec(
                task_id=task.task_id,
                attempt=task.attempt,
                state=result.state,
                result=frame,
                result_blob=result.blob,
                error=result.error,
                started_at=result.started_at,
                ended_at=result.ended_at,
                exhausted=result.exhausted,
                details=result.details or {},
            )
        )
    if specs:
        yield Envelope(TaskResults(results=tuple(specs)), tuple(frames))


def _record_bytes(result: TaskResult) -> int:
    return sum([len(msgspec.msgpack.encode(each)) for each in (result.error, result.details) if each])


def _without_record(result: TaskResult, record_bytes: int) -> TaskResult:
    """In place of a result whose error or details no message has room for."""
    error = outcomes.record_too_large(record_bytes).to_json()
    details = result.details or {}
    kept = {name: each for name in DETAILS_OF_USAGE if isinstance(each := details.get(name), int | float)}
    return TaskResult(
        TaskState.FAILED,
        error=error,
        started_at=result.started_at,
        ended_at=result.ended_at,
        exhausted=result.exhausted,
        details=kept or None,
    )
