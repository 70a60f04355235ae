"""Arrivals, arithmetic, tables and picture of the benchmark of latency targets."""

from __future__ import annotations

import collections
import dataclasses
import random
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmarks.qos import figures, functions
from benchmarks.qos.__main__ import FULL, QUICK, begun
from benchmarks.qos.arrivals import MOST_AT_ONCE, Arrival, arrivals, bursts, poisson
from benchmarks.qos.experiments import EXPERIMENTS, NONE, ORACLE, PI, RESERVED, Experiment, arms, sweep
from benchmarks.qos.measuring import LATENCY_WORKERS, Call, settings_of, weights_over_time
from benchmarks.qos.plot import draw
from benchmarks.qos.table import as_tables
from tests.unit.benchmark_machine import MACHINE

FIRST, THIRD = EXPERIMENTS[0], EXPERIMENTS[2]


@pytest.mark.parametrize("instants", [poisson, bursts])
def test_each_segment_has_its_number_of_calls(instants: Any) -> None:
    found = arrivals("f", 7.0, [2.0, 10.0], random.Random(1), instants=instants, spread=0.25)
    assert sum(each.at_s < 2.0 for each in found) == 14
    assert len(found) == 84
    assert [each.at_s for each in found] == sorted(each.at_s for each in found)
    assert all(0.0 <= each.at_s < 12.0 and 0.75 <= each.factor <= 1.25 for each in found)


def test_bursts_have_zipfs_sizes() -> None:
    sizes = collections.Counter(collections.Counter(bursts(6000, 1000.0, random.Random(1))).values())
    assert max(sizes) <= MOST_AT_ONCE
    assert sizes[1] / sizes[2] == pytest.approx(4.0, rel=0.2)


def test_arrivals_are_those_of_the_seed_and_the_load() -> None:
    fourth, fifth = EXPERIMENTS[3:]
    assert fourth.arrivals((1.0, 5.0), 1) == fifth.arrivals((1.0, 5.0), 1)
    assert fourth.arrivals((1.0, 5.0), 1) != fourth.arrivals((1.0, 5.0), 2)


@pytest.mark.parametrize("experiment", EXPERIMENTS, ids=lambda each: each.name)
def test_load_leaves_room_for_batch_work_or_is_nearly_all(experiment: Experiment) -> None:
    low, high = (0.2, 0.5) if experiment.has_batch else (0.7, 0.95)
    assert low <= experiment.utilisation <= high


def test_runs_of_the_fifth_experiment_are_those_of_the_fourth_but_for_its_deltas() -> None:
    fourth, fifth = (arms(each, {"pyaes": 400}) for each in EXPERIMENTS[3:])
    assert [each.name for each in fifth if each not in fourth] == ["threshold, delta 5", "threshold, delta 100"]
    assert RESERVED in [each.name for each in arms(FIRST, {})]


def test_settings_are_those_of_the_policy() -> None:
    found = {each.name: settings_of(each) for each in arms(FIRST, {"resize": 400})}
    assert {name: each.policy for name, each in found.items()} == {
        "none": "none",
        "threshold, delta 5": "threshold",
        "threshold, delta 20": "threshold",
        "threshold, delta 100": "threshold",
        "pi": "pi",
        "short-first": "short-first",
        "oracle": "static",
        "reserved": "none",
    }
    assert found["oracle"].weights == {"resize": 400}
    assert (found["threshold, delta 100"].delta, found["threshold, delta 100"].ratio) == (100, 2.0)
    assert all(each.latency_workers == LATENCY_WORKERS for each in found.values())


def test_sweep_has_each_ratio_once() -> None:
    assert sweep(FIRST, (100, 400)) == [{"resize": 100}, {"resize": 400}]
    assert sweep(THIRD, (100, 400)) == [
        {"training": 100, "resize": 100},
        {"training": 400, "resize": 100},
        {"training": 100, "resize": 400},
    ]


def test_class_figures_count_what_is_above_the_target() -> None:
    found = figures.class_figures([50.0, 100.0, 101.0, 400.0], 100.0)
    assert (found["calls"], found["violations"], found["p50_ms"], found["p99_ms"]) == (4, 2, 100.0, 400.0)
    assert found["histogram"] == {"-4": 1, "0": 2, "8": 1}


def test_interval_needs_three_repetitions() -> None:
    assert figures.bootstrap([0.1, 0.3]) == figures.Interval(0.2, None, None)
    median, low, high = figures.bootstrap([1.0, 2.0, 3.0, 4.0, 50.0])
    assert median == 3.0
    assert low is not None
    assert high is not None
    assert 1.0 <= low <= 3.0 <= high <= 50.0
    assert figures.Interval(0.2, None, None).upper == 0.2


def run_of(violations: int, batch: int = 30, **changes: float) -> dict[str, Any]:
    latencies = [50.0] * (20 - violations) + [300.0] * violations
    return {
        "classes": {"resize": figures.class_figures(latencies, 160.0)},
        "batch_calls": batch,
        "manager_percent": 1.5,
        "utilisation": 0.9,
        "others": 0.02,
        "generator_p99_ms": 1.0,
        "weights": {"resize": [(1.0, 100.0), (2.0, 400.0)]},
        **changes,
    }


def test_differences_are_paired() -> None:
    repetitions = [{PI: run_of(2), NONE: run_of(10)}, {PI: run_of(6), NONE: run_of(14)}]
    difference = figures.paired(repetitions, PI, NONE, lambda run: figures.violation_part(run, "resize"))
    assert difference.median == pytest.approx(-0.4)
    batch = figures.paired(
        [{PI: run_of(0, 27), NONE: run_of(0)}], PI, NONE, lambda r: r["batch_calls"], is_relative=True
    )
    assert batch.median == pytest.approx(-0.1)


