"""Plans of jobs: one step for each exchange, deadlines and budgets of the whole, corrections by what is measured."""

from __future__ import annotations

import dataclasses
import re

import pyarrow as pa
import pytest

from farcall_analytics import model
from farcall_analytics.frames import Dataset, from_arrow
from farcall_analytics.job_plans import Facts, JobPlan, JobPlanner, Limits, Step
from farcall_analytics.model import Infeasible, Method, Shuffle, estimate
from farcall_analytics.planner import NoPlan
from farcall_analytics.prices import LAMBDA_2026, REDIS_2018
from farcall_analytics.profiles import Codec, Profile, Workers
from farcall_analytics.stages import Query, Stage
from tests.support.analytics_data import NoExecutor
from tests.unit.test_analytics_model import GB, LOCUS, MB

REDIS = dataclasses.replace(LOCUS.tiers["Redis"], price=dataclasses.replace(REDIS_2018, least_s=600.0))
PROFILE = Profile(
    Workers(
        (2 * GB,), most=100, call_s=0.05, partition_bytes_per_s=100 * MB, combine_bytes_per_s=60 * MB, price=LAMBDA_2026
    ),
    {"S3": dataclasses.replace(LOCUS.tiers["S3"], latency_s=0.02), "Redis": REDIS},
    (Codec("none"), Codec("lz4", 0.6, 400 * MB, 2_000 * MB)),
    error=0.1,
)
LIMITS = Limits("S3", "Redis")


def table(name: str) -> Dataset:
    rows = pa.table({"key": pa.array([], pa.int64()), name: pa.array([], pa.float64())})
    return from_arrow(rows, executor=NoExecutor(), storage="file:///none")


def joined() -> Query:
    """Two large tables, their join, and a sort of it."""
    query = table("a").join(table("b"), on="key").sort("a").stages()
    stages = [sized(each, 20 * GB) for each in query.stages]
    assert [each.exchange.kind if each.exchange else None for each in stages][-2:] == ["range", None]
    return Query(tuple(stages))


def sized(stage: Stage, size: float) -> Stage:
    return stage._replace(size=size)


def facts(query: Query, *, tasks: int = 40, size: float = 20 * GB) -> dict[str, Facts]:
    return {source.table: Facts(tasks, size) for each in query.stages for source in each.sources if source.table}


@pytest.fixture(scope="module")
def query() -> Query:
    table_sizes = pytest.MonkeyPatch()
    table_sizes.setattr("farcall_analytics.stages.BROADCAST_BYTES", -1)
    try:
        return joined()
    finally:
        table_sizes.undo()


def planner(query: Query, limits: Limits = LIMITS, profile: Profile = PROFILE) -> JobPlanner:
    return JobPlanner(query, facts(query), profile, limits)


def steps(plan: JobPlan) -> list[Step]:
    return [each.step for each in plan.stages if each.step is not None]


def test_each_exchange_has_the_step_that_is_best_for_it(query: Query) -> None:
    found = planner(query).compared()
    assert len(steps(found)) == 2, "of the join, and of the sort"
    for name, other in found.others:
        assert other.estimate.dollars >= found.estimate.dollars * 0.999, name
    fastest = planner(query, dataclasses.replace(LIMITS, objective="fastest")).compared()
    assert fastest.estimate.seconds < found.estimate.seconds
    assert all(other.estimate.seconds >= fastest.estimate.seconds * 0.999 for _, other in fastest.others)


def test_seconds_of_stages_are_those_of_the_exchange_between_them(query: Query) -> None:
    """With one scan and one exchange, the plan of the job is that of the exchange."""
    alone = Query(tuple(table("a").sort("a").stages().stages))
    alone = Query(tuple(sized(each, 10 * GB) for each in alone.stages))
    limits = Limits("S3", method=Method.COMBINED, codec="none", partitions=50)
    job = JobPlanner(alone, facts(alone, tasks=50, size=10 * GB), PROFILE, limits).plan()
    plan = dataclasses.replace(_exchange_of(job), partitions=50)
    own = estimate(Shuffle(10 * GB, 10 * GB, 10 * GB, writers=50), plan, PROFILE)
    reads_s = 10 * GB / 100 / PROFILE.workers.partition_bytes_per_s  # of the table, which the exchange does not know
    assert job.estimate.seconds == pytest.approx(own.seconds + 2 * reads_s, rel=0.25)


def _exchange_of(job: JobPlan) -> model.Plan:
    [step] = steps(job)
    return model.Plan(step.method, "S3", 2 * GB, 100, partitions=step.partitions)


