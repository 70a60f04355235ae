"""Simulated managers, and the arithmetic of the scale benchmark."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.engine.scale.managers import SimulatedManager
from benchmarks.engine.scale.table import as_tables, goals, points
from farcall_common.payload.native import load_native
from farcall_common.wire import TaskState
from farcall_endpoint.contracts.agent_manager import TaskOrder
from tests.unit.benchmark_machine import MACHINE


def orders(*numbers: int) -> list[TaskOrder]:
    return [TaskOrder(f"t{number}", 1, "hash", 0) for number in numbers]


def ended(manager: SimulatedManager, *, now: float) -> list[str]:
    return [finished.task_id for finished in manager.progress(now=now)[0].finished]


# -- a simulated manager -----------------------------------------------------------------------------------------------


def test_tasks_run_on_all_workers_and_end_in_order() -> None:
    manager = SimulatedManager(slots=2, task_s=1.0)
    manager.run(orders(1, 2, 3, 4, 5), now=10.0)
    assert manager.next_end(now=10.0) == 11.0
    assert ended(manager, now=10.9) == []
    assert ended(manager, now=11.0) == ["t1", "t2"]
    assert ended(manager, now=13.0) == ["t3", "t4", "t5"]
    assert manager.next_end(now=13.0) == float("inf")


def test_idle_worker_starts_a_task_at_once() -> None:
    manager = SimulatedManager(slots=1, task_s=1.0)
    manager.run(orders(1), now=0.0)
    manager.run(orders(2), now=5.0)
    assert manager.progress(now=5.5)[0].finished[0].ended_at == 1.0
    assert manager.next_end(now=5.5) == 6.0


def test_report_has_readable_results_and_times() -> None:
    manager = SimulatedManager(slots=3, task_s=0.25)
    manager.run(orders(1, 2), now=1.0)
    before, _ = manager.progress(now=1.0)
    assert (before.workers, before.idle_workers) == (3, 1)
    progress, bodies = manager.progress(now=2.0)
    assert (progress.workers, progress.idle_workers) == (3, 3)
    for finished in progress.finished:
        assert finished.state is TaskState.SUCCESS
        assert finished.result is not None
        assert load_native(bodies[finished.result]) is None
        assert (finished.started_at, finished.ended_at) == (1.0, 1.25)


def test_cancelled_task_is_reported_once() -> None:
    manager = SimulatedManager(slots=1, task_s=1.0)
    manager.run(orders(1, 2, 3), now=0.0)
    manager.cancel(["t2", "gone"])
    assert manager.next_end(now=0.5) == 0.5
    (cancelled,) = manager.progress(now=0.5)[0].finished
    assert (cancelled.task_id, cancelled.state) == ("t2", TaskState.CANCELLED)
    assert ended(manager, now=10.0) == ["t1", "t3"]


# -- the table ---------------------------------------------------------------------------------------------------------


def round_of(managers: int, agent_us: float, *, per_s: float = 50_000.0, others: float = 0.0) -> dict[str, Any]:
    return {
        "managers": managers,
        "workers": managers * 128,
        "tasks": 1000,
        "ready_s": 1.0,
        "idle_share": 0.01,
        "per_s": per_s,
        "agent_us": agent_us,
        "process_us": 12.0,
        "simulators_us": 3.0,
        "others": others,
        "peak_mib": 100.0,
    }


def report_of(rounds: list[dict[str, Any]], whole: dict[str, Any] | None) -> dict[str, Any]:
    return {
        "measured_at": "now",
        "machine": MACHINE,
        "slots": 128,
        "window": 200_000,
        "tasks": 1000,
        "rounds": rounds,
        "all": whole,
    }


def test_point_is_the_median_of_the_undisturbed_rounds() -> None:
    undisturbed = [round_of(4, 10.0, per_s=per_s) for per_s in (1000.0, 4000.0, 2000.0)]
    disturbed = [round_of(4, 10.0, per_s=9000.0, others=0.5), round_of(1, 8.0, per_s=7.0, others=0.9)]
    first, second = points([*undisturbed, *disturbed])
    assert (first.managers, first.kept, first.per_s) == (1, 1, 7.0)
    assert (second.managers, second.kept, second.rounds, second.per_s) == (4, 3, 4, 2000.0)


def test_cpu_time_is_the_lowest_of_all_rounds() -> None:
    (point,) = points([round_of(4, 12.0), round_of(4, 10.0, others=0.5), round_of(4, 14.0)])
    assert (point.agent_us, point.agent_us_most) == (10.0, 14.0)


@pytest.mark.parametrize(
    ("most_us", "row"), [(12.0, ("+20%", "yes")), (12.1, ("+21%", "**no**")), (7.0, ("-30%", "**no**"))]
)
def test_cost_of_a_task_is_compared_with_that_of_one_manager(most_us: float, row: tuple[str, str]) -> None:
    rounds = [round_of(1, 10.0), round_of(64, 10.5), round_of(1024, most_us)]
    assert [(measured, reached) for _, measured, _, reached in goals(report_of(rounds, None))] == [row]


def test_goals_and_ceilings_of_the_largest_run() -> None:
    whole = round_of(1024, 12.5, per_s=16_384.0)
    lines = as_tables(report_of([round_of(1, 10.0)], whole)).splitlines()
    assert any("| 16,384 | >= 20,000 | **no** |" in line for line in lines)
    assert any("| 100 | <= 2,048 | yes |" in line for line in lines)
    assert "8.0 s or longer" in lines[-1]
    assert "80,000 tasks/s" in lines[-1]
    assert not any("+-20%" in line for line in lines)


def test_table_has_a_row_for_each_number_of_managers() -> None:
    table = as_tables(report_of([round_of(1024, 12.0), round_of(1, 10.0)], None))
    rows = [line for line in table.splitlines() if "1 of 1" in line]
    assert [row.split(" | ")[:2] for row in rows] == [["| 1", "128"], ["| 1,024", "131,072"]]