def test_a_disturbed_repetition_is_left_out_unless_there_is_no_other() -> None:
    calm, disturbed = {PI: run_of(0)}, {PI: run_of(0, others=0.3)}
    assert figures.undisturbed([calm, disturbed]) == [calm]
    assert figures.undisturbed([disturbed]) == [disturbed]


def test_reaction_ends_when_calls_of_a_whole_second_meet_the_target() -> None:
    calls = [(at / 10, 500.0 if 20 <= at < 57 else 60.0) for at in range(100)]
    assert figures.reaction_s(calls, begin_s=4.0, end_s=9.0, target_ms=120.0) == pytest.approx(1.7)
    assert figures.reaction_s(calls, begin_s=4.0, end_s=6.0, target_ms=120.0) == pytest.approx(2.0)
    assert figures.reaction_s([], begin_s=4.0, end_s=9.0, target_ms=120.0) == pytest.approx(5.0)


def test_a_call_counts_with_its_part_in_the_period() -> None:
    assert figures.calls_between([(0.0, 2.0), (2.0, 3.0), (3.5, 4.5), (5.0, 6.0)], 1.0, 4.0) == 0.5 + 1.0 + 0.5


def test_weights_over_time_are_thinned() -> None:
    calls = [Call(Arrival(0.0, "resize"), 0.0, 0.0, ended_s=at, weight=weight) for at, weight in ((1, 100), (1.1, 150))]
    calls.append(Call(Arrival(0.0, "resize"), 0.0, 0.0, ended_s=2.0, weight=None))
    assert weights_over_time(calls) == {"resize": [(1.0, 150)]}


def test_functions_say_their_weight_or_that_there_is_none() -> None:
    weight, began_at = functions.resize(1)
    assert weight is None or weight > 0
    assert began_at <= time.monotonic()


def report(**violations: int) -> dict[str, Any]:
    policies: Mapping[str, int] = {each.name: 10 for each in arms(FIRST, {})} | violations
    batch = {RESERVED: 20, PI: 29}
    repetitions = [
        {policy: run_of(count, batch.get(policy, 30)) for policy, count in policies.items()} for _ in range(3)
    ]
    noops = {"manager_percent": 4.0, "paced_per_s": 1000.0, "noops_per_s": 30_000.0}
    return {
        "measured_at": "now",
        "machine": MACHINE,
        "repetitions": 3,
        "measured_s": 10.0,
        "oracles": {"1": {"resize": 400}},
        "experiments": {"1": repetitions},
        "controller": [{NONE: noops, PI: noops | {"manager_percent": 4.5}}],
        "reaction": {policy: {"reactions_s": [1.0, 2.5, 1.5]} for policy in (NONE, PI)},
    }


def test_an_earlier_measurement_is_continued_if_it_is_of_the_same_form() -> None:
    former = begun(QUICK, [FIRST], None) | {"measured_at": "before", "oracles": {"1": {"resize": 400}}}
    found = begun(dataclasses.replace(QUICK, repetitions=7), [FIRST], former)
    assert (found["measured_at"], found["oracles"], found["repetitions"]) == ("before", {"1": {"resize": 400}}, 7)
    for form, experiments in ((FULL, [FIRST]), (QUICK, [FIRST, THIRD])):
        with pytest.raises(SystemExit, match="another form"):
            begun(form, experiments, former)
    former["experiments"]["1"].append({PI: run_of(3)})
    with pytest.raises(SystemExit, match="other policies"):
        begun(QUICK, [FIRST], former)


def test_goals_are_beside_the_figures() -> None:
    text = as_tables(report(**{PI: 1, ORACLE: 0}))
    assert (
        "| 1, resize: violations, against none | 50.0 % → 5.0 %: -90 %; oracle 0.0 % | ≤ -80 %, or oracle + 5 points"
        " | yes |" in text
    )
    assert "| 1, resize: p99, against none | +0 % (+0 % to +0 %) | ≤ +5 % (upper bound) | yes |" in text
    assert "| 1: violations of the best threshold to ours | 50.0 % (delta 5) / 5.0 % = 10.0 x | ≥ 3 x | yes |" in text
    assert "| 1: batch work, against none | -3 % (-3 % to -3 %) | ≥ -10 % | yes |" in text
    assert "+45 % (+45 % to +45 %); violations 5.0 %, reserved 50.0 %" in text
    assert "| controller at 1,000 calls/s, % of a core | 0.50 | < 1 | yes |" in text
    assert "| reaction to a doubled rate, s | 1.5 (at most 2.5); none 1.5 | ≤ 3 | yes |" in text
    assert "| 1, resize | pi | 5.0 % | -45.0 points (-45.0 to -45.0) | 50 | 50 | 50 | 300 |" in text
    assert "**no**" not in text
    assert "repetitions without disturbance: 1: 3 of 3." in text


def test_a_policy_that_changes_nothing_reaches_nothing() -> None:
    text = as_tables(report(**{ORACLE: 0}))
    assert "50.0 % → 50.0 %: +0 %; oracle 0.0 % | ≤ -80 %, or oracle + 5 points | **no** |" in text
    assert "= 1.0 x | ≥ 3 x | **no** |" in text


def test_picture_has_a_panel_for_each_function(tmp_path: Path) -> None:
    draw(report(), tmp_path / "qos.png")
    assert (tmp_path / "qos.png").read_bytes().startswith(b"\x89PNG")
