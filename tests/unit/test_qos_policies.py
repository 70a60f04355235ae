"""Policies of weights: bounds for any input, the steps of the paper, and targets on simulated CPUs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farcall_endpoint.config.settings import DEFAULT_WEIGHT
from farcall_endpoint.qos.policies import Policy, ProportionalIntegral, ShortFirst, Static, Target, Threshold
from tests.support.shared_cpus import Ended, Load, run, shares

FLOATS = st.floats(allow_nan=True, allow_infinity=True)
ONE = {"f": Target(0.1)}
CALM: dict[str, Any] = {"pressure": 0.5, "interval_s": 0.25, "others": 1}
BATCH = Load(0.4, 4, outstanding=6)
SEEDS = range(3)


# -- proportional and integral -----------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.none() | FLOATS, st.none() | FLOATS, FLOATS, FLOATS, st.integers(0, 3)), max_size=50))
def test_weights_stay_within_their_bounds_whatever_is_reported(
    reports: list[tuple[Any, Any, float, float, int]],
) -> None:
    policy = ProportionalIntegral(batch_share=0.1)
    targets = {"f": Target(0.1, min_weight=50, max_weight=800), "g": Target(5.0)}
    for first, second, pressure, interval_s, others in reports:
        latencies = {"f": first, "g": second, "without": 1.0}
        weights = policy.weights(targets, latencies, pressure=pressure, interval_s=interval_s, others=others)
        assert weights.keys() == {"f", "g"}
        assert 50 * 0.999 <= weights["f"] <= 800 * 1.001
        assert DEFAULT_WEIGHT * 0.999 <= weights["g"] <= 2000 * 1.001
        if others:
            assert sum(weights.values()) <= DEFAULT_WEIGHT * 9 * others * 1.001


def test_least_weights_are_kept_where_functions_without_a_target_would_need_more() -> None:
    targets = {str(number): Target(0.1) for number in range(40)}
    weights = ProportionalIntegral(batch_share=0.1).weights(targets, dict.fromkeys(targets, 1.0), **CALM)
    assert list(weights.values()) == pytest.approx([DEFAULT_WEIGHT] * 40)


def test_short_first_gives_all_their_largest_weights_beside_the_share_of_batch_work() -> None:
    targets = {"f": Target(0.1), "g": Target(5.0, max_weight=200)}
    policy = ShortFirst(batch_share=0.1)
    assert policy.weights(targets, {}, pressure=0.5, interval_s=0.25, others=0) == {"f": 2000, "g": 200}
    beside = policy.weights(targets, {}, pressure=0.5, interval_s=0.25, others=1)
    assert sum(beside.values()) == pytest.approx(900)
    assert beside["f"] > beside["g"] >= DEFAULT_WEIGHT


@given(st.none() | st.sampled_from([math.nan, math.inf, -1.0, 0.0]))
def test_what_makes_no_sense_changes_nothing(latency_s: float | None) -> None:
    policy = ProportionalIntegral()
    before = policy.weights(ONE, {"f": 0.3}, **CALM)
    assert policy.weights(ONE, {"f": latency_s}, **CALM) == before
    assert policy.weights(ONE, {"f": 9.0}, pressure=math.nan, interval_s=0.25, others=1) == before
    assert policy.weights(ONE, {"f": 9.0}, pressure=0.5, interval_s=-1.0, others=1) == before


@given(st.lists(st.floats(1e-3, 10), min_size=1, max_size=30))
def test_no_weight_rises_while_cpus_are_not_the_reason(latencies: list[float]) -> None:
    policy = ProportionalIntegral()
    former = policy.weights(ONE, {"f": 1.0}, **CALM)["f"]
    for each in latencies:
        weight = policy.weights(ONE, {"f": each}, pressure=0.0, interval_s=0.25, others=1)["f"]
        assert weight <= former
        former = weight


def test_a_weight_leaves_its_bound_at_once() -> None:
    policy, targets = ProportionalIntegral(), {"f": Target(0.1, max_weight=800)}
    for _ in range(200):
        at_bound = policy.weights(targets, {"f": 1.0}, **CALM)
    assert at_bound["f"] == pytest.approx(800)
    assert policy.weights(targets, {"f": 0.02}, **CALM)["f"] < 500


def test_a_latency_that_goes_up_and_down_around_the_target_does_not_raise_the_weight_to_its_bound() -> None:
    policy = ProportionalIntegral()
    weights = [policy.weights(ONE, {"f": 0.14 if number % 2 else 0.035}, **CALM)["f"] for number in range(100)]
    assert max(weights[-2:]) < 2.5 * DEFAULT_WEIGHT


def test_a_function_that_comes_back_begins_at_the_default_weight() -> None:
    policy = ProportionalIntegral()
    policy.weights(ONE, {"f": 1.0}, **CALM)
    assert policy.weights({}, {}, **CALM) == {}
    assert policy.weights(ONE, {"f": 0.07}, **CALM) == pytest.approx({"f": DEFAULT_WEIGHT})


@pytest.mark.parametrize(
    "values",
    [
        {"latency_s": 0},
        {"latency_s": math.nan},
        {"latency_s": math.inf},
        {"latency_s": 1, "percentile": 100},
        {"latency_s": 1, "percentile": 0},
        {"latency_s": 1, "min_weight": 0},
        {"latency_s": 1, "min_weight": 300, "max_weight": 200},
        {"latency_s": 1, "max_weight": math.inf},
        {"latency_s": 1, "expected_s": 0.0},
    ],
)
def test_a_target_that_makes_no_sense_is_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"latency_s|percentile|weight|expected_s"):
        Target(**values)


# -- the paper's -------------------------------------------------------------------------------------------------------


def test_each_task_moves_the_shares_of_its_function_by_its_step() -> None:
    policy = Threshold(ratio=2.0, delta=20)
    targets = {"f": Target(0.2, expected_s=0.1), "g": Target(2.0, expected_s=1.0), "unknown": Target(0.1)}
    assert policy.weights(targets, {}, **CALM) == dict.fromkeys(targets, DEFAULT_WEIGHT)
    for latency_s in (0.21, 0.3, 0.2):  # the last one is not above the threshold
        policy.on_task_ended("f", targets["f"], latency_s)
    policy.on_task_ended("g", targets["g"], 0.5)
    policy.on_task_ended("unknown", targets["unknown"], 9.0)
    assert policy.shares == {"f": 532, "g": 492}
    assert policy.weights({"f": targets["f"]}, {}, **CALM) == {"f": DEFAULT_WEIGHT * 532 / 512}
    assert policy.shares == {"f": 532}


def test_shares_stay_within_those_of_the_kernel() -> None:
    policy, target = Threshold(delta=1000), Target(0.2, expected_s=0.1)
    for _ in range(3):
        policy.on_task_ended("f", target, 0.1)
    assert policy.shares == {"f": 2}
    for _ in range(300):
        policy.on_task_ended("f", target, 1.0)
    assert policy.shares == {"f": 262_144}
    policy.on_task_ended("f", target, math.nan)
    assert policy.shares == {"f": 262_144}


# -- on simulated CPUs -------------------------------------------------------------------------------------------------


def ended(
    policy: Callable[[], Policy], loads: Mapping[str, Load], targets: Mapping[str, Target]
) -> list[Mapping[str, Ended]]:
    return [run(policy(), loads, targets, seed=seed) for seed in SEEDS]


def violations(found: list[Mapping[str, Ended]], limit_s: float) -> float:
    return sum(each["short"].violations(limit_s) for each in found) / len(found)


@pytest.mark.parametrize(
    ("load", "limit_s"),
    [
        (Load(0.06, 3, per_s=8), 0.12),
        (Load(0.06, 4, per_s=8, spread=0.5), 0.15),
        (Load(0.06, 4, per_s=8, wait_s=0.1), 0.25),
    ],
    ids=["computes", "varies", "waits"],
)
def test_a_target_is_held_beside_batch_work_which_loses_nothing(load: Load, limit_s: float) -> None:
    loads, targets = {"short": load, "batch": BATCH}, {"short": Target(limit_s, 90)}
    none = ended(Static, loads, targets)
    held = ended(ProportionalIntegral, loads, targets)
    best = {"short": Target(limit_s, 90, weight=1000, expected_s=load.run_s + load.wait_s)}
    oracle = ended(Static, loads, best)
    paper = ended(Threshold, loads, best)
    after = violations(held, limit_s)
    assert after < 0.2 * violations(none, limit_s)
    assert after < violations(oracle, limit_s) + 0.05
    assert after < violations(paper, limit_s) / 3
    for one, other in zip(held, none, strict=True):
        assert one["short"].quantile(0.99) <= 1.05 * other["short"].quantile(0.99)
        assert len(one["batch"].latencies) >= 0.9 * len(other["batch"].latencies)


def test_two_functions_whose_targets_conflict_leave_batch_work_its_share() -> None:
    loads = {"a": Load(0.06, 4, outstanding=8), "b": Load(0.06, 4, outstanding=8), "batch": BATCH}
    targets = {"a": Target(0.01), "b": Target(0.01)}
    found = run(ProportionalIntegral(batch_share=0.1), loads, targets)
    assert len(found["batch"].latencies) * 0.4 >= 0.09 * 2 * 60
    assert len(found["a"].latencies) == pytest.approx(len(found["b"].latencies), rel=0.05)


@given(
    st.dictionaries(st.sampled_from("abcde"), st.integers(1, 6), min_size=1),
    st.lists(st.floats(20, 2000), min_size=5, max_size=5),
    st.integers(1, 8),
)
def test_shares_add_up_to_the_cores_that_can_be_used(busy: dict[str, int], weights: list[float], cores: int) -> None:
    found = shares(busy, dict(zip("abcde", weights, strict=True)), cores)
    assert sum(found.values()) == pytest.approx(min(cores, sum(busy.values())))
    assert all(found[name] <= busy[name] + 1e-9 for name in busy)


@pytest.mark.parametrize("others", [0, 1])
def test_what_is_to_end_soon_comes_before_what_may_take_longer(others: int) -> None:
    loads = {"short": Load(0.15, 2, per_s=4), "long": Load(0.4, 2, per_s=2.3)}
    targets = {"short": Target(0.3, expected_s=0.15), "long": Target(0.8, expected_s=0.4)}
    alike = [run(Static(), loads, targets, seed=seed) for seed in SEEDS]
    held = [run(ProportionalIntegral(), loads, targets, seed=seed) for seed in SEEDS]
    assert violations(held, 0.3) < violations(alike, 0.3) / 3
    late = sum(each["long"].violations(0.8) for each in held) - sum(each["long"].violations(0.8) for each in alike)
    assert late / len(SEEDS) < 0.1
    policy = ProportionalIntegral()
    for _ in range(50):
        weights = policy.weights(targets, {"short": 0.1, "long": 9.0}, pressure=0.5, interval_s=0.25, others=others)
    assert weights["short"] >= 6 * weights["long"]


def test_without_batch_work_no_weights_stay_at_their_bounds() -> None:
    policy, targets = ProportionalIntegral(), {"f": Target(0.1), "g": Target(0.1)}
    for _ in range(100):
        weights = policy.weights(targets, {"f": 1.0, "g": 1.0}, pressure=0.5, interval_s=0.25, others=0)
    assert weights == pytest.approx({"f": DEFAULT_WEIGHT, "g": DEFAULT_WEIGHT})
    for _ in range(8):
        weights = policy.weights(targets, {"f": 1.0, "g": 0.02}, pressure=0.5, interval_s=0.25, others=0)
    assert weights["f"] > 4 * weights["g"]
