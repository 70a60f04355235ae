"""Policies of weights: bounds for any input, the steps of the paper, and targets on simulated processors."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farcall_endpoint.qos.policies import Policy, ProportionalIntegral, Seen, Static, Target, Threshold
from farcall_endpoint.qos.weights import ORDINARY
from tests.support.shared_processors import Load, Outcome, run, shares

FLOATS = st.floats(allow_nan=True, allow_infinity=True)
CALM: dict[str, float] = {"pressure": 0.5, "interval_s": 0.25}
LIMIT_S = 0.12
BESIDE = {"short": Load(0.06, 3, per_s=8), "batch": Load(0.4, 4, outstanding=6)}
SEEDS = range(3)


# -- proportional and integral -----------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.none() | FLOATS, FLOATS, FLOATS, FLOATS), max_size=50))
def test_weights_stay_within_their_bounds_whatever_is_reported(
    reports: list[tuple[float | None, float, float, float]],
) -> None:
    policy = ProportionalIntegral({"f": Target(0.1, least=50, most=800), "g": Target(5.0)}, rest=0.1)
    for latency_s, oldest_s, pressure, interval_s in reports:
        seen = {"f": Seen(latency_s, oldest_s), "g": Seen(oldest_s, 0.0), "other": Seen()}
        weights = policy.weights(seen, pressure=pressure, interval_s=interval_s)
        assert weights.keys() == seen.keys()
        assert all(math.isfinite(each) and each > 0 for each in weights.values())
        assert weights["f"] <= 800
        assert sum(weights.values()) <= ORDINARY * 9 * 1.001


@given(st.none() | st.sampled_from([math.nan, math.inf, -1.0, 0.0]), st.sampled_from([0.0, -5.0, math.nan]))
def test_what_makes_no_sense_changes_nothing(latency_s: float | None, oldest_s: float) -> None:
    policy = ProportionalIntegral({"f": Target(0.1)})
    before = policy.weights({"f": Seen(0.3)}, **CALM)
    assert policy.weights({"f": Seen(latency_s, oldest_s)}, **CALM) == before
    assert policy.weights({"f": Seen(9.0)}, pressure=math.nan, interval_s=0.25) == before
    assert policy.weights({"f": Seen(9.0)}, pressure=0.5, interval_s=-1.0) == before


def test_a_weight_does_not_rise_while_processors_are_not_the_reason() -> None:
    policy = ProportionalIntegral({"f": Target(0.1)})
    for _ in range(20):
        assert policy.weights({"f": Seen(1.0)}, pressure=0.0, interval_s=0.25) == pytest.approx({"f": ORDINARY})


def test_a_weight_leaves_its_bound_at_once() -> None:
    policy = ProportionalIntegral({"f": Target(0.1, most=800)})
    for _ in range(200):
        at_bound = policy.weights({"f": Seen(1.0)}, **CALM)
    assert at_bound["f"] == pytest.approx(800)
    assert policy.weights({"f": Seen(0.02)}, **CALM)["f"] < 500


def test_a_task_that_is_late_counts_before_it_has_ended() -> None:
    policy = ProportionalIntegral({"f": Target(0.1)})
    assert policy.weights({"f": Seen(None, 0.09)}, **CALM) == pytest.approx({"f": ORDINARY})
    assert policy.weights({"f": Seen(None, 0.5)}, **CALM)["f"] > ORDINARY


def test_a_function_that_comes_back_begins_at_the_ordinary_weight() -> None:
    policy = ProportionalIntegral({"f": Target(0.1)})
    policy.weights({"f": Seen(1.0)}, **CALM)
    assert policy.weights({}, **CALM) == {}
    assert policy.weights({"f": Seen(0.07)}, **CALM) == pytest.approx({"f": ORDINARY})


# -- the paper's -------------------------------------------------------------------------------------------------------


def test_each_task_moves_the_shares_of_its_function_by_its_step() -> None:
    policy = Threshold({"f": 0.1, "g": 1.0}, ratio=2.0, deltas={"f": 20, "g": 5})
    assert policy.weights({"f": Seen(), "g": Seen()}, **CALM) == {"f": ORDINARY, "g": ORDINARY}
    for latency_s in (0.21, 0.3, 0.2):  # the last one is not above the threshold
        policy.ended("f", latency_s)
    policy.ended("g", 0.5)
    assert policy.shares == {"f": 532, "g": 507}
    assert policy.weights({"f": Seen()}, **CALM) == {"f": ORDINARY * 532 / 512}


def test_shares_stay_within_those_of_the_kernel() -> None:
    policy = Threshold({"f": 0.1}, deltas={"f": 1000})
    for _ in range(3):
        policy.ended("f", 0.1)
    assert policy.shares == {"f": 2}
    for _ in range(300):
        policy.ended("f", 1.0)
    assert policy.shares == {"f": 262_144}
    policy.ended("f", math.nan)
    policy.ended("unknown", 1.0)
    assert policy.shares == {"f": 262_144}


# -- on simulated processors -------------------------------------------------------------------------------------------


def outcomes(
    policy: Callable[[], Policy], loads: Mapping[str, Load], targets: Mapping[str, Target]
) -> list[Mapping[str, Outcome]]:
    return [run(policy(), loads, targets, seed=seed) for seed in SEEDS]


def violations(found: list[Mapping[str, Outcome]], name: str, limit_s: float) -> float:
    return sum(each[name].violations(limit_s) for each in found) / len(found)


def test_a_target_is_held_beside_batch_work_which_loses_nothing() -> None:
    targets = {"short": Target(LIMIT_S, 0.9)}
    none = outcomes(Static, BESIDE, targets)
    held = outcomes(lambda: ProportionalIntegral(targets), BESIDE, targets)
    oracle = outcomes(lambda: Static({"short": 1000}), BESIDE, targets)
    paper = outcomes(lambda: Threshold({"short": 0.06}, deltas={"short": 20}), BESIDE, targets)
    before, after = violations(none, "short", LIMIT_S), violations(held, "short", LIMIT_S)
    assert after < 0.2 * before
    assert after < violations(oracle, "short", LIMIT_S) + 0.05
    assert after < violations(paper, "short", LIMIT_S) / 3
    for one, other in zip(held, none, strict=True):
        assert one["short"].quantile(0.99) <= 1.05 * other["short"].quantile(0.99)
        assert len(one["batch"].latencies) >= 0.9 * len(other["batch"].latencies)


def test_two_functions_whose_targets_conflict_leave_the_rest_its_part() -> None:
    loads = {"a": Load(0.06, 4, outstanding=8), "b": Load(0.06, 4, outstanding=8), "batch": Load(0.4, 4, outstanding=6)}
    targets = {"a": Target(0.01), "b": Target(0.01)}
    found = run(ProportionalIntegral(targets, rest=0.1), loads, targets)
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
