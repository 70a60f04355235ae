"""Arithmetic of the engine benchmark."""

from __future__ import annotations

from typing import Any

from benchmarks.analytics.peers import PEERS
from benchmarks.engine.systems import SYSTEMS
from benchmarks.engine.table import as_tables, goals, undisturbed
from benchmarks.graphs.driver import SYSTEMS as GRAPH_SYSTEMS
from tests.unit.benchmark_machine import MACHINE


def round_of(per_s: float, *, others: float = 0.0) -> dict[str, Any]:
    latency = {"p50_ms": 0.3, "p99_ms": 2.0}
    rate = {"per_s": per_s, "cpu_us": 10.0, "others": others}
    return {
        "noops": rate,
        "sleeps": rate,
        "hello": latency,
        "echo_1mb": latency,
        "echo_10mb": latency,
        "start_to_first_result_s": 0.2,
        "memory_per_worker_mib": 9.0,
    }


def test_disturbed_rounds_are_dropped_unless_no_other_is_left() -> None:
    quiet, noisy = round_of(1), round_of(2, others=0.5)
    assert undisturbed([quiet, noisy]) == [quiet]
    assert undisturbed([noisy]) == [noisy]


def test_goals_are_minimum_rates_maximum_latencies_and_ratios_of_medians() -> None:
    rounds = {"farcall": [round_of(50_000), round_of(60_000), round_of(1)], "Ray actors": [round_of(20_000)]}
    lines = goals(rounds).splitlines()
    assert "| no-ops/s | 50,000 | >= 40,000 | yes |" in lines
    assert "| hello p50 ms | 0.30 | <= 0.4 | yes |" in lines
    assert "| hello p99 ms | 2.00 | <= 1 | **no** |" in lines
    assert "| no-ops/s, relative to Ray actors | 2.5 x | >= 4 x | **no** |" in lines
    assert not any("Parsl" in line for line in lines)
    assert goals({"Dask": [round_of(1)]}) == ""


def test_table_has_a_row_for_each_system_with_rounds() -> None:
    report = {"measured_at": "now", "machine": MACHINE, "tasks": 10, "rounds": {"Dask": [round_of(10)], "loky": []}}
    table = as_tables(report)
    assert "| Dask | 1 of 1 | 10.0 (10.0 to 10.0) |" in table
    assert "loky" not in table


def test_each_peer_has_a_requirements_file() -> None:
    from pathlib import Path

    folder = Path(__file__).parents[2] / "benchmarks" / "engine" / "peers"
    peers = {peer for peer, _ in (*SYSTEMS.values(), *GRAPH_SYSTEMS.values(), *PEERS.values()) if peer}
    assert {f"{peer}.txt" for peer in peers} == {path.name for path in folder.iterdir()}
