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
import functools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from farcall_common.errors import ErrorRecord, TaskCancelled, TaskUnknown
from farcall_common.store.model import AuditEntry, CancelOutcome, Task
from farcall_common.store.transitions import cancelled_before_dispatch
from farcall_common.wire.states import TaskState
from farcall_lambdas.identity import Identity
from farcall_lambdas.services.base import Service, token_detail
from farcall_lambdas.services.limits import check_count


@dataclasses.dataclass(frozen=True)
class Cancellation:
    """``outcome`` is "cancelled", "requested", "finished" or "unknown"; ``state`` is the task's state now."""

    outcome: str
    state: TaskState | None = None


_NONE: Final = Cancellation("unknown")

#: Ids of tasks in one audit entry.
_IDS_AUDITED: Final = 100

_BY_OWNER: Final = TaskCancelled("The owner of the endpoint cancelled the task.", hint="").record


class CancelService(Service):
    """Cancels tasks of the caller, and tasks of others at endpoints of the caller."""

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
        tasks = {task_id: task for task_id, task in found.items() if identity.owns_task(task)}
        outcome = dict.fromkeys(task_ids, Cancellation("unknown"))
        outcome |= {id_: Cancellation("finished", task.state) for id_, task in tasks.items() if task.state.is_terminal}
        open_tasks = [task for task in tasks.values() if not task.state.is_terminal]
        for endpoint_id in dict.fromkeys(task.endpoint_id for task in open_tasks):
            tasks_there = [task for task in open_tasks if task.endpoint_id == endpoint_id]
            outcome |= self._cancel_at(endpoint_id, tasks_there, functools.partial(self._entries, identity))
        return outcome

    def cancel_at_endpoint(
        self, identity: Identity, endpoint_id: str, task_ids: Sequence[str]
    ) -> Mapping[str, Cancellation]:
        """Cancel tasks of any submitter at an endpoint of the caller; those of other endpoints are "unknown"."""
        check_count(len(task_ids), self._settings)
        found = self._stores.tasks.get_tasks(task_ids, with_bodies=False)
        tasks = [task for task in found.values() if task.endpoint_id == endpoint_id]
        outcome = dict.fromkeys(task_ids, Cancellation("unknown"))
        outcome |= {task.task_id: Cancellation("finished", task.state) for task in tasks if task.state.is_terminal}
        open_tasks = [task for task in tasks if not task.state.is_terminal]
        return {
            **outcome,
            **self.cancel_of_others(
                identity.identity_id, endpoint_id, open_tasks, _BY_OWNER, about=token_detail(identity)
            ),
        }

    def cancel_of_others(
        self,
        identity_id: str,
        endpoint_id: str,
        tasks: Sequence[Task],
        error: ErrorRecord,
        *,
        about: Mapping[str, object] = MappingProxyType({}),
    ) -> Mapping[str, Cancellation]:
        """Cancel open tasks of any submitters at one endpoint, for ``identity_id`` and with this error. The audit has
        an entry for each submitter, which both sides read, with the details ``about`` the caller."""
        entries = functools.partial(self._entries_of_others, identity_id, endpoint_id, error, about)
        return self._cancel_at(endpoint_id, tasks, entries, error)

    def _entries(self, identity: Identity, tasks: Sequence[Task]) -> Sequence[AuditEntry]:
        return [self._entry(identity, "task.cancel", task.task_id, owner_id=task.owner_id) for task in tasks]

    def _entries_of_others(
        self,
        identity_id: str,
        endpoint_id: str,
        error: ErrorRecord,
        about: Mapping[str, object],
        tasks: Sequence[Task],
    ) -> Sequence[AuditEntry]:
        by_submitter = defaultdict(list)
        for task in tasks:
            by_submitter[task.owner_id].append(task.task_id)
        return [
            AuditEntry(
                self._now(),
                identity_id,
                "tasks.cancel",
                endpoint_id,
                owner_id,
                {"code": error.code, "tasks": len(ids), "task_ids": ids[:_IDS_AUDITED], **about},
            )
            for owner_id, ids in by_submitter.items()
        ]

    def _cancel_at(
        self,
        endpoint_id: str,
        tasks: Sequence[Task],
        entries: Callable[[Sequence[Task]], Sequence[AuditEntry]],
        error: ErrorRecord | None = None,
    ) -> Mapping[str, Cancellation]:
        if not tasks:
            return {}
        found = self._stores.queue.cancel(endpoint_id, [task.task_id for task in tasks], error=error)
        outcome: dict[str, Cancellation] = {}
        never_run: list[Task] = []
        for task in tasks:
            match found.get(task.task_id, CancelOutcome.UNKNOWN):
                case CancelOutcome.REQUESTED:
                    outcome[task.task_id] = Cancellation("requested", task.state)
                case CancelOutcome.FINISHED:
                    # The result is not in the database yet.
                    outcome[task.task_id] = Cancellation("finished")
                case CancelOutcome.REMOVED | CancelOutcome.UNKNOWN:
                    never_run.append(task)
        requested = [task for task in tasks if outcome.get(task.task_id, _NONE).outcome == "requested"]
        self._stores.audit.add_entries(entries(requested))
        return {**outcome, **self._finish(endpoint_id, never_run, entries(never_run), error)}

    def _finish(
        self, endpoint_id: str, tasks: Sequence[Task], entries: Sequence[AuditEntry], error: ErrorRecord | None
    ) -> Mapping[str, Cancellation]:
        """Record the results. If this process dies before, those of tasks in the queue are in its outbox."""
        if not tasks:
            return {}
        task_ids = [task.task_id for task in tasks]
        results = [cancelled_before_dispatch(task_id, endpoint_id, error) for task_id in task_ids]
        first = self._stores.tasks.audited(*entries).record_results(results, at=self._now())
        self._stores.queue.flushed({endpoint_id: task_ids})
        return {
            task_id: Cancellation("cancelled", TaskState.CANCELLED) if task_id in first else Cancellation("finished")
            for task_id in task_ids
        }
