"""Model of exchanges: curves, slow-downs, methods, times and dollars."""

from __future__ import annotations

import dataclasses
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farcall_analytics.curves import Curve, Slowdowns, constant, last_end
from farcall_analytics.model import (
    Infeasible,
    Method,
    Plan,
    Shuffle,
    Transfer,
    estimate,
    phases_of,
    rounds_of,
    stored_by,
)
from farcall_analytics.prices import LAMBDA_2018, LAMBDA_2026, REDIS_2018, S3_2018, S3_2026
from farcall_analytics.profiles import Codec, Profile, Tier, Workers

MB, GB, TB = 1e6, 1e9, 1e12
BANDWIDTH = Curve(
    ((0.25 * GB, 14 * MB), (0.5 * GB, 22 * MB), (1 * GB, 40 * MB), (1.25 * GB, 40 * MB), (1.5 * GB, 42 * MB))
)
REQUESTS = Curve(((62e3, 5000.0), (0.27 * MB, 4250.0), (1.1 * MB, 3550.0), (2.25 * MB, 3200.0)))
S3 = Tier("S3", REQUESTS, REQUESTS, BANDWIDTH, BANDWIDTH, price=S3_2018)
REDIS = Tier(
    "Redis", constant(1e6), constant(1e6), BANDWIDTH, BANDWIDTH, capacity=5 * TB, is_fast=True, price=REDIS_2018
)
WORKERS = Workers((0.25 * GB, 1 * GB, 3 * GB), most=10_000, data_part=1.0, overlaps=True, price=LAMBDA_2018)
LOCUS = Profile(WORKERS, {"S3": S3, "Redis": REDIS}, error=0.0)
"""As measured by the Locus paper (section 4.2), back from its table of times."""

METHODS = st.sampled_from(
    [
        Plan(Method.SLOW, "S3", GB, 40),
        Plan(Method.COMBINED, "S3", GB, 40),
        Plan(Method.TWO_LEVEL, "S3", GB, 40),
        Plan(Method.FAST, "Redis", GB, 40),
        Plan(Method.HYBRID, "S3", GB, 40, "Redis", 5 * GB),
        Plan(Method.HYBRID, "S3", GB, 40, "Redis", 5 * GB, pipelined=True),
        Plan(Method.MERGED, "S3", GB, 40, "Redis"),
    ]
)


def with_workers(**changes: object) -> Profile:
    return dataclasses.replace(LOCUS, workers=dataclasses.replace(WORKERS, **changes))  # type: ignore[arg-type]


# -- curves and slow-downs ---------------------------------------------------------------------------------------------


def test_a_curve_goes_through_its_points_and_stays_beyond_them() -> None:
    curve = Curve(((1.0, 10.0), (100.0, 1000.0)))
    assert [curve.at(place) for place in (0.5, 1.0, 100.0, 9999.0)] == pytest.approx([10.0, 10.0, 1000.0, 1000.0])
    assert curve.at(10.0) == pytest.approx(100.0)
    assert curve.scaled(2).at(10.0) == pytest.approx(200.0)


@pytest.mark.parametrize(
    "points", [(), ((2.0, 1.0), (1.0, 1.0)), ((1.0, 1.0), (1.0, 2.0)), ((1.0, 0.0),), ((-1.0, 1.0),)]
)
def test_a_curve_refuses_points_that_make_no_sense(points: tuple[tuple[float, float], ...]) -> None:
    with pytest.raises(ValueError, match="points: expected pairs"):
        Curve(points)


@given(st.lists(st.floats(0.1, 50.0), min_size=1, max_size=300), st.integers(1, 1000))
def test_the_slowest_task_takes_the_longer_the_more_there_are(durations: list[float], tasks: int) -> None:
    slowdowns = Slowdowns.of(durations)
    assert len(slowdowns.factors) <= 100
    assert sum(slowdowns.factors) / len(slowdowns.factors) == pytest.approx(1.0, rel=0.5)
    assert slowdowns.mean_worst(tasks) <= slowdowns.mean_worst(tasks + 1) + 1e-9
    low, high = (slowdowns.worst(tasks, quantile=part) for part in (0.05, 0.95))
    assert min(slowdowns.factors) <= low <= high <= max(slowdowns.factors)


