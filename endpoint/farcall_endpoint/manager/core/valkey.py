"""Requests of tasks for the Valkey of their submitter. Pure: no I/O, no clock.

The agent is asked once for all requests of a submitter that come before its answer.
"""

from __future__ import annotations

from typing import Final

from farcall_endpoint.contracts.agent_manager import ValkeyAnswered, ValkeyRequested
from farcall_endpoint.contracts.manager_worker import ValkeyAnswer, ValkeyRequest
from farcall_endpoint.manager.core.actions import Action, Answer, Pass
from farcall_endpoint.manager.core.workers import Worker

_MOST_OPEN: Final = 10_000
"""Requests of one submitter."""


class ValkeyRequests:
    """The requests that have no answer yet.

    :param agent_host: the agent's machine, where the servers are, as tasks of this node reach it.
    """

    def __init__(self, *, actions: list[Action], agent_host: str) -> None:
        self._actions = actions
        self._agent_host = f"[{agent_host}]" if ":" in agent_host else agent_host
        self._open: dict[str, list[tuple[Worker, str, int]]] = {}

    def requested(self, worker: Worker, packet: ValkeyRequest) -> None:
        """The task that a worker runs asks.

        :raises ValueError: for more requests than a task makes.
        """
        submitter = worker.jobs[0].order.submitter
        waiting = self._open.get(submitter)
        if waiting is None:
            waiting = self._open[submitter] = []
            self._actions.append(Pass(ValkeyRequested(submitter), ()))
        elif len(waiting) >= _MOST_OPEN:
            raise ValueError("more requests for Valkey than a worker sends")
        waiting.append((worker, packet.task_id, packet.number))

    def answered(self, message: ValkeyAnswered) -> None:
        """The agent answers."""
        url = ""
        if (address := message.address) is not None:
            url = f"redis://:{address.password}@{self._agent_host}:{address.port}/0"
        for worker, task_id, number in self._open.pop(message.submitter, ()):
            if worker.runs(task_id):
                self._actions.append(Answer(worker.worker_id, ValkeyAnswer(number, url, message.error), ()))
