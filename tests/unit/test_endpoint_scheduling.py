"""Tasks and the time that a block has left."""

from __future__ import annotations

import msgspec
import pytest

from farcall_common.errors import ErrorRecord
from farcall_common.task_options import TaskOptions
from farcall_common.wire import TaskSpec, TaskState
from farcall_endpoint.agent.core.agent import AgentCore
from farcall_endpoint.agent.core.loads import Lifetime, ManagerLoad
from farcall_endpoint.agent.core.managers import TaskQueue
from farcall_endpoint.agent.core.scheduling import round_robin
from farcall_endpoint.agent.core.tasks import Stage, Task
from farcall_endpoint.contracts.agent_manager import Progress
from farcall_endpoint.contracts.prefetch import PrefetchPolicy
from tests.support.agent import CoreDriver, Turn

HASH = "f" * 64


def spec(name: str, walltime_s: float | None = None, *, idempotent: bool = True) -> TaskSpec:
    return TaskSpec(name, 1, "", HASH, TaskOptions(idempotent=idempotent, walltime_s=walltime_s), 0)


def task(name: str, walltime_s: float | None = None) -> Task:
    return Task(1, spec(name, walltime_s), 1, Stage.QUEUED, 0.0)


@pytest.mark.parametrize(
    ("left", "walltime_s", "fits"),
    [
        (Lifetime(60.0), 60.0, True),
        (Lifetime(60.0), 61.0, False),
        (Lifetime(60.0), None, True),
        (Lifetime(0.0), None, False),
        (Lifetime(60.0, drain_s=60.0), None, False),
        (Lifetime(60.0, drain_s=90.0), 10.0, True),
        (Lifetime(60.0, drain_s=90.0, limit_s=30.0), None, True),
        (Lifetime(60.0, limit_s=30.0), 100.0, True),
        (Lifetime(60.0, limit_s=90.0), None, False),
    ],
)
def test_task_starts_only_where_its_walltime_fits(left: Lifetime, walltime_s: float | None, *, fits: bool) -> None:
    assert left.fits(walltime_s, now=0.0) is fits


def test_each_task_goes_to_a_manager_with_enough_time() -> None:
    old, young = ManagerLoad("old", 2, 2, Lifetime(10.0)), ManagerLoad("young", 1, 1, Lifetime(100.0))
    tasks = [task("long", 50.0), task("short", 5.0), task("longer", 60.0)]
    placed = round_robin().place(tasks, [old, young], depth=0, now=0.0)
    assert [(each.task_id, manager_id) for each, manager_id in placed] == [("long", "young"), ("short", "old")]


def core_with(*, ends_at: float | None, **options: float) -> CoreDriver:
    none = PrefetchPolicy(horizon_s=0.0, limit=0)
    core = CoreDriver(
        AgentCore(
            endpoint_id="e",
            policy=round_robin(),
            slots_hint=1,
            prefetch=none,
            window=none,
            max_window=8,
            **options,  # type: ignore[arg-type]
        )
    )
    core.opened()
    core.accept(functions=[HASH])
    if ends_at is not None:
        core.manager_registered("m", slots=4, ends_at=ends_at)
        core.progress("m", Progress(workers=4))
    return core


def orders(turn: Turn) -> list[str]:
    return [each.task_id for tasks in turn.orders.values() for each in tasks]


def error_of(turn: Turn) -> ErrorRecord:
    [ended] = turn.finished
    assert ended.result is not None
    assert ended.result.error is not None
    assert ended.result.state is TaskState.FAILED
    return ErrorRecord.from_json(ended.result.error)


def test_task_that_fits_overtakes_one_that_does_not() -> None:
    core = core_with(ends_at=30.0)
    for name, walltime_s in (("a", 60.0), ("b", 10.0), ("c", 60.0), ("d", 10.0)):
        core.accept(spec(name, walltime_s))
    assert orders(core.decide(now=0.0)) == ["b", "d"]
    core.manager_registered("new", slots=4, ends_at=100.0)
    core.progress("new", Progress(workers=4))
    assert orders(core.decide(now=1.0)) == ["a", "c"]


