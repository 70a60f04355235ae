"""Latency targets at an agent: which tasks have one, where they go, and what is known of baselines."""

from __future__ import annotations

import pytest

from farcall_common.qos import QoS
from farcall_common.wire import TaskState
from farcall_endpoint.agent.core import events as ev
from farcall_endpoint.config.settings import QosSettings
from farcall_endpoint.contracts.agent_manager import CpuSharesStatus, Finished, Progress, WeightOfClass
from farcall_endpoint.qos.controller import NEEDS_CPU
from tests.support.agent import CoreDriver
from tests.unit.test_endpoint_agent_core import HASH, finish, ids, make_core, send, spec

TARGET = QoS(target_ms=200)


def core_of(*, latency_slots: int = 2, baselines: dict[str, float] | None = None, **settings: object) -> CoreDriver:
    core = make_core(slots_hint=1, qos=QosSettings(**settings), baselines=baselines)  # type: ignore[arg-type]
    register(core, "m", latency_slots)
    core.opened()
    core.decide(now=0.0)
    return core


def register(core: CoreDriver, manager_id: str, latency_slots: int) -> None:
    core.add(ev.ManagerRegistered(manager_id, 1, latency_slots=latency_slots))
    core.progress(manager_id, Progress(workers=1))


def test_a_task_with_a_target_overtakes_a_backlog_and_names_its_class() -> None:
    core = core_of()
    send(core, spec("a"), spec("b"), spec("c"))
    turn = send(core, spec("urgent", qos=TARGET), now=5.0)
    [task] = turn.orders["m"]
    assert task.task_id == "urgent"
    assert task.target is not None
    assert (task.target.latency_s, task.target.percentile, task.target.waited_s) == (0.2, 95.0, 0.0)
    assert ids(finish(core, "a").orders["m"]) == ["b", "c"], "it has no place of batch work"


def test_targets_of_others_are_batch_work_unless_they_have_a_share() -> None:
    core = core_of(max_weights={"bob": 200.0})
    core.add(ev.OwnerKnown("alice"))
    core.decide(now=0.0)
    hasty = QoS(target_ms=1)
    turn = send(core, *(spec(f"{number}", qos=hasty, submitter="mallory") for number in range(6)))
    [order] = turn.orders["m"]
    assert (order.task_id, order.target) == ("0", None), "no worker beyond the slots"
    turn = send(core, spec("batch", submitter="carol"), spec("b", qos=hasty, submitter="bob"), spec("a", qos=hasty))
    of_owner, of_bob = sorted(turn.orders["m"], key=lambda order: order.task_id)[:2]
    assert of_owner.target is not None
    assert of_owner.target.max_weight is None
    assert of_bob.target is not None
    assert of_bob.target.max_weight == 200.0
    assert ids(finish(core, "0").orders["m"])[0] == "batch", "the turn is that of another submitter"


def test_a_service_account_has_the_share_of_its_creator() -> None:
    core = core_of(max_weights={"bob": 200.0})
    [order] = send(core, spec("a", qos=TARGET, submitter="robot", payer="bob")).orders["m"]
    assert order.target is not None
    assert order.target.max_weight == 200.0
    assert ids(send(core, spec("x", qos=TARGET, submitter="bot-of-mallory", payer="mallory")).orders["m"]) == ["x"]


def test_only_so_many_wait_at_a_manager_and_the_less_busy_one_comes_first() -> None:
    core = core_of(latency_slots=1)
    register(core, "n", 1)
    core.progress("m", Progress(workers=1, cpu_shares=CpuSharesStatus(pressure=0.9)))
    assert list(send(core, spec("first", qos=TARGET)).orders) == ["n"]
    turn = send(core, *(spec(f"{number}", qos=TARGET) for number in range(30)))
    assert sum(map(len, turn.orders.values())) == 17
    finish(core, "first", manager="n")


def test_a_class_moves_to_a_node_that_can_hold_its_target() -> None:
    core = core_of(latency_slots=9)
    register(core, "n", 2)
    [task] = send(core, spec("first", qos=TARGET)).orders["m"]
    assert task.target is not None
    late = WeightOfClass(task.target.name, 2000.0, NEEDS_CPU)
    core.progress("m", Progress(workers=1, cpu_shares=CpuSharesStatus((late,))))
    turn = send(core, *(spec(f"{number}", qos=TARGET) for number in range(4)))
    assert {manager: len(tasks) for manager, tasks in turn.orders.items()} == {"n": 2, "m": 2}, "n has two workers"
    finish(core, "0", manager="n")
    assert list(send(core, spec("other", qos=QoS(target_ms=900))).orders) == ["m"], "it has most free workers"
    core.progress("m", Progress(workers=1, cpu_shares=CpuSharesStatus((WeightOfClass(task.target.name, 2000.0, ""),))))
    assert list(send(core, spec("third", qos=TARGET)).orders) == ["m"]


def test_where_no_manager_has_workers_for_them_they_come_first_in_the_queue() -> None:
    core = core_of(latency_slots=0)
    send(core, spec("a"), spec("b"))
    assert send(core, spec("urgent", qos=TARGET), spec("later", qos=TARGET)).orders == {}
    assert ids(finish(core, "a").orders["m"]) == ["urgent", "later"]
    assert ids(finish(core, "urgent").orders["m"]) == ["b"]


