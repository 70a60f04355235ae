"""Resume: claims the endpoint of an agent that connects, compares the agent's spool with the queue's leases and the
database, then serves the endpoint.

::

    CLAIMING ──▶ READING ──▶ COMPARING ──▶ SERVING
       ▲            │ data lost              │ data lost
       │            ▼                        │
       │        RESTORING ──▶ READING        │
       └─────────────────────────────────────┘

Each Hello of an agent starts a new generation of its endpoint, without memory of the one before: the tasks that the
agent holds are compared with the queue's leases and the database. When the queue loses its data, the same phases follow
under a new fence, while the connection stays open and the lease table has the tasks that the agent holds. After the
agent has disconnected, the endpoint stays until the agent's leases have ended.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from typing import Final

from farcall_common import wire
from farcall_common.store.model import Task, TaskResult
from farcall_common.wire import TaskRef, TaskState
from farcall_forwarder.core import actions as do
from farcall_forwarder.core import events as ev
from farcall_forwarder.core.actions import Action
from farcall_forwarder.core.dispatch import lease_tasks
from farcall_forwarder.core.endpoint import Endpoint, EndpointPhase
from farcall_forwarder.core.leases import Lease, Stage
from farcall_forwarder.core.maintenance import maintain, read_cancels
from farcall_forwarder.core.policy import Instant
from farcall_forwarder.core.presence import record_presence, record_spool
from farcall_forwarder.core.results import lost, recorded_result

#: Only agents report these states.
_ACCEPTED: Final = frozenset({TaskState.WAITING_FOR_LAUNCH, TaskState.RUNNING})


def claim(endpoint: Endpoint) -> list[Action]:
    """Claim the endpoint, at first or after its queue lost its data."""
    endpoint.phase = EndpointPhase.CLAIMING
    endpoint.fence = 0
    endpoint.forget_steps()
    endpoint.outbox.hold(endpoint.endpoint_id)
    return [
        do.ClaimEndpoint(
            endpoint.endpoint_id,
            endpoint.generation,
            endpoint.public_key,
            endpoint.spool_id,
            endpoint.policy.ownership_ttl_s,
            endpoint.weights,
            endpoint.spool_generation,
        )
    ]


def on_claimed(endpoint: Endpoint, event: ev.EndpointClaimed) -> list[Action]:
    """Read the queue's leases under the new fence."""
    if endpoint.phase is not EndpointPhase.CLAIMING:
        return []
    endpoint.fence, endpoint.data_only = event.fence, event.data_only
    return _read_leases(endpoint)


def on_restored(endpoint: Endpoint) -> list[Action]:
    """Read the leases of the restored queue."""
    return _read_leases(endpoint)


def _read_leases(endpoint: Endpoint) -> list[Action]:
    endpoint.phase = EndpointPhase.READING
    return [do.ReadLeases(endpoint.endpoint_id, endpoint.fence)]


def on_lost(endpoint: Endpoint) -> list[Action]:
    """The queue has lost this endpoint's data (or never had it)."""
    match endpoint.phase:
        case EndpointPhase.READING:
            endpoint.phase = EndpointPhase.RESTORING
            held = endpoint.leases.attempts() if endpoint.is_welcomed else endpoint.held
            return [do.RestoreQueue(endpoint.endpoint_id, endpoint.fence, held, endpoint.policy.lease_s)]
        case EndpointPhase.CLAIMING:
            return []
        case _:
            return claim(endpoint)


def on_leases_read(endpoint: Endpoint, event: ev.LeasesRead, now: Instant) -> list[Action]:
    """Read the tasks to compare; without any, serve the endpoint."""
    if endpoint.phase is not EndpointPhase.READING:
        return []
    endpoint.phase = EndpointPhase.COMPARING
    endpoint.queue_leases = event.leases
    known: Iterable[str] = endpoint.leases if endpoint.is_welcomed else endpoint.held
    unheld = frozenset(event.leases.keys() - known)
    wanted = unheld if endpoint.is_welcomed else unheld | endpoint.held.keys()
    if not wanted:
        return _serve(endpoint, (), now)
    return [do.ReadTasks(endpoint.endpoint_id, endpoint.fence, sorted(wanted), unheld)]


def on_tasks_read(endpoint: Endpoint, event: ev.TasksRead, now: Instant) -> list[Action]:
    """Compare the tasks, and serve the endpoint."""
    if endpoint.phase is not EndpointPhase.COMPARING:
        return []
    found = compare(
        endpoint_id=endpoint.endpoint_id,
        spool_id=endpoint.spool_id,
        held={} if endpoint.is_welcomed else endpoint.held,
        leases={id_: attempt for id_, attempt in endpoint.queue_leases.items() if id_ not in endpoint.leases},
        tasks=event.tasks,
        spools=event.spools,
        accepted=event.accepted,
        expires_at=now.mono + endpoint.policy.lease_s,
    )
    endpoint.leases.update((lease.task_id, lease) for lease in found.keep)
    for result in found.results:
        endpoint.outbox.add(result, verified=True)
    actions = endpoint.requeue(found.requeue) + _serve(endpoint, tuple(found.forget), now)
    if unknown := sum(ref.task_id not in event.tasks for ref in found.forget):
        # They ended long ago, or the database was restored to a time before they were submitted.
        fields: dict[str, str | int] = {"endpoint_id": endpoint.endpoint_id, "tasks": unknown}
        actions.append(do.Log("the endpoint drops tasks that the database does not have", fields))
    return actions