def test_the_mean_of_the_slowest_is_that_of_a_simulation() -> None:
    rng = random.Random(1)
    slowdowns = Slowdowns.of([rng.lognormvariate(0.0, 0.5) for _ in range(100)])
    simulated = [max(rng.choices(slowdowns.factors, k=20)) for _ in range(20_000)]
    assert slowdowns.mean_worst(20) == pytest.approx(sum(simulated) / len(simulated), rel=0.01)
    ordered = sorted(simulated)
    assert slowdowns.worst(20, quantile=0.5) == pytest.approx(ordered[10_000], rel=0.05)


@given(st.integers(1, 60), st.lists(st.floats(0.5, 8.0), min_size=1, max_size=12))
def test_the_last_task_ends_as_in_a_simulation(more: int, durations: list[float]) -> None:
    tasks = len(durations) + more
    free_at = [0.0] * len(durations)
    for _ in range(tasks):
        worker = min(range(len(durations)), key=lambda each: (free_at[each], durations[each]))
        free_at[worker] += durations[worker]
    assert last_end(tasks, durations) == pytest.approx(max(free_at), rel=1e-3)


def test_workers_are_as_slow_as_all_of_them_and_one_as_the_slowest() -> None:
    assert Slowdowns((0.5,) * 7 + (4.5,)).of_workers(8) == [0.5] * 7 + [4.5]
    few = Slowdowns((0.8,) * 19 + (4.8,))
    assert few.of_workers(2) == [0.8, pytest.approx(few.mean_worst(2))]
    assert Slowdowns().of_workers(3) == [1.0] * 3


def test_copies_shorten_the_tail_and_nothing_else() -> None:
    slowdowns = Slowdowns((0.5,) * 9 + (5.5,))
    shorter = slowdowns.with_copies(0.9)
    assert sum(shorter.factors) == pytest.approx(0.5 * 9 + 0.9 * 1.0 + 0.1 * 5.5)
    assert shorter.mean_worst(50) < slowdowns.mean_worst(50)
    assert Slowdowns((1.0,) * 10).with_copies(0.9).mean_worst(50) == pytest.approx(1.0)


# -- the paper ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "printed_s"),
    [(20 * GB, (36, 45, 50, 63, 72)), (200 * GB, (305, 92, 50, 63, 75)), (1 * TB, (6368, 1859, 558, 382, 281))],
    ids=["20 GB", "200 GB", "1 TB"],
)
def test_times_of_a_slow_exchange_are_those_of_the_paper(size: float, printed_s: tuple[int, ...]) -> None:
    """Table 2: as many workers as their memory needs to hold the data."""
    for memory, expected_s in zip((0.25 * GB, 0.5 * GB, 1 * GB, 1.25 * GB, 1.5 * GB), printed_s, strict=True):
        plan = Plan(Method.SLOW, "S3", memory, round(size / memory))
        assert estimate(Shuffle(size), plan, LOCUS).seconds == pytest.approx(expected_s, rel=0.05)


def test_a_hybrid_exchange_takes_time_in_inverse_proportion_to_its_memory() -> None:
    """CloudSort with 100 TB and memory for 5 to 2 % of it."""
    shuffle = Shuffle(100 * TB, 100 * TB, 100 * TB)
    parts = (0.05, 1 / 30, 0.025, 0.02)
    found = [
        estimate(shuffle, Plan(Method.HYBRID, "S3", 3 * GB, 3000, "Redis", part * shuffle.size), limited()).seconds
        for part in parts
    ]
    assert sorted(found) == found
    slope = (found[-1] - found[0]) / (1 / parts[-1] - 1 / parts[0])
    for part, seconds in zip(parts, found, strict=True):
        assert seconds == pytest.approx(found[0] + slope * (1 / part - 1 / parts[0]), rel=0.02)


def limited() -> Profile:
    """The network of the nodes with memory is the limit: 10 Gbit/s for 61 GB."""
    shards = dataclasses.replace(REDIS, bytes_per_s_of_byte=1.25 / 61)
    return dataclasses.replace(LOCUS, tiers={"S3": S3, "Redis": shards})


# -- phases ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "writes", "reads"),
    [
        (Method.SLOW, 10_000, 10_000),
        (Method.COMBINED, 100, 10_000),
        (Method.TWO_LEVEL, 200, 2000),
        (Method.FAST, 10_000, 10_000),
    ],
)
def test_requests_are_those_of_the_method(method: Method, writes: int, reads: int) -> None:
    phases = phases_of(Shuffle(100 * GB), Plan(method, "S3", GB, 50), WORKERS)
    found = {
        is_write: sum(each.requests for phase in phases for each in phase.transfers if each.is_write is is_write)
        for is_write in (True, False)
    }
    assert found == {True: writes, False: reads}


