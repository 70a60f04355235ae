"""How tasks can end at an endpoint, each end as a value."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence

from farcall_common.errors import ErrorRecord
from farcall_common.wire import TaskState
from farcall_endpoint import outcomes
from farcall_endpoint.agent.tasks import End, Task
from farcall_endpoint.protocol import Finished
from farcall_endpoint.shared_memory import Bytes


class Ends:
    """Makes ends; whose they are, and that they are, is the caller's to note.

    :param endpoint_id: for error records.
    :param max_inline_bytes: larger results must be uploaded before their end is reported.
    """

    def __init__(self, *, endpoint_id: str, max_inline_bytes: int) -> None:
        self._endpoint_id = endpoint_id
        self._max_inline_bytes = max_inline_bytes

    def finished(self, task: Task, finished: Finished, bodies: Sequence[Bytes]) -> End:
        """A worker has done with it, well or not."""
        end = End(finished.state, started_at=finished.started_at, ended_at=finished.ended_at, details=finished.details)
        if finished.error is not None:
            end.error = {"attempt": task.attempt, "endpoint_id": self._endpoint_id, **finished.error}
        if finished.result is not None:
            end.body = bodies[finished.result]
            end.size_bytes = len(end.body)
            if end.size_bytes > self._max_inline_bytes:
                end.sha256 = hashlib.sha256(end.body).hexdigest()
        return end

    def failed(
        self, task: Task, record: ErrorRecord, *, started_at: float | None = None, ended_at: float | None = None
    ) -> End:
        """It fails for a reason of ours."""
        return End(TaskState.FAILED, self._located(record, task), started_at=started_at, ended_at=ended_at)

    def given_up(self, task: Task, reason: str, *, stdout_tail: str = "", stderr_tail: str = "") -> End:
        """No attempt is left to it, and the last one took down what ran it."""
        elsewhere = min(task.spec.attempt - 1, task.spec.options.max_attempts)
        reasons = ("the endpoint that had it went away",) * elsewhere + (*task.deaths, reason)
        record = outcomes.worker_died(
            reason, starts=task.starts, reasons=reasons, stdout_tail=stdout_tail, stderr_tail=stderr_tail
        )
        return dataclasses.replace(self.failed(task, record), exhausted=task.spec.options.idempotent)

    def lost(self, task: Task, reason: str) -> End:
        """It may have run when what had it went away, and must not run twice."""
        return End(TaskState.LOST, self._located(outcomes.lost(reason), task))

    def cancelled(self, *, running: bool) -> End:
        """Its submitter does not want it any more."""
        return End(TaskState.CANCELLED, outcomes.cancelled(running=running).to_json())

    def _located(self, record: ErrorRecord, task: Task) -> dict[str, object]:
        return dataclasses.replace(record, attempt=task.attempt, endpoint_id=self._endpoint_id).to_json()
