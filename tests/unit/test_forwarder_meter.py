"""Metrics of the forwarder."""

from __future__ import annotations

from farcall_common.store.model import LeasedTask, QueuedTask, TaskResult
from farcall_common.task_options import TaskOptions
from farcall_common.wire import Reporter, TaskState
from farcall_forwarder.core.meter import Meter

NOW = 1_800_000_000.0


def _leased(*, attempt: int = 1, waited_s: float = 0.0) -> LeasedTask:
    task = QueuedTask(
        task_id="task",
        task_group_id="group",
        owner_id="owner",
        endpoint_id="endpoint",
        function_id="function",
        function_hash="hash",
        payload=b"",
        options=TaskOptions(),
        submitted_at=NOW - waited_s,
    )
    return LeasedTask(task, attempt, enqueued_at=NOW - waited_s, leased_at=NOW)


def _ended(state: TaskState, *, lag_s: float = 0.0) -> TaskResult:
    return TaskResult(
        task_id="task",
        endpoint_id="endpoint",
        attempt=1,
        state=state,
        reporter=Reporter.AGENT,
        timings={"returned_at": NOW - lag_s},
    )


def test_a_reading_has_the_sums_and_the_longest_waits() -> None:
    meter = Meter()
    meter.leased([_leased(waited_s=3.0), _leased(waited_s=0.5), _leased(attempt=2, waited_s=99.0)])
    meter.expired([_leased()])
    meter.relayed(100)
    meter.relayed(50)
    meter.recorded([_ended(TaskState.SUCCESS, lag_s=0.2), _ended(TaskState.FAILED, lag_s=0.1)], recorded_at=NOW)
    assert meter.read(endpoints=2, connections=5) == {
        "tasks_dispatched": 2,
        "tasks_redelivered": 1,
        "tasks_finished": 2,
        "tasks_failed": 1,
        "leases_expired": 1,
        "queue_wait_s": 3.0,
        "push_lag_s": 0.2,
        "file_bytes": 150,
        "endpoints_connected": 2,
        "connections": 5,
    }


def test_a_reading_resets_the_counts() -> None:
    meter = Meter()
    meter.leased([_leased(waited_s=3.0)])
    meter.recorded([_ended(TaskState.LOST)], recorded_at=NOW)
    meter.read(endpoints=1, connections=1)
    again = meter.read(endpoints=0, connections=0)
    assert set(again.values()) == {0}
