"""Requests of tasks for blocks in the memory of nodes. Pure: no I/O, no clock."""

from __future__ import annotations

import collections
from typing import Final

from farcall_endpoint.manager.actions import Action, Answer, ServeBlocks
from farcall_endpoint.manager.events import BlocksServed
from farcall_endpoint.manager.workers import Worker
from farcall_endpoint.worker.channel import BlocksRequest

_MOST_OPEN: Final = 256
"""Requests of one worker."""


class BlockRequests:
    """The requests that have no answer yet."""

    def __init__(self, *, actions: list[Action]) -> None:
        self._actions = actions
        self._open: collections.Counter[int] = collections.Counter()

    def requested(self, worker: Worker, packet: BlocksRequest) -> None:
        """The task that a worker runs asks, for blocks of its own submitter.

        :raises ValueError: for more requests than a task makes.
        """
        self._open[worker.worker_id] += 1
        if self._open[worker.worker_id] > _MOST_OPEN:
            raise ValueError("more requests for blocks than a worker sends")
        self._actions.append(ServeBlocks(worker.worker_id, worker.jobs[0].order.submitter, packet))

    def served(self, event: BlocksServed, worker: Worker | None) -> None:
        """A request has its answer. ``worker``: that has asked; None if it is gone."""
        self._open[event.worker_id] -= 1
        if not self._open[event.worker_id]:
            del self._open[event.worker_id]
        if worker is not None and worker.runs(event.task_id):
            self._actions.append(Answer(event.worker_id, event.packet, event.body))
