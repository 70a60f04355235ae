"""The controller of a node: which latency it sees, what it does when targets cannot be held, and its limits."""

from __future__ import annotations

import math
from typing import Any

import pytest

from farcall_endpoint.config.settings import DEFAULT_WEIGHT, QosSettings
from farcall_endpoint.contracts.agent_manager import OrderTarget
from farcall_endpoint.qos.controller import BATCH, NEEDS_CPU, NEEDS_LOOSER, NEEDS_WORKERS, Controller

TARGET = OrderTarget("f", 0.1, 90.0, expected_s=0.05, weight=300.0)


def decide(controller: Controller, now: float, *, pressure: float = 0.5, workers: int = 4) -> dict[str, float]:
    return dict(controller.decide(now, pressure=pressure, others=1, workers=workers))


def run(controller: Controller, latency_s: float, *, start: float = 0.0, seconds: int = 20, **given: Any) -> float:
    """The weight after tasks that took so long."""
    weights: dict[str, float] = {}
    for number in range(4 * seconds):
        now = start + number / 4
        controller.add(f"{now}", TARGET, now - latency_s)
        controller.ended(f"{now}", now, min(latency_s / 2, 0.05))
        weights = decide(controller, now, **given)
    return weights["f"]


def test_a_class_whose_tasks_are_late_gets_more_and_then_less() -> None:
    controller = Controller(QosSettings())
    high = run(controller, 0.3)
    assert high > 5 * DEFAULT_WEIGHT
    assert run(controller, 0.02, start=100.0) < high / 2


def test_a_baseline_that_becomes_known_counts() -> None:
    controller = Controller(QosSettings(policy="threshold"))
    controller.add("a", OrderTarget("f", 0.1, 90.0), 0.0)
    controller.add("b", TARGET, 0.0)
    assert controller.classes["f"].target.expected_s == 0.05
    assert list(controller.classes["f"].pending) == ["a", "b"]


def test_a_task_that_does_not_end_counts_as_soon_as_it_is_late() -> None:
    controller = Controller(QosSettings())
    controller.add("a", TARGET, 0.0)
    assert decide(controller, 0.09) == pytest.approx({"f": DEFAULT_WEIGHT, BATCH: DEFAULT_WEIGHT})
    assert decide(controller, 0.3)["f"] > DEFAULT_WEIGHT
    assert controller.due_time("a") == pytest.approx(0.1)


def test_tasks_that_will_be_late_count_before_they_are() -> None:
    controller = Controller(QosSettings())
    controller.add("first", TARGET, 0.0)
    controller.ended("first", 0.06, 0.06)
    for number in range(10):
        controller.add(f"{number}", TARGET, 1.0)
    assert decide(controller, 1.01, workers=10)["f"] == pytest.approx(DEFAULT_WEIGHT)
    assert decide(controller, 1.02, workers=2)["f"] > DEFAULT_WEIGHT


def test_the_time_at_the_agent_counts() -> None:
    controller = Controller(QosSettings())
    controller.add("a", OrderTarget("f", 0.1, 90.0, waited_s=5.0), 10.0)
    assert controller.due_time("a") == pytest.approx(5.1)
    controller.add("b", OrderTarget("f", 0.1, 90.0, waited_s=-5.0), 10.0)
    assert controller.due_time("b") == pytest.approx(10.1)


@pytest.mark.parametrize(("policy", "weight"), [("static", 300.0), ("threshold", 100 * (512 + 20 * 80) / 512)])
def test_other_policies(policy: Any, weight: float) -> None:
    assert run(Controller(QosSettings(policy=policy)), 0.3) == pytest.approx(weight)


def test_short_first_orders_by_length_and_by_age() -> None:
    controller = Controller(QosSettings(policy="short-first"))
    short, long = OrderTarget("short", 9.0, 95.0, expected_s=0.1), OrderTarget("long", 0.2, 95.0, expected_s=1.0)
    controller.add("long", long, 0.0)
    controller.add("soon", short, 8.0)
    controller.add("later", short, 10.0)
    assert sorted(["long", "soon", "later"], key=controller.urgency) == ["soon", "long", "later"]
    controller.ended("soon", 8.5, 0.5)
    assert controller.urgency("later") == pytest.approx(15.0), "what was measured counts"


def short_first(*names: str, processors: int = 2, latency_s: float = 1.0) -> Controller:
    """A controller with a waiting task of each class, whose submitters are the first letters."""
    controller = Controller(QosSettings(policy="short-first"))
    for name in names:
        controller.add(name, OrderTarget(name, latency_s, 95.0), 0.0, submitter=name[0])
    controller.measured({}, {}, processors)
    return controller


