"""Planner of exchanges: the best plan, what it is compared with, and what cannot be."""

from __future__ import annotations

import dataclasses
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farcall_analytics.model import Method, Plan, Shuffle, estimate
from farcall_analytics.planner import NoPlan, Objective, choose, name_of, plans, why_slower
from farcall_analytics.profiles import Codec
from tests.unit.test_analytics_model import GB, LOCUS, MB, TB, WORKERS

PROFILE = dataclasses.replace(
    LOCUS, workers=dataclasses.replace(WORKERS, most=400, start_s=0.5, starts_per_s=200.0), error=0.1
)


def shuffle_of(size: float) -> Shuffle:
    return Shuffle(size, size, size)


@settings(max_examples=10)
@given(st.floats(10 * MB, 2 * TB), st.sampled_from(["fastest", "cheapest"]))
def test_no_other_plan_is_better(size: float, objective: Objective) -> None:
    shuffle = shuffle_of(size)
    best = choose(shuffle, PROFILE, objective=objective).best
    assert best.estimate == estimate(shuffle, best.plan, PROFILE)
    for plan in list(plans(shuffle, PROFILE))[::7]:
        try:
            other = estimate(shuffle, plan, PROFILE)
        except ValueError:
            continue
        if objective == "fastest":
            assert best.estimate.seconds <= other.seconds
        else:
            assert best.estimate.dollars <= other.dollars


def test_what_others_are_is_said_and_each_is_the_best_of_its_kind() -> None:
    found = choose(shuffle_of(100 * GB), PROFILE, objective="fastest")
    names = [name_of(each.plan) for each in (found.best, *found.others)]
    assert sorted(names) == ["combined S3", "fast Redis", "hybrid S3 + Redis", "slow S3", "two-level S3"]
    seconds = [each.estimate.seconds for each in (found.best, *found.others)]
    assert sorted(seconds) == seconds
    lines = found.explain().splitlines()
    assert lines[0].split()[:6] == ["method", "storage", "workers", "memory", "rounds", "time"]
    assert lines[1].startswith("*  fast")
    assert len(lines) == 6


def test_a_deadline_is_kept_with_little_money_and_a_budget_in_little_time() -> None:
    shuffle = shuffle_of(100 * GB)
    cheapest, fastest = (choose(shuffle, PROFILE, objective=each).best.estimate for each in ("cheapest", "fastest"))
    assert fastest.high_s < cheapest.high_s
    limit_s = (fastest.high_s + cheapest.high_s) / 2
    in_time = choose(shuffle, PROFILE, deadline_s=limit_s).best.estimate
    assert in_time.high_s <= limit_s
    assert cheapest.dollars <= in_time.dollars <= fastest.dollars
    limit = (fastest.dollars + cheapest.dollars) / 2
    in_budget = choose(shuffle, PROFILE, objective="fastest", budget=limit).best.estimate
    assert in_budget.dollars <= limit
    assert fastest.seconds <= in_budget.seconds <= cheapest.seconds


def test_what_cannot_be_kept_is_refused_with_the_nearest_plan() -> None:
    with pytest.raises(NoPlan, match=r"^no plan keeps 1 s; the nearest one, fast Redis, takes \d+"):
        choose(shuffle_of(100 * GB), PROFILE, deadline_s=1.0)
    with pytest.raises(NoPlan, match=r"keeps 1 s and 1e-06 dollars"):
        choose(shuffle_of(100 * GB), PROFILE, deadline_s=1.0, budget=1e-6)
    without = dataclasses.replace(PROFILE, tiers={})
    with pytest.raises(NoPlan, match="there is no storage"):
        choose(shuffle_of(GB), without)


def test_a_method_without_room_is_named_with_the_reason() -> None:
    found = choose(shuffle_of(20 * TB), PROFILE)
    assert found.refused == (("fast Redis", "Redis has no room for 2e+13 bytes, but for 5e+12"),)
    assert found.explain().splitlines()[-1] == "no fast Redis: Redis has no room for 2e+13 bytes, but for 5e+12"


def test_bands_are_those_of_the_paper() -> None:
    """Little data: the object store is cheaper than memory. Much: rounds through memory are cheaper than it."""
    redis = LOCUS.tiers["Redis"]
    price = dataclasses.replace(redis.price, least_s=3600.0)
    for size, order in ((10 * GB, ("slow", "fast")), (50 * TB, ("hybrid", "slow"))):
        memory = dataclasses.replace(redis, capacity=max(0.05 * size, 10 * GB), price=price)
        profile = dataclasses.replace(LOCUS, tiers={"S3": LOCUS.tiers["S3"], "Redis": memory})
        found = choose(shuffle_of(size), profile)
        methods: list[str] = [each.plan.method for each in (found.best, *found.others)]
        assert methods.index(order[0]) < methods.index(order[1])


def test_compression_is_chosen_where_bandwidth_is_the_limit() -> None:
    codecs = (Codec("none"), Codec("lz4", 0.5, 500 * MB, 2000 * MB), Codec("zstd", 0.4, 1 * MB, 1 * MB))
    found = choose(shuffle_of(100 * GB), dataclasses.replace(PROFILE, codecs=codecs), objective="fastest")
    assert found.best.plan.codec.name == "lz4"
    assert "Redis, lz4" in found.explain()


def test_plans_have_all_workers_and_few_of_them() -> None:
    counts = {each.parallel for each in plans(shuffle_of(GB), PROFILE)}
    assert {1, 2, 4, 256, 400} <= counts
    assert max(counts) == 400
    one = dataclasses.replace(PROFILE, workers=dataclasses.replace(WORKERS, most=1))
    assert {each.parallel for each in plans(shuffle_of(GB), one)} == {1}


def test_more_workers_are_refused_where_requests_are_the_limit() -> None:
    """Section 6.2 of the paper: 200 workers for 100 GB are better than 400, but not with a memory."""
    memory = dataclasses.replace(LOCUS.tiers["Redis"], bytes_per_s_of_byte=float("inf"))
    profile = dataclasses.replace(LOCUS, tiers={"S3": LOCUS.tiers["S3"], "Redis": memory})
    seconds = {
        (method, workers): estimate(shuffle_of(100 * GB), Plan(method, tier, 3 * GB, workers), profile)
        for method, tier in ((Method.SLOW, "S3"), (Method.FAST, "Redis"))
        for workers in (200, 400)
    }
    reason = why_slower(seconds[Method.SLOW, 200], seconds[Method.SLOW, 400])
    assert re.fullmatch(r"[\d.]+ s, now [\d.]+ s, limited by S3 requests", reason)
    assert why_slower(seconds[Method.FAST, 200], seconds[Method.FAST, 400]) == ""


def test_the_best_plan_says_why_it_has_no_more_workers() -> None:
    only = dataclasses.replace(PROFILE, tiers={"S3": LOCUS.tiers["S3"]})
    found = choose(shuffle_of(GB), only, objective="fastest")
    workers = found.best.plan.parallel
    assert 2 * workers <= 400
    [line] = [each for each in found.explain().splitlines() if each.startswith("no ")]
    assert re.match(rf"no faster with {2 * workers} workers: [\d.]+ s, now ", line)
    enough = choose(shuffle_of(100 * GB), PROFILE, objective="fastest")
    assert enough.best.plan.parallel == 400, "there are no more"
    assert enough.refused == ()
