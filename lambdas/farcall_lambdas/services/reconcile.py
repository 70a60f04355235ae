"""Repairing what a crash left between two stores.

Two gaps are possible. A submit may have died between its commit and the queue: the task is in the database and nowhere
else. A forwarder may have died between acknowledging an end in the queue and writing it to the database: the end is in
the outbox. Both repairs may be made by anyone at any time, also beside a living forwarder: queueing skips what is
queued, and the first recorded end wins. So the reconciler owns nothing and claims nothing. Leases that ran out are not
its business: whoever serves the endpoint next reaps them.

Besides, it forgets tasks, and what the audit tells, when their time is over.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
from collections.abc import Callable

from aws_lambda_powertools import Logger

from farcall_common.store import Stores
from farcall_common.store.model import TaskResult
from farcall_common.wire.states import TaskState
from farcall_lambdas.logs import SERVICE
from farcall_lambdas.services.submit import queue_tasks, was_dispatched
from farcall_lambdas.settings import ApiSettings

__all__ = ["Reconciled", "Reconciler"]

logger = Logger(service=SERVICE, child=True)


@dataclasses.dataclass(frozen=True)
class Reconciled:
    """What one run did: endpoints looked at, tasks offered to the queue, ends moved from outboxes to the database,
    tasks and entries of the audit forgotten because they are old. ``tasks_waiting`` are those that were submitted a
    while ago and do not run yet, wherever they wait."""

    endpoints: int = 0
    offered: int = 0
    recorded: int = 0
    purged: int = 0
    audit_purged: int = 0
    tasks_waiting: int = 0


class Reconciler:
    """Looks at endpoints whose tasks have been open for longer than the normal way takes."""

    def __init__(self, stores: Stores, settings: ApiSettings, *, clock: Callable[[], float]) -> None:
        self._stores = stores
        self._settings = settings
        self._clock = clock

    def run(self) -> Reconciled:
        """One round.

        :raises Unavailable: when a store cannot be reached; the next round starts over.
        """
        began_at = self._clock()
        settled = dt.datetime.fromtimestamp(began_at - self._settings.settle_s, dt.UTC)
        endpoint_ids = self._stores.records.list_endpoints_with_open_tasks(older_than=settled)
        recorded = sum(self._record_outbox(endpoint_id) for endpoint_id in endpoint_ids)
        offers = [self._offer_tasks(endpoint_id, settled) for endpoint_id in endpoint_ids]
        offered, waiting = (sum(each) for each in zip((0, 0), *offers, strict=True))
        purged, audit_purged = self._purge(until=began_at + self._settings.purge_until_s)
        done = Reconciled(len(endpoint_ids), offered, recorded, purged, audit_purged, waiting)
        # A line in each round, for the metric TasksWaiting is made of it.
        logger.info("reconciled", **dataclasses.asdict(done))
        return done

    def _record_outbox(self, endpoint_id: str) -> int:
        """Write old ends to the database. A living forwarder does so within moments, so what is old has nobody."""
        before = self._clock() - self._settings.settle_s
        recorded = 0
        while ends := [end for end in self._stores.queue.outbox(endpoint_id) if _returned_at(end) < before]:
            now = dt.datetime.fromtimestamp(self._clock(), dt.UTC)
            self._stores.records.record_results(ends, at=now)
            self._stores.queue.flushed(endpoint_id, [end.task_id for end in ends])
            recorded += len(ends)
        return recorded

    def _offer_tasks(self, endpoint_id: str, settled: dt.datetime) -> tuple[int, int]:
        """Queue what was never dispatched, in the order of submission. Returns how many tasks these are, and how many
        do not run yet."""
        offered = waiting = 0
        after = ""
        while page := self._stores.records.list_open_tasks(endpoint_id, after=after):
            after = page[-1].task_id
            old = [task for task in page if task.submitted_at is None or task.submitted_at < settled]
            undispatched = [task for task in old if not was_dispatched(task)]
            queue_tasks(self._stores, undispatched, now=self._clock())
            offered += len(undispatched)
            waiting += sum(task.state is not TaskState.RUNNING for task in old)
        return offered, waiting

    def _purge(self, *, until: float) -> tuple[int, int]:
        """Forget old tasks and old entries, in batches that hold no lock for long, until ``until`` (epoch seconds)."""
        records, settings = self._stores.records, self._settings
        now = dt.datetime.fromtimestamp(self._clock(), dt.UTC)
        ended_before = now - dt.timedelta(days=settings.retention_days)
        before = now - dt.timedelta(days=settings.audit_days)
        tasks = self._repeat(lambda limit: records.purge_tasks(ended_before=ended_before, limit=limit), until)
        return tasks, self._repeat(lambda limit: records.purge_audit(before=before, limit=limit), until)

    def _repeat(self, purge: Callable[[int], int], until: float) -> int:
        """Batch after batch until one is not full, or it is late; at least one."""
        limit = self._settings.purge_batch
        purged = count = purge(limit)
        while count == limit and self._clock() < until:
            purged += (count := purge(limit))
        return purged


def _returned_at(end: TaskResult) -> float:
    return end.timings.get("returned_at", 0.0)
