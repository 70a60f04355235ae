"""Tasks with a latency target at a manager: their workers, their order, and what becomes of them."""

from __future__ import annotations

from typing import Any

import pytest

from farcall_common.task_options import TaskOptions
from farcall_common.wire import TaskState
from farcall_endpoint.config.settings import QosSettings
from farcall_endpoint.contracts.agent_manager import CancelTasks, CpuSharesStatus, OrderTarget, TaskOrder
from farcall_endpoint.manager.core.actions import Action, Adopt, Launch, ShareCpus, Warn
from farcall_endpoint.manager.core.events import CpusMeasured, Job, TasksReceived
from farcall_endpoint.qos.controller import BATCH
from tests.support.manager import Rig, done, ready

TARGET = OrderTarget("f", 1.0, 95.0)


def rig_of(*, slots: int = 1, latency_workers: int = 2, **options: Any) -> Rig:
    rig = Rig(slots=slots, latency_workers=latency_workers, **options)
    rig.start_all()
    return rig


def job(name: str, target: OrderTarget | None = TARGET, *, submitter: str = "", payer: str = "", **options: Any) -> Job:
    order = TaskOrder(name, 1, "h", 0, TaskOptions(**options), submitter=submitter, target=target, payer=payer)
    return Job(order, b"body", b"payload")


def receive(rig: Rig, *jobs: Job) -> list[Action]:
    return rig.handle(TasksReceived(jobs))


def of(kind: type[Any], actions: list[Action]) -> list[Any]:
    return [action for action in actions if isinstance(action, kind)]


def ahead(rig: Rig) -> dict[int, list[str]]:
    return {worker_id: worker.ahead for worker_id, worker in rig.workers.items() if worker.ahead}


def test_a_task_with_a_target_gets_an_idle_worker_and_another_one_starts_in_its_place() -> None:
    rig = rig_of()
    actions = receive(rig, job("a"))
    assert of(Adopt, actions) == [Adopt(0, "f")]
    assert [(each.worker_id, each.target) for each in of(Launch, actions)] == [(1, "")]
    assert ahead(rig) == {0: ["a"]}


def test_it_does_not_wait_for_batch_work() -> None:
    rig = rig_of()
    rig.jobs("batch-1", "batch-2")
    assert [each.target for each in of(Launch, receive(rig, job("a")))] == ["f"]
    rig.handle(ready(1))
    assert ahead(rig) == {0: ["batch-1"], 1: ["a"]}
    rig.done(0)
    assert ahead(rig) == {0: ["batch-2"], 1: ["a"]}


def test_batch_work_does_not_run_on_its_workers() -> None:
    rig = rig_of()
    receive(rig, job("a"))
    rig.done(0)
    rig.handle(ready(1))
    rig.jobs("batch-1", "batch-2")
    assert ahead(rig) == {1: ["batch-1"]}


def test_there_are_no_more_workers_than_the_owner_permits() -> None:
    rig = rig_of(latency_workers=2)
    rig.jobs("batch")
    actions = receive(rig, *(job(name) for name in "abcd"))
    assert len(of(Launch, actions)) == 2
    rig.handle(ready(1), ready(2))
    assert {each for names in ahead(rig).values() for each in names} == {"batch", "a", "b"}
    rig.done(1)
    assert "c" in ahead(rig)[1]


def test_what_must_end_first_comes_first() -> None:
    rig = rig_of(latency_workers=1)
    rig.jobs("batch")
    late = OrderTarget("f", 1.0, 95.0, waited_s=0.5)
    receive(rig, job("first"), job("second"), job("late", late))
    rig.handle(ready(1))
    assert [rig.done(1) for _ in range(3)] == ["late", "first", "second"]


def test_the_shortest_comes_first_on_as_many_processors_as_there_are() -> None:
    rig = rig_of(latency_workers=4, qos=QosSettings(policy="short-first"))
    rig.jobs("batch")
    short, long = OrderTarget("short", 9.0, 95.0, expected_s=0.1), OrderTarget("long", 0.1, 95.0, expected_s=1.0)
    rig.handle(CpusMeasured(processors=1))
    receive(rig, job("long-1", long), job("long-2", long), job("short-1", short), job("short-2", short))
    rig.handle(*(ready(worker_id) for worker_id in rig.workers if worker_id))
    running = ahead(rig)
    del running[0]
    assert list(running.values()) == [["short-1"]]
    [worker_id] = running
    rig.done(worker_id)
    assert [each for names in ahead(rig).values() for each in names if each != "batch"] == ["short-2"]


