"""Cancelling tasks.

It depends on the task's state in the queue:

* waiting: it is removed, and cancelled at once;
* leased: the endpoint receives a cancel request, and reports its result;
* finished: too late;
* not in the queue (it was never queued, or the queue was wiped): it is cancelled in the database. If the endpoint
  holds it after all, the first result counts and the endpoint's is dropped.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from farcall_common.errors import TaskUnknown
from farcall_common.store.model import AuditEntry, CancelOutcome, Task
from farcall_common.store.transitions import cancelled_before_dispatch
from farcall_common.wire.states import TaskState
from farcall_lambdas.identity import Identity
from farcall_lambdas.services.base import Service
from farcall_lambdas.services.limits import check_count


@dataclasses.dataclass(frozen=True)
class Cancellation:
    """``outcome`` is "cancelled", "requested", "finished" or "unknown"; ``state`` is the task's state now."""

    outcome: str
    state: TaskState | None = None


class CancelService(Service):
    """Cancels tasks of the caller."""

    def cancel(self, identity: Identity, task_id: str) -> Cancellation:
        """Cancel one task.

        :raises TaskUnknown: if the caller has no such task.
        """
        cancellation = self.cancel_all(identity, [task_id])[task_id]
        if cancellation.outcome == "unknown":
            raise TaskUnknown(f"There is no task {task_id}.")
        return cancellation

    def cancel_all(self, identity: Identity, task_ids: Sequence[str]) -> Mapping[str, Cancellation]:
        """Cancel many tasks; those that are not the caller's are "unknown"."""
        check_count(len(task_ids), self._settings)
        found = self._stores.tasks.get_tasks(task_ids)
        tasks = {task_id: task for task_id, task in found.items() if identity.owns(task.owner_id)}
        outcome = dict.fromkeys(task_ids, Cancellation("unknown"))
        outcome |= {id_: Cancellation("finished", task.state) for id_, task in tasks.items() if task.state.is_terminal}
        open_tasks = [task for task in tasks.values() if not task.state.is_terminal]
        for endpoint_id in dict.fromkeys(task.endpoint_id for task in open_tasks):
            tasks_there = [task for task in open_tasks if task.endpoint_id == endpoint_id]
            outcome |= self._cancel_at(identity, endpoint_id, tasks_there)
        return outcome

    def _cancel_at(self, identity: Identity, endpoint_id: str, tasks: Sequence[Task]) -> Mapping[str, Cancellation]:
        found = self._stores.queue.cancel(endpoint_id, [task.task_id for task in tasks])
        outcome: dict[str, Cancellation] = {}
        never_run: list[str] = []
        for task in tasks:
            match found.get(task.task_id, CancelOutcome.UNKNOWN):
                case CancelOutcome.REQUESTED:
                    outcome[task.task_id] = Cancellation("requested", task.state)
                case CancelOutcome.FINISHED:
                    # The result is not in the database yet.
                    outcome[task.task_id] = Cancellation("finished")
                case CancelOutcome.REMOVED | CancelOutcome.UNKNOWN:
                    never_run.append(task.task_id)
        done = {
            task.task_id: self._entry(identity, "task.cancel", task.task_id, owner_id=task.owner_id) for task in tasks
        }
        requested = [id_ for id_, each in outcome.items() if each.outcome == "requested"]
        self._stores.audit.add_entries([done[id_] for id_ in requested])
        return {**outcome, **self._finish(endpoint_id, never_run, [done[id_] for id_ in never_run])}

    def _finish(
        self, endpoint_id: str, task_ids: Sequence[str], entries: Sequence[AuditEntry]
    ) -> Mapping[str, Cancellation]:
        """Record the results. If this process dies before, those of tasks in the queue are in its outbox."""
        if not task_ids:
            return {}
        results = [cancelled_before_dispatch(task_id, endpoint_id) for task_id in task_ids]
        tasks = self._stores.tasks.audited(*entries)
        first = tasks.record_results(results, at=self._now())
        self._stores.queue.flushed({endpoint_id: task_ids})
        return {
            task_id: Cancellation("cancelled", TaskState.CANCELLED) if task_id in first else Cancellation("finished")
            for task_id in task_ids
        }
