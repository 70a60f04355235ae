"""Explanation of a task's state: a reason for programs, and one sentence for people."""

from __future__ import annotations

import dataclasses
import datetime as dt
import enum
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from farcall_common.durations import ago, retry_of, span
from farcall_common.errors import Unavailable
from farcall_common.qos_report import InfeasibleTarget, infeasible_of, target_text
from farcall_common.staging import OUT
from farcall_common.store.model import Endpoint, EndpointStatus, EnvironmentState, QueuePosition, QueueState, Task
from farcall_common.wire.states import EndpointState, TaskState
from farcall_lambdas.identity import Identity
from farcall_lambdas.services.base import Context, Service
from farcall_lambdas.services.endpoints import EndpointService, renamed
from farcall_lambdas.services.results import ResultService, graph_of, progress_of, staging_of


class Reason(enum.StrEnum):
    """Why a task waits, or that it does not."""

    ENDED = "ENDED"
    """It is finished."""
    RUNNING = "RUNNING"
    """It runs."""
    RETRYING = "RETRYING"
    """Its function raised, and it waits to be run again."""
    STAGING_IN = "STAGING_IN"
    """Its endpoint copies the files that it reads."""
    STAGING_OUT = "STAGING_OUT"
    """Its function has returned, and its endpoint stores the files that it has written."""
    STARTING = "STARTING"
    """Its worker is being started."""
    ENVIRONMENT_STARTING = "ENVIRONMENT_STARTING"
    """Its environment is being prepared, or a worker in it started."""
    ENVIRONMENT_PROBLEM = "ENVIRONMENT_PROBLEM"
    """Its environment could not be started."""
    ENDPOINT_DELETED = "ENDPOINT_DELETED"
    """Its endpoint is not registered any more."""
    ENDPOINT_NEVER_SEEN = "ENDPOINT_NEVER_SEEN"
    """Its endpoint was registered and never started."""
    ENDPOINT_OFFLINE = "ENDPOINT_OFFLINE"
    """Its endpoint is not connected."""
    ENDPOINT_PROBLEM = "ENDPOINT_PROBLEM"
    """Its endpoint reports a problem."""
    ALLOWANCE = "ALLOWANCE"
    """The submitter has reached the number of running tasks that its allowance permits on the endpoint."""
    NO_WORKERS = "NO_WORKERS"
    """Its endpoint has no workers yet: it waits for nodes."""
    WORKERS_BUSY = "WORKERS_BUSY"
    """All workers of its endpoint are busy."""
    NEXT = "NEXT"
    """Nothing stands in its way: it is being sent."""
    NOT_QUEUED = "NOT_QUEUED"
    """It is recorded and not queued yet, or the queue was lost; the reconciler queues it."""
    QUEUE_AWAY = "QUEUE_AWAY"
    """The queue cannot be reached. The task is recorded, and will be queued when the queue is back."""


@dataclasses.dataclass(frozen=True)
class Situation:
    """Everything that explains a task's state. ``position`` is None when the queue cannot be reached.

    ``since`` is when the task entered its state, ``detail`` what its history has with that; ``online`` is whether the
    endpoint is connected.
    A task that has not started at ``expires_at`` fails.
    """

    task: Task
    since: dt.datetime
    endpoint: Endpoint | None
    online: bool
    position: QueuePosition | None
    now: dt.datetime
    expires_at: dt.datetime
    detail: Mapping[str, Any] = dataclasses.field(default_factory=dict)

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
        entered = next((event for event in reversed(events) if event.state is task.state), None)
        since = entered.at if entered else task.submitted_at or now
        endpoint = self._stores.endpoints.get_endpoint(task.endpoint_id)
        online = endpoint is not None and self._endpoints.state(endpoint) is EndpointState.ONLINE
        expires_at = (task.submitted_at or now) + dt.timedelta(days=self._settings.max_wait_days)
        position, detail = self._position(task), entered.detail if entered else {}
        return explain(Situation(task, since, endpoint, online, position, now, expires_at, detail))

    def _position(self, task: Task) -> QueuePosition | None:
        try:
            return self._stores.queue.position(task.endpoint_id, task.task_id)
        except Unavailable:
            return None


