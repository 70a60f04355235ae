"""Requests of tasks for blocks in the memory of nodes. Pure: no I/O, no clock."""

from __future__ import annotations

import collections
from typing import Final

from farcall_endpoint.contracts.manager_worker import BlocksRequest
from farcall_endpoint.manager.core.actions import Action, Answer, ServeBlocks
from farcall_endpoint.manager.core.events import BlocksServed
from farcall_endpoint.manager.core.workers import Worker

_MOST_OPEN: Final = 256
"""Requests of one worker."""
MOST_PARTS: Final = 56
MOST_BYTES: Final = 64 * 2**20
"""Limits of a request. Readers have the same numbers (:mod:`farcall_common.objects.node_blocks`)."""
_MOST_OPEN_BYTES: Final = 4 * MOST_BYTES
"""Limit of all open requests of one worker together: the manager has them in memory."""


class BlockRequests:
    """The requests that have no answer yet."""

    def __init__(self, *, actions: list[Action]) -> None:
        self._actions = actions
        self._open: collections.Counter[int] = collections.Counter()
        self._sizes: dict[tuple[int, int], int] = {}

    def requested(self, worker: Worker, packet: BlocksRequest) -> None:
        """The task that a worker runs asks, for blocks of its own submitter.

        :raises ValueError: for more requests than a task makes.
        """
        self._open[worker.worker_id] += 1
        if self._open[worker.worker_id] > _MOST_OPEN:
            raise ValueError("more requests for blocks than a worker sends")
        if any(not 0 <= start <= end for _, start, end in packet.parts):
            raise ValueError("a part of a block that ends before it begins")
        size = sum(end - start for _, start, end in packet.parts)
        own = sum(each for (number, _), each in self._sizes.items() if number == worker.worker_id)
        if len(packet.parts) > MOST_PARTS or size > MOST_BYTES or size + own > _MOST_OPEN_BYTES:
            raise ValueError("a request for more bytes than a worker asks for")
        self._sizes[worker.worker_id, packet.number] = size
        order = worker.jobs[0].order
        self._actions.append(ServeBlocks(worker.worker_id, order.submitter, packet, order.share_of))

    def served(self, event: BlocksServed, worker: Worker | None) -> None:
        """A request has its answer. ``worker``: that has asked; None if it is gone."""
        self._open[event.worker_id] -= 1
        self._sizes.pop((event.worker_id, event.packet.number), None)
        if not self._open[event.worker_id]:
            del self._open[event.worker_id]
        if worker is not None and worker.runs(event.task_id):
            self._actions.append(Answer(event.worker_id, event.packet, event.body))
