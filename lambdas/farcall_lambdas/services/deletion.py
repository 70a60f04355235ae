"""Open tasks of deleted endpoints: they end as cancelled, and leave the queue, in batches.

The request that deletes an endpoint ends some of them, the reconciler the others. It finds them by the open tasks in
the database; so the last of those ends after the queue has forgotten the endpoint.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
from typing import Final

from farcall_common.store import Stores
from farcall_common.store.transitions import endpoint_deleted
from farcall_common.wire.states import Reporter

#: Tasks that one call ends.
BATCH: Final = 1000


@dataclasses.dataclass(frozen=True)
class Ended:
    """How many tasks ended, and whether those were all."""

    count: int
    is_all: bool


def end_tasks(stores: Stores, endpoint_id: str, *, reporter: Reporter, at: dt.datetime) -> Ended:
    """End a batch of the open tasks of a deleted endpoint. Harmless to repeat.

    :raises Unavailable: when a store cannot be reached.
    """
    is_forgotten = stores.queue.forget_endpoint(endpoint_id, limit=BATCH)
    task_ids = stores.tasks.list_open_ids_of(endpoint_id, limit=BATCH)
    if not is_forgotten and len(task_ids) < BATCH:
        return Ended(0, is_all=False)
    results = [endpoint_deleted(task_id, endpoint_id, reporter=reporter) for task_id in task_ids]
    ended = stores.tasks.record_results(results, at=at) if results else {}
    return Ended(len(ended), is_all=len(task_ids) < BATCH)