def test_what_the_workers_of_a_node_have_written_is_merged() -> None:
    workers = dataclasses.replace(WORKERS, per_node=8)
    phases = phases_of(Shuffle(100 * GB), Plan(Method.MERGED, "S3", GB, 50, "Redis"), workers)
    partition, regroup, combine = phases
    assert partition.transfers[-1][:2] == ("Redis", 100)
    assert [each[:2] for each in regroup.transfers] == [("Redis", 1_000), ("S3", 70)], "7 nodes, 10 parts"
    assert combine.transfers[0][:2] == ("S3", 700)


def test_a_hybrid_exchange_reads_each_range_of_each_run_once() -> None:
    plan = Plan(Method.HYBRID, "S3", GB, 10, "Redis", 20 * GB)
    partition, combine, merge = phases_of(Shuffle(100 * GB, 100 * GB, 100 * GB), plan, WORKERS)
    assert (rounds_of(Shuffle(100 * GB), plan), partition.repeats, combine.repeats, merge.repeats) == (5, 5, 5, 1)
    assert [each.requests for each in merge.transfers] == [500, 100]
    read, fast = partition.transfers
    assert (read.size, fast.tier, fast.requests, fast.size) == (20 * GB, "Redis", 400, 20 * GB)
    assert [(each.tier, each.is_write) for each in combine.transfers] == [("Redis", False), ("S3", True)]


def test_rounds_at_the_same_time_have_half_the_memory_each_and_overlap() -> None:
    shuffle = Shuffle(100 * GB)
    barrier = Plan(Method.HYBRID, "S3", GB, 10, "Redis", 20 * GB)
    pipelined = dataclasses.replace(barrier, pipelined=True)
    assert (rounds_of(shuffle, barrier), rounds_of(shuffle, pipelined)) == (5, 10)
    assert stored_by(shuffle, pipelined) == stored_by(shuffle, barrier)
    redis = dataclasses.replace(LOCUS.tiers["Redis"], bytes_per_s_of_byte=float("inf"))
    profile = dataclasses.replace(LOCUS, tiers={**LOCUS.tiers, "Redis": redis})
    for parallel, least, most in ((10, 0.9, 1.1), (400, 0.4, 0.75)):
        one, other = (
            estimate(shuffle, dataclasses.replace(each, parallel=parallel, partitions=100), profile).phases[:2]
            for each in (dataclasses.replace(barrier, memory=GB), dataclasses.replace(pipelined, memory=GB))
        )
        ratio = sum(each.seconds for each in other) / sum(each.seconds for each in one)
        assert least <= ratio <= most, f"{parallel} workers"
    few = Shuffle(3 * GB, writers=3)
    one_lane, two_lanes, too_large = (
        sum(each.seconds for each in estimate(few, dataclasses.replace(plan, parallel=400), profile).phases[:2])
        for plan in (
            dataclasses.replace(barrier, fast_bytes=GB),
            dataclasses.replace(pipelined, fast_bytes=2 * GB),
            dataclasses.replace(pipelined, fast_bytes=GB),
        )
    )
    assert two_lanes == pytest.approx(one_lane * 2 / 3), "three rounds in two lanes"
    assert too_large == pytest.approx(one_lane), "a task alone is larger than half of the memory"


@given(METHODS, st.floats(1 * MB, 50 * GB), st.floats(0.0, 50 * GB), st.floats(0.0, 50 * GB))
def test_all_bytes_are_read_and_written(plan: Plan, size: float, input_size: float, output_size: float) -> None:
    shuffle = Shuffle(size, input_size, output_size)
    outer, own = {True: 0.0, False: 0.0}, {True: 0.0, False: 0.0}
    for phase in phases_of(shuffle, plan, WORKERS, input_tier="input"):
        for each in phase.transfers:
            (outer if each.tier == "input" else own)[each.is_write] += each.size * phase.repeats
    assert outer == {True: pytest.approx(output_size), False: pytest.approx(input_size)}
    times = 2 if plan.method in (Method.TWO_LEVEL, Method.HYBRID, Method.MERGED) else 1
    assert own == {True: pytest.approx(times * size), False: pytest.approx(times * size)}