def test_short_first_runs_one_task_for_each_processor() -> None:
    assert short_first("f", processors=0).places("f", {}, 8, 0.0) == 8, "the number of processors is not known"
    controller = short_first("f", "g")
    assert controller.places("f", {}, 8, 0.0) == 2
    assert controller.places("f", {"g": 1}, 8, 0.0) == 1
    assert controller.places("f", {"g": 2}, 8, 0.0) == 0
    controller.measured({}, {}, 0)
    assert controller.places("f", {"g": 2}, 8, 0.0) == 0, "a failed measurement changes nothing"
    for _ in range(50):  # tasks that mostly wait for something else
        controller.measured({"f": 0.5}, {"f": 2}, 2)
    assert controller.places("f", {"f": 2}, 8, 0.0) == 6
    for _ in range(50):  # tasks with more threads than there are processors
        controller.measured({"f": 16.0}, {"f": 2}, 2)
    assert controller.places("f", {}, 8, 0.0) == 1
    assert controller.places("g", {"f": 1}, 8, 0.0) == 0


def test_short_first_starts_what_is_late_otherwise_beyond_the_processors_but_not_everything() -> None:
    controller = short_first("a1", "a2", "a3", "a4", "b1")
    assert controller.places("a2", {"a1": 2}, 8, 0.5) == 0
    assert controller.places("a2", {"a1": 2}, 8, 1.0) == 1, "it must start now"
    assert controller.places("a2", {"a1": 2, "a2": 1}, 8, 1.0) == 0, "one of a class"
    assert controller.places("a4", {"a1": 2, "a2": 1, "a3": 1}, 8, 1.0) == 0, "twice the processors"
    assert controller.places("b1", {"a1": 2, "a2": 1, "a3": 1}, 8, 0.5) == 0
    assert controller.places("b1", {"a1": 2, "a2": 1, "a3": 1}, 8, 1.0) == 1, "another submitter"
    controller.ended("b1", 0.4, 0.4)
    controller.add("b2", OrderTarget("b1", 1.0, 95.0), 1.0, submitter="b")
    assert [controller.places("b1", {"a1": 4}, 8, now) for now in (1.5, 1.6)] == [0, 1], "it runs for 0.4 s"


def test_the_policy_none_sets_nothing() -> None:
    controller = Controller(QosSettings(policy="none"))
    controller.add("a", TARGET, 0.0)
    assert decide(controller, 1.0) == {}


@pytest.mark.parametrize(
    ("given", "problem"),
    [({}, NEEDS_CPU), ({"pressure": 0.0}, NEEDS_LOOSER), ({"workers": 0}, NEEDS_WORKERS)],
    ids=["cpu", "looser", "workers"],
)
def test_what_a_target_needs_is_said_once_it_is_missed_for_long(given: dict[str, Any], problem: str) -> None:
    controller = Controller(QosSettings())
    controller.add("waits", TARGET, 0.0)
    run(controller, 0.5, seconds=5, **given)
    assert [each.problem for each in controller.report()] == [""]
    run(controller, 0.5, start=5.0, **given)
    assert [each.problem for each in controller.report()] == [problem]
    controller.drop("waits", 30.0)
    run(controller, 0.05, start=100.0, **given)
    assert [each.problem for each in controller.report()] == [""]


def test_a_target_below_what_the_function_takes_is_known_after_a_few_runs() -> None:
    controller = Controller(QosSettings())
    for number in range(5):
        controller.add(f"{number}", TARGET, float(number))
        controller.ended(f"{number}", number + 0.2, 0.15)
    decide(controller, 5.0)
    assert [each.problem for each in controller.report()] == [NEEDS_LOOSER]
    decide(controller, 60.0)
    assert [each.problem for each in controller.report()] == [NEEDS_LOOSER], "others may be refused meanwhile"
    decide(controller, 70.0)
    assert [each.problem for each in controller.report()] == [""]


def test_a_submitter_has_16_classes_at_most_and_unused_ones_make_room() -> None:
    controller = Controller(QosSettings())
    for number in range(16):
        assert controller.add(f"t{number}", OrderTarget(f"f{number}", 1.0, 90.0), 0.0, submitter="a")
    assert not controller.add("one more", OrderTarget("more", 1.0, 90.0), 1.0, submitter="a")
    assert not controller.has("one more")
    assert controller.add("of another", OrderTarget("g", 1.0, 90.0), 1.0, submitter="b")
    controller.ended("t7", 2.0, 1.0)
    assert controller.add("one more", OrderTarget("more", 1.0, 90.0), 3.0, submitter="a")
    assert ("f7" in controller.classes, "g" in controller.classes, len(controller.classes)) == (False, True, 17)
    for number in range(10_000):
        controller.drop("one more", 4.0)
        assert controller.add("one more", OrderTarget(f"more{number}", 1.0, 90.0), 4.0, submitter="a")
    assert len(controller.classes) == 17
    for number in range(1000):
        controller.add(f"u{number}", OrderTarget(f"u{number}", 1.0, 90.0), 5.0, submitter=f"{number}")
    assert len(controller.classes) == 128


def test_a_target_changes_with_the_baseline() -> None:
    controller = Controller(QosSettings())
    controller.add("a", OrderTarget("f", 3.0, 90.0), 0.0)
    controller.add("b", OrderTarget("f", 0.3, 90.0), 0.0)
    assert controller.classes["f"].target.latency_s == 0.3
    assert controller.add("c", OrderTarget("f", -1.0, 90.0), 0.0) is False