def test_who_runs_fewest_comes_first_even_if_another_one_is_shorter() -> None:
    rig = rig_of(latency_workers=4, qos=QosSettings(policy="short-first"))
    rig.jobs("batch")
    short, long = OrderTarget("m", 9.0, 95.0, expected_s=0.1), OrderTarget("o", 9.0, 95.0, expected_s=1.0)
    rig.handle(CpusMeasured(processors=2))
    receive(rig, job("m1", short, submitter="m"), job("m2", short, submitter="m"), job("o1", long, submitter="o"))
    rig.handle(*(ready(worker_id) for worker_id in rig.workers if worker_id))
    assert sorted(each for names in ahead(rig).values() for each in names) == ["batch", "m1", "o1"]


def test_classes_that_are_held_back_leave_a_worker_to_one_that_has_none() -> None:
    rig = rig_of(latency_workers=2, qos=QosSettings(policy="short-first"))
    rig.jobs("batch")
    rig.handle(CpusMeasured(processors=1))
    day = 86_400.0
    receive(rig, job("endless", OrderTarget("e1", day, 95.0), submitter="e"))
    receive(rig, job("held", OrderTarget("e2", day, 95.0), submitter="e"))
    rig.handle(ready(1), ready(2))
    assert sorted(each for names in ahead(rig).values() for each in names) == ["batch", "endless"]
    receive(rig, job("victim", OrderTarget("v", 0.2, 95.0), submitter="v"))
    assert rig.killed == [2]
    rig.die(2)
    rig.now = 0.3
    rig.handle(ready(3))
    assert "victim" in ahead(rig)[3]


def test_the_submitter_with_the_fewest_workers_gets_the_next_one() -> None:
    rig = rig_of(latency_workers=2)
    rig.jobs("batch")
    mine, other = OrderTarget("mine", 0.01, 95.0), OrderTarget("other", 9.0, 95.0)
    receive(rig, job("a", mine, submitter="m"), job("b", mine, submitter="m"), job("c", other, submitter="o"))
    assert sorted(worker.pair.target for worker in rig.core._workers.values()) == ["", "mine", "other"]


@pytest.mark.parametrize("payer", ["", "m"])
def test_service_accounts_of_one_payer_get_latency_workers_as_one_submitter(payer: str) -> None:
    rig = rig_of(latency_workers=3)
    rig.jobs("batch")
    hasty, other = OrderTarget("hasty", 0.01, 95.0), OrderTarget("other", 9.0, 95.0)
    receive(
        rig,
        job("a", hasty, submitter="m1", payer=payer),
        job("b", OrderTarget("i", 0.02, 95.0), submitter="m1", payer=payer),
    )
    rig.handle(*(ready(worker_id) for worker_id in rig.workers if worker_id))
    receive(rig, job("c", OrderTarget("j", 0.01, 95.0), submitter="m2", payer=payer), job("d", other, submitter="o"))
    targets = {worker.pair.target for worker in rig.core._workers.values()} - {"", "hasty", "i"}
    assert targets == ({"other"} if payer else {"j"})


def test_an_idle_worker_makes_room_for_a_class_without_one() -> None:
    rig = rig_of(latency_workers=1)
    rig.jobs("batch")
    receive(rig, job("a"))
    rig.handle(ready(1))
    rig.done(1)
    receive(rig, job("b", OrderTarget("g", 1.0, 95.0)))
    assert rig.killed == [1]
    rig.die(1)
    rig.handle(ready(2))
    assert ahead(rig)[2] == ["b"]


def test_a_class_without_a_worker_gets_its_turn_beside_one_that_always_has_tasks() -> None:
    rig = rig_of(latency_workers=1)
    rig.jobs("batch")
    receive(rig, *(job(f"{number}") for number in range(50)), job("other", OrderTarget("g", 9.0, 95.0)))
    rig.handle(ready(1))
    ended = [rig.done(1)]
    rig.now = 2.0
    ended.append(rig.done(1))
    assert rig.killed == [1]
    rig.die(1)
    rig.handle(ready(2))
    assert ahead(rig)[2] == ["other"]
    rig.now = 4.0
    assert rig.done(2) == "other"
    rig.die(2)
    rig.handle(ready(3))
    assert ahead(rig)[3] == ["2"]