def test_task_longer_than_any_block_fails_at_once() -> None:
    core = core_with(ends_at=None, block_s=100.0)
    core.accept(spec("a", 101.0))
    assert error_of(core.decide(now=0.0)).code == "LIMIT_INVALID"


@pytest.mark.parametrize(
    ("name", "hint"), [("gpus", "an endpoint that has them"), ("num_node", "Did you mean 'num_nodes'")]
)
def test_a_resource_that_the_endpoint_does_not_know_is_refused(name: str, hint: str) -> None:
    core = core_with(ends_at=None)
    asks, does_not = (TaskOptions(resource_specification={name: value}) for value in (1, None))
    core.accept(TaskSpec("a", 1, "", HASH, asks, 0), TaskSpec("b", 1, "", HASH, does_not, 0))
    record = error_of(core.decide(now=0.0))
    assert (record.code, record.retryable) == ("LIMIT_INVALID", False)
    assert repr(name) in record.message
    assert hint in record.hint


def test_waiting_and_new_tasks_fail_without_nodes() -> None:
    core = core_with(ends_at=None)
    core.accept(spec("a"))
    core.nodes(refusal="3 blocks ended: invalid account", problem="")
    record = error_of(core.decide(now=0.0))
    assert record.code == "NODES_UNAVAILABLE"
    assert record.retryable
    assert "invalid account" in record.message
    core.accept(spec("b"))
    assert error_of(core.decide(now=1.0)).code == "NODES_UNAVAILABLE"
    core.nodes(refusal="", problem="")
    core.accept(spec("c"))
    assert not core.decide(now=2.0).finished


def test_reason_of_pending_blocks_is_in_the_report() -> None:
    core = core_with(ends_at=None)
    core.nodes(refusal="", problem="job 7 PENDING (Resources)")
    core.decide(now=0.0)
    assert core.report().detail["problem"] == "job 7 PENDING (Resources)"


def test_demand_names_submitters_with_tasks() -> None:
    core = core_with(ends_at=1000.0)
    core.manager_registered("idle", slots=1)
    core.progress("idle", Progress(workers=1))
    core.accept(spec("a", 10.0))
    core.decide(now=0.0)
    demand = core.demand()
    assert demand.tasks == 1
    assert len(demand.busy) == 1


def test_a_manager_whose_first_worker_starts_is_busy_while_tasks_wait() -> None:
    core = core_with(ends_at=None)
    core.manager_registered("new", slots=1)
    assert core.demand().busy == []
    core.accept(spec("a"))
    core.decide(now=0.0)
    assert core.demand().busy == ["new"]
    core.progress("new", Progress(workers=1))
    core.decide(now=1.0)
    core.manager_registered("second", slots=1)
    assert core.demand().busy == ["new"], "no task waits"


@pytest.mark.parametrize("idempotent", [True, False])
@pytest.mark.parametrize(("has_calls", "placed"), [(False, []), (True, ["one"])])
def test_a_submitter_without_tasks_gets_one_to_a_full_manager_whose_places_take_turns(
    has_calls: bool, placed: list[str], idempotent: bool
) -> None:
    queue = TaskQueue()
    for name in ("one", "two"):
        given = msgspec.structs.replace(spec(name, idempotent=idempotent), submitter="g")
        queue.add(Task(1, given, 1, Stage.QUEUED, 0.0))
    loads = [ManagerLoad("a", 2, 0), ManagerLoad("b", 1, 0, has_calls=has_calls)]
    found = queue.place(round_robin(), loads, depth=0, now=0.0, environments={})
    assert [each.task_id for each, _ in found] == placed
    assert {name for _, name in found} <= {"b"}
    assert len(queue) == 2 - len(placed)