def explain(situation: Situation) -> Why:
    """Derive the reason: the first that applies."""
    reason, text = _ended_or_running(situation) or _of_the_endpoint(situation) or _of_the_queue(situation)
    text += _target(situation)
    if situation.may_expire and situation.expires_at - situation.now < _SOON:
        text += f" If it has not started by {situation.expires_at:%Y-%m-%d %H:%M} UTC, it fails."
    return Why(reason, text, situation)


_Answer = tuple[Reason, str]

#: The code of the endpoint for a task that was stopped after its walltime.
_WALLTIME: Final = "WALLTIME_EXCEEDED"

#: The sentence names the maximum wait when this much time is left.
_SOON: Final = dt.timedelta(days=7)


def _ended_or_running(situation: Situation) -> _Answer | None:
    task, ago = situation.task, span((situation.now - situation.since).total_seconds())
    match task.state:
        case TaskState.SUCCESS:
            return Reason.ENDED, f"The task finished successfully {ago} ago."
        case state if state.is_terminal:
            message = f" ({task.error.message})" if task.error else ""
            return Reason.ENDED, f"The task ended as {state} {ago} ago{message}."
        case _ if situation.online and (found := _staging(situation)):
            return found
        case TaskState.RUNNING if situation.online:
            doing = f"{_stages(situation)}{_progress(situation)}"
            return Reason.RUNNING, f"The task has been running for {ago} (attempt {task.attempt}){doing}."
        case TaskState.WAITING_FOR_LAUNCH if situation.online:
            if found := _of_the_environment(situation):
                return found
            return Reason.STARTING, f"The worker of the task has been starting for {ago} (attempt {task.attempt})."
        case TaskState.WAITING_FOR_NODES if situation.online and "retry" in situation.detail:
            return _before_retry(situation)
    return None


def _staging(situation: Situation) -> _Answer | None:
    """Explain a task whose files are being copied."""
    staging = staging_of(situation.endpoint, situation.task.task_id)
    if staging is None or situation.endpoint is None:
        return None
    reason, doing, done = Reason.STAGING_IN, "copies the files that the task reads", "there"
    if staging.to_node:
        doing = "has the files that the task reads, and copies them to the node that runs it"
    elif staging.state == OUT:
        reason, doing, done = Reason.STAGING_OUT, "stores the files that the task has written", "stored"
    numbers = [f"{staging.files_done} of {staging.files} {'is' if staging.files_done == 1 else 'are'} {done}"]
    numbers += [staging.size] if staging.size else []
    if staging.since:
        numbers.append(f"for {span(max(0.0, situation.now.timestamp() - staging.since))}")
    text = f"Endpoint {situation.endpoint.name} {doing}: {', '.join(numbers)}{_as_of(situation)}"
    text += f"; now {staging.url}" if staging.url else ""
    return reason, f"{text}." + (f" The last problem: {staging.problem.rstrip('.')}." if staging.problem else "")


def _stages(situation: Situation) -> str:
    """Return the current work of a graph, as a part of a sentence; empty if it is not known."""
    graph = graph_of(situation.endpoint, situation.task.task_id)
    if graph is None:
        return ""
    running = [each for each in graph.stages if each.state == "running"]
    if running:
        first = running[0]
        doing = f"stage {first.name or first.number}"
        doing += f": {first.ended} of {first.calls} calls have ended" if first.calls > 1 else " runs"
        if others := len(running) - 1:
            doing += f", and {others} more {'stage runs' if others == 1 else 'stages run'}"
    elif graph.calls:
        doing = f"{graph.ended} of {graph.calls} calls of its stages have ended"
    else:
        return ""
    return f"; {doing}{_as_of(situation)}"


def _progress(situation: Situation) -> str:
    """How far the function is, as a part of a sentence; empty if it has not said so."""
    progress = progress_of(situation.task, situation.endpoint)
    if progress is None:
        return ""
    # Its own age, because a function that hangs says nothing new while the endpoint's reports continue.
    return f"; progress: {progress} (as of {ago(situation.now.timestamp() - progress.at)})"