def test_workers_without_tasks_end_after_a_while() -> None:
    rig = rig_of()
    rig.jobs("batch")
    receive(rig, job("a"))
    rig.handle(ready(1))
    rig.done(1)
    rig.now = 299.0
    rig.handle()
    assert rig.killed == []
    rig.now = 301.0
    rig.handle()
    assert rig.killed == [1]
    rig.die(1)
    rig.handle()
    assert len(rig.core._assignment.free_slots) == 0, "it had no slot"


def test_without_workers_of_their_own_they_come_before_batch_work_in_order() -> None:
    rig = rig_of(latency_workers=0)
    rig.jobs("running", "batch")
    receive(rig, job("a"), job("late", OrderTarget("f", 1.0, 95.0, waited_s=0.5)), job("b"))
    assert [rig.done(0) for _ in range(5)] == ["running", "late", "a", "b", "batch"]
    assert of(ShareCpus, rig.handle()) == []


def test_cancelled_tasks_leave_the_queue_and_the_controller() -> None:
    rig = rig_of(latency_workers=1)
    rig.jobs("batch")
    receive(rig, job("a"), job("b"))
    rig.handle(CancelTasks(("b",)))
    assert [(each.task_id, each.state) for each in rig.progress().finished] == [("b", TaskState.CANCELLED)]
    controller = rig.core._latency.controller
    assert (controller.has("a"), controller.has("b")) == (True, False)
    rig.handle(ready(1))
    rig.read(1)
    rig.die(1)
    assert [each.task_id for each in rig.progress().died] == ["a"]
    assert not controller.has("a")


def test_weights_follow_the_latency_and_are_reported() -> None:
    rig = rig_of()
    rig.jobs("batch")
    rig.handle(CpusMeasured(0.5, "cgroup v1"))
    receive(rig, job("a", OrderTarget("f", 0.1, 95.0)))
    rig.handle(ready(1))
    rig.read(1)
    weights = 0.0
    for number in range(1, 20):
        rig.now = number / 4
        for action in of(ShareCpus, rig.handle()):
            assert action.weights[BATCH] == 100.0
            assert action.running == {BATCH: 1, "f": 1}
            weights = action.weights["f"]
    assert weights > 500.0
    reported = [each.progress.cpu_shares for each in rig.reports if each.progress.cpu_shares is not None]
    assert isinstance(reported[-1], CpuSharesStatus)
    assert (reported[-1].actuator, reported[-1].classes[0].name) == ("cgroup v1", "f")
    assert reported[-1].classes[0].weight > 500.0
    assert len(reported) <= 7, "once a second at most"


def test_a_policy_that_fails_changes_no_weight_and_starts_again(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = rig_of()
    rig.jobs("batch")

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("a defect")

    receive(rig, job("a"))
    monkeypatch.setattr(rig.core._latency.controller._policy, "weights", fail)
    rig.now = 1.0
    actions = rig.handle()
    assert [each.text.endswith("RuntimeError: a defect") for each in of(Warn, actions)] == [True]
    assert of(ShareCpus, actions) == []
    rig.now = 2.0
    assert len(of(ShareCpus, rig.handle())) == 1


def test_the_start_that_a_task_waited_for_is_reported() -> None:
    rig = rig_of()
    rig.jobs("batch")
    receive(rig, job("a"))
    rig.now = 0.4
    rig.handle(ready(1))
    rig.handle(done(1, "a"))
    rig.done(0)
    found = {each.task_id: each.start_s for each in rig.progress().finished}
    assert found == {"a": pytest.approx(0.4), "batch": 0.0}


def test_short_tasks_wait_behind_others_only_for_a_part_of_their_target() -> None:
    rig = rig_of(latency_workers=1, prefetch=50, qos=QosSettings())
    rig.jobs("batch")
    receive(rig, *(job(f"{number}", OrderTarget("f", 0.1, 95.0)) for number in range(30)))
    rig.handle(ready(1))
    assert ahead(rig)[1] == ["0"]
    rig.now = 0.001
    rig.done(1, duration_s=0.001)
    assert len(ahead(rig)[1]) == 11
