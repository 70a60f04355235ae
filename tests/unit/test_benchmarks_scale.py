"""Simulated managers, and the arithmetic of the sweep over their number."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.engine.scale.managers import SimulatedManager
from benchmarks.engine.scale.table import as_table, goals, points
from farcall_common.payload.native import load_native
from farcall_common.wire import TaskState
from farcall_endpoint.protocol import TaskOrder


def orders(*numbers: int) -> list[TaskOrder]:
    return [TaskOrder(f"t{number}", 1, "hash", 0) for number in numbers]


def ended(manager: SimulatedManager, *, now: float) -> list[str]:
    return [finished.task_id for finished in manager.progress(now=now)[0].finished]


# -- a simulated manager -----------------------------------------------------------------------------------------------


def test_tasks_run_on_as_many_workers_as_there_are_and_end_in_order() -> None:
    manager = SimulatedManager(slots=2, task_s=1.0)
    manager.run(orders(1, 2, 3, 4, 5), now=10.0)
    assert manager.next_end(now=10.0) == 11.0
    assert ended(manager, now=10.9) == []
    assert ended(manager, now=11.0) == ["t1", "t2"]
    assert ended(manager, now=13.0) == ["t3", "t4", "t5"]
    assert manager.next_end(now=13.0) == float("inf")


def test_a_worker_that_has_waited_starts_at_once() -> None:
    manager = SimulatedManager(slots=1, task_s=1.0)
    manager.run(orders(1), now=0.0)
    manager.run(orders(2), now=5.0)
    assert manager.progress(now=5.5)[0].finished[0].ended_at == 1.0
    assert manager.next_end(now=5.5) == 6.0


def test_what_is_reported_can_be_read_and_says_how_long_it_took() -> None:
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


def test_cancelled_tasks_are_answered_for_once() -> None:
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
    machine = {"cores": 2, "cpu": "x", "kernel": "6", "python": "3.11"}
    return {
        "measured_at": "now",
        "machine": machine,
        "slots": 128,
        "window": 200_000,
        "tasks": 1000,
        "rounds": rounds,
        "all": whole,
    }


def test_a_point_is_the_median_of_the_rounds_in_which_others_took_little() -> None:
    calm = [round_of(4, 10.0, per_s=per_s) for per_s in (1000.0, 4000.0, 2000.0)]
    noisy = [round_of(4, 10.0, per_s=9000.0, others=0.5), round_of(1, 8.0, per_s=7.0, others=0.9)]
    first, second = points([*calm, *noisy])
    assert (first.managers, first.kept, first.per_s) == (1, 1, 7.0)
    assert (second.managers, second.kept, second.rounds, second.per_s) == (4, 3, 4, 2000.0)


def test_cpu_is_the_least_of_all_rounds() -> None:
    (point,) = points([round_of(4, 12.0), round_of(4, 10.0, others=0.5), round_of(4, 14.0)])
    assert (point.agent_us, point.agent_us_most) == (10.0, 14.0)


@pytest.mark.parametrize(
    ("most_us", "verdict"), [(12.0, "+20% | yes"), (12.1, "+21% | **no**"), (7.0, "-30% | **no**")]
)
def test_the_cost_of_a_task_is_compared_with_that_of_one_manager(most_us: float, verdict: str) -> None:
    rounds = [round_of(1, 10.0), round_of(64, 10.5), round_of(1024, most_us)]
    assert any(verdict in line for line in goals(report_of(rounds, None)))


def test_goals_of_the_whole_and_its_ceilings() -> None:
    whole = round_of(1024, 12.5, per_s=16_384.0)
    lines = goals(report_of([round_of(1, 10.0)], whole))
    assert any("| >= 20,000 | 16,384 | **no** |" in line for line in lines)
    assert any("| <= 2,048 | 100 | yes |" in line for line in lines)
    assert "8.0 s or longer" in lines[-1]
    assert "80,000 tasks/s" in lines[-1]
    assert not any("+-20%" in line for line in lines)


def test_the_table_has_a_row_for_each_number_of_managers() -> None:
    table = as_table(report_of([round_of(1024, 12.0), round_of(1, 10.0)], None))
    rows = [line for line in table.splitlines() if "1 of 1" in line]
    assert [row.split(" | ")[:2] for row in rows] == [["| 1", "128"], ["| 1,024", "131,072"]]