def _before_retry(situation: Situation) -> _Answer | None:
    """Explain a task whose function raised, until the time of its retry."""
    detail = situation.detail
    left_s = detail.get("retry_at", 0.0) - situation.now.timestamp()
    if left_s <= 0:
        return None
    raised = _raised(str(detail.get("error", "")))
    return Reason.RETRYING, f"{raised}; retry {detail['retry']} of {detail['retries']} in {math.ceil(left_s)} s."


def _raised(error: str) -> str:
    if error == _WALLTIME:
        return "It ran longer than its walltime"
    return f"It raised {error}" if error else "It raised an exception"


def _of_the_endpoint(situation: Situation) -> _Answer | None:
    endpoint, waits = situation.endpoint, _waits(situation)
    if endpoint is None:
        return (
            Reason.ENDPOINT_DELETED,
            "The endpoint is not registered any more; cancel the task and submit it to another one.",
        )
    name, status, as_of = f"Endpoint {endpoint.name}", endpoint.status, _as_of(situation)
    if endpoint.seen_at is None:
        return (
            Reason.ENDPOINT_NEVER_SEEN,
            f"{name} was never online: `farcall-endpoint start` on its machine starts it; {waits}.",
        )
    if not situation.online:
        since, ago = f"{endpoint.seen_at:%Y-%m-%d %H:%M:%S} UTC", span(endpoint.silent_s or 0.0)
        return Reason.ENDPOINT_OFFLINE, f"{name} has been offline since {since} ({ago}); {waits}."
    if status.problem:
        return Reason.ENDPOINT_PROBLEM, f"{name} has a problem: {status.problem.rstrip('.')}{as_of}; {waits}."
    if situation.position is not None and situation.position.limit:
        most = situation.position.limit
        running = "one running task, and it has one" if most == 1 else f"{most} running tasks, and it has as many"
        return Reason.ALLOWANCE, f"Your allowance on endpoint {endpoint.name} is {running}; {waits}."
    if found := _of_the_environment(situation):
        return found
    if status.total_workers == 0:
        return Reason.NO_WORKERS, f"{name} {_without_workers(status)}{as_of}; {waits}."
    if status.idle_workers == 0:
        workers = "its worker is" if status.total_workers == 1 else f"all {status.total_workers} workers are"
        return Reason.WORKERS_BUSY, f"{name} is online, and {workers} busy{as_of}; {waits}."
    return None


def environment_states(situation: Situation) -> Sequence[EnvironmentState]:
    """Return the reported states of a task's environment, by node; none if the task has no environment. They have the
    name from this task: other tasks may use the same environment under another name."""
    environment, endpoint = situation.task.options.environment, situation.endpoint
    if environment is None or endpoint is None or not situation.online:
        return ()
    return [renamed(each, environment.label) for each in endpoint.status.environments if each.key == environment.key]


def _of_the_environment(situation: Situation) -> _Answer | None:
    """Explain a task whose environment has no idle worker, from the endpoint's report."""
    environment, states = situation.task.options.environment, environment_states(situation)
    if environment is None or not states or any(each.warm for each in states):
        return None
    label, as_of, waits = environment.label, _as_of(situation), _waits(situation, place="the endpoint")
    starting = [each for each in states if each.starting or (each.text and not each.problem)]
    if starting:
        first = min(starting, key=lambda each: (not each.text, each.since or math.inf))
        doing = first.text  # without one, ``since`` is when the environment was prepared
        if doing and first.since is not None:
            doing = f"{doing}, {span(situation.now.timestamp() - first.since)} so far"
        text = f"The task waits for environment {label} to start {_where(starting, first)}"
        return Reason.ENVIRONMENT_STARTING, f"{text}{': ' if doing else ''}{doing}{as_of}; {waits}."
    busy = sum(each.busy for each in states)
    if busy:
        workers = f"the only worker of environment {label} is"
        if busy > 1:
            workers = f"all {busy} workers of environment {label} are"
        name = situation.endpoint.name if situation.endpoint else ""
        return Reason.WORKERS_BUSY, f"Endpoint {name} is online, and {workers} busy{as_of}; {waits}."
    failed = next((each for each in states if each.problem), None)
    if failed is not None:
        where, problem = _where([each for each in states if each.problem], failed), failed.problem.rstrip(".")
        problem += retry_of(failed.retry_at, now=situation.now.timestamp())
        return Reason.ENVIRONMENT_PROBLEM, f"Environment {label} cannot start {where}: {problem}{as_of}; {waits}."
    return None


