"""Explanation of a task's state: a reason for programs, and one sentence for people."""

from __future__ import annotations

import dataclasses
import datetime as dt
import enum
from typing import Final

from farcall_common.errors import Unavailable
from farcall_common.store.model import Endpoint, QueuePosition, QueueState, Task
from farcall_common.wire.states import EndpointState, TaskState
from farcall_lambdas.identity import Identity
from farcall_lambdas.services.base import Context, Service
from farcall_lambdas.services.endpoints import EndpointService
from farcall_lambdas.services.results import ResultService


class Reason(enum.StrEnum):
    """Why a task waits, or that it does not."""

    ENDED = "ENDED"
    """It is finished."""
    RUNNING = "RUNNING"
    """It runs."""
    STARTING = "STARTING"
    """Its worker is being started."""
    ENDPOINT_DELETED = "ENDPOINT_DELETED"
    """Its endpoint is not registered any more."""
    ENDPOINT_NEVER_SEEN = "ENDPOINT_NEVER_SEEN"
    """Its endpoint was registered and never started."""
    ENDPOINT_OFFLINE = "ENDPOINT_OFFLINE"
    """Its endpoint is not connected."""
    ENDPOINT_PROBLEM = "ENDPOINT_PROBLEM"
    """Its endpoint reports a problem."""
    ALLOWANCE = "ALLOWANCE"
    """As many tasks of the submitter run there as its allowance permits."""
    NO_WORKERS = "NO_WORKERS"
    """Its endpoint has no workers yet: it waits for nodes."""
    WORKERS_BUSY = "WORKERS_BUSY"
    """All workers of its endpoint are busy."""
    NEXT = "NEXT"
    """Nothing stands in its way: it is being sent."""
    NOT_QUEUED = "NOT_QUEUED"
    """It is recorded and not queued yet, or the queue was lost; the reconciler queues it."""
    QUEUE_AWAY = "QUEUE_AWAY"
    """The queue cannot be reached; the task is recorded, and is queued when it is back."""


@dataclasses.dataclass(frozen=True)
class Situation:
    """Everything that explains a task's state. ``position`` is None when the queue cannot be reached.

    ``since`` is when the task entered its state; ``online`` is whether the endpoint is connected.
    A task that has not started at ``expires_at`` fails.
    """

    task: Task
    since: dt.datetime
    endpoint: Endpoint | None
    online: bool
    position: QueuePosition | None
    now: dt.datetime
    expires_at: dt.datetime

    @property
    def may_expire(self) -> bool:
        """Whether the task has neither started nor ended."""
        return not (self.task.state.is_terminal or self.task.state is TaskState.RUNNING)


@dataclasses.dataclass(frozen=True)
class Why:
    """The explanation, and the situation that it is derived from."""

    reason: Reason
    text: str
    situation: Situation


class WhyService(Service):
    """Explains tasks of the caller."""

    def __init__(self, context: Context, results: ResultService, endpoints: EndpointService) -> None:
        super().__init__(context)
        self._results = results
        self._endpoints = endpoints

    def why(self, identity: Identity, task_id: str) -> Why:
        """Why a task is in its state.

        :raises TaskUnknown: if the caller has no such task.
        """
        task, events = self._results.history(identity, task_id)
        now = self._now()
        since = next((event.at for event in reversed(events) if event.state is task.state), task.submitted_at or now)
        endpoint = self._stores.endpoints.get_endpoint(task.endpoint_id)
        online = endpoint is not None and self._endpoints.state(endpoint) is EndpointState.ONLINE
        expires_at = (task.submitted_at or now) + dt.timedelta(days=self._settings.max_wait_days)
        return explain(Situation(task, since, endpoint, online, self._position(task), now, expires_at))

    def _position(self, task: Task) -> QueuePosition | None:
        try:
            return self._stores.queue.position(task.endpoint_id, task.task_id)
        except Unavailable:
            return None


def explain(situation: Situation) -> Why:
    """Derive the reason: the first that applies."""
    reason, text = _ended_or_running(situation) or _of_the_endpoint(situation) or _of_the_queue(situation)
    if situation.may_expire and situation.expires_at - situation.now < _SOON:
        text += f" If it has not started by {situation.expires_at:%Y-%m-%d %H:%M} UTC, it fails."
    return Why(reason, text, situation)


_Answer = tuple[Reason, str]

#: The sentence names the maximum wait when this much time is left.
_SOON: Final = dt.timedelta(days=7)