def test_a_deadline_and_a_budget_are_those_of_the_whole_job(query: Query) -> None:
    cheapest = planner(query).plan().estimate
    fastest = planner(query, dataclasses.replace(LIMITS, objective="fastest")).plan().estimate
    assert fastest.dollars > cheapest.dollars
    limit_s = (cheapest.high_s + fastest.high_s) / 2
    in_time = planner(query, dataclasses.replace(LIMITS, deadline_s=limit_s)).plan().estimate
    assert in_time.high_s <= limit_s
    assert cheapest.dollars <= in_time.dollars <= fastest.dollars
    budget = (cheapest.dollars + fastest.dollars) / 2
    in_budget = planner(query, dataclasses.replace(LIMITS, objective="fastest", budget=budget)).plan().estimate
    assert in_budget.dollars <= budget
    assert fastest.seconds <= in_budget.seconds <= cheapest.seconds
    with pytest.raises(NoPlan, match=r"^no plan keeps 0\.5 s; the nearest one takes "):
        planner(query, dataclasses.replace(LIMITS, deadline_s=0.5)).plan()
    with pytest.raises(NoPlan, match=r"keeps 1000 s and 1e-09 dollars"):
        planner(query, dataclasses.replace(LIMITS, deadline_s=1000.0, budget=1e-9)).plan()


def test_what_the_user_has_set_is_not_chosen(query: Query) -> None:
    limits = dataclasses.replace(
        LIMITS, method=Method.HYBRID, partitions=7, codec="lz4", fast_bytes=2 * GB, pipelined=False
    )
    found = steps(planner(query, limits).plan())
    assert found == [Step(Method.HYBRID, 7, "lz4", 2 * GB, rounds) for rounds in (12, 6)], "40 and 20 GB, compressed"
    pipelined = steps(planner(query, dataclasses.replace(limits, pipelined=True)).plan())
    assert [(each.pipelined, each.rounds) for each in pipelined] == [(True, 24), (True, 12)]
    by_size = planner(query, dataclasses.replace(LIMITS, partition_bytes=5 * GB)).plan()
    assert [each.partitions for each in steps(by_size)] == [8, 4]
    few = planner(query, dataclasses.replace(LIMITS, most_partitions=3)).plan()
    assert [each.partitions for each in steps(few)] == [3, 3]
    with pytest.raises(Infeasible, match="Disk was not measured"):
        planner(query, Limits("Disk"))


def test_small_exchanges_are_not_compared() -> None:
    small = table("a").sort("a").stages()
    found = JobPlanner(small, facts(small, tasks=3, size=1000), PROFILE, LIMITS).compared()
    assert {each.method for each in steps(found)} == {Method.COMBINED}
    assert found.others == ()


def test_measured_sizes_correct_those_of_all_stages_behind(query: Query) -> None:
    own = planner(query)
    before = own.plan()
    scans = [each.number for each in query.stages if any(source.table for source in each.sources)]
    for number in scans:
        own.measured(number, 2 * MB)
    assert own.size(scans[0]) == 2 * MB
    last = query.stages[-1].number
    assert own.size(last) == pytest.approx(2 * MB, rel=0.01), "as much less as both inputs together"
    later = own.step(last)
    assert later.partitions < next(each.step for each in before.stages if each.number == last).partitions  # type: ignore[union-attr]
    assert own.step(last) is later, "what was said once stays"


def test_a_step_of_an_earlier_program_is_kept(query: Query) -> None:
    own = planner(query)
    own.plan()
    own.keep(query.stages[-1].number, Step(Method.SLOW, 3))
    assert own.step(query.stages[-1].number) == Step(Method.SLOW, 3)
    assert own.tasks(query.stages[-1]) == 3


def test_measured_bandwidth_changes_what_is_predicted(query: Query) -> None:
    own = planner(query, Limits("S3", method=Method.COMBINED, codec="none", partitions=50))
    before = own.plan().estimate.seconds
    for _ in range(8):
        own.measured_reads(100, 1 * GB, 1 * GB / MB)  # 1 MB/s each
    slower = own.plan().estimate.seconds
    assert slower > 3 * before
    own.measured_writes(100, 1000.0, 100.0)  # requests took the time
    assert own.plan().estimate.seconds == slower


def test_the_table_has_plan_others_and_stages(query: Query) -> None:
    full = dataclasses.replace(PROFILE, tiers={**PROFILE.tiers, "Redis": dataclasses.replace(REDIS, capacity=1 * MB)})
    lines = planner(query, profile=dataclasses.replace(full, note="assumed")).compared().explain().splitlines()
    assert lines[0].split()[:5] == ["method", "storage", "partitions", "rounds", "time"]
    assert lines[1].startswith("* ")
    assert any(re.match(r"no fast Redis: Redis has no room for ", each) for each in lines)
    assert [each.split()[0] for each in lines[lines.index("") + 2 : -1]] == ["1", "2", "3", "4"]
    assert lines[-1] == "assumed"


def test_the_plan_says_why_its_widest_exchange_has_no_more_partitions(query: Query) -> None:
    slow = planner(query, Limits("S3", method=Method.SLOW, objective="fastest")).compared()
    widest = max(each.partitions for each in steps(slow))
    [(name, reason)] = [each for each in slow.refused if "partitions" in each[0]]
    assert re.fullmatch(rf"faster with {2 * widest} partitions for stage \d+", name)
    assert re.fullmatch(r"[\d.]+ s, now [\d.]+ s, limited by .*", reason)
    assert f"no {name}: {reason}" in slow.explain()
    given = planner(query, Limits("S3", method=Method.SLOW, partitions=widest)).compared()
    assert not given.refused, "no others were to be compared"