# -- time --------------------------------------------------------------------------------------------------------------


@given(METHODS, st.floats(1 * MB, 40 * GB), st.floats(1.0, 3.0))
def test_more_data_takes_longer_and_costs_more(plan: Plan, size: float, factor: float) -> None:
    less, more = (estimate(Shuffle(each, each, each), plan, LOCUS) for each in (size, factor * size))
    assert less.seconds <= more.seconds * 1.0001
    assert less.dollars <= more.dollars * 1.0001
    assert less.low_s <= less.seconds <= less.high_s


@given(METHODS, st.floats(1 * MB, 40 * GB))
def test_slower_storage_starts_processors_and_stragglers_take_longer(plan: Plan, size: float) -> None:
    shuffle = Shuffle(size, size, size)
    before = estimate(shuffle, plan, LOCUS).seconds
    slower = {
        name: dataclasses.replace(each, read_bytes_per_s=each.read_bytes_per_s.scaled(0.5), latency_s=0.1)
        for name, each in LOCUS.tiers.items()
    }
    profiles = [
        dataclasses.replace(LOCUS, tiers=slower),
        with_workers(start_s=1.0),
        with_workers(starts_per_s=1.0),
        with_workers(call_s=0.1),
        with_workers(combine_bytes_per_s=1 * MB),
        with_workers(slowdowns=Slowdowns((0.9,) * 9 + (1.9,))),
        with_workers(overlaps=False),
    ]
    for each in profiles:
        assert estimate(shuffle, plan, each).seconds >= before
    wider = estimate(shuffle, plan, dataclasses.replace(LOCUS, error=0.2))
    assert wider.low_s == pytest.approx(0.8 * before)
    assert wider.high_s == pytest.approx(1.2 * before)


def test_reading_computing_and_writing_overlap_or_follow_one_another() -> None:
    shuffle, plan = Shuffle(40 * GB, 40 * GB, 40 * GB), Plan(Method.COMBINED, "S3", GB, 40)
    rates = {"partition_bytes_per_s": 40 * MB, "combine_bytes_per_s": 20 * MB}
    assert estimate(shuffle, plan, with_workers(**rates)).seconds == pytest.approx(25 + 50)
    apart = estimate(shuffle, plan, with_workers(overlaps=False, **rates))
    assert apart.seconds == pytest.approx(25 + 25 + 25 + 25 + 50 + 25)
    assert apart.limited_by == "S3 bandwidth"
    more_cores = with_workers(overlaps=False, cores_per_byte=4 / GB, **rates)
    assert estimate(shuffle, plan, more_cores).seconds == pytest.approx(25 + 6.25 + 25 + 25 + 12.5 + 25)


def test_workers_start_once_also_before_many_rounds() -> None:
    plan = Plan(Method.HYBRID, "S3", GB, 40, "Redis", 2 * GB)
    late = estimate(Shuffle(40 * GB), plan, with_workers(start_s=9.0)).seconds
    assert late == pytest.approx(estimate(Shuffle(40 * GB), plan, LOCUS).seconds + 9.0)


def test_what_limits_a_plan_is_said() -> None:
    many, few = Shuffle(1 * TB), Shuffle(1 * MB)
    assert estimate(many, Plan(Method.SLOW, "S3", 0.25 * GB, 1000), LOCUS).limited_by == "S3 requests"
    assert estimate(many, Plan(Method.COMBINED, "S3", 3 * GB, 10), LOCUS).limited_by == "S3 bandwidth"
    assert estimate(few, Plan(Method.SLOW, "S3", GB, 1), with_workers(start_s=9.0)).limited_by == "worker start"
    slow = with_workers(combine_bytes_per_s=1 * MB)
    assert estimate(many, Plan(Method.FAST, "Redis", 3 * GB, 10), slow).limited_by == "processors"


def test_more_workers_help_until_requests_are_the_limit() -> None:
    """10 GB: four times as many workers are faster; 100 GB through the object store: twice as many are slower."""
    small = [estimate(Shuffle(10 * GB), Plan(Method.SLOW, "S3", 3 * GB, each), LOCUS).seconds for each in (10, 40)]
    assert small[0] / small[1] >= 3
    large = [estimate(Shuffle(100 * GB), Plan(Method.SLOW, "S3", 3 * GB, each), LOCUS).seconds for each in (200, 400)]
    assert large[1] / large[0] >= 2
    fast = [estimate(Shuffle(100 * GB), Plan(Method.FAST, "Redis", 3 * GB, each), LOCUS).seconds for each in (200, 400)]
    assert fast[0] / fast[1] > 1.5


