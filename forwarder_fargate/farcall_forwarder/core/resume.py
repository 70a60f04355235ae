"""Resume: compares an agent's spool with the queue's leases and the database when the agent connects."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Final

from farcall_common.store.model import Task, TaskResult
from farcall_common.wire import TaskRef, TaskState
from farcall_forwarder.core.leases import Lease
from farcall_forwarder.core.results import lost, recorded_result

#: Only agents report these states.
_ACCEPTED: Final = frozenset({TaskState.WAITING_FOR_LAUNCH, TaskState.RUNNING})


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
            reason = "The record of the task is gone."
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
