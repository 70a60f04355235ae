"""Metrics: counts and waits of one forwarder since the last reading, for its log. CloudWatch reads metrics from these
lines, one per minute and not one per task. No line names an endpoint."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from farcall_common.store.model import LeasedTask, TaskResult
from farcall_common.wire import TaskState


@dataclasses.dataclass(slots=True)
class _Reading:
    tasks_dispatched: int = 0
    tasks_redelivered: int = 0
    tasks_finished: int = 0
    tasks_failed: int = 0
    leases_expired: int = 0
    queue_wait_s: float = 0.0
    push_lag_s: float = 0.0
    file_bytes: int = 0


class Meter:
    """Sums since the last reading, and the longest of two waits, in seconds."""

    def __init__(self) -> None:
        self._reading = _Reading()

    def leased(self, tasks: Iterable[LeasedTask]) -> None:
        """Count tasks that were leased for an endpoint."""
        reading = self._reading
        for leased in tasks:
            if leased.attempt > 1:
                reading.tasks_redelivered += 1
            else:
                reading.tasks_dispatched += 1
                reading.queue_wait_s = max(reading.queue_wait_s, leased.leased_at - leased.enqueued_at)

    def expired(self, leases: Sequence[LeasedTask]) -> None:
        """Count leases that have ended and whose tasks the queue does not offer again."""
        self._reading.leases_expired += len(leases)

    def relayed(self, piece_bytes: int) -> None:
        """Count a piece of a file of another endpoint that an agent gets."""
        self._reading.file_bytes += piece_bytes

    def recorded(self, results: Iterable[TaskResult], *, recorded_at: float) -> None:
        """Count recorded results, which are pushed to clients now; ``recorded_at`` in epoch seconds."""
        reading = self._reading
        for result in results:
            reading.tasks_finished += 1
            reading.tasks_failed += result.state is not TaskState.SUCCESS
            if returned_at := result.timings.get("returned_at"):
                reading.push_lag_s = max(reading.push_lag_s, recorded_at - returned_at)

    def read(self, *, endpoints: int, connections: int) -> Mapping[str, int | float]:
        """The numbers since the last reading, and the current numbers of connections."""
        numbers = dataclasses.asdict(self._reading)
        self._reading = _Reading()
        rounded = {name: round(number, 3) for name, number in numbers.items()}
        return {**rounded, "endpoints_connected": endpoints, "connections": connections}
