"""What becomes of tasks when an agent comes (back): its spool, the queue's leases and the database are compared."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Final

from farcall_common.store.model import Task, TaskResult
from farcall_common.wire import TaskRef, TaskState
from farcall_forwarder.core.leases import Lease
from farcall_forwarder.core.results import lost, recorded_end

__all__ = ["Comparison", "compare"]

#: Only agents report these states.
_ACCEPTED: Final = frozenset({TaskState.WAITING_FOR_LAUNCH, TaskState.RUNNING})


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What to do with each task that the agent holds or the queue leases."""

    keep: list[Lease] = dataclasses.field(default_factory=list)
    """Held and leased: the agent goes on with them."""
    forget: list[TaskRef] = dataclasses.field(default_factory=list)
    """Held, but ended or never known: the agent drops its copy."""
    requeue: list[str] = dataclasses.field(default_factory=list)
    """Leased, but not with the agent: they may be sent again."""
    ends: list[TaskResult] = dataclasses.field(default_factory=list)
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

    :param spool_id: the agent's spool. A task that was sent to this very spool and is not in it never arrived.
    :param held: attempts by task id, as the agent says.
    :param leases: attempts by task id, as the queue says.
    :param tasks: all of them, as far as the database knows them.
    :param spools: of tasks that may not run twice, the spools that they were sent to.
    :param accepted: those of them that an agent has accepted: what is accepted and not held any more is not sent again.
    :param expires_at: when the leases that are kept end unless they are prolonged, in monotonic seconds.
    """
    found = Comparison()
    for task_id, attempt in held.items():
        task = tasks.get(task_id)
        if task is None or task.endpoint_id != endpoint_id or task.state.is_terminal:
            found.forget.append(TaskRef(task_id=task_id, attempt=attempt))
        elif task_id in leases:
            found.keep.append(Lease.of_held(task, attempt=leases[task_id], expires_at=expires_at))
        # A held task that waits in the queue stays there: it is sent again, and the agent knows that it has it.
    for task_id, attempt in leases.items():
        task = tasks.get(task_id)
        if task is None:
            reason = "The record of the task is gone."
            found.ends.append(lost(task_id, endpoint_id=endpoint_id, attempt=attempt, reason=reason))
        elif task.state.is_terminal:
            found.ends.append(recorded_end(task, endpoint_id=endpoint_id))
        elif task_id in held:
            pass
        elif task.options.idempotent or not (
            reason := _may_have_started(
                spools.get(task_id, frozenset()), spool_id, is_accepted=task_id in accepted or task.state in _ACCEPTED
            )
        ):
            found.requeue.append(task_id)
        else:
            found.ends.append(lost(task_id, endpoint_id=endpoint_id, attempt=attempt, reason=reason))
    return found


def _may_have_started(sent_to: frozenset[str], spool_id: str, *, is_accepted: bool) -> str:
    """Why a task that is not in the agent's spool may have started; empty if it cannot have arrived."""
    if not sent_to <= {spool_id}:
        return "The endpoint lost its spool while it had the task; whether the task ran is not known."
    if is_accepted:
        # A spool forgets nothing but what was recorded. So it lost its last moments, or the database was restored.
        return "The endpoint had accepted the task, and has it no more; whether the task ran is not known."
    return ""
