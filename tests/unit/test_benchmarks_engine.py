"""The arithmetic of the engine's benchmark."""

from __future__ import annotations

from typing import Any

from benchmarks.engine.contestants import CONTESTANTS
from benchmarks.engine.table import as_table, calm, goals


def round_of(per_s: float, *, others: float = 0.0) -> dict[str, Any]:
    latency = {"p50_ms": 0.3, "p99_ms": 2.0}
    rate = {"per_s": per_s, "cpu_us": 10.0, "others": others}
    return {
        "noops": rate,
        "naps": rate,
        "hello": latency,
        "echo_1mb": latency,
        "echo_10mb": latency,
        "start_to_first_result_s": 0.2,
        "memory_per_worker_mib": 9.0,
    }


def test_rounds_with_a_noisy_machine_are_dropped_unless_none_is_left() -> None:
    quiet, noisy = round_of(1), round_of(2, others=0.5)
    assert calm([quiet, noisy]) == [quiet]
    assert calm([noisy]) == [noisy]


def test_goals_compare_rates_upwards_latencies_downwards_and_ratios_with_medians() -> None:
    rounds = {"farcall": [round_of(50_000), round_of(60_000), round_of(1)], "Ray actors": [round_of(20_000)]}
    lines = goals(rounds)
    assert "| no-ops/s | >= 40,000 | 50,000 | yes |" in lines
    assert "| hello p50 ms | <= 0.4 | 0.30 | yes |" in lines
    assert "| hello p99 ms | <= 1 | 2.00 | **no** |" in lines
    assert "| no-ops/s, times Ray actors | >= 4 x | 2.5 x | **no** |" in lines
    assert not any("Parsl" in line for line in lines)
    assert goals({"Dask": [round_of(1)]}) == []


def test_the_table_has_a_row_for_each_that_ran() -> None:
    machine = {"cores": 2, "cpu": "x", "kernel": "6", "python": "3.11"}
    report = {"measured_at": "now", "machine": machine, "tasks": 10, "rounds": {"Dask": [round_of(10)], "loky": []}}
    table = as_table(report)
    assert "| Dask | 1 of 1 | 10.0 (10.0 to 10.0) |" in table
    assert "loky" not in table


def test_every_peer_has_its_requirements() -> None:
    from pathlib import Path

    folder = Path(__file__).parents[2] / "benchmarks" / "engine" / "peers"
    assert {f"{peer}.txt" for peer, _ in CONTESTANTS.values() if peer} == {path.name for path in folder.iterdir()}