def test_a_call_that_hangs_or_was_stopped_counts_once() -> None:
    controller = Controller(QosSettings())
    controller.add("hangs", TARGET, 0.0)
    assert run(controller, 0.05, start=100.0) < 2 * DEFAULT_WEIGHT
    assert [each.problem for each in controller.report()] == [""]
    controller.add("stopped", TARGET, 200.0)
    controller.drop("stopped", 201.0)
    assert decide(controller, 201.1)["f"] > DEFAULT_WEIGHT


def test_a_class_is_forgotten_after_a_while_and_then_nothing_is_due() -> None:
    controller = Controller(QosSettings())
    assert controller.due_at == math.inf
    controller.add("a", TARGET, 0.0)
    assert controller.due_at == 0.0
    controller.ended("a", 1.0, 0.5)
    assert decide(controller, 500.0).keys() == {"f", BATCH}
    assert decide(controller, 700.0).keys() == {BATCH}
    assert controller.due_at == math.inf


@pytest.mark.parametrize("latency_s", [0.0, -1.0, math.nan, math.inf])
def test_a_target_that_makes_no_sense_is_batch_work(latency_s: float) -> None:
    controller = Controller(QosSettings())
    assert not controller.add("a", OrderTarget("f", latency_s, 90.0), 0.0)
    assert not controller.classes


def test_a_clock_that_steps_and_times_that_a_task_forges_change_little() -> None:
    controller = Controller(QosSettings())
    for run_s in (math.nan, -5.0, 1e18, math.inf):
        controller.add("a", TARGET, 1.0)
        controller.ended("a", 1.05, run_s)
    controller.ended("unknown", 1.0, 1.0)
    decide(controller, 1.0)
    assert decide(controller, 0.5)["f"] == pytest.approx(DEFAULT_WEIGHT, rel=0.5)
    mean_s = controller.run_s("f")
    assert mean_s is not None
    assert 0 <= mean_s <= 0.05


def test_no_more_tasks_run_than_the_processors_can_compute() -> None:
    controller = Controller(QosSettings())
    assert controller.most_running("f", 8) == 8
    controller.add("a", TARGET, 0.0)
    for _ in range(30):
        controller.measured({"f": 3.9}, {"f": 4}, 2)
    assert controller.most_running("f", 8) == 2, "each of them computes"
    for _ in range(60):
        controller.measured({"f": 0.5}, {"f": 4}, 2)
    assert controller.most_running("f", 8) == 8, "they wait for something else"
    for _ in range(60):
        controller.measured({"f": 32.0}, {"f": 4}, 2)
    assert controller.most_running("f", 8) == 1, "each of them uses all processors"
    for _ in range(4000):
        controller.measured({"f": 0.0}, {"f": 4}, 2)
    assert controller.most_running("f", 8) == 8, "however little that is"
    controller.measured({}, {}, 0)
    assert controller.most_running("f", 8) == 8, "the number of processors is not known"


def _of(name: str, payer: str, max_weight: float | None, *, latency_s: float = 0.001) -> tuple[str, OrderTarget]:
    return payer, OrderTarget(name, latency_s, 95.0, max_weight=max_weight)


def _divided(*targets: tuple[str, OrderTarget], met: bool, seconds: int = 60) -> dict[str, float]:
    """The part of the processors of each class and of batch work, after calls that are late but perhaps the first."""
    controller, weights = Controller(QosSettings()), dict[str, float]()
    for number in range(4 * seconds):
        now = float(number) / 4
        for payer, each in targets:
            took_s = each.latency_s / 2 if met and not number else 0.5
            controller.add(f"{each.name}{number}", each, now - took_s, submitter=each.name, payer=payer)
            controller.add(f"{each.name}{number} waits", each, now, submitter=each.name, payer=payer)
            controller.ended(f"{each.name}{number}", now, took_s)
        weights = dict(controller.decide(now, pressure=1.0, others=1, workers=16))
    total = sum(weights.values())
    return {name: weight / total for name, weight in weights.items()}


def test_a_target_of_another_submitter_that_was_never_held_takes_no_more_than_batch_work() -> None:
    divided = _divided(_of("mallory", "mallory", 2000.0), met=False)
    assert divided[BATCH] >= 0.5
    assert _divided(_of("alice", "", None), met=False)[BATCH] < 0.1, "the owner decides about the processors"


@pytest.mark.parametrize("classes", [1, 2, 6])
def test_processors_are_divided_by_submitter_before_targets(classes: int) -> None:
    own = [_of(f"m{number}", "mallory", 200.0) for number in range(classes)]
    divided = _divided(*own, _of("bob", "bob", 200.0), met=True)
    assert divided["bob"] == pytest.approx(0.4)
    assert divided[BATCH] == pytest.approx(0.2)


def test_service_accounts_share_the_weight_of_their_creator() -> None:
    divided = _divided(*(_of(f"robot{number}", "mallory", 100.0) for number in range(4)), met=True)
    assert divided[BATCH] == pytest.approx(0.5)