def _where(states: Sequence[EnvironmentState], first: EnvironmentState) -> str:
    """The nodes of an environment, in a sentence."""
    node = f"on node {first.node}" if first.node else "on a node"
    others = len(states) - 1
    return node if not others else f"{node} and {others} more"


def _without_workers(status: EndpointStatus) -> str:
    """Return the predicate of a sentence about an endpoint without workers."""
    if status.reported_at is None:
        return "has connected, and has not reported its workers yet"
    if status.pending_blocks == 0:
        return "has no workers yet, it is waiting for nodes"
    blocks = "one block waits" if status.pending_blocks == 1 else f"{status.pending_blocks} blocks wait"
    return f"has no workers yet: {blocks} for nodes, or for the first manager to start"


def _as_of(situation: Situation) -> str:
    """How old the endpoint's numbers are, as a remark within a sentence; empty if that is not known."""
    age_s = situation.endpoint.status.age_s(now=situation.now.timestamp()) if situation.endpoint else None
    return "" if age_s is None else f" (as of {ago(age_s)})"


def _of_the_queue(situation: Situation) -> _Answer:
    if _is_dispatched(situation):
        place = f"the endpoint has it, and a worker is idle{_as_of(situation)}"
        return Reason.NEXT, f"It starts next: {place}; {_waits(situation)}."
    if situation.position is None:
        return Reason.QUEUE_AWAY, "The queue cannot be reached; the task is recorded, and is queued when it is back."
    if situation.position.state is QueueState.QUEUED:
        return Reason.NEXT, f"It starts next: a worker is idle{_as_of(situation)}; {_waits(situation)}."
    return (
        Reason.NOT_QUEUED,
        "The task is recorded, but not in the queue yet; the reconciler queues it within about a minute.",
    )


def infeasible_target(situation: Situation) -> InfeasibleTarget | None:
    """Why the endpoint of a task cannot hold its latency target, as it last reported; None if it can, and once the task
    has ended."""
    task, endpoint = situation.task, situation.endpoint
    if endpoint is None or not situation.online or task.state.is_terminal:
        return None
    submitters = {task.owner_id} | ({""} if task.owner_id == endpoint.owner_id else set())
    return infeasible_of(endpoint.status.infeasible, task.function_id, submitters, task.options.qos)


def _target(situation: Situation) -> str:
    """The latency target of a task that has not ended, and why it cannot be met, as sentences; empty without one."""
    qos = situation.task.options.qos
    if qos is None or not qos.has_target or situation.task.state.is_terminal:
        return ""
    target = target_text(qos.target_ms, qos.max_slowdown, qos.percentile)
    infeasible = infeasible_target(situation)
    if infeasible is None:
        return "" if situation.task.state is TaskState.RUNNING else f" Its target is {target}."
    return f" Its target, {target}, cannot be met there{_as_of(situation)}: {infeasible}"


def _is_dispatched(situation: Situation) -> bool:
    """Whether the endpoint has the task, or it is being sent."""
    position = situation.position
    return situation.task.attempt > 0 if position is None else position.state is QueueState.LEASED


def _waits(situation: Situation, *, place: str = "it") -> str:
    """The task's position, as the last part of a sentence; ``place`` is the endpoint in it."""
    position, status = situation.position, situation.endpoint.status if situation.endpoint else None
    if _is_dispatched(situation):
        others = max(0, status.pending_tasks - 1) if status else 0
        wait = "waits" if others == 1 else "wait"
        return f"the task has reached {place}" + (f", with {_tasks(others)} that {wait} there" if others else "")
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
