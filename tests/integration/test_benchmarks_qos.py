"""Runs of the benchmark of latency targets on a real engine, with little work."""

from __future__ import annotations

import os
from typing import Final

import pytest

from benchmarks.qos import parts
from benchmarks.qos.experiments import CPU_MS, EXPERIMENTS, NONE, PI, RESERVED, Arm
from benchmarks.qos.measuring import Timing, measure_baselines, run

_FIRST: Final = EXPERIMENTS[0]
_ROUNDS_PER_MS: Final = 0.1
_TIMING: Final = Timing(warm_up_s=0.2, measured_s=1.0, baseline_calls=1)


@pytest.mark.parametrize(
    "arm",
    [
        Arm(NONE),
        Arm("threshold", "threshold", delta=20),
        Arm("short-first", "short-first"),
        pytest.param(
            Arm(RESERVED, is_reserved=True),
            marks=pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores"),
        ),
    ],
    ids=lambda arm: arm.name,
)
def test_a_run_counts_its_calls_and_keeps_the_cores_of_the_program(arm: Arm) -> None:
    cores = os.sched_getaffinity(0)
    found = run(_FIRST, arm, seed=1, targets_ms={"resize": 60_000.0}, rounds_per_ms=_ROUNDS_PER_MS, timing=_TIMING)
    assert (found["classes"]["resize"]["calls"], found["classes"]["resize"]["violations"]) == (7, 0)
    assert found["batch_calls"] > 0
    assert found["manager_percent"] > 0
    assert os.sched_getaffinity(0) == cores


def test_baselines_are_of_all_functions() -> None:
    found = measure_baselines(CPU_MS, _ROUNDS_PER_MS, 1)
    assert found.keys() == CPU_MS.keys()
    assert all(value > 0 for value in found.values())


def test_controller_is_measured_with_and_without() -> None:
    found = parts.controller(1, paced_s=0.2, noops=20)
    assert found.keys() == {NONE, PI}
    assert all(each["noops_per_s"] > 0 and each["manager_percent"] > 0 for each in found.values())
