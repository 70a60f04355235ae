"""Simulated managers with a real agent, and the pictures of the benchmarks."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.engine import __main__ as engine
from benchmarks.engine.papers import plots
from benchmarks.engine.scale import __main__ as scale
from benchmarks.engine.scale.agent import SLOTS, Agent
from tests.waiting import WAIT_S

_REPOSITORY = Path(__file__).parents[2]
_PNG = b"\x89PNG"
_STEP_S = 0.02


def simulators(agent_pid: int | None = None) -> list[psutil.Process]:
    children = psutil.Process(agent_pid).children()
    return [child for child in children if "benchmarks.engine.scale.simulator" in child.cmdline()]


def test_managers_run_all_tasks_and_end_with_the_agent() -> None:
    with Agent(managers=4) as agent:
        agent.wait_ready()
        assert (agent.stats.managers, agent.stats.workers) == (4, 4 * SLOTS)
        assert len(simulators()) == 2
        agent.run(2000)
        used = agent.clocks()
        assert 0 < used["agent"] <= used["process"]
    assert not simulators()


def test_killed_simulator_is_replaced() -> None:
    with Agent(managers=1) as agent:
        agent.wait_ready()
        (simulator,) = simulators()
        simulator.kill()
        agent.run(100)
    assert not simulators()


def test_simulator_ends_with_its_agent() -> None:
    agent = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.engine.scale.agent", "2", "1000000000"], cwd=_REPOSITORY
    )
    try:
        deadline = time.monotonic() + WAIT_S
        while not (orphans := simulators(agent.pid)):
            assert time.monotonic() < deadline
            time.sleep(_STEP_S)
    finally:
        agent.kill()
        agent.wait()
    assert psutil.wait_procs(orphans, timeout=WAIT_S)[1] == []


@pytest.mark.parametrize("managers", [[1], [1, 1024]])
def test_picture_of_the_scale_benchmark(managers: list[int], tmp_path: Path) -> None:
    figures = ("agent_us", "process_us", "per_s", "idle_share", "ready_s", "peak_mib")
    rounds = [{"managers": count, "others": 0.0} | dict.fromkeys(figures, 10.0) for count in managers]
    scale.draw({"rounds": rounds, "slots": 128}, tmp_path / "sweep.png")
    assert (tmp_path / "sweep.png").read_bytes().startswith(_PNG)


def test_pictures_of_the_experiments(tmp_path: Path) -> None:
    def runs(key: str) -> list[dict[str, Any]]:
        return [
            {key: value, "task_s": task_s, "tasks": 10, "elapsed_s": 1.0, "ideal_s": 10 * task_s}
            for value in (1, 2)
            for task_s in (0.0, 0.01)
        ]

    report = {
        "batching": [{"name": "with", "tasks": 10, "elapsed_s": 1.0}],
        "prefetching": runs("prefetch"),
        "strong_scaling": runs("workers"),
        "weak_scaling": runs("workers"),
        "failure": [{"name": "replaced", "dies_at_s": 2.0, "back_at_s": 4.0, "tasks": [(0.0, 0.1), (3.0, 0.5)]}],
    }
    plots.draw(report, tmp_path / "papers.json")
    drawn = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert set(drawn) == {f"papers_{name}.png" for name in report}
    assert all(content.startswith(_PNG) for content in drawn.values())


def test_picture_of_the_engine_benchmark(tmp_path: Path) -> None:
    measured = {
        "noops": {"per_s": 1.0, "cpu_us": 2.0, "others": 0.0},
        "hello": {"p50_ms": 3.0},
        "echo_1mb": {"p50_ms": 4.0},
    }
    report = {"rounds": {"farcall": [measured], "Dask": []}, "machine": {"cores": 2}, "measured_at": "now"}
    engine.draw(report, tmp_path / "engine.png")
    assert (tmp_path / "engine.png").read_bytes().startswith(_PNG)
