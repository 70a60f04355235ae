"""Cancelling tasks.

What happens depends on where the task is, and the queue knows that best:

* waiting in the queue: it is taken out and ends as cancelled, here and now;
* with its endpoint: the endpoint is told, and reports the end;
* ended: too late;
* not in the queue at all (it was never queued, or the queue was wiped): it ends as cancelled in the database. Should
  the endpoint hold it after all, the first end wins and its result will be dropped.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
from collections.abc import Callable, Mapping, Sequence

from farcall_common.errors import TaskUnknown
from farcall_common.store import Stores
from farcall_common.store.model import AuditEntry, CancelOutcome, Task
from farcall_common.store.transitions import cancelled_before_dispatch
from farcall_common.wire.states import TaskState
from farcall_lambdas.identity import Identity
from farcall_lambdas.services.audit import entry
from farcall_lambdas.services.limits import check_count
from farcall_lambdas.settings import ApiSettings


@dataclasses.dataclass(frozen=True)
class Cancellation:
    """``outcome`` is "cancelled", "requested", "finished" or "unknown"; ``state`` is the task's state now."""

    outcome: str
    state: TaskState | None = None


class CancelService:
    """Cancels tasks of the caller."""

    def __init__(self, stores: Stores, settings: ApiSettings, *, clock: Callable[[], float]) -> None:
        self._stores = stores
        self._settings = settings
        self._clock = clock

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
            there = [task for task in open_tasks if task.endpoint_id == endpoint_id]
            outcome |= self._cancel_at(identity, endpoint_id, there)
        return outcome

    def _cancel_at(self, identity: Identity, endpoint_id: str, tasks: Sequence[Task]) -> Mapping[str, Cancellation]:
        now = self._clock()
        found = self._stores.queue.cancel(endpoint_id, [task.task_id for task in tasks])
        outcome: dict[str, Cancellation] = {}
        never_run: list[str] = []
        for task in tasks:
            match found.get(task.task_id, CancelOutcome.UNKNOWN):
                case CancelOutcome.REQUESTED:
                    outcome[task.task_id] = Cancellation("requested", task.state)
                case CancelOutcome.FINISHED:
                    # The end is on its way into the database, which will say what it is.
                    outcome[task.task_id] = Cancellation("finished")
                case CancelOutcome.REMOVED | CancelOutcome.UNKNOWN:
                    never_run.append(task.task_id)
        done = {
            task.task_id: entry(identity, "task.cancel", task.task_id, at=now, owner_id=task.owner_id) for task in tasks
        }
        requested = [id_ for id_, each in outcome.items() if each.outcome == "requested"]
        self._stores.audit.add_entries([done[id_] for id_ in requested])
        return {**outcome, **self._end(endpoint_id, never_run, [done[id_] for id_ in never_run], now=now)}

    def _end(
        self, endpoint_id: str, task_ids: Sequence[str], entries: Sequence[AuditEntry], *, now: float
    ) -> Mapping[str, Cancellation]:
        """Record the ends. Should we die before, those that the queue knows of are in its outbox."""
        if not task_ids:
            return {}
        ends = [cancelled_before_dispatch(task_id, endpoint_id) for task_id in task_ids]
        tasks = self._stores.tasks.audited(*entries)
        first = tasks.record_results(ends, at=dt.datetime.fromtimestamp(now, dt.UTC))
        self._stores.queue.flushed({endpoint_id: task_ids})
        return {
            task_id: Cancellation("cancelled", TaskState.CANCELLED) if task_id in first else Cancellation("finished")
            for task_id in task_ids
        }