def _ended_or_running(situation: Situation) -> _Answer | None:
    task, ago = situation.task, _span(situation.now - situation.since)
    match task.state:
        case TaskState.SUCCESS:
            return Reason.ENDED, f"The task finished successfully {ago} ago."
        case state if state.is_terminal:
            message = f" ({task.error.message})" if task.error else ""
            return Reason.ENDED, f"The task ended as {state} {ago} ago{message}."
        case TaskState.RUNNING if situation.online:
            return Reason.RUNNING, f"The task has been running for {ago} (attempt {task.attempt})."
        case TaskState.WAITING_FOR_LAUNCH if situation.online:
            return Reason.STARTING, f"The worker of the task has been starting for {ago} (attempt {task.attempt})."
    return None


def _of_the_endpoint(situation: Situation) -> _Answer | None:
    endpoint, waits = situation.endpoint, _waits(situation)
    if endpoint is None:
        return (
            Reason.ENDPOINT_DELETED,
            "The endpoint is not registered any more; cancel the task and submit it to another one.",
        )
    name, status = f"Endpoint {endpoint.name}", endpoint.status
    if endpoint.seen_at is None:
        return (
            Reason.ENDPOINT_NEVER_SEEN,
            f"{name} was never online: `farcall-endpoint start` on its machine starts it; {waits}.",
        )
    if not situation.online:
        since, ago = f"{endpoint.seen_at:%Y-%m-%d %H:%M:%S} UTC", _span(dt.timedelta(seconds=endpoint.silent_s or 0.0))
        return Reason.ENDPOINT_OFFLINE, f"{name} has been offline since {since} ({ago}); {waits}."
    if status.problem:
        return Reason.ENDPOINT_PROBLEM, f"{name} has a problem: {status.problem.rstrip('.')}; {waits}."
    if situation.position is not None and situation.position.limit:
        most = situation.position.limit
        running = "one running task, and it has one" if most == 1 else f"{most} running tasks, and it has as many"
        return Reason.ALLOWANCE, f"Your allowance on endpoint {endpoint.name} is {running}; {waits}."
    if status.total_workers == 0:
        return Reason.NO_WORKERS, f"{name} has no workers yet: it waits for nodes of its scheduler; {waits}."
    if status.idle_workers == 0:
        workers = "its worker is" if status.total_workers == 1 else f"all {status.total_workers} workers are"
        return Reason.WORKERS_BUSY, f"{name} is online, and {workers} busy; {waits}."
    return None


def _of_the_queue(situation: Situation) -> _Answer:
    if _is_dispatched(situation):
        return (
            Reason.NEXT,
            f"It starts next: the endpoint has it, and a worker is idle; {_waits(situation)}.",
        )
    if situation.position is None:
        return Reason.QUEUE_AWAY, "The queue cannot be reached; the task is recorded, and is queued when it is back."
    if situation.position.state is QueueState.QUEUED:
        return Reason.NEXT, f"It starts next: a worker is idle; {_waits(situation)}."
    return (
        Reason.NOT_QUEUED,
        "The task is recorded, but not in the queue yet; the reconciler queues it within about a minute.",
    )


def _is_dispatched(situation: Situation) -> bool:
    """Whether the endpoint has the task, or it is being sent."""
    position = situation.position
    return situation.task.attempt > 0 if position is None else position.state is QueueState.LEASED


def _waits(situation: Situation) -> str:
    """The task's position, as the last part of a sentence."""
    position, status = situation.position, situation.endpoint.status if situation.endpoint else None
    if _is_dispatched(situation):
        others = max(0, status.pending_tasks - 1) if status else 0
        return "the task has reached it" + (f", with {_tasks(others)} that wait there" if others else "")
    if position is None or position.state is not QueueState.QUEUED:
        return "the task is recorded"
    if position.submitters < 2:
        return f"{_tasks(position.ahead)} go first" if position.ahead > 1 else _FEW[position.ahead]
    own = f"{_tasks(position.ahead)} of yours go first" if position.ahead > 1 else _FEW_OF_YOURS[position.ahead]
    return f"{own}, and {position.submitters} submitters take turns"


_FEW = ("the task is the first in its queue", "one task goes first")
_FEW_OF_YOURS = ("the task is the next of yours", "one task of yours goes first")


def _tasks(count: int) -> str:
    return "one task" if count == 1 else f"{count} tasks"


def _span(length: dt.timedelta) -> str:
    """A duration for people: two digits at most."""
    seconds = max(0.0, length.total_seconds())
    for unit, unit_s in (("days", 86_400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * unit_s:
            return f"{seconds / unit_s:.0f} {unit}"
    return f"{seconds:.0f} s"