def test_compression_trades_bandwidth_for_processors() -> None:
    shuffle, plan = Shuffle(40 * GB), Plan(Method.COMBINED, "S3", GB, 40)
    quick = dataclasses.replace(plan, codec=Codec("lz4", 0.5, 400 * MB, 2000 * MB))
    slow = dataclasses.replace(plan, codec=Codec("zstd", 0.4, 10 * MB, 20 * MB))
    seconds = [estimate(shuffle, each, LOCUS).seconds for each in (plan, quick, slow)]
    assert seconds == pytest.approx([50, 25, 150])


def test_a_wave_waits_for_its_slowest_task_and_copies_help() -> None:
    profile = with_workers(slowdowns=Slowdowns((0.8,) * 19 + (4.8,)))
    shuffle, plan = Shuffle(40 * GB), Plan(Method.COMBINED, "S3", GB, 40)
    without = estimate(shuffle, plan, profile)
    assert without.seconds > 3 * 50
    assert without.limited_by == "stragglers"
    copied = estimate(shuffle, dataclasses.replace(plan, copies_after=0.9), profile)
    assert copied.seconds < 0.7 * without.seconds
    many = estimate(shuffle, dataclasses.replace(plan, parallel=4), profile)
    assert many.seconds < 1.3 * 10 * 50, "only the last of ten waves waits"


# -- dollars -----------------------------------------------------------------------------------------------------------


def test_workers_are_paid_while_they_wait_and_requests_one_by_one() -> None:
    plan = Plan(Method.SLOW, "S3", 0.25 * GB, 4000)
    found = estimate(Shuffle(1 * TB), plan, with_prices(LAMBDA_2026, S3_2026))
    workers = 4000 * 0.25 * 0.0000166667 * found.seconds
    requests = 16e6 * (0.005e-3 + 0.0004e-3)
    assert found.dollars == pytest.approx(workers + requests, rel=0.01)


def with_prices(worker: object, storage: object) -> Profile:
    tiers = {"S3": dataclasses.replace(S3, price=storage), "Redis": REDIS}  # type: ignore[arg-type]
    return dataclasses.replace(LOCUS, workers=dataclasses.replace(WORKERS, price=worker), tiers=tiers)  # type: ignore[arg-type]


def test_memory_is_paid_for_as_long_as_it_is_there() -> None:
    price = dataclasses.replace(REDIS_2018, least_s=3600.0)
    tiers = {"S3": S3, "Redis": dataclasses.replace(REDIS, price=price)}
    profile = dataclasses.replace(LOCUS, workers=dataclasses.replace(WORKERS, price=type(LAMBDA_2018)()), tiers=tiers)
    found = estimate(Shuffle(100 * GB), Plan(Method.FAST, "Redis", GB, 100), profile)
    assert found.seconds < 60
    assert found.dollars == pytest.approx(100 * 0.02344)


# -- what cannot be ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        (Plan(Method.FAST, "Redis", GB, 10), "Redis has no room for 1e"),
        (Plan(Method.SLOW, "S3", GB, 20_000), "10000 workers, not 20000"),
        (Plan(Method.HYBRID, "S3", GB, 10, "Redis"), "needs memory"),
    ],
)
def test_a_plan_that_cannot_be_done_is_refused(plan: Plan, reason: str) -> None:
    with pytest.raises(Infeasible, match=reason):
        estimate(Shuffle(10 * TB), plan, LOCUS)


def test_a_direct_exchange_is_one_object_of_each_task_in_the_memory_of_its_node() -> None:
    plan = Plan(Method.DIRECT, "Redis", GB, 20)
    partition, combine = phases_of(Shuffle(10 * GB), plan, WORKERS)
    assert partition.transfers == (Transfer("Redis", 20, 10 * GB, is_write=True),)
    assert combine.transfers == (Transfer("Redis", 400, 10 * GB, is_write=False),)
    assert estimate(Shuffle(10 * GB), plan, LOCUS).seconds == pytest.approx(25.0)