def _serve(endpoint: Endpoint, forget: tuple[TaskRef, ...], now: Instant) -> list[Action]:
    endpoint.phase = EndpointPhase.SERVING
    endpoint.held, endpoint.queue_leases = {}, {}
    endpoint.outbox.open(endpoint.endpoint_id, endpoint.fence)
    endpoint.expect_work()
    actions: list[Action] = []
    session = endpoint.session
    if session and not endpoint.is_welcomed:
        welcome = wire.Welcome(
            session_id=session.session_id,
            forwarder_id=endpoint.context.forwarder_id,
            protocol_version=wire.PROTOCOL_VERSION,
            heartbeat_s=session.wire.heartbeat_s,
            forget=forget,
            relay_piece_bytes=endpoint.policy.relay_piece_bytes,
            file_piece_bytes=endpoint.policy.file_piece_bytes,
        )
        actions += endpoint.send(welcome, now)
    if not endpoint.is_welcomed or session is None:
        actions += record_presence(endpoint, now)
    endpoint.is_welcomed = True
    actions += record_spool(endpoint, now)
    return [*actions, *maintain(endpoint, now), *read_cancels(endpoint), *lease_tasks(endpoint)]


def on_session_lost(endpoint: Endpoint, now: Instant) -> list[Action]:
    """The agent has disconnected. Tasks that it accepted stay leased for a while: it may return with them. Sent tasks
    that may not run twice stay leased, too: they may have arrived."""
    endpoint.session = None
    endpoint.return_until = now.mono + endpoint.policy.return_s
    unread = [*endpoint.file_reads.close()]
    if not endpoint.is_serving:
        return unread
    returned = [
        lease.task_id
        for lease in endpoint.leases.values()
        if lease.stage is Stage.PREPARING or (lease.stage is Stage.SENT and lease.idempotent)
    ]
    endpoint.leases.drop(returned)
    return [*unread, *endpoint.requeue(returned), *record_presence(endpoint, now)]


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Decision for each task that the agent holds or the queue leases."""

    keep: list[Lease] = dataclasses.field(default_factory=list)
    """Held and leased: the agent continues them."""
    forget: list[TaskRef] = dataclasses.field(default_factory=list)
    """Held, but ended or never known: the agent drops its copy."""
    requeue: list[str] = dataclasses.field(default_factory=list)
    """Leased, but not with the agent: they may be sent again."""
    results: list[TaskResult] = dataclasses.field(default_factory=list)
    """Leased, but over: ended in the database already, or lost now."""


def compare(
    *,
    endpoint_id: str,
    spool_id: str,
    held: Mapping[str, int],
    leases: Mapping[str, int],
    tasks: Mapping[str, Task],
    spools: Mapping[str, frozenset[str]],
    accepted: Collection[str],
    expires_at: float,
) -> Comparison:
    """Compare what the agent holds with what the queue leases to the endpoint.

    :param spool_id: the agent's spool. A task that was sent to this spool and is not in it never arrived.
    :param held: attempts by task id, from the agent.
    :param leases: attempts by task id, from the queue.
    :param tasks: the records of all of them that the database has.
    :param spools: of tasks that may not run twice, the spools that they were sent to.
    :param accepted: those of them that an agent has accepted. They are not sent again if they are not held.
    :param expires_at: monotonic second at which the kept leases end unless they are renewed.
    """
    found = Comparison()
    for task_id, attempt in held.items():
        task = tasks.get(task_id)
        if task is None or task.endpoint_id != endpoint_id or task.state.is_terminal:
            found.forget.append(TaskRef(task_id=task_id, attempt=attempt))
        elif task_id in leases:
            found.keep.append(Lease.of_held(task, attempt=leases[task_id], expires_at=expires_at))
        # A held task that waits in the queue stays there: it is sent again, and the agent recognises it.
    for task_id, attempt in leases.items():
        task = tasks.get(task_id)
        if task is None:
            reason = "The record of the task was deleted."
            found.results.append(lost(task_id, endpoint_id=endpoint_id, attempt=attempt, reason=reason))
        elif task.state.is_terminal:
            found.results.append(recorded_result(task, endpoint_id=endpoint_id))
        elif task_id in held:
            pass
        elif task.options.idempotent or not (
            reason := _may_have_started(
                spools.get(task_id, frozenset()), spool_id, is_accepted=task_id in accepted or task.state in _ACCEPTED
            )
        ):
            found.requeue.append(task_id)
        else:
            found.results.append(lost(task_id, endpoint_id=endpoint_id, attempt=attempt, reason=reason))
    return found


def _may_have_started(sent_to: frozenset[str], spool_id: str, *, is_accepted: bool) -> str:
    """The reason why a task that is not in the agent's spool may have started; empty if it cannot have arrived."""
    if not sent_to <= {spool_id}:
        return "The endpoint lost its spool while it had the task; whether the task ran is not known."
    if is_accepted:
        # A spool drops a task only after its result was recorded: it lost its last writes, or the database is restored.
        return "The endpoint had accepted the task, and does not have it any more; whether the task ran is not known."
    return ""
