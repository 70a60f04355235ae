"""Repairing what a crash left between two stores.

Two gaps are possible. A submit may have died between its commit and the queue: the task is in the database and nowhere
else. A forwarder may have died between acknowledging an end in the queue and writing it to the database: the end is in
the outbox. Both repairs may be made by anyone at any time, also beside a living forwarder: queueing skips what is
queued, and the first recorded end wins. So the reconciler owns nothing and claims nothing. Leases that ran out are not
its business: whoever serves the endpoint next reaps them.

Besides, it forgets tasks whose time is over.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
from collections.abc import Callable

from aws_lambda_powertools import Logger

from farcall_common.store import Stores
from farcall_common.store.model import TaskResult
from farcall_lambdas.logs import SERVICE
from farcall_lambdas.services.submit import queue_tasks, was_dispatched
from farcall_lambdas.settings import ApiSettings

__all__ = ["Reconciled", "Reconciler"]

logger = Logger(service=SERVICE, child=True)


@dataclasses.dataclass(frozen=True)
class Reconciled:
    """What one run did: endpoints looked at, tasks offered to the queue, ends moved from outboxes to the database,
    tasks forgotten because they ended long ago."""

    endpoints: int = 0
    offered: int = 0
    recorded: int = 0
    purged: int = 0


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
        settled = dt.datetime.fromtimestamp(self._clock() - self._settings.settle_s, dt.UTC)
        endpoint_ids = self._stores.records.list_endpoints_with_open_tasks(older_than=settled)
        recorded = sum(self._record_outbox(endpoint_id) for endpoint_id in endpoint_ids)
        offered = sum(self._offer_tasks(endpoint_id, settled) for endpoint_id in endpoint_ids)
        done = Reconciled(len(endpoint_ids), offered, recorded, self._purge())
        if done != Reconciled():
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

    def _offer_tasks(self, endpoint_id: str, settled: dt.datetime) -> int:
        """Queue what was never dispatched, in the order of submission."""
        offered = 0
        after = ""
        while page := self._stores.records.list_open_tasks(endpoint_id, after=after):
            after = page[-1].task_id
            waiting = [
                task
                for task in page
                if not was_dispatched(task) and (task.submitted_at is None or task.submitted_at < settled)
            ]
            queue_tasks(self._stores, waiting, now=self._clock())
            offered += len(waiting)
        return offered

    def _purge(self) -> int:
        """Forget old tasks, in batches that hold no lock for long."""
        settings = self._settings
        ended_before = dt.datetime.fromtimestamp(self._clock(), dt.UTC) - dt.timedelta(days=settings.retention_days)
        purged = 0
        while purged < settings.purge_per_round:
            limit = min(settings.purge_batch, settings.purge_per_round - purged)
            count = self._stores.records.purge_tasks(ended_before=ended_before, limit=limit)
            purged += count
            if count < limit:
                break
        return purged


def _returned_at(end: TaskResult) -> float:
    return end.timings.get("returned_at", 0.0)