def test_the_time_that_a_task_has_waited_here_counts() -> None:
    core = core_of()
    core.manager_lost("m", "it died")
    send(core, spec("a", qos=TARGET), now=1.0)
    register(core, "n", 2)
    [task] = core.decide(now=6.0).orders["n"]
    assert task.target is not None
    assert task.target.waited_s == 5.0


def test_one_that_comes_while_no_manager_takes_tasks_still_gets_a_worker_of_its_own() -> None:
    core = core_of()
    core.add(ev.ManagersDraining(["m"]))
    assert not send(core, spec("a", qos=TARGET)).orders
    send(core, spec("b", qos=TARGET))
    core.add(ev.CancelRequested(("a",)))
    core.add(ev.ManagersDraining([]))
    [task] = core.decide(now=1.0).orders["m"]
    assert (task.task_id, task.is_latency) == ("b", True)


def test_one_that_may_not_run_twice_waits_behind_no_other() -> None:
    core = core_of(latency_slots=1)
    tasks = [spec(name, qos=TARGET, idempotent=False) for name in "ab"]
    assert ids(send(core, *tasks).orders["m"]) == ["a"]
    assert ids(finish(core, "a").orders["m"]) == ["b"]


def test_tasks_of_a_lost_manager_go_to_the_next_one() -> None:
    core = core_of()
    send(core, spec("batch"), spec("a", qos=TARGET), spec("b", qos=TARGET))
    core.manager_lost("m", "it died")
    core.decide(now=1.0)
    register(core, "n", 2)
    assert sorted(ids(core.decide(now=2.0).orders["n"])) == ["a", "b", "batch"]


def test_a_batch_task_that_ends_its_managers_is_given_up_and_calls_behind_it_are_not() -> None:
    core = core_of(latency_slots=1)
    send(core, spec("ends it"), *(spec(f"{number}", qos=TARGET) for number in range(9)))
    for number in range(30):
        core.manager_lost("m" if not number else f"m{number}", "it died")
        core.decide(now=1.0 + number)
        register(core, f"m{number + 1}", 1)
        core.decide(now=1.5 + number)
        task = core.core.task("ends it")
        assert task is not None
        if task.result is not None:
            break
    assert task is not None
    assert task.result is not None
    assert task.result.state is TaskState.FAILED
    last = core.core.task("8")
    assert last is not None
    assert last.result is None


def test_a_baseline_call_that_had_to_wait_counts_with_its_run() -> None:
    core = core_of()
    send(core, spec("a", qos=QoS(is_baseline=True)))
    finished = Finished("a", TaskState.SUCCESS, 0, None, 3600.0, 3600.1)
    core.progress("m", Progress(workers=1, finished=(finished,)), [b"r"])
    core.decide(now=3600.0)
    assert dict(core.core.baselines() or {}) == pytest.approx({f"{HASH}:": 0.1})


def test_a_multiple_of_the_baseline_is_a_target_once_that_is_known() -> None:
    slow = QoS(max_slowdown=3)
    core = core_of()
    [task] = send(core, spec("a", qos=slow)).orders["m"]
    assert task.target is None
    finish(core, "a")
    for number in range(5):
        name = f"measure-{number}"
        send(core, spec(name, qos=QoS(is_baseline=True)), now=10.0 * number)
        finished = Finished(name, TaskState.SUCCESS, 0, None, 0.0, 0.5, start_s=8.0 if number == 0 else 0.0)
        core.progress("m", Progress(workers=1, finished=(finished,)), [b"r"])
        core.decide(now=10.0 * number + (9.0 if number == 0 else 1.0))
    assert dict(core.core.baselines() or {}) == pytest.approx({f"{HASH}:": 1.0})
    core.core.baselines_kept()
    assert core.core.baselines() is None, "nothing has changed"
    [task] = send(core, spec("b", qos=slow), now=60.0).orders["m"]
    assert task.target is not None
    assert task.target.latency_s == pytest.approx(3.0)


def test_baselines_and_weights_of_the_owner_are_known_after_a_restart() -> None:
    core = core_of(baselines={f"{HASH}:": 0.5}, policy="static", weights={"f": 300.0})
    [task] = send(core, spec("a", qos=QoS(max_slowdown=2))).orders["m"]
    assert task.target is not None
    assert (task.target.latency_s, task.target.expected_s, task.target.weight) == (1.0, 0.5, 300.0)


def test_what_managers_say_is_in_the_report() -> None:
    core = core_of()
    [task] = send(core, spec("a", qos=TARGET)).orders["m"]
    assert task.target is not None
    shares = CpuSharesStatus((WeightOfClass(task.target.name, 900.0, NEEDS_CPU),), "cgroup v1", "", 0.4)
    finished = Finished("a", TaskState.SUCCESS, 0, None, 0.0, 0.5)
    core.progress("m", Progress(workers=1, finished=(finished,), cpu_shares=shares), [b"r"])
    core.decide(now=1.0)
    found = core.core.report().detail["qos"]
    assert (found["policy"], found["actuator"], found["admission"]) == ("pi", "cgroup v1", "warn")
    [row] = found["functions"]
    assert (row["weight"], row["windows"]["10m"]["violations"]) == (900.0, 1)
    assert row["infeasible"]["fix"].startswith("Use more nodes")
    about = core.core.latency_targets()
    assert (about["latency_classes"], about["latency_actuator"]) == (1, "cgroup v1")
    assert about["latency_needs"].endswith("or a looser target")
    core.manager_lost("m", "it died")
    core.decide(now=2.0)
    assert core.core.latency_targets() == {}
